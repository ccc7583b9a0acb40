"""Whether a server's processes on this machine live, and what killed them: read from /proc and the kernel's own counters."""

from __future__ import annotations

import os
import re
import signal
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")

_DEADLY = {signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE}


@dataclass(frozen=True)
class _Stat:
    comm: str
    state: str
    parent: int
    started: int
    """In clock ticks since the machine started: tells a process from a later one with its number."""
    status: int
    """The wait status of a zombie, 0 where it may not be read."""


class ProcessWatch:
    """Watches one process and its descendants."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        first = _stat(pid)
        self._started = first.started if first else None
        self._cgroup = _oom_file(pid)
        self._kills_before = self._kills()
        self._suspects: set[int] = set()

    def started_at(self) -> datetime | None:
        """When the process started, in local time; None where it has gone."""
        if self._started is None:
            return None
        uptime = float((PROC / "uptime").read_text().split()[0])
        return datetime.now() - timedelta(seconds=uptime - self._started / os.sysconf("SC_CLK_TCK"))

    def death(self) -> str:
        """Return how the server died, in a few words, or an empty string while it lives."""
        own = _stat(self.pid)
        if own is None or own.started != self._started:
            return f"process {self.pid} has gone{self._memory(None)}"
        if own.state in "ZX":
            return f"process {self.pid} {self._ended(own)}"
        # A scheduler that dies without a word leaves old releases waiting for it for ever. A zombie that a parent is
        # about to collect is none: it has to be there twice.
        dead = {pid: stat for pid, stat in _below(self.pid).items() if stat.state == "Z" and os.WTERMSIG(stat.status) in _DEADLY}
        both = dead.keys() & self._suspects
        self._suspects = set(dead)
        for pid in sorted(both):
            return f"its process {pid} ({dead[pid].comm}) {self._ended(dead[pid])}"
        return ""

    def killed_for_memory(self) -> bool:
        """Whether the kernel has killed anything for memory, in the server's cgroup or on the machine, since the watch began."""
        return self._kills() > self._kills_before

    def _ended(self, stat: _Stat) -> str:
        if os.WIFSIGNALED(stat.status):
            number = os.WTERMSIG(stat.status)
            return f"was killed by signal {number}{_signal_name(number)}{self._memory(number)}"
        return f"ended with status {os.WEXITSTATUS(stat.status)}"

    def _memory(self, number: int | None) -> str:
        if number not in (None, signal.SIGKILL):
            return ""
        return ": the kernel killed it for memory" if self.killed_for_memory() else ""

    def _kills(self) -> int:
        kills = [_count(PROC / "vmstat")]
        if self._cgroup is not None:
            kills.append(_count(self._cgroup))
        return sum(kills)


def _signal_name(number: int) -> str:
    try:
        return f" ({signal.Signals(number).name})"
    except ValueError:
        return ""


def _stat(pid: int) -> _Stat | None:
    # proc(5): the name may hold blanks and brackets, so the fields are counted from its closing one.
    try:
        head, _, tail = (PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")
        fields = tail.split()
        return _Stat(head.partition("(")[2], fields[0], int(fields[1]), int(fields[19]), int(fields[49]) if len(fields) > 49 else 0)
    except (OSError, ValueError, IndexError):
        return None


def _below(pid: int) -> dict[int, _Stat]:
    stats = {int(entry.name): stat for entry in PROC.iterdir() if entry.name.isdigit() and (stat := _stat(int(entry.name)))}
    found: dict[int, _Stat] = {}
    parents = {pid}
    while parents:
        children = {child: stat for child, stat in stats.items() if stat.parent in parents and child not in found}
        found |= children
        parents = set(children)
    return found


def _oom_file(pid: int) -> Path | None:
    """The file that counts a cgroup's kills: ``memory.events`` (cgroup 2) or ``memory.oom_control`` (cgroup 1)."""
    try:
        lines = (PROC / str(pid) / "cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            candidates = [CGROUPS / path.lstrip("/") / "memory.events"]
        elif "memory" in controllers.split(","):
            candidates = [CGROUPS / "memory" / path.lstrip("/") / "memory.oom_control"]
        else:
            continue
        for candidate in candidates:
            if candidate.is_file():
                return candidate
    return None


def _count(path: Path) -> int:
    try:
        found = re.search(r"^oom_kill (\d+)$", path.read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found.group(1)) if found else 0
