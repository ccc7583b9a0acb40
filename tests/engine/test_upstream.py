"""The series for upstream as its maintainers would take it: `git am`, their formatter, and the patches' own tests.

The repository is made from the newest wheel, which holds neither upstream's formatter config nor its tests. What their
`.pre-commit-config.yaml` asks for at 0.5.23: isort 7.0.0 (profile black, sglang is first party), ruff 0.15.1 with F401 and F821,
codespell 2.4.1, and ruff's formatter with no settings of its own (sgl-project/sglang#37210). The release's own files, unpatched,
are held to the same here: should these tools not be upstream's, the stock files are what says so.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from uv import find_uv_bin

from sglang_eagle3_plugin import cache
from sglang_eagle3_plugin.rig import engine
from sglang_eagle3_plugin.rig.environments import Environment
from sglang_eagle3_plugin.series import catalog

from .conftest import NEWEST

pytestmark = [pytest.mark.engine, pytest.mark.slow]

WORDS = "cann,thi,makro,wil,rouge,PRIS"  # what upstream has codespell pass over
FORMATTERS = (
    ("ruff==0.15.1", "ruff", "format", "--isolated", "--check"),
    ("ruff==0.15.1", "ruff", "check", "--isolated", "--select=F401,F821"),
    ("isort==7.0.0", "isort", "--profile=black", "--project=sglang", "--check-only", "--diff"),
    ("codespell==2.4.1", "codespell", "-L", WORDS),
)


def _git(where: Path, *arguments: str) -> str:
    who = ("-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false", "-c", "core.autocrlf=false")
    alone = os.environ | {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    done = subprocess.run(["git", *who, *arguments], cwd=where, capture_output=True, text=True, env=alone, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def patches() -> list[Path]:
    directory = catalog.root() / "upstream"
    return [directory / name for name in (directory / "series").read_text().split()]


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory, patches: list[Path]) -> Path:
    """A fresh repository with the newest release's files as its first commit, and the series on top."""
    wheels = sorted(cache.directory("wheels").glob(f"sglang-{NEWEST}-*.whl"))
    assert wheels, f"download sglang=={NEWEST} into {cache.directory('wheels')} first"
    root = tmp_path_factory.mktemp("upstream")
    with zipfile.ZipFile(wheels[0]) as wheel:
        wheel.extractall(root / "python", [name for name in wheel.namelist() if name.startswith("sglang/")])
    _git(root, "init", "-q", "-b", "main")
    _git(root, "add", "--all", "--force", ".")
    _git(root, "commit", "-q", "-m", NEWEST)
    _git(root, "am", "-q", "--keep-non-patch", *map(str, patches))
    return root


def test_git_am_makes_one_commit_a_patch_and_each_brings_its_test(repository: Path, patches: list[Path]) -> None:
    commits = _git(repository, "log", "--reverse", "--format=%s", f"HEAD~{len(patches)}..HEAD").splitlines()
    assert len(commits) == len(patches)
    for n, (commit, patch) in enumerate(zip(commits, patches, strict=True)):
        assert patch.with_suffix(".md").read_text().splitlines()[0] == f"# {commit}", "the pull request's title"
        files = _git(repository, "show", "--format=", "--name-only", f"HEAD~{len(patches) - 1 - n}").split()
        assert [file for file in files if file.startswith("test/registered/unit/")], patch.name
        assert all(file.startswith(("python/sglang/srt/", "test/registered/unit/")) for file in files), files
    assert not _git(repository, "status", "--porcelain")


def test_upstreams_formatter_has_nothing_to_say_before_and_after(repository: Path, patches: list[Path]) -> None:
    base = f"HEAD~{len(patches)}"
    touched = [name for name in _git(repository, "diff", "--name-only", base).split() if name.endswith(".py")]
    assert len(touched) > len(patches)
    stock = set(_git(repository, "ls-tree", "-r", "--name-only", base).splitlines())
    for commit, names in ((base, [name for name in touched if name in stock]), ("main", touched)):
        _git(repository, "checkout", "-q", commit)
        try:
            for package, *command in FORMATTERS:
                argv = [find_uv_bin(), "tool", "run", "--from", package, *command, *names]
                done = subprocess.run(argv, cwd=repository, capture_output=True, text=True, check=False)
                assert done.returncode == 0, f"{commit}: {' '.join(command)}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
        finally:
            _git(repository, "checkout", "-q", "main")


def _run_tests(python: Path, packages: Path, tests: Path) -> subprocess.CompletedProcess[str]:
    """Run the patches' own tests, one interpreter for all, on the `sglang` of a directory."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("EAGLE3_", "PYTHON"))}
    variables = {
        **inherited,
        **engine.ENVIRONMENT,
        "CUDA_VISIBLE_DEVICES": "0",  # sglang.test.test_utils reads a digit from it when imported
        "EAGLE3_PLUGIN": "0",
        "PYTHONPATH": f"{packages}{os.pathsep}{engine.SITE}",
    }
    modules = sorted(file.stem for file in tests.glob("test_eagle3_*.py"))
    argv = [str(python), "-m", "unittest", "-v", *modules]
    return subprocess.run(argv, cwd=tests, capture_output=True, text=True, env=variables, timeout=600, check=False)


def test_the_patches_own_tests_pass_on_the_patched_release_and_not_on_the_stock_one(
    repository: Path, patches: list[Path], environment: Callable[[str], Environment], tmp_path: Path
) -> None:
    ready = environment(NEWEST)
    tests = shutil.copytree(repository / "test/registered/unit/speculative", tmp_path / "tests")
    assert len(list(tests.glob("test_eagle3_*.py"))) == len(patches)

    passed = _run_tests(ready.python, repository / "python", tests)
    print(passed.stderr[-3000:])
    assert passed.returncode == 0, passed.stderr[-3000:]
    ran = [line for line in passed.stderr.splitlines() if line == "ok" or line.endswith("... ok")]
    assert len(ran) == 14, "a test of ours was not run"

    (package,) = ready.root.glob("lib/python*/site-packages/sglang")
    failed = _run_tests(ready.python, package.parent, tests)
    assert failed.returncode != 0
    said = [line for line in failed.stderr.splitlines() if line.startswith(("FAIL: ", "ERROR: "))]
    for file in tests.glob("test_eagle3_*.py"):
        assert any(file.stem in line for line in said), f"{file.stem} passes on stock source"
