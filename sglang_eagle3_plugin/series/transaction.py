"""Apply a series to a tree and take it back, all or nothing.

The change is prepared in a directory beside ``srt``: hard links to every file of it, new files for those that change, the
originals, and a record. Then the two directories are exchanged in one system call (``renameat2`` with ``RENAME_EXCHANGE``), so
that a process killed at any moment leaves the tree as it was or fully changed. No file is ever written in place: a package
manager's cache that shares them by hard links stays as it was.

Where directories can't be exchanged (overlay file systems over an image's lower layer, bind mounts) the change is written file by
file from a journal that is complete before the first of them; a kill then leaves a tree that `check` calls interrupted, and that
`apply` and `revert` finish before they do their own work.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_eagle3_plugin import __version__
from sglang_eagle3_plugin.errors import UserError
from sglang_eagle3_plugin.series.catalog import Entry
from sglang_eagle3_plugin.series.export import UPSTREAM_ROOT, blob_id, scratch_repository
from sglang_eagle3_plugin.series.tree import JOURNAL, RECORD, STAGE, Report, State, Tree, is_crlf, refuse_unwritable


@dataclass(frozen=True)
class Outcome:
    """What was done.

    Attributes:
        files: the files changed, by their path in the wheel.
        atomic: by one exchange of directories, or file by file from a journal.
    """

    files: tuple[str, ...]
    atomic: bool


def apply(tree: Tree, report: Report, *, allow_modified: bool = False) -> Outcome:
    """Apply the series that the report names.

    Raises:
        UserError: the tree is in no state for it, cannot be written, or the series does not fit; nothing was changed.
    """
    entry = _entry(report)
    if report.state is State.APPLIED:
        return Outcome((), atomic=True)
    if report.state is not State.CLEAN and not (allow_modified and report.state in (State.MODIFIED, State.DIRTY)):
        raise UserError(refusal(tree, report))
    refuse_unwritable(tree, list(entry.files))
    before = {path: tree.read(path) for path in entry.files}
    after = patch(entry, before)
    changed = {path: content for path, content in after.items() if content != before[path]}
    record = {
        "plugin": __version__,
        "release": entry.release,
        "series": entry.directory.name,
        "files": {p: {"before": _id(before[p]), "after": _id(changed[p])} for p in sorted(changed)},
    }
    with _locked(tree):
        atomic = _commit(tree, before, dict(changed), record)
    return Outcome(tuple(sorted(changed)), atomic)


def finish(tree: Tree) -> None:
    """Clear away what killed runs left: finish a change that was being written file by file, remove what was only prepared.

    Raises:
        UserError: another run is at work on the tree.
    """
    if (tree.package / JOURNAL).is_dir() or any(tree.package.glob(f"{STAGE}*")):
        with _locked(tree):
            if (tree.package / JOURNAL).is_dir():
                _replay(tree)
            _clear(tree)


def revert(tree: Tree, report: Report) -> Outcome:
    """Take a series back: exactly, from the recorded originals, else by reversing the patches.

    Raises:
        UserError: a file was changed since, the tree cannot be written; nothing was changed.
    """
    recorded = _read_record(tree) if report.recorded else {}
    if report.state is State.CLEAN or not (recorded or report.entry):
        return Outcome((), atomic=True)
    refuse_unwritable(tree, [path for path in (recorded or _entry(report).files) if tree.file(path).exists()])
    current: dict[str, bytes | None]
    after: dict[str, bytes | Path | None]
    if recorded:
        current = {path: tree.read(path) for path in recorded}
        for path, ids in recorded.items():
            if _id(current[path]) not in (ids["before"], ids["after"]):
                raise UserError(
                    f"{tree.file(path)} was changed after the series was applied and nothing was reverted; undo that change, "
                    f"or take the original from {tree.package / 'srt' / RECORD / 'originals'}"
                )
        originals = tree.package / "srt" / RECORD / "originals"
        after = {path: None if ids["before"] is None else originals / path for path, ids in recorded.items()}
    else:
        if report.state not in (State.APPLIED, State.PARTLY):
            raise UserError(refusal(tree, report))
        entry = _entry(report)
        current = {path: tree.read(path) for path in entry.files}
        after = dict(_unpatch(entry, current, report))
    with _locked(tree):
        atomic = _commit(tree, current, after, None)
    return Outcome(tuple(sorted(path for path in after if after[path] != current[path])), atomic)


def refusal(tree: Tree, report: Report) -> str:
    """Why a tree in this state is not patched, and what to do."""
    odd = [path for path, kind in report.files.items() if kind in ("modified", "missing")]
    release = report.entry.release if report.entry else "any release that has a series"
    if report.state is State.PARTLY:
        done = sum(kind != "base" for kind in report.files.values())
        return (
            f"{tree.package} has the series of {release} in {done} of {len(report.files)} files and nothing was changed; run "
            "`sglang-eagle3 patches revert` on it first"
        )
    if report.state is State.DIRTY:
        return (
            f"{tree.package} has uncommitted changes in files of the series ({', '.join(odd[:3])}) and nothing was changed; "
            "commit or undo them, or pass --allow-modified"
        )
    if report.state is State.WRONG_RELEASE:
        says = f"; it calls itself {report.says}" if report.says else ""
        return f"{tree.package} is not SGLang {release}{says}, and nothing was changed; name its release with --release"
    return (
        f"{tree.package} is not as SGLang {release} was released ({', '.join(odd[:3])} differ) and nothing was changed; pass "
        "--allow-modified to apply the patches to a fork"
    )


def patch(entry: Entry, before: dict[str, bytes | None]) -> dict[str, bytes | None]:
    """The files after the series, computed by git in a repository of its own: neither a repository around the tree nor its rules
    for line ends have a say.

    Raises:
        UserError: a patch does not fit the files.
    """
    crlf = {path for path, content in before.items() if content is not None and is_crlf(content)}
    plain = {
        path: content.replace(b"\r\n", b"\n") if content is not None and path in crlf else content
        for path, content in before.items()
    }
    after = _run_git(entry, plain, reverse=False, paths=list(before))
    for path, stages in entry.files.items():
        if _id(plain[path]) == stages[0] and _id(after[path]) != stages[-1]:
            raise UserError(
                f"the series of {entry.release} in {entry.directory} does not give the {path} that its map promises; reinstall"
            )
    return {p: c.replace(b"\n", b"\r\n") if c is not None and p in crlf else c for p, c in after.items()}


def _unpatch(entry: Entry, current: dict[str, bytes | None], report: Report) -> dict[str, bytes | None]:
    """The files before the series, from the patched ones; those that are not patched stay."""
    between = [path for path, kind in report.files.items() if kind == "between"]
    if between:
        raise UserError(
            f"only some patches of the series of {entry.release} are in {', '.join(between[:3])}, and not by this tool; "
            "take them back with what applied them (git revert, patch -R)"
        )
    paths = [path for path, kind in report.files.items() if kind == "patched"]
    crlf = {path for path in paths if is_crlf(current[path] or b"")}
    plain = {path: (current[path] or b"").replace(b"\r\n", b"\n") if path in crlf else current[path] for path in paths}
    after = _run_git(entry, plain, reverse=True, paths=paths)
    result: dict[str, bytes | None] = dict(current)
    for path in paths:
        if _id(after[path]) != entry.files[path][0]:
            raise UserError(
                f"reversing the series does not give {entry.release}'s own {path}; nothing was changed, reinstall the plugin"
            )
        content = after[path]
        result[path] = content.replace(b"\n", b"\r\n") if content is not None and path in crlf else content
    return result


def _run_git(entry: Entry, files: dict[str, bytes | None], *, reverse: bool, paths: list[str]) -> dict[str, bytes | None]:
    with scratch_repository() as repo:
        from git import GitCommandError

        root = Path(repo.working_dir) / UPSTREAM_ROOT
        for path, content in files.items():
            if content is not None:
                (root / path).parent.mkdir(parents=True, exist_ok=True)
                (root / path).write_bytes(content)
        patches = entry.patches()
        only = [f"--include={UPSTREAM_ROOT}{path}" for path in paths]
        for file in reversed(patches) if reverse else patches:
            try:
                repo.git.apply("--whitespace=nowarn", *(["--reverse"] if reverse else []), *only, str(file.absolute()))
            except GitCommandError as error:
                why = str(error.stderr).strip().strip("'").replace("stderr: '", "").split("\n")[0].strip()
                raise UserError(
                    f"{file.name} of {entry.directory.name} does not fit the files of the tree ({why}); nothing was changed"
                ) from error
        return {path: (root / path).read_bytes() if (root / path).is_file() else None for path in paths}


# -- committing ---------------------------------------------------------------------------------------------------------------


def _commit(tree: Tree, before: dict[str, bytes | None], after: dict[str, Any], record: dict[str, Any] | None) -> bool:
    """Put ``after`` (bytes, a file to take, or None to remove) in place of ``before``, with the record or without one."""
    for path, content in before.items():
        if tree.read(path) != content:
            raise UserError(f"{tree.file(path)} changed while the change was prepared and nothing was written; run it again")
    stage = Path(tempfile.mkdtemp(prefix=STAGE, dir=tree.package))
    try:
        try:
            mirror = stage / "srt"
            _mirror(tree.package / "srt", mirror)
            _fill(tree, mirror, after, record)
            _exchange(mirror, tree.package / "srt")
        except OSError as error:
            if error.errno not in _CANNOT:
                raise UserError(
                    f"{tree.package} can't be changed ({error.strerror}) and was not; free space or use a copy"
                ) from error
            _journal(tree, after, record)
            _replay(tree)
            return False
        return True
    finally:
        shutil.rmtree(stage, ignore_errors=True)


_CANNOT = frozenset({errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EBUSY, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP})
"""What the system answers where files can't be linked or directories exchanged."""


