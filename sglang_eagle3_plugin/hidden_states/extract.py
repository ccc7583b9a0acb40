"""Drive a dumping server through a data set: skip what is there, ask for the rest, and count only what the manifest acknowledges.

An answer of the server proves nothing; a sample is there when its manifest line is. So resuming is the same as starting, and
whatever was refused, dropped or lost on the way is asked for again.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from sglang_eagle3_plugin.errors import UserError
from sglang_eagle3_plugin.hidden_states.dataset import Sequence
from sglang_eagle3_plugin.hidden_states.layout import SIDECAR, sample_key
from sglang_eagle3_plugin.hidden_states.reader import Dump

SETTLE_S = 10.0
"""So long after the last acknowledged sample a round counts as over."""


@dataclass(frozen=True)
class Extracted:
    """What a run did.

    Attributes:
        sequences: different ones in the data.
        duplicates: rows that repeat another.
        present: sequences that were dumped before.
        added: sequences that this run added.
        missing: origins of those that are still not there.
        failed: the server's errors, message -> times.
        tokens: of what this run added.
        seconds: this run took.
    """

    sequences: int
    duplicates: int
    present: int
    added: int
    missing: tuple[str, ...]
    failed: dict[str, int]
    tokens: int
    seconds: float


def extract(
    url: str,
    data: Iterable[Sequence],
    directory: Path,
    *,
    concurrency: int = 8,
    rounds: int = 3,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Extracted:
    """Have every sequence of a data set dumped once.

    Args:
        url: of a server that dumps into ``directory``.
        data: sequences; all are held in memory, as ids.
        concurrency: requests at a time.
        rounds: times that what is missing is asked for.
        progress: called with (sequences there, all).

    Raises:
        UserError: the server cannot be used, or the disk has no room for what is asked.
    """
    started = time.monotonic()
    info = server_info(url)
    check_directory(directory)
    rows = 0
    wanted: dict[str, Sequence] = {}
    for sequence in data:
        rows += 1
        wanted.setdefault(sample_key(sequence.ids), sequence)
    record_masks(directory, wanted)
    present = _there(directory, wanted)
    there = set(present)
    failed: dict[str, int] = {}
    if len(there) < len(wanted) and not info.get("disable_radix_cache"):
        _check_cache(url, max((wanted[key] for key in wanted.keys() - there), key=lambda sequence: len(sequence.ids)))
    for _ in range(rounds):
        todo = [sequence for key, sequence in wanted.items() if key not in there]
        if not todo:
            break
        _check_room(directory, todo)
        progress(len(there), len(wanted))
        asyncio.run(_ask(url, todo, concurrency, failed, lambda: progress(len(_there(directory, wanted)), len(wanted))))
        there = _settle(directory, wanted)
        progress(len(there), len(wanted))
    return Extracted(
        sequences=len(wanted),
        duplicates=rows - len(wanted),
        present=len(present),
        added=len(there - present),
        missing=tuple(sequence.origin for key, sequence in wanted.items() if key not in there),
        failed=failed,
        tokens=sum(len(wanted[key].ids) for key in there - present),
        seconds=time.monotonic() - started,
    )


def server_info(url: str) -> dict[str, Any]:
    """What the server says of itself; ``/server_info``, in older releases ``/get_server_info``.

    Raises:
        UserError: it does not answer.
    """
    try:
        for path in ("/server_info", "/get_server_info"):
            answer = httpx.get(url.rstrip("/") + path, timeout=30)
            if answer.status_code == httpx.codes.OK:
                info = answer.json()
                return info if isinstance(info, dict) else {}
    except (httpx.HTTPError, ValueError) as error:
        raise UserError(f"{url} does not answer ({error}); start SGLang with EAGLE3_DUMP_DIR first") from error
    raise UserError(f"{url} answers {answer.status_code} to {path}; is it an SGLang server?")


def check_directory(directory: Path) -> None:
    """See that there is a dump directory on this machine.

    Raises:
        UserError: there is none.
    """
    if not directory.is_dir():
        raise UserError(
            f"{directory} is not there; give as --dump the EAGLE3_DUMP_DIR of the server, which must run on this machine"
        )


def record_masks(directory: Path, wanted: dict[str, Sequence]) -> None:
    """Append the loss masks that are not recorded yet, before any sample is asked for."""
    path = directory / SIDECAR
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # two extractions may run at once
        content = file.read()
        known = set()
        for raw in content.split(b"\n"):
            try:
                known.add(json.loads(raw)["key"])
            except (ValueError, KeyError, TypeError):
                continue
        lines = [
            json.dumps({"key": key, "mask": sequence.mask, "origin": sequence.origin})
            for key, sequence in wanted.items()
            if key not in known
        ]
        # A line that a killed run left half written is closed off first.
        file.write((b"\n" if content and not content.endswith(b"\n") else b"") + "".join(f"{line}\n" for line in lines).encode())
        file.flush()
        os.fsync(file.fileno())


def _there(directory: Path, wanted: dict[str, Sequence]) -> set[str]:
    try:
        return {ref.key for ref in Dump.open(directory).refs} & wanted.keys()
    except UserError:  # nothing has been dumped yet
        return set()


def _check_room(directory: Path, todo: list[Sequence]) -> None:
    try:
        header = Dump.open(directory).header()
    except UserError:
        return
    needed = header.bytes_per_token() * sum(len(sequence.ids) for sequence in todo)
    free = shutil.disk_usage(directory).free
    if needed > free:
        raise UserError(
            f"{needed / 2**30:.1f} GiB are needed for {len(todo)} sequences and {directory} has {free / 2**30:.1f} GiB free; "
            "give less data, fewer boundaries, EAGLE3_DUMP_DTYPE=fp8 or another disk"
        )


def _request(sequence: Sequence) -> dict[str, Any]:
    return {
        "input_ids": list(sequence.ids),
        "sampling_params": {"max_new_tokens": 1, "temperature": 0},
        # A cached prefix has no states to dump; under a key of its own a request finds none, and is run whole.
        "extra_key": f"eagle3-extract-{uuid.uuid4().hex}",
    }


def _check_cache(url: str, sequence: Sequence) -> None:
    """See that a key of its own keeps a request out of the prefix cache: the scheduler of releases up to 0.5.10 forgets it.

    Raises:
        UserError: it does not.
    """
    try:
        answers = [httpx.post(f"{url.rstrip('/')}/generate", json=_request(sequence), timeout=600) for _ in range(2)]
        cached = answers[1].json()["meta_info"].get("cached_tokens", 0)
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        return  # the extraction itself says what is wrong
    if cached:
        raise UserError(
            f"{url} serves prefixes from its cache to every request, and these have no states to dump; "
            "restart it with --disable-radix-cache"
        )


async def _ask(url: str, todo: list[Sequence], concurrency: int, failed: dict[str, int], tick: Callable[[], None]) -> None:
    waiting = iter(todo)
    last = time.monotonic()
    async with httpx.AsyncClient(base_url=url, timeout=httpx.Timeout(600, connect=30)) as client:

        async def work() -> None:
            nonlocal last
            for sequence in waiting:
                try:
                    answer = await client.post("/generate", json=_request(sequence))
                    answer.raise_for_status()
                except httpx.HTTPStatusError as error:
                    reason = f"HTTP {error.response.status_code}: {error.response.text[:200]}"
                    failed[reason] = failed.get(reason, 0) + 1
                except httpx.HTTPError as error:
                    reason = f"{type(error).__name__}: {error}"
                    failed[reason] = failed.get(reason, 0) + 1
                    if isinstance(error, httpx.ConnectError):
                        raise UserError(f"{url} does not answer any more; run this again when it does, and it goes on") from error
                if time.monotonic() - last > 2:
                    last = time.monotonic()
                    tick()

        tasks = [asyncio.ensure_future(work()) for _ in range(concurrency)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()


def _settle(directory: Path, wanted: dict[str, Sequence]) -> set[str]:
    """Wait until all is acknowledged, or nothing new has been for a while: the writer runs behind the server."""
    there = _there(directory, wanted)
    since = time.monotonic()
    while len(there) < len(wanted) and time.monotonic() - since < SETTLE_S:
        time.sleep(0.3)
        now = _there(directory, wanted)
        if len(now) > len(there):
            since = time.monotonic()
        there = now
    return there
