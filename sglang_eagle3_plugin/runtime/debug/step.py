"""The device side of debug: what is measured of each pass of a step, and its one asynchronous way to the host.

Each row (token) of each slot becomes a norm and a mean, on the device; those and a few first values are all that is copied. Nothing
here waits for the device: the copy goes to pinned memory, an event behind it, and a later step asks whether the event has passed.
All of it runs on the thread that serves, so it does as little as it can: buffers and their views are used again and again, and the
passes of a decode step are put aside one by one (the next replay overwrites what this one gave) to be reduced together.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from sglang_eagle3_plugin.runtime.debug.read import Arrived, spans_of

_CHUNK_ROWS = 1024
"""Rows measured in one launch, so that no backend's float32 copy of a long prefill takes memory that serving counts on."""
_EMBEDDED_ROWS = 64
"""Rows of a prefill whose embeddings are looked up again."""
_IDS_ROWS = 65536
"""Tokens of a prefill that are kept to see whether the draft's follow them."""
_STAGED_ROWS = 256
"""Rows of H values that one step may put aside: 4 MiB where H is 4096. A larger pass is measured where it lies."""
_FLOATS = 4096
"""Of a fresh buffer; one that is too small for its step grows, and stays large."""
_VIEWS = 64
"""Views kept of one buffer: a decode step's passes are as large as those of the step before."""


class Buffers:
    """Where the measures of one step lie: a flat float32 buffer on the device, one on the host, an event behind the copy.

    Args:
        ring: whose they are.
        device: of the states.
        key: of the ring's list they go back to: where they are used. A buffer never changes its stream, so that the
            allocator's own order of uses holds for it.
        size: in floats.
    """

    def __init__(self, ring: Ring, device: Any, key: tuple[int, int], size: int) -> None:
        torch = ring.torch
        self.key = key
        self.size = size
        self.stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        # Both threads write to them, and only the serving one is in inference mode.
        with torch.inference_mode(False):
            self.flat = torch.empty(size, dtype=torch.float32, device=device)
            self.host = self.flat
            if device.type != "cpu":
                self.host = torch.empty(size, dtype=torch.float32, pin_memory=self.stream is not None)
        self.event = torch.cuda.Event() if self.stream is not None else None
        self.address: int = self.host.data_ptr()
        self._views: dict[tuple[int, ...], tuple[Any, ...]] = {}

    def views(self, offset: int, rows: int, slots: int, firsts: int, values: int) -> tuple[Any, ...]:
        """Views for norms (rows, slots), means (rows, slots) and first values (firsts, values), one behind the other."""
        key = (offset, rows, slots, firsts, values)
        found = self._views.get(key)
        if found is None:
            mean, first = offset + rows * slots, offset + 2 * rows * slots
            found = (
                self.flat[offset:mean].view(rows, slots),
                self.flat[mean:first].view(rows, slots),
                self.flat[first : first + firsts * values].view(firsts, values),
            )
            self._keep(key, found)
        return found

    def copy(self, length: int) -> None:
        """Enqueue the copy of the first floats to the host, on the current stream."""
        key = (length,)
        found = self._views.get(key)
        if found is None:
            found = (self.host[:length], self.flat[:length])
            self._keep(key, found)
        found[0].copy_(found[1], non_blocking=self.event is not None)

    def _keep(self, key: tuple[int, ...], views: tuple[Any, ...]) -> None:
        if len(self._views) >= _VIEWS:
            self._views.clear()
        self._views[key] = views


class Stage:
    """Where a step puts rows aside, in float32, to be measured together. One a stream, whose order keeps the steps apart.

    Args:
        ring: whose it is.
        device: of the states.
        width: H.
    """

    def __init__(self, ring: Ring, device: Any, width: int) -> None:
        self.width = width
        self._ring = ring
        with ring.torch.inference_mode(False):
            self._rows = ring.torch.empty((_STAGED_ROWS, width), dtype=ring.float32, device=device)
        self._places: dict[tuple[int, int, int], Any] = {}
        self._used: dict[tuple[int, int], tuple[Any, Any]] = {}

    def put(self, at: int, rows: Any, count: int, slots: int) -> None:
        """Enqueue the copy of ``rows`` (count, slots * H) to our rows from ``at`` on."""
        key = (at, count, slots)
        place = self._places.get(key)
        if place is None:
            if len(self._places) >= _VIEWS:
                self._places.clear()
            place = self._places[key] = self._rows[at : at + count * slots].view(count, slots * self.width)
        place.copy_(rows)

    def measure(self, rows: int, values: int, into: tuple[Any, ...]) -> None:
        """Enqueue the measures of our first rows, into views as :meth:`Buffers.views` makes them."""
        key = (rows, values)
        used = self._used.get(key)
        if used is None:
            if len(self._used) >= _VIEWS:
                self._used.clear()
            used = self._used[key] = (self._rows[:rows], self._rows[:rows, :values])
        norm, mean, first = into
        self._ring.norm(used[0], dim=-1, keepdim=True, out=norm)
        self._ring.mean(used[0], -1, True, out=mean)
        first.copy_(used[1])


