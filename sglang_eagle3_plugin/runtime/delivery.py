"""Bring captured boundaries to the logits processor, whichever model on the way calls it.

SGLang's own path hands them up as ``(hidden_states, aux_hidden_states)`` through each ``forward``; a wrapper that wasn't written
for it drops them or trips over the pair. The logits processor is where every path ends, and it has taken ``aux_hidden_states`` in
every release since EAGLE-3 came, so the captures are added to its arguments. It runs inside the CUDA graphs, as on SGLang's own
path.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from sglang_eagle3_plugin.runtime.target import StructureError, logits_processors

AUX_POSITION = 4
"""Position of ``aux_hidden_states`` among the arguments of ``LogitsProcessor.forward``, after self."""


class Delivery:
    """Adds what ``take`` returns to every call of the model's logits processors.

    Args:
        model: the loaded target.
        take: called with the final hidden states [tokens, H] that the logits processor was given; returns the captures, a list of
            tensors [tokens, H] or one packed [tokens, B * H], and forgets them. None where there are none.

    Raises:
        StructureError: the model has no logits processor, or one of another shape.
    """

    def __init__(self, model: Any, take: Callable[[Any], Any]) -> None:
        self._take = take
        self._handles: list[Any] = []
        self._processors = logits_processors(model)
        if not self._processors:
            raise StructureError(f"{type(model).__name__} has no LogitsProcessor, so there is nowhere to deliver captures to")
        for processor in self._processors:
            parameters = list(inspect.signature(type(processor).forward).parameters)[1:]
            if parameters[AUX_POSITION : AUX_POSITION + 1] != ["aux_hidden_states"]:
                raise StructureError(f"LogitsProcessor.forward takes ({', '.join(parameters)}); aux_hidden_states is not the fifth")
            self._names = parameters

    def start(self) -> None:
        """Begin to deliver; a second call changes nothing."""
        if not self._handles:
            self._handles = [p.register_forward_pre_hook(self._add, with_kwargs=True) for p in self._processors]

    def stop(self) -> None:
        """Leave no hook behind."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _add(self, processor: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given = dict(zip(self._names, args, strict=False)) | kwargs
        aux = self._take(given["hidden_states"])
        if aux is not None:
            given["aux_hidden_states"] = aux
            # A target that feeds MTP heads hands over its states before the norm as well, and the logits processor prefers those.
            given.pop("hidden_states_before_norm", None)
        return (), given
