"""What each process has done, readable from outside: one small JSON file a process, in a directory only its owner can enter.

SGLang logs a plugin's fault and serves on, so silence must never mean success; and a server that runs must not be stopped to be
asked. A record that cannot be written costs a debug line, never the server.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import stat
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_eagle3_plugin import __version__, procfs
from sglang_eagle3_plugin.loaded import sglang_release
from sglang_eagle3_plugin.settings import runtime_directory

if TYPE_CHECKING:
    from sglang_eagle3_plugin.patching import Ledger

logger = logging.getLogger("sglang_eagle3_plugin")

_ledger: Ledger | None = None
_route = ""
_pid = 0
_notes: dict[str, Any] = {}
_writing = threading.Lock()


def _after_fork() -> None:
    global _writing
    _writing = threading.Lock()  # a thread that held it does not live here


os.register_at_fork(after_in_child=_after_fork)


def directory() -> Path:
    """The directory of this user's records (see :func:`~sglang_eagle3_plugin.settings.runtime_directory`), made if need be.

    Raises:
        OSError: it cannot be made, or is not ours alone (another owner, a symlink, open to others).
    """
    path = runtime_directory()
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{path} must be a directory of yours with mode 0700")
    return path


def open_record(route: str, ledger: Ledger) -> None:
    """Begin this process's record. It is first written when there is something to say."""
    global _ledger, _route
    _ledger, _route = ledger, route


def note(key: str, value: Any) -> None:
    """Add a fact (JSON data) to this process's record, such as the wiring, and write it."""
    with _writing:
        _notes[key] = value
    write()


def write() -> None:
    """Write this process's record, atomically; a fault is logged at debug level only. Safe from any thread."""
    if _ledger is None:
        return
    try:
        _write(_ledger)
    except OSError as error:
        logger.debug("sglang-eagle3-plugin: no record of process %d (%s)", os.getpid(), error)


def _write(ledger: Ledger) -> None:
    global _pid
    with _writing:  # debug, dump and wiring note from threads of their own
        path = directory() / f"{os.getpid()}.json"
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(json.dumps(_contents(ledger)))
        temporary.replace(path)
        if _pid != os.getpid():  # after a fork the child removes its own file, not its parent's
            _pid = os.getpid()
            atexit.register(_remove, _pid, path)


def read_all() -> list[dict[str, Any]]:
    """The records of this user's living processes. Those of dead ones are removed on the way.

    Raises:
        OSError: the directory is not usable; see :func:`directory`.
    """
    records = []
    for path in sorted(directory().glob("[0-9]*.json")):
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            alive = record["start_time"] == start_time(int(record["pid"]))
        except (OSError, ValueError, KeyError, TypeError):
            alive = False
            if start_time(int(path.stem)) is not None:  # not for us to take away
                continue
        if alive:
            records.append(record)
        else:
            path.unlink(missing_ok=True)
    return records


def said_by_a_relative(patch_id: str) -> bool:
    """Whether the parent, a child or a sibling of this process has this patch's trouble on record, and so has warned of it."""
    family = {os.getpid(), os.getppid()}
    with contextlib.suppress(OSError):
        for record in read_all():
            if record["pid"] != os.getpid() and family & {record["pid"], record["ppid"]}:
                states = {row["patch"]: row["state"] for row in record["patches"]}
                if states.get(patch_id) in ("incompatible", "failed"):
                    return True
    return False


def start_time(pid: int) -> int | None:
    """When a process began, in clock ticks since boot, or None: tells a reused pid."""
    found = procfs.stat(pid)
    return None if found is None else found.started


def _contents(ledger: Ledger) -> dict[str, Any]:
    return {
        "pid": os.getpid(),
        "ppid": os.getppid(),
        "start_time": start_time(os.getpid()),
        "route": _route,
        "release": sglang_release(),
        "plugin": __version__,
        "patches": [
            {"patch": o.patch.id, "target": o.patch.target, "state": o.state.value, "reason": o.reason} for o in ledger.outcomes()
        ],
        **_notes,
    }


def _remove(pid: int, path: Path) -> None:
    if os.getpid() == pid:
        path.unlink(missing_ok=True)
