"""Small checkpoints for tests: headers that are right, bytes that are only as real as they need to be."""

from __future__ import annotations

import array
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ITEM = {"BF16": 2, "F32": 4, "I64": 8, "BOOL": 1, "U8": 1}


def write_safetensors(file: Path, tensors: Mapping[str, tuple[str, list[int]] | tuple[str, list[int], bytes]]) -> None:
    """Write tensors given as name -> (dtype, shape[, bytes]); without bytes the data is a hole of zeros."""
    header: dict[str, Any] = {}
    at = 0
    for name, spec in tensors.items():
        size = ITEM[spec[0]]
        for dimension in spec[1]:
            size *= dimension
        header[name] = {"dtype": spec[0], "shape": spec[1], "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for name, spec in tensors.items():
            if len(spec) == 3:
                stream.seek(8 + len(text) + header[name]["data_offsets"][0])
                stream.write(spec[2])
        stream.truncate(8 + len(text) + at)


def int64s(values: list[int]) -> bytes:
    return array.array("q", values).tobytes()


def write_config(directory: Path, config: Mapping[str, Any]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


def target_config(**changes: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 8,
        "hidden_size": 64,
        "vocab_size": 256,
        "max_position_embeddings": 4096,
        "torch_dtype": "bfloat16",
    } | changes


def draft_config(ids: list[int] | None = None, **changes: Any) -> dict[str, Any]:
    eagle = {"use_aux_hidden_state": True} | ({"eagle_aux_hidden_state_layer_ids": ids} if ids is not None else {})
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": 64,
        "vocab_size": 256,
        "draft_vocab_size": 256,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "eagle_config": eagle,
    } | changes


def draft_tensors(hidden: int = 64, slots: int = 3, vocab: int = 256, layer: str = "midlayer") -> dict[str, Any]:
    square = ["BF16", [hidden, hidden]]
    wide = ["BF16", [hidden, 2 * hidden]]
    norm = ["BF16", [hidden]]
    parts = {
        "self_attn.q_proj": wide,
        "self_attn.k_proj": wide,
        "self_attn.v_proj": wide,
        "self_attn.o_proj": square,
        "mlp.gate_proj": square,
        "mlp.up_proj": square,
        "mlp.down_proj": square,
        "input_layernorm": norm,
        "hidden_norm": norm,
        "post_attention_layernorm": norm,
    }
    tensors: dict[str, Any] = {
        "fc.weight": ("BF16", [hidden, slots * hidden]),
        "lm_head.weight": ("BF16", [vocab, hidden]),
        "norm.weight": ("BF16", [hidden]),
        "d2t": ("I64", [vocab], int64s([0] * vocab)),
        "t2d": ("BOOL", [vocab], b"\1" * vocab),
    }
    tensors.update({f"{layer}.{name}.weight": tuple(spec) for name, spec in parts.items()})
    return tensors


def good_pair(root: Path, ids: list[int] | None = None) -> tuple[Path, Path]:
    """A target of 8 layers and a draft that fits it."""
    target = write_config(root / "target", target_config())
    write_safetensors(target / "model.safetensors", {"model.embed_tokens.weight": ("BF16", [256, 64])})
    draft = write_config(root / "draft", draft_config(ids))
    write_safetensors(draft / "model.safetensors", draft_tensors())
    return target, draft
