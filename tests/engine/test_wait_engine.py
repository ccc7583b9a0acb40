"""`sglang-eagle3 wait` on real servers of 0.5.9: a start whose log rotates, a crash, a kill for memory, a wrong port."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_eagle3_plugin.rig import engine, models
from sglang_eagle3_plugin.rig.engine import EngineSpec, Server
from sglang_eagle3_plugin.rig.environments import Environment

pytestmark = [pytest.mark.engine, pytest.mark.slow]

NOTICED_S = 2.0


@contextlib.contextmanager
def waiting(server: Server, *, url: str | None = None, timeout: float = 400) -> Iterator[subprocess.Popen[str]]:
    argv = [sys.executable, "-m", "sglang_eagle3_plugin", "wait", "--json", "--timeout", str(timeout)]
    argv += ["--url", url or server.url, "--pid", str(server.pid), "--log", str(server.place.log)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as command:
        try:
            yield command
        finally:
            command.kill()


def died_at(server: Server) -> float:
    while server.process.poll() is None:
        time.sleep(0.02)
    return time.monotonic()


def said(command: subprocess.Popen[str]) -> dict:
    out, err = command.communicate(timeout=450)
    assert "Traceback" not in err
    return json.loads(out)


@pytest.fixture(scope="module")
def kimi(tmp_path_factory: pytest.TempPathFactory) -> EngineSpec:
    root = tmp_path_factory.mktemp("wait")
    target = models.target(root / "target", "kimi-k25")
    return EngineSpec(target.path, models.draft(root / "draft", target, (3, 5, 6), convention="output"))


def test_a_normal_start_whose_log_rotates(env059: Environment, kimi: EngineSpec) -> None:
    with engine.launch(env059, kimi) as server, waiting(server) as command:
        while "server_args" not in server.place.log.read_text(errors="replace"):
            time.sleep(0.2)
        server.place.log.write_text("")  # as `copytruncate` does; the server goes on appending
        result = said(command)
        assert (command.returncode, result["state"]) == (0, "ready"), result
        assert server.generate(max_new_tokens=2)


def test_a_crash_while_loading_is_noticed_at_once_and_named(env059: Environment, kimi: EngineSpec) -> None:
    with engine.launch(env059, kimi.stock()) as server, waiting(server) as command:
        died = died_at(server)
        result = said(command)
        noticed = time.monotonic() - died
        assert (command.returncode, result["state"]) == (1, "failed"), result
        assert "no attribute 'set_eagle3_layers_to_capture'" in result["reason"] + " ".join(result["lines"]), result
        assert noticed < NOTICED_S, noticed


def test_a_kill_for_memory_is_called_that(env059: Environment, kimi: EngineSpec) -> None:
    with (
        memory_limit(700 << 20) as enter,
        engine.launch(env059, kimi, before=["sh", "-c", enter, "-"]) as server,
        waiting(server) as command,
    ):
        result = said(command)
        assert (command.returncode, result["state"]) == (1, "failed"), result
        assert "for memory" in result["reason"], result


def test_a_wrong_port_is_called_that(env059: Environment, kimi: EngineSpec) -> None:
    with engine.launch(env059, kimi) as server, waiting(server, url="http://127.0.0.1:1") as command:
        result = said(command)
        assert (command.returncode, result["state"]) == (1, "failed"), result
        assert "port" in result["reason"], result


@contextlib.contextmanager
def memory_limit(size: int) -> Iterator[str]:
    """A cgroup of so many bytes; yields what a shell does to enter it and become the command given to it."""
    one, two = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup/cgroup.subtree_control")
    place = (one if one.is_dir() else two.parent) / f"eagle3-wait-{time.time_ns()}"
    try:
        place.mkdir()
        (place / ("memory.limit_in_bytes" if one.is_dir() else "memory.max")).write_text(str(size))
    except OSError as error:
        pytest.skip(f"no cgroup can be made here ({error}); run this as root on a machine with a memory controller")
    try:
        yield f'echo $$ > {place}/cgroup.procs; exec "$@"'
    finally:
        for _ in range(50):
            with contextlib.suppress(OSError):
                place.rmdir()
                break
            time.sleep(0.1)
