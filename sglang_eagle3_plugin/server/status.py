"""What is patched, skipped, and why: in this environment, or in each process of a running server."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from typing import Any

from sglang_eagle3_plugin import records
from sglang_eagle3_plugin.errors import UserError
from sglang_eagle3_plugin.procfs import stat
from sglang_eagle3_plugin.server import processes
from sglang_eagle3_plugin.settings import Settings, runtime_directory

Row = dict[str, Any]
"""``{"patch", "target", "state", "reason", "pid", "role"}``, and ``release`` and ``route`` where known."""

_PROBE_TIMEOUT_S = 300


def of_environment() -> list[Row]:
    """Each patch's state when a process of this environment imports what it changes: found out in a subprocess.

    Raises:
        UserError: SGLang is not installed here, or cannot be imported.
    """
    if importlib.util.find_spec("sglang") is None:
        raise UserError(f"SGLang is not installed in the environment of {sys.executable}; run this with the Python that serves")
    try:
        done = subprocess.run(
            [sys.executable, "-m", "sglang_eagle3_plugin.server.probe"],
            capture_output=True,
            text=True,
            timeout=_PROBE_TIMEOUT_S,
            env=os.environ | {"EAGLE3_STRICT": "0"},
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise UserError(f"importing SGLang took more than {_PROBE_TIMEOUT_S} s; see whether `import sglang` hangs here") from error
    answer = next((line for line in reversed(done.stdout.splitlines()) if line.startswith("{")), "")
    if not answer:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise UserError(f"SGLang of {sys.executable} cannot be imported ({last}); mend or reinstall it")
    report = json.loads(answer)
    if report.get("error"):
        raise UserError(f"SGLang of {sys.executable} cannot be imported ({report['error']}); mend or reinstall it")
    return [{**row, "pid": report["pid"], "role": "probe", "release": report["release"]} for row in report["patches"]]


def of_server(pid: int) -> list[Row]:
    """Each patch's state in each process of the server that ``pid`` belongs to.

    A process of SGLang's without a record is there too, every patch of it ``disabled`` or ``pending``.

    Raises:
        UserError: there is no such process, it is no SGLang server, or the records cannot be read.
    """
    family = processes.tree(pid)
    try:
        by_pid = {record["pid"]: record for record in records.read_all()}
    except OSError as error:
        raise UserError(f"the plugin's records cannot be read ({error}); set EAGLE3_RUNTIME_DIR as the server has it") from error
    rows: list[Row] = []
    for member in family:
        if member in by_pid:
            record = by_pid[member]
            extra = {"pid": member, "role": processes.role(member), "release": record["release"], "route": record["route"]}
            rows += [{**row, **extra} for row in record["patches"]]
        elif processes.is_sglang(member):
            rows += _without_record(member)
    if not rows:
        raise UserError(f"process {pid} is no SGLang server, and no process below it is; give the pid of `sglang.launch_server`")
    return rows


def has_record(row: Row) -> bool:
    """Whether a row of :func:`of_server` is from its process's own record."""
    return "route" in row


def is_trouble(row: Row) -> bool:
    """Whether a row says that something is amiss: a patch that does not fit or failed, or a scheduler that we are not in."""
    return row["state"] in ("incompatible", "failed") or bool(row.get("missing"))


def wiring_of_server(pid: int) -> dict[int, Any]:
    """What the schedulers of a server have wired: pid -> the wiring note of its record."""
    family = set(processes.tree(pid))
    return {record["pid"]: record["wiring"] for record in records.read_all() if record["pid"] in family and "wiring" in record}


def _without_record(pid: int) -> list[Row]:
    from sglang_eagle3_plugin.patches import REGISTRY

    environ = _environment(pid)
    role, certain = processes.role(pid), {}
    if why := Settings.from_environment(environ).why_inactive:
        state, reason = "disabled", why
    elif (owner := processes.owner(pid)) not in (None, os.getuid()):
        state, reason = "pending", f"its record, if it has one, is of user {owner}: run this as that user"
    elif environ and (theirs := runtime_directory(environ)) != runtime_directory():
        state, reason = "pending", f"its record, if it has one, is in {theirs}: run this with EAGLE3_RUNTIME_DIR={theirs}"
    elif role.startswith("scheduler"):
        state, reason = "pending", "no record: the plugin is not in this process, which runs the model"
        certain = {"missing": True}
    else:
        state, reason = "pending", "no record: the plugin is not in this process, or nothing that it changes was imported there"
    same = {"state": state, "reason": reason, "pid": pid, "role": role, **certain}
    return [{"patch": p.id, "target": p.target, **same} for p in REGISTRY]


def _environment(pid: int) -> dict[str, str]:
    """A process's environment, or that of the nearest process above it: setproctitle wipes its own where the kernel reads it."""
    while pid > 0:
        if environ := processes.environment(pid):
            return environ
        above = stat(pid)
        pid = above.parent if above else 0
    return {}
