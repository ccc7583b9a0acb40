"""Tells the dump which requests are complete: only the scheduler knows, once it has processed a batch's result."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from sglang_eagle3_plugin.patching import Change, Incompatible, Native, Patch, Plan, is_ours
from sglang_eagle3_plugin.runtime import tap


def _plan(module: ModuleType) -> Plan:
    scheduler = vars(module).get("Scheduler")
    stock = vars(scheduler).get("process_batch_result") if isinstance(scheduler, type) else None
    if not callable(stock):
        return Incompatible("there is no method Scheduler.process_batch_result", "EAGLE3_DUMP_DIR dumps nothing here.")
    if is_ours(stock):
        return Native("another copy of this plugin is here already")

    @functools.wraps(stock)
    def process_batch_result(self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        result = stock(self, batch, *args, **kwargs)
        if tap.consumers:
            from sglang_eagle3_plugin.runtime import dump

            dump.batch_done(batch)
        return result

    return [Change(scheduler, "process_batch_result", process_batch_result)]


PATCHES = (
    Patch(
        id="dump-requests",
        module="sglang.srt.managers.scheduler",
        target="Scheduler",
        reason="a forward pass does not say which requests are complete, aborted or run again",
        probe=_plan,
        upstream="none",
        exit_condition="SGLang offers a hook on a finished request in every supported release",
    ),
)
