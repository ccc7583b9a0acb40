"""What the switches of debug and of the dump share: the processes of a server that have one, and a command to each."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, Protocol

from sglang_eagle3_plugin import records
from sglang_eagle3_plugin.errors import UserError
from sglang_eagle3_plugin.runtime.debug import control
from sglang_eagle3_plugin.server import processes


class Switched(Protocol):
    """What a command needs to know of a process; see :class:`~sglang_eagle3_plugin.server.debug.State`."""

    @property
    def pid(self) -> int: ...  # noqa: D102
    @property
    def start_time(self) -> int: ...  # noqa: D102
    @property
    def serial(self) -> int: ...  # noqa: D102


def noted(pid: int, key: str, leftovers: str, why_not: str) -> list[dict[str, Any]]:
    """The records with a note of this key, of the server that ``pid`` belongs to; files of killed processes are taken away.

    Args:
        pid: of any process of the server.
        key: of the note.
        leftovers: glob of the files that a process has in the runtime directory, by its pid.
        why_not: what is said of a server without any.

    Raises:
        UserError: there is no such process, the records can't be read, or there is none.
    """
    family = processes.tree(pid)
    try:
        for path in records.directory().glob(leftovers):
            if records.start_time(int(path.name.partition(".")[0])) is None:
                path.unlink(missing_ok=True)
        found = [record for record in records.read_all() if record["pid"] in family and key in record]
    except OSError as error:
        raise UserError(f"the plugin's records cannot be read ({error}); set EAGLE3_RUNTIME_DIR as the server has it") from error
    if not found:
        raise UserError(f"no process of server {pid} {why_not} (`sglang-eagle3 status` tells); run this as the server's user")
    return found


def command(states: Iterable[Switched], kind: str, on: bool, spec: str, files: dict[int, str | None]) -> dict[int, int]:
    """Write a command for each process; return its serial by pid.

    Args:
        states: of the processes.
        kind: which switch, see :func:`control.write`.
        on: or off.
        spec: of what is turned on.
        files: by pid, what is written to.

    Raises:
        UserError: a control file cannot be written.
    """
    serials: dict[int, int] = {}
    for state in states:
        serials[state.pid] = time.time_ns()
        file = files[state.pid] if on else None
        try:
            control.write(control.Command(state.pid, state.start_time, serials[state.pid], on, spec, file), kind)
        except OSError as error:
            raise UserError(f"the control file of process {state.pid} cannot be written ({error}); run this as its user") from error
    return serials


def obeyed(state: Switched, serials: dict[int, int]) -> bool:
    """Whether a process has obeyed the command with its serial."""
    return state.serial == serials.get(state.pid, state.serial)
