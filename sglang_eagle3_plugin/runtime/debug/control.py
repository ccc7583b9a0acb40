"""The live switch: one small file a process, which only its owner can write, in the plugin's runtime directory.

`sglang-eagle3 debug on` writes ``<pid>.debug`` for each process that can be switched, `hidden-states dump on` ``<pid>.dump``; the
process looks at it at most once a second. What is there from before the process began, or from a process that had its number, is
not obeyed.
"""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sglang_eagle3_plugin import records
from sglang_eagle3_plugin.runtime.debug.spec import SpecError, parse

_LARGEST = 16 << 10


@dataclass(frozen=True)
class Command:
    """What a control file asks of one process.

    Attributes:
        pid: whom.
        start_time: when that process began (see :func:`records.start_time`), so that a reused number does not obey.
        serial: counts the commands; the process names in its record the last one it obeyed.
        on: whether to look.
        spec: see :mod:`~sglang_eagle3_plugin.runtime.debug.spec`; of a dump, which boundaries.
        file: JSON lines file, or None; of a dump, its directory.
    """

    pid: int
    start_time: int
    serial: int
    on: bool
    spec: str = "1"
    file: str | None = None


class ControlError(ValueError):
    """A control file that is not obeyed; the message says why, in a sentence."""


def path_for(pid: int, kind: str = "debug") -> Path:
    """Where the control file of a process is, for ``debug`` or ``dump``.

    Raises:
        OSError: the runtime directory is not usable; see :func:`records.directory`.
    """
    return records.directory() / f"{pid}.{kind}"


def lines_for(pid: int) -> Path:
    """Where a process that was switched on without a file's name writes its JSON lines; it takes that file away again.

    Raises:
        OSError: see :func:`path_for`.
    """
    return records.directory() / f"{pid}.debug.jsonl"


def write(command: Command, kind: str = "debug") -> None:
    """Write a command, atomically, mode 0600.

    Raises:
        OSError: it can't be written.
    """
    path = path_for(command.pid, kind)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(asdict(command), file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


class ControlFile:
    """This process's control file, read when it has changed.

    Args:
        kind: ``debug`` or ``dump``.
        check: raises :class:`SpecError` where a command's spec does not parse.
    """

    def __init__(self, kind: str = "debug", check: Callable[[str], Any] = parse) -> None:
        self.path = path_for(os.getpid(), kind)
        self._check_spec = check
        self._began = time.time()
        self._start_time = records.start_time(os.getpid())
        self._seen: tuple[int, int, int] | None = None

    def poll(self) -> Command | None:
        """A command that is new since the last call; None where there is none.

        Raises:
            ControlError: there is something new, and it is not to be obeyed.
            OSError: it can't be read.
        """
        try:
            found = self.path.lstat()
        except FileNotFoundError:
            return None
        identity = (found.st_ino, found.st_mtime_ns, found.st_size)
        if identity == self._seen:
            return None
        self._seen = identity
        if stat.S_ISLNK(found.st_mode):
            raise ControlError(f"{self.path} is a symbolic link, which is not followed")
        if not stat.S_ISREG(found.st_mode):
            raise ControlError(f"{self.path} is no regular file")
        descriptor = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            self._check(os.fstat(file.fileno()))
            return self._parse(file.read(_LARGEST + 1))

    def remove(self) -> None:
        """Take the file away; state survives nothing."""
        self.path.unlink(missing_ok=True)

    def _check(self, found: os.stat_result) -> None:
        if not stat.S_ISREG(found.st_mode):
            raise ControlError(f"{self.path} is no regular file")
        if found.st_uid != os.geteuid():
            raise ControlError(f"{self.path} belongs to another user (uid {found.st_uid})")
        if found.st_mode & 0o077:
            raise ControlError(f"{self.path} can be read or written by others (mode {found.st_mode & 0o777:o}, 600 is due)")
        if found.st_mtime < self._began - 1:  # file systems keep coarser times than clocks
            raise ControlError(f"{self.path} is older than this process")

    def _parse(self, data: bytes) -> Command:
        try:
            command = Command(**json.loads(data[: _LARGEST + 1]))
            fits = all(isinstance(number, int) for number in (command.pid, command.start_time, command.serial))
            fits = fits and isinstance(command.on, bool) and isinstance(command.file, str | None)
            self._check_spec(command.spec)
        except SpecError as error:
            raise ControlError(f"the spec in {self.path} does not parse: {error}") from error
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise ControlError(f"{self.path} is torn or no command ({type(error).__name__})") from error
        if not fits:
            raise ControlError(f"{self.path} is no command")
        if (command.pid, command.start_time) != (os.getpid(), self._start_time):
            raise ControlError(f"{self.path} is meant for another process")
        return command
