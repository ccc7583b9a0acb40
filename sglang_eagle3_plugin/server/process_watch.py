"""Whether a server's processes on this machine live, and what killed them: read from /proc and the kernel's own counters."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterable
from datetime import datetime, timedelta
from pathlib import Path

from sglang_eagle3_plugin.procfs import PROC, Stat, everyone, stat

CGROUPS = Path("/sys/fs/cgroup")

_DEADLY = {signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE}


class ProcessWatch:
    """Watches one process and its descendants."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        first = stat(pid)
        self._started = first.started if first else None
        self._cgroup = _oom_file(pid)
        self._kills_before = self._kills()
        self._own_kills_before = self._own_kills()
        self._suspects: set[int] = set()

    def started_at(self) -> datetime | None:
        """When the process started, in local time; None where it has gone."""
        return None if self._started is None else _clock(self._started)

    def outlived_by(self, pid: int) -> bool:
        """Whether another process was there before this one."""
        other = stat(pid)
        return other is not None and self._started is not None and other.started < self._started

    def death(self) -> str:
        """Return how the server died, in a few words, or an empty string while it lives."""
        own = stat(self.pid)
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

    def _ended(self, one: Stat) -> str:
        if os.WIFSIGNALED(one.status):
            number = os.WTERMSIG(one.status)
            return f"was killed by signal {number}{_signal_name(number)}{self._memory(number)}"
        return f"ended with status {os.WEXITSTATUS(one.status)}"

    def _memory(self, number: int | None) -> str:
        if number not in (None, signal.SIGKILL):
            return ""
        if not self.killed_for_memory():
            return ""
        # Its own cgroup's count, or a SIGKILL meanwhile. Of one that is gone, that something was killed on the machine says little.
        if number == signal.SIGKILL or self._own_kills() > self._own_kills_before:
            return ": the kernel killed it for memory"
        return "; the kernel killed a process of this machine for memory meanwhile"

    def _kills(self) -> int:
        return _count(PROC / "vmstat") + self._own_kills()

    def _own_kills(self) -> int:
        return _count(self._cgroup) if self._cgroup is not None else 0


def first_started(pids: Iterable[int]) -> datetime | None:
    """When the first of these processes started, in local time; None where there is none."""
    started = [one.started for one in map(stat, pids) if one is not None]
    return _clock(min(started)) if started else None


def _clock(ticks: int) -> datetime:
    """Local time of a number of ticks after the machine's start; never in the future, as a container's own uptime would have it."""
    uptime = float((PROC / "uptime").read_text().split()[0])
    return datetime.now() - timedelta(seconds=max(0.0, uptime - ticks / os.sysconf("SC_CLK_TCK")))


def _signal_name(number: int) -> str:
    try:
        return f" ({signal.Signals(number).name})"
    except ValueError:
        return ""


def _below(pid: int) -> dict[int, Stat]:
    stats = dict(everyone())
    found: dict[int, Stat] = {}
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
