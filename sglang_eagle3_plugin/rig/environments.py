"""Environments of SGLang releases, built with uv in the cache and kept: ``<cache>/envs/<release>``.

One takes 8 to 11 GB (much of it hard links into uv's cache) and one to five minutes. A marker file, written last, says that it is
whole; what lacks the marker is built anew.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from sglang_eagle3_plugin import cache
from sglang_eagle3_plugin.errors import UserError

MARKER = ".complete"
PYTHON = "3.11"
"""The Python that every release was seen with; the running one is taken when uv finds no other."""
NEEDED_GB = 9

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Environment:
    """An environment that holds an SGLang release.

    Attributes:
        release: as asked for, ``0.5.9``.
        python: its interpreter.
        root: its directory.
    """

    release: str
    python: Path
    root: Path


@dataclass(frozen=True)
class Extra:
    """What a release needs besides itself to install or run here.

    Attributes:
        releases: which.
        constraint: a requirement beside ``sglang==release``, or None.
        override: a requirement that replaces the release's own, or None.
        reason: why.
    """

    releases: SpecifierSet
    reason: str
    constraint: str | None = None
    override: str | None = None


EXTRAS = (
    Extra(SpecifierSet("<0.5.11", prereleases=True), "its Triton's interpreter fails with newer ones", constraint="numpy<2.3"),
    Extra(
        SpecifierSet(">=0.5.11,<0.5.13", prereleases=True),
        "it leaves kernels open, and its transformers does not import with newer ones; 0.5.13 pins it so itself",
        constraint="kernels<0.15",
    ),
    Extra(
        SpecifierSet(">=0.5.18,<0.5.23", prereleases=True),
        "they take a prerelease of cuda-tile that fails to build, and that nothing here imports (seen on 0.5.18 and 0.5.20)",
        override="cuda-tile ; sys_platform == 'never'",
    ),
)


def directory(release: str) -> Path:
    """Where the environment of a release is, or would be."""
    return cache.directory("envs") / release


def built() -> list[str]:
    """The releases whose environments are whole, oldest first."""
    found = [path.parent.name for path in cache.directory("envs").glob(f"*/{MARKER}")]
    return sorted(found, key=Version)


def ensure(release: str, progress: Progress | None = None) -> Environment:
    """Find or build the environment of a release. Two processes may ask at once: one builds, the other waits.

    Args:
        release: a version of the ``sglang`` package.
        progress: is called with a line about each long step.

    Raises:
        UserError: no such release, no uv, no room, or uv failed.
    """
    say = progress or (lambda line: None)
    try:
        release = str(Version(release))
    except InvalidVersion:
        raise UserError(f"{release!r} is not a version of SGLang; give one like 0.5.9") from None
    root = directory(release)
    environment = Environment(release, root / "bin" / "python", root)
    if (root / MARKER).exists():
        return environment
    lock = root.parent / ".locks" / release
    with locked(lock, lambda: say(f"waiting for another process that builds sglang {release}")):
        if not (root / MARKER).exists():
            _build(environment, say)
    return environment


def remove(release: str) -> None:
    """Delete the environment of a release, if there is one. The marker goes first, so that an interrupted removal is seen."""
    root = directory(release)
    (root / MARKER).unlink(missing_ok=True)
    shutil.rmtree(root, ignore_errors=True)


def _build(environment: Environment, say: Progress) -> None:
    _find_uv()  # before minutes of work are announced, and what is there is removed
    free = shutil.disk_usage(environment.root.parent).free / 1e9
    if free < NEEDED_GB:
        raise UserError(
            f"an environment of SGLang takes about {NEEDED_GB} GB and {environment.root.parent} has {free:.1f} GB left; "
            "make room, or set SGLANG_EAGLE3_CACHE to a directory elsewhere"
        )
    # In place: scripts name their interpreter by its full path, so an environment cannot be moved into place when done.
    shutil.rmtree(environment.root, ignore_errors=True)
    say(f"installing sglang {environment.release} into {environment.root} (8 to 11 GB; one to five minutes)")
    try:
        _create(environment.root)
        with tempfile.TemporaryDirectory() as scratch:
            arguments = ["--compile-bytecode", f"sglang=={environment.release}"]
            for extra in EXTRAS:
                if environment.release in extra.releases:
                    arguments += [extra.constraint] if extra.constraint else []
                    if extra.override:
                        Path(scratch, "override.txt").write_text(extra.override + "\n", encoding="utf-8")
                        arguments += ["--override", str(Path(scratch, "override.txt"))]
            uv("pip", "install", "--python", str(environment.python), *arguments)
    except UserError as error:
        shutil.rmtree(environment.root, ignore_errors=True)
        if f"no version of sglang=={environment.release}" in str(error).replace("\n", " "):
            raise UserError(f"the package index has no SGLang {environment.release}; give a released version, like 0.5.9") from None
        raise
    (environment.root / MARKER).write_text(f"sglang=={environment.release}\n", encoding="utf-8")


def _create(root: Path) -> None:
    try:
        uv("venv", "--no-python-downloads", "--python", PYTHON, str(root))
    except UserError:
        if not (3, 10) <= sys.version_info[:2] <= (3, 12):
            uv("venv", "--python", PYTHON, str(root))  # uv downloads one
        else:
            uv("venv", "--python", sys.executable, str(root))


def uv(*arguments: str) -> str:
    """Run uv and return what it printed on stdout.

    Raises:
        UserError: there is no uv, or it failed; with the end of what it said.
    """
    # A virtual environment that is active here is not the one that is meant.
    variables = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run([_find_uv(), *arguments], capture_output=True, text=True, env=variables, check=False)
    if done.returncode:
        raise UserError(f"uv {arguments[0]} failed: {' '.join(done.stderr.split())[-600:]}")
    return done.stdout


def _find_uv() -> str:
    with contextlib.suppress(ImportError, FileNotFoundError):
        from uv import find_uv_bin

        return str(find_uv_bin())
    found = shutil.which("uv")
    if found is None:
        raise UserError(
            "uv is not installed, and environments of SGLang are built with it; pip install 'sglang-eagle3-plugin[rig]'"
        )
    return found


@contextlib.contextmanager
def locked(path: Path, when_waiting: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold a lock file while the block runs; it ends with the process that holds it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if when_waiting:
                when_waiting()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
