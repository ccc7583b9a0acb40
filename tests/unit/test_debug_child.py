"""The process that makes debug's lines: the same lines as before, in the same places, and no trace of it when it should be gone."""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from array import array
from pathlib import Path
from types import SimpleNamespace

import pytest

from sglang_eagle3_plugin import records
from sglang_eagle3_plugin.runtime import tap
from sglang_eagle3_plugin.runtime.debug import control, sampling, thread
from sglang_eagle3_plugin.runtime.debug.read import Arrived, reports
from sglang_eagle3_plugin.runtime.debug.report import Labels, human
from sglang_eagle3_plugin.runtime.debug.wire import Frames, frame
from sglang_eagle3_plugin.settings import Settings

LABELS = Labels((2, 4, 5), (2, 4, 5), 8)
SERVER = """
import json, logging, os, sys, time
from types import SimpleNamespace
from sglang_eagle3_plugin import records
from sglang_eagle3_plugin.runtime.debug import thread
from sglang_eagle3_plugin.runtime.debug.report import Labels
from sglang_eagle3_plugin.settings import Settings

thread.labels_of = lambda runner, settings: Labels((2, 4, 5), (2, 4, 5), 8)
thread._tensor_parallel = lambda: (0, 1)
thread._CONTROL_S = 0.05
records.note = lambda key, value: print(key, json.dumps(value), flush=True)
logging.basicConfig(**json.loads(sys.argv[1]))
exec(sys.argv[4])
thread.begin(SimpleNamespace(is_draft_worker=False), Settings(debug="1", debug_file=sys.argv[2]))
thread._thread._debug.arrived.extend(eval(sys.argv[3]))
print("child", thread._thread._child.pid, flush=True)
sys.stdin.read()
"""
SGLANG_FORMAT = {"format": "[%(asctime)s TP0] %(message)s", "datefmt": "%Y-%m-%d %H:%M:%S", "level": "INFO"}


def step(number: int, zeroed: bool = False) -> Arrived:
    """A verify of two requests and its draft extend: three slots, norms and means told apart, two first values."""
    rows = [[3.0 + row, 0.0 if zeroed else 5.25 + row, 9.5 + row] for row in range(4)]
    means = [[0.1 * row, 0.2 * row, 0.3 * row] for row in range(4)]
    flat = array("f")
    for chosen, extra in ((range(4), ()), ((0, 2), (1.0, 1.0))):
        for table in (rows, means):
            for row in chosen:
                flat.extend(table[row])
        flat.extend([1.0, -2.0] * 3)
        flat.extend(extra)
    verify = ("target verify", True, 4, 24, "bfloat16", 3, ["a", "b"], None, 4, 2, -1, [])
    extend = ("draft extend", True, 2, 24, "bfloat16", 3, ["a", "b"], [1, 1], 2, 2, -1, [("accepted", 2)])
    return (number, [verify, extend], flat.tobytes())


STEPS = [step(1), step(2, zeroed=True), step(3)]


pytestmark = pytest.mark.usefixtures("place")


@pytest.fixture
def worker(monkeypatch):
    monkeypatch.setattr(thread, "labels_of", lambda runner, settings: LABELS)
    monkeypatch.setattr(thread, "_tensor_parallel", lambda: (0, 1))
    monkeypatch.setattr(thread, "_CONTROL_S", 0.05)
    notes = {}
    monkeypatch.setattr(records, "note", notes.__setitem__)
    all_made = []

    def make(**settings):
        made = thread.DebugThread(SimpleNamespace(is_draft_worker=False), Settings(**settings))
        all_made.append(made)
        return made, notes

    yield make
    for made in all_made:
        made.stop() if made.is_alive() else made._off()


@contextlib.contextmanager
def serving(place, log=SGLANG_FORMAT, steps=STEPS, before="", **popen):
    """A process with debug on that has been handed steps; its stdout is read to the child's pid."""
    argv = [sys.executable, "-c", SERVER, json.dumps(log), str(place / "lines.jsonl"), repr(steps), before]
    process = subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=popen.pop("stderr", subprocess.PIPE), text=True, **popen
    )
    try:
        while not (line := process.stdout.readline()).startswith("child"):
            assert line, process.stderr.read()
        yield process, int(line.split()[1])
    finally:
        process.kill()
        process.communicate()


