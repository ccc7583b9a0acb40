"""The widths that meet at the draft's `fc`: what is fed, what it takes, and when SGLang skips it without a word."""

from __future__ import annotations

from collections.abc import Iterator

from sglang_eagle3_plugin.doctor.deployment import Deployment, whole
from sglang_eagle3_plugin.doctor.findings import Finding


def factors(width: int, hidden: int, depth: int | None = None) -> str:
    """Say what a width is made of: ``21504 = 3 x 7168``, and what that many states means."""
    if not hidden or width % hidden:
        return f"{width}, no multiple of {hidden}"
    count = width // hidden
    meaning = ""
    if count == 1:
        meaning = " (the last state alone: nothing was captured, and fc is skipped)"
    elif depth and count == depth + 1:
        meaning = " (all layers and the embeddings: output_hidden_states is on)"
    elif depth and count == depth:
        meaning = " (all layers)"
    elif count == 2:
        meaning = " (two states: one capture lost)"
    return f"{width} = {count} x {hidden}{meaning}"


def check_fc(d: Deployment) -> Iterator[Finding]:
    """Find an `fc` whose shape does not fit what it will be fed."""
    w = d.wiring
    if d.draft is None or w.fc is None or not w.aux:
        return
    found = d.draft.tensor("fc.weight")
    assert found is not None
    out, wide = w.fc
    hidden, each = d.draft.hidden_size, w.fed_each
    depth = d.target.num_layers if d.target else None
    if hidden and out != hidden:
        yield Finding(
            "ERR_FC_WIDTH",
            f"fc gives {out} values, and the draft's hidden_size is {hidden}.",
            (d.draft.holds(found), d.draft.says("hidden_size")),
            f"Set hidden_size to {out} in the draft config, if the other tensors agree.",
        )
    if not each:
        return
    if wide % each:
        yield Finding(
            "ERR_FC_WIDTH",
            f"fc takes {factors(wide, each)}, the width of one state of the target: the draft is of another target, or damaged.",
            (d.draft.holds(found), *((d.target.says("hidden_size"),) if d.target else ())),
            "Use the draft that was trained for this target.",
        )
    elif d.flags.algorithm in ("EAGLE", "NEXTN"):
        yield Finding(
            "ERR_FC_WIDTH",
            f"fc takes {factors(wide, each)}, and with --speculative-algorithm {d.flags.algorithm} it is fed "
            f"{factors(each, each)}.",
            (d.draft.holds(found), d.of_flag("--speculative-algorithm")),
            f"Use --speculative-algorithm EAGLE3, so that {factors(wide, each, depth)} is fed.",
            ("FIXABLE_BY_FLAG",),
        )
    elif hidden and wide == hidden:
        yield Finding(
            "ERR_FC_SKIPPED",
            f"fc takes {factors(wide, each)}, which equals the width of the draft's embeddings: SGLang takes that for a state "
            f"already "
            "projected and never calls fc.",
            (d.draft.holds(found), d.draft.says("hidden_size")),
            "Train with another number of auxiliary states, or another draft width.",
        )


def check_sizes(d: Deployment) -> Iterator[Finding]:
    """Find hidden sizes in the two configs that contradict each other."""
    if d.draft is None or d.target is None or not d.target.hidden_size:
        return
    target = d.target.hidden_size
    stated = whole(d.draft.config.get("target_hidden_size"))
    if stated and stated != target:
        yield Finding(
            "ERR_HIDDEN_SIZE",
            f"The draft was made for states of width {stated} (target_hidden_size), and the target's are {target} wide.",
            (d.draft.says("target_hidden_size"), d.target.says("hidden_size")),
            "Use the draft that was trained for this target.",
        )
    elif not stated and d.draft.hidden_size and d.draft.hidden_size != target:
        fits = d.wiring.fc is not None and d.wiring.fc[1] % target == 0
        yield Finding(
            "ERR_HIDDEN_SIZE",
            f"The draft's hidden_size is {d.draft.hidden_size}, the target's {target}, and the draft config states no "
            "target_hidden_size: SGLang takes the two to be one.",
            (d.draft.says("hidden_size"), d.target.says("hidden_size")),
            f"Set target_hidden_size to {target} in the draft config."
            if fits
            else "Use the draft that was trained for this target.",
            ("FIXABLE_BY_OVERRIDE",) if fits else (),
            changes={"target_hidden_size": target} if fits else {},
        )
