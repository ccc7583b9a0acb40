"""Reaching each process once: both routes, the entry point and the `.pth`, end in :func:`activate`.

It registers post-import hooks and imports nothing of SGLang: a patch runs when SGLang itself has imported the module it changes.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from types import ModuleType

import wrapt

from sglang_eagle3_plugin import patching, records
from sglang_eagle3_plugin.interpreter import launch_flags
from sglang_eagle3_plugin.loaded import sglang_release
from sglang_eagle3_plugin.settings import Settings

logger = logging.getLogger("sglang_eagle3_plugin")

_lock = threading.RLock()
_active_route: str | None = None
_ledger: patching.Ledger | None = None


def activate(route: str, settings: Settings | None = None) -> None:
    """Register every patch's post-import hook; a second call, from whichever route, does nothing.

    Args:
        route: ``pth`` or ``entry-point``, for the record that `sglang-eagle3 status` shows.
        settings: read from the environment unless given.

    Raises:
        SystemExit: under ``EAGLE3_STRICT=1``, a patch does not fit a module that is already imported.
    """
    global _active_route, _ledger
    with _lock:
        if _active_route is not None:
            return
        settings = settings or Settings.from_environment()
        _active_route = route
        if not settings.active:
            logger.debug("sglang-eagle3-plugin is off in process %d (%s)", os.getpid(), settings.why_inactive)
            return
        for problem in settings.problems:
            logger.warning("sglang-eagle3-plugin: %s", problem)
        from sglang_eagle3_plugin.patches import REGISTRY

        _check_launch(settings)
        ledger = _ledger = patching.Ledger(settings)
        records.open_record(route, ledger)
        for module_name in dict.fromkeys(patch.module for patch in REGISTRY):
            patches = [patch for patch in REGISTRY if patch.module == module_name]
            wrapt.register_post_import_hook(_Hook(ledger, patches), module_name)


def _check_launch(settings: Settings) -> None:
    """In the process that launches a server, and in no other: the cheap checks, before SGLang has imported anything heavy."""
    if launch_flags(sys.orig_argv) is not None:  # the import is worth it only then
        try:
            from sglang_eagle3_plugin.runtime import startup

            startup.check_command_line(sys.orig_argv, settings)
        except Exception:
            logger.warning("sglang-eagle3-plugin: the check of the command line failed; the launch goes on.", exc_info=True)


def outcomes() -> list[patching.Outcome]:
    """Every patch that has met its module in this process, with its state."""
    return _ledger.outcomes() if _ledger else []


def revert(patch: patching.Patch) -> patching.Outcome | None:
    """Take one patch back in this process; None where nothing has been activated."""
    if _ledger is None:
        return None
    outcome = _ledger.revert(patch)
    records.write()
    return outcome


def apply(patch: patching.Patch, module: ModuleType) -> patching.Outcome | None:
    """Apply a patch that no import triggers, to a module that is there, and report it; None where nothing has been activated.

    Raises:
        SystemExit: under ``EAGLE3_STRICT=1``, it does not fit.
    """
    if _ledger is None:
        return None
    outcome = _ledger.apply(patch, module)
    if outcome.state in patching.TROUBLE:
        report(outcome, _ledger.settings)
    records.write()
    return outcome


class _Hook:
    """Applies the patches of one module when it has been imported. Whatever happens, the import of SGLang goes on."""

    def __init__(self, ledger: patching.Ledger, patches: list[patching.Patch]) -> None:
        self.ledger = ledger
        self.patches = patches

    def __call__(self, module: ModuleType) -> None:
        for patch in self.patches:
            outcome = self.ledger.apply(patch, module)
            if outcome.state in patching.TROUBLE:
                report(outcome, self.ledger.settings)
        records.write()


def report(outcome: patching.Outcome, settings: Settings) -> None:
    """Say once what does not fit: a warning in auto mode, the end of the process under ``EAGLE3_STRICT=1``.

    Raises:
        SystemExit: strict mode. Not an `Exception`, which SGLang would log and pass over.
    """
    message = f"sglang-eagle3-plugin: {outcome.sentence(sglang_release())}"
    if settings.strict:
        records.write()
        sys.exit(f"{message} EAGLE3_STRICT=1: this process stops here.")
    if not records.said_by_a_relative(outcome.patch.id):
        logger.warning("%s", message)
