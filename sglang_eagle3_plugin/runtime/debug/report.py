"""From measures to what is said of a pass: numbers for each slot, verdicts, a JSON line, a human line. Pure; see docs/debug.md."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

FORMAT = 1
"""``v`` of every JSON line; another number when a field changes its meaning."""
_CLOSE = 1e-4
"""Relative distance at which two norms or means are of one state: kernels sum in another order for another batch."""
_COMPARED_ROWS = 256
_IDS = 256


@dataclass(frozen=True)
class Labels:
    """What the slots of a target are called.

    Attributes:
        captured: boundaries that the target captures now, ascending; None where that can't be told.
        wanted: boundaries the draft was trained on; None where undecided.
        hidden_size: H of the target.
    """

    captured: tuple[int, ...] | None
    wanted: tuple[int, ...] | None
    hidden_size: int

    def slots(self, width: int) -> int:
        """S of rows of a width: as many as are captured where that fits, else as many as the hidden size says, else one."""
        if self.captured and width == len(self.captured) * self.hidden_size:
            return len(self.captured)
        return width // self.hidden_size if width % self.hidden_size == 0 else 1


@dataclass(frozen=True)
class Measures:
    """The measures of one pass on the host; lists of floats. See :mod:`~sglang_eagle3_plugin.runtime.debug.step`.

    Attributes:
        norm: L2 norm of each row of each slot, (N, S).
        mean: mean of each row of each slot, (N, S).
        first: first values of each slot's first row, (S, V).
        accepted: accepted tokens of each request, the bonus token included, (bs,).
        embedding_norm: of the first tokens' embeddings, (n,).
        embedding_mean: likewise.
        follows: 1 where the draft's token i is the target's token i + 1, (N - 1,).
        ids: token ids, (N,); only where asked for.
    """

    norm: list[list[float]]
    mean: list[list[float]]
    first: list[list[float]]
    accepted: list[float] = field(default_factory=list)
    embedding_norm: list[float] = field(default_factory=list)
    embedding_mean: list[float] = field(default_factory=list)
    follows: list[float] = field(default_factory=list)
    ids: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Sight:
    """One pass as seen: what is known of it beside its measures.

    Attributes:
        name: as in :class:`~sglang_eagle3_plugin.runtime.debug.step.Pass`.
        graph: likewise.
        tokens: likewise.
        width: likewise.
        dtype: likewise.
        spans: likewise.
        after_prefill: for a draft extend: it follows a prefill, not a verify.
    """

    name: str
    graph: bool
    tokens: int
    width: int
    dtype: str
    spans: tuple[tuple[str, int, int], ...] | None
    after_prefill: bool = False


def report(sight: Sight, measures: Measures, labels: Labels, emitted: Measures | None = None) -> dict[str, Any]:
    """Everything that is said of a pass, as JSON data; ``verdicts`` is empty where nothing is wrong.

    Args:
        sight: the pass.
        measures: its measures.
        labels: what the target's slots are called.
        emitted: measures of the target pass of the same step, for a draft extend.
    """
    said: dict[str, Any] = {
        "pass": sight.name,
        "graph": sight.graph,
        "tokens": sight.tokens,
        "measured": len(measures.norm),
        "width": sight.width,
        "dtype": sight.dtype,
        "slots": _slots(sight, measures, labels),
    }
    verdicts = _of_wiring(sight, labels) + _of_slots(said["slots"], measures)
    if sight.spans is not None:
        said["requests"] = [rid for rid, _, _ in sight.spans]
    if sight.name == "draft extend":
        said["after"] = "prefill" if sight.after_prefill else "verify"
    if measures.accepted and sight.spans is not None:
        said["accepted"] = {rid: int(count) for (rid, _, _), count in zip(sight.spans, measures.accepted, strict=False)}
    agreement = _agreement(sight, measures, emitted)
    if measures.embedding_norm:
        same = _same_as_embedding(measures)
        if same:
            agreement["embedding_slots"] = same
        verdicts += _of_embedding(said["slots"], same)
    if agreement:
        said["agreement"] = agreement
        verdicts += _of_agreement(agreement)
    if measures.ids:
        said["ids"] = [int(i) for i in measures.ids[:_IDS]]
    said["verdicts"] = verdicts
    return said


def human(said: dict[str, Any]) -> str:
    """One line for a log; the format is that of docs/debug.md."""
    head = f"EAGLE3 step {said['step']} {said['pass']}" + (f" after {said['after']}" if "after" in said else "")
    if "slots" in said:  # a comparison of ranks has none
        head += f" {'graph' if said['graph'] else 'eager'} tokens {said['tokens']} width {said['width']} {said['dtype']}"
    parts = [head]
    for slot in said.get("slots", ()):
        words = [f"{slot['label']} norm {_short(slot['norm'])} mean {_short(slot['mean'])}"]
        if slot["first"]:
            words.append("first " + " ".join(_short(value) for value in slot["first"]))
        words += [f"{kind} {slot[kind]}" for kind in ("nonfinite", "zero") if slot[kind]]
        parts.append(" ".join(words))
    if "agreement" in said:
        parts.append("agreement " + " ".join(f"{key} {_plain(value)}" for key, value in said["agreement"].items()))
    if "accepted" in said:
        parts.append("accepted " + " ".join(f"{rid}={count}" for rid, count in said["accepted"].items()))
    if "ids" in said:
        parts.append("ids " + _plain(said["ids"]))
    parts += [f"WRONG {verdict['verdict']}: {verdict['says']}" for verdict in said["verdicts"]]
    return " | ".join(parts)


def line_of(line: str) -> str:
    """The human line of a JSON line; the line itself where it is none of ours."""
    try:
        return human(json.loads(line))
    except (ValueError, TypeError, KeyError, AttributeError):
        return line


def _slots(sight: Sight, measures: Measures, labels: Labels) -> list[dict[str, Any]]:
    slots = []
    for index, values in enumerate(zip(*measures.norm, strict=True)):
        finite = [value for value in values if math.isfinite(value)]
        means = [row[index] for row in measures.mean if math.isfinite(row[index])]
        boundary = _boundary(sight, labels, index, len(measures.norm[0]))
        slots.append(
            {
                "slot": index,
                "boundary": boundary,
                "label": f"b{boundary}" if boundary is not None else ("draft" if sight.name == "draft decode" else f"slot{index}"),
                "norm": _rounded(sum(finite) / len(finite)) if finite else None,
                "norm_min": _rounded(min(finite)) if finite else None,
                "norm_max": _rounded(max(finite)) if finite else None,
                "mean": _rounded(sum(means) / len(means)) if means else None,
                "first": [_rounded(value) for value in (measures.first[index] if measures.first else [])],
                "nonfinite": len(values) - len(finite),
                "zero": sum(value == 0 for value in values),
            }
        )
    return slots


def _boundary(sight: Sight, labels: Labels, index: int, count: int) -> int | None:
    if sight.name == "draft decode" or labels.captured is None or count != len(labels.captured):
        return None
    return labels.captured[index]


def _of_wiring(sight: Sight, labels: Labels) -> list[dict[str, Any]]:
    captured, wanted = labels.captured, labels.wanted
    if sight.name == "draft decode":
        return []
    if captured and labels.slots(sight.width) != len(captured):
        says = f"width {sight.width} where {len(captured)} captured boundaries of {labels.hidden_size} are due"
        return [_verdict("width", says)]
    if captured is None or wanted is None or captured == wanted:
        return []
    steps = {c - w for c, w in zip(captured, wanted, strict=False)}
    by = f"shifted by {steps.pop():+d}" if len(captured) == len(wanted) and len(steps) == 1 else "not those"
    return [_verdict("shifted", f"boundaries {_plain(captured)} are captured, the draft was trained on {_plain(wanted)}: {by}")]


def _of_slots(slots: Sequence[dict[str, Any]], measures: Measures) -> list[dict[str, Any]]:
    found = []
    for slot in slots:
        if slot["nonfinite"]:
            says = f"{_name(slot)} holds NaN or infinity in {slot['nonfinite']} of {len(measures.norm)} tokens"
            found.append(_verdict("nan", says, slot))
        if slot["zero"] == len(measures.norm) > 0:
            found.append(_verdict("zeroed", f"{_name(slot)} is all zero in every token", slot))
    for a in range(len(slots)):
        for b in range(a + 1, len(slots)):
            if _same_slot(measures, a, b):
                found.append(_verdict("shifted", f"{_name(slots[b])} holds the same values as {_name(slots[a])}", slots[b]))
    return found


def _of_embedding(slots: Sequence[dict[str, Any]], same: Sequence[int]) -> list[dict[str, Any]]:
    return [
        _verdict("shifted", f"{_name(slots[index])} holds the embeddings of its tokens, which are boundary 0", slots[index])
        for index in same
        if slots[index]["boundary"] not in (0, None)
    ] + [
        _verdict("shifted", f"{_name(slot)} does not hold the embeddings of its tokens", slot)
        for slot in slots
        if slot["boundary"] == 0 and slot["slot"] not in same and not slot["nonfinite"] and slot["zero"] == 0
    ]


def _of_agreement(agreement: dict[str, Any]) -> list[dict[str, Any]]:
    found = []
    if agreement.get("fed", 0) > agreement.get("emitted", agreement.get("fed", 0)):
        says = (
            f"{agreement['fed'] - agreement['emitted']} of {agreement['fed']} states fed to the draft are none that the target gave"
        )
        found.append(_verdict("unpaired", says))
    if agreement.get("follow", 0) < agreement.get("pairs", 0):
        apart = agreement["pairs"] - agreement["follow"]
        says = f"{apart} of {agreement['pairs']} states stand beside another token than the next one"
        found.append(_verdict("unpaired", says))
    return found


def _agreement(sight: Sight, measures: Measures, emitted: Measures | None) -> dict[str, Any]:
    agreement: dict[str, Any] = {}
    if emitted is not None and emitted.norm and measures.norm and len(emitted.norm[0]) == len(measures.norm[0]):
        fed = min(len(measures.norm), _COMPARED_ROWS)
        agreement |= {"fed": fed, "emitted": _found_in_order(measures, emitted, fed)}
    if measures.follows and sight.spans is not None:
        # The last token of each request stands beside one that only the target's answer knows.
        inside = [i for _, first, last in sight.spans for i in range(first, last - 1)]
        agreement |= {"pairs": len(inside), "follow": sum(measures.follows[i] == 1 for i in inside)}
    return agreement


def _found_in_order(fed: Measures, emitted: Measures, count: int) -> int:
    """How many of the first rows fed to the draft are rows that the target emitted, in the target's order."""
    found = at = 0
    for i in range(count):
        row = (*fed.norm[i], *fed.mean[i])
        if not all(map(math.isfinite, row)):  # its own verdict says so; no number equals it
            found += 1
            continue
        for j in range(at, len(emitted.norm)):
            if _close(row, (*emitted.norm[j], *emitted.mean[j]), fed.norm[i]):
                found, at = found + 1, j + 1
                break
    return found


