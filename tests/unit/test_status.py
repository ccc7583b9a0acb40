"""`status`: what it reads from a live process, from a dead one, and from none."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys

import pytest

from sglang_eagle3_plugin.cli import main
from sglang_eagle3_plugin.errors import UserError
from sglang_eagle3_plugin.server import address, processes

# A process titled by argv[0] does not find its virtual environment: the path is handed down, and the `.pth`'s line said.
SERVER = """
import sglang_eagle3_plugin._bootstrap, sys, socket, sglang.srt.models.kimi_k25
s = socket.socket(); s.bind(("127.0.0.1", 0)); s.listen()
print(s.getsockname()[1], flush=True)
sys.stdin.read()
"""
# One write: two children share a pipe.
CHILD = "import os, sys; os.write(1, b'%d\\n' % os.getpid()); sys.stdin.read()"


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


@pytest.fixture
def launched(stand_in, tmp_path, monkeypatch):
    """A stand-in launcher with a record, and its children: processes with SGLang's titles and no plugin."""
    monkeypatch.setenv("EAGLE3_RUNTIME_DIR", str(tmp_path / "records"))
    stand_in("pass")
    lines = [
        "import sglang_eagle3_plugin._bootstrap, subprocess, sys, sglang.srt.models.kimi_k25",
        f"start = lambda title: subprocess.Popen([title, '-c', {CHILD!r}], executable=sys.executable, env={{}})",
        "children = [start(title) for title in sys.argv[1:]]",
        "[child.wait() for child in children]",
    ]
    (tmp_path / "stand-in/sglang/launch_server.py").write_text("\n".join(lines))
    started = []

    def start(*titles, **env):
        process = subprocess.Popen(
            [sys.executable, "-m", "sglang.launch_server", *titles],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path / "stand-in"), *sys.path])} | env,
        )
        started.append(process)
        return process.pid, [int(process.stdout.readline()) for _ in titles]

    yield start
    for process in started:
        process.communicate()


def test_a_scheduler_without_the_plugin_fails_whatever_its_launcher_has(launched, capsys):
    launcher, (scheduler,) = launched("sglang::scheduler_TP0")
    code, out, _ = run(capsys, "--pid", str(launcher), "--json")
    assert code == 1
    by_pid = {pid: [row for row in json.loads(out) if row["pid"] == pid] for pid in (launcher, scheduler)}
    assert {row["state"] for row in by_pid[launcher]} == {"applied"}
    assert {(row["role"], row["state"]) for row in by_pid[scheduler]} == {("scheduler TP0", "pending")}
    code, out, _ = run(capsys, "--pid", str(scheduler))
    assert code == 1
    assert out.count("no record: the plugin is not in this process") == 1


def test_a_detokenizer_without_a_record_is_listed_and_fails_nothing(launched, capsys):
    launcher, (detokenizer,) = launched("sglang::detokenizer")
    code, out, _ = run(capsys, "--pid", str(launcher), "--json")
    assert code == 0
    assert {row["state"] for row in json.loads(out) if row["pid"] == detokenizer} == {"pending"}


def test_a_scheduler_whose_title_wiped_its_environment_is_off_where_its_launcher_is(launched, capsys):
    # As after setproctitle: the kernel shows no environment of the child's.
    launcher, (scheduler,) = launched("sglang::scheduler_TP0", EAGLE3_PLUGIN="0")
    assert processes.environment(scheduler) == {}
    code, out, _ = run(capsys, "--pid", str(launcher), "--json")
    assert code == 0
    assert {(row["state"], row["reason"]) for row in json.loads(out) if row["pid"] == scheduler} == {
        ("disabled", "EAGLE3_PLUGIN=0")
    }


def test_a_server_that_keeps_its_records_elsewhere_is_not_said_to_lack_the_plugin(server, capsys, tmp_path):
    process, _ = server(EAGLE3_RUNTIME_DIR=str(tmp_path / "elsewhere"))
    code, out, _ = run(capsys, "--pid", str(process.pid), "--json")
    assert code == 0  # what can't be seen from here is not amiss
    assert {row["reason"].partition(": ")[2] for row in json.loads(out)} == {
        f"run this with EAGLE3_RUNTIME_DIR={tmp_path / 'elsewhere'}"
    }


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
        (["--url", "nonsense"], "no address of this machine"),
        (["--url", "http://127.0.0.1:99999999"], "not an address"),
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


