"""A release's own ModelRunner without scheduler, tokenizer or draft: SGLang's offline benchmark, driven pass by pass.

Runs with an environment's own Python, so SGLang is imported only when asked for (``sglang/bench_one_batch.py``, from 0.5.20 or so
``sglang/benchmark/one_batch.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def prepare(observe: Callable[[Any], Any]) -> Any:
    """Make SGLang's benchmark loadable here, each batch asking for the hidden states of every token.

    Args:
        observe: given ``ModelRunner.forward``, returns what stands in its place.

    Returns:
        The benchmark's module.
    """
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

    try:
        from sglang import bench_one_batch as bench
    except ImportError:  # from 0.5.20 or so
        from sglang.benchmark import one_batch as bench
    init_new = ForwardBatch.init_new

    def full(*args: Any, **kwargs: Any) -> Any:
        batch = init_new(*args, **kwargs)
        batch.capture_hidden_mode = CaptureHiddenMode.FULL
        return batch

    ModelRunner.forward, ForwardBatch.init_new = observe(ModelRunner.forward), staticmethod(full)
    bench.get_tokenizer = lambda *args, **kwargs: None
    bench.suppress_other_loggers = lambda: None
    if hasattr(bench, "bootstrap"):
        bench.bootstrap._bind_threads_if_cpu = lambda *args, **kwargs: None
    return bench


def load(bench: Any, given: dict[str, Any]) -> Any:
    """Load a target by arguments of ``ServerArgs``; return the benchmark's runner."""
    from sglang.srt import server_args as arguments_module
    from sglang.srt.server_args import PortArgs, ServerArgs

    arguments = ServerArgs(**given)
    if hasattr(arguments, "resolve_once"):
        arguments.resolve_once()
    if hasattr(arguments_module, "set_global_server_args_for_scheduler"):
        arguments_module.set_global_server_args_for_scheduler(arguments)
    ports = PortArgs.init_new(arguments)
    if hasattr(bench, "publish"):
        ranks = bench.SpawnRanks(world_rank=bench.spawn_world_rank(arguments, tp_rank=0, pp_rank=0), gpu_id=0)
        bench.publish(arguments, role="scheduler", ranks=ranks)
        bench._init_process_global_configs()
    return bench.load_model(arguments, ports, 0, 0)[0]


def extend(bench: Any, runner: Any, requests: Any) -> Any:
    """Run a prefill; what the release's own ``extend`` returns."""
    return runner.extend(requests) if hasattr(runner, "extend") else bench.extend(requests, runner)
