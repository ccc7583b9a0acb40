"""A child process that is surely gone afterwards, with all that it started, whatever happens here."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path


def free_port() -> int:
    """A port of 127.0.0.1 that nobody has now. SGLang takes the one 10000 above it as well, from 0.5.13 on."""
    while True:
        port = random.randrange(20000, 50000)  # noqa: S311
        with socket.socket() as found, contextlib.suppress(OSError):
            found.bind(("127.0.0.1", port))
            return port


@contextlib.contextmanager
def supervised(argv: Sequence[str], environment: Mapping[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command in a process group of its own, its output in ``log``; kill the group on the way out, Ctrl-C included."""
    with log.open("ab") as output:
        child = subprocess.Popen(
            argv,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield child
    finally:
        kill_group(child)


def kill_group(child: subprocess.Popen[bytes], patience_s: float = 10) -> None:
    """Kill a process group and wait until no member is left, at most ``patience_s`` seconds."""
    give_up = time.monotonic() + patience_s
    with contextlib.suppress(ProcessLookupError, PermissionError):
        while time.monotonic() < give_up:
            os.killpg(child.pid, signal.SIGKILL)  # raises when the last member is gone
            child.poll()
            time.sleep(0.05)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(timeout=1)
