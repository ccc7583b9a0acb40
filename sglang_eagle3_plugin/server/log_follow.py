"""Reading a log as it grows: through rotation, truncation, carriage returns and a file that is not there yet."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import BinaryIO

_CHUNK = 1 << 20
_AT_ONCE = 4 << 20
"""Bytes of one look: whoever reads a log looks at other things in between."""
_LONGEST_LINE = 1 << 16
"""A progress bar that is never ended by a newline must not fill the memory."""


class LogFollower:
    """Yields the lines added to a file since the last call.

    A rotated log (renamed, and a new file under the old name) is read to its end first; a truncated one (``copytruncate``) is
    read again from its start.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: BinaryIO | None = None
        self._inode = 0
        self._rest = b""
        self.error = ""
        """Why the log cannot be read, or an empty string; a missing file is no error."""

    def held(self) -> tuple[list[str], float]:
        """Return what the file holds before the first :meth:`lines`, its end if it is large, and when it was last written to.

        The time is in seconds since 1970, 0 where there is no such file.
        """
        try:
            self._open()
            assert self._file is not None
            about = os.fstat(self._file.fileno())
            if about.st_size > _AT_ONCE:
                self._file.seek(about.st_size - _AT_ONCE)
                return self._read()[1:], about.st_mtime
            return self._read(), about.st_mtime
        except OSError:  # the next look says what is wrong
            return [], 0.0

    def lines(self) -> list[str]:
        """Return the complete lines since the last call, carriage returns read as ends of lines. Never blocks, never raises."""
        found: list[str] = []
        try:
            if self._file is None:
                self._open()
            if self._file is not None:
                found += self._read()
                if self._replaced() and not self._behind():
                    found += self.rest()
                    self._file.close()
                    self._open()
                    found += self._read()
            self.error = ""
        except FileNotFoundError:
            # Between the two steps of a rotation the name is free: the next call looks again.
            pass
        except OSError as error:
            self.error = error.strerror or str(error)
        return found

    def close(self) -> None:
        """Let the file go."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> None:
        self._file = None
        # A named pipe without a writer would block for ever.
        handle = os.fdopen(os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb", buffering=0)
        self._inode = os.fstat(handle.fileno()).st_ino
        self._file = handle

    def _behind(self) -> bool:
        assert self._file is not None
        return self._file.tell() < os.fstat(self._file.fileno()).st_size

    def _replaced(self) -> bool:
        return self.path.stat().st_ino != self._inode

    def _read(self) -> list[str]:
        assert self._file is not None
        if os.fstat(self._file.fileno()).st_size < self._file.tell():
            self._file.seek(0)
            self._rest = b""
        found: list[str] = []
        for _ in range(_AT_ONCE // _CHUNK):
            if not (chunk := self._file.read(_CHUNK)):
                break
            # A log truncated under a writer that does not append begins with zeros.
            *whole, self._rest = re.split(rb"[\r\n]+", self._rest + chunk.replace(b"\0", b""))
            found += (line.decode(errors="replace") for line in whole if line.strip())
            self._rest = self._rest[-_LONGEST_LINE:]
        return found

    def rest(self) -> list[str]:
        """Return the line that no newline has ended so far: the last words of a process that died."""
        rest, self._rest = self._rest, b""
        return [rest.decode(errors="replace")] if rest.strip() else []
