"""Which boundaries reached the draft: the labels read off the tensor that the target's runner hands on. It only reads.

The rig's targets mark each layer in a residual channel of its own (``models.Labels``), so a captured slot says which boundary it
is: the number of marked channels. One JSON line for each new sight goes to the file that ``EAGLE3_RIG_OBSERVE`` names.
"""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from types import ModuleType
from typing import Any

MODULE = "sglang.srt.model_executor.model_runner"


def install(module: ModuleType) -> None:
    """Wrap ``ModelRunner.forward`` so that its result is looked at on the way out."""
    request = json.loads(os.environ["EAGLE3_RIG_OBSERVE"])
    runner = module.ModelRunner
    forward = runner.forward
    seen: set[str] = set()

    @functools.wraps(forward)
    def observed(self: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        output = forward(self, forward_batch, *args, **kwargs)
        # Before 0.5.7 a pair: the logits output, and whether a graph was replayed.
        logits_output = output[0] if isinstance(output, tuple) else getattr(output, "logits_output", None)
        states = getattr(logits_output, "hidden_states", None)
        if states is not None and not getattr(self, "is_draft_worker", False):
            line = json.dumps(look(states, forward_batch.forward_mode.name.lower(), **request["labels"]))
            if line not in seen:
                seen.add(line)
                with Path(request["file"]).open("a", encoding="utf-8") as file:  # one short line: written whole
                    file.write(line + "\n")
        return output

    runner.forward = observed


def look(states: Any, mode: str, hidden_size: int, first: int, count: int, value: float) -> dict[str, Any]:
    """Read the labels of captured states.

    Args:
        states: (tokens, slots * hidden_size) tensor.
        mode: the forward mode, for the record.
        hidden_size: width of one slot.
        first: channel of layer 0's label.
        count: layers.
        value: what a layer writes into its channel.

    Returns:
        ``mode``, ``width`` and ``boundaries``: one a slot; -1 where the tokens differ or the marks have a gap.
    """
    slots = states.reshape(states.shape[0], -1, hidden_size)
    marked = (slots[:, :, first : first + count] > value / 2).int()
    contiguous = bool((marked.diff(dim=-1) <= 0).all())
    boundaries = marked.sum(dim=-1)
    same = contiguous and bool((boundaries == boundaries[0]).all())
    return {
        "mode": mode,
        "width": int(states.shape[-1]),
        "boundaries": boundaries[0].tolist() if same else [-1] * slots.shape[1],
    }
