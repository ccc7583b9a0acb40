"""From a step that has arrived on the host to the reports of its passes. Pure; torch is not needed any more."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Any, NamedTuple

from sglang_eagle3_plugin.runtime.debug.report import Labels, Measures, Sight, report

Spans = tuple[tuple[str, int, int], ...]
Arrived = tuple[int, list[tuple[Any, ...]], bytes]
"""A step: its number, the fields of its passes (:class:`Pass`), and what was measured: float32, in the machine's byte order.

Plain values that `marshal` takes: this is also how a step reaches the process that makes the lines.
"""


class Pass(NamedTuple):
    """One pass of a step, as known on the host.

    A pass was put aside (``staged`` is not negative) or measured by itself. What was measured of a step: pass by pass, the norms
    (rows, S), means (rows, S) and first values (S, V) of one measured by itself, and each of ``extra``; then norms (R), means (R)
    and first values (R, V) of the R rows, each of one slot, that were put aside.

    Attributes:
        name: ``target prefill``, ``target verify``, ``target decode``, ``draft extend`` or ``draft decode``.
        graph: whether a CUDA graph was replayed.
        tokens: N, rows of the pass.
        width: of each row; slots times H.
        dtype: as torch writes it, without ``torch.``.
        slots: S, how many states of width H stand side by side.
        requests: ids of the batch's requests, in its order, or None.
        lengths: rows of each of them as the batch has it, or None.
        rows: how many rows were measured: N, or those of the requests asked for.
        values: V, first values of each slot's first row.
        staged: its first one of the R rows; -1: it was measured by itself.
        extra: (name, how many values) of what else was brought along.
    """

    name: str
    graph: bool
    tokens: int
    width: int
    dtype: str
    slots: int
    requests: list[str] | None
    lengths: list[int] | None
    rows: int
    values: int
    staged: int
    extra: list[tuple[str, int]]


def reports(step: Arrived, labels: Labels) -> Iterator[dict[str, Any]]:
    """Report each pass of a step, in the order it ran; ``step`` and ``index`` say which it is."""
    number, passes, data = step
    values = array("f")
    values.frombytes(data)
    together = [one for one in map(Pass._make, passes) if one.staged >= 0]
    aside = sum(one.rows * one.slots for one in together)
    at, block = 0, len(values) - sum(one.rows * one.slots * (2 + one.values) for one in together)
    emitted: Measures | None = None
    prefill = False
    for index, fields in enumerate(passes):
        one = Pass._make(fields)
        measures, at = _measures(one, values, at, block, aside)
        if one.name.startswith("target"):
            emitted, prefill = measures, one.name == "target prefill"
        spans = spans_of(one.requests, one.lengths, one.tokens)
        sight = Sight(one.name, one.graph, one.tokens, one.width, one.dtype, spans, prefill)
        said = report(sight, measures, labels, emitted if one.name == "draft extend" else None)
        yield {"step": number, "index": index, **said}


def spans_of(requests: list[str] | None, lengths: list[int] | None, rows: int) -> Spans | None:
    """Which rows are whose: by the batch's own lengths where they add up, else evenly; None where neither fits.

    Returns:
        (request id, first row, row after the last) of each request.
    """
    if not requests:
        return None
    if lengths is None or len(lengths) != len(requests) or sum(lengths) != rows:
        if rows % len(requests):
            return None
        lengths = [rows // len(requests)] * len(requests)
    spans, first = [], 0
    for rid, length in zip(requests, lengths, strict=True):
        spans.append((rid, first, first + length))
        first += length
    return tuple(spans)


def _measures(one: Pass, values: array[float], at: int, block: int, aside: int) -> tuple[Measures, int]:
    """The measures of a pass, what was measured by itself from an offset on; and where that ends."""
    if one.staged >= 0:
        norm = _rows(values, block + one.staged, one.rows, one.slots)
        mean = _rows(values, block + aside + one.staged, one.rows, one.slots)
        first = _rows(values, block + 2 * aside + one.staged * one.values, one.slots, one.values)
    else:
        norm = _rows(values, at, one.rows, one.slots)
        at += one.rows * one.slots
        mean = _rows(values, at, one.rows, one.slots)
        at += one.rows * one.slots
        first = _rows(values, at, one.slots, one.values)
        at += one.slots * one.values
    extra = {}
    for name, length in one.extra:
        extra[name] = values[at : at + length].tolist()
        at += length
    return Measures(norm, mean, first, **extra), at


def _rows(values: array[float], at: int, rows: int, width: int) -> list[list[float]]:
    return [values[start : start + width].tolist() for start in range(at, at + rows * width, width)] if width else [[]] * rows
