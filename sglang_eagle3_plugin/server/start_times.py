"""How long each stage of a model's last start took on this machine: what the time left of the next one is told by."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from datetime import datetime
from itertools import pairwise
from pathlib import Path

from sglang_eagle3_plugin import cache
from sglang_eagle3_plugin.errors import UserError
from sglang_eagle3_plugin.server.log_progress import LogProgress


def last(progress: LogProgress) -> dict[str, float]:
    """Return stage -> seconds of the last start of the same model, or nothing."""
    try:
        said = json.loads(_file(progress).read_text(encoding="utf-8"))
        return {str(stage): float(seconds) for stage, seconds in said.items()}
    except (OSError, ValueError, AttributeError, TypeError, UserError):
        return {}


def remember(progress: LogProgress) -> None:
    """Keep the stages of a start that is through. What cannot be kept is let go: this only serves a display."""
    moments = list(progress.entered.items())
    taken = {stage: (after - at).total_seconds() for (stage, at), (_, after) in pairwise(moments)}
    try:
        path = _file(progress)
        handle, name = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(taken, file)
        Path(name).replace(path)
    except (OSError, UserError):
        return


def left(progress: LogProgress, before: Mapping[str, float], now: datetime) -> float | None:
    """Return about how many seconds the start will take yet, or None where no earlier one is known.

    The current stage's own bar is believed over the past.
    """
    if progress.stage not in before:
        return None
    current = progress.stage_left_s
    if current is None:
        began = progress.entered.get(progress.stage, now)
        current = max(before[progress.stage] - (now - began).total_seconds(), 0.0)
    to_come = sum(seconds for stage, seconds in before.items() if stage not in progress.entered)
    return current + to_come


def _file(progress: LogProgress) -> Path:
    name = hashlib.sha256(f"{progress.model} {progress.has_draft}".encode()).hexdigest()[:24]
    return cache.directory("starts") / f"{name}.json"
