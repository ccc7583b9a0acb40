"""Faults that the doctor names, made on purpose: each breaks a real engine, and the fix that the doctor prints mends it.

A fault is a draft (or a launch) that is right but for one thing. What is right answers with acceptance length 4 (three draft
steps), what is miswired with 1.14 at most, whatever else it does; see `rig.models`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from sglang_eagle3_plugin.rig import models

STOCK = {"EAGLE3_PLUGIN": "0"}


@dataclass(frozen=True)
class Fault:
    """One finding of the doctor.

    Attributes:
        id: the finding.
        release: on which it is shown.
        family: of the target.
        boundaries: what the draft is made for.
        ids: what its config lists.
        spoil: makes the fault: (directory of the draft).
        algorithm: of the launch that shows it.
        mend: what to do beyond writing the corrected config: (directory of the draft). None: that is all.
        mended_release: on which the mended one is shown, where the fix is another release.
        mended_by_plugin: the fix is to install the plugin.
        mended_algorithm: where the fix is a flag.
    """

    id: str
    release: str = "0.5.23"
    family: str = "llama"
    boundaries: tuple[int, ...] = (2, 4, 5)
    ids: tuple[int, ...] = (1, 3, 4)
    spoil: Callable[[Path], None] = lambda draft: None
    algorithm: str = "EAGLE3"
    mend: Callable[[Path], None] | None = None
    mended_release: str | None = None
    mended_by_plugin: bool = False
    mended_algorithm: str = "EAGLE3"
    flags: Mapping[str, str] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """A name for a directory and a test."""
        return f"{self.id.removeprefix('ERR_').lower()}-{self.release}"


def configured(**changes: Any) -> Callable[[Path], None]:
    """Change fields of the draft's config; dots do not lead into objects, None removes."""

    def spoil(draft: Path) -> None:
        config = json.loads((draft / "config.json").read_text())
        config |= changes
        (draft / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))

    return spoil


def stored(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[[Path], None]:
    """Change the draft's tensors."""

    def spoil(draft: Path) -> None:
        tensors = load_file(draft / "model.safetensors")
        save_file({k: np.ascontiguousarray(v) for k, v in change(tensors).items()}, draft / "model.safetensors", {"format": "pt"})

    return spoil


def _without(name: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda tensors: {k: v for k, v in tensors.items() if k != name}


def _renamed(old: str, new: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda tensors: {k.replace(old, new): v for k, v in tensors.items()}


def _map(values: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda tensors: tensors | {"d2t": np.asarray(values, np.int64)}


def _permuted(tensors: dict[str, Any]) -> dict[str, Any]:
    """Exchange the first two slots of fc, as a trainer leaves them that took ids 3, 1, 4 in that order."""
    fc = tensors["fc.weight"]
    first, second, third = np.split(fc, 3, axis=1)
    return tensors | {"fc.weight": np.concatenate([second, first, third], axis=1)}


def _turned(tensors: dict[str, Any]) -> dict[str, Any]:
    """Keep the draft's stream in the reverse order of channels: the same draft behind its fc, a foreign one where fc is skipped."""
    turned = dict(tensors)
    hidden = tensors["fc.weight"].shape[0]
    for name in ("fc", "midlayer.self_attn.o_proj", "midlayer.mlp.down_proj"):
        turned[f"{name}.weight"] = tensors[f"{name}.weight"][::-1]
    for name in ("lm_head", "midlayer.mlp.gate_proj", "midlayer.mlp.up_proj"):
        turned[f"{name}.weight"] = tensors[f"{name}.weight"][:, ::-1]
    for name in ("q", "k", "v"):
        weight = tensors[f"midlayer.self_attn.{name}_proj.weight"]
        turned[f"midlayer.self_attn.{name}_proj.weight"] = np.concatenate([weight[:, :hidden], weight[:, hidden:][:, ::-1]], axis=1)
    return turned


def _reduced(draft: Path) -> None:
    """Leave out of the draft vocabulary ids that the target never says, and tie the head as an AngelSlim template did."""
    kept = [*range(256), *range(276, models.VOCABULARY)]
    stored(lambda t: t | {"lm_head.weight": t["lm_head.weight"][kept], "d2t": np.asarray(kept) - np.arange(len(kept)),
                          "t2d": np.isin(np.arange(models.VOCABULARY), kept)})(draft)  # fmt: skip
    configured(draft_vocab_size=len(kept), tie_word_embeddings=True)(draft)


def _speculators(draft: Path) -> None:
    """Move the ids to the top level, where speculators writes boundaries."""
    configured(
        eagle_config=None,
        speculators_model_type="eagle3",
        eagle_aux_hidden_state_layer_ids=[3, 5, 6],
        num_aux_hidden_states=None,
    )(draft)


def _sorted(draft: Path) -> None:
    stored(_permuted)(draft)
    configured(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 3, 4]})(draft)


CONVENTION = {"eagle_aux_hidden_state_layer_convention": "boundary"}
BOUNDARY_IDS = configured(eagle_config={"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [2, 4, 5], **CONVENTION})

FAULTS = (
    Fault("ERR_LAYER_CONVENTION", spoil=BOUNDARY_IDS),
    Fault("ERR_FLAG_EAGLE_FOR_EAGLE3", spoil=stored(_turned), algorithm="EAGLE"),
    Fault("ERR_WRAPPER_NO_HOOKS", "0.5.9", "kimi-k25", mended_by_plugin=True),
    Fault("ERR_LM_HEAD_UNINIT", spoil=stored(_without("lm_head.weight"))),
    Fault("ERR_DRAFT_DEPTH", "0.5.9", spoil=configured(num_hidden_layers=8)),
    Fault("ERR_ARCH_NOT_EAGLE3", "0.5.9", spoil=configured(architectures=["LlamaForCausalLM"])),
    Fault("ERR_CONFIG_IDS_IGNORED", boundaries=(3, 5, 6), ids=(2, 4, 5), spoil=_speculators),
    Fault("ERR_LAYER_ID_RANGE", ids=(-1, 2, 30)),
    Fault("ERR_TENSOR_MISSING", "0.5.9", spoil=stored(_renamed("midlayer.", "layers.0.")),
          mend=stored(_renamed("layers.0.", "midlayer."))),
    Fault("ERR_LAYER_ID_ORDER", ids=(3, 1, 4), spoil=stored(_permuted), mend=_sorted),
    Fault("ERR_FINAL_BOUNDARY_UNSUPPORTED", "0.5.9", boundaries=(2, 4, 8), ids=(1, 3, 7), mended_by_plugin=True),
    Fault("ERR_DRAFT_ARCH_UNKNOWN", spoil=configured(architectures=["Eagle3Speculator"])),
    Fault("ERR_D2T_NOT_OFFSET", spoil=stored(_map(range(models.VOCABULARY))), mend=stored(_map([0] * models.VOCABULARY))),
    Fault("ERR_TIED_HEAD_WITH_REDUCED_VOCAB", spoil=_reduced),
    Fault("ERR_AUX_COUNT_MISMATCH", "0.5.9", boundaries=(2, 3, 4, 5), ids=(1, 2, 3, 4), mended_release="0.5.23"),
    Fault("ERR_LAYER_CONVENTION_BEFORE_0.5.13", "0.5.10.post1", "kimi-k25", spoil=BOUNDARY_IDS),
    Fault("WARN_MAXPOS", spoil=configured(max_position_embeddings=2048)),
)  # fmt: skip
"""The order is that of what is most worth running."""
