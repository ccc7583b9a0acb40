"""The few facts of a target that wiring needs, read from its config.json, whatever wraps its language model. Pure; stdlib only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

NESTED = ("text_config", "llm_config", "language_config", "thinker_config", "text_model_config", "language_model_config")
"""Where multimodal configs keep their language model's part: text_config in Kimi-K2.5 and Qwen-VL, llm_config in InternVL,
language_config in DeepSeek-VL2, thinker_config and text_config below it in Qwen-Omni."""

MOST_LAYERS = 10_000
"""More decoder layers than this are a damaged file, not a model."""


class TargetError(ValueError):
    """A target config that does not say how many layers its language model has; the message says what was found."""


@dataclass(frozen=True)
class Target:
    """A target model.

    Attributes:
        architecture: the class that SGLang loads: the first of ``architectures``; None where the config names none.
        num_layers: L, decoder layers of the language model.
        hidden_size: width of one hidden state; None where the config does not say.
    """

    architecture: str | None
    num_layers: int
    hidden_size: int | None


def language_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the language model's part of a config: the config itself, or what a multimodal wrapper nests, however deep."""
    for _ in range(4):
        inner = next((config[key] for key in NESTED if isinstance(config.get(key), dict) and config[key]), None)
        if inner is None:
            break
        config = inner
    return config


def read(config: Mapping[str, Any]) -> Target:
    """Read a target's config.json.

    Raises:
        TargetError: there is no ``num_hidden_layers``, or it is no sane number.
    """
    text = language_config(config)
    layers = text.get("num_hidden_layers", config.get("num_hidden_layers"))
    if type(layers) is not int or not 1 <= layers <= MOST_LAYERS:
        raise TargetError(f"the target config's num_hidden_layers is {_brief(layers)}, not a number of layers")
    width = text.get("hidden_size", config.get("hidden_size"))
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else None
    return Target(name, layers, width if type(width) is int and 0 < width < 1 << 24 else None)


def _brief(value: Any) -> str:
    if value is None:
        return "missing"
    return repr(value)[:40] if isinstance(value, (str, float, bool)) else f"a {type(value).__name__}"