@pytest.mark.parametrize("host", ["gpu-node-7.example.com", "192.0.2.7", "[2001:db8::7]"])
def test_another_machines_address_is_never_taken_for_this_ones_port(host, capsys):
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        code, out, err = run(capsys, "--url", f"http://{host}:{port}")
    assert (code, out) == (2, "")
    assert "is no address of this machine; run this command there, or name a server that runs here by 127.0.0.1 or --pid" in err
    assert err.count("\n") == 1


def test_this_machines_names_and_addresses():
    ours = ["localhost", "127.0.0.1", "127.0.0.2", "0.0.0.0", socket.gethostname()]
    with socket.create_server(("", 0)) as listening, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as anyone:
        with contextlib.suppress(OSError):  # no network at all
            anyone.connect(("192.0.2.7", 9))  # nothing is sent: the kernel says which of our addresses it would leave from
            ours.append(anyone.getsockname()[0])
        for host in ours:
            assert processes.listening_on(f"{host}:{listening.getsockname()[1]}") == os.getpid()


def test_an_address_without_a_port_is_read_as_by_wait_and_accept(server, capsys, monkeypatch):
    process, port = server()
    monkeypatch.setattr(address, "DEFAULT_PORT", port)
    code, out, _ = run(capsys, "--url", "localhost", "--json")
    assert code == 0
    assert {row["pid"] for row in json.loads(out)} == {process.pid}
    with pytest.raises(UserError, match="neither http nor https"):
        processes.listening_on("ftp://localhost")


def test_two_servers_of_one_shell_are_two():
    # The shell's one word names SGLang's launcher as well.
    script = """
        (exec -a sglang::scheduler_TP0 "$0" -c "$1") <&3 &
        (exec -a sglang::scheduler_TP0 "$0" -c "$1") <&3 &
        wait  # python -m sglang.launch_server, twice; sglang serve"""
    shell = subprocess.Popen(
        ["bash", "-c", f"exec 3<&0; {script}", sys.executable, CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    first, second = (int(shell.stdout.readline()) for _ in range(2))
    try:
        assert [processes.role(pid) for pid in (first, second)] == ["scheduler TP0"] * 2
        assert processes.tree(first) == [first]
        assert processes.tree(second) == [second]
    finally:
        shell.communicate()


@pytest.mark.parametrize(
    "options", [["-m", "sglang.launch_server"], ["-um", "sglang.launch_server"], ["-m", "dynamo.sglang.launch_server"]]
)
def test_a_scheduler_belongs_to_the_server_above_it(tmp_path, options):
    package = tmp_path / "/".join(options[1].split(".")[:-1])
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package.parent / "__init__.py").touch()
    start = f"subprocess.run(['sglang::scheduler_TP0', '-c', {CHILD!r}], executable=sys.executable)"
    (package / "launch_server.py").write_text(f"import subprocess, sys\n{start}\n")
    launcher = subprocess.Popen(
        [sys.executable, *options],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
    )
    scheduler = int(launcher.stdout.readline())
    try:
        assert processes.tree(scheduler) == sorted([launcher.pid, scheduler])
    finally:
        launcher.communicate()


@pytest.mark.parametrize(
    ("words", "role"),
    [
        (["sglang::scheduler_TP0"], "scheduler TP0"),
        (["sglang::detokenizer"], "detokenizer"),
        (["/usr/bin/python3.12", "-m", "sglang.launch_server", "--model", "x"], "launcher"),
        (["python", "/opt/venv/bin/sglang", "serve", "--model", "x"], "launcher"),
        (["python", "/src/python/sglang/launch_server.py"], "launcher"),
        (["python", "-c", "from multiprocessing.spawn import spawn_main", "--multiprocessing-fork"], "worker"),
        (["bash", "-c", "python -m sglang.launch_server --model x & python -m sglang.launch_server --model y & wait"], "python"),
        (["xargs", "-P2", "python", "-m", "sglang.launch_server"], "python"),
        (["python", "sweep.py", "sglang", "--out", "serve"], "python"),
        ([], "python"),
    ],
)
def test_role_reads_sglangs_titles_and_command_lines(tmp_path, monkeypatch, words, role):
    (tmp_path / "1").mkdir()
    (tmp_path / "1/cmdline").write_bytes(b"".join(word.encode() + b"\0" for word in words))
    monkeypatch.setattr(processes, "PROC", tmp_path)
    assert processes.role(1) == role
