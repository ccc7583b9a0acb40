"""Write a release's series: every change carried out on its files, one commit each, in `git format-patch` form.

Deterministic: a throw-away repository holds the touched files alone, with fixed names and dates and no user or system
configuration; the commit on the first line is zero, the blob ids are full, there is no signature.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_eagle3_plugin.errors import UserError
from sglang_eagle3_plugin.paths import write_text
from sglang_eagle3_plugin.series.changes import REGISTRY
from sglang_eagle3_plugin.series.source import Source

if TYPE_CHECKING:
    from git import Repo

UPSTREAM_ROOT = "python/"
"""Upstream's tree has ``python/sglang/srt/...`` where a wheel has ``sglang/srt/...``."""

UPSTREAM_OTHER = "../"
"""Prefix of a path, seen from there, that is outside of ``python/``: tests."""

_WHO = "sglang-eagle3-plugin"
_MAIL = "sglang-eagle3-plugin@users.noreply.github.com"
_WHEN = "1764374400 +0000"  # 2025-11-29 00:00 UTC: any fixed moment; a patch's date must not change with the day it is written.


@dataclass(frozen=True)
class Series:
    """What one release's series consists of.

    Attributes:
        release: the release.
        patches: file name -> text, in order of application.
        stages: path in the wheel -> git blob ids, as the release has it, then after each patch that changes it; None where there
            is no such file yet.
    """

    release: str
    patches: dict[str, str]
    stages: dict[str, list[str | None]]

    def entry(self, directory: str) -> dict[str, Any]:
        """This release's entry in the map ``patches/releases.json``."""
        return {
            "series": directory,
            "tag": f"v{self.release}",
            "files": {path: self.stages[path] for path in sorted(self.stages)},
        }


