"""Hidden states of any origin, sample by sample, as float32: our dumps, SpecForge files, speculators files, older ``.pt`` files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sglang_eagle3_plugin.errors import UserError
from sglang_eagle3_plugin.hidden_states import torch_io
from sglang_eagle3_plugin.hidden_states.layout import MANIFEST, Header, sample_key
from sglang_eagle3_plugin.hidden_states.reader import Array, Dump, Tensors, to_float32


@dataclass(frozen=True)
class States:
    """One sample.

    Attributes:
        key: `layout.sample_key` of the token ids, or None where the file has no ids.
        slots: name -> (N, H) float32, in slot order; the names are ``slot 0`` ... or ``boundary 2`` ...
        finals: the final state under whatever name the format gives it: ``final``, ``boundary 8``.
        tokens: (N,) token ids, or None.
        loss_mask: (N,), ones where the format has none.
        origin: file or sample id, for messages.
    """

    key: str | None
    slots: dict[str, Array]
    finals: dict[str, Array]
    tokens: Array | None
    loss_mask: Array
    origin: str


def read(path: Path) -> tuple[Header | None, Iterator[States]]:
    """Recognise what lies at ``path`` and read it: (header of one of our dumps or None, samples).

    Raises:
        UserError: nothing that is known lies there.
    """
    if path.is_dir() and any(MANIFEST.fullmatch(p.name) for p in path.iterdir()):
        dump = Dump.open(path)
        return dump.header(), (from_dump(dump.header(), dump.read(ref), ref.key, ref.id) for ref in dump.unique())
    files = sorted(p for p in path.rglob("*") if p.suffix in (".ckpt", ".safetensors", ".pt")) if path.is_dir() else [path]
    files = [p for p in files if p.is_file()]
    if not files:
        raise UserError(f"{path} holds no dump, .ckpt, .pt or hs_*.safetensors; give a dump or a trainer's data")
    return None, _read_files(files)


def from_dump(header: Header, tensors: Tensors, key: str, origin: str) -> States:
    """A dumped sample, its slots named by boundary; boundary L counts as a final state."""
    slots: dict[str, Array] = {}
    finals: dict[str, Array] = {}
    for i, boundary in enumerate(header.boundaries):
        scale = None if tensors.aux_scale is None else tensors.aux_scale[:, i]
        kind = finals if boundary == header.num_layers else slots
        kind[f"boundary {boundary}"] = to_float32(tensors.aux[:, i], scale)
    if tensors.final is not None:
        finals[header.final.replace("_", "-")] = to_float32(tensors.final, tensors.final_scale)
    return States(key, slots, finals, tensors.input_ids, tensors.loss_mask, origin)


def _read_files(files: list[Path]) -> Iterator[States]:
    for path in files:
        if path.suffix == ".safetensors":
            yield _speculators(path)
        elif path.name in ("aux_0.pt", "input_ids.pt") and (path.parent / "aux_0.pt").exists():
            if path.name == "aux_0.pt":
                yield _old_layout(path.parent)
        elif not (path.parent / "aux_0.pt").exists():
            yield _specforge(path)


def _specforge(path: Path) -> States:
    data = torch_io.load_pt(path)
    if not isinstance(data, dict) or "aux_hidden_state" not in data or "hidden_state" not in data:
        raise UserError(f"{path} is not a SpecForge sample: it should be a dict with aux_hidden_state and hidden_state")
    final = _rows(data["hidden_state"], path)
    aux = _rows(data["aux_hidden_state"], path)
    if aux.shape[1] % final.shape[1]:
        raise UserError(f"{path}: aux_hidden_state is {aux.shape[1]} wide, which is no multiple of hidden_state's {final.shape[1]}")
    split = np.split(aux, aux.shape[1] // final.shape[1], axis=1)
    return _states(path, data.get("input_ids"), split, final, data.get("loss_mask"))


def _old_layout(directory: Path) -> States:
    def optional(name: str) -> Any:
        return torch_io.load_pt(directory / name) if (directory / name).exists() else None

    count = 0
    while (directory / f"aux_{count}.pt").exists():
        count += 1
    slots = [_rows(torch_io.load_pt(directory / f"aux_{i}.pt"), directory) for i in range(count)]
    final = optional("final.pt")
    return _states(
        directory, optional("input_ids.pt"), slots, None if final is None else _rows(final, directory), optional("loss_mask.pt")
    )


def _speculators(path: Path) -> States:
    from safetensors import SafetensorError

    torch = torch_io.import_torch(f"reading {path.name}")
    from safetensors.torch import load_file

    try:
        data = load_file(path)
        states = data["hidden_states"].to(torch.float32).numpy()
    except (OSError, SafetensorError, KeyError) as error:
        raise UserError(f"{path} is not a speculators sample with hidden_states ({error})") from error
    slots = [states[:, i] for i in range(states.shape[1] - 1)]
    return _states(path, data.get("token_ids"), slots, states[:, -1], None)


def _rows(tensor: Any, path: Path) -> Array:
    """A torch tensor (N, W) or (1, N, W) as float32 rows."""
    torch = torch_io.import_torch(f"reading {path.name}")
    if not isinstance(tensor, torch.Tensor):
        raise UserError(f"{path} holds a {type(tensor).__name__} where a tensor is due")
    if tensor.ndim == 3 and tensor.shape[0] == 1:
        tensor = tensor[0]
    if tensor.ndim != 2:
        raise UserError(f"{path} holds states of shape {tuple(tensor.shape)}, not (tokens, hidden) or (1, tokens, hidden)")
    rows: Array = tensor.to(torch.float32).numpy()
    return rows


def _states(path: Path, ids: Any, slots: list[Array], final: Array | None, mask: Any) -> States:
    tokens = None if ids is None else ids.reshape(-1).numpy().astype(np.int64)
    length = len(slots[0])
    return States(
        key=None if tokens is None else sample_key(tokens.tolist()),
        slots={f"slot {i}": rows for i, rows in enumerate(slots)},
        finals={} if final is None else {"final": final},
        tokens=tokens,
        loss_mask=np.ones(length, np.uint8) if mask is None else mask.reshape(-1).numpy().astype(np.uint8),
        origin=str(path),
    )
