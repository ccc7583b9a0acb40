"""The command `sglang-eagle3`. Thin: it parses, calls, prints. Nothing else in the package prints."""

from __future__ import annotations

from sglang_eagle3_plugin.cli.main import main

__all__ = ["main"]
