"""Boundary wiring: after a ModelRunner has loaded its target, see to it that the right boundaries are captured."""

from __future__ import annotations

import functools
import logging
from types import ModuleType
from typing import Any

from sglang_eagle3_plugin.patching import Change, Incompatible, Native, Patch, Plan, is_ours
from sglang_eagle3_plugin.settings import Settings

logger = logging.getLogger("sglang_eagle3_plugin")


def _plan(module: ModuleType) -> Plan:
    runner = vars(module).get("ModelRunner")
    stock = vars(runner).get("load_model") if isinstance(runner, type) else None
    if not callable(stock):
        return Incompatible(
            "there is no method ModelRunner.load_model",
            "Layer ids stay as this SGLang reads them; `sglang-eagle3 wiring` tells what that means for a draft.",
        )
    if is_ours(stock):
        return Native("another copy of this plugin wires already")

    @functools.wraps(stock)
    def load_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = stock(self, *args, **kwargs)
        # Each in a guard of its own: ids that cannot be decided are no reason to leave a class without its methods.
        for step, otherwise in ((_complete, "the class stays as it is"), (_wire, "layer ids stay as SGLang reads them")):
            try:
                step(self)
            except Exception:
                logger.warning("sglang-eagle3-plugin: after loading, %s failed; %s.", step.__name__, otherwise, exc_info=True)
        return result

    return [Change(runner, "load_model", load_model)]


def _complete(runner: Any) -> None:
    from sglang_eagle3_plugin.runtime.target import serves_eagle3

    if serves_eagle3(runner):  # a server without EAGLE-3 loads nothing of what follows
        from sglang_eagle3_plugin import activation
        from sglang_eagle3_plugin.patches import completion

        completion.complete(runner, activation.apply)


def _wire(runner: Any) -> None:
    from sglang_eagle3_plugin.runtime.target import serves_eagle3

    if serves_eagle3(runner):
        from sglang_eagle3_plugin.runtime import wiring

        wiring.attach(runner, Settings.from_environment())


PATCHES = (
    Patch(
        id="boundary-wiring",
        module="sglang.srt.model_executor.model_runner",
        target="ModelRunner",
        reason="one list of layer ids is captured differently by release, family and pass; the draft was trained on one reading",
        probe=_plan,
        upstream="https://github.com/sgl-project/sglang/pull/25454",
        exit_condition="SGLang reads the convention from the draft config in every supported release",
    ),
)
