"""The rig installs the plugin that runs it, from a checkout or from an installed wheel, and nothing is left when it goes."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from sglang_eagle3_plugin.rig import environments, installing
from sglang_eagle3_plugin.rig.environments import Environment, uv

pytestmark = pytest.mark.engine


def fresh(root: Path) -> Environment:
    uv("venv", str(root))
    return Environment("none", root / "bin/python", root)


def files(environment: Environment) -> set[str]:
    """Every file of the environment, less byte code, locks and what says where a wheel came from."""
    unlike = {"RECORD", "INSTALLER", "REQUESTED", "direct_url.json", "uv_cache.json", installing.STAMP, f"{installing.STAMP}.lock"}
    found = (path for path in environment.root.rglob("*") if path.is_file() and path.name not in unlike and path.suffix != ".pyc")
    return {str(path.relative_to(environment.root)) for path in found}


def ours(environment: Environment) -> set[str]:
    return {name for name in files(environment) if "eagle3" in name}


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    environment = fresh(tmp_path_factory.mktemp("first"))
    installing.install_plugin(environment)
    return environment


def test_a_packed_wheel_is_the_built_one(first, tmp_path):
    """The demo of an installed plugin installs itself into a release's environment."""
    second = fresh(tmp_path / "second")
    code = """
import sys
from pathlib import Path
from sglang_eagle3_plugin.rig import installing
from sglang_eagle3_plugin.rig.environments import Environment
installing.install_plugin(Environment("none", Path(sys.argv[1]), Path(sys.argv[2])))
"""
    # The environment has the plugin without its extra `rig`; uv is found on the path then.
    path = f"{Path(environments._find_uv()).parent}{os.pathsep}{os.environ['PATH']}"
    subprocess.run([first.python, "-c", code, second.python, second.root], check=True, env=os.environ | {"PATH": path})
    assert ours(second) == ours(first)
    assert any(name.endswith("site-packages/sglang_eagle3_plugin.pth") for name in ours(second))
    site = next(first.root.glob("lib/python*/site-packages"))
    for name in ours(first):
        if name.startswith(str(site.relative_to(first.root))):
            assert (second.root / name).read_bytes() == (first.root / name).read_bytes()
    entry_points = "import importlib.metadata as m; print(m.entry_points(group='sglang.srt.plugins')['eagle3'].value)"
    done = subprocess.run([second.python, "-c", entry_points], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "sglang_eagle3_plugin.plugin:activate"


def test_installed_once_and_again_when_something_changed(first, monkeypatch):
    calls = []
    monkeypatch.setattr(installing, "uv", lambda *arguments: calls.append(arguments) or uv(*arguments))
    installing.install_plugin(first)
    assert calls == []
    monkeypatch.setattr(installing, "_digest", lambda: "another")
    installing.install_plugin(first)
    assert [call[:2] for call in calls] == [("build", "--wheel"), ("pip", "install")]


def test_uninstalled_without_a_trace(tmp_path):
    environment = fresh(tmp_path / "third")
    installing.install_plugin(environment)
    assert ours(environment)
    installing.uninstall_plugin(environment)
    assert ours(environment) == set()
    assert not list(environment.root.rglob("*eagle3*/*"))
    installing.uninstall_plugin(environment)
