"""Startup check: a wiring that is certain to be wrong stops the launch before a weight is read."""

from __future__ import annotations

import functools
import logging
from types import ModuleType
from typing import Any

from sglang_eagle3_plugin.patching import Change, Incompatible, Native, Patch, Plan, is_ours
from sglang_eagle3_plugin.settings import Settings

logger = logging.getLogger("sglang_eagle3_plugin")


def _plan(module: ModuleType) -> Plan:
    arguments = vars(module).get("ServerArgs")
    # Up to 0.5.22 a dataclass that checks itself when made; in 0.5.23 a struct that launchers resolve once.
    for name in ("resolve_once", "__post_init__"):
        owner = next((c for c in getattr(arguments, "__mro__", ()) if name in vars(c)), None)
        if owner is not None:
            return _wrap(owner, name)
    return Incompatible(
        "ServerArgs has neither resolve_once nor __post_init__",
        "Nothing is checked at start; run `sglang-eagle3 doctor` before launching.",
    )


def _wrap(owner: Any, name: str) -> Plan:
    stock = vars(owner)[name]
    if is_ours(stock):
        return Native("another copy of this plugin checks already")

    @functools.wraps(stock)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            from sglang_eagle3_plugin.runtime import startup

            startup.check(self, Settings.from_environment())
        except Exception:
            logger.warning("sglang-eagle3-plugin: the check at start failed; the launch goes on.", exc_info=True)
        return stock(self, *args, **kwargs)

    return [Change(owner, name, checked)]


PATCHES = (
    Patch(
        id="startup-check",
        module="sglang.srt.server_args",
        target="ServerArgs",
        reason="a flag EAGLE for EAGLE3, ids out of range or a wrong width serve silently, or fail after the weights are read",
        probe=_plan,
        upstream="none",
        exit_condition="SGLang refuses these launches itself in every supported release",
    ),
)
