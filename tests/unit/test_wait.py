"""`sglang-eagle3 wait` against stand-ins: a small HTTP server in SGLang's place, and log lines as its releases write them.

Real servers are waited for in tests/engine/test_wait_engine.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from sglang_eagle3_plugin.cli.main import main
from sglang_eagle3_plugin.errors import UserError
from sglang_eagle3_plugin.server import processes, start_times
from sglang_eagle3_plugin.server.address import client, parse
from sglang_eagle3_plugin.server.log_follow import LogFollower
from sglang_eagle3_plugin.server.log_progress import LogProgress
from sglang_eagle3_plugin.server.process_watch import ProcessWatch
from sglang_eagle3_plugin.server.wait import Snapshot, wait


def stamp() -> str:
    return datetime.now().strftime("[%Y-%m-%d %H:%M:%S")


@contextlib.contextmanager
def standin(answers: Callable[[int], int], host: str = "127.0.0.1") -> Iterator[tuple[str, list[str]]]:
    """An HTTP server that gives answers(n) to the nth question, with an empty body as SGLang does."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(answers(len(asked)))
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

    server = Server((host, 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    shown = f"[{host}]" if ":" in host else host
    try:
        yield f"http://{shown}:{server.server_address[1]}", asked
    finally:
        server.shutdown()
        server.server_close()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


KILLED_CHILD = (
    "import os, signal, time\npid = os.fork()\nif not pid:\n    time.sleep(60)\n"
    "time.sleep(0.5); os.kill(pid, signal.SIGKILL); time.sleep(60)"
)


def process(
    code: str, *words: str, name: str = sys.executable, **more: Any
) -> contextlib.AbstractContextManager[subprocess.Popen[bytes]]:
    return running(name, "-c", code, *words, executable=sys.executable, **more)


@contextlib.contextmanager
def running(*argv: str, **more: Any) -> Iterator[subprocess.Popen[bytes]]:
    child = subprocess.Popen(argv, **more)
    try:
        yield child
    finally:
        child.kill()
        child.wait()


def run_cli(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["wait", *argv])
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


class TestReadiness:
    def test_503_means_loading_and_an_empty_200_means_ready(self) -> None:
        with standin(lambda n: 200 if n > 2 else 503) as (url, asked):
            result = wait(parse(url), timeout_s=20)
        assert (result.state, result.answer) == ("ready", "200")
        assert asked == ["/health"] * 3

    def test_it_asks_about_once_a_second(self) -> None:
        with standin(lambda _: 503) as (url, asked):
            result = wait(parse(url), timeout_s=2.5)
        assert result.state == "timeout"
        assert len(asked) <= 3

    def test_a_refused_connection_is_waited_out(self) -> None:
        port = free_port()
        result = wait(parse(f"127.0.0.1:{port}"), timeout_s=1.5)
        assert (result.state, result.answer) == ("timeout", "refused")
        assert "is the port right?" in result.reason

    def test_timeout_0_asks_once(self) -> None:
        with standin(lambda _: 503) as (url, asked):
            assert wait(parse(url), timeout_s=0).state == "timeout"
        assert asked == ["/health"]

    def test_ipv6(self) -> None:
        with standin(lambda _: 200, host="::1") as (url, _):
            assert wait(parse(url), timeout_s=5).state == "ready"

    def test_a_proxy_is_not_asked_for_loopback(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}")
        monkeypatch.delenv("NO_PROXY", raising=False)
        monkeypatch.delenv("no_proxy", raising=False)
        with standin(lambda _: 200) as (url, _):
            assert wait(parse(url), timeout_s=5).state == "ready"

    @pytest.mark.parametrize("status", [302, 400, 404])
    def test_another_kind_of_server_fails_soon(self, status: int) -> None:
        with standin(lambda _: status) as (url, _):
            result = wait(parse(url), timeout_s=30)
        assert result.state == "failed"
        assert f"no /health ({status})" in result.reason

    def test_https_to_a_server_without_it_fails_at_once(self) -> None:
        with standin(lambda _: 200) as (url, _):
            result = wait(parse(url.replace("http:", "https:")), timeout_s=30)
        assert (result.state, result.elapsed_s < 3) == ("failed", True)
        assert "no TLS" in result.reason

    def test_a_server_younger_than_its_launcher_may_have_left_it(self) -> None:
        serve = (
            "import http.server as h, sys\nclass H(h.BaseHTTPRequestHandler):\n"
            "    def do_GET(self): self.send_response(200); self.end_headers()\n"
            "h.HTTPServer(('127.0.0.1', int(sys.argv[1])), H).serve_forever()"
        )
        port = free_port()
        with process("import time; time.sleep(60)") as launcher:
            time.sleep(0.1)
            with process(serve, str(port), stderr=subprocess.DEVNULL):
                assert wait(parse(f"127.0.0.1:{port}"), pid=launcher.pid, timeout_s=20).state == "ready"

    def test_another_program_at_the_port_of_another_address_is_not_asked_about(self) -> None:
        with process("import time; time.sleep(60)") as child, standin(lambda _: 200) as (url, _):
            port = parse(url).port
            with contextlib.suppress(OSError), socket.create_server(("::1", port), family=socket.AF_INET6):
                assert processes.listening_on(url) == os.getpid()
                assert wait(parse(url), pid=child.pid, timeout_s=5).state == "failed"

    def test_a_server_that_said_it_is_ready_is_asked_no_more_often(self, tmp_path: Path) -> None:
        log = tmp_path / "log"
        log.write_text(f"{stamp()}] The server is fired up and ready to roll!\n")
        with standin(lambda _: 503) as (url, asked):
            assert wait(parse(url), log=log, timeout_s=2.5).state == "timeout"
        assert len(asked) <= 4

    def test_an_older_server_on_the_port_is_not_taken_for_the_new_one(self) -> None:
        with standin(lambda _: 200) as (url, _), process("import time; time.sleep(60)") as child:
            result = wait(parse(url), pid=child.pid, timeout_s=10)
        assert result.state == "failed"
        assert "older server" in result.reason


class TestDeath:
    def test_a_process_that_ends_is_noticed_within_two_seconds(self) -> None:
        with process("import time; time.sleep(1); raise SystemExit(3)") as child:
            result = wait(parse(f"127.0.0.1:{free_port()}"), pid=child.pid, timeout_s=30)
        # The child is a zombie here: nobody has collected it yet.
        assert result.state == "failed"
        assert "ended with status 3" in result.reason
        assert result.elapsed_s < 1 + 2 + 0.5

    def test_a_signal_is_named(self) -> None:
        with process("import time; time.sleep(60)") as child:
            watch = ProcessWatch(child.pid)
            assert watch.death() == ""
            os.kill(child.pid, signal.SIGKILL)
            time.sleep(0.3)
            assert "killed by signal 9 (SIGKILL)" in watch.death()

    def test_the_kernels_kill_for_memory_is_told(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        counter = tmp_path / "memory.events"
        counter.write_text("low 0\noom 0\noom_kill 4\n")
        monkeypatch.setattr("sglang_eagle3_plugin.server.process_watch._oom_file", lambda _: counter)
        with process("import time; time.sleep(60)") as child:
            watch = ProcessWatch(child.pid)
            counter.write_text("low 0\noom 1\noom_kill 5\n")
            os.kill(child.pid, signal.SIGKILL)
            time.sleep(0.3)
            assert "the kernel killed it for memory" in watch.death()

    def test_a_pid_that_is_gone_already_is_a_failure(self) -> None:
        child = subprocess.Popen([sys.executable, "-c", ""])
        child.wait()
        result = wait(parse(f"127.0.0.1:{free_port()}"), pid=child.pid, timeout_s=30)
        assert result.state == "failed"
        assert "has gone" in result.reason

    def test_a_killed_child_whose_parent_waits_for_ever(self) -> None:
        # What 0.5.9 does when its scheduler is killed: the launcher sits on a pipe.
        with process(KILLED_CHILD) as child:
            result = wait(parse(f"127.0.0.1:{free_port()}"), pid=child.pid, timeout_s=30)
        assert result.state == "failed"
        assert "its process" in result.reason
        assert "SIGKILL" in result.reason


class TestLog:
    def test_a_fatal_line_ends_the_wait_with_the_exception(self, tmp_path: Path) -> None:
        log = tmp_path / "sé rver.log"
        log.write_text(
            f"{stamp()}] server_args=ServerArgs(model_path='m', api_key='s3cret', speculative_algorithm='EAGLE3')\n"
            f"{stamp()} TP0] Load weight begin. avail mem=1.00 GB\n"
            f"{stamp()}] Scheduler hit an exception: Traceback (most recent call last):\n"
            '  File "scheduler.py", line 1, in run_scheduler_process\n'
            "AttributeError: 'KimiK25ForConditionalGeneration' object has no attribute 'set_eagle3_layers_to_capture'\n\n"
            f"{stamp()}] Received sigquit from a child process. It usually means the child failed.\n"
        )
        result = wait(parse(f"127.0.0.1:{free_port()}"), log=log, timeout_s=30)
        assert result.state == "failed"
        assert result.elapsed_s < 2
        assert "has no attribute 'set_eagle3_layers_to_capture'" in result.reason
        assert "AttributeError" in result.lines[-1]
        assert "s3cret" not in "".join(result.lines)

    def test_an_earlier_runs_failure_is_passed_over(self, tmp_path: Path) -> None:
        log = tmp_path / "log"
        log.write_text("[2020-01-01 00:00:00] Scheduler hit an exception: Traceback (most recent call last):\nValueError: old\n")
        assert wait(parse(f"127.0.0.1:{free_port()}"), log=log, timeout_s=1).state == "timeout"

    def test_what_an_earlier_run_said_without_a_stamp_is_passed_over(self, tmp_path: Path) -> None:
        log = tmp_path / "log"
        log.write_text("usage: launch_server.py\nlaunch_server.py: error: unrecognized arguments: --speculative-algo\n")
        with process("import time; time.sleep(60)") as child:
            assert wait(parse(f"127.0.0.1:{free_port()}"), pid=child.pid, log=log, timeout_s=1).state == "timeout"
        os.utime(log, (time.time() - 3600, time.time() - 3600))
        assert wait(parse(f"127.0.0.1:{free_port()}"), log=log, timeout_s=1).state == "timeout"

    def test_a_server_started_again_a_moment_ago_is_not_taken_for_the_one_before_it(self, tmp_path: Path) -> None:
        log = tmp_path / "log"
        log.write_text(f"{stamp()}] Scheduler hit an exception: Traceback (most recent call last):\nValueError: before\n")
        time.sleep(2.5)
        with log.open("a") as appended, process("import time; time.sleep(60)", name="sglang::launcher", stdout=appended):
            appended.close()
            assert wait(parse(f"127.0.0.1:{free_port()}"), log=log, timeout_s=1).state == "timeout"

    @pytest.mark.parametrize(
        ("said", "told"),
        [
            *(
                (f"{clock}Scheduler hit an exception: Traceback (most recent call last):\nValueError: now\n", "ValueError: now")
                # Another time zone's clocks, and one that is none.
                for clock in ("[2020-01-01 00:00:00] ", "[2099-12-31 23:59:59] ", "[2026-02-30 10:00:00] ")
            ),
            ("sglang serve: error: unrecognized arguments: --foo\n", "--foo"),
        ],
    )
    def test_what_is_written_during_the_wait_is_this_runs(self, tmp_path: Path, said: str, told: str) -> None:
        log = tmp_path / "log"
        log.write_text("[2020-01-01 00:00:00] an earlier run\n")
        threading.Timer(0.5, lambda: log.open("a").write(said)).start()
        result = wait(parse(f"127.0.0.1:{free_port()}"), log=log, timeout_s=20)
        assert result.state == "failed"
        assert told in result.reason

    @pytest.mark.parametrize("survives", [False, True])
    def test_an_exception_is_the_end_when_its_writer_has_gone(self, tmp_path: Path, survives: bool) -> None:
        log = tmp_path / "log"
        after = "time.sleep(60)" if survives else ""
        code = f"import sys, time, traceback\ntry: 1 / 0\nexcept: traceback.print_exc()\ntime.sleep(2.5)\n{after}"
        with log.open("w") as written, process(code, stderr=written):
            written.close()
            result = wait(parse(f"127.0.0.1:{free_port()}"), log=log, timeout_s=6)
        assert (result.state, "ZeroDivisionError" in result.reason) == (("timeout", False) if survives else ("failed", True))

    def test_the_last_words_of_a_process_need_no_newline(self, tmp_path: Path) -> None:
        log = tmp_path / "log"
        code = (
            f"import time; time.sleep(0.8); log = open({str(log)!r}, 'w'); log.write('Traceback (most recent call last):\\n');"
            "log.write('RuntimeError: boom')"
        )
        with process(code) as child:
            result = wait(parse(f"127.0.0.1:{free_port()}"), pid=child.pid, log=log, timeout_s=20)
        assert result.reason.startswith("RuntimeError: boom; ")
        assert result.lines[-1] == "RuntimeError: boom"

    def test_an_exception_that_a_start_survived_hides_no_death(self, tmp_path: Path) -> None:
        log = tmp_path / "log"
        log.write_text(
            f"{stamp()}] server_args=ServerArgs(model_path='m')\n"
            "Exception ignored in: <function f>\nTraceback (most recent call last):\n"
            "AttributeError: 'NoneType' object has no attribute 'close'\n"
            f"{stamp()} TP0] Load weight begin. avail mem=1.00 GB\n"
        )
        with process(KILLED_CHILD) as child:
            result = wait(parse(f"127.0.0.1:{free_port()}"), pid=child.pid, log=log, timeout_s=30)
        assert result.reason.startswith("its process")
        assert "NoneType" not in result.reason

    def test_a_log_of_any_size_keeps_nothing_waiting(self, tmp_path: Path) -> None:
        log = tmp_path / "log"
        line = f"{stamp()}] Decode batch, #running-req: 1, token usage: 0.01, gen throughput (token/s): 1.45, {'x' * 300}\n"
        log.write_text(line * 300_000)
        with standin(lambda _: 200) as (url, _):
            assert wait(parse(url), log=log, timeout_s=20).state == "ready"

    @pytest.mark.parametrize(
        "line",
        [
            "Ignore import error when loading sglang.srt.models.foo: No module named 'sglang.srt.layers.bar'",
            "compile worker 3 terminated with 0",
        ],
    )
    def test_what_a_start_survives_is_not_its_end(self, line: str) -> None:
        progress = LogProgress()
        progress.feed(f"{stamp()}] {line}")
        assert not progress.fatal

    @pytest.mark.parametrize("before", ["Exception in thread Thread-1 (f):", "Process SpawnProcess-1:"])
    def test_a_chain_of_exceptions_that_ended_no_launcher(self, before: str) -> None:
        progress = LogProgress()
        for line in (
            before,
            "Traceback (most recent call last):",
            "  File",
            "KeyError: 1",
            "",
            "During handling of ...:",
            "",
            "Traceback (most recent call last):",
            "ValueError: 2",
        ):
            progress.feed(line)
        assert (progress.uncaught, progress.exception) == ("", "ValueError: 2")

    def test_a_log_with_another_programs_stamps_is_read_from_its_last_start(self, tmp_path: Path) -> None:
        log = tmp_path / "log"
        lines = (
            "server_args=ServerArgs(model_path='m')",
            "Scheduler hit an exception: Traceback (most recent call last):",
            "ValueError: x",
        )
        log.write_text("".join(f"2026-11-30T05:00:00.000Z [2026-11-30 05:00:00] {line}\n" for line in lines))
        with process("import time; time.sleep(60)") as child:
            assert wait(parse(f"127.0.0.1:{free_port()}"), pid=child.pid, log=log, timeout_s=5).state == "failed"

    def test_a_log_that_is_copied_from_elsewhere_is_as_old_as_its_stamps(self, tmp_path: Path) -> None:
        remote, log = tmp_path / "remote", tmp_path / "log"
        remote.write_text(f"{stamp()}] Scheduler hit an exception: Traceback (most recent call last):\nValueError: x\n")
        time.sleep(2.5)
        with log.open("w") as copied, running("tail", "-n", "+1", "-f", str(remote), "sglang.log", stdout=copied):
            copied.close()
            time.sleep(0.3)
            assert wait(parse(f"127.0.0.1:{free_port()}"), log=log, timeout_s=5).state == "failed"

    def test_a_line_of_dashes_takes_no_time(self) -> None:
        progress = LogProgress()
        progress.feed("-" * 60_000)
        assert len(progress.recent) == 1

    def test_what_a_shell_traced_is_blanked(self) -> None:
        progress = LogProgress()
        progress.feed("+ python -m sglang.launch_server --api-key sk-SECRET1 --port 30000")
        assert progress.useful_lines() == ["+ python -m sglang.launch_server --api-key *** --port 30000"]

    def test_a_bar_that_another_process_cut_is_no_harm(self) -> None:
        progress = LogProgress()
        progress.feed(f"{stamp()}] Load weight begin. avail mem=1.00 GB")
        progress.feed(f"Loading safetensors checkpoint shards:   5% Completed | 1/20 [00:01<00:{stamp()} TP1] x")
        assert (progress.done, progress.total, progress.stage_left_s) == (1, 20, None)

    def test_a_wrong_port_is_told_from_the_log(self, tmp_path: Path) -> None:
        log = tmp_path / "log"
        log.write_text(
            f"INFO:     Uvicorn running on http://127.0.0.1:31999 (Press CTRL+C to quit)\n"
            f"{stamp()}] The server is fired up and ready to roll!\n"
        )
        result = wait(parse(f"127.0.0.1:{free_port()}"), log=log, timeout_s=30)
        assert result.state == "failed"
        assert "31999" in result.reason

    def test_rotation_by_rename_loses_no_line(self, tmp_path: Path) -> None:
        log = tmp_path / "log"
        follower = LogFollower(log)
        assert follower.lines() == []
        log.write_text("one\ntwo\n")
        assert follower.lines() == ["one", "two"]
        with log.open("a") as old:
            old.write("three\nhal")
        log.rename(tmp_path / "log.1")
        assert follower.lines() == ["three"]
        log.write_text("four\n")
        assert follower.lines() == ["hal", "four"]

    def test_the_zeros_of_a_truncation_under_a_writer_are_no_text(self, tmp_path: Path) -> None:
        log = tmp_path / "log"
        log.write_bytes(b"\0" * 5000 + b"on\n")
        assert LogFollower(log).lines() == ["on"]

    def test_rotation_by_truncation_is_read_from_the_start(self, tmp_path: Path) -> None:
        log = tmp_path / "log"
        log.write_text("a long first line\n")
        follower = LogFollower(log)
        follower.lines()
        log.write_text("new\n")
        assert follower.lines() == ["new"]

    def test_carriage_returns_end_lines(self, tmp_path: Path) -> None:
        log = tmp_path / "log"
        log.write_bytes(b"a: 10%\ra: 20%\r\nb\xff\n")
        assert LogFollower(log).lines() == ["a: 10%", "a: 20%", "b�"]

    def test_a_line_of_any_length_is_read_at_once(self) -> None:
        # The pattern of a progress bar once took 4 s for the line of 0.5.23 that holds all server arguments.
        progress = LogProgress()
        progress.feed("server_args={'model_path': '/m', " + "'a_flag': [1, 2, 3], " * 20000 + "'speculative_algorithm': 'EAGLE3'}")
        assert (progress.model, progress.has_draft) == ("/m", True)

    def test_the_stages_of_a_start_with_a_draft(self) -> None:
        progress = LogProgress()
        seen = []
        for line in (
            "[2026-11-29 17:00:00] server_args=ServerArgs(model_path='/m', speculative_algorithm='EAGLE3')",
            "[2026-11-29 17:00:10 TP0] Load weight begin. avail mem=139.00 GB",
            "[2026-11-29 17:00:10 TP1] Load weight begin. avail mem=139.00 GB",
            "Loading safetensors checkpoint shards:  25% Completed | 16/64 [00:30<01:30,  1.88s/it]",
            "[2026-11-29 17:02:10 TP0] Memory pool end. avail mem=20.00 GB",
            "[2026-11-29 17:02:11 TP0] Capture cuda graph begin. This can take up to several minutes. avail mem=20.00 GB",
            "Capturing batches (bs=128 avail_mem=19.50 GB):  50%|█████     | 10/20 [00:05<00:05,  2.00it/s]",
            "[2026-11-29 17:02:30 TP0] Load weight begin. avail mem=20.00 GB",
            "[2026-11-29 17:02:32 TP0] Capture draft cuda graph begin. This can take up to several minutes. avail mem=19.00 GB",
            "INFO:     Uvicorn running on http://0.0.0.0:30000 (Press CTRL+C to quit)",
            "[2026-11-29 17:02:40] The server is fired up and ready to roll!",
        ):
            progress.feed(line)
            seen.append((progress.stage, progress.done, progress.total, progress.stage_left_s, round(progress.fraction, 2)))
        assert [s[0] for s in seen] == [
            *("start", "weights", "weights", "weights", "memory", "graphs", "graphs"),
            *("draft weights", "draft graphs", "warm-up", "ready"),
        ]
        assert seen[3][1:4] == (16, 64, 90.0)
        assert seen[6][1:4] == (10, 20, 5.0)
        fractions = [s[4] for s in seen]
        assert fractions == sorted(fractions)
        assert fractions[-1] == 1.0
        assert progress.port == 30000


class TestTimeLeft:
    def feed(self, progress: LogProgress, *minutes_and_lines: tuple[int, str]) -> None:
        for minute, line in minutes_and_lines:
            progress.feed(f"[2026-11-29 17:{minute:02d}:00] {line}")

    def test_it_is_told_by_the_last_start_of_the_model(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("SGLANG_EAGLE3_CACHE", str(tmp_path))
        first, second, other = LogProgress(), LogProgress(), LogProgress()
        begin = (0, "server_args=ServerArgs(model_path='/m', speculative_algorithm=None)")
        self.feed(
            first, begin, (1, "Load weight begin."), (11, "Memory pool end."), (12, "The server is fired up and ready to roll!")
        )
        start_times.remember(first)
        self.feed(second, begin, (1, "Load weight begin."))
        before = start_times.last(second)
        assert before == {"start": 60, "weights": 600, "memory": 60}
        assert start_times.left(second, before, datetime(2026, 11, 29, 17, 5)) == 6 * 60 + 60
        # The bar of the loading itself is believed over the past.
        second.feed("Loading safetensors checkpoint shards:  50% Completed | 5/10 [02:00<02:00,  2.0s/it]")
        assert start_times.left(second, before, datetime(2026, 11, 29, 17, 5)) == 120 + 60
        self.feed(other, (0, "server_args=ServerArgs(model_path='/other', speculative_algorithm=None)"))
        assert start_times.left(other, start_times.last(other), datetime(2026, 11, 29, 17, 0)) is None


class TestCommandLine:
    def test_json_and_exit_codes(self, capsys: pytest.CaptureFixture[str]) -> None:
        with standin(lambda _: 200) as (url, _):
            code, out, err = run_cli(capsys, "--url", url, "--json")
        assert code == 0
        assert json.loads(out)["state"] == "ready"
        assert "waiting for" in err
        code, out, _ = run_cli(capsys, "--url", f"localhost:{free_port()}", "--timeout", "0.2")
        assert code == 3
        assert out.startswith("timeout")

    @pytest.mark.parametrize("url", ["ftp://x:1", "http://", "http://h:99999", "http://u:p@h:1", "http://[::1", "a b", "h:0"])
    def test_bad_addresses(self, url: str, capsys: pytest.CaptureFixture[str]) -> None:
        code, _, err = run_cli(capsys, "--url", url)
        assert code == 2
        assert err.count("\n") == 1

    @pytest.mark.parametrize(
        ("name", "value", "told"),
        [
            ("ALL_PROXY", "foo://bar", "HTTP_PROXY or ALL_PROXY"),
            ("HTTP_PROXY", "socks9://127.0.0.1:1", "HTTP_PROXY or ALL_PROXY"),
            ("HTTP_PROXY", "http://h:port", "HTTP_PROXY or ALL_PROXY"),
            ("SGLANG_API_KEY", "k\xe9y", "SGLANG_API_KEY"),
        ],
    )
    def test_an_environment_that_cannot_be_used(
        self, name: str, value: str, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        for other in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy", "NO_PROXY", "no_proxy"):
            monkeypatch.delenv(other, raising=False)
        monkeypatch.setenv(name, value)
        code, _, err = run_cli(capsys, "--url", "http://192.0.2.1:30000", "--timeout", "1")
        assert code == 2
        assert told in err
        assert "Traceback" not in err

    @pytest.mark.parametrize("listed", ["[::1]", "::1/128", "10.0.0.0/8,fe80::/10"])
    def test_what_people_write_into_no_proxy(self, listed: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("NO_PROXY", listed)
        client(parse("http://192.0.2.1:30000"), timeout_s=1).close()

    @pytest.mark.parametrize(
        ("listed", "proxied"),
        [("", True), ("other", True), ("10.255.255.1", False), ("10.255.255.1:30000", False), ("*", False)],
    )
    def test_a_proxy_without_a_scheme_and_what_goes_past_it(
        self, listed: str, proxied: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for other in ("HTTP_PROXY", "ALL_PROXY", "all_proxy", "no_proxy"):
            monkeypatch.delenv(other, raising=False)
        with standin(lambda _: 200) as (url, asked):
            monkeypatch.setenv("http_proxy", url.removeprefix("http://"))
            monkeypatch.setenv("NO_PROXY", listed)
            with client(parse("http://10.255.255.1:30000"), timeout_s=0.5) as http, contextlib.suppress(httpx.HTTPError):
                http.get("/health")
        assert bool(asked) is proxied

    def test_certificates_that_are_not_there(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "none"))
        with pytest.raises(UserError, match=r"SSL_CERT_FILE=.*none"):
            client(parse("https://192.0.2.1"), timeout_s=1)

    def test_an_unreadable_log_is_bad_input(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="cannot be read"):
            wait(parse("127.0.0.1:1"), log=tmp_path, timeout_s=1)

    def test_addresses(self) -> None:
        assert parse("0.0.0.0:8000").url == "http://127.0.0.1:8000"
        assert parse("[::]:8000").url == "http://[::1]:8000"
        assert parse("myhost").url == "http://myhost:30000"
        assert parse("https://gw.example/eagle/").url == "https://gw.example:443/eagle"

    def test_snapshots_carry_the_stage(self, tmp_path: Path) -> None:
        log = tmp_path / "log"
        log.write_text(f"{stamp()} TP0] Load weight begin. avail mem=1.00 GB\n")
        seen: list[Snapshot] = []
        wait(parse(f"127.0.0.1:{free_port()}"), log=log, timeout_s=0.6, on_look=seen.append)
        assert seen[-1].stage == "weights"
