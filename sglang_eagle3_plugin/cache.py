"""Where downloads and built environments live: one cache directory, chosen once."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs

from sglang_eagle3_plugin.errors import UserError
from sglang_eagle3_plugin.paths import expanded


def directory(*parts: str) -> Path:
    """Return, and create, a directory below the cache: ``$SGLANG_EAGLE3_CACHE`` or the platform's user cache.

    Raises:
        UserError: it cannot be created or written.
    """
    root = os.environ.get("SGLANG_EAGLE3_CACHE") or platformdirs.user_cache_dir("sglang-eagle3-plugin", appauthor=False)
    path = expanded(Path(root, *parts)).absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"the cache directory {path} cannot be created ({error.strerror}); set SGLANG_EAGLE3_CACHE to another"
        ) from error
    return path
