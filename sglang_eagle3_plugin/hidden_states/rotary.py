"""Rotary position embeddings, as SGLang's drafts use them (sglang/srt/layers/rotary_embedding). Torch comes in as an argument."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sglang_eagle3_plugin.errors import UserError


@dataclass(frozen=True)
class Rotary:
    """Rotates the last ``dim`` channels' pairs of queries and keys.

    Attributes:
        frequencies: (dim / 2,) float32, radians a position.
        interleaved: pairs are neighbours (DeepSeek's MLA) and not half a head apart (Llama).
        amplitude: factor on cos and sin (YaRN).
        score_factor: factor on attention scores (YaRN as DeepSeek uses it).
    """

    frequencies: Any
    interleaved: bool
    amplitude: float = 1.0
    score_factor: float = 1.0

    def __call__(self, x: Any, positions: Any) -> Any:
        """Rotate.

        Args:
            x: (N, heads, dim).
            positions: (N,).
        """
        import torch

        angles = positions.to(torch.float32)[:, None] * self.frequencies
        cos, sin = (angles.cos() * self.amplitude)[:, None], (angles.sin() * self.amplitude)[:, None]
        if self.interleaved:
            one, two = x[..., 0::2], x[..., 1::2]
            return torch.stack((one * cos - two * sin, two * cos + one * sin), dim=-1).flatten(-2)
        one, two = x.chunk(2, dim=-1)
        return torch.cat((one * cos - two * sin, two * cos + one * sin), dim=-1)


def from_config(config: Mapping[str, Any], dim: int, interleaved: bool) -> Rotary:
    """The rotation that a draft's config.json asks for: plain, linear, llama3 or yarn.

    Raises:
        UserError: another kind of scaling.
    """
    import torch

    nested = config.get("rope_parameters") or {}
    scaling = {**nested, **(config.get("rope_scaling") or {})}
    theta = float(config.get("rope_theta") or nested.get("rope_theta") or 10000.0)
    plain = theta ** -(torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind in ("default", "mrope") or "mrope_section" in scaling:  # text alone: all sections turn alike
        return Rotary(plain, interleaved)
    factor = float(scaling.get("factor", 1.0))
    if kind == "linear":
        return Rotary(plain / factor, interleaved)
    if kind == "llama3":
        return Rotary(_llama3(plain, scaling, factor), interleaved)
    if kind in ("yarn", "deepseek_yarn"):
        return _yarn(plain, scaling, factor, theta, dim, interleaved)
    raise UserError(f"the draft's rope_scaling is {kind!r}, which score does not know; it knows default, linear, llama3 and yarn")


def _llama3(plain: Any, scaling: Mapping[str, Any], factor: float) -> Any:
    """Llama 3.1's: long waves are slowed by ``factor``, short ones kept, those between blended."""
    import torch

    turns = scaling["original_max_position_embeddings"] * plain / (2 * math.pi)
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return torch.lerp(plain / factor, plain, keep)


def _yarn(plain: Any, scaling: Mapping[str, Any], factor: float, theta: float, dim: int, interleaved: bool) -> Rotary:
    """YaRN (Peng and others, 2023), with DeepSeek's mscale on the scores where the config has one."""
    import torch

    length = scaling["original_max_position_embeddings"]

    def channel(rotations: float) -> float:
        return dim * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(channel(float(scaling.get("beta_fast", 32)))), 0)
    high = min(math.ceil(channel(float(scaling.get("beta_slow", 1)))), dim - 1)
    slowed = ((torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    frequencies = torch.lerp(plain, plain / factor, slowed)

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    overall = scaling.get("mscale_all_dim")
    if overall is None:
        return Rotary(frequencies, interleaved, amplitude=mscale(1.0))
    amplitude = mscale(float(scaling.get("mscale", 1))) / mscale(float(overall))
    return Rotary(frequencies, interleaved, amplitude, mscale(float(overall)) ** 2 if overall else 1.0)
