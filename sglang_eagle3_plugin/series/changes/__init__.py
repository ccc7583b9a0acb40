"""The changes, one module an idea, in the order in which a series applies them."""

from __future__ import annotations

from sglang_eagle3_plugin.series.change import Change
from sglang_eagle3_plugin.series.changes import capture_ends, dead_setters, delegation, graph_capture, layer_ids

REGISTRY: tuple[Change, ...] = (
    delegation.KIMI_K25,
    graph_capture.CHANGE,
    layer_ids.TOP_LEVEL,
    layer_ids.CONVENTION,
    layer_ids.GUARD,
    dead_setters.CHANGE,
    capture_ends.CHANGE,
    delegation.OTHER_WRAPPERS,
)
