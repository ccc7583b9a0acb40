"""`sglang-eagle3 debug` against a process that runs debug's own thread, without SGLang."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from sglang_eagle3_plugin.cli import main
from sglang_eagle3_plugin.runtime.debug import control
from sglang_eagle3_plugin.server import debug

SERVER = """
import sys, time
from types import SimpleNamespace
from sglang_eagle3_plugin import patching, records
from sglang_eagle3_plugin.runtime.debug import thread
from sglang_eagle3_plugin.runtime.debug.report import Labels
from sglang_eagle3_plugin.settings import Settings

thread.labels_of = lambda runner, settings: Labels((2, 4, 5), (2, 4, 5), 8)
thread._tensor_parallel = lambda: (0, 1)
thread._CONTROL_S = 0.05
records.open_record("test", patching.Ledger(Settings()))
thread.begin(SimpleNamespace(is_draft_worker=False), Settings())
print("ready", flush=True)
sys.stdin.read()
"""
SAID = {
    "v": 1,
    "time": 1.5,
    "pid": 1,
    "rank": 0,
    "step": 5,
    "pass": "target verify",
    "verdicts": [{"verdict": "partial-sums", "says": "slot 0"}],
}


@pytest.fixture
def server(tmp_path, monkeypatch):
    monkeypatch.setenv("EAGLE3_RUNTIME_DIR", str(tmp_path / "runtime ü"))
    child = subprocess.Popen([sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=dict(os.environ))
    assert child.stdout.readline() == b"ready\n"
    yield child
    child.stdin.close()
    child.wait(20)


@pytest.fixture
def cli(capsys):
    def run(*words):
        with pytest.raises(SystemExit) as exit_:
            main(["debug", *map(str, words)])
        return exit_.value.code, *capsys.readouterr()

    return run


def test_on_status_tail_off(server, cli, tmp_path):
    code, out, _ = cli("on", "steps=3", "--pid", server.pid, "--json")
    assert code == 0
    [state] = json.loads(out)
    assert (state["pid"], state["on"]) == (server.pid, True)
    assert state["spec"].startswith("steps=3,")
    with open(state["file"], "a") as file:
        file.write(json.dumps(SAID) + "\n")
    code, out, _ = cli("tail", "--pid", server.pid, "--no-follow")
    assert (code, out) == (0, "EAGLE3 step 5 target verify | WRONG partial-sums: slot 0\n")
    assert "steps=3" in cli("status", "--pid", server.pid)[1]
    code, out, _ = cli("off", "--pid", server.pid)
    assert code == 0
    assert f"pid {server.pid}: off" in out
    assert not os.path.exists(state["file"])


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("on", "colour=red", "--pid", "1"), "unknown"),
        (("on",), "--url or --pid"),
        (("status", "--pid", "999999999"), "no process"),
        (("status", "--pid", str(os.getpid())), "can be switched"),
    ],
)
def test_bad_input_is_one_sentence(cli, words, why, tmp_path, monkeypatch):
    monkeypatch.setenv("EAGLE3_RUNTIME_DIR", str(tmp_path / "runtime"))
    code, out, err = cli(*words)
    assert (code, out) == (2, "")
    assert why in err
    assert err.count("\n") == 1


def test_tail_of_a_server_that_writes_nothing_says_what_to_do(server, cli):
    code, _, err = cli("tail", "--pid", server.pid, "--no-follow")
    assert code == 2
    assert "debug on" in err


def test_a_file_that_cannot_be_written_is_a_finding(server, cli, tmp_path):
    code, out, _ = cli("on", "--file", tmp_path, "--pid", server.pid)
    assert code == 1
    assert "is not written" in out


def test_a_problem_of_an_earlier_command_is_not_taken_for_one_of_this(server, cli):
    path = control.path_for(server.pid)
    path.write_text("{torn")
    path.chmod(0o600)
    until = time.monotonic() + 20
    while not debug.states(server.pid)[0].problem and time.monotonic() < until:
        time.sleep(0.05)
    # A process that is slow to look: what its record said before must not count as an answer.
    os.kill(server.pid, signal.SIGSTOP)
    threading.Timer(1.0, os.kill, (server.pid, signal.SIGCONT)).start()
    code, out, _ = cli("on", "--pid", server.pid, "--json")
    assert (code, json.loads(out)[0]["on"], json.loads(out)[0]["problem"]) == (0, True, "")