def in_process() -> list[dict]:
    return [said for one in STEPS for said in reports(one, LABELS)]


def lines_of(path: Path) -> list[dict]:
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [{key: value for key, value in line.items() if key not in ("v", "time", "pid", "rank")} for line in lines]


def wait_for(what, seconds=20.0):
    until = time.monotonic() + seconds
    while not (found := what()) and time.monotonic() < until:
        time.sleep(0.02)
    assert found
    return found


def children() -> list[str]:
    return [pid for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()]


def test_the_lines_are_those_made_in_process_and_bear_the_servers_pid(place):
    with serving(place) as (process, _):
        _, log = process.communicate("")
        raw = [json.loads(line) for line in (place / "lines.jsonl").read_text().splitlines()]
        assert {(line["v"], line["pid"], line["rank"]) for line in raw} == {(1, process.pid, 0)}
    assert lines_of(place / "lines.jsonl") == in_process()
    assert [v["verdict"] for said in in_process() for v in said["verdicts"]] == ["zeroed", "zeroed"]
    texts = [re.fullmatch(r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d TP0\] (EAGLE3 .*)", line).group(1) for line in log.splitlines()]
    assert texts == [human(said) for said in in_process()]


def test_below_the_logs_level_nothing_but_what_is_wrong_is_logged(place):
    with serving(place, {**SGLANG_FORMAT, "level": "WARNING"}) as (process, _):
        _, log = process.communicate("")
    assert [line.count("WRONG zeroed") for line in log.splitlines()] == [1, 1]
    assert len(lines_of(place / "lines.jsonl")) == 6


def test_a_log_that_is_no_stream_gets_the_lines_through_the_server(place):
    with serving(place, {"format": "%(levelname)s %(message)s", "level": "INFO", "filename": str(place / "log")}) as (process, _):
        _, err = process.communicate("")
    assert err == ""
    assert [line.partition(" ")[0] for line in (place / "log").read_text().splitlines()] == ["INFO"] * 2 + ["WARNING"] * 2 + [
        "INFO"
    ] * 2
    assert [line.partition(" ")[2] for line in (place / "log").read_text().splitlines()] == [human(said) for said in in_process()]


def test_a_formatter_of_somebodys_own_is_obeyed(place):
    own = """
class Own(logging.Formatter):
    def format(self, record):
        return "own " + record.getMessage()
logging.getLogger().handlers[0].setFormatter(Own())
"""
    with serving(place, before=own) as (process, _):
        _, log = process.communicate("")
    assert log.splitlines() == ["own " + human(said) for said in in_process()]


@pytest.mark.parametrize("closed", ["os.close(2)", "sys.stderr.close()"])
def test_a_closed_stderr_costs_the_log_and_nothing_else(place, closed):
    with serving(place, before=closed) as (process, _):
        wait_for(lambda: len(lines_of(place / "lines.jsonl")) == 6)
        noted = wait_for(lambda: '"lines": 6' in (line := process.stdout.readline()) and line)
        assert '"on": true' in noted
        assert "log cannot be written" in noted
        process.communicate("")
    assert lines_of(place / "lines.jsonl") == in_process()


def test_the_child_goes_with_its_parent_though_another_process_holds_its_pipe(place):
    before = "import threading; threading.Timer(0.3, lambda: os.fork() or time.sleep(60)).start()"
    with serving(place, before=before, start_new_session=True) as (process, child):
        time.sleep(1)
        assert Path(f"/proc/{child}").exists()
        process.kill()
        process.wait()
        try:
            wait_for(lambda: not Path(f"/proc/{child}").exists() or " Z " in Path(f"/proc/{child}/stat").read_text(), 5)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
    assert lines_of(place / "lines.jsonl") == in_process()


def test_ctrl_c_ends_the_child_with_its_server_and_not_before(place):
    with serving(place, steps=[]) as (process, child):
        wait_for(lambda: ignores(child, signal.SIGINT))
        os.kill(child, signal.SIGINT)
        time.sleep(0.2)
        assert Path(f"/proc/{child}").exists()
        process.communicate("")
    assert not Path(f"/proc/{child}").exists()


def ignores(pid: int, number: int) -> bool:
    mask = re.search(r"SigIgn:\s*(\w+)", Path(f"/proc/{pid}/status").read_text()).group(1)
    return bool(int(mask, 16) >> (number - 1) & 1)


def test_a_killed_child_turns_debug_off_is_counted_and_said_once(worker, place, caplog):
    made, notes = worker(debug="1", debug_file=str(place / "lines.jsonl"))
    made.start()
    made._debug.arrived.append(step(1))
    wait_for(lambda: lines_of(place / "lines.jsonl"))
    os.kill(made._child.pid, signal.SIGKILL)
    wait_for(lambda: tap.consumers == () and not notes["debug"]["on"])
    assert tap.failures == {"debug": 1}
    assert "signal 9" in notes["debug"]["problem"]
    assert [r.getMessage() for r in caplog.records if "serving goes on" in r.getMessage()] == [
        "sglang-eagle3-plugin: debug failed and is off in this process; serving goes on "
        "(ChildError: the process that writes its lines ended (signal 9))."
    ]
    # And it can be switched on again.
    control.write(control.Command(os.getpid(), records.start_time(os.getpid()), 7, True, "1", str(place / "again.jsonl")))
    wait_for(lambda: tap.consumers)
    tap.consumers[0].arrived.append(step(5))
    wait_for(lambda: lines_of(place / "again.jsonl"))
    assert notes["debug"]["problem"] == ""


def test_a_child_that_fails_says_why(worker, caplog):
    made, notes = worker(debug="1")
    made.start()
    made._debug.arrived.append((1, [("no pass",)], b""))
    wait_for(lambda: tap.consumers == () and not notes["debug"]["on"])
    assert tap.failures == {"debug": 1}
    assert "TypeError" in notes["debug"]["problem"]
    assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) == 1


