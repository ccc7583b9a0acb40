"""What parallelism and compiled passes do to captured states: known, and refused or warned about when the target has been loaded.

A state that is captured on one rank as a partial sum, or on a stage whose captures are dropped, has the right shape and the wrong
value: acceptance falls and nothing is said. So what is certain to be wrong is refused, and what is not known to be right is said.
"""

from __future__ import annotations

import logging
from typing import Any

from sglang_eagle3_plugin import records
from sglang_eagle3_plugin.runtime.capture import CaptureError
from sglang_eagle3_plugin.runtime.layer_tap import LayerTap
from sglang_eagle3_plugin.runtime.target import StructureError, find_decoder, signature_of
from sglang_eagle3_plugin.structure import Stream, stream_of_class

logger = logging.getLogger("sglang_eagle3_plugin")

CAPTURES_INSIDE = {"capture_output", "captured_last_layer_outputs", "capture_gathered"}
"""Parameters of layers that capture after the layer's own communication, so that a fused all-reduce is complete by then."""


def is_last_stage(runner: Any) -> bool:
    """Whether a ModelRunner holds the last pipeline stage, the only one whose captures reach a draft."""
    group = getattr(runner, "pp_group", None)  # from 0.5.16 or so the runner keeps it in place of the two numbers
    rank = getattr(runner, "pp_rank", getattr(group, "rank_in_group", 0))
    return int(rank) == _stages(runner) - 1


def _stages(runner: Any) -> int:
    group = getattr(runner, "pp_group", None)
    return int(getattr(runner, "pp_size", getattr(group, "world_size", 1)))


def attention_data_parallel(arguments: Any) -> str:
    """The argument of SGLang's by which attention ranks hold different tokens; an empty string where they hold the same."""
    if getattr(arguments, "enable_dp_attention", False):
        return "enable_dp_attention"
    # From 0.5.22, whose resolution leaves the older one false.
    return "attn_dp_size" if (getattr(arguments, "attn_dp_size", None) or 1) > 1 else ""


def check(runner: Any, stack: Any) -> None:
    """Refuse or warn about what the server's parallelism does to what ``stack`` captures. Each warning is said once a process.

    Raises:
        CaptureError: captures would be lost or partial.
    """
    arguments = runner.server_args
    generic = isinstance(stack, LayerTap)
    _check_pipeline(runner, stack, generic)
    if generic:
        for name, default, why in _NOT_WITH_THE_TAP:
            if getattr(arguments, name, default) not in (default, None):
                raise CaptureError(f"the generic tap cannot serve {name}={getattr(arguments, name)}: {why}")
        turn_off_prefill_graphs(arguments, PREFILL_GRAPHS, "layers that are replayed leave out the generic tap's hooks")
    elif {0, stack.num_layers} & set(stack.captured):
        turn_off_prefill_graphs(arguments, _COMPILED, "compiled layers may leave out boundaries 0 and L")
    said = []
    # Up to 0.5.22 the runner keeps it too; the arguments keep it in every release.
    tp_size = int(getattr(arguments, "tp_size", 1))
    if tp_size > 1 and getattr(arguments, "enable_flashinfer_allreduce_fusion", False) and _captures_partial_sums(runner, stack):
        if generic:
            raise CaptureError(f"the generic tap cannot serve enable_flashinfer_allreduce_fusion with tp_size > 1: {_PARTIAL}")
        said.append(f"enable_flashinfer_allreduce_fusion with tp_size {tp_size}: {_PARTIAL} (SGLang #28343); leave the flag out")
    if name := attention_data_parallel(arguments):
        said.append(
            f"{name}: acceptance fell from 2.35 to 1.48 with it on one model (SGLang #16274); compare acceptance without it"
        )
    for sentence in said:
        logger.warning("sglang-eagle3-plugin: %s.", sentence)
    if said:
        records.note("parallel", said)


_PARTIAL = "the sum over ranks is only taken in the next layer's norm, so each rank would capture its part of it"

_NOT_WITH_THE_TAP = (
    ("enable_two_batch_overlap", False, "two halves of a batch run interleaved and past the layers' forward"),
    ("enable_torch_compile", False, "the compiled forward may leave its hooks out"),
    ("attn_cp_size", 1, "tokens are split over ranks between the layers"),
    ("enable_pdmux", False, "prefill is split by layers over several passes"),
)


def _check_pipeline(runner: Any, stack: Any, generic: bool) -> None:
    if _stages(runner) <= 1:
        return
    if generic:
        raise CaptureError("the generic tap cannot serve pipeline stages: what a stage before the last one captures is dropped")
    try:
        first = int(getattr(find_decoder(runner.model, stack.num_layers).stack, "start_layer", 0))
    except StructureError:
        return
    lost = [b for b in stack.captured if b < first]
    if lost:
        raise CaptureError(
            f"pipeline stages: boundaries {lost} lie on stages before the last one, which begins with layer {first}, "
            "and SGLang drops what is captured there"
        )


def _captures_partial_sums(runner: Any, stack: Any) -> bool:
    """Whether a fused all-reduce is still owed where the stack captures; not where layers or the batch complete it first."""
    try:
        layer = find_decoder(runner.model, stack.num_layers).layers[0]
    except StructureError:
        return True
    return not CAPTURES_INSIDE & set(signature_of(layer)) and stream_of_class(type(layer)) is not Stream.BATCH


_COMPILED = ("tc_piecewise",)
PREFILL_GRAPHS = ("tc_piecewise", "breakable", "full")
"""Backends of prefill graphs (sglang/srt/model_executor/runner/prefill_cuda_graph_runner.py); up to 0.5.13 only the first."""


def turn_off_prefill_graphs(arguments: Any, backends: tuple[str, ...], why: str) -> None:
    """Have prefill run eagerly where one of these backends is chosen; SGLang asks after the target has been loaded."""
    graphs: Any = getattr(getattr(arguments, "cuda_graph_config", None), "prefill", None)
    backend: Any = getattr(graphs, "backend", None)
    if getattr(backend, "value", backend) in backends:
        graphs.backend = type(backend)("disabled")
    else:
        # Up to 0.5.13 each has a flag of its own, and the piecewise one another name and sense by release.
        off = {"disable_piecewise_cuda_graph": True, "enable_piecewise_cuda_graph": False}
        if "breakable" in backends:
            off["enable_breakable_cuda_graph"] = False
        turned = [name for name, value in off.items() if getattr(arguments, name, value) is not value]
        for name in turned:
            setattr(arguments, name, off[name])
        if not turned:
            return
    logger.warning("sglang-eagle3-plugin: prefill graphs are turned off: %s.", why)
