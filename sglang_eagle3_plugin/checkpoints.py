"""What a checkpoint holds, from its safetensors headers alone: names, dtypes and shapes, never the weights.

The format: eight bytes, little-endian, give the length of a JSON header; the header names every tensor with its dtype, shape and
the byte range of its data, counted from the header's end (https://huggingface.co/docs/safetensors). A header is checked against the
size of its own file before anything of its claimed size is read, so a broken or hostile file costs a sentence.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang_eagle3_plugin.errors import UserError
from sglang_eagle3_plugin.paths import expanded

BITS: dict[str, int] = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip
"""Bits of one element, by safetensors dtype."""

LARGEST_HEADER = 100_000_000
"""Bytes; the limit of the safetensors library itself."""
LARGEST_JSON = 64 * 1024 * 1024
"""Bytes; the most that is read of a config or an index."""
LARGEST_TABLE = 64 * 1024 * 1024
"""Bytes; the most that is read of one vocabulary table (d2t, t2d)."""
_LARGEST_DIMENSION = 1 << 63

_REFUSED = {
    ".gguf": "is a GGUF file, which this tool does not read; give the safetensors checkpoint that it was converted from",
    ".bin": "is a pickled PyTorch file, which this tool does not open (reading one runs code); convert it to safetensors",
    ".pt": "is a pickled PyTorch file, which this tool does not open (reading one runs code); convert it to safetensors",
    ".pth": "is a pickled PyTorch file, which this tool does not open (reading one runs code); convert it to safetensors",
}


@dataclass(frozen=True)
class Tensor:
    """One tensor of a header: safetensors dtype, shape, and where its bytes lie.

    Attributes:
        begin: offset of the first byte in ``file``; ``end`` is one past the last.
        data: its bytes, where it stands in no file.
    """

    dtype: str
    shape: tuple[int, ...]
    file: Path | None = None
    begin: int = 0
    end: int = 0
    data: bytes | None = None

    @property
    def readable(self) -> bool:
        """Whether its values can be had at all."""
        return self.file is not None or self.data is not None

    def read(self, offset: int, length: int, limit: int, what: str) -> bytes:
        """Read some of its bytes; see :func:`read_table` and :func:`read_row`."""
        if self.data is not None:
            return self.data[offset : offset + length]
        return b"" if self.file is None else _read(self.file, self.begin + offset, length, limit, what)


@dataclass
class Checkpoint:
    """The headers of a checkpoint, as far as they were asked for.

    Attributes:
        tensors: the tensors that ``keep`` let through, by name.
        count: all tensors, kept or not.
        files: shards read.
        problems: one sentence for each shard that is missing or disagrees with the index.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    count: int = 0
    files: int = 0
    problems: list[str] = field(default_factory=list)

    def ending(self, *suffixes: str) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors whose name is one of the suffixes, or ends with one after a dot."""
        for name, tensor in self.tensors.items():
            for suffix in suffixes:
                if name == suffix or name.endswith("." + suffix):
                    yield name, tensor
                    break

    def find(self, *suffixes: str) -> tuple[str, Tensor] | None:
        """Return the first of :meth:`ending`, or None."""
        return next(self.ending(*suffixes), None)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        UserError: it cannot be read, is larger than ``LARGEST_JSON``, or is no JSON object.
    """
    data = _read(path, 0, _size(path), LARGEST_JSON, "a config")
    return _parse(data, path, "")


def read_header(path: Path, keep: Callable[[str], bool] = lambda name: True) -> tuple[dict[str, Tensor], int]:
    """Read the header of a safetensors file: the tensors that ``keep`` lets through, and the number of all.

    Raises:
        UserError: the file is no safetensors file, or is cut short, or its header contradicts itself or the file's size.
    """
    size = _size(path)
    if size < 8:
        raise UserError(f"{path} is {size} bytes long, too short for a safetensors file; download it again")
    length = int.from_bytes(_read(path, 0, 8, 8, "a header"), "little")
    if length > size - 8:
        raise UserError(f"the header of {path} claims {length} bytes where the file has {size}; {_instead(path)}")
    if length > LARGEST_HEADER:
        raise UserError(f"the header of {path} is {length} bytes long, more than safetensors allows ({LARGEST_HEADER})")
    header = _parse(_read(path, 8, length, LARGEST_HEADER, "a header"), path, "the header of ")
    header.pop("__metadata__", None)
    start = 8 + length
    room = size - start
    kept: dict[str, Tensor] = {}
    at = 0
    jumps: list[tuple[int, int]] = []
    # A large checkpoint has 200,000 of these, so the loop does as little as it can.
    for name, entry in header.items():
        try:
            dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
            bits = BITS.get(dtype)
            elements = 1
            if type(shape) is not list or len(shape) > 64:
                raise ValueError
            for dimension in shape:
                if type(dimension) is not int or not 0 <= dimension < _LARGEST_DIMENSION:
                    raise ValueError
                elements *= dimension
            if type(begin) is not int or type(end) is not int or not 0 <= begin <= end:
                raise ValueError
        except (KeyError, TypeError, ValueError):
            raise UserError(f"tensor {name[:80]!r} in the header of {path} is malformed; the file is damaged") from None
        if end > room:
            raise UserError(
                f"tensor {name[:80]!r} of {path} ends at byte {start + end}, beyond the file's {size}: it is cut short; "
                "download it again"
            )
        if bits is not None and elements * bits != (end - begin) * 8:
            raise UserError(
                f"tensor {name[:80]!r} in the header of {path} has a shape that does not fit its {end - begin} bytes; "
                "the file is damaged"
            )
        if begin == at and not jumps:
            at = end
        else:  # not in the order of their bytes, which is allowed
            jumps.append((begin, end))
        if keep(name):
            kept[name] = Tensor(dtype, tuple(shape), path, start + begin, start + end)
    for begin, end in sorted(jumps):
        if begin not in (at, end):
            raise UserError(f"the tensors of {path} overlap or leave a gap at byte {start + at}; the file is damaged")
        at = max(at, end)
    if at != room:
        raise UserError(f"the tensors of {path} cover {at} of its {room} data bytes; the file is damaged")
    return kept, len(header)