class Ring:
    """The buffers of one :class:`~sglang_eagle3_plugin.runtime.debug.sampling.Debug`; a step takes one and gives it back."""

    def __init__(self) -> None:
        import torch

        self.torch: Any = torch
        self.norm: Any = torch.linalg.vector_norm
        self.mean: Any = torch.mean
        self.float32: Any = torch.float32
        self.dtypes: dict[Any, str] = {}
        # The stream as a number; `current_stream` makes two objects to say it.
        self._raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
        self._free: dict[tuple[int, int], list[Buffers]] = {}
        self._stages: dict[tuple[int, int], Stage] = {}

    def key(self, states: Any) -> tuple[int, int]:
        """Device and stream on which these states come; (-1, 0) where there are no streams."""
        if not states.is_cuda:
            return (-1, 0)
        index = states.get_device()
        return (index, self.stream(index))

    def stream(self, index: int) -> int:
        """This thread's current stream on a CUDA device, as a number."""
        if self._raw_stream is not None:
            return int(self._raw_stream(index))
        return int(self.torch.cuda.current_stream(index).cuda_stream)

    def take(self, states: Any, key: tuple[int, int]) -> Buffers:
        """Buffers that nothing is under way in, for states that come under a key."""
        free = self._free.get(key)
        return free.pop() if free else Buffers(self, states.device, key, _FLOATS)

    def stage(self, states: Any, key: tuple[int, int], width: int) -> Stage | None:
        """The stage of a key, for rows of this width; None where it has rows of another one."""
        stage = self._stages.get(key)
        if stage is None:
            stage = self._stages[key] = Stage(self, states.device, width)
        return stage if stage.width == width else None

    def give(self, buffers: Buffers) -> None:
        """Take buffers back whose measures have been read."""
        self._free.setdefault(buffers.key, []).append(buffers)


