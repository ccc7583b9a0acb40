"""What Linux says of a process in /proc/PID/stat: the one reader of that line. Stdlib only; serving processes import it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")


@dataclass(frozen=True)
class Stat:
    """The fields of proc(5) that are asked for here.

    Attributes:
        comm: name of the program, 15 characters of it.
        state: ``R``, ``S``, ``Z`` and so on.
        parent: pid.
        started: in clock ticks since the machine started: tells a process from a later one with its number.
        status: the wait status of a zombie, 0 where it may not be read.
    """

    comm: str
    state: str
    parent: int
    started: int
    status: int


def stat(pid: int) -> Stat | None:
    """Read the line of one process; None where there is none, on other systems too."""
    # The name may hold blanks and brackets, so the fields are counted from its closing one.
    try:
        head, _, tail = (PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")
        fields = tail.split()
        return Stat(head.partition("(")[2], fields[0], int(fields[1]), int(fields[19]), int(fields[49]) if len(fields) > 49 else 0)
    except (OSError, ValueError, IndexError):
        return None


def everyone() -> Iterator[tuple[int, Stat]]:
    """Every process that there is now, with its line."""
    for entry in PROC.iterdir():
        if entry.name.isdigit() and (found := stat(int(entry.name))) is not None:
            yield int(entry.name), found
