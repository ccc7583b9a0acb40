"""Writing a dump so that SIGKILL at any moment loses no acknowledged sample. Stdlib only: it runs in the serving process."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang_eagle3_plugin.hidden_states.layout import ITEM_BYTES, MANIFEST, PIECE, SHARD, Header, sample_key, tree_checksum

MIB, GIB = 1 << 20, 1 << 30


class DumpFullError(OSError):
    """A quota or the low-disk limit is reached. What was acknowledged stays; nothing more is taken."""


@dataclass(frozen=True)
class Sample:
    """One finished request, as raw little-endian bytes.

    Attributes:
        token_ids: N ids.
        tensors: name -> (safetensors dtype, shape, data), the names those of `layout`; the data is one C-contiguous bytes-like, or
            a list of such, which follow on each other.
        request: the request's id, for the manifest only.
        prompt_tokens: how many of the N are the prompt.
    """

    token_ids: Sequence[int]
    tensors: Mapping[str, tuple[str, tuple[int, ...], Any]]
    request: str = ""
    prompt_tokens: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(view.nbytes for _, _, data in self.tensors.values() for view in _views(data))


@dataclass
class Writer:
    """The one writer of its own files in a dump directory. Any number of writers, of any processes, share a directory.

    A sample is acknowledged when :meth:`flush` has returned, or with ``parallel`` 1 the :meth:`add` that filled its shard.

    Attributes:
        directory: created 0700 if absent.
        header: see `layout.Header`.
        shard_bytes: a shard is written when it holds at least this much; the bound of what a crash can lose.
        max_bytes: quota of the directory, all writers together; None for none.
        min_free_bytes: stop before the file system has less than this left.
        parallel: shards that may be on their way to the disk at once, so that one's fsync does not hold up the next.

    Raises:
        OSError: the directory cannot be written. `DumpFullError` when a limit is reached.
    """

    directory: Path
    header: Header
    shard_bytes: int = GIB // 4
    max_bytes: int | None = None
    min_free_bytes: int = GIB
    parallel: int = 1
    written_bytes: int = 0
    written_samples: int = 0
    _pending: list[Sample] = field(default_factory=list)
    _pending_bytes: int = 0
    _flying: list[tuple[int, Future[None]]] = field(default_factory=list)
    _next_shard: int = 0

    def __post_init__(self) -> None:
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = threading.RLock()
        self._manifest_lock = threading.Lock()
        self._hashers = ThreadPoolExecutor(min(4, os.cpu_count() or 1), thread_name_prefix="eagle3-dump-hash")
        self._shards = ThreadPoolExecutor(self.parallel, thread_name_prefix="eagle3-dump-shard")
        sweep(self.directory)
        self.id, self._manifest = self._claim()
        self._append(self.header.to_json())
        _fsync_directory(self.directory)

    def add(self, sample: Sample) -> None:
        """Take a sample; begin to write the shard if it is full. Raises what went wrong with an earlier shard, too."""
        with self._lock:
            self._pending.append(sample)
            self._pending_bytes += sample.nbytes
            if self._pending_bytes >= self.shard_bytes:
                self._launch()
                self._land(self.parallel - 1)

    def flush(self) -> None:
        """Write and acknowledge what was taken so far. On any error those samples are dropped and the error is raised."""
        with self._lock:
            self._launch()
            self._land(0)

    def note_counts(self, counts: Mapping[str, int]) -> None:
        """Record what was dropped, refused or missed so far; a later line replaces an earlier one."""
        self._append({"kind": "counts", "counts": dict(counts)})

    def close(self) -> None:
        """Flush, and let go of the manifest."""
        with self._lock:
            try:
                self.flush()
            finally:
                self._shards.shutdown()
                self._hashers.shutdown()
                os.close(self._manifest)

    def abandon(self) -> None:
        """After an error: let shards that are on their way end, well or not, take nothing more, and let go of the manifest."""
        with self._lock:
            self._pending.clear()
            self._shards.shutdown(cancel_futures=True)
            self._hashers.shutdown()
            os.close(self._manifest)

    def _launch(self) -> None:
        samples, self._pending = self._pending, []
        self._pending_bytes = 0
        if samples:
            tensors = {f"{index}.{name}": tensor for index, sample in enumerate(samples) for name, tensor in sample.tensors.items()}
            prefix, buffers = serialize(tensors, {"header": json.dumps(self.header.to_json(), sort_keys=True)})
            views = [memoryview(prefix), *buffers]
            size = sum(view.nbytes for view in views)
            self._make_room(size)
            name = f"{self.id}-{self._next_shard:06d}.safetensors"
            self._next_shard += 1
            self._flying.append((size, self._shards.submit(self._acknowledge, name, views, samples)))

    def _land(self, aloft: int) -> None:
        """Wait until at most so many shards are on their way."""
        while len(self._flying) > aloft:
            self._flying.pop(0)[1].result()

    def _acknowledge(self, name: str, views: Sequence[memoryview], samples: Sequence[Sample]) -> None:
        total = sum(view.nbytes for view in views)
        line = {"kind": "shard", "file": name, "bytes": total, "checksum": self._write_shard(self.directory / name, views)}
        self._append(line | {"samples": [_entry(sample) for sample in samples]})
        self.written_bytes += total
        self.written_samples += len(samples)

    def _claim(self) -> tuple[str, int]:
        """Create the next manifest that nobody has; its lock, held as long as this process lives, says that its writer lives."""
        taken = [int(match[1][1:]) for path in self.directory.iterdir() if (match := MANIFEST.fullmatch(path.name))]
        number = max(taken, default=0) + 1
        while True:
            writer = f"w{number:04d}"
            try:
                flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
                descriptor = os.open(self.directory / f"manifest-{writer}.jsonl", flags, 0o600)
            except FileExistsError:
                number += 1
                continue
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            return writer, descriptor

    def _append(self, line: Mapping[str, Any]) -> None:
        data = memoryview(json.dumps(line, separators=(",", ":")).encode() + b"\n")
        with self._manifest_lock:
            start = os.fstat(self._manifest).st_size
            try:
                while data:
                    data = data[os.write(self._manifest, data) :]
                os.fsync(self._manifest)
            except OSError:
                os.ftruncate(self._manifest, start)  # half a line would spoil the next one
                raise

    def _make_room(self, size: int) -> None:
        """See that a shard of this size fits, or raise `DumpFullError`."""
        while True:
            try:
                self._check_room(size)
                return
            except DumpFullError:
                # What is on its way may be on the disk already, whole or in part, and is counted twice then. That is never too
                # little; whether it was too much shows when the oldest of it has landed.
                if not self._flying:
                    raise
                self._land(len(self._flying) - 1)

    def _check_room(self, size: int) -> None:
        aloft = sum(one for one, _ in self._flying)
        free = shutil.disk_usage(self.directory).free
        if free - size - aloft < self.min_free_bytes:
            raise DumpFullError(
                f"the disk of {self.directory} has {free / MIB:.1f} MiB free, and {(size + aloft) / MIB:.1f} MiB more would leave "
                f"less than {self.min_free_bytes / GIB:g} GiB"
            )
        if self.max_bytes is not None and used_bytes(self.directory) + size + aloft > self.max_bytes:
            raise DumpFullError(f"{self.directory} would hold more than its quota of {self.max_bytes / GIB:.1f} GiB")

    def _write_shard(self, path: Path, views: Sequence[memoryview]) -> str:
        temporary = path.with_name(path.name + ".tmp")
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "wb", buffering=0) as file:
                # Hashing and writing both let go of the GIL, so the checksum costs no time on top of the disk's.
                hashing = [self._hashers.submit(_digest, piece) for piece in _pieces(views)]
                for view in views:
                    rest = view
                    while rest:
                        rest = rest[file.write(rest) :]
                os.fsync(file.fileno())
                checksum = tree_checksum(piece.result() for piece in hashing)
            temporary.rename(path)
            _fsync_directory(self.directory)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        return checksum


def serialize(
    tensors: Mapping[str, tuple[str, tuple[int, ...], Any]], metadata: Mapping[str, str]
) -> tuple[bytes, list[memoryview]]:
    """A safetensors file without a copy of the data: (length and JSON header, then the buffers in order).

    The layout is the safetensors format's own (https://github.com/huggingface/safetensors): 8 bytes of header length, JSON, data.

    Args:
        tensors: name -> (safetensors dtype, shape, data), as in `Sample`.

    Raises:
        ValueError: a buffer's size does not fit its dtype and shape.
    """
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    buffers = []
    offset = 0
    for name, (dtype, shape, data) in tensors.items():
        views = _views(data)
        expected = ITEM_BYTES[dtype]
        for extent in shape:
            expected *= extent
        given = sum(view.nbytes for view in views)
        if given != expected:
            raise ValueError(f"tensor {name} of shape {shape} and dtype {dtype} has {given} bytes, not {expected}")
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + expected]}
        offset += expected
        buffers += views
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, buffers


def _views(data: Any) -> list[memoryview]:
    return [memoryview(part).cast("B") for part in (data if isinstance(data, list) else [data]) if memoryview(part).nbytes]


def _pieces(views: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """The same bytes in pieces of `layout.PIECE`."""
    piece: list[memoryview] = []
    room = PIECE
    for view in views:
        rest = view
        while rest:
            piece.append(rest[:room])
            rest, room = rest[room:], room - len(rest[:room])
            if not room:
                yield piece
                piece, room = [], PIECE
    if piece:
        yield piece


def _digest(piece: Sequence[memoryview]) -> bytes:
    digest = hashlib.sha256()
    for view in piece:
        digest.update(view)
    return digest.digest()


def _entry(sample: Sample) -> dict[str, Any]:
    return {
        "key": sample_key(sample.token_ids),
        "tokens": len(sample.token_ids),
        "prompt_tokens": sample.prompt_tokens,
        "request": sample.request,
    }


def used_bytes(directory: Path) -> int:
    """Bytes of all shards in a dump directory, but for those on their way."""
    total = 0
    with os.scandir(directory) as entries:
        for entry in entries:
            if SHARD.fullmatch(entry.name) and not entry.name.endswith(".tmp"):
                try:
                    total += entry.stat(follow_symlinks=False).st_size
                except FileNotFoundError:  # swept meanwhile
                    continue
    return total


def sweep(directory: Path) -> list[str]:
    """Remove what dead writers left half done: temporary shards, and whole ones that their manifest never acknowledged."""
    removed = []
    for path in sorted(directory.iterdir()):
        match = MANIFEST.fullmatch(path.name)
        if match is None:
            continue
        with path.open("rb") as manifest:
            try:
                fcntl.flock(manifest, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                continue  # its writer lives
            acknowledged = _acknowledged(manifest.read())
            for shard in directory.glob(f"{match[1]}-*"):
                if SHARD.fullmatch(shard.name) and shard.name not in acknowledged:
                    shard.unlink(missing_ok=True)
                    removed.append(shard.name)
    return removed


def _acknowledged(manifest: bytes) -> set[str]:
    names = set()
    for raw in manifest.split(b"\n")[:-1]:
        try:
            names.add(json.loads(raw)["file"])
        except (ValueError, KeyError, TypeError):
            continue
    return names


def _fsync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
