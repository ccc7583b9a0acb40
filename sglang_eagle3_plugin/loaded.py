"""The SGLang that this process has imported."""

from __future__ import annotations

import sys


def sglang_release() -> str:
    """The version that the imported SGLang says it is, or ``unknown``. For reports only: patches decide by structure."""
    version = getattr(sys.modules.get("sglang.version"), "__version__", None)
    return str(version or getattr(sys.modules.get("sglang"), "__version__", "unknown"))
