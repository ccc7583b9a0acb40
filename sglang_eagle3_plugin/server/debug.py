"""Switching EAGLE3_DEBUG in the processes of a running server, by control files; and reading what they write."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_eagle3_plugin.errors import UserError
from sglang_eagle3_plugin.runtime.debug import control
from sglang_eagle3_plugin.runtime.debug.spec import SpecError, parse
from sglang_eagle3_plugin.server import processes, switching
from sglang_eagle3_plugin.server.log_follow import LogFollower

OBEY_S = 5.0
"""A process looks at its control file once a second, a busy one a little later."""
_LOOK_S = 0.1


@dataclass(frozen=True)
class State:
    """Debug in one process of a server, as its record says.

    Attributes:
        pid: of the process.
        role: ``scheduler TP0``, for one.
        start_time: see :func:`records.start_time`.
        serial: of the last command it obeyed; 0: none yet.
        on: whether it looks.
        spec: at what.
        file: where its JSON lines go, or None.
        steps: looked at since it was turned on.
        left_out: steps that were due, and over the rate.
        lines: written since then.
        ranks_compared: passes whose slots were compared with another rank's.
        problem: why it did not obey, or writes no more; or an empty string.
        faults: of debug in this process so far.
    """

    pid: int
    role: str
    start_time: int
    serial: int
    on: bool
    spec: str | None
    file: str | None
    steps: int
    left_out: int
    lines: int
    ranks_compared: int
    problem: str
    faults: int


def states(pid: int) -> list[State]:
    """Debug in each process of the server that ``pid`` belongs to that runs a model.

    Raises:
        UserError: there is no such process, the records can't be read, or no process of it can be switched.
    """
    why_not = "can be switched: it has not loaded its model yet, or runs without the plugin"
    found = switching.noted(pid, "debug", "[0-9]*.debug*", why_not)
    return [_state(record) for record in found]


def switch(pid: int, *, on: bool, spec: str = "1", file: str | None = None) -> list[State]:
    """Turn debug on or off in each process of a server, and wait until each has obeyed, for :data:`OBEY_S` at most.

    Args:
        pid: of any process of the server.
        on: or off.
        spec: see :mod:`sglang_eagle3_plugin.runtime.debug.spec`.
        file: JSON lines file for all of them; None: one of its own for each, which goes when debug does.

    Returns:
        The states then. One that has not obeyed still has an older serial, or names its problem.

    Raises:
        UserError: the spec does not parse, no process can be switched, or no control file can be written.
    """
    try:
        spec = str(parse(spec))
    except SpecError as error:
        raise UserError(str(error)) from error
    first = states(pid)
    before = {state.pid: state.problem for state in first}
    files = {one: str(control.lines_for(one)) if file is None else str(Path(file).absolute()) for one in before}
    serials = switching.command(first, "debug", on, spec, dict(files))
    until = time.monotonic() + OBEY_S
    while True:
        now = states(pid)
        # A problem that was there before is of an earlier command: this one may still be obeyed.
        settled = all(switching.obeyed(state, serials) or state.problem != before.get(state.pid, "") for state in now)
        if settled or time.monotonic() > until:
            return [state if switching.obeyed(state, serials) else _not_obeying(state) for state in now]
        time.sleep(_LOOK_S)


def tail(pid: int, last: int, alive: Callable[[], bool]) -> Iterator[str]:
    """The JSON lines that a server's processes write: the last ones, then each new one while ``alive()``.

    Raises:
        UserError: no process writes any.
    """
    files = {state.file for state in states(pid) if state.on and state.file}
    if not files:
        raise UserError("no process of this server writes debug lines; turn them on with `sglang-eagle3 debug on`")
    followers = [LogFollower(Path(file)) for file in sorted(files)]
    try:
        before = sorted((line for follower in followers for line in follower.lines()), key=_time_of)
        yield from before[-last:] if last else []
        while alive():
            for follower in followers:
                yield from follower.lines()
            time.sleep(_LOOK_S)
    finally:
        for follower in followers:
            follower.close()


def _state(record: dict[str, Any]) -> State:
    debug = record["debug"]
    return State(
        pid=record["pid"],
        role=processes.role(record["pid"]),
        start_time=record["start_time"],
        faults=record.get("tap_failures", {}).get("debug", 0),
        **{
            name: debug[name]
            for name in ("serial", "on", "spec", "file", "steps", "left_out", "lines", "ranks_compared", "problem")
        },
    )


def _not_obeying(state: State) -> State:
    values = vars(state) | {"problem": state.problem or f"it has not obeyed within {OBEY_S:g} s"}
    return State(**values)


def _time_of(line: str) -> str:
    # Every line begins {"v":1,"time":1764436496.123,...; a torn one sorts anywhere.
    return line.partition('"time":')[2][:14]
