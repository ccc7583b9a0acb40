"""`sglang-eagle3 bench` on real servers of 0.5.23: the baseline, two settings, a report that says what was measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_eagle3_plugin.rig import engine, models
from sglang_eagle3_plugin.rig.engine import EngineSpec
from sglang_eagle3_plugin.rig.environments import Environment

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def test_a_sweep_over_real_servers(env0523: Environment, tmp_path: Path) -> None:
    target = models.target(tmp_path / "target", "llama")
    draft = models.draft(tmp_path / "draft", target, (3, 5, 6), convention="output")
    arguments = EngineSpec(target.path, None).engine_arguments("0.5.23")
    del arguments["model_path"]
    argv = [sys.executable, "-m", "sglang_eagle3_plugin", "bench", "--target", str(target.path), "--draft", str(draft)]
    argv += ["--python", str(env0523.python), "--num-steps", "1,3", "--batch", "1", "--requests", "2", "--max-tokens", "9"]
    argv += ["--repeats", "2", "--out", str(tmp_path / "out"), "--", *engine.flags(arguments)]
    variables = {**engine.ENVIRONMENT, "PYTHONPATH": str(engine.SITE), "EAGLE3_RUNTIME_DIR": str(tmp_path)}
    done = subprocess.run(argv, env=os.environ | variables, capture_output=True, text=True, timeout=900)
    assert "Traceback" not in done.stderr, done.stderr[-2000:]
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    rows = {row["case"]: row for row in report["rows"]}
    assert len(rows) == 3, done.stderr[-2000:]
    one, three = (rows[name] for name in sorted(rows) if name != "baseline")
    # The rig's draft is right about every token: so many drafts a step are accepted as are made.
    assert (one["acceptance_length"], three["acceptance_length"]) == (2.0, 4.0)
    assert three["rates"] == [1.0, 1.0, 1.0]
    assert one["same_answers"] == three["same_answers"] == 1.0
    assert (tmp_path / "out" / "report.png").read_bytes()[:4] == b"\x89PNG"
    assert "baseline" in (tmp_path / "out" / "report.md").read_text()
    # Nothing is measured twice: the same command finds everything done.
    again = subprocess.run(argv, env=os.environ | variables, capture_output=True, text=True, timeout=120)
    assert "starting its server" not in again.stderr
    assert again.returncode == done.returncode