def read_checkpoint(path: Path, keep: Callable[[str], bool] = lambda name: True) -> Checkpoint:
    """Read the headers of a checkpoint: a .safetensors file, or a directory with one, an index, or shards.

    Args:
        path: an existing file or directory (see :func:`locate`).
        keep: which tensors to remember; all are checked and counted.

    Raises:
        UserError: a file is malformed, or the directory holds weights in a format that is refused.
    """
    found = Checkpoint()
    if path.is_file():
        files, index = [path], None
    else:
        files = sorted(path.glob("*.safetensors"))
        found.problems += [f"{p} leads to no file: its download did not end" for p in files if not p.is_file()]
        files = [p for p in files if p.is_file()]
        index = _index(path)
        if not files and not index:
            _refuse_other_formats(path)
    listed: Mapping[str, int] = {}
    if index:
        listed = Counter(index.values())
        present = {p.name for p in files}
        for shard in sorted(set(listed) - present):
            found.problems.append(f"the index lists {shard}, which is not in {path}")
        # SGLang loads what the index lists; a consolidated copy beside the shards is not part of the model.
        files = [p for p in files if p.name in listed]
    for file in files:
        kept, count = read_header(file, keep)
        found.tensors.update(kept)
        found.count += count
        found.files += 1
        if index and count < listed[file.name]:
            found.problems.append(f"the index lists {listed[file.name]} tensors in {file.name}, which holds {count}")
    return found


def read_table(tensor: Tensor) -> list[int]:
    """Read a small integer or boolean table, such as d2t (N int64) or t2d (V bool), into a list of N or V ints.

    Raises:
        UserError: it is not one-dimensional, of another dtype, or larger than ``LARGEST_TABLE``.
    """
    import array

    code = {"I64": "q", "I32": "i", "I16": "h", "I8": "b", "U8": "B", "BOOL": "B", "U16": "H", "U32": "I", "U64": "Q"}.get(
        tensor.dtype
    )
    if not tensor.readable or code is None or len(tensor.shape) != 1:
        raise UserError(f"a table of dtype {tensor.dtype} and shape {list(tensor.shape)} holds no token ids")
    values = array.array(code)
    values.frombytes(tensor.read(0, tensor.shape[0] * values.itemsize, LARGEST_TABLE, "a table"))
    return values.tolist()


def read_row(tensor: Tensor, row: int) -> bytes:
    """Read the bytes of one row of a two-dimensional tensor (rows, columns)."""
    if not tensor.readable or len(tensor.shape) != 2 or not 0 <= row < tensor.shape[0]:
        return b""
    width = tensor.shape[1] * BITS.get(tensor.dtype, 0) // 8
    return tensor.read(row * width, width, 1024 * 1024, "a row")


def locate(given: str, *, environ: Mapping[str, str] | None = None, revision: str | None = None) -> Path:
    """Find a checkpoint: a file, a directory, a Hugging Face cache folder (models--org--name), or the id of a cached repository.

    Nothing is downloaded.

    Raises:
        UserError: it is not there, or is a format that is refused.
    """
    if not given or "\0" in given or len(given) > 4096:
        raise UserError(f"{given[:80]!r} is no path; give a directory, a .safetensors file or the id of a cached repository")
    path = expanded(given)
    try:
        mode = path.stat().st_mode
    except OSError:
        cached = _in_cache(given, os.environ if environ is None else environ)
        if cached is None:
            raise UserError(
                f"{given} is neither a path on this machine nor a repository in the Hugging Face cache; download it first"
            ) from None
        path, mode = cached, cached.stat().st_mode
    if stat.S_ISDIR(mode):
        return _snapshot(path, revision)
    if path.suffix in _REFUSED:
        raise UserError(f"{path} {_REFUSED[path.suffix]}")
    if not stat.S_ISREG(mode) or path.suffix != ".safetensors":
        raise UserError(f"{path} is neither a directory nor a .safetensors file; give the directory that holds config.json")
    return path