def _same_as_embedding(measures: Measures) -> list[int]:
    pairs = list(zip(measures.embedding_norm, measures.embedding_mean, strict=True))
    same = []
    for index in range(len(measures.norm[0]) if measures.norm else 0):
        rows = [(row[index], mean[index]) for row, mean in zip(measures.norm, measures.mean, strict=True)]
        # Some families scale their embeddings: one factor for every token.
        scale = rows[0][0] / pairs[0][0] if pairs[0][0] else 1.0
        if len(rows) >= len(pairs) and all(
            _close(row, (norm * scale, mean * scale), (row[0],)) for row, (norm, mean) in zip(rows, pairs, strict=False)
        ):
            same.append(index)
    return same


def _same_slot(measures: Measures, a: int, b: int) -> bool:
    rows = [
        (norm[a], mean[a], norm[b], mean[b])
        for norm, mean in zip(measures.norm[:_COMPARED_ROWS], measures.mean, strict=False)
        if math.isfinite(norm[a]) and math.isfinite(norm[b])
    ]
    return bool(rows) and all(na != 0 and _close((na, ma), (nb, mb), (na,)) for na, ma, nb, mb in rows)


def _close(one: Sequence[float], other: Sequence[float], sizes: Sequence[float]) -> bool:
    """Norms and means of two states; a mean is small beside its norm, so distances are measured by the norms."""
    scale = max(map(abs, sizes)) or 1.0
    return all(abs(x - y) <= _CLOSE * max(abs(x), abs(y), 1e-3 * scale) for x, y in zip(one, other, strict=True))


def _verdict(word: str, says: str, slot: dict[str, Any] | None = None) -> dict[str, Any]:
    where = {"slot": slot["slot"], "boundary": slot["boundary"]} if slot else {}
    return {"verdict": word, **where, "says": says}


def _name(slot: dict[str, Any]) -> str:
    return f"slot {slot['slot']}" + (f" (boundary {slot['boundary']})" if slot["boundary"] is not None else "")


def _rounded(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _short(value: float | None) -> str:
    return "nan" if value is None else f"{value:.4g}"


def _plain(value: Any) -> str:
    return ",".join(str(one) for one in value) if isinstance(value, list | tuple) else str(value)
