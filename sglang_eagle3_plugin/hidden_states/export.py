"""Training data from a dump, in the formats that trainers read.

- ``specforge`` (SpecForge 0.2, ``specforge/algorithms/eagle3/data.py``): one ``KEY.ckpt`` a sample, a dict of ``input_ids`` (N,),
  ``loss_mask`` (N,), ``aux_hidden_state`` (1, N, B*H) and ``hidden_state`` (1, N, H), the latter after the norm: its trainer puts
  ``lm_head`` straight on it.
- ``speculators`` (speculators 0.9, ``speculators/train/data.py``): a saved dataset of ``input_ids, loss_mask, seq_len``, and
  ``hidden_states/hs_I.safetensors`` with ``token_ids`` (N,) and ``hidden_states`` (N, B+1, H), whose last slot is before the norm:
  its trainer puts the target's norm and ``lm_head`` on it.
- ``pt``: a directory a sample with ``input_ids.pt, loss_mask.pt, aux_0.pt, ..., final.pt``, the layout of older scripts.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sglang_eagle3_plugin.boundaries import Convention
from sglang_eagle3_plugin.errors import UserError
from sglang_eagle3_plugin.hidden_states import torch_io
from sglang_eagle3_plugin.hidden_states.layout import Header
from sglang_eagle3_plugin.hidden_states.reader import Dump, Ref, Tensors, to_float32
from sglang_eagle3_plugin.hidden_states.writer import serialize
from sglang_eagle3_plugin.paths import Alone

PROVENANCE = "eagle3-dump.json"
"""Beside every export: which boundaries the slots are, in words that no convention can twist."""
FORMATS = ("specforge", "speculators", "pt")


@dataclass(frozen=True)
class Exported:
    """What an export did: samples written, and samples that were there already."""

    written: int
    present: int


def export(dump: Dump, target_format: str, out: Path, progress: Callable[[int], None] = lambda _: None) -> Exported:
    """Export every sequence of a dump once, and overwrite nothing.

    A second run adds what is missing; ``speculators``, whose dataset is one table, wants a new directory instead.

    Raises:
        UserError: the dump lacks what the format needs, or ``out`` holds something else, or another run writes there.
        CorruptShardError: a shard's checksum does not fit.
    """
    header = dump.header()
    slots = _training_slots(header)
    _check_final(header, target_format)
    _open_output(out, target_format, header, slots)
    with Alone(out):
        return _export(dump, target_format, slots, out, progress)


def _export(dump: Dump, target_format: str, slots: list[int], out: Path, progress: Callable[[int], None]) -> Exported:
    refs = dump.unique()
    if target_format == "speculators":
        return _export_speculators(dump, refs, slots, out, progress)
    write = {"specforge": _write_specforge, "pt": _write_pt}[target_format]
    written = 0
    for done, ref in enumerate(refs, 1):
        target = out / (f"{ref.key}.ckpt" if target_format == "specforge" else ref.key)
        if not target.exists():
            write(dump.read(ref), slots, target)
            written += 1
        progress(done)
    return Exported(written, len(refs) - written)


def provenance(header: Header) -> dict[str, Any]:
    """What a trained draft should remember of its data: boundaries, and the same as ids of layer outputs."""
    boundaries = [header.boundaries[slot] for slot in _training_slots(header)]
    return {
        "boundaries": boundaries,
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": list(Convention.OUTPUT.to_ids(boundaries)),
            "eagle_aux_hidden_state_layer_convention": Convention.OUTPUT.value,
        },
        "dump": header.to_json(),
    }


def _training_slots(header: Header) -> list[int]:
    """Slots that feed the draft: all but boundary L, which is the final state before the norm."""
    return [slot for slot, boundary in enumerate(header.boundaries) if boundary != header.num_layers]


def _check_final(header: Header, target_format: str) -> None:
    if target_format == "specforge" and header.final != "post_norm":
        raise UserError(
            f"SpecForge needs the final hidden state after the norm, and this dump has {header.final}; "
            "dump again without EAGLE3_DUMP_FINAL=0"
        )
    if target_format == "speculators" and header.final != "pre_norm" and header.num_layers not in header.boundaries:
        raise UserError(
            "speculators needs the final hidden state before the norm, and this dump has it only after; "
            f"dump again with boundary {header.num_layers} among EAGLE3_DUMP_BOUNDARIES"
        )


def _open_output(out: Path, target_format: str, header: Header, slots: list[int]) -> None:
    facts = provenance(header) | {"format": target_format}
    marker = out / PROVENANCE
    if marker.exists():
        try:
            there = json.loads(marker.read_text())
        except ValueError:
            there = {}
        if any(there.get(name) != facts[name] for name in ("format", "boundaries")):
            raise UserError(f"{out} holds an export of another kind; give --out a new directory")
        if target_format != "speculators":
            return
    if out.exists() and any(out.iterdir()):
        raise UserError(f"{out} is not empty; give --out a new directory")
    if not slots:
        raise UserError("this dump has no boundary below the last layer, so there is nothing to train on")
    out.mkdir(mode=0o700, parents=True, exist_ok=True)
    if target_format != "speculators":  # written last there, since that export starts anew
        marker.write_text(json.dumps(facts, indent=2) + "\n")


def _final(tensors: Tensors) -> Any:
    if tensors.final is None:
        raise UserError("this dump has no final hidden state; dump again without EAGLE3_DUMP_FINAL=0")
    return torch_io.to_tensor(tensors.final, tensors.final_scale)


def _aux(tensors: Tensors, slots: list[int]) -> Any:
    scale = None if tensors.aux_scale is None else tensors.aux_scale[:, slots]
    return torch_io.to_tensor(np.ascontiguousarray(tensors.aux[:, slots]), scale)


def _write_specforge(tensors: Tensors, slots: list[int], path: Path) -> None:
    sample = {
        "input_ids": torch_io.to_tensor(tensors.input_ids),
        "loss_mask": torch_io.to_tensor(tensors.loss_mask.astype(np.int64)),
        "aux_hidden_state": _aux(tensors, slots).flatten(1).unsqueeze(0),
        "hidden_state": _final(tensors).unsqueeze(0),
    }
    torch_io.save_pt(sample, path)


def _write_pt(tensors: Tensors, slots: list[int], directory: Path) -> None:
    parts = {
        "input_ids": torch_io.to_tensor(tensors.input_ids),
        "loss_mask": torch_io.to_tensor(tensors.loss_mask.astype(np.int64)),
    }
    aux = _aux(tensors, slots)
    parts |= {f"aux_{i}": aux[:, i].clone() for i in range(len(slots))}
    parts["final"] = _final(tensors)
    unfinished = directory.with_name(directory.name + ".tmp")
    unfinished.mkdir(mode=0o700, exist_ok=True)
    for name, tensor in parts.items():
        torch_io.save_pt(tensor, unfinished / f"{name}.pt")
    unfinished.rename(directory)


def _export_speculators(dump: Dump, refs: list[Ref], slots: list[int], out: Path, progress: Callable[[int], None]) -> Exported:
    try:
        import datasets
    except ImportError as error:
        raise UserError(
            "--to speculators needs the package datasets; install it, or run this in speculators' environment"
        ) from error
    header = dump.header()
    states = out / "hidden_states"
    states.mkdir(mode=0o700)
    rows = []
    for index, ref in enumerate(refs):
        tensors = dump.read(ref)
        layers: list[tuple[Any, Any]] = [(tensors.aux[:, slot], _column(tensors.aux_scale, slot)) for slot in slots]
        if header.num_layers in header.boundaries:
            last = header.boundaries.index(header.num_layers)
            layers.append((tensors.aux[:, last], _column(tensors.aux_scale, last)))
        else:
            layers.append((tensors.final, tensors.final_scale))
        _write_safetensors(_stack(layers), tensors.input_ids, states / f"hs_{index}.safetensors")
        rows.append((tensors.input_ids, tensors.loss_mask))
        progress(index + 1)
    columns = {
        "input_ids": [ids for ids, _ in rows],
        "loss_mask": [mask.astype(np.int64) for _, mask in rows],
        "seq_len": [len(ids) for ids, _ in rows],
    }
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict(columns).with_format("torch").save_to_disk(str(out))
    (out / PROVENANCE).write_text(json.dumps(provenance(header) | {"format": "speculators"}, indent=2) + "\n")
    return Exported(len(rows), 0)


def _column(scale: Any, slot: int) -> Any:
    return None if scale is None else scale[:, slot]


def _stack(layers: list[tuple[Any, Any]]) -> Any:
    """(N, H) each -> (N, slots, H); fp8, which needs its scales, becomes float32."""
    if layers[0][0].dtype == np.uint8:
        layers = [(to_float32(*layer), None) for layer in layers]
    return np.stack([stored for stored, _ in layers], axis=1)


def _write_safetensors(states: Any, token_ids: Any, path: Path) -> None:
    dtype = {"uint16": "BF16", "float16": "F16", "float32": "F32"}[states.dtype.name]
    tensors = {
        "token_ids": ("I64", token_ids.shape, np.ascontiguousarray(token_ids)),
        "hidden_states": (dtype, states.shape, states),
    }
    prefix, buffers = serialize(tensors, {})
    temporary = path.with_name(path.name + ".tmp")
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb") as file:
        file.write(prefix)
        for buffer in buffers:
            file.write(buffer)
    temporary.rename(path)
