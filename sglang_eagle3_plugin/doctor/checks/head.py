"""The draft's `lm_head` and embeddings: own, shared, missing, of the right size."""

from __future__ import annotations

from collections.abc import Iterator

from sglang_eagle3_plugin.checkpoints import Tensor, read_row
from sglang_eagle3_plugin.doctor.deployment import Deployment, switch, whole
from sglang_eagle3_plugin.doctor.findings import Finding
from sglang_eagle3_plugin.errors import UserError

_SAMPLED_ROWS = 4


def check_head(d: Deployment) -> Iterator[Finding]:
    """Find an `lm_head` that is missing, tied to too large a table, or of another size than the draft vocabulary."""
    if d.draft is None:
        return
    config = d.draft.config
    tied = switch(config.get("tie_word_embeddings")) is True
    reduced, full = whole(config.get("draft_vocab_size")), d.draft.vocab_size or (d.target.vocab_size if d.target else None)
    head = d.draft.tensor("lm_head.weight")
    if tied and reduced and full and reduced < full:
        yield Finding(
            "ERR_TIED_HEAD_WITH_REDUCED_VOCAB",
            f"tie_word_embeddings is true, so SGLang uses the {full}-row embeddings as the draft's head, and indexes a map of "
            f"{reduced} "
            "entries with what it says: a device assert (index out of bounds) while the CUDA graphs are captured.",
            (
                d.draft.says("tie_word_embeddings"),
                d.draft.says("draft_vocab_size"),
                d.draft.holds(head) if head else d.draft.says("vocab_size"),
            ),
            "Set tie_word_embeddings to false in a copy of the draft config (--fix-config writes one)"
            + ("; the file has an lm_head of its own." if head else "."),
            ("FIXABLE_BY_OVERRIDE",),
            changes={"tie_word_embeddings": False},
        )
        return
    if not tied and d.draft.lacks("lm_head.weight") and reduced:
        same = d.target is not None and d.target.vocab_size in (None, reduced) and full in (None, reduced)
        yield Finding(
            "ERR_LM_HEAD_UNINIT",
            f"The draft file has no lm_head, and draft_vocab_size ({reduced}) tells SGLang that it has one: the head keeps random "
            f"values. "
            "It serves with acceptance length 1.00 and HTTP 200.",
            (d.draft.has_not("lm_head.weight"), d.draft.says("draft_vocab_size")),
            "The vocabularies are equal, so borrow the target's head: set draft_vocab_size to null in a copy of the draft config "
            "(this plugin's --fix-config writes one)."
            if same
            else "Get the draft with its lm_head; the target's cannot stand in, for the vocabularies differ.",
            ("FIXABLE_BY_PLUGIN", "FIXABLE_BY_OVERRIDE") if same else (),
            changes={"draft_vocab_size": None} if same else {},
        )
    if head and reduced and not tied and len(head[1].shape) == 2 and head[1].shape[0] != reduced:
        yield Finding(
            "ERR_LM_HEAD_ROWS",
            f"lm_head has {head[1].shape[0]} rows, and draft_vocab_size is {reduced}.",
            (d.draft.holds(head), d.draft.says("draft_vocab_size")),
            f"Set draft_vocab_size to {head[1].shape[0]}, if d2t has as many entries.",
            ("FIXABLE_BY_OVERRIDE",),
            changes={"draft_vocab_size": head[1].shape[0]},
        )


def check_embeddings(d: Deployment) -> Iterator[Finding]:
    """Find embeddings that cannot be shared, and note a table of the draft's own that SGLang does not use."""
    theirs = d.target.tensor("embed_tokens.weight", "embed_tokens.qweight") if d.target else None
    hidden = d.target.hidden_size if d.target else None
    if theirs and hidden and d.target and (len(theirs[1].shape) != 2 or theirs[1].shape[1] != hidden):
        yield Finding(
            "ERR_EMBED_WIDTH",
            f"The target's embeddings are {theirs[1].shape[-1] if theirs[1].shape else 0} wide where hidden_size is {hidden}: "
            f"they are "
            f"quantised and packed ({theirs[1].dtype}), and SGLang hands the packed bytes to the draft.",
            (d.target.holds(theirs), d.target.says("hidden_size")),
            "Use a target checkpoint whose embeddings are not quantised.",
            ("QUANT_DEPENDENT",),
        )
    own = d.draft.tensor("embed_tokens.weight") if d.draft else None
    if d.draft is None:
        return
    apart = bool(hidden and d.draft.hidden_size and hidden != d.draft.hidden_size)
    if apart and d.draft.lacks("embed_tokens.weight"):
        yield Finding(
            "ERR_EMBED_MISSING",
            f"The draft is {d.draft.hidden_size} wide, so it cannot share the target's embeddings ({hidden}), and has none of its "
            f"own.",
            (d.draft.has_not("embed_tokens.weight"), d.draft.says("hidden_size")),
            "Get the draft with its embeddings.",
        )
    if own and not apart:
        differs = _differ(own[1], theirs[1]) if theirs else None
        if differs is False:
            return
        yield Finding(
            "INFO_EMBED_DIFFERS_FROM_TARGET" if differs else "INFO_EMBED_OWN",
            "The draft file has embeddings of its own"
            + (" that differ from the target's" if differs else "")
            + ". SGLang shares the target's and is not affected; vLLM compares them and keeps the draft's own where they differ.",
            (d.draft.holds(own), *((d.target.holds(theirs),) if theirs and d.target else ())),
            "For vLLM write the target's embeddings into the draft file." if differs else "",
        )


def _differ(own: Tensor, theirs: Tensor) -> bool | None:
    """Compare a few rows byte by byte; None when they cannot be compared so."""
    if own.dtype != theirs.dtype or own.shape != theirs.shape or len(own.shape) != 2 or own.shape[0] == 0:
        return None
    step = max(1, own.shape[0] // _SAMPLED_ROWS)
    try:
        pairs = [(read_row(own, row), read_row(theirs, row)) for row in range(0, own.shape[0], step)]
    except UserError:
        return None
    return any(a != b for a, b in pairs) if all(a for a, _ in pairs) else None
