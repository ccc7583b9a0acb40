"""From device tensors to a dump on disk: bounded host memory, a copy stream of its own, one writer thread.

The serving thread only launches copies. A pass's rows become a `Block` in pinned memory; requests hold slices of blocks, and a
block gives its bytes back to the budget when the last slice of it has been written or dropped.
"""

from __future__ import annotations

import array
import collections
import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_eagle3_plugin import records
from sglang_eagle3_plugin.hidden_states.layout import Header
from sglang_eagle3_plugin.hidden_states.writer import Sample, Writer

logger = logging.getLogger("sglang_eagle3_plugin")

DTYPES = {
    "torch.bfloat16": "BF16",
    "torch.float16": "F16",
    "torch.float32": "F32",
    "torch.float8_e4m3fn": "F8_E4M3",
    "torch.int64": "I64",
}
"""torch dtype -> safetensors dtype."""

SHARDS_ALOFT = 3
"""Shards on their way to the disk at once."""

IDLE_FLUSH_S = 0.5
"""An idle writer acknowledges what it has after so long."""


class Budget:
    """Host bytes in use, and the most that may be."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self.peak = 0
        self._changed = threading.Condition()

    def take(self, size: int) -> bool:
        """Take ``size`` bytes if they are free."""
        with self._changed:
            if self.used + size > self.limit:
                return False
            self.used += size
            self.peak = max(self.peak, self.used)
            return True

    def give(self, size: int) -> None:
        """Give bytes back."""
        with self._changed:
            self.used -= size
            self._changed.notify_all()

    def wait(self, seconds: float) -> None:
        """Wait until something is given back, at most so long."""
        with self._changed:
            self._changed.wait(seconds)


class Block:
    """One pass's rows on the host: name -> (safetensors dtype, row shape, uint8 array of rows), complete once `ready` returns."""

    def __init__(self, tensors: Mapping[str, Any], stream: Any, budget: Budget) -> None:
        import torch

        self._event = None
        on_device = stream is not None
        host = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) if on_device else tensor.clone()
            for name, tensor in tensors.items()
        }
        if on_device:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for name, tensor in tensors.items():
                    host[name].copy_(tensor, non_blocking=True)
                    tensor.record_stream(stream)
                self._event = torch.cuda.Event()
                self._event.record(stream)
        self.rows = {
            name: (
                DTYPES[str(tensor.dtype)],
                tuple(tensor.shape[1:]),
                tensor.reshape(tensor.shape[0], -1).view(torch.uint8).numpy(),
            )
            for name, tensor in host.items()
        }
        for _, _, array_of_rows in self.rows.values():
            # Slices of it, also those that wait in a shard, keep it alive; the block itself may be gone by then.
            weakref.finalize(array_of_rows, budget.give, array_of_rows.nbytes)

    def ready(self) -> None:
        """Wait for the copy; on the writer thread only."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None


@dataclass(frozen=True)
class Finished:
    """A request whose states are complete.

    Attributes:
        token_ids: what the scheduler says was run, N ids.
        parts: (block, first row, last row + 1), in order, N rows together.
        request: the request's id.
        prompt_tokens: how many of the N are the prompt.
    """

    token_ids: Sequence[int]
    parts: Sequence[tuple[Block, int, int]]
    request: str
    prompt_tokens: int


class Spool:
    """The way to disk. `counts` says what became of everything that was handed in.

    Args:
        directory: of the dump.
        header: makes the header from the first sample's shapes: (aux row shape, safetensors dtype) -> Header.
        options: keywords for `Writer`.
        limit: bytes that blocks may hold; what the writer gathers for a shard is inside it.
        failed: called once, on the writer thread, when writing is given up.
    """

    def __init__(
        self,
        directory: Path,
        header: Callable[[tuple[int, ...], str], Header],
        options: Mapping[str, Any],
        limit: int,
        failed: Callable[[], None],
    ) -> None:
        self.directory = directory
        self.budget = Budget(limit)
        self.counts: collections.Counter[str] = collections.Counter()
        self.problem = ""
        """Why writing was given up."""
        self._header = header
        # Shards that are being gathered and on their way hold their blocks: together at most half of the limit.
        self._options = {**options, "shard_bytes": min(128 << 20, max(1, limit // 8)), "parallel": SHARDS_ALOFT}
        self._failed = failed
        self._queue: queue.SimpleQueue[Finished | None] = queue.SimpleQueue()
        self._waiting = 0
        self._streams: dict[Any, Any] = {}
        self._broken = False
        self._noted: dict[str, int] = {}
        self._thread = threading.Thread(target=self._run, name="eagle3-dump-writer", daemon=True)
        self._thread.start()

    def copy(self, tensors: Mapping[str, Any], wait: bool) -> Block | None:
        """Start the copy of one pass's rows to the host; None when there is no room.

        Args:
            tensors: name -> (N, ...) tensors of one device.
            wait: back-pressure: wait for the writer as long as it has something to write.

        Raises:
            Exception: torch's own, where it finds no memory; no bytes are taken then.
        """
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        while not self.budget.take(size):
            if not wait or not self.busy or size > self.budget.limit or self._broken:
                return None
            self._waiting += 1
            try:
                self.budget.wait(0.05)
            finally:
                self._waiting -= 1
        try:
            return Block(tensors, self._stream(next(iter(tensors.values())).device), self.budget)
        except BaseException:  # no pinned memory, for one: there is no block that would give them back
            self.budget.give(size)
            raise

    @property
    def busy(self) -> bool:
        """The writer has something in hand, or on its way to the disk: room will come."""
        return self._busy or not self._queue.empty()

    _busy = False

    def submit(self, finished: Finished) -> None:
        """Hand a finished request to the writer."""
        self._queue.put(finished)

    def stop(self) -> None:
        """Write what is handed in, and end."""
        self._queue.put(None)
        self._thread.join()

    def _stream(self, device: Any) -> Any:
        if device.type != "cuda":
            return None
        if device not in self._streams:
            import torch

            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]

    def _run(self) -> None:
        writer: Writer | None = None
        try:
            while True:
                try:
                    finished = self._queue.get(timeout=0.02 if self._waiting else IDLE_FLUSH_S)
                except queue.Empty:
                    self._flush(writer)
                    continue
                if finished is None:
                    break
                self._busy = True
                writer = self._take(finished, writer)
                del finished  # its blocks live as long as somebody refers to them
            self._flush(writer)
        except Exception as error:
            self._give_up(error)
        finally:
            if writer is not None:
                writer.abandon() if self._broken else writer.close()

    def _take(self, finished: Finished, writer: Writer | None) -> Writer | None:
        sample = self._sample(finished)
        if sample is None:
            return writer
        if writer is None:
            dtype, shape, _ = sample.tensors["aux"]
            writer = Writer(self.directory, self._header(shape[1:], dtype), **self._options)
            logger.info("sglang-eagle3-plugin: hidden states go to %s as writer %s.", self.directory, writer.id)
        self.counts["samples"] += 1
        self.counts["tokens"] += len(sample.token_ids)
        writer.add(sample)
        return writer

    def _sample(self, finished: Finished) -> Sample | None:
        tokens = len(finished.token_ids)
        for block, _, _ in finished.parts:
            block.ready()
        tensors: dict[str, tuple[str, tuple[int, ...], Any]] = {}
        for name, (dtype, shape, _) in finished.parts[0][0].rows.items():
            tensors[name] = (dtype, (tokens, *shape), [block.rows[name][2][start:end] for block, start, end in finished.parts])
        if (
            b"".join(memoryview(part).cast("B") for part in tensors["input_ids"][2])
            != array.array("q", finished.token_ids).tobytes()
        ):
            # The rows that came by are not those of the tokens that the scheduler ran: never a sample.
            self.counts["mismatched"] += 1
            return None
        positions = array.array("q", range(tokens)).tobytes()
        return Sample(
            list(finished.token_ids),
            {**tensors, "positions": ("I64", (tokens,), positions)},
            finished.request,
            finished.prompt_tokens,
        )

    def _flush(self, writer: Writer | None) -> None:
        if writer is not None:
            writer.flush()
        self._busy = False
        if dict(self.counts) != self._noted:
            self._noted = dict(self.counts)
            if writer is not None:
                writer.note_counts(self._noted)
            records.note("dump", {"directory": str(self.directory), **self._noted})

    def _give_up(self, error: Exception) -> None:
        self._broken = True
        self.problem = f"the dump to {self.directory} has ended: {error}"
        self._failed()
        logger.warning(
            "sglang-eagle3-plugin: the dump to %s is off in this process, serving goes on: %s (%s).",
            self.directory,
            error,
            type(error).__name__,
        )
        self._busy = False
        deadline = time.monotonic() + 5  # let go of what was handed in meanwhile
        while time.monotonic() < deadline:
            try:
                if self._queue.get(timeout=0.1) is None:
                    break
                self.counts["dropped_after_failure"] += 1
            except queue.Empty:
                continue
        records.note("dump", {"directory": str(self.directory), "failed": str(error), **self.counts})