class Step:
    """A sampled step under way: passes measured on one stream of the device, and copied together.

    Args:
        number: ``forward_pass_id`` of the target's runner, the same on every rank.
        ring: where its buffers come from.
    """

    __slots__ = ("_buffers", "_ring", "_size", "_stage", "_staged", "_values", "key", "number", "passes", "target_ids")

    def __init__(self, number: int, ring: Ring) -> None:
        self.number = number
        self.passes: list[tuple[Any, ...]] = []
        """Fields of :class:`~sglang_eagle3_plugin.runtime.debug.read.Pass`."""
        self.target_ids: Any = None
        """Token ids (N,) of the target prefill of this step."""
        self.key: tuple[int, int] | None = None
        """Device and stream of the measures so far."""
        self._ring = ring
        self._buffers: Any = None
        self._size = 0
        self._stage: Stage | None = None
        self._staged = self._values = 0

    def measure(
        self,
        name: str,
        states: Any,
        key: tuple[int, int],
        *,
        graph: bool,
        slots: int,
        values: int,
        requests: list[str] | None,
        lengths: list[int] | None,
        chosen: Sequence[str] = (),
        extra: Sequence[tuple[str, Any]] = (),
    ) -> None:
        """Enqueue the measures of one pass.

        Args:
            name: of the pass.
            states: what is fed to, or by, the pass: (N, slots * H), floating point.
            key: see :meth:`Ring.key`; that of the step's passes before.
            graph: whether a CUDA graph was replayed.
            slots: S.
            values: V, first values of each slot's first row.
            requests: see :class:`~sglang_eagle3_plugin.runtime.debug.read.Pass`.
            lengths: likewise.
            chosen: request ids whose rows alone are measured; empty: every row.
            extra: further small tensors to bring along, by name.
        """
        ring = self._ring
        tokens, width = states.shape
        rows, count = states, tokens
        if chosen and (spans := spans_of(requests, lengths, tokens)) is not None:
            rows = ring.torch.cat([states[first:last] for rid, first, last in spans if rid in chosen])
            count = len(rows)
        wide = width // slots
        values = min(values, wide)
        if self._buffers is None:
            self.key = key
            self._buffers = ring.take(states, key)
        staged = -1
        if self._staged + count * slots <= _STAGED_ROWS and (stage := ring.stage(states, key, wide)) is not None:
            staged = self._staged
            stage.put(staged, rows, count, slots)
            self._stage, self._values = stage, values
            self._staged += count * slots
        else:
            self._measure_here(rows.reshape(count, slots, wide), count, slots, values)
        brought = []
        for name_of, tensor in extra:
            at, length = self._size, tensor.numel()
            self._size += length
            self._room(at)
            self._buffers.flat[at : at + length].copy_(tensor.reshape(-1))
            brought.append((name_of, length))
        dtype = ring.dtypes.get(states.dtype)
        if dtype is None:
            dtype = ring.dtypes[states.dtype] = str(states.dtype).removeprefix("torch.")
        self.passes.append((name, graph, tokens, width, dtype, slots, requests, lengths, count, values, staged, brought))

    def _measure_here(self, split: Any, count: int, slots: int, values: int) -> None:
        ring, at = self._ring, self._size
        self._size += (2 * count + values) * slots
        self._room(at)
        norm, mean, first = self._buffers.views(at, count, slots, slots, values)
        chunks = zip(*(one.split(_CHUNK_ROWS) for one in (split, norm, mean)), strict=True)
        for part, its_norm, its_mean in chunks if count > _CHUNK_ROWS else ((split, norm, mean),):
            ring.norm(part, dim=-1, dtype=ring.float32, out=its_norm)
            ring.mean(part, -1, dtype=ring.float32, out=its_mean)
        first.copy_(split[0, :, :values])

    def _room(self, used: int) -> None:
        """See that the buffers hold our size; larger ones get what has been measured, the small ones go, on their own stream."""
        small = self._buffers
        if self._size > small.size:
            large = self._buffers = Buffers(self._ring, small.flat.device, small.key, 1 << (self._size - 1).bit_length())
            if used:
                large.flat[:used].copy_(small.flat[:used])

    def send(self) -> None:
        """Enqueue the reductions that were put off, and the one copy to the host. From any thread; on the stream of the passes."""
        self.target_ids = None
        buffers = self._buffers
        if buffers.event is None or self._ring.stream(buffers.key[0]) == buffers.key[1]:
            self._enqueue()
        else:
            with self._ring.torch.cuda.stream(buffers.stream):
                self._enqueue()

    def _enqueue(self) -> None:
        if self._stage is not None:
            at, rows, values = self._size, self._staged, self._values
            self._size += rows * (2 + values)
            self._room(at)
            self._stage.measure(rows, values, self._buffers.views(at, rows, 1, rows, values))
        buffers = self._buffers
        if buffers.host is not buffers.flat:
            buffers.copy(self._size)  # where there are no CUDA streams, this waits
        if buffers.event is not None:
            buffers.event.record(buffers.stream)

    def arrived(self) -> bool:
        """Whether the copy is here; never waits."""
        event = self._buffers.event
        return event is None or bool(event.query())

    def take(self) -> Arrived:
        """What has arrived, as plain data; the buffers are free for another step."""
        buffers, self._buffers = self._buffers, None
        data = ctypes.string_at(buffers.address, 4 * self._size)
        self._ring.give(buffers)
        return (self.number, self.passes, data)


def embedding_measures(model: Any, ids: Any) -> list[tuple[str, Any]]:
    """Norm and mean (n,) of the first tokens' embeddings, looked up anew; nothing where the table is not at hand.

    Only for a table that is not split over ranks. Placeholder ids of images lie beyond the table and read as its last row.
    """
    import torch

    get = getattr(model, "get_embed_and_head", None)
    if get is None:
        return []
    table = get()[0]
    if getattr(table, "ndim", 0) != 2 or not table.is_floating_point():
        return []
    rows = torch.nn.functional.embedding(ids[:_EMBEDDED_ROWS].clamp(0, len(table) - 1).long(), table)
    return [
        ("embedding_norm", torch.linalg.vector_norm(rows, dim=-1, dtype=torch.float32)),
        ("embedding_mean", rows.mean(dim=-1, dtype=torch.float32)),
    ]


def kept_ids(ids: Any) -> Any:
    """A copy of a prefill's token ids: SGLang shifts them in place for the draft. None for a very long one."""
    return ids.clone() if ids is not None and len(ids) <= _IDS_ROWS else None


def follows(target_ids: Any, draft_ids: Any) -> list[tuple[str, Any]]:
    """(N - 1,): 1 where the draft is fed, beside the state of token i, the target's token i + 1."""
    if target_ids is None or draft_ids is None or target_ids.shape != draft_ids.shape or len(draft_ids) < 2:
        return []
    return [("follows", draft_ids[:-1] == target_ids[1:])]
