"""A tree to patch: where the package is, what kind of tree it is, and which files are how far along a series."""

from __future__ import annotations

import os
import re
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from sglang_eagle3_plugin.errors import UserError
from sglang_eagle3_plugin.series.catalog import Entry
from sglang_eagle3_plugin.series.export import blob_id

RECORD = ".eagle3-patches"
"""Directory inside ``sglang/srt`` with the record of an apply and the original files."""
STAGE = ".eagle3-stage-"
"""Prefix of the directory beside ``srt`` in which a change is prepared, and in which a killed run leaves it."""
JOURNAL = ".eagle3-journal"
"""Directory beside ``srt`` with a change that is being written file by file, where directories can't be exchanged."""


class Kind(str, Enum):
    """What a tree is."""

    CHECKOUT = "git checkout"
    UNPACKED = "unpacked wheel"
    INSTALLED = "installation"
    WHEEL = "wheel file"


class State(str, Enum):
    """How far a tree is along a release's series."""

    CLEAN = "clean"
    """Every file is the release's own."""
    APPLIED = "applied"
    """Every file is as after the last patch."""
    PARTLY = "partly applied"
    """Some patches or some files of them are in, and nothing else was changed."""
    MODIFIED = "modified"
    """Some file is neither the release's own nor a patched one; in a git checkout: committed, so a fork."""
    DIRTY = "dirty"
    """The same, with uncommitted changes of those files in a git checkout."""
    WRONG_RELEASE = "wrong release"
    """The files are those of another release than asked for, or of none that has a series."""
    INTERRUPTED = "interrupted"
    """A run was killed while it wrote file by file; apply and revert finish it first, then do their own work."""


@dataclass(frozen=True)
class Tree:
    """An opened tree.

    Attributes:
        package: the directory named ``sglang``, or the wheel file.
        kind: what it is.
        repository: the root of the git repository around it, tracked by it or not; None outside of any.
        read: reads a file by its path in the wheel; None where there is none.
    """

    package: Path
    kind: Kind
    repository: Path | None
    read: Callable[[str], bytes | None] = field(repr=False, compare=False)

    def file(self, path: str) -> Path:
        """Where a path of the wheel lies on disk."""
        return self.package.parent / path


@dataclass(frozen=True)
class Report:
    """What `check` found.

    Attributes:
        state: how far the tree is.
        entry: the release's series that was held against it; None where none fits.
        files: path -> ``base``, ``patched``, ``between``, ``modified`` or ``missing``.
        crlf: the files with CRLF line ends, which are kept.
        says: the release that the tree calls itself, if it does.
        leftovers: directories that a killed run left, none of them in use.
        recorded: there is a record of ours, which makes revert exact.
    """

    state: State
    entry: Entry | None
    files: dict[str, str]
    crlf: tuple[str, ...] = ()
    says: str | None = None
    leftovers: tuple[str, ...] = ()
    recorded: bool = False


def open_tree(path: Path) -> Tree:
    """Find the package in a tree: a checkout, a directory with ``sglang`` in it, ``sglang`` itself, or a wheel file.

    Raises:
        UserError: there is no SGLang in it.
    """
    if path.is_file():
        return _open_wheel(path)
    if not path.is_dir():
        raise UserError(f"there is no directory {path}; name an SGLang checkout, an unpacked wheel, or a site-packages directory")
    for candidate in (path / "python" / "sglang", path / "sglang", path):
        if (candidate / "srt").is_dir() and candidate.resolve().name == "sglang":
            package = candidate.resolve()
            break
    else:
        raise UserError(
            f"there is no sglang/srt in {path}; name an SGLang checkout, an unpacked wheel, or a site-packages directory"
        )

    def read(name: str) -> bytes | None:
        file = package.parent / name
        return file.read_bytes() if file.is_file() else None

    repository = _repository(package)
    return Tree(package, _kind(package, repository), repository, read)


def _open_wheel(path: Path) -> Tree:
    if path.suffix != ".whl" or not zipfile.is_zipfile(path):
        raise UserError(f"{path} is neither a directory nor a wheel; name an SGLang checkout, an unpacked wheel, or a wheel file")
    archive = zipfile.ZipFile(path)
    names = set(archive.namelist())
    return Tree(path.resolve(), Kind.WHEEL, None, lambda name: archive.read(name) if name in names else None)


def _kind(package: Path, repository: Path | None) -> Kind:
    if {"site-packages", "dist-packages"} & set(package.parts) or any(package.parent.glob("sglang-*.dist-info/INSTALLER")):
        return Kind.INSTALLED
    if repository is not None and _tracked(repository, package):
        return Kind.CHECKOUT
    return Kind.UNPACKED


def _repository(package: Path) -> Path | None:
    # By looking, not by git: `git` would need safe.directory, and finds a repository that has nothing to do with the tree.
    return next((parent for parent in package.parents if (parent / ".git").exists()), None)


def _tracked(repository: Path, package: Path) -> bool:
    """Whether the repository around a package tracks it. A tree merely nested in another repository is not its business."""
    if shutil.which("git") is None:
        return (repository / "python" / "sglang").resolve() == package
    return bool(_git(repository, "ls-files", "--", str(package / "srt" / "server_args.py"), str(package / "srt" / "models")))


def uncommitted(tree: Tree, paths: list[str]) -> bool:
    """Whether any of these files has changes that the checkout's last commit does not have."""
    if tree.kind is not Kind.CHECKOUT or tree.repository is None or shutil.which("git") is None:
        return False
    return bool(_git(tree.repository, "status", "--porcelain", "--", *(str(tree.file(path)) for path in paths)))


