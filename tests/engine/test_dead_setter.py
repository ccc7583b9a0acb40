"""Case W05: the setter that Qwen3.5's wrappers inherit from 0.5.12.post1 to 0.5.20 marks nothing; ours does.

Seen on the stacks of 0.5.13 and 0.5.18 on 2026-11-29. Neither is a release of CI: `SGLANG_EAGLE3_TEST_RELEASES=0.5.13,0.5.18`
runs it.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from packaging.version import Version

from sglang_eagle3_plugin.rig import engine
from tests.engine.conftest import RELEASES

DRIVER = Path(__file__).with_name("dead_setter_driver.py")


@pytest.mark.engine
@pytest.mark.parametrize("release", [r for r in RELEASES if Version("0.5.12") < Version(r) < Version("0.5.21")])
def test_the_inherited_setter_is_dead_and_ours_is_not(environment, release):
    variables = {**os.environ, **engine.ENVIRONMENT, "PYTHONPATH": str(engine.SITE)}
    argv = [str(environment(release).python), str(DRIVER)]
    done = subprocess.run(argv, env=variables, capture_output=True, text=True, timeout=300)
    line = next((line for line in done.stdout.splitlines() if line.startswith("RESULT ")), None)
    assert line, done.stderr[-2000:]
    assert json.loads(line.removeprefix("RESULT ")) == {"inherited": [], "ours": [2, 4, 5]}