def _mirror(source: Path, target: Path) -> None:
    """A copy of a directory that shares every file with it by hard links; without our record."""
    target.mkdir()
    with os.scandir(source) as entries:
        for item in entries:
            if item.name == RECORD:
                continue
            if item.is_dir(follow_symlinks=False):
                _mirror(Path(item.path), target / item.name)
            else:
                os.link(item.path, target / item.name, follow_symlinks=False)
    _own_like(target, source, times=True)


def _fill(tree: Tree, mirror: Path, after: dict[str, Any], record: dict[str, Any] | None) -> None:
    for path, new in after.items():
        target = mirror.parent / Path(path).relative_to("sglang")
        _put(target, new, like=tree.file(path))
    if record is not None:
        _write_record(tree, mirror / RECORD, after, record)


def _write_record(tree: Tree, directory: Path, after: dict[str, Any], record: dict[str, Any]) -> None:
    """The record, and the originals: hard links where possible, so that even their times come back."""
    (directory / "originals").mkdir(parents=True)
    (directory / ".gitignore").write_text("*\n")
    for path in after:
        original, kept = tree.file(path), directory / "originals" / path
        if original.exists():
            kept.parent.mkdir(parents=True, exist_ok=True)
            _link_or_copy(original, kept)
    _write(directory / "record.json", (json.dumps(record, indent=1) + "\n").encode())


