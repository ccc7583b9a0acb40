"""The draft vocabulary and its tables: `d2t` holds target id minus draft id, `t2d` marks the target ids that are in it."""

from __future__ import annotations

from collections.abc import Iterator

from sglang_eagle3_plugin.checkpoints import read_table
from sglang_eagle3_plugin.doctor.deployment import Deployment, whole
from sglang_eagle3_plugin.doctor.findings import Evidence, Finding
from sglang_eagle3_plugin.errors import UserError


def check(d: Deployment) -> Iterator[Finding]:
    """Find a missing, misshapen or mistaken map from draft ids to target ids."""
    if d.draft is None:
        return
    size = whole(d.draft.config.get("draft_vocab_size"))
    full = d.draft.vocab_size or (d.target.vocab_size if d.target else None)
    if size and full and size > full:
        yield Finding(
            "ERR_DRAFT_VOCAB",
            f"draft_vocab_size ({size}) is larger than the vocabulary ({full}).",
            (d.draft.says("draft_vocab_size"), d.draft.says("vocab_size")),
            "Correct draft_vocab_size.",
        )
    theirs = d.target.vocab_size if d.target else None
    if theirs and d.draft.vocab_size and d.draft.vocab_size != theirs:
        yield Finding(
            "WARN_VOCAB_DIFFERS",
            f"The draft's vocab_size is {d.draft.vocab_size}, the target's {theirs}: another tokenizer, or a padded table.",
            (d.draft.says("vocab_size"), d.target.says("vocab_size") if d.target else d.of_release()),
            "Use the draft that was trained for this target, or set vocab_size to the target's if only the padding differs.",
            sure="likely",
        )
    table = d.draft.tensor("d2t")
    if table is None:
        if size and full and size < full and d.draft.lacks("d2t"):
            yield Finding(
                "ERR_D2T_MISSING",
                f"The draft predicts {size} of {full} tokens, and the file has no d2t to say which: draft id n is taken for "
                f"target id n.",
                (d.draft.has_not("d2t"), d.draft.says("draft_vocab_size"), d.draft.says("vocab_size")),
                "Get the draft with its d2t table, or export it again.",
            )
        return
    if table[1].dtype.startswith(("F", "BF")) or len(table[1].shape) != 1:
        yield Finding(
            "ERR_D2T_SHAPE",
            f"d2t is {table[1].dtype} {list(table[1].shape)}; it must be a list of integers, one for each draft id.",
            (d.draft.holds(table),),
            "Export the table as int64 of shape (draft_vocab_size,).",
        )
        return
    if size and table[1].shape[0] != size:
        yield Finding(
            "ERR_D2T_SHAPE",
            f"d2t has {table[1].shape[0]} entries, and draft_vocab_size is {size}.",
            (d.draft.holds(table), d.draft.says("draft_vocab_size")),
            "Use the table and the head of one export.",
        )
    if not table[1].readable:
        return
    try:
        offsets = read_table(table[1])
    except UserError as error:
        yield Finding("ERR_D2T_SHAPE", f"d2t cannot be read: {error}.", (d.draft.holds(table),), "Export the table again.")
        return
    yield from _values(d, offsets, full)


def _values(d: Deployment, offsets: list[int], full: int | None) -> Iterator[Finding]:
    assert d.draft is not None
    table = d.draft.tensor("d2t")
    assert table is not None
    count = len(offsets)
    ids = [i + offset for i, offset in enumerate(offsets)]
    shown = ", ".join(f"{i} -> {ids[i]}" for i in sorted({0, count // 2, count - 1}) if 0 <= i < count)
    evidence = (d.draft.holds(table), Evidence(str(d.draft.path or "weights"), "draft id -> target id", shown))
    out = [t for t in ids if t < 0 or (full is not None and t >= full)]
    if count > 1 and all(offset == i for i, offset in enumerate(offsets)):
        kind, why = "ERR_D2T_NOT_OFFSET", "it is 0, 1, 2, ...: every draft id n is mapped to 2n"
    elif count > 1 and full and count < full and not any(offsets):
        kind, why = (
            "ERR_D2T_ALL_ZERO",
            f"it is all zeros, which is right only for a full vocabulary: here the first {count} of {full} ids",
        )
    elif out and len(set(offsets)) == count and (full is None or max(offsets) < full) and min(offsets) >= 0:
        kind, why = "ERR_D2T_NOT_OFFSET", "its entries are target ids themselves, and it must hold target id minus draft id"
    elif out:
        kind, why = "ERR_D2T_RANGE", f"{len(out)} entries lead outside 0..{(full or 0) - 1}, to {out[0]} for one"
    elif len(set(ids)) != count:
        kind, why = "ERR_D2T_NOT_INJECTIVE", f"{count} draft ids are mapped to {len(set(ids))} target ids"
    else:
        yield from _agreement(d, ids)
        return
    fix = "Write d2t[i] = target id - i"
    yield Finding(
        kind,
        f"d2t holds target id minus draft id, and this one does not: {why}.",
        evidence,
        f"{fix}; here that is the table minus 0, 1, 2, ..." if "themselves" in why else f"{fix}, from the trainer's own map.",
    )


def _agreement(d: Deployment, ids: list[int]) -> Iterator[Finding]:
    assert d.draft is not None
    mask = d.draft.tensor("t2d")
    if mask is None or not mask[1].readable or len(mask[1].shape) != 1 or mask[1].dtype != "BOOL":
        return
    try:
        marked = [i for i, value in enumerate(read_table(mask[1])) if value]
    except UserError:
        return
    if marked != sorted(ids):
        yield Finding(
            "WARN_T2D_DISAGREES",
            f"t2d marks {len(marked)} target ids, and d2t leads to {len(ids)} others or more; SGLang uses d2t alone.",
            (d.draft.holds(mask),),
            "Use the two tables of one export.",
        )
