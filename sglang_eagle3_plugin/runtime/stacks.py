"""The capturing stack of a loaded target: SGLang's own where it has one, else the generic tap; found once and kept on the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from sglang_eagle3_plugin.boundaries import default_boundaries
from sglang_eagle3_plugin.runtime.capture import LayerStack
from sglang_eagle3_plugin.runtime.delivery import Delivery
from sglang_eagle3_plugin.runtime.target import SETTER

_KEPT = "_eagle3_stack"


class CapturingStack(Protocol):
    """What :class:`LayerStack`, :class:`DeliveredStack` and :class:`~sglang_eagle3_plugin.runtime.layer_tap.LayerTap` share."""

    num_layers: int

    @property
    def captured(self) -> tuple[int, ...]:
        """The boundaries that a forward pass emits, ascending."""

    def capture(self, boundaries: Sequence[int]) -> None:
        """Capture exactly these."""


class DeliveredStack:
    """SGLang's own capture, for a model above it that doesn't know the pair ``(hidden_states, aux_hidden_states)``.

    The stack returns the pair; it is split again on the way out, and the captures are brought to the logits processor.

    Raises:
        StructureError: there is no logits processor to deliver to.
    """

    def __init__(self, model: Any, stack: LayerStack) -> None:
        self.num_layers = stack.num_layers
        self._stack = stack
        self._delivery = Delivery(model, self._take)
        self._aux: Any = None
        self._handle: Any = None

    @property
    def captured(self) -> tuple[int, ...]:
        """The boundaries that a forward pass emits, ascending."""
        return self._stack.captured

    def capture(self, boundaries: Sequence[int]) -> None:
        """Capture exactly these boundaries (ascending, each in 0..L)."""
        self._stack.capture(boundaries)
        if self._handle is not None:
            self._handle.remove()
        # Registered after the stack's own hooks, so it sees what they have joined.
        self._handle = self._stack.module.register_forward_hook(self._split)
        self._delivery.start()

    def _split(self, module: Any, args: Any, output: Any) -> Any:
        if not isinstance(output, tuple):
            return output
        hidden, self._aux = output
        return hidden

    def _take(self, hidden: Any) -> Any:
        aux, self._aux = self._aux, None
        return aux


def stack_of(model: Any, num_layers: int) -> CapturingStack:
    """The stack that was kept on this model, or SGLang's own, which is kept from then on.

    Raises:
        CaptureError: none was kept, and there is no single module of SGLang's that captures.
    """
    kept: CapturingStack | None = vars(model).get(_KEPT)
    return kept if kept is not None else keep(model, LayerStack.find(model, num_layers))


def keep(model: Any, stack: CapturingStack) -> CapturingStack:
    """Keep the stack on the model, so that a later call of a setter finds the hooks of an earlier one."""
    vars(model)[_KEPT] = stack
    return stack


def make_setter() -> Any:
    """The method ``set_eagle3_layers_to_capture(self, layer_ids=None)`` for a class that has none.

    Ids are read as most of SGLang's own setters read them, as layers whose output is wanted; the wiring corrects that
    where the draft says otherwise.
    """

    def set_eagle3_layers_to_capture(self: Any, layer_ids: Sequence[int] | None = None) -> None:
        """Capture at the boundaries that these layer ids name (sglang-eagle3-plugin)."""
        stack: CapturingStack = vars(self)[_KEPT]
        wanted = default_boundaries(stack.num_layers) if layer_ids is None else {i + 1 for i in layer_ids}
        stack.capture(sorted(b for b in wanted if 0 <= b <= stack.num_layers))

    set_eagle3_layers_to_capture.__name__ = SETTER
    return set_eagle3_layers_to_capture
