"""Reading a log as it grows: through rotation, truncation, carriage returns and a file that is not there yet."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import BinaryIO

_CHUNK = 1 << 20
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

    def lines(self) -> list[str]:
        """Return the complete lines since the last call, carriage returns read as ends of lines. Never blocks, never raises."""
        found: list[str] = []
        try:
            if self._file is None:
                self._open()
            if self._file is not None:
                found += self._read()
                if self._replaced():
                    found += self._flush()
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

    def _replaced(self) -> bool:
        return self.path.stat().st_ino != self._inode

    def _read(self) -> list[str]:
        assert self._file is not None
        if os.fstat(self._file.fileno()).st_size < self._file.tell():
            self._file.seek(0)
            self._rest = b""
        found: list[str] = []
        while chunk := self._file.read(_CHUNK):
            *whole, self._rest = re.split(rb"[\r\n]+", self._rest + chunk)
            found += (line.decode(errors="replace") for line in whole if line.strip())
            self._rest = self._rest[-_LONGEST_LINE:]
        return found

    def _flush(self) -> list[str]:
        rest, self._rest = self._rest, b""
        return [rest.decode(errors="replace")] if rest.strip() else []
