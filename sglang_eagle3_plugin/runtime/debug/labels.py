"""Which boundary each slot of a loaded target is: read from its layers as they are now, not from what was once wired."""

from __future__ import annotations

from typing import Any

from sglang_eagle3_plugin.boundaries import BoundaryError
from sglang_eagle3_plugin.runtime import wiring
from sglang_eagle3_plugin.runtime.capture import CaptureError, LayerStack
from sglang_eagle3_plugin.runtime.debug.report import Labels
from sglang_eagle3_plugin.settings import Settings


def labels_of(runner: Any, settings: Settings) -> Labels:
    """Read the labels of a target; where our wiring is off, from the target and the draft themselves.

    Takes milliseconds: not for the thread that serves.
    """
    hidden_size = int(runner.model_config.hidden_size)
    known = wiring.wired(runner.model)
    if known is not None:
        return Labels(known.stack.captured, known.wanted, hidden_size)
    num_layers = int(runner.model_config.num_hidden_layers)
    try:
        captured = LayerStack.find(runner.model, num_layers).captured or None
    except CaptureError:
        captured = None
    return Labels(captured, _wanted(runner, num_layers, settings), hidden_size)


def _wanted(runner: Any, num_layers: int, settings: Settings) -> tuple[int, ...] | None:
    from sglang_eagle3_plugin import drafts

    arguments = runner.server_args
    try:
        draft = drafts.find(arguments.speculative_draft_model_path, arguments.speculative_draft_model_revision)
        if draft is None:
            return None
        return drafts.decide_for(draft, num_layers, settings).boundaries
    except (BoundaryError, drafts.DraftError):
        return None
