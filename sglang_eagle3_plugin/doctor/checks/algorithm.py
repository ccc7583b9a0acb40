"""The flag `--speculative-algorithm` against what the draft is.

EAGLE with an EAGLE-3 draft serves without a message: nothing is captured, the width fed equals the embedding's, so `fc` is skipped
and the draft's own head is overwritten (sglang/srt/models/llama_eagle3.py, LlamaModel.forward; PR 21272).
"""

from __future__ import annotations

from collections.abc import Iterator

from sglang_eagle3_plugin.doctor.deployment import Deployment, Model, signs_of_eagle3
from sglang_eagle3_plugin.doctor.findings import Finding

_EAGLE = ("EAGLE", "NEXTN")


def looks_like_first_eagle(draft: Model) -> bool:
    """Whether a draft is of EAGLE or EAGLE-2: `fc` takes the embedding and one state, and nothing speaks of EAGLE-3."""
    fc = draft.tensor("fc.weight")
    two = bool(fc and draft.hidden_size and len(fc[1].shape) == 2 and fc[1].shape[1] == 2 * draft.hidden_size)
    return (two or (draft.architecture or "").lower().endswith("eagle")) and not signs_of_eagle3(draft)


def check(d: Deployment) -> Iterator[Finding]:
    """Find an algorithm flag that does not fit the draft."""
    named = d.flags.algorithm
    if d.draft is None:
        return
    signs = d.signs_of_eagle3
    said = d.of_flag("--speculative-algorithm")
    if named in _EAGLE and signs:
        yield Finding(
            "ERR_FLAG_EAGLE_FOR_EAGLE3",
            f"--speculative-algorithm {named} is given, but the draft is an EAGLE-3 draft. SGLang serves without a word: it "
            f"captures no "
            "auxiliary states, never calls the draft's fc and overwrites its lm_head, and nearly every draft token is rejected "
            "(acceptance length about 1.0).",
            (said, *signs[:3]),
            "Use --speculative-algorithm EAGLE3.",
            ("FIXABLE_BY_FLAG",),
        )
    elif named not in (None, "EAGLE3", *_EAGLE) and signs:
        yield Finding(
            "ERR_FLAG_NOT_EAGLE3",
            f"--speculative-algorithm {named} is given, but the draft is an EAGLE-3 draft, which that algorithm cannot drive.",
            (said, *signs[:3]),
            "Use --speculative-algorithm EAGLE3.",
            ("FIXABLE_BY_FLAG",),
        )
    elif named == "EAGLE3" and looks_like_first_eagle(d.draft):
        yield Finding(
            "ERR_FLAG_EAGLE3_FOR_EAGLE",
            "--speculative-algorithm EAGLE3 is given, but the draft is of EAGLE or EAGLE-2: it takes the last state alone.",
            (said, d.draft.says("architectures")),
            "Use --speculative-algorithm EAGLE.",
            ("FIXABLE_BY_FLAG",),
        )
    elif named is None and d.flags.has("--speculative-draft-model-path"):
        yield Finding(
            "ERR_FLAG_ALGORITHM_MISSING",
            "--speculative-draft-model-path is given without --speculative-algorithm, so no speculation takes place.",
            (said, d.of_flag("--speculative-draft-model-path")),
            "Add --speculative-algorithm EAGLE3.",
            ("FIXABLE_BY_FLAG",),
        )


def check_tree(d: Deployment) -> Iterator[Finding]:
    """Note a number of draft tokens that SGLang will change: with topk 1 it is steps + 1."""
    steps = d.flags.number("--speculative-num-steps", 0)
    tokens = d.flags.number("--speculative-num-draft-tokens", 0)
    if steps > 0 and tokens > 0 and d.flags.number("--speculative-eagle-topk", 0) == 1 and tokens != steps + 1:
        yield Finding(
            "INFO_DRAFT_TOKENS_ADJUSTED",
            f"With topk 1 the draft is a chain of {steps} tokens, so SGLang verifies {steps + 1}, not {tokens}.",
            (d.of_flag("--speculative-num-draft-tokens"), d.of_flag("--speculative-num-steps")),
            f"Use --speculative-num-draft-tokens {steps + 1}.",
        )
