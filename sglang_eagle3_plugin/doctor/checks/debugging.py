"""Flags for looking at tensors, while CUDA graphs hide them."""

from __future__ import annotations

from collections.abc import Iterator

from sglang_eagle3_plugin.doctor.deployment import Deployment
from sglang_eagle3_plugin.doctor.findings import Finding

_STOCK = ("--debug-tensor-dump-output-folder", "--forward-hooks", "--debug-tensor-dump-input-file")


def check(d: Deployment) -> Iterator[Finding]:
    """Note that stock debug output is blind inside CUDA graphs, and what is not."""
    used = [name for name in _STOCK if d.flags.has(name)]
    ours = d.environ.get("EAGLE3_DEBUG", "")
    if not used and not ours:
        return
    yield Finding(
        "WARN_DEBUG_HIDDEN_BY_GRAPHS" if used and not d.flags.has("--disable-cuda-graph") else "DEBUG_GRAPH_SAFE",
        (
            f"{used[0]} runs Python inside the forward pass, which a replayed CUDA graph does not: decoding steps leave no trace. "
            if used
            else ""
        )
        + "EAGLE3_DEBUG reads the captured states after the replay and copies them before the next.",
        tuple(d.of_flag(name) for name in used),
        "Add --disable-cuda-graph, or use EAGLE3_DEBUG=1 of sglang-eagle3-plugin, which works with graphs on." if used else "",
        ("DEBUG_GRAPH_SAFE",),
    )
