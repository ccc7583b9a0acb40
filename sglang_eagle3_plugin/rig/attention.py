"""Attention weights that fetch values from one place, a fixed number of tokens back, in the two kinds that the targets need.

The trick is in the rotary embedding: query and key are constant vectors, turned by their positions, and the query is turned back
by ``offset`` positions, so their product is largest exactly ``offset`` tokens back and softmax picks that token alone. It is done
by head 0; the other heads carry noise.
"""

from __future__ import annotations

import math
from collections import UserDict
from dataclasses import dataclass
from typing import Any

import numpy as np

PAIRS = 8
"""Rotary pairs in use: the fastest, which YaRN leaves alone."""
FARTHEST = 1024
"""Tokens over which the right one is told from all others."""
CERTAINTY = 40.0
"""Distance of the attention scores of the right token and the next best."""
NOISE_SIZE = 0.004


class Weights(UserDict[str, Any]):
    """Named arrays, in Hugging Face's layout (out, in).

    Args:
        seed: of what is random.
        loud: a factor on it.
        dtype: what float32 arrays are kept as.
    """

    def __init__(self, seed: int, loud: float = 1.0, dtype: str = "float32") -> None:
        super().__init__()
        self.random = np.random.default_rng(seed)
        self.loud = loud
        self.dtype = dtype

    def __setitem__(self, name: str, array: Any) -> None:
        self.data[name] = array.astype(self.dtype, copy=False) if array.dtype == np.float32 else array

    def noise(self, name: str, rows: int, columns: int, first_row: int | None = 0, size: float = NOISE_SIZE * 5) -> None:
        """Make a random matrix whose rows before ``first_row`` are zero (all of them for None)."""
        matrix = (self.random.standard_normal((rows, columns)) * (size * self.loud)).astype(np.float32)
        matrix[: rows if first_row is None else first_row] = 0
        self[name] = matrix

    def swiglu(self, name: str, width: int, inner: int, out: int, first_row: int | None = None) -> None:
        """Make a gated MLP that writes noise into the channels from ``first_row`` on, or (None) nothing."""
        self.noise(f"{name}gate_proj.weight", inner, width)
        self.noise(f"{name}up_proj.weight", inner, width)
        self.noise(f"{name}down_proj.weight", out, inner, first_row)


@dataclass
class Reads:
    """What attention takes from its (normalised) input.

    Attributes:
        width: of the input.
        const: channel that always holds ``const_value``.
        const_value: its value.
        values: (carried, width), what is fetched; its last row is the constant.
    """

    width: int
    const: int
    const_value: float
    values: Any


@dataclass
class Writes:
    """Where the fetched values go.

    Attributes:
        matrix: (hidden, carried).
        noise_from: the other heads write noise into the channels from this one on; None: nowhere.
    """

    matrix: Any
    noise_from: int | None


@dataclass(frozen=True)
class Gqa:
    """Grouped-query attention of Llama, and of Qwen3 with its norms of query and key."""

    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    theta: float = 10000.0
    qk_norm: bool = False

    def config(self) -> dict[str, Any]:
        """The config's fields."""
        return {
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "rope_theta": self.theta,
        }

    def write(self, weights: Weights, name: str, reads: Reads, writes: Writes, offset: int, value_norm: float) -> None:
        """Add the weights below ``name`` to ``weights``. ``value_norm`` is not used."""
        frequency = self.theta ** (-2 * np.arange(PAIRS) / self.head_dim)
        size = _amplitude(frequency, offset, self.head_dim**-0.5)
        self.write_noise(weights, name, reads.width, writes.matrix.shape[0], writes.noise_from)
        if self.qk_norm:
            # The norm makes the length of query and key sqrt(head_dim) whatever they were; its weight sets it back.
            weights[f"{name}q_norm.weight"] = np.full(self.head_dim, size * math.sqrt(PAIRS / self.head_dim), np.float32)
            weights[f"{name}k_norm.weight"] = weights[f"{name}q_norm.weight"].copy()
        half = self.head_dim // 2
        for projection, angle in (("q_proj", -offset * frequency), ("k_proj", 0 * frequency)):
            matrix = weights[f"{name}{projection}.weight"]
            matrix[: self.head_dim] = 0
            matrix[:PAIRS, reads.const] = size * np.cos(angle) / reads.const_value
            matrix[half : half + PAIRS, reads.const] = size * np.sin(angle) / reads.const_value
        carried = len(reads.values)
        weights[f"{name}v_proj.weight"][: self.head_dim] = 0
        weights[f"{name}v_proj.weight"][:carried] = reads.values
        weights[f"{name}o_proj.weight"][:, : self.head_dim] = 0
        weights[f"{name}o_proj.weight"][:, :carried] = writes.matrix

    def write_noise(self, weights: Weights, name: str, width: int, hidden: int, noise_from: int | None = 0) -> None:
        """Add random weights of the same shapes."""
        weights.noise(f"{name}q_proj.weight", self.heads * self.head_dim, width)
        weights.noise(f"{name}k_proj.weight", self.kv_heads * self.head_dim, width)
        weights.noise(f"{name}v_proj.weight", self.kv_heads * self.head_dim, width)
        weights.noise(f"{name}o_proj.weight", hidden, self.heads * self.head_dim, noise_from, NOISE_SIZE)


