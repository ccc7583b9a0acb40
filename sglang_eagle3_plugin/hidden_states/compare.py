"""Which boundary is each training slot, really? A relative-error matrix of training states against captured ones.

The residual stream changes little from one layer to the next, so "close" proves nothing: an equal slot is one whose error is of the
size of the dtype's rounding, and the neighbours' errors stand beside it for comparison.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from sglang_eagle3_plugin.boundaries import Convention
from sglang_eagle3_plugin.errors import UserError
from sglang_eagle3_plugin.hidden_states.layout import Header
from sglang_eagle3_plugin.hidden_states.training import States

EQUAL = 0.05
"""Relative error below which two states are the same but for rounding: bf16 rounds to 2^-9 of each value, fp8 to 2^-4, and
different kernels add a few of those; a layer of a real model moves the stream by more."""


@dataclass(frozen=True)
class Comparison:
    """Errors and what they mean.

    Attributes:
        samples: sequences found in both places.
        rows: training slots, then its final state.
        columns: captured boundaries, then the captured final states.
        errors: row x column relative error, ||train - capture|| / ||capture|| over all tokens.
        matched: for each row the column it equals, or None.
        served: boundaries that the server feeds the draft, slot by slot.
        verdict: sentences.
        config: the ``eagle_config`` that makes the server capture what was trained on, or None where it is right or unknown.
        right: every slot is what the server captures.
    """

    samples: int
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    errors: tuple[tuple[float, ...], ...]
    matched: tuple[str | None, ...]
    served: tuple[int, ...]
    verdict: tuple[str, ...]
    config: dict[str, Any] | None
    right: bool


def compare(
    train: Iterable[States], capture: Iterable[States], header: Header, served: tuple[int, ...] | None = None
) -> Comparison:
    """Compare training samples with captured ones of the same token ids.

    Args:
        train: from a trainer's data, slots in order.
        capture: from a dump of the server, ideally of many boundaries.
        header: that dump's.
        served: the boundaries that the server feeds the draft; those of the dump unless given.

    Raises:
        UserError: no sequence is in both, or widths differ.
    """
    captured = {states.key: states for states in capture if states.key is not None}
    if not captured:
        raise UserError("the capture holds no sample with token ids, so nothing can be matched")
    sums: dict[tuple[str, str], list[float]] = {}
    rows: dict[str, None] = {}
    columns: dict[str, None] = {}
    samples = 0
    for states in train:
        other = (
            captured.get(states.key) if states.key is not None else (next(iter(captured.values())) if len(captured) == 1 else None)
        )
        if other is None:
            continue
        samples += 1
        for row, ours in (states.slots | states.finals).items():
            rows.setdefault(row)
            for column, theirs in (other.slots | other.finals).items():
                columns.setdefault(column)
                if ours.shape != theirs.shape:
                    raise UserError(
                        f"{states.origin}: {row} has shape {ours.shape} and the captured {column} {theirs.shape}; "
                        "the training data is of another target or of other tokens"
                    )
                total = sums.setdefault((row, column), [0.0, 0.0])
                total[0] += float(np.square(ours - theirs, dtype=np.float64).sum())
                total[1] += float(np.square(theirs, dtype=np.float64).sum())
    if not samples:
        raise UserError("no sequence is in both the training data and the capture; dump the training data's own sequences")
    errors = {pair: (difference / norm) ** 0.5 if norm else float("inf") for pair, (difference, norm) in sums.items()}
    return _judge(samples, tuple(rows), tuple(columns), errors, header, served)


def _judge(
    samples: int,
    rows: tuple[str, ...],
    columns: tuple[str, ...],
    errors: dict[tuple[str, str], float],
    header: Header,
    served: tuple[int, ...] | None,
) -> Comparison:
    slots = [row for row in rows if row.startswith(("slot", "boundary")) and row != f"boundary {header.num_layers}"]
    served = served or tuple(b for b in header.boundaries if b != header.num_layers)
    best = {row: min(columns, key=lambda column: errors[row, column]) for row in rows}
    matched = {row: best[row] if errors[row, best[row]] < EQUAL else None for row in rows}
    verdict = [_sentence(row, best[row], matched[row], errors[row, best[row]], header) for row in rows]
    found = [_boundary(matched[row]) for row in slots]
    config = None
    right = tuple(found) == served
    if None in found:
        verdict.append(
            "Not every slot equals a captured state: dump all boundaries (EAGLE3_DUMP_BOUNDARIES=all) and compare again."
        )
    elif len(served) != len(slots):
        verdict.append(f"The draft has {len(slots)} slots; say with --served which boundaries the server feeds it.")
    elif right:
        verdict.append(f"The server captures what the draft was trained on: boundaries {_join(served)}.")
    else:
        wanted = [b for b in found if b is not None]
        shifts = {want - have for want, have in zip(wanted, served, strict=True)}
        shift = shifts.pop() if len(shifts) == 1 else None
        how = (
            f"off by {'one' if abs(shift) == 1 else abs(shift)}, too {'early' if shift > 0 else 'late'} in the server"
            if shift
            else "different"
        )
        verdict.append(
            f"The draft was trained on boundaries {_join(wanted)} and the server captures {_join(served)}: {how}. "
            f"Set EAGLE3_CAPTURE_BOUNDARIES={','.join(map(str, wanted))}, or the eagle_config given here."
        )
        config = {
            "eagle_aux_hidden_state_layer_ids": list(Convention.OUTPUT.to_ids(wanted)),
            "eagle_aux_hidden_state_layer_convention": Convention.OUTPUT.value,
        }
    return Comparison(
        samples,
        rows,
        columns,
        tuple(tuple(errors[row, column] for column in columns) for row in rows),
        tuple(matched[row] for row in rows),
        served,
        tuple(verdict),
        config,
        right,
    )


def _sentence(row: str, best: str, matched: str | None, error: float, header: Header) -> str:
    if matched is None:
        return f"{row} equals no captured state; the nearest is {best}, {error:.1%} away."
    norm = {
        f"boundary {header.num_layers}": "the last layer's output before the final norm",
        "pre-norm": "the last layer's output before the final norm",
        "post-norm": "the final hidden state after the norm",
    }.get(matched, "the residual stream entering that layer, before any norm")
    return f"{row} is {matched} ({norm}), {error:.2%} away."


def _boundary(column: str | None) -> int | None:
    return int(column.split()[1]) if column is not None and column.startswith("boundary ") else None


def _join(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))