def test_a_child_that_cannot_be_started_costs_one_line(worker, monkeypatch, caplog):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    before = len(os.listdir("/proc/self/fd"))
    made, notes = worker(debug="1")
    made._note()
    assert tap.consumers == ()
    assert tap.failures == {"debug": 1}
    assert "/nowhere/python" in notes["debug"]["problem"]
    assert len(caplog.records) == 1
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_child_that_lags_costs_steps_and_no_memory_and_is_ended(worker, monkeypatch):
    monkeypatch.setattr(sampling, "_PENDING", 8)
    made, _ = worker(debug="every=1,rate=0")
    debug, child = made._debug, made._child
    os.kill(child.pid, signal.SIGSTOP)
    large = (1, [], bytes(1 << 18))
    for _ in range(200):
        if debug._within_rate():
            debug.arrived.append(large)
        made._work(time.monotonic())
    assert len(debug.arrived) == 8
    assert 150 < debug.left_out < 200
    assert len(child._unsent) < 8 << 18
    began = time.monotonic()
    made._off()
    assert time.monotonic() - began < 4
    assert not Path(f"/proc/{child.pid}").exists()
    assert tap.failures == {}


def test_twenty_toggles_leave_no_process_no_handle_and_no_file(worker):
    made, _ = worker()
    mine = control.lines_for(os.getpid())
    gc.collect()  # what other tests left open is closed before, not in between
    before, had = len(os.listdir("/proc/self/fd")), children()
    for serial in range(40):
        on = serial % 2 == 0
        control.write(control.Command(os.getpid(), records.start_time(os.getpid()), serial, on, "1", str(mine)))
        made._obey()
        assert len(children()) == len(had) + on
        assert mine.exists() == on
        if made._debug:
            made._debug.arrived.append(step(serial))
    assert len(os.listdir("/proc/self/fd")) <= before
    assert children() == had
    assert tap.consumers == ()


def test_the_status_comes_back_into_the_record(worker, place):
    made, notes = worker(debug="1", debug_file=str(place / "lines.jsonl"))
    made.start()
    made._debug.arrived.extend(STEPS)
    wait_for(lambda: notes["debug"]["lines"] == 6)
    assert notes["debug"]["file"] == str(place / "lines.jsonl")


