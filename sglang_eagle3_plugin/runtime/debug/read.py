"""From a step that has arrived on the host to the reports of its passes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sglang_eagle3_plugin.runtime.debug.report import Labels, Measures, Sight, report
from sglang_eagle3_plugin.runtime.debug.step import Pass, Step


def reports(step: Step, labels: Labels) -> Iterator[dict[str, Any]]:
    """Report each pass of a step, in the order it ran; ``step`` and ``index`` say which it is."""
    emitted: Measures | None = None
    prefill = False
    for index, one in enumerate(step.passes):
        measures = _measures(step, one)
        if one.name.startswith("target"):
            emitted, prefill = measures, one.name == "target prefill"
        sight = Sight(one.name, one.graph, one.tokens, one.width, one.dtype, one.spans, prefill)
        said = report(sight, measures, labels, emitted if one.name == "draft extend" else None)
        yield {"step": step.number, "index": index, **said}


def _measures(step: Step, one: Pass) -> Measures:
    rest = ("accepted", "embedding_norm", "embedding_mean", "follows", "ids")
    first = step.read(one, "first")
    return Measures(
        step.read(one, "norm"),
        step.read(one, "mean"),
        first[0] if first else [],
        **{name: step.read(one, name) for name in rest},
    )