def _put(target: Path, new: bytes | Path | None, like: Path) -> None:
    """Make ``target`` a new file with this content; never write through an existing link."""
    target.unlink(missing_ok=True)
    if new is None:
        for stale in target.parent.glob(f"__pycache__/{target.stem}.*.pyc"):
            stale.unlink()
    elif isinstance(new, Path):
        _link_or_copy(new, target)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        _write(target, new)
        if like.exists():
            _own_like(target, like)


def _own_like(target: Path, like: Path, *, times: bool = False) -> None:
    """Give a new file another's mode and owner, as far as this user may."""
    (shutil.copystat if times else shutil.copymode)(like, target)
    with suppress(OSError):
        os.chown(target, like.stat().st_uid, like.stat().st_gid)


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _exchange(one: Path, other: Path) -> None:
    """Exchange two directories in one step.

    Raises:
        OSError: the file system, or the C library, can't.
    """
    library = ctypes.CDLL(None, use_errno=True)
    if not hasattr(library, "renameat2"):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    at_fdcwd, rename_exchange = -100, 2
    if library.renameat2(at_fdcwd, os.fsencode(one), at_fdcwd, os.fsencode(other), rename_exchange):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    _sync_directory(other.parent)


def _sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# -- file by file, where directories can't be exchanged -----------------------------------------------------------------------


