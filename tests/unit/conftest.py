"""A stand-in `sglang` package for what needs no engine: the shape of 0.5.9's wrapper, in plain Python. It proves nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from sglang_eagle3_plugin.runtime import tap

INNER = """
    class DeepseekV3ForCausalLM:
        def __init__(self, *a): pass
        def set_eagle3_layers_to_capture(self, layer_ids=None): return ("setter", layer_ids)
        def get_embed_and_head(self): return ("embed", "head")
        def set_embed_and_head(self, embed, head): return ("set", embed, head)
"""
WRAPPER = """
    class KimiK25ForConditionalGeneration:
        def __init__(self, config=None):
            self.language_model = DeepseekV3ForCausalLM(config)
        def forward(self): return self.language_model
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A runtime directory of the test's own, and a tap that nobody looks through."""
    monkeypatch.setenv("EAGLE3_RUNTIME_DIR", str(tmp_path / "runtime ü"))
    monkeypatch.setattr(tap, "consumers", ())
    monkeypatch.setattr(tap, "failures", {})
    return tmp_path


@pytest.fixture
def stand_in(tmp_path: Path):
    """Write a stand-in sglang and return a function that runs a snippet beside it in its own process."""
    root = tmp_path / "stand-in"
    models = root / "sglang/srt/models"
    models.mkdir(parents=True)
    for package in (root / "sglang", root / "sglang/srt", models):
        (package / "__init__.py").write_text("")
    (root / "sglang/version.py").write_text("__version__ = '0.5.9+stand-in'\n")
    (root / "sglang/__init__.py").write_text("from sglang.version import __version__\n")

    def run(
        snippet: str, wrapper: str = WRAPPER, inner: str = INNER, check: bool = True, **env: str
    ) -> subprocess.CompletedProcess[str]:
        (models / "kimi_k25.py").write_text(textwrap.dedent(inner) + textwrap.dedent(wrapper))
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(snippet)],
            capture_output=True,
            text=True,
            timeout=60,
            env=os.environ | {"PYTHONPATH": str(root), "EAGLE3_RUNTIME_DIR": str(tmp_path / "records")} | env,
        )
        if check:
            assert done.returncode == 0, done.stderr
        return done

    return run
