"""Where lines go: a human one to SGLang's log, a JSON one to EAGLE3_DEBUG_FILE. A full disk or a closed stderr costs a line."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

NAME = "sglang_eagle3_plugin"
logger = logging.getLogger(NAME)

_STANDARD = 3
"""Descriptors below are the standard streams'."""
_LARGEST_FILE = 256 << 20
"""Bytes after which no more is written to the JSON file: a debug left on must not fill a disk."""


class Output:
    """Writes records to the log and, where one is named, to a JSON lines file of the user's own.

    Args:
        path: of the file; made with mode 0600. Several processes may append to one.
        log: takes a level and a line for the log; may raise.
        descriptor: of the file, where it is open already, or could not be opened (-1).
    """

    def __init__(self, path: str | None, log: Callable[[int, str], None] | None = None, descriptor: int | None = None) -> None:
        self.lines = 0
        self.problem = ""
        self.path: str | None = None
        """Of the file, while it is written."""
        self._descriptor = -1 if descriptor is None else descriptor
        self._log_works = True
        self._to_log = log or to_logger
        if path and descriptor is None:
            try:
                self._descriptor = _open(Path(path))
                self.path = path
            except OSError as error:
                self._say(f"EAGLE3_DEBUG_FILE {path} is not written: {error}")

    @property
    def descriptor(self) -> int:
        """Of the file; -1 where none is written."""
        return self._descriptor

    def write(self, said: dict[str, Any], text: str) -> None:
        """Write one record as JSON and, as ``text``, to the log; never raises."""
        self.lines += 1
        if self._descriptor >= 0:
            self._append(said)
        self._log(logging.WARNING if said["verdicts"] else logging.INFO, text)

    def close(self) -> None:
        """Close the file; the log stays SGLang's."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _append(self, said: dict[str, Any]) -> None:
        line = (json.dumps(said, separators=(",", ":")) + "\n").encode()
        try:
            if os.fstat(self._descriptor).st_size + len(line) > _LARGEST_FILE:
                raise OSError(f"it has reached {_LARGEST_FILE >> 20} MiB")
            # One write a line, on a descriptor that appends: lines of several processes do not mix.
            written = os.write(self._descriptor, line)
            if written != len(line):
                raise OSError(f"only {written} of {len(line)} bytes fitted")
        except OSError as error:
            self.close()
            self._say(f"EAGLE3_DEBUG_FILE is no longer written: {error}; lines still go to the log")

    def _say(self, problem: str) -> None:
        self.problem = problem
        self._log(logging.WARNING, f"sglang-eagle3-plugin: {problem}.")

    def _log(self, level: int, text: str) -> None:
        if not self._log_works:
            return
        try:
            self._to_log(level, text)
        except Exception as error:  # a closed stderr; logging's own handler of faults prints there too
            self._log_works = False
            self.problem = self.problem or f"the log cannot be written ({type(error).__name__}: {error})"


def to_logger(level: int, text: str) -> None:
    """Write a line to SGLang's log, from within its process."""
    logger.log(level, "%s", text)


def _open(path: Path) -> int:
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    descriptor = os.open(path, flags, 0o600)
    if descriptor < _STANDARD:  # a closed stderr's number: what is written to stderr must not end up here
        opened, descriptor = descriptor, fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _STANDARD)
        os.close(opened)
    found = os.fstat(descriptor)
    why = (
        "it is no regular file"
        if not stat.S_ISREG(found.st_mode)
        else "it belongs to another user"
        if found.st_uid != os.geteuid()
        else "others may read or write it; `chmod 600` it"
        if found.st_mode & 0o077
        else ""
    )
    if why:
        os.close(descriptor)
        raise PermissionError(why)
    return descriptor
