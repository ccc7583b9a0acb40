"""The device side of debug: what is measured of each pass of a step, and its one asynchronous way to the host.

Each row (token) of each slot becomes a norm and a mean, on the device; those and a few first values are all that is copied. Nothing
here waits for the device: the copy goes to pinned memory, an event behind it, and a later step asks whether the event has passed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

_CHUNK_ROWS = 1024
"""Rows measured in one launch, so that no backend's float32 copy of a long prefill takes memory that serving counts on."""
_EMBEDDED_ROWS = 64
"""Rows of a prefill whose embeddings are looked up again."""
_IDS_ROWS = 65536
"""Tokens of a prefill that are kept to see whether the draft's follow them."""


@dataclass(frozen=True)
class Pass:
    """One pass of a step, as known on the host.

    Attributes:
        name: ``target prefill``, ``target verify``, ``target decode``, ``draft extend`` or ``draft decode``.
        graph: whether a CUDA graph was replayed.
        tokens: N, rows of the pass.
        width: of each row; slots times H.
        dtype: as torch writes it, without ``torch.``.
        slots: S, how many states of width H stand side by side.
        spans: (request id, first row, row after the last), or None where rows can't be told apart by request.
        rows: how many rows were measured: N, or those of the requests asked for.
        layout: name -> (offset, shape) of what was measured, in the step's flat float32 buffer.
    """

    name: str
    graph: bool
    tokens: int
    width: int
    dtype: str
    slots: int
    spans: tuple[tuple[str, int, int], ...] | None
    rows: int
    layout: dict[str, tuple[int, tuple[int, ...]]]


@dataclass
class Step:
    """A sampled step under way: passes measured on one stream of the device, not yet copied.

    Attributes:
        number: ``forward_pass_id`` of the target's runner, the same on every rank.
    """

    number: int
    passes: list[Pass] = field(default_factory=list)
    target_ids: Any = None
    """Token ids (N,) of the target prefill of this step."""
    _parts: list[Any] = field(default_factory=list)
    _size: int = 0
    _stream: Any = None
    _host: Any = None
    _event: Any = None

    def measure(
        self,
        name: str,
        states: Any,
        *,
        graph: bool,
        slots: int,
        values: int,
        spans: tuple[tuple[str, int, int], ...] | None,
        chosen: Sequence[str] = (),
        extra: dict[str, Any] | None = None,
    ) -> None:
        """Enqueue the measures of one pass.

        Args:
            name: of the pass.
            states: what is fed to, or by, the pass: (N, slots * H), floating point.
            graph: whether a CUDA graph was replayed.
            slots: S.
            values: V, first values of each slot's first row.
            spans: see :class:`Pass`.
            chosen: request ids whose rows alone are measured; empty: every row.
            extra: further small tensors to bring along, by name.
        """
        import torch

        tokens, width = states.shape
        if states.is_cuda and self._stream is None:
            self._stream = torch.cuda.current_stream(states.device)
        rows = states
        if chosen and spans is not None:
            rows = torch.cat([states[first:last] for rid, first, last in spans if rid in chosen])
        split = rows.unflatten(-1, (slots, width // slots))
        layout: dict[str, tuple[int, tuple[int, ...]]] = {}
        chunks = split.split(_CHUNK_ROWS) if len(split) > _CHUNK_ROWS else (split,)
        for key, measured in (
            ("norm", [torch.linalg.vector_norm(chunk, dim=-1, dtype=torch.float32) for chunk in chunks]),
            ("mean", [chunk.mean(dim=-1, dtype=torch.float32) for chunk in chunks]),
        ):
            layout[key] = (self._size, (len(split), slots))
            for part in measured:
                self._add(part)
        for key, tensor in {"first": split[:1, :, :values], **(extra or {})}.items():
            layout[key] = (self._size, tuple(tensor.shape))
            self._add(tensor.float())
        dtype = str(states.dtype).removeprefix("torch.")
        self.passes.append(Pass(name, graph, tokens, width, dtype, slots, spans, len(split), layout))

    def _add(self, tensor: Any) -> None:
        self._parts.append(tensor.reshape(-1))
        self._size += tensor.numel()

    def on_other_stream(self, states: Any) -> bool:
        """Whether these states come on another stream than the measures before them."""
        import torch

        return bool(states.is_cuda and self._stream is not None and torch.cuda.current_stream(states.device) != self._stream)

    def send(self) -> None:
        """Enqueue the one copy to the host. From any thread; on the stream of the measures."""
        import torch

        if self._stream is None:
            self._host = torch.cat(self._parts)
        else:
            with torch.cuda.stream(self._stream):
                flat = torch.cat(self._parts)
                self._host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
                self._host.copy_(flat, non_blocking=True)
                self._event = torch.cuda.Event()
                self._event.record(self._stream)
        self._parts.clear()
        self.target_ids = None

    def arrived(self) -> bool:
        """Whether the copy is here; never waits."""
        return self._event is None or bool(self._event.query())

    def read(self, one: Pass, key: str) -> list[Any]:
        """Return what :meth:`measure` enqueued, as nested lists of floats, once it has arrived; [] where there is none."""
        if key not in one.layout:
            return []
        offset, shape = one.layout[key]
        size = 1
        for length in shape:
            size *= length
        values: list[Any] = self._host[offset : offset + size].view(shape).tolist()
        return values


def embedding_measures(model: Any, ids: Any) -> dict[str, Any]:
    """Norm and mean (n,) of the first tokens' embeddings, looked up anew; nothing where the table is not at hand.

    Only for a table that is not split over ranks. Placeholder ids of images lie beyond the table and read as its last row.
    """
    import torch

    get = getattr(model, "get_embed_and_head", None)
    if get is None:
        return {}
    table = get()[0]
    if getattr(table, "ndim", 0) != 2 or not table.is_floating_point():
        return {}
    rows = torch.nn.functional.embedding(ids[:_EMBEDDED_ROWS].clamp(0, len(table) - 1).long(), table)
    return {
        "embedding_norm": torch.linalg.vector_norm(rows, dim=-1, dtype=torch.float32),
        "embedding_mean": rows.mean(dim=-1, dtype=torch.float32),
    }


def kept_ids(ids: Any) -> Any:
    """A copy of a prefill's token ids: SGLang shifts them in place for the draft. None for a very long one."""
    return ids.clone() if ids is not None and len(ids) <= _IDS_ROWS else None


def follows(target_ids: Any, draft_ids: Any) -> dict[str, Any]:
    """(N - 1,): 1 where the draft is fed, beside the state of token i, the target's token i + 1."""
    if target_ids is None or draft_ids is None or target_ids.shape != draft_ids.shape or len(draft_ids) < 2:
        return {}
    return {"follows": draft_ids[:-1] == target_ids[1:]}