def _git(repository: Path, *arguments: str) -> str:
    try:
        from git import GitCommandError, Repo
    except ImportError as error:
        raise UserError(
            "the patches commands need gitpython, which is not installed; run: pip install 'sglang-eagle3-plugin[patches]'"
        ) from error
    try:
        with Repo(repository) as repo:
            # Reading only: no lock on the index, and the owner's rule of safe.directory is no matter for a read.
            repo.git.update_environment(GIT_OPTIONAL_LOCKS="0")
            return str(repo.git.execute(["git", "-c", f"safe.directory={repository}", *arguments]))
    except GitCommandError:
        return ""


def examine(tree: Tree, entries: dict[str, Entry], release: str | None = None) -> Report:
    """Hold a tree against one release's series, or find the release whose files it has.

    Raises:
        UserError: there is no series for the release.
    """
    from sglang_eagle3_plugin.series import catalog

    says, leftovers = _says(tree), _leftovers(tree)
    ids = _Ids(tree)
    asked = catalog.entry(entries, release) if release else None
    candidates = [asked] if asked else list(entries.values())
    best = max(candidates, key=lambda e: (_fit(ids, e), e.release == says, e.release))
    files = {path: ids.state(path, stages) for path, stages in best.files.items()}
    recorded = tree.kind is not Kind.WHEEL and (tree.package / "srt" / RECORD / "record.json").is_file()
    state = _state(tree, files)
    if state in (State.MODIFIED, State.DIRTY):
        other = max(entries.values(), key=lambda e: (_fit(ids, e), e.release == best.release, e.release == says))
        if _fit(ids, best) < 0.5 or _fit(ids, other) > _fit(ids, best):
            state = State.WRONG_RELEASE
    if tree.kind is not Kind.WHEEL and (tree.package / JOURNAL).is_dir():
        state = State.INTERRUPTED
    crlf = tuple(path for path in best.files if ids.crlf(path))
    return Report(state, best if state is not State.WRONG_RELEASE or asked else None, files, crlf, says, leftovers, recorded)


def _state(tree: Tree, files: dict[str, str]) -> State:
    kinds = set(files.values())
    if kinds == {"base"}:
        return State.CLEAN
    if kinds == {"patched"}:
        return State.APPLIED
    if kinds <= {"base", "patched", "between"}:
        return State.PARTLY
    odd = [path for path, kind in files.items() if kind in ("modified", "missing")]
    return State.DIRTY if uncommitted(tree, odd) else State.MODIFIED


class _Ids:
    """The blob ids of a tree's files, each read once; with CRLF line ends the id is that of the text with LF."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._known: dict[str, tuple[str | None, bool]] = {}

    def _look(self, path: str) -> tuple[str | None, bool]:
        if path not in self._known:
            content = self._tree.read(path)
            crlf = content is not None and is_crlf(content)
            text = content.replace(b"\r\n", b"\n") if content is not None and crlf else content
            self._known[path] = (None if text is None else blob_id(text), crlf)
        return self._known[path]

    def crlf(self, path: str) -> bool:
        return self._look(path)[1]

    def state(self, path: str, stages: tuple[str | None, ...]) -> str:
        found = self._look(path)[0]
        if found == stages[-1]:
            return "patched"
        if found == stages[0]:
            return "base"
        if found is None:
            return "missing"
        return "between" if found in stages else "modified"


def _fit(ids: _Ids, entry: Entry) -> float:
    """The part of a release's own files that the tree has, patched or not."""
    own = {path: stages for path, stages in entry.files.items() if stages[0] is not None}
    return sum(ids.state(path, stages) in ("base", "patched", "between") for path, stages in own.items()) / max(len(own), 1)


def is_crlf(content: bytes) -> bool:
    """Whether every line ends in CRLF."""
    return b"\r\n" in content and content.count(b"\n") == content.count(b"\r\n")


def _says(tree: Tree) -> str | None:
    for name in ("sglang/_version.py", "sglang/version.py"):
        match = re.search(rb"__version__\s*(?::[^=]*)?=\s*(?:version\s*=\s*)?['\"]([^'\"]+)['\"]", tree.read(name) or b"")
        if match:
            return match[1].decode()
    if tree.kind is Kind.WHEEL:
        return tree.package.name.split("-")[1]
    found = [p.name.split("-")[1].removesuffix(".dist-info") for p in tree.package.parent.glob("sglang-*.dist-info")]
    return found[0] if len(found) == 1 else None


def _leftovers(tree: Tree) -> tuple[str, ...]:
    if tree.kind is Kind.WHEEL:
        return ()
    return tuple(sorted(str(p) for p in tree.package.glob(f"{STAGE}*")))


def refuse_unwritable(tree: Tree, paths: list[str]) -> None:
    """Refuse, before anything is written, a tree that can't be changed or whose owner marked files read-only.

    Raises:
        UserError: names the first such file or directory and the remedy.
    """
    if tree.kind is Kind.WHEEL:
        raise UserError(f"{tree.package} is a wheel file, which is never changed; unpack it and name the directory")
    for path in paths:
        file = tree.file(path)
        if file.is_symlink():
            raise UserError(
                f"{file} is a symbolic link, and replacing it would cut it from its target; name the tree that it points into"
            )
        if file.exists() and not file.stat().st_mode & 0o222:
            raise UserError(
                f"{file} is read-only and nothing was changed; make it writable (chmod u+w) or patch a copy of the tree"
            )
    for directory in {
        tree.package,
        tree.package / "srt",
        *(tree.file(path).parent for path in paths if tree.file(path).parent.is_dir()),
    }:
        if not os.access(directory, os.W_OK) or not directory.stat().st_mode & 0o222:
            raise UserError(
                f"the directory {directory} can't be written by this user; patch a copy of the tree, or run as its owner"
            )