@dataclass(frozen=True)
class Mla:
    """Multi-head latent attention of DeepSeek. SGLang's grouped decode kernel wants latent and rotary widths of 512 and 64."""

    heads: int = 4
    q_rank: int = 64
    latent: int = 512
    rotary: int = 64
    nope: int = 64
    value: int = 64
    theta: float = 50000.0
    factor: float = 64.0

    def config(self) -> dict[str, Any]:
        """The config's fields."""
        return {
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "q_lora_rank": self.q_rank,
            "kv_lora_rank": self.latent,
            "qk_rope_head_dim": self.rotary,
            "qk_nope_head_dim": self.nope,
            "v_head_dim": self.value,
            "rope_theta": self.theta,
            "rope_scaling": {
                "type": "yarn",
                "factor": self.factor,
                "original_max_position_embeddings": 4096,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
        }

    def write(self, weights: Weights, name: str, reads: Reads, writes: Writes, offset: int, value_norm: float) -> None:
        """Add the weights below ``name`` to ``weights``.

        ``value_norm`` is the length of the vector of values fetched, which MLA normalises on the way.
        """
        frequency = self.theta ** (-2 * np.arange(PAIRS) / self.rotary)
        scale = (self.nope + self.rotary) ** -0.5 * (0.1 * math.log(self.factor) + 1) ** 2
        size = _amplitude(frequency, offset, scale)
        self.write_noise(weights, name, reads.width, writes.matrix.shape[0], writes.noise_from)
        weights[f"{name}q_a_proj.weight"][:] = 0
        weights[f"{name}q_a_proj.weight"][0, reads.const] = 1  # normalised: sqrt(q_rank), whatever it was
        query = weights[f"{name}q_b_proj.weight"]
        query[: self.nope + self.rotary] = 0
        key = weights[f"{name}kv_a_proj_with_mqa.weight"]
        key[:] = 0
        for pair in range(PAIRS):  # adjacent channels make a pair here
            real, imaginary = 2 * pair, 2 * pair + 1
            query[self.nope + real, 0] = size * math.cos(-offset * frequency[pair]) / math.sqrt(self.q_rank)
            query[self.nope + imaginary, 0] = size * math.sin(-offset * frequency[pair]) / math.sqrt(self.q_rank)
            key[self.latent + real, reads.const] = size / reads.const_value
        carried = len(reads.values)
        key[:carried] = reads.values
        gain = math.sqrt(self.latent) / value_norm
        up = weights[f"{name}kv_b_proj.weight"]
        up[: self.nope + self.value] = 0
        up[range(self.nope, self.nope + carried), range(carried)] = 1 / gain
        weights[f"{name}o_proj.weight"][:, : self.value] = 0
        weights[f"{name}o_proj.weight"][:, :carried] = writes.matrix

    def write_noise(self, weights: Weights, name: str, width: int, hidden: int, noise_from: int | None = 0) -> None:
        """Add random weights of the same shapes."""
        weights.noise(f"{name}q_a_proj.weight", self.q_rank, width)
        weights[f"{name}q_a_layernorm.weight"] = np.ones(self.q_rank, np.float32)
        weights.noise(f"{name}q_b_proj.weight", self.heads * (self.nope + self.rotary), self.q_rank)
        weights.noise(f"{name}kv_a_proj_with_mqa.weight", self.latent + self.rotary, width)
        weights[f"{name}kv_a_layernorm.weight"] = np.ones(self.latent, np.float32)
        weights.noise(f"{name}kv_b_proj.weight", self.heads * (self.nope + self.value), self.latent)
        weights.noise(f"{name}o_proj.weight", hidden, self.heads * self.value, noise_from, NOISE_SIZE)


def _amplitude(frequency: Any, offset: int, scale: float) -> float:
    """Length of each query and key pair that makes the score at ``offset`` beat every other by :data:`CERTAINTY`."""
    back = np.delete(np.arange(FARTHEST), offset)
    runner_up = np.cos(np.outer(back - offset, frequency)).sum(axis=1).max()
    return math.sqrt(CERTAINTY / (scale * (PAIRS - float(runner_up))))
