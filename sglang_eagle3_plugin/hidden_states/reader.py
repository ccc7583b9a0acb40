"""Reading a dump: only what a manifest acknowledges, and only if its checksum fits. NumPy, no torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sglang_eagle3_plugin.errors import UserError
from sglang_eagle3_plugin.hidden_states.layout import MANIFEST, PIECE, SHARD, SIDECAR, Header, read_lines, tree_checksum

Array = npt.NDArray[Any]

_NUMPY: dict[str, np.dtype[Any]] = {
    "BF16": np.dtype("<u2"),
    "F16": np.dtype("<f2"),
    "F32": np.dtype("<f4"),
    "F8_E4M3": np.dtype("u1"),
    "I64": np.dtype("<i8"),
}


@dataclass(frozen=True)
class Ref:
    """An acknowledged sample: where it is, and what its manifest line says of it."""

    header: Header
    shard: str
    index: int
    key: str
    tokens: int
    prompt_tokens: int
    request: str

    @property
    def id(self) -> str:
        """Its name in reports: writer, shard and index."""
        return f"{self.shard.removesuffix('.safetensors')}.{self.index}"


@dataclass(frozen=True)
class Tensors:
    """The states of one sample, as stored: bf16 as uint16 bit patterns, fp8 as uint8. `to_float32` makes numbers of them.

    Attributes:
        input_ids: (N,) int64.
        positions: (N,) int64.
        aux: (N, B, H).
        final: (N, H), or None.
        aux_scale: (N, B) float32 for fp8, else None.
        final_scale: (N,) float32 for fp8, else None.
        loss_mask: (N,) uint8, 1 where the loss counts: as `extract` recorded it, else on generated tokens, else everywhere.
    """

    input_ids: Array
    positions: Array
    aux: Array
    final: Array | None
    aux_scale: Array | None
    final_scale: Array | None
    loss_mask: Array


class CorruptShardError(ValueError):
    """A shard is missing, or its bytes are not those that the manifest acknowledged."""


@dataclass
class Dump:
    """A dump directory. Make it with :meth:`open`.

    Attributes:
        directory: where it is.
        refs: acknowledged samples, in the order of acknowledgement within each writer.
        shards: shard name -> (bytes, checksum) as acknowledged.
        counts: what the writers dropped, refused or missed, summed.
        problems: sentences on what is not as it should be in the manifests.
        masks: sample key -> runs [start, end) where the loss counts, from `extract`.
    """

    directory: Path
    refs: list[Ref] = field(default_factory=list)
    shards: dict[str, tuple[int, str]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    masks: dict[str, list[list[int]]] = field(default_factory=dict)
    _headers: dict[str, Header] = field(default_factory=dict)
    _entries: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def open(cls, directory: Path) -> Dump:
        """Read the manifests.

        Raises:
            UserError: there is no dump.
        """
        try:
            manifests = sorted(path for path in directory.iterdir() if MANIFEST.fullmatch(path.name))
        except OSError as error:
            raise UserError(
                f"{directory} cannot be read ({error.strerror}); give a directory that EAGLE3_DUMP_DIR named"
            ) from error
        if not manifests:
            raise UserError(f"{directory} holds no dump (no manifest-w0001.jsonl); give a directory that EAGLE3_DUMP_DIR named")
        dump = cls(directory)
        for manifest in manifests:
            dump._read_manifest(manifest)
        sidecar = directory / SIDECAR
        if sidecar.exists():
            lines, bad = read_lines(sidecar)
            dump.masks = {line["key"]: line["mask"] for line in lines if "key" in line and "mask" in line}
            dump.problems += [f"{SIDECAR} has {bad} unreadable lines"] if bad else []
        return dump

    def header(self) -> Header:
        """The one header that fits all samples.

        Raises:
            UserError: there is no sample, or the writers captured different things.
        """
        headers = [ref.header for ref in self.refs]
        if not headers:
            raise UserError(f"{self.directory} has no finished sample yet")
        first = headers[0]
        for other in headers:
            for name in ("boundaries", "hidden_size", "dtype", "final", "config_sha256"):
                if getattr(other, name) != getattr(first, name):
                    raise UserError(
                        f"{self.directory} mixes dumps with {name} {getattr(first, name)} and {getattr(other, name)}; "
                        "keep one directory per kind of dump"
                    )
        return first

    def unique(self) -> list[Ref]:
        """One sample for each sequence: the first acknowledged."""
        first: dict[str, Ref] = {}
        for ref in self.refs:
            first.setdefault(ref.key, ref)
        return list(first.values())

    def read(self, ref: Ref) -> Tensors:
        """Load one sample, after its shard's checksum was checked once.

        Raises:
            CorruptShardError: see there.
        """
        self.check_shard(ref.shard)
        found = dict(_tensors(self.directory / ref.shard, self._entries[ref.shard], ref.index))
        mask = np.ones(ref.tokens, np.uint8)
        if ref.prompt_tokens < ref.tokens:
            mask[: ref.prompt_tokens] = 0
        if ref.key in self.masks:
            mask[:] = 0
            for start, end in self.masks[ref.key]:
                mask[start:end] = 1
        return Tensors(
            input_ids=found["input_ids"],
            positions=found["positions"],
            aux=found["aux"],
            final=found.get("final"),
            aux_scale=found.get("aux_scale"),
            final_scale=found.get("final_scale"),
            loss_mask=mask,
        )

    def check_shard(self, name: str) -> None:
        """Compare a shard with its manifest line; remembered when it fits.

        Raises:
            CorruptShardError: see there.
        """
        if name in self._entries:
            return
        size, checksum = self.shards[name]
        pieces = []
        try:
            with (self.directory / name).open("rb") as file:
                while piece := file.read(PIECE):
                    pieces.append(hashlib.sha256(piece).digest())
        except OSError as error:
            raise CorruptShardError(f"shard {name} cannot be read ({error.strerror})") from error
        if tree_checksum(pieces) != checksum:
            raise CorruptShardError(f"shard {name} is not what was acknowledged ({size} bytes, checksum {checksum[:12]}...)")
        entries = _entries(self.directory / name)
        # The checksum covers this copy of the header, so a manifest's own header line cannot change unseen.
        if json.loads(entries.pop("__metadata__")["header"]) != self._headers[name].to_json():
            raise CorruptShardError(f"shard {name} was written under another header than its manifest states")
        self._entries[name] = entries

    def unacknowledged(self) -> list[str]:
        """Shards, temporary or whole, that no manifest lists: a writer is at work, or died over them."""
        return sorted(p.name for p in self.directory.iterdir() if SHARD.fullmatch(p.name) and p.name not in self.shards)

    def _read_manifest(self, path: Path) -> None:
        lines, bad = read_lines(path)
        if bad:
            self.problems.append(f"{path.name} has {bad} torn or unreadable lines, which are not trusted")
        if not lines:
            return
        try:
            header = Header.from_json(lines[0])
        except ValueError as error:
            self.problems.append(f"{path.name} is not trusted: {error}")
            return
        counts: dict[str, int] = {}
        for line in lines[1:]:
            if line.get("kind") == "shard":
                self._read_shard_line(path.name, header, line)
            elif line.get("kind") == "counts":
                counts = line["counts"]
        for name, count in counts.items():
            self.counts[name] = self.counts.get(name, 0) + count

    def _read_shard_line(self, manifest: str, header: Header, line: dict[str, Any]) -> None:
        try:
            name = str(line["file"])
            if not SHARD.fullmatch(name):  # never follow a path out of the directory
                raise ValueError(f"{name!r} is no shard name")
            refs = [
                Ref(header, name, index, str(s["key"]), int(s["tokens"]), int(s["prompt_tokens"]), str(s["request"]))
                for index, s in enumerate(line["samples"])
            ]
            self.shards[name] = (int(line["bytes"]), str(line["checksum"]))
            self._headers[name] = header
            self.refs += refs
        except (KeyError, ValueError, TypeError) as error:
            self.problems.append(f"{manifest} has a shard line that is not trusted: {error}")


def to_float32(values: Array, scale: Array | None = None) -> npt.NDArray[np.float32]:
    """Stored states as float32, exactly: bf16 bit patterns (uint16), fp8 e4m3fn codes (uint8) with their scale, or floats."""
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    if values.dtype == np.uint8:
        numbers = _E4M3[values]
        return numbers if scale is None else numbers * scale[..., None]
    return values.astype(np.float32)


def _e4m3_table() -> npt.NDArray[np.float32]:
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    magnitude = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    magnitude[(code & 127) == 127] = np.nan
    return np.where(code & 128, -magnitude, magnitude).astype(np.float32)


_E4M3 = _e4m3_table()
"""The 256 values of float8 e4m3fn (OCP 8-bit floating point specification): bias 7, no infinities, 0x7f and 0xff are NaN."""


def _entries(path: Path) -> dict[str, Any]:
    """A shard's JSON header; ``data_offsets`` are made to count from the start of the file."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        entries: dict[str, Any] = json.loads(file.read(length))
    for name, entry in entries.items():
        if name != "__metadata__":
            entry["data_offsets"] = [8 + length + offset for offset in entry["data_offsets"]]
    return entries


def _tensors(path: Path, entries: dict[str, Any], index: int) -> Iterator[tuple[str, Array]]:
    names = ("input_ids", "positions", "aux", "final", "aux_scale", "final_scale")
    with path.open("rb") as file:
        for name in names:
            entry = entries.get(f"{index}.{name}")
            if entry is not None:
                start, end = entry["data_offsets"]
                file.seek(start)
                yield name, np.frombuffer(file.read(end - start), _NUMPY[entry["dtype"]]).reshape(entry["shape"])
