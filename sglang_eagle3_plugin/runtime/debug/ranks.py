"""Whether tensor-parallel ranks hold the same slots: each leaves fingerprints in the runtime directory, the first compares.

No collective is run for this: ranks that were switched at different moments would wait for each other for ever. Ranks of other
machines have another directory and are not compared; nor are those of attention data parallelism, which hold different tokens.
"""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from typing import Any

from sglang_eagle3_plugin import records

Fingerprint = list[list[float]]
"""``[norms, means]``, one number a slot: means over the pass's tokens, rounded as in the JSON line."""

_KEPT = 32
_CLOSE = 1e-3
"""Relative; after an all-reduce ranks hold the same bits, and per-rank partial sums differ by far more."""


class Ranks:
    """The fingerprints of this rank and, on rank 0, their comparison with the others'.

    Args:
        group: the same in the processes of one tensor-parallel group, and in no others'.
        rank: this process's.
        size: ranks of the group.
    """

    def __init__(self, group: str, rank: int, size: int) -> None:
        self.group, self.rank, self.size = group, rank, size
        self.compared = 0
        self._files = [records.directory() / f"{group}-{one}.ranks" for one in range(size)]
        self._mine: OrderedDict[str, Fingerprint] = OrderedDict()
        self._done: OrderedDict[str, None] = OrderedDict()
        self._fresh = False

    def add(self, said: dict[str, Any]) -> None:
        """Keep the fingerprint of one pass."""
        key = f"{said['step']} {said['index']} {said['pass']}"
        self._mine[key] = [[slot[name] or 0.0 for slot in said["slots"]] for name in ("norm", "mean")]
        self._fresh = True
        while len(self._mine) > _KEPT:
            self._mine.popitem(last=False)

    def exchange(self) -> list[tuple[int, str, str]]:
        """Write this rank's; on rank 0 also compare: (step, pass, what is wrong) for each pass where ranks differ, once.

        Raises:
            OSError: the files can't be written or read.
        """
        if self.rank:
            if self._fresh:
                self._write()
            return []
        found = []
        for rank, path in enumerate(self._files[1:], start=1):
            theirs = _read(path)
            for key in [one for one in self._mine if one in theirs]:
                once = f"{rank} {key}"
                if once not in self._done:
                    self._done[once] = None
                    self.compared += 1
                    step, _, name = key.split(" ", 2)
                    found += [(int(step), name, says) for says in _differences(self._mine[key], theirs[key], rank)]
        while len(self._done) > _KEPT * 4 * self.size:
            self._done.popitem(last=False)
        return found

    def close(self) -> None:
        """Take this rank's file away."""
        self._files[self.rank].unlink(missing_ok=True)

    def _write(self) -> None:
        path = self._files[self.rank]
        temporary = path.with_name(f"{path.name}.tmp")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(self._mine, file)
        temporary.replace(path)
        self._fresh = False


def _differences(mine: Fingerprint, theirs: Fingerprint, rank: int) -> list[str]:
    if len(mine[0]) != len(theirs[0]):
        return [f"rank 0 holds {len(mine[0])} slots, rank {rank} {len(theirs[0])}"]
    said = []
    for slot, (norm, mean, other_norm, other_mean) in enumerate(zip(*mine, *theirs, strict=True)):
        size = max(abs(norm), abs(other_norm))
        if abs(norm - other_norm) > _CLOSE * size or abs(mean - other_mean) > _CLOSE * max(abs(mean), abs(other_mean), 1e-3 * size):
            said.append(
                f"slot {slot} has norm {norm:.6g} on rank 0 and {other_norm:.6g} on rank {rank}: a sum over ranks is missing"
            )
    return said


def _read(path: Any) -> dict[str, Fingerprint]:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return {}
    with os.fdopen(descriptor, "r", encoding="utf-8") as file:
        found = json.load(file)
    return found if isinstance(found, dict) else {}
