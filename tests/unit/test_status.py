"""`status`: what it reads from a live process, from a dead one, and from none."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import pytest

from sglang_eagle3_plugin.cli import main
from sglang_eagle3_plugin.server import processes

# A process titled by argv[0] does not find its virtual environment: the path is handed down, and the `.pth`'s line said.
SERVER = """
import sglang_eagle3_plugin._bootstrap, sys, socket, sglang.srt.models.kimi_k25
s = socket.socket(); s.bind(("127.0.0.1", 0)); s.listen()
print(s.getsockname()[1], flush=True)
sys.stdin.read()
"""


@pytest.fixture
def server(stand_in, tmp_path, monkeypatch):
    """A process that holds a stand-in server's place: patched, listening, and titled like a scheduler."""
    monkeypatch.setenv("EAGLE3_RUNTIME_DIR", str(tmp_path / "records"))
    stand_in("pass")
    started = []

    def start(**env):
        process = subprocess.Popen(
            ["sglang::scheduler_TP0", "-c", SERVER],
            executable=sys.executable,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path / "stand-in"), *sys.path])} | env,
        )
        started.append(process)
        return process, int(process.stdout.readline())

    yield start
    for process in started:
        process.communicate()


def run(capsys, *words):
    with pytest.raises(SystemExit) as stopped:
        main(["status", *words])
    out = capsys.readouterr()
    return stopped.value.code, out.out, out.err


def test_by_url_and_by_pid(server, capsys):
    process, port = server()
    for words in (["--url", f"http://127.0.0.1:{port}"], ["--pid", str(process.pid)]):
        code, out, _ = run(capsys, *words, "--json")
        assert code == 0
        (row,) = json.loads(out)
        assert row["patch"] == "delegation-kimi-k25"
        assert row["state"] == "applied"
        assert (row["pid"], row["role"]) == (process.pid, "scheduler TP0")
        assert (row["release"], row["route"]) == ("0.5.9+stand-in", "pth")


def test_a_server_without_the_plugin_says_so(server, capsys):
    process, _ = server(EAGLE3_PLUGIN="0")
    code, out, _ = run(capsys, "--pid", str(process.pid), "--json")
    assert code == 0
    rows = json.loads(out)
    assert {row["state"] for row in rows} == {"disabled"}
    assert {row["reason"] for row in rows} == {"EAGLE3_PLUGIN=0"}


def test_human_output_names_role_state_and_reason(server, capsys):
    process, _ = server()
    _, out, _ = run(capsys, "--pid", str(process.pid))
    assert f"scheduler TP0 pid {process.pid}" in out
    assert "applied" in out
    assert "set_eagle3_layers_to_capture" in out


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--pid", "4194305"], "no process 4194305"),
        (["--pid", str(os.getpid())], "no SGLang server"),
        (["--url", "nonsense"], "names no port"),
        (["--url", "http://127.0.0.1:99999999"], "names no port"),
        (["--url", "http://x:1", "--pid", "1"], "not both"),
        (["--pid", "x"], "not a valid integer"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_2(capsys, words, part):
    code, out, err = run(capsys, *words)
    assert (code, out) == (2, "")
    assert part in err
    assert err.count("\n") == 1


def test_a_port_nobody_listens_on(capsys):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    code, _, err = run(capsys, "--url", f"http://127.0.0.1:{port}")
    assert code == 2
    assert f"port {port}" in err


def test_environment_without_sglang(capsys):
    code, _, err = run(capsys)
    assert code == 2
    assert "SGLang is not installed" in err


@pytest.mark.parametrize("fault", ["raise ImportError('libcuda.so.1: cannot open')", "syntax error here", "import os; os._exit(9)"])
def test_a_broken_sglang_is_one_sentence(tmp_path, fault):
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang/__init__.py").write_text(fault)
    done = subprocess.run(
        [sys.executable, "-m", "sglang_eagle3_plugin", "status"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "cannot be imported" in done.stderr


def test_role_reads_sglangs_titles(monkeypatch):
    for text, role in [
        ("sglang::scheduler_TP0", "scheduler TP0"),
        ("sglang::detokenizer", "detokenizer"),
        ("python -m sglang.launch_server --model x", "launcher"),
        ("python -c from multiprocessing.spawn import spawn_main --multiprocessing-fork", "worker"),
    ]:
        monkeypatch.setattr(processes, "cmdline", lambda pid, text=text: text)
        assert processes.role(1) == role
