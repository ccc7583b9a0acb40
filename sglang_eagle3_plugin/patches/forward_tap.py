"""The taps that debug and dump look through; see :mod:`sglang_eagle3_plugin.runtime.tap` for which pass passes where."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from types import ModuleType
from typing import Any

from sglang_eagle3_plugin.patching import Change, Incompatible, Native, Patch, Plan, is_ours
from sglang_eagle3_plugin.runtime import tap

_REMEDY = "EAGLE3_DEBUG and EAGLE3_DUMP_DIR see nothing of these passes here; serving is as it was."


def _plan_runner(module: ModuleType) -> Plan:
    runner = vars(module).get("ModelRunner")
    if not isinstance(runner, type) or not callable(vars(runner).get("forward")) or not callable(vars(runner).get("__init__")):
        return Incompatible("there is no method ModelRunner.forward", _REMEDY)
    if is_ours(vars(runner)["forward"]):
        return Native("another copy of this plugin taps already")
    stock_forward, stock_init = vars(runner)["forward"], vars(runner)["__init__"]

    @functools.wraps(stock_forward)
    def forward(self: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        output = stock_forward(self, forward_batch, *args, **kwargs)
        if tap.consumers:
            tap.deliver(self, forward_batch, output)
        return output

    @functools.wraps(stock_init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        stock_init(self, *args, **kwargs)
        tap.runner_ready(self)

    return [Change(runner, "forward", forward), Change(runner, "__init__", __init__), *_request_ids(vars(module))]


def _request_ids(names: dict[str, Any]) -> list[Change]:
    """0.5.9 is the last release whose ``ForwardBatch`` does not know its requests' ids (field ``rids``, 0.5.10)."""
    batch_class = names.get("ForwardBatch")
    stock = vars(batch_class).get("init_new") if isinstance(batch_class, type) else None
    if not isinstance(stock, classmethod) or not is_dataclass(batch_class) or "rids" in {f.name for f in fields(batch_class)}:
        return []
    make = stock.__func__

    @functools.wraps(make)
    def init_new(cls: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        made = make(cls, batch, *args, **kwargs)
        if tap.consumers:
            made.rids = [request.rid for request in getattr(batch, "reqs", None) or ()]
        return made

    return [Change(batch_class, "init_new", classmethod(init_new))]


def _plan_draft_graph(module: ModuleType, class_name: str, gives_states: bool) -> Plan:
    runner = vars(module).get(class_name)
    # `replay` up to 0.5.13.post1, `execute` since.
    found = [name for name in ("execute", "replay") if isinstance(runner, type) and callable(vars(runner).get(name))]
    if len(found) != 1:
        return Incompatible(f"{class_name} has neither one execute nor one replay", _REMEDY)
    stock: Callable[..., Any] = vars(runner)[found[0]]
    if is_ours(stock):
        return Native("another copy of this plugin taps already")

    @functools.wraps(stock)
    def replay(self: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        output = stock(self, forward_batch, *args, **kwargs)
        if tap.consumers:
            tap.deliver(self.model_runner, forward_batch, tap.PassOutput(output if gives_states else None, True))
        return output

    return [Change(runner, found[0], replay)]


PATCHES = (
    Patch(
        id="forward-tap",
        module="sglang.srt.model_executor.model_runner",
        target="ModelRunner",
        reason="prints inside a model vanish when CUDA graphs replay; the result of ModelRunner.forward does not",
        probe=_plan_runner,
        upstream="none",
        exit_condition="SGLang offers a hook on the result of a forward pass in every supported release",
    ),
    *(
        Patch(
            id=patch_id,
            module=f"sglang.srt.speculative.{module}",
            target=class_name,
            reason="a draft's graphs replay beside ModelRunner.forward, so its tap does not see them",
            probe=functools.partial(_plan_draft_graph, class_name=class_name, gives_states=gives_states),
            upstream="none",
            exit_condition="draft graphs replay inside ModelRunner.forward in every supported release",
        )
        for patch_id, module, class_name, gives_states in (
            ("draft-decode-tap", "eagle_draft_cuda_graph_runner", "EAGLEDraftCudaGraphRunner", False),
            ("draft-extend-tap", "eagle_draft_extend_cuda_graph_runner", "EAGLEDraftExtendCudaGraphRunner", True),
        )
    ),
)
