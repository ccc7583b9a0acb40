"""Paths as people write them, files that are whole or not there, and a directory that one run at a time may write to."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from pathlib import Path

from sglang_eagle3_plugin.errors import UserError


def expanded(path: str | Path) -> Path:
    """Resolve a leading ``~``, or leave it: unlike `Path.expanduser`, this raises nothing where a user has no home."""
    return Path(os.path.expanduser(path))  # noqa: PTH111


def write_text(path: Path, text: str) -> None:
    """Write a file (UTF-8, mode 0644) so that a reader sees the old one or the new one, whole.

    Raises:
        OSError: it cannot be written; the old one stands.
    """
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, prefix=f".{path.name}.", delete=False) as temporary:
        try:
            temporary.write(text)
            temporary.flush()
            os.fsync(temporary.fileno())
            Path(temporary.name).chmod(0o644)
            Path(temporary.name).replace(path)
        except BaseException:
            Path(temporary.name).unlink(missing_ok=True)
            raise


class Alone:
    """A directory that no other run writes to until :meth:`close`, or the end of the process; leaves no file in it."""

    def __init__(self, directory: Path) -> None:
        """Take it.

        Raises:
            UserError: another run has it.
            OSError: it cannot be opened.
        """
        self._handle: int | None = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise UserError(f"another run is writing to {directory}; wait for it, or give another directory") from None
        except OSError:  # a file system that has no locks
            self.close()

    def close(self) -> None:
        """Let another run have it."""
        if self._handle is not None:
            with contextlib.suppress(OSError):
                os.close(self._handle)
            self._handle = None

    def __enter__(self) -> Alone:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()
