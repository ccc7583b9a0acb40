"""The draft's positions against the context that is served."""

from __future__ import annotations

from collections.abc import Iterator

from sglang_eagle3_plugin.doctor.deployment import Deployment, mapping
from sglang_eagle3_plugin.doctor.findings import Finding

_TEMPLATE = 2048
"""What heads and templates carry when nobody chose a length."""


def check(d: Deployment) -> Iterator[Finding]:
    """Find a draft whose position table is shorter than the served context."""
    if d.draft is None or not d.draft.max_positions:
        return
    mine = d.draft.max_positions
    asked = d.flags.number("--context-length", 0)
    served = asked or (d.target.max_positions if d.target else None) or 0
    if (served and mine >= served) or (not served and mine > _TEMPLATE):
        return
    against = d.of_flag("--context-length") if asked else d.target.says("max_position_embeddings") if d.target else d.of_release()
    goal = served or 40960
    yield Finding(
        "WARN_MAXPOS",
        f"The draft config says max_position_embeddings {mine}"
        + (f", and {served} positions are served" if served else ", a template's value that targets exceed as a rule")
        + ". SGLang refuses to start, or with SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1 reads beyond the rotary table; a draft "
        "trained "
        f"short predicts badly beyond {mine} in any case.",
        (d.draft.says("max_position_embeddings"), against),
        f"Set max_position_embeddings to {goal} in a copy of the draft config (--fix-config writes one), or serve with "
        f"--context-length {mine}. If it was trained on {mine} positions, expect acceptance to fall beyond them.",
        ("FIXABLE_BY_OVERRIDE", "FIXABLE_BY_FLAG"),
        "certain" if served else "likely",
        {"max_position_embeddings": goal},
    )


def check_rope(d: Deployment) -> Iterator[Finding]:
    """Note a multimodal target with sectioned rotary positions (mRoPE) and a draft without."""
    if d.draft is None or d.target is None:
        return
    theirs = mapping(d.target.text.get("rope_scaling")) or mapping(d.target.text.get("rope_parameters"))
    mine = mapping(d.draft.text.get("rope_scaling")) or mapping(d.draft.text.get("rope_parameters"))
    if "mrope_section" in theirs and "mrope_section" not in mine:
        yield Finding(
            "INFO_MROPE",
            "The target has sectioned rotary positions (mRoPE) and the draft has not: fine for text, worse after images, unless "
            "it was "
            "trained so.",
            (d.target.says("rope_scaling"), d.draft.says("rope_scaling")),
        )
