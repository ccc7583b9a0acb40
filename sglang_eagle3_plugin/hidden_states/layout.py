"""What a dump looks like on disk: names, header, manifest lines. Stdlib only, since the serving process writes it.

    DIR/                              0700
      manifest-w0001.jsonl            0600, one per writer, append-only: a header line, then a line per shard or count
      w0001-000000.safetensors        0600, a shard of samples, written under a temporary name, fsynced, renamed
      extract.jsonl                   loss masks, written by `hidden-states extract`

A shard exists when its manifest line does, and is good when its checksum fits that line. Whatever else lies in the directory after
a crash is nobody's sample. Nothing that comes from a request ever becomes part of a file name.

In a shard, sample i has the tensors ``i.input_ids`` (N,) int64, ``i.positions`` (N,) int64, ``i.aux`` (N, B, H) and, unless the
header's ``final`` is ``none``, ``i.final`` (N, H); for fp8 also ``i.aux_scale`` (N, B) and ``i.final_scale`` (N,) float32: value =
stored x scale.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

FORMAT = "sglang-eagle3-dump"
VERSION = 1
SIDECAR = "extract.jsonl"
MANIFEST = re.compile(r"manifest-(w\d{4,})\.jsonl")
SHARD = re.compile(r"(w\d{4,})-(\d{6,})\.safetensors(\.tmp)?")

PIECE = 8 << 20
"""A shard's checksum is the SHA-256 of the SHA-256s of its consecutive pieces of so many bytes: several cores can share it."""

ITEM_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "F8_E4M3": 1, "I64": 8, "U8": 1}
"""safetensors dtype name -> bytes an element."""


@dataclass(frozen=True)
class Header:
    """What is true of every sample of one writer. The first line of its manifest, and in the metadata of each of its shards.

    Attributes:
        boundaries: boundary of each slot of ``aux``, ascending.
        hidden_size: H.
        dtype: safetensors name of the stored states: BF16, F16, F32 or F8_E4M3.
        final: ``post_norm`` (what ``lm_head`` reads), ``pre_norm`` (boundary L), or ``none``.
        num_layers: L of the target, so that boundaries can be written as ids of either convention.
        model: path or name of the target, as the server was told.
        architecture: the target's class name.
        config_sha256: checksum of the target's config.json, or an empty string.
        sglang: SGLang release.
        plugin: release of this package.
        created: ISO 8601, UTC.
        convention: how ``boundaries`` is meant; always ``boundary``.
    """

    boundaries: tuple[int, ...]
    hidden_size: int
    dtype: str
    final: str
    num_layers: int
    model: str
    architecture: str
    config_sha256: str
    sglang: str
    plugin: str
    created: str
    convention: str = "boundary"

    def to_json(self) -> dict[str, Any]:
        """The manifest's first line."""
        return {"kind": "header", "format": FORMAT, "version": VERSION, **asdict(self), "boundaries": list(self.boundaries)}

    @classmethod
    def from_json(cls, line: dict[str, Any]) -> Header:
        """Read a manifest's first line.

        Raises:
            ValueError: it is not a header of this format and version.
        """
        if line.get("format") != FORMAT or line.get("version") != VERSION:
            raise ValueError(f"it is not a {FORMAT} of version {VERSION}")
        try:
            values = {field.name: line[field.name] for field in fields(cls)}
        except KeyError as error:
            raise ValueError(f"its header has no {error}") from error
        values["boundaries"] = tuple(int(b) for b in values["boundaries"])
        if values["dtype"] not in ITEM_BYTES:
            raise ValueError(f"its dtype {values['dtype']!r} is unknown")
        return cls(**values)

    def bytes_per_token(self) -> int:
        """Bytes that one token takes on disk, for estimates and quotas."""
        slots = len(self.boundaries) + (self.final != "none")
        scales = 4 * slots if self.dtype == "F8_E4M3" else 0
        return slots * self.hidden_size * ITEM_BYTES[self.dtype] + scales + 2 * ITEM_BYTES["I64"]


def sample_key(token_ids: Iterable[int]) -> str:
    """The identity of a sequence: 32 hex digits of the SHA-256 of its token ids as little-endian int64."""
    ids = list(token_ids)
    return hashlib.sha256(struct.pack(f"<{len(ids)}q", *ids)).hexdigest()[:32]


def tree_checksum(pieces: Iterable[bytes]) -> str:
    """The checksum of a shard from the SHA-256 digests of its pieces, in order."""
    return hashlib.sha256(b"".join(pieces)).hexdigest()


def read_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """A JSON-lines file as far as it can be trusted: (objects, number of lines that are torn or no objects)."""
    lines, bad = [], 0
    data = path.read_bytes()
    for raw in data.split(b"\n")[:-1]:
        try:
            line = json.loads(raw)
        except ValueError:
            line = None
        if isinstance(line, dict):
            lines.append(line)
        else:
            bad += 1
    return lines, bad + (not data.endswith(b"\n") and bool(data))
