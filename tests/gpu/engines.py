"""Engines of the GPU tests, each in a process of its own: what is asked of it, what it answered, what it printed."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from sglang_eagle3_plugin.rig.engine import CUDA_ARGUMENTS


def arguments() -> dict[str, Any]:
    """What every engine here is started with, and a port of its own below those that the system hands to connections.

    SGLang 0.5.17 takes its own from among the latter long before it listens there, and lost one to another engine once. Releases
    since take it below them too (`get_free_port_below_ephemeral`).
    """
    while True:
        port = random.randrange(20000, 30000)
        with socket.socket() as tried:
            if tried.connect_ex(("127.0.0.1", port)):
                return CUDA_ARGUMENTS | {"nccl_port": port}


def answer(place: Path, program: Sequence[str | Path], request: Any, variables: Mapping[str, str]) -> tuple[Any, str]:
    """Run ``program REQUEST.json RESULT.json`` with this Python.

    Args:
        place: a directory of its own; made if missing, the plugin's records within.
        program: a script, and what it is given before the two paths.
        request: for the first.
        variables: further ones.

    Returns:
        What it wrote into the second, None where it wrote nothing, and its log.
    """
    (place / "records").mkdir(parents=True, mode=0o700)
    asked, result, log = place / "request.json", place / "result.json", place / "log.txt"
    asked.write_text(json.dumps(request))
    with log.open("w") as printed:
        subprocess.run(
            [sys.executable, *map(str, program), str(asked), str(result)],
            stdout=printed,
            stderr=subprocess.STDOUT,
            env=os.environ | {"EAGLE3_RUNTIME_DIR": str(place / "records")} | variables,
            start_new_session=True,
            timeout=500,
            check=False,
        )
    return json.loads(result.read_text()) if result.exists() else None, log.read_text(errors="replace")


def all_of(run: Any, names: Sequence[str], at_once: int) -> dict[str, Any]:
    """``run`` each name, so many at a time; the first alone, since it fills the kernels' caches."""
    first, *rest = names
    made = {first: run(first)}
    with ThreadPoolExecutor(at_once) as pool:
        return made | dict(zip(rest, pool.map(run, rest), strict=True))
