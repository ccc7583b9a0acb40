"""Torch, asked for only where a file format needs it, and never trusted with a pickle that runs code."""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np

from sglang_eagle3_plugin.errors import UserError
from sglang_eagle3_plugin.hidden_states.reader import Array, to_float32


def import_torch(purpose: str) -> Any:
    """Import torch.

    Args:
        purpose: what needs it, for the message.

    Raises:
        UserError: it is not installed here.
    """
    try:
        import torch
    except ImportError as error:
        raise UserError(
            f"{purpose} needs torch, which this environment lacks; install it, or run this command in SGLang's environment"
        ) from error
    return torch


def load_pt(path: Path) -> Any:
    """Load a ``.pt`` or ``.ckpt`` file onto the CPU, tensors and plain containers only.

    Raises:
        UserError: it is unreadable, or a pickle that would run code.
    """
    torch = import_torch(f"reading {path.name}")
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise UserError(
            f"{path} holds more than tensors and is refused, since loading it could run code; save a dict of tensors instead"
        ) from error
    except (OSError, RuntimeError, EOFError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({str(error).splitlines()[0]})") from error


def to_tensor(stored: Array, scale: Array | None = None) -> Any:
    """Stored states as a torch tensor of the same type; fp8 with its scales becomes bfloat16."""
    torch = import_torch("this export")
    if stored.dtype == np.uint16:
        return torch.from_numpy(stored.view(np.int16).copy()).view(torch.bfloat16)
    if stored.dtype == np.uint8:
        return torch.from_numpy(to_float32(stored, scale)).to(torch.bfloat16)
    return torch.from_numpy(stored.copy())


def save_pt(value: Any, path: Path) -> None:
    """``torch.save`` under a temporary name, fsynced, then renamed; mode 0600."""
    torch = import_torch("this export")
    written = io.BytesIO()  # torch turns a full disk into a RuntimeError about positions in its archive
    torch.save(value, written)
    temporary = path.with_name(path.name + ".tmp")
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "wb") as file:
        file.write(written.getbuffer())
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
