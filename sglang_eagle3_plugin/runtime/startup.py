"""At a server's start, before a weight is read: the doctor's cheap checks, and no launch where the wiring is certain to be wrong.

The configs and the headers of the draft's weights are read from disk; what is not on this machine yet is not judged.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import sys
from collections.abc import Sequence
from typing import Any

from sglang_eagle3_plugin.checkpoints import config_of, locate, read_checkpoint
from sglang_eagle3_plugin.doctor import flags
from sglang_eagle3_plugin.doctor.startup import arguments_of, certain_faults
from sglang_eagle3_plugin.errors import UserError
from sglang_eagle3_plugin.interpreter import launch_flags
from sglang_eagle3_plugin.loaded import sglang_release
from sglang_eagle3_plugin.settings import Settings

logger = logging.getLogger("sglang_eagle3_plugin")

_EAGLE = {"EAGLE", "EAGLE3"}
_checked: set[tuple[Any, ...]] = set()


def check_command_line(words: Sequence[str], settings: Settings) -> None:
    """Judge a server's launch from its own command line, seconds before SGLang has imported torch.

    Args:
        words: ``sys.orig_argv``; those of another program are passed over.
        settings: of this process.

    Raises:
        SystemExit: see :func:`check`.
    """
    launch = launch_flags(words)
    if launch is not None:
        check(arguments_of(flags.parse(launch)), settings)


def check(server_args: Any, settings: Settings) -> None:
    """Judge a launch once a process; does nothing for one without an EAGLE draft.

    Args:
        server_args: SGLang's ``ServerArgs``, resolved or not (sglang/srt/server_args.py).
        settings: of this process.

    Raises:
        SystemExit: a fault is certain, with what was found and what to change; ``EAGLE3_ALLOW_MISWIRED=1`` makes it a warning.
    """
    target, draft = getattr(server_args, "model_path", None), getattr(server_args, "speculative_draft_model_path", None)
    algorithm = str(getattr(server_args, "speculative_algorithm", None) or "").upper()
    if algorithm not in _EAGLE or not target or not draft:
        return
    release = _release()
    launch = (target, draft, algorithm, release)
    if launch in _checked:
        return
    _checked.add(launch)
    try:
        target_config, _ = config_of(locate(target, revision=getattr(server_args, "revision", None)))
        place = locate(draft, revision=getattr(server_args, "speculative_draft_model_revision", None))
        draft_config, file = config_of(place)
        header = read_checkpoint(place)
    except UserError as error:
        logger.debug("sglang-eagle3-plugin: nothing is checked at start: %s", error)
        return
    faults = certain_faults(
        target_config, draft_config, header, server_args, release, draft_path=file.parent, environ=dict(os.environ)
    )
    for fault in faults:
        sentence = f"sglang-eagle3-plugin: {fault.id}: {fault.message} {fault.fix}".strip()
        if not settings.allow_miswired:
            _stop(f"{sentence} This launch stops here, before any weight is read; EAGLE3_ALLOW_MISWIRED=1 serves all the same.")
        logger.warning("%s EAGLE3_ALLOW_MISWIRED=1: serving all the same.", sentence)


def _stop(message: str) -> None:
    # Not an Exception, which SGLang would log with a traceback of its own; and flushed, since SGLang may kill its process tree.
    sys.stderr.write(f"{message}\n")
    sys.stderr.flush()
    raise SystemExit(1)


def _release() -> str:
    release = sglang_release()
    if release == "unknown":  # SGLang is being imported right now
        try:
            return importlib.metadata.version("sglang")
        except importlib.metadata.PackageNotFoundError:
            pass
    return release
