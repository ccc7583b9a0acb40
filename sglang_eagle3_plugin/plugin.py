"""The `sglang.srt.plugins` entry point, which SGLang calls from 0.5.11 on in each process that loads plugins."""

from __future__ import annotations

from sglang_eagle3_plugin import activation


def activate() -> None:
    """Activate once per process. Raises nothing, but for `SystemExit` under ``EAGLE3_STRICT=1``.

    SGLang calls it from ``load_plugins()`` (sglang/srt/plugins/__init__.py), which only logs an `Exception`; by then the `.pth`
    has mostly been here, and the call changes nothing.
    """
    activation.activate("entry-point")
