"""Which boundaries a loaded target captures: read them, set them, and add the two that SGLang's loops cannot reach.

A target's layer stack captures in its forward loop, ``if i in self.layers_to_capture`` in most families, a mark on the layer
(``_is_layer_to_capture``) in others. Both loops run over layers 0..L-1, and up to 0.5.22 capture ``hidden_states + residual``,
which at layer 0 has no residual yet. So boundary 0 is taken at the first layer's input and boundary L at the final norm's input,
where every family passes through, and both join the loop's captures in ascending order.

They join inside the stack's ``forward``, not in a hook behind it: graphs of the prefill capture the bare ``forward``
(``PrefillCudaGraphRunner``, from 0.5.12) and replay it in its place, so that what is done outside is done without the captures.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import Any

MARK = "_is_layer_to_capture"


class CaptureError(RuntimeError):
    """A stack that cannot be made to capture what is wanted; the message says why."""


class LayerStack:
    """The module of a loaded target that runs the decoder layers and captures between them.

    Args:
        module: an ``nn.Module`` with ``layers`` and ``layers_to_capture`` (sglang/srt/models/*.py).
        num_layers: L of the whole target.
    """

    def __init__(self, module: Any, num_layers: int) -> None:
        self.module = module
        self.num_layers = num_layers
        self._edges = _Edges(module, num_layers)

    @classmethod
    def find(cls, model: Any, num_layers: int) -> LayerStack:
        """Find the stack below a loaded target, after its setter has run.

        Raises:
            CaptureError: none, or more than one, holds ``num_layers`` layers and a capture list.
        """
        stacks = [m for m in model.modules() if hasattr(m, "layers_to_capture") and len(getattr(m, "layers", ())) == num_layers]
        marked = [m for m in stacks if list(m.layers_to_capture or ())] or stacks
        if len(marked) != 1:
            names = ", ".join(type(m).__name__ for m in marked) or "none"
            raise CaptureError(f"expected one module with {num_layers} layers and layers_to_capture in it, found {names}")
        return cls(marked[0], num_layers)

    @property
    def captured(self) -> tuple[int, ...]:
        """The boundaries that a forward pass will really emit, ascending: read by effect, not by what a setter was told."""
        return tuple(sorted({*self._loop_captures(), *self._edges.wanted}))

    def capture(self, boundaries: Sequence[int]) -> None:
        """Make the stack capture exactly these boundaries (ascending, each in 0..L).

        Raises:
            CaptureError: reading back gives something else.
        """
        inner = [b for b in boundaries if 0 < b < self.num_layers]
        self._set_loop(inner)
        self._edges.want([b for b in boundaries if b in (0, self.num_layers)], len(inner))
        if self.captured != tuple(boundaries):
            raise CaptureError(f"asked for boundaries {list(boundaries)}, the stack would capture {list(self.captured)}")

    def _uses_marks(self) -> bool:
        try:
            source = inspect.getsource(type(self.module).forward)
        except (OSError, TypeError):
            source = ""
        if "in self.layers_to_capture" in source:
            return False
        return MARK in source or any(getattr(layer, MARK, False) for layer in self.module.layers)

    def _loop_captures(self) -> list[int]:
        if self._uses_marks():
            return [i for i, layer in enumerate(self.module.layers) if getattr(layer, MARK, False)]
        return [b for b in self.module.layers_to_capture or () if 0 <= b < self.num_layers]

    def _set_loop(self, boundaries: list[int]) -> None:
        kind = type(self.module.layers_to_capture)
        self.module.layers_to_capture = kind(boundaries) if kind in (set, tuple) else list(boundaries)
        marks = self._uses_marks()
        for i, layer in enumerate(self.module.layers):
            if marks or hasattr(layer, MARK):  # a setter marks and never clears: a second call would capture the union
                setattr(layer, MARK, marks and i in boundaries)


class _Edges:
    """Boundaries 0 and L of a stack: hooks and a ``forward`` around the stack's own that exist only while one of them is wanted."""

    def __init__(self, module: Any, num_layers: int) -> None:
        self.module = module
        self.num_layers = num_layers
        self.wanted: list[int] = []
        self._inner = 0
        self._handles: list[Any] = []
        self._around: Any = None
        self._replaced: Any = None
        self._taken: dict[int, Any] = {}

    def want(self, boundaries: list[int], inner: int) -> None:
        """Take these, beside ``inner`` boundaries that the stack's loop captures."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self._around is not None and vars(self.module).get("forward") is self._around:
            del self.module.forward
            if self._replaced is not None:
                self.module.forward = self._replaced
        self._around = None
        self.wanted, self._inner = boundaries, inner
        if not boundaries:
            return
        module = self.module
        if 0 in boundaries:
            first = module.layers[0]
            self._parameters = list(inspect.signature(first.forward).parameters)
            self._handles.append(first.register_forward_pre_hook(self._take_first, with_kwargs=True))
        if self.num_layers in boundaries:
            norm = getattr(module, "norm", None)
            if norm is None:
                raise CaptureError(f"{type(module).__name__} keeps its final norm elsewhere than in .norm")
            self._handles.append(norm.register_forward_pre_hook(self._take_last, with_kwargs=True))
        self._replaced = vars(module).get("forward")
        self._around = self._joining(module.forward)
        module.forward = self._around
        self._handles.append(module.register_forward_hook(self._check))

    def _joining(self, forward: Any) -> Any:
        # SGLang asks the signature for the place of ``input_embeds``; ``wraps`` keeps it.
        @functools.wraps(forward)
        def joining(*args: Any, **kwargs: Any) -> Any:
            self._taken = {}
            # From 0.5.23 the decode graph hands out a buffer for the packed captures, which the loop may only fill whole. It
            # captures fewer than the draft is owed, so it gets none, and `_join` fills the buffer.
            batch = _forward_batch(args, kwargs)
            buffer = getattr(batch, "aux_hidden_states_buffer", None)
            if buffer is None:
                return self._join(forward(*args, **kwargs), None)
            batch.aux_hidden_states_buffer = None
            try:
                output = forward(*args, **kwargs)
            finally:
                batch.aux_hidden_states_buffer = buffer
            return self._join(output, buffer)

        return joining

    def _join(self, output: Any, buffer: Any) -> Any:
        if not self.wanted:  # taken back, and something that was put around this since keeps it in place
            return output
        hidden, aux = output if isinstance(output, tuple) else (output, [])
        if not hasattr(hidden, "new_empty"):  # a pipeline stage hands on a proxy, not hidden states
            return output
        missing = [b for b in self.wanted if b not in self._taken]
        if missing and len(hidden):
            raise self._unmet(missing)
        # An idle rank runs no final norm; its captures have no rows.
        edge = {b: self._taken.pop(b, hidden) for b in self.wanted}
        before = [edge[b] for b in self.wanted if b == 0]
        after = [edge[b] for b in self.wanted if b != 0]
        if isinstance(aux, list):
            # `type(aux)` keeps a subclass of list that SGLang may return; it is built from what it holds.
            return hidden, type(aux)([*before, *aux, *after])
        import torch

        packed = torch.cat([*before, aux, *after], dim=-1)
        return hidden, packed if buffer is None else buffer.copy_(packed)

    def _check(self, module: Any, args: Any, output: Any) -> None:
        """Whatever ran in the place of ``forward`` must have joined the edges; a compiled one may go around ours."""
        hidden, aux = output if isinstance(output, tuple) else (output, [])
        if hasattr(hidden, "new_empty"):
            count = len(aux) if isinstance(aux, list) else aux.shape[-1] // hidden.shape[-1]
            if count != self._inner + len(self.wanted):
                raise self._unmet(self.wanted)

    def _unmet(self, boundaries: list[int]) -> CaptureError:
        return CaptureError(
            f"sglang-eagle3-plugin: boundaries {boundaries} of {type(self.module).__name__} were not met in a forward pass, which "
            "is compiled or replayed in a way that leaves them out; turn prefill graphs off "
            "(--cuda-graph-backend-prefill disabled, or --disable-piecewise-cuda-graph)"
        )

    def _take_first(self, layer: Any, args: Any, kwargs: Any) -> None:
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[self._parameters.index("hidden_states")]
        self._taken[0] = hidden.clone()

    def _take_last(self, norm: Any, args: Any, kwargs: Any) -> None:
        hidden = args[0] if args else kwargs["x"]
        residual = args[1] if len(args) > 1 else kwargs.get("residual")
        self._taken[self.num_layers] = hidden.clone() if residual is None else hidden + residual


def _forward_batch(args: Any, kwargs: Any) -> Any:
    for value in (*kwargs.values(), *args):
        if type(value).__name__ == "ForwardBatch":
            return value
    return None