def blob_id(content: bytes) -> str:
    """Git's id of a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def build(source: Source, tests: Mapping[str, Mapping[str, str]] | None = None) -> Series:
    """Carry every change out on a release.

    Args:
        source: the release.
        tests: for the series that is sent upstream: change id -> path from the root of upstream's tree -> text, added to its patch.

    Raises:
        UnfitError: a change is needed and does not fit.
        UserError: git or gitpython is missing.
    """
    steps: list[tuple[str, str, dict[str, str]]] = []
    after = source
    for change in REGISTRY:
        changed = {p: t for p, t in change.transform(after).items() if t != after.text(p)}
        if changed:
            added = {UPSTREAM_OTHER + path: text for path, text in (tests or {}).get(change.id, {}).items()}
            steps.append((change.id, change.message(), changed | added))
            after = after.updated(changed)
    touched = sorted({path for _, _, changed in steps for path in changed if not path.startswith(UPSTREAM_OTHER)})
    texts = {path: source.text(path) for path in touched}
    stages: dict[str, list[str | None]] = {p: [None if t is None else blob_id(t.encode())] for p, t in texts.items()}
    for _, _, changed in steps:
        for path in set(changed) & set(touched):
            text = changed[path]
            stages[path].append(blob_id(text.encode()))
    return Series(source.release, _format({p: t for p, t in texts.items() if t is not None}, steps), stages)


def _format(base: dict[str, str], steps: list[tuple[str, str, dict[str, str]]]) -> dict[str, str]:
    with scratch_repository() as repo:
        root = Path(repo.working_dir)
        _commit(repo, root, base, "base")
        for _, message, changed in steps:
            _commit(repo, root, changed, message)
        output = root / ".git" / "series"
        repo.git.format_patch(
            *("--zero-commit", "--full-index", "--no-signature", "--no-stat", "--no-numbered", "--no-renames", "--no-attach"),
            *("--subject-prefix=PATCH", "--diff-algorithm=myers", "--unified=3", "--src-prefix=a/", "--dst-prefix=b/"),
            f"--output-directory={output}",
            "--root" if not base else "HEAD~" + str(len(steps)),
        )
        written = sorted(output.iterdir())
        # Our ids make shorter, stabler names than the subjects.
        return {f"{n:04}-{step[0]}.patch": path.read_text() for n, (step, path) in enumerate(zip(steps, written, strict=True), 1)}


def _commit(repo: Repo, root: Path, files: dict[str, str], message: str) -> None:
    for path, text in files.items():
        file = root / UPSTREAM_ROOT / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text.encode())
    repo.git.add("--all", "--force", ".")
    repo.git.commit("--quiet", "--allow-empty", "--no-verify", "--no-gpg-sign", "-m", message)


@contextmanager
def scratch_repository() -> Iterator[Repo]:
    """A repository in a temporary directory, cut off from every configuration and hook of the user's.

    Raises:
        UserError: git or gitpython is missing.
    """
    repo_class = _repo_class()
    directory = tempfile.mkdtemp(prefix="sglang-eagle3-series-")
    try:
        environment = {
            "GIT_CONFIG_GLOBAL": os.devnull,
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_CEILING_DIRECTORIES": str(Path(directory).parent),
            **{f"GIT_{who}_{what}": value for who in ("AUTHOR", "COMMITTER") for what, value in _IDENTITY},
        }
        repo = repo_class.init(directory, mkdir=False, initial_branch="series")
        repo.git.update_environment(**environment)
        repo.git.config("core.autocrlf", "false")
        repo.git.config("core.hooksPath", os.devnull)
        repo.git.config("core.attributesFile", os.devnull)
        yield repo
        repo.close()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


_IDENTITY = (("NAME", _WHO), ("EMAIL", _MAIL), ("DATE", _WHEN))


def _repo_class() -> type[Repo]:
    if shutil.which("git") is None:
        raise UserError("there is no git on the PATH, and series are written and applied with it; install git")
    try:
        from git import Repo
    except ImportError as error:
        raise UserError(
            "the patches commands need gitpython, which is not installed; run: pip install 'sglang-eagle3-plugin[patches]'"
        ) from error
    return Repo


def write(series: Series, root: Path, known: dict[str, Any]) -> str:
    """Write a series below ``root`` (``patches/``) and enter it in the map. A release with the same patches shares a directory.

    Returns:
        The name of the directory.
    """
    directory = next((entry["series"] for entry in known.values() if is_written(series, root / entry["series"])), series.release)
    others = [r for r, entry in known.items() if entry["series"] == directory and r != series.release]
    if others and not is_written(series, root / directory):
        raise UserError(f"the directory {root / directory} is the series of {', '.join(others)} too; export those with --all first")
    target = root / directory
    target.mkdir(parents=True, exist_ok=True)
    for stale in {p.name for p in target.glob("*.patch")} - set(series.patches):
        (target / stale).unlink()
    for name, text in series.patches.items():
        write_text(target / name, text)
    write_text(target / "series", "".join(f"{name}\n" for name in series.patches))
    known[series.release] = series.entry(directory)
    return directory


def is_written(series: Series, directory: Path) -> bool:
    """Whether a directory holds exactly this series."""
    return {p.name: p.read_text() for p in directory.glob("*.patch")} == series.patches


def write_upstream(series: Series, root: Path) -> str:
    """Write the series that is sent upstream, and return its directory's name.

    It has no place in the map, since it carries tests that a wheel hasn't got.
    """
    directory = root / "upstream"
    directory.mkdir(parents=True, exist_ok=True)
    for stale in {p.name for p in directory.glob("*.patch")} - set(series.patches):
        (directory / stale).unlink()
    for name, text in series.patches.items():
        write_text(directory / name, text)
    write_text(directory / "series", "".join(f"{name}\n" for name in series.patches))
    return directory.name


def upstream_tests(directory: Path) -> dict[str, dict[str, str]]:
    """The tests that go upstream: ``tests/<change id>/<path in upstream's tree>``."""
    found: dict[str, dict[str, str]] = {}
    for file in sorted((directory / "tests").rglob("test_*.py")):
        change, *path = file.relative_to(directory / "tests").parts
        found.setdefault(change, {})["/".join(path)] = file.read_text()
    return found


def write_map(root: Path, known: dict[str, Any]) -> None:
    """Write the map ``releases.json``: releases in order of age, paths sorted."""
    from packaging.version import Version

    write_text(
        root / "releases.json", json.dumps({release: known[release] for release in sorted(known, key=Version)}, indent=1) + "\n"
    )
