"""How a command ends when it is not let finish: a full disk, no rights, a reader that leaves, Ctrl-C, the end of a job's time."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from checkpoint_making import draft_config, target_config, write_config
from standin_server import StandIn, serving

from sglang_eagle3_plugin.cli import main
from sglang_eagle3_plugin.series import catalog

COMMAND = [sys.executable, "-m", "sglang_eagle3_plugin"]


def one_sentence(stderr: str) -> str:
    assert stderr.startswith("sglang-eagle3: ")
    assert stderr.count("\n") == 1, stderr
    return stderr.strip()


def as_on_a_terminal() -> None:
    """Undo what nohup, or a shell that has put the tests in the background, makes their children ignore."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def started(*argv: str | Path, program: Sequence[str | Path] = COMMAND, **more) -> subprocess.Popen[str]:
    """A command in a process group of its own, as a shell starts it on a terminal."""
    return subprocess.Popen(
        [*map(str, program), *map(str, argv)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=as_on_a_terminal,
        **more,
    )


def ended_by(number: signal.Signals, child: subprocess.Popen[str], said: str) -> None:
    # By itself, with the number that a shell shows for the signal; or, where an import was under way, Python by that very signal.
    assert child.returncode in (128 + number, -number), said
    assert "Traceback" not in said


def wait_for(what, seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.parametrize("argv", [["patches", "list"], ["models"], ["--help"]])  # by click, by rich, by click itself
def test_a_full_disk_is_one_sentence(argv) -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run([*COMMAND, *argv], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert "No space left on device; free some space" in one_sentence(done.stderr)


@pytest.mark.parametrize("argv", [["patches", "list"], ["models"], ["--help"]])
def test_a_reader_that_leaves_is_no_finding(argv) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([*COMMAND, *argv], stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


@pytest.mark.parametrize(
    ("refusal", "remedy"),
    [
        (PermissionError(errno.EACCES, "Permission denied", "/secret/config.json"), "give a path that you may use"),
        (OSError(errno.EROFS, "Read-only file system", b"/ro/\xff"), "give a path that you may use"),
        (OSError(errno.ENAMETOOLONG, "File name too long", "x" * 5000), "give another path"),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "/a", None, "/b"), "give another path"),
        (OSError(errno.EIO, "Input/output error"), "run it again"),
        (OSError("of no number"), "run it again"),
    ],
)
def test_what_the_system_refuses_is_one_sentence(refusal, remedy, monkeypatch, capsys) -> None:
    def refuse() -> None:
        raise refusal

    monkeypatch.setattr(catalog, "load", refuse)
    with pytest.raises(SystemExit) as ended:
        main(["patches", "list"])
    assert ended.value.code == 2
    sentence = one_sentence(capsys.readouterr().err)
    assert remedy in sentence
    assert str(refusal.strerror or refusal) in sentence
    assert len(sentence) < 1500


def test_names_that_the_terminal_cannot_write_are_escaped(tmp_path: Path) -> None:
    target = write_config(tmp_path / "模型", target_config())
    draft = write_config(Path(os.fsdecode(os.fsencode(tmp_path) + b"/bad\xffname")), draft_config([2, 4, 5]))
    for encoding in ("ascii", "utf-8:strict"):
        done = subprocess.run(
            [*COMMAND, "wiring", "--draft", draft, "--target", target / "nowhere"],
            capture_output=True,
            env={**os.environ, "PYTHONIOENCODING": encoding},
            check=False,
        )
        assert done.returncode == 2
        assert b"neither a path" in done.stderr
        assert b"Traceback" not in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_server_ends_with_the_bench_that_started_it(number: signal.Signals, tmp_path: Path) -> None:
    target = write_config(tmp_path / "target", target_config())
    draft = write_config(tmp_path / "draft", draft_config([2, 4, 5]))
    server = tmp_path / "python"
    server.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 300\n")
    server.chmod(0o755)
    child = started("bench", "--target", target, "--draft", draft, "--python", server, "--out", tmp_path / "out")
    try:
        wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().strip())
        os.kill(child.pid, number)
        _, said = child.communicate(timeout=60)
    finally:
        child.kill()
    ended_by(number, child, said)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_ctrl_c_does_not_wait_for_answers_under_way() -> None:
    with serving(StandIn(step_s=30)) as server:
        child = started("accept", "--url", server.url)
        try:
            wait_for(lambda: server.sent)
            os.killpg(child.pid, signal.SIGINT)
            _, said = child.communicate(timeout=20)
        finally:
            child.kill()
    ended_by(signal.SIGINT, child, said)


def test_ctrl_c_is_silent_in_the_workers_of_a_survey(tmp_path: Path) -> None:
    program = tmp_path / "survey.py"
    program.write_text(
        textwrap.dedent(
            f"""
            import pathlib
            from sglang_eagle3_plugin.survey import matrix

            class Many:
                sizes = {{f"models/m{{i}}.py": (None, i) for i in range(1000)}}
                def paths(self, under): return list(self.sizes)
                def text(self, path): return "class A:\\n    def forward(self, x):\\n        return x\\n" * 2000

            try:
                matrix._summarize_all([Many()], lambda done, total: pathlib.Path({str(tmp_path / "going")!r}).touch())
            except KeyboardInterrupt:
                raise SystemExit(130)
            """
        )
    )
    child = started(program=[sys.executable, program])
    try:
        wait_for((tmp_path / "going").exists)
        os.killpg(child.pid, signal.SIGINT)
        _, said = child.communicate(timeout=60)
    finally:
        child.kill()
    assert (child.returncode, said) == (130, "")