def test_ranks_are_compared_by_the_child_of_the_first(worker, monkeypatch, place):
    monkeypatch.setattr(os, "getppid", lambda: 99)
    monkeypatch.setattr(thread, "_tensor_parallel", lambda: (rank, 2))
    both = []
    for rank in (1, 0):
        made = thread.DebugThread(
            SimpleNamespace(is_draft_worker=False, gpu_id=rank, server_args=SimpleNamespace(enable_dp_attention=False)),
            Settings(debug="1", debug_file=str(place / f"{rank}.jsonl")),
        )
        made._debug.arrived.append(step(3, zeroed=rank == 1))
        made._work(time.monotonic())
        both.append(made)
    try:
        found = wait_for(lambda: len(of_ranks := [o for o in lines_of(place / "0.jsonl") if "slots" not in o]) == 2 and of_ranks)
        assert [(one["step"], one["pass"]) for one in found] == [(3, "target verify"), (3, "draft extend")]
        assert "slot 1 has norm 6.75 on rank 0 and 0 on rank 1" in found[0]["verdicts"][0]["says"]
        wait_for(lambda: both[1]._child.hear() or both[1]._child.ranks_compared == 2)
    finally:
        for made in both:
            made._off()
    assert list(records.directory().glob("*.ranks")) == []


@pytest.mark.parametrize("step", [None, 1, 2, 3])
def test_the_ranks_of_one_group_and_of_no_other_are_compared(worker, monkeypatch, step):
    monkeypatch.setattr(os, "getppid", lambda: 99)
    arguments = SimpleNamespace(enable_dp_attention=False, **({} if step is None else {"gpu_id_step": step}))
    tp, pp, dp, base = 2, 2, 2, 1
    groups = {}
    for replica, stage, rank in itertools.product(range(dp), range(pp), range(tp)):
        monkeypatch.setattr(thread, "_tensor_parallel", lambda rank=rank: (rank, tp))
        # As 0.5.9 to 0.5.23 do (sglang/srt/managers/data_parallel_controller.py, launch_tensor_parallel_group).
        gpu_id = base + replica * tp * pp * (step or 1) + stage * tp + rank * (step or 1)
        made = thread.DebugThread(SimpleNamespace(is_draft_worker=False, gpu_id=gpu_id, server_args=arguments), Settings(debug="1"))
        groups.setdefault(made._ranks.group, []).append((replica, stage))
        made._off()
    assert sorted(groups.values()) == [[place] * tp for place in itertools.product(range(dp), range(pp))]


def test_ranks_that_hold_different_tokens_are_not_compared(worker, monkeypatch):
    monkeypatch.setattr(thread, "_tensor_parallel", lambda: (0, 2))
    for flag in ({"enable_dp_attention": True}, {"enable_dp_attention": False, "attn_dp_size": 2}):
        made = thread.DebugThread(
            SimpleNamespace(is_draft_worker=False, gpu_id=0, server_args=SimpleNamespace(**flag)), Settings(debug="1")
        )
        assert made._ranks is None
        made._off()


def test_the_child_imports_neither_torch_nor_sglang_nor_the_command_line():
    code = "import sys; sys.path.append(sys.argv[1]); import sglang_eagle3_plugin.runtime.debug.writer; print(*sys.modules)"
    argv = [sys.executable, "-I", "-S", "-c", code, str(Path(thread.__file__).parents[3])]
    modules = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split()
    names = {name.partition(".")[0] for name in modules}
    assert names <= set(sys.stdlib_module_names) | {"__main__", "sglang_eagle3_plugin"}
    assert "subprocess" not in names


def test_passes_put_aside_read_as_those_measured_by_themselves():
    number, passes, data = step(4)
    alone, values = array("f"), array("f")
    values.frombytes(data)
    # The same two passes: rows of one slot each, norms of both, then means, then first values of every row.
    verify, extend = values[:30], values[30:-2]
    alone.extend(values[-2:])
    for at, end in ((0, 1), (1, 2)):
        alone.extend([*verify[at * 12 : end * 12], *extend[at * 6 : end * 6]])
    for one, rows in ((verify, 12), (extend, 6)):
        firsts = one[2 * rows :].tolist()
        alone.extend(firsts + [99.0] * (2 * rows - len(firsts)))
    aside = [(*one[:10], at, one[11]) for one, at in zip(passes, (0, 12), strict=True)]
    assert list(reports((number, aside, alone.tobytes()), LABELS)) == list(reports((number, passes, data), LABELS))


def test_messages_survive_being_cut_anywhere():
    messages = [("steps", [step(1)]), ("status", 5, "a problem ü", 0), ("log", 20, "x" * 1000)]
    data = b"".join(frame(*message) for message in messages)
    for size in (1, 3, 7, len(data)):
        frames = Frames()
        assert [m for at in range(0, len(data), size) for m in frames.feed(data[at : at + size])] == messages
