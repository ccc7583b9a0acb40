"""Image prompts for a tiny Qwen2-VL: what its processor is made of, written from nothing, and pictures to look at.

SGLang asks Transformers for the processor of a multimodal target, and that wants a tokenizer and an image processor on disk. Here
every token of the tiny vocabulary is one character, so that ids become text and ids again without loss.
"""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np

VOCABULARY = 320
SPECIAL = {
    301: "<|im_start|>",
    302: "<|im_end|>",
    303: "<|endoftext|>",
    304: "<|image_pad|>",
    305: "<|video_pad|>",
    306: "<|vision_start|>",
    307: "<|vision_end|>",
}
IMAGE = (306, 304, 307)
"""Ids that stand for one picture in a prompt; the processor widens the one in the middle to a token for each 28 x 28 pixels."""
SIDE = 56


def write_processor(directory: Path) -> None:
    """Write the tokenizer and image processor of the family ``qwen2-vl`` of families.json into its target's directory."""
    characters = {chr(0x4E00 + i): i for i in range(VOCABULARY) if i not in SPECIAL}
    added = [
        {"id": i, "content": content, "special": True, "normalized": False, "lstrip": False, "rstrip": False, "single_word": False}
        for i, content in SPECIAL.items()
    ]
    model = {"type": "BPE", "vocab": characters | {content: i for i, content in SPECIAL.items()}, "merges": []}
    _write(directory / "tokenizer.json", {"version": "1.0", "added_tokens": added, "decoder": {"type": "Fuse"}, "model": model})
    names = {"bos_token": SPECIAL[301], "eos_token": SPECIAL[302], "pad_token": SPECIAL[303]}
    _write(directory / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 4096, **names})
    pixels = {"min_pixels": SIDE * SIDE, "max_pixels": SIDE * SIDE}
    grid = {"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2}
    scaling = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
    kind = {"image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2VLProcessor"}
    _write(directory / "preprocessor_config.json", {**kind, **pixels, **grid, **scaling})
    video = {"video_processor_type": "Qwen2VLVideoProcessor", "processor_class": "Qwen2VLProcessor"}
    _write(directory / "video_preprocessor_config.json", {**video, **pixels, **grid, **scaling})


def picture(path: Path, seed: int) -> Path:
    """Write a PNG of SIDE x SIDE random pixels and return its path."""
    pixels = np.random.default_rng(seed).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)  # each row is preceded by its filter: none
    header = struct.pack(">IIBBBBB", SIDE, SIDE, 8, 2, 0, 0, 0)
    chunks = (_chunk(b"IHDR", header), _chunk(b"IDAT", zlib.compress(rows)), _chunk(b"IEND", b""))
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(chunks))
    return path


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=1), encoding="utf-8")
