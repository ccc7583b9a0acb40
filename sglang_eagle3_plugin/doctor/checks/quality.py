"""When nothing is miswired: what a low acceptance length then means. Runs after the other checks."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_eagle3_plugin.doctor.checks.symptoms import acceptance
from sglang_eagle3_plugin.doctor.deployment import Deployment
from sglang_eagle3_plugin.doctor.findings import Evidence, Finding, verdict

_NOTHING_ACCEPTED = 1.1
"""With the EAGLE flag an EAGLE-3 draft was seen to reach 1.09; the worst drafts that are merely untrained reach 1.2."""


def conclude(d: Deployment, findings: Sequence[Finding]) -> list[Finding]:
    """Say that the wiring is right, where it is, so that nobody goes looking for a fault in it."""
    if verdict(findings) != "ok":
        return []
    seen = acceptance(d.observed) if d.observed else None
    if seen is not None and seen < _NOTHING_ACCEPTED:
        return [
            Finding(
                "WARN_NOTHING_ACCEPTED",
                f"The acceptance length was {seen:g}: next to no draft token was accepted, which little training does not "
                f"explain. What "
                "the files and flags show is in order.",
                (Evidence("observed", "acceptance length", f"{seen:g}"),),
                "Look first at the flag (EAGLE in place of EAGLE3), then at the boundaries (EAGLE3_DEBUG=1 shows what is "
                "captured), the "
                "draft's lm_head and d2t, and the tokenizer.",
                sure="likely",
            )
        ]
    if seen is not None:
        return [
            Finding(
                "OK_WIRING_LOW_QUALITY" if seen < 2.5 else "OK_WIRING",
                f"No fault of wiring is to be seen, and the acceptance length was {seen:g}. What remains is the draft's own "
                f"quality: little "
                "training data (under 500k samples), answers that the target did not write, prompts without the chat template.",
                (Evidence("observed", "acceptance length", f"{seen:g}"),),
                "sglang-eagle3 hidden-states score tells a draft that is above chance, and falls smoothly by position, from a "
                "miswired one.",
            )
        ]
    return [
        Finding(
            "MEASURE_PER_RELEASE",
            "No fault of wiring is to be seen. The acceptance length of an unchanged draft still differs between releases and "
            "engines.",
            (d.of_release(),),
            "Keep a number for each release: sglang-eagle3 bench, on fixed prompts.",
        )
    ]