def config_of(path: Path) -> tuple[dict[str, Any], Path]:
    """Return the config.json of a checkpoint that :func:`locate` found, and the path it was read from.

    Raises:
        UserError: there is none, or it is malformed.
    """
    file = (path if path.is_dir() else path.parent) / "config.json"
    if not file.is_file():
        if path.is_dir():
            _refuse_other_formats(path)
        raise UserError(f"{file} is missing; give a checkpoint directory with its config.json")
    return read_json(file), file


def _in_cache(repository: str, env: Mapping[str, str]) -> Path | None:
    """Follow huggingface_hub's rule for its cache: HF_HUB_CACHE, then HF_HOME/hub, then ~/.cache/huggingface/hub."""
    parts = repository.split("/")
    if len(parts) > 2 or any(part in ("", ".", "..") for part in parts):
        return None
    home = Path(env.get("HF_HOME") or Path(env.get("XDG_CACHE_HOME") or "~/.cache", "huggingface"))
    folder = expanded(Path(env.get("HF_HUB_CACHE") or home / "hub", "models--" + "--".join(parts)))
    try:
        return folder if folder.is_dir() else None
    except OSError:
        return None


def _snapshot(path: Path, revision: str | None) -> Path:
    snapshots = path / "snapshots"
    if (path / "config.json").exists() or not snapshots.is_dir():
        return path
    if revision and (snapshots / revision).is_dir():
        return snapshots / revision
    reference = path / "refs" / (revision or "main")
    if reference.is_file():
        commit = _read(reference, 0, min(_size(reference), 200), 200, "a reference").decode("ascii", "replace").strip()
        if commit and "/" not in commit and (snapshots / commit).is_dir():
            return snapshots / commit
        raise UserError(f"{reference} names a snapshot that is not in {snapshots}; download the repository again")
    if revision:
        raise UserError(f"{path} holds no revision {revision}; download it first")
    found = [p for p in snapshots.iterdir() if p.is_dir()]
    if len(found) != 1:
        raise UserError(f"{path} holds {len(found)} snapshots and no refs/main; give the snapshot's own directory")
    return found[0]


def _index(directory: Path) -> dict[str, str] | None:
    files = sorted(directory.glob("*.safetensors.index.json"))
    if not files:
        return None
    chosen = next((f for f in files if f.name == "model.safetensors.index.json"), files[0])
    weight_map = read_json(chosen).get("weight_map")
    try:
        named = set(weight_map.values()) if isinstance(weight_map, dict) else {None}
    except TypeError:  # a list is not hashable
        named = {None}
    files_named = {name for name in named if isinstance(name, str)}
    if not isinstance(weight_map, dict) or files_named != named:
        raise UserError(f"{chosen} has no weight_map of tensor names to files; download it again")
    outside = next((v for v in files_named if "/" in v or "\\" in v or v in ("", ".", "..") or "\0" in v), None)
    if outside is not None:
        raise UserError(f"{chosen} points to {outside[:80]!r}, outside its own directory; it is malformed")
    return weight_map


def _refuse_other_formats(directory: Path) -> None:
    for suffix, reason in _REFUSED.items():
        other = next(iter(sorted(directory.glob("*" + suffix))), None)
        if other is not None:
            raise UserError(f"{other} {reason}")


def _size(path: Path) -> int:
    try:
        found = path.stat()
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); check the path, and that you may read it") from error
    if not stat.S_ISREG(found.st_mode):
        raise UserError(f"{path} is not a regular file")
    return found.st_size


def _read(path: Path, offset: int, length: int, limit: int, what: str) -> bytes:
    if length > limit:
        raise UserError(f"{path} is too large for {what} ({length} bytes; at most {limit})")
    try:
        with path.open("rb", buffering=0) as file:
            if offset:
                file.seek(offset)
            data = file.read(length)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); check the path, and that you may read it") from error
    if len(data) != length:
        raise UserError(f"{path} is cut short: {len(data)} bytes at offset {offset} where {length} are due")
    return data


def _parse(data: bytes, path: Path, prefix: str) -> dict[str, Any]:
    try:
        parsed = json.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError, MemoryError) as error:
        raise UserError(f"{prefix}{path} is no JSON ({_short(error)}); {_instead(path)}") from None
    if not isinstance(parsed, dict):
        raise UserError(f"{prefix}{path} is JSON but no object; {_instead(path)}")
    return parsed


def _instead(path: Path) -> str:
    """What a file is that isn't what it should be, and what to do."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        if file.read(40).startswith(b"version https://git-lfs.github.com/spec/"):
            return "it is a git-lfs pointer whose file was not fetched: run `git lfs pull` in its directory"
    return "it is damaged: download it again"


def _short(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:120]
