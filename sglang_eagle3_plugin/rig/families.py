"""Tiny targets of many families, to be labelled once the engine has built them, and the drafts that know them.

``rig/models.py`` lays three families out by hand, weight by weight. Here a target is a config.json alone (``families.json``): the
engine makes the model with dummy weights, and ``site/eagle3_rig/labelling.py`` rewrites them in place, by structure. Layers mark
their boundary in channels of their own as there. What follows a token depends on that token only (:func:`following`), on both of
its digits; where the head is tied to the embedding, a token is followed by itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file, save_file

from sglang_eagle3_plugin.rig import models

LAYERS = 6
MULTIPLY, ADD = 5, 3

_CONFIGURATION = """from transformers import PretrainedConfig


class TinyConfig(PretrainedConfig):
    model_type = {model_type!r}

    def __init__(self, **kwargs):
        for name, value in kwargs.items():
            if name.endswith("_config") and isinstance(value, dict):
                kwargs[name] = PretrainedConfig(**value)
        super().__init__(**kwargs)
"""
"""configuration.py of a family whose config class neither transformers nor SGLang has."""


@dataclass(frozen=True)
class Family:
    """A family that some releases ship.

    Attributes:
        name: its key in families.json.
        config: its config.json.
        tied: the head is the embedding.
        embed_scale: what the model multiplies its embeddings by.
        hidden_size: H.
        remote: its config class has to travel with it.
        arguments: further arguments of the engine.
        environment: further variables of its processes.
    """

    name: str
    config: Mapping[str, Any]
    tied: bool = False
    embed_scale: float = 1.0
    hidden_size: int = 256
    remote: bool = False
    arguments: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def architecture(self) -> str:
        """The class that SGLang loads."""
        return str(self.config["architectures"][0])

    @property
    def engine_arguments(self) -> dict[str, Any]:
        """What `sglang.Engine` needs for it."""
        return {"load_format": "dummy", **({"trust_remote_code": True} if self.remote else {}), **self.arguments}


def names() -> list[str]:
    """Every family of families.json."""
    return list(_read()["families"])


def family(name: str) -> Family:
    """Find a family.

    Raises:
        KeyError: families.json has none of this name.
    """
    data = _read()
    entry = data["families"][name]
    return Family(name, **{**entry, "config": _expand(entry["config"], data["bases"])})


def following(token: int, tied: bool) -> int:
    """The token after a token, by the rule of the labelled targets."""
    if tied:
        return token
    a, b = divmod(token, models.DIGITS)
    return models.DIGITS * ((MULTIPLY * a + ADD) % models.DIGITS) + (MULTIPLY * b + ADD) % models.DIGITS


def continuation(prompt: Sequence[int], count: int, tied: bool) -> list[int]:
    """The next ``count`` tokens after a prompt, by the rule."""
    tokens = [prompt[-1]]
    for _ in range(count):
        tokens.append(following(tokens[-1], tied))
    return tokens[1:]


def write(directory: Path, one: Family, boundaries: Sequence[int], ids: Sequence[int]) -> tuple[Path, Path, dict[str, str]]:
    """Write a family's target and a draft for it.

    Args:
        directory: made if missing; ``target`` and ``draft`` below it are overwritten.
        one: the family.
        boundaries: what the draft is made for.
        ids: what its config lists.

    Returns:
        The target's and the draft's directory, and the variables that the engine's processes need.
    """
    target = models.Target(directory / "target", one.name, LAYERS, one.hidden_size)
    target.path.mkdir(parents=True, exist_ok=True)
    config = dict(one.config)
    if one.remote:
        config["auto_map"] = {"AutoConfig": "configuration_tiny.TinyConfig"}
        source = _CONFIGURATION.format(model_type=config["model_type"])
        (target.path / "configuration_tiny.py").write_text(source, encoding="utf-8")
    (target.path / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    (target.path / "labels.json").write_text(json.dumps(asdict(target.labels)), encoding="utf-8")
    draft = models.draft(directory / "draft", target, boundaries, ids=ids)
    weights = load_file(draft / "model.safetensors")
    head = weights["lm_head.weight"]
    head[: models.TOKENS] = 0
    for token in range(models.TOKENS):
        a, b = divmod(token, models.DIGITS)
        head[following(token, one.tied), [models.A + a, models.B + b]] = 16.0
    save_file(weights, str(draft / "model.safetensors"), metadata={"format": "pt"})
    plan = {
        "draft": str(draft / "model.safetensors"),
        "hidden_size": one.hidden_size,
        "vocab_size": models.TOKENS,
        "layers": LAYERS,
        "noise_from": models.NOISE,
        "labels": models.LABELS,
        "value": models.LABEL_SIZE,
        "const": models.CONST,
        "a": models.A,
        "b": models.B,
        "digits": models.DIGITS,
        "const_size": models.CONST_SIZE,
        "digit_size": models.DIGIT_SIZE,
        "head_size": 3.0,
        "embed_scale": one.embed_scale,
        "multiply": MULTIPLY,
        "add": ADD,
    }
    return target.path, draft, {**one.environment, "EAGLE3_RIG_LABEL": json.dumps(plan)}


def _read() -> dict[str, Any]:
    data: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
    return data


def _expand(value: Any, bases: Mapping[str, Any]) -> Any:
    """Put the base that ``$base`` names below an object's own keys."""
    if isinstance(value, list):
        return [_expand(one, bases) for one in value]
    if not isinstance(value, dict):
        return value
    own = {name: _expand(one, bases) for name, one in value.items() if name != "$base"}
    return {**_expand(bases[value["$base"]], bases), **own} if "$base" in value else own
