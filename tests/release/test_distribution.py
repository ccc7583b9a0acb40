"""What is released: sdist and wheel, built from one another, installed where there is no SGLang and beside the releases of CI."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from sglang_eagle3_plugin import __version__
from sglang_eagle3_plugin.rig import environments
from sglang_eagle3_plugin.rig.environments import uv

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> tuple[Path, Path]:
    """The sdist, and the wheel that is made from it."""
    out = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "build", "--outdir", str(out), str(ROOT)], check=True, capture_output=True)
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return sdist, wheel


def test_the_sdist_holds_what_a_packager_needs(built):
    with tarfile.open(built[0]) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    wanted = {
        "LICENSE",
        "README.md",
        "CHANGELOG.md",
        "SECURITY.md",
        "Makefile",
        "pyproject.toml",
        "docs/README.md",
    }
    assert wanted <= names
    assert any(name.startswith("patches/0.5.9/") for name in names)
    assert not [name for name in names if re.search(r"(^|/)(\.venv|__pycache__|\.git)(/|$)", name)]


def test_the_wheel_is_whole_and_says_what_it_is(built):
    with zipfile.ZipFile(built[1]) as opened:
        names = set(opened.namelist())
        (metadata,) = [name for name in names if name.endswith("/METADATA")]
        about = Parser().parsestr(opened.read(metadata).decode())
        for name in names:
            if name.endswith((".py", ".pth", ".json")):
                assert str(ROOT).encode() not in opened.read(name), name
    assert {"sglang_eagle3_plugin.pth", "sglang_eagle3_plugin/_compat/releases.json", "sglang_eagle3_plugin/py.typed"} <= names
    assert any(name.startswith("sglang_eagle3_plugin/_patches/0.5.9/") for name in names)
    assert (about["Name"], about["Version"], about["License-Expression"]) == ("sglang-eagle3-plugin", __version__, "Apache-2.0")


def test_the_version_is_in_the_changelog_with_its_day_and_a_tag_here_says_the_same():
    assert re.search(rf"^## \[{re.escape(__version__)}\] - \d{{4}}-\d\d-\d\d$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    tags = subprocess.run(["git", "tag", "--points-at", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    assert set(tags) <= {f"v{__version__}"}


def test_where_there_is_no_sglang_it_works_and_leaves_without_a_trace(built, tmp_path):
    root = tmp_path / "env"
    uv("venv", str(root))
    python, command = root / "bin" / "python", root / "bin" / "sglang-eagle3"
    uv("pip", "install", "--python", str(python), str(built[1]))
    (site,) = root.glob("lib/python*/site-packages")
    assert (site / "sglang_eagle3_plugin.pth").exists()
    said = subprocess.run([command, "--version"], check=True, capture_output=True, text=True)
    assert __version__ in said.stdout
    for line in ("models --release 0.5.9", "compat --class KimiK25", "status"):
        done = subprocess.run([command, *line.split()], capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode in (0, 1, 2), done.stderr
        assert "Traceback" not in done.stderr
        assert done.stdout.strip() or len(done.stderr.strip().splitlines()) == 1
    quiet = subprocess.run(
        [python, "-c", "import sys; print(sorted(m for m in sys.modules if 'eagle3' in m))"], capture_output=True, text=True
    )
    assert quiet.stderr == ""
    uv("pip", "uninstall", "--python", str(python), "sglang-eagle3-plugin")
    assert not [path for path in site.rglob("*eagle3*") if path.suffix != ".pyc" and not path.is_dir()]


@pytest.mark.engine
@pytest.mark.parametrize("release", ["0.5.9", "0.5.23"])
def test_beside_sglang_it_changes_no_version(built, release):
    environment = environments.ensure(release, print)
    argv = ["pip", "install", "--dry-run", "--python", str(environment.python), str(built[1])]
    done = subprocess.run([environments._find_uv(), *argv], check=True, capture_output=True, text=True)
    changes = re.findall(r"^ ([-~+]) (\S+?)==", done.stderr, re.MULTILINE)
    removed = {name for sign, name in changes if sign == "-"}
    assert removed <= {"sglang-eagle3-plugin"}, done.stderr
