"""Writing a dump so that SIGKILL at any moment loses no acknowledged sample. Stdlib only: it runs in the serving process."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang_eagle3_plugin.hidden_states.layout import ITEM_BYTES, MANIFEST, SHARD, Header, sample_key

GIB = 1 << 30


class DumpFullError(OSError):
    """A quota or the low-disk limit is reached. What was acknowledged stays; nothing more is taken."""


@dataclass(frozen=True)
class Sample:
    """One finished request, as raw little-endian bytes.

    Attributes:
        token_ids: N ids.
        tensors: name -> (safetensors dtype, shape, C-contiguous bytes-like); the names are those of `layout`.
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
        return sum(memoryview(data).nbytes for _, _, data in self.tensors.values())


@dataclass
class Writer:
    """The one writer of its own files in a dump directory. Any number of writers, of any processes, share a directory.

    A sample is acknowledged when :meth:`flush` (called by :meth:`add` for a full shard) has returned.

    Attributes:
        directory: created 0700 if absent.
        header: see `layout.Header`.
        shard_bytes: a shard is written when it holds at least this much; the bound of what a crash can lose.
        max_bytes: quota of the directory, all writers together; None for none.
        min_free_bytes: stop before the file system has less than this left.

    Raises:
        OSError: the directory cannot be written. `DumpFullError` when a limit is reached.
    """

    directory: Path
    header: Header
    shard_bytes: int = GIB // 4
    max_bytes: int | None = None
    min_free_bytes: int = GIB
    written_bytes: int = 0
    written_samples: int = 0
    _pending: list[Sample] = field(default_factory=list)
    _pending_bytes: int = 0
    _next_shard: int = 0

    def __post_init__(self) -> None:
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = threading.RLock()
        self._hasher = ThreadPoolExecutor(1, thread_name_prefix="eagle3-dump-hash")
        sweep(self.directory)
        self.id, self._manifest = self._claim()
        self._append(self.header.to_json())
        _fsync_directory(self.directory)

    def add(self, sample: Sample) -> None:
        """Take a sample; write the shard if it is full."""
        with self._lock:
            self._pending.append(sample)
            self._pending_bytes += sample.nbytes
            if self._pending_bytes >= self.shard_bytes:
                self.flush()

    def flush(self) -> None:
        """Write and acknowledge what was taken so far. On any error those samples are dropped and the error is raised."""
        with self._lock:
            samples, self._pending = self._pending, []
            size, self._pending_bytes = self._pending_bytes, 0
            if not samples:
                return
            self._check_room(size)
            name = f"{self.id}-{self._next_shard:06d}.safetensors"
            self._next_shard += 1
            total, checksum = self._write_shard(self.directory / name, samples)
            self._append(
                {
                    "kind": "shard",
                    "file": name,
                    "bytes": total,
                    "sha256": checksum,
                    "samples": [
                        {
                            "key": sample_key(sample.token_ids),
                            "tokens": len(sample.token_ids),
                            "prompt_tokens": sample.prompt_tokens,
                            "request": sample.request,
                        }
                        for sample in samples
                    ],
                }
            )
            self.written_bytes += total
            self.written_samples += len(samples)

    def note_counts(self, counts: Mapping[str, int]) -> None:
        """Record what was dropped, refused or missed so far; a later line replaces an earlier one."""
        with self._lock:
            self._append({"kind": "counts", "counts": dict(counts)})

    def close(self) -> None:
        """Flush, and let go of the manifest."""
        with self._lock:
            try:
                self.flush()
            finally:
                self._hasher.shutdown()
                os.close(self._manifest)

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
        start = os.fstat(self._manifest).st_size
        try:
            while data:
                data = data[os.write(self._manifest, data) :]
            os.fsync(self._manifest)
        except OSError:
            os.ftruncate(self._manifest, start)  # half a line would spoil the next one
            raise

    def _check_room(self, size: int) -> None:
        if shutil.disk_usage(self.directory).free - size < self.min_free_bytes:
            raise DumpFullError(f"{self.directory} would have less than {self.min_free_bytes / GIB:.1f} GiB free")
        if self.max_bytes is not None and used_bytes(self.directory) + size > self.max_bytes:
            raise DumpFullError(f"{self.directory} would hold more than its quota of {self.max_bytes / GIB:.1f} GiB")

    def _write_shard(self, path: Path, samples: Sequence[Sample]) -> tuple[int, str]:
        tensors = {f"{index}.{name}": tensor for index, sample in enumerate(samples) for name, tensor in sample.tensors.items()}
        prefix, buffers = serialize(tensors, {"header": json.dumps(self.header.to_json(), sort_keys=True)})
        temporary = path.with_name(path.name + ".tmp")
        digest = hashlib.sha256(prefix)
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "wb", buffering=0) as file:
                # Hashing and writing both let go of the GIL, so the checksum costs no time on top of the disk's.
                hashing = self._hasher.submit(_update, digest, buffers)
                for buffer in (memoryview(prefix), *buffers):
                    rest = buffer
                    while rest:
                        rest = rest[file.write(rest) :]
                os.fsync(file.fileno())
                hashing.result()
            temporary.rename(path)
            _fsync_directory(self.directory)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        return len(prefix) + sum(buffer.nbytes for buffer in buffers), digest.hexdigest()


def serialize(
    tensors: Mapping[str, tuple[str, tuple[int, ...], Any]], metadata: Mapping[str, str]
) -> tuple[bytes, list[memoryview]]:
    """A safetensors file without a copy of the data: (length and JSON header, then the buffers in order).

    The layout is the safetensors format's own (https://github.com/huggingface/safetensors): 8 bytes of header length, JSON, data.

    Args:
        tensors: name -> (safetensors dtype, shape, C-contiguous bytes-like).

    Raises:
        ValueError: a buffer's size does not fit its dtype and shape.
    """
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    buffers = []
    offset = 0
    for name, (dtype, shape, data) in tensors.items():
        buffer = memoryview(data).cast("B")
        expected = ITEM_BYTES[dtype]
        for extent in shape:
            expected *= extent
        if buffer.nbytes != expected:
            raise ValueError(f"tensor {name} of shape {shape} and dtype {dtype} has {buffer.nbytes} bytes, not {expected}")
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + expected]}
        offset += expected
        buffers.append(buffer)
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, buffers


def _update(digest: hashlib._Hash, buffers: Sequence[memoryview]) -> None:
    for buffer in buffers:
        digest.update(buffer)


def used_bytes(directory: Path) -> int:
    """Bytes of all shards in a dump directory, temporary ones too."""
    total = 0
    with os.scandir(directory) as entries:
        for entry in entries:
            if SHARD.fullmatch(entry.name):
                try:
                    total += entry.stat(follow_symlinks=False).st_size
                except FileNotFoundError:  # renamed or swept meanwhile
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
