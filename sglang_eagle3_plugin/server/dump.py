"""Switching the dump of hidden states in the processes of a running server, by control files."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from sglang_eagle3_plugin.errors import UserError
from sglang_eagle3_plugin.runtime.debug.spec import SpecError
from sglang_eagle3_plugin.runtime.dump_switch import KIND, NOTE, boundaries_of
from sglang_eagle3_plugin.server import address, processes, switching
from sglang_eagle3_plugin.settings import DumpSettings

OBEY_S = 20.0
"""A process looks once a second; turning off waits for what is on its way to the disk, turning on for a pass."""
_LOOK_S = 0.1


@dataclass(frozen=True)
class State:
    """The dump in one process that writes, as its record says.

    Attributes:
        pid: of the process.
        role: ``scheduler TP0``, for one.
        start_time: see :func:`records.start_time`.
        serial: of the last command it obeyed; 0: none yet.
        on: whether it dumps.
        waiting: it will, from its next pass on.
        directory: where to, or None.
        boundaries: which.
        counts: what became of the requests since the process's last dump began.
        problem: why it did not obey, or dumps no more; or an empty string.
    """

    pid: int
    role: str
    start_time: int
    serial: int
    on: bool
    waiting: bool
    directory: str | None
    boundaries: tuple[int, ...]
    counts: dict[str, int]
    problem: str


def states(pid: int) -> list[State]:
    """The dump in each process of the server that ``pid`` belongs to that could write one.

    Raises:
        UserError: there is no such process, the records can't be read, or no process of it can be switched.
    """
    why_not = "can dump: it has not loaded its model yet, has pipeline stages, or runs without the plugin"
    found = switching.noted(pid, NOTE, f"[0-9]*.{KIND}", why_not)
    return [_state(record) for record in found]


def switch(pid: int, *, on: bool, directory: Path | None = None, boundaries: str = "", url: str | None = None) -> list[State]:
    """Turn the dump on or off in each process of a server, and wait until each has obeyed, for :data:`OBEY_S` at most.

    Args:
        pid: of any process of the server.
        on: or off. A dump that is on ends first, and another begins.
        directory: where to; the server's EAGLE3_DUMP_DIR unless given.
        boundaries: ``2,4,5``, ``all``, or empty for those that the server was started with.
        url: of the server, which is asked for its health, so that an idle one has a pass to begin with.

    Returns:
        The states then. One that has not obeyed names its problem; one that waits begins with its next pass.

    Raises:
        UserError: the boundaries do not parse, no process can be switched, or no control file can be written.
    """
    spec = boundaries.replace(" ", "")
    try:
        boundaries_of(spec, DumpSettings())
    except SpecError as error:
        raise UserError(str(error)) from error
    file = None if directory is None else str(directory.absolute())
    first = states(pid)
    before = {state.pid: state.problem for state in first}
    serials = switching.command(first, KIND, on, spec, dict.fromkeys(before, file))
    until = time.monotonic() + OBEY_S
    nudged = False
    while True:
        now = states(pid)
        # A problem that stood there before is no answer to this command.
        obeyed = [
            switching.obeyed(state, serials) or bool(state.problem and state.problem != before.get(state.pid)) for state in now
        ]
        if all(obeyed) and any(state.waiting for state in now) and url and not nudged:
            nudged = True
            _nudge(url)
            continue
        settled = all(obeyed) and not (nudged and any(state.waiting for state in now))
        if settled or time.monotonic() > until:
            return [state if done else _not_obeying(state) for state, done in zip(now, obeyed, strict=True)]
        time.sleep(_LOOK_S)


def _nudge(url: str) -> None:
    try:
        # An idle server's health check generates a token; a busy one has passes anyway.
        with address.client(address.parse(url), timeout_s=OBEY_S) as http:
            http.get("/health")
    except httpx.HTTPError:
        return


def _state(record: dict[str, Any]) -> State:
    said = record[NOTE]
    counts = {name: count for name, count in record.get("dump", {}).items() if isinstance(count, int)}
    return State(
        pid=record["pid"],
        role=processes.role(record["pid"]),
        start_time=record["start_time"],
        boundaries=tuple(said["boundaries"]),
        counts=counts,
        **{name: said[name] for name in ("serial", "on", "waiting", "directory", "problem")},
    )


def _not_obeying(state: State) -> State:
    return State(**(vars(state) | {"problem": f"it has not obeyed within {OBEY_S:g} s"}))
