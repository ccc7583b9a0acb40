"""The generic tap: capture any boundary of any stack of decoder layers, by hooks on its layers.

Boundary k < L is what enters layer k; boundary L is what the last layer returns. Nothing is kept for boundaries that are not
wanted, and the cost is that of SGLang's own capture: one addition or copy a boundary, inside the CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang_eagle3_plugin.runtime.capture import CaptureError
from sglang_eagle3_plugin.runtime.delivery import Delivery
from sglang_eagle3_plugin.runtime.target import Decoder, signature_of
from sglang_eagle3_plugin.structure import Refusal, Stream, skips_layers, source_of_forward, stream_of_class


def streams_of(decoder: Decoder) -> dict[type, Stream] | Refusal:
    """Where each class of layer of a decoder finds its stream, or why the tap cannot serve this decoder."""
    streams: dict[type, Stream] = {}
    for layer in decoder.layers:
        cls = type(layer)
        if cls not in streams:
            stream = stream_of_class(cls)
            if isinstance(stream, Refusal):
                return stream
            if stream is Stream.BATCH and not _adds_plainly(layer):
                return Refusal(cls.__name__, "it adds to the stream otherwise than plainly, so SGLang has no sum at its boundaries")
            streams[cls] = stream
    if skips_layers(source_of_forward(type(decoder.stack))):
        return Refusal(type(decoder.stack).__name__, "its forward passes some layers over, so their boundaries come and go")
    return streams


def _adds_plainly(layer: Any) -> bool:
    """Whether what a layer leaves to be added to the batch's stream is a plain sum; the stream's ``snapshot`` raises on others.

    The layer's last stage (sglang/srt/layers/layer_boundary/stage.py) says how its output is added, and whether it does so itself.
    """
    updates = [getattr(getattr(part, "declaration", None), "update", None) for part in vars(layer).values()]
    last = next((update for update in reversed(updates) if update is not None), None)
    return bool(getattr(last, "is_plain_add", True) or getattr(last, "applied_at_exit", False))


class LayerTap:
    """Captures boundaries of one loaded target and delivers them to its logits processor.

    The interface is :class:`~sglang_eagle3_plugin.runtime.capture.LayerStack`'s.

    Raises:
        CaptureError: the layers have a shape that cannot be served.
        StructureError: there is no logits processor to deliver to.
    """

    def __init__(self, model: Any, decoder: Decoder) -> None:
        streams = streams_of(decoder)
        if isinstance(streams, Refusal):
            raise CaptureError(str(streams))
        self.num_layers = decoder.num_layers
        self._decoder = decoder
        self._streams = streams
        self._parameters = {cls: signature_of(layer) for layer in decoder.layers for cls in [type(layer)]}
        self._delivery = Delivery(model, self._take)
        self._handles: list[Any] = []
        self._wanted: tuple[int, ...] = ()
        self._taken: dict[int, Any] = {}

    @property
    def captured(self) -> tuple[int, ...]:
        """The boundaries that a forward pass emits, ascending."""
        return self._wanted

    def capture(self, boundaries: Sequence[int]) -> None:
        """Capture exactly these boundaries (ascending, each in 0..L); none of them removes every hook."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._taken, self._wanted = [], {}, tuple(boundaries)
        if not boundaries:
            self._delivery.stop()
            return
        for boundary in boundaries:
            if boundary < self.num_layers:
                layer = self._decoder.layers[boundary]
                hook = _Entering(self, boundary, self._streams[type(layer)], self._parameters[type(layer)])
                self._handles.append(layer.register_forward_pre_hook(hook, with_kwargs=True))
            else:
                layer = self._decoder.layers[self.num_layers - 1]
                leaving = _Leaving(self, boundary, self._streams[type(layer)], self._parameters[type(layer)])
                self._handles.append(layer.register_forward_hook(leaving, with_kwargs=True))
        self._delivery.start()

    def put(self, boundary: int, value: Any) -> None:
        """Keep one captured boundary, [tokens, H], until the logits processor is called."""
        self._taken[boundary] = value

    def _take(self, hidden: Any) -> list[Any] | None:
        taken, self._taken = self._taken, {}
        missing = [b for b in self._wanted if b not in taken]
        if missing and len(hidden) > 0:
            raise RuntimeError(
                f"sglang-eagle3-plugin: boundaries {missing} of {type(self._decoder.stack).__name__} were not met in a forward "
                "pass; its layers are run in a way that the generic tap does not know"
            )
        # An idle rank may run no layer; its captures have no rows.
        return [_fitting(taken.get(b, hidden), hidden) for b in self._wanted]


def _fitting(value: Any, hidden: Any) -> Any:
    if value.dim() != 2 or value.shape[-1] != hidden.shape[-1]:
        raise RuntimeError(
            f"sglang-eagle3-plugin: a captured boundary has shape {tuple(value.shape)} where [tokens, {hidden.shape[-1]}] was due; "
            "these layers carry more than one stream"
        )
    return value.to(hidden.dtype)


class _Entering:
    """Pre-hook of layer k: keeps the stream that enters it."""

    def __init__(self, tap: LayerTap, boundary: int, stream: Stream, parameters: list[str]) -> None:
        self.tap, self.boundary, self.stream, self.parameters = tap, boundary, stream, parameters

    def __call__(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = dict(zip(self.parameters, args, strict=False)) | kwargs
        residual = given.get("residual") if self.stream is Stream.SUM else None
        self.tap.put(self.boundary, _read(given["hidden_states"], residual, given["forward_batch"]))


class _Leaving:
    """Hook of the last layer: keeps the stream that leaves it."""

    def __init__(self, tap: LayerTap, boundary: int, stream: Stream, parameters: list[str]) -> None:
        self.tap, self.boundary, self.stream, self.parameters = tap, boundary, stream, parameters

    def __call__(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        given = dict(zip(self.parameters, args, strict=False)) | kwargs
        parts = output if isinstance(output, tuple) else (output,)
        residual = parts[1] if self.stream is Stream.SUM and len(parts) > 1 else None
        self.tap.put(self.boundary, _read(parts[0], residual, given["forward_batch"]))


def _read(hidden: Any, residual: Any, forward_batch: Any) -> Any:
    """The stream as a tensor of its own, since later layers write into theirs."""
    stream = getattr(forward_batch, "residual_stream", None)
    if stream is not None:
        # `hidden` is a handle here; a snapshot also completes a sum that tensor-parallel ranks still owe (layer_boundary/residual).
        return stream.snapshot(hidden)
    return hidden.clone() if residual is None else hidden + residual