def _journal(tree: Tree, after: dict[str, Any], record: dict[str, Any] | None) -> None:
    """Write down the whole change; it counts from the moment its directory has its name."""
    draft = Path(tempfile.mkdtemp(prefix=STAGE, dir=tree.package))
    plan: list[tuple[str, str | None]] = []
    for number, (path, new) in enumerate(after.items()):
        name = None if new is None else f"{number}.new"
        plan.append((path, name))
        if name is not None:
            _write(draft / name, new.read_bytes() if isinstance(new, Path) else new)
            like = new if isinstance(new, Path) else tree.file(path)
            if like.exists():
                _own_like(draft / name, like, times=isinstance(new, Path))
    if record is not None:
        _write_record(tree, draft / "record", after, record)
    _write(draft / "plan.json", json.dumps({"files": plan, "record": record is not None}).encode())
    _sync_directory(draft)
    draft.rename(tree.package / JOURNAL)
    _sync_directory(tree.package)


def _replay(tree: Tree) -> None:
    """Carry a journal out, from the start or from wherever a killed run stopped: every step may be done twice."""
    journal, place = tree.package / JOURNAL, tree.package / "srt" / RECORD
    plan = json.loads((journal / "plan.json").read_text())
    for path, name in plan["files"]:
        target = tree.file(path)
        if name is None:
            _put(target, None, like=target)
        elif (journal / name).exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            (journal / name).replace(target)
    if not plan["record"]:
        shutil.rmtree(place, ignore_errors=True)
    elif (journal / "record").exists():
        shutil.rmtree(place, ignore_errors=True)
        (journal / "record").rename(place)
    _sync_directory(place.parent)
    # Done. Under another name first: a journal half removed must not be taken for one that is to be carried out.
    done = Path(tempfile.mkdtemp(prefix=STAGE, dir=tree.package))
    journal.rename(done / "journal")
    shutil.rmtree(done, ignore_errors=True)


# -- helpers ------------------------------------------------------------------------------------------------------------------


@contextmanager
def _locked(tree: Tree) -> Iterator[None]:
    """One writer at a time: a lock on the package directory itself, which the system drops when its holder dies."""
    handle = os.open(tree.package, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UserError(f"another run is changing {tree.package}; wait for it and run this again") from error
        yield
    finally:
        os.close(handle)


def _clear(tree: Tree) -> None:
    """Remove what killed runs left. Under the lock, so that none of it is a living run's."""
    for stale in tree.package.glob(f"{STAGE}*"):
        shutil.rmtree(stale, ignore_errors=True)


def _read_record(tree: Tree) -> dict[str, dict[str, str | None]]:
    path = tree.package / "srt" / RECORD / "record.json"
    try:
        files = json.loads(path.read_text())["files"]
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"the record {path} can't be read ({error}); restore the tree from its release") from error
    return dict(files)


def _entry(report: Report) -> Entry:
    if report.entry is None:
        raise UserError(
            f"the tree is not one of the releases that have a series{f' (it calls itself {report.says})' if report.says else ''}; "
            "see `sglang-eagle3 patches list`, or name the nearest with --release and --allow-modified"
        )
    return report.entry


def _id(content: bytes | None) -> str | None:
    return None if content is None else blob_id(content)
