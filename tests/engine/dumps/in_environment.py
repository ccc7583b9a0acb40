"""Run a program of this directory in a release's environment, where torch is, with the working tree and the tests on its path."""

import os
import subprocess
from pathlib import Path

from sglang_eagle3_plugin import cache
from sglang_eagle3_plugin.rig import environments

HERE = Path(__file__).parent
ROOT = HERE.parents[2]


def run(program, *arguments, release="0.5.23", path=(), **env):
    """Run it; its assertions are the test. Returns stdout."""
    python = environments.ensure(release).python
    places = [ROOT, ROOT / "tests/unit", HERE, *path]
    done = subprocess.run(
        [python, HERE / program, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, places))} | env,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return done.stdout


def trainers():
    """SpecForge 0.2 and speculators 0.9 as published, without their dependencies, which the environment has."""
    target = cache.directory("trainers-specforge-0.2.0-speculators-0.9.0")
    if not (target / "speculators").is_dir():
        packages = ("specforge==0.2.0", "speculators==0.9.0", "hs-connectors==0.9.0")
        environments.uv("pip", "install", "--no-deps", "--python-version", "3.11", "--target", str(target), *packages)
    return target
