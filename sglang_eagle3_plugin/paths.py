"""Paths as people write them."""

from __future__ import annotations

import os
from pathlib import Path


def expanded(path: str | Path) -> Path:
    """Resolve a leading ``~``, or leave it: unlike `Path.expanduser`, this raises nothing where a user has no home."""
    return Path(os.path.expanduser(path))  # noqa: PTH111
