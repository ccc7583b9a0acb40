"""The live switch, the output, the ranks, the sampling: against other users, full disks and torn writes too."""

from __future__ import annotations

import json
import logging
import os
import resource
import sys
import time
from types import SimpleNamespace

import pytest

from sglang_eagle3_plugin import records
from sglang_eagle3_plugin.runtime import tap
from sglang_eagle3_plugin.runtime.debug import control, ranks, sampling, thread
from sglang_eagle3_plugin.runtime.debug import output as output_module
from sglang_eagle3_plugin.runtime.debug.output import Output
from sglang_eagle3_plugin.runtime.debug.ranks import Ranks
from sglang_eagle3_plugin.runtime.debug.read import spans_of
from sglang_eagle3_plugin.runtime.debug.report import Labels
from sglang_eagle3_plugin.runtime.debug.spec import Spec
from sglang_eagle3_plugin.settings import Settings

pytestmark = pytest.mark.usefixtures("place")


def command(**changes) -> control.Command:
    mine = {"pid": os.getpid(), "start_time": records.start_time(os.getpid()), "serial": 1, "on": True, "spec": "steps=3"}
    return control.Command(**mine | changes)


def put(data: bytes, mode: int = 0o600) -> None:
    path = control.path_for(os.getpid())
    path.unlink(missing_ok=True)
    path.write_bytes(data)
    path.chmod(mode)


def test_a_command_is_obeyed_once():
    switch = control.ControlFile()
    assert switch.poll() is None
    control.write(command())
    assert control.path_for(os.getpid()).stat().st_mode & 0o777 == 0o600
    assert switch.poll() == command()
    assert switch.poll() is None
    control.write(command(serial=2, on=False))
    assert switch.poll() == command(serial=2, on=False)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "torn"),
        (json.dumps(vars(command())).encode()[:40], "torn"),
        (b"[" * 5000, "torn"),
        (b'{"pid": 1}', "torn"),
        (b"\xff\xfe", "torn"),
        (json.dumps(vars(command(spec="steps=many"))).encode(), "does not parse"),
        (json.dumps(vars(command(start_time=1))).encode(), "another process"),
        (json.dumps(vars(command(pid=1))).encode(), "another process"),
        (json.dumps(vars(command(on="yes"))).encode(), "no command"),
        (json.dumps(vars(command(file=5))).encode(), "no command"),
    ],
)
def test_what_is_no_command_is_said_once_and_not_obeyed(data, why):
    switch = control.ControlFile()
    put(data)
    with pytest.raises(control.ControlError, match=why):
        switch.poll()
    assert switch.poll() is None


def test_a_link_is_not_followed(place):
    switch = control.ControlFile()
    elsewhere = place / "elsewhere"
    elsewhere.write_text(json.dumps(vars(command())))
    elsewhere.chmod(0o600)
    control.path_for(os.getpid()).symlink_to(elsewhere)
    with pytest.raises(control.ControlError, match="symbolic link"):
        switch.poll()


@pytest.mark.parametrize("mode", [0o644, 0o620, 0o666])
def test_a_file_that_others_can_touch_is_not_obeyed(mode):
    switch = control.ControlFile()
    put(json.dumps(vars(command())).encode(), mode)
    with pytest.raises(control.ControlError, match="by others"):
        switch.poll()


def test_another_users_file_is_not_obeyed(monkeypatch):
    switch = control.ControlFile()
    put(json.dumps(vars(command())).encode())
    monkeypatch.setattr(os, "geteuid", lambda: os.stat(control.path_for(os.getpid())).st_uid + 1)
    with pytest.raises(control.ControlError, match="another user"):
        switch.poll()


def test_a_named_pipe_does_not_hold_the_thread_up():
    switch = control.ControlFile()
    os.mkfifo(control.path_for(os.getpid()), 0o600)
    with pytest.raises(control.ControlError, match="no regular file"):
        switch.poll()


def test_a_file_from_before_the_process_is_not_obeyed():
    control.write(command())
    os.utime(control.path_for(os.getpid()), (time.time() - 60, time.time() - 60))
    with pytest.raises(control.ControlError, match="older"):
        control.ControlFile().poll()


SAID = {"v": 1, "time": 1.0, "verdicts": []}


def test_lines_are_private_and_appended(place):
    path = place / "lines.jsonl"
    for _ in range(2):
        output = Output(str(path))
        output.write(SAID, "text")
        output.close()
    assert path.stat().st_mode & 0o777 == 0o600
    assert [json.loads(line) for line in path.read_text().splitlines()] == [SAID, SAID]


@pytest.mark.parametrize("kind", ["link", "directory", "readable", "missing directory", "pipe"])
def test_a_file_that_will_not_do_costs_one_line(place, kind, caplog):
    path = place / "lines.jsonl"
    if kind == "link":
        path.symlink_to(place / "target")
    elif kind == "directory":
        path.mkdir()
    elif kind == "readable":
        path.write_text("a user's own\n")
        path.chmod(0o644)
    elif kind == "pipe":
        os.mkfifo(path, 0o600)
    else:
        path = place / "none" / "lines.jsonl"
    output = Output(str(path))
    with caplog.at_level(logging.INFO):
        output.write(SAID, "the human line")
    assert output.problem
    assert [r.getMessage() for r in caplog.records if "the human line" in r.getMessage()] == ["the human line"]
    if kind == "readable":
        assert path.read_text() == "a user's own\n"
    if kind == "link":
        assert not (place / "target").exists()


def test_a_full_disk_costs_one_line_and_the_log_goes_on(caplog):
    output = Output(None)
    output._descriptor = os.open("/dev/full", os.O_WRONLY)
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            output.write(SAID, "the human line")
    messages = [record.getMessage() for record in caplog.records]
    assert messages.count("the human line") == 3
    assert len([m for m in messages if "No space left" in m]) == 1


def test_a_file_size_limit_costs_one_line(place, caplog):
    # A real limit of the kernel: the write comes back short.
    output = Output(str(place / "lines.jsonl"))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    import signal

    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
    try:
        for _ in range(4):
            output.write(SAID, "the human line")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert len([r for r in caplog.records if "no longer written" in r.getMessage()]) == 1


def test_a_file_that_has_grown_too_large_is_left_and_the_log_goes_on(place, monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.setattr(output_module, "_LARGEST_FILE", 1 << 10)
    path = place / "lines.jsonl"
    output = Output(str(path))
    for _ in range(40):
        output.write(SAID, "the human line")
    assert path.stat().st_size <= 1 << 10
    assert "it has reached" in output.problem
    assert caplog.text.count("is no longer written") == 1
    assert caplog.text.count("the human line") == 40


def test_a_closed_stderr_stops_nothing(place, monkeypatch):
    class Closed:
        def write(self, text):
            raise ValueError("I/O operation on closed file")

        flush = write

    handler = logging.StreamHandler(Closed())
    logger = logging.getLogger("sglang_eagle3_plugin")
    logger.addHandler(handler)
    monkeypatch.setattr(sys, "stderr", Closed())
    monkeypatch.setattr(logger, "propagate", False)
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        path = place / "lines.jsonl"
        output = Output(str(path))
        for _ in range(2):
            output.write(SAID, "the human line")
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    assert len(path.read_text().splitlines()) == 2
    assert "log cannot be written" in output.problem


def said(step: int, norm: float, mean: float = 0.1, slots: int = 2) -> dict:
    return {"step": step, "index": 1, "pass": "target verify", "slots": [{"norm": norm + i, "mean": mean} for i in range(slots)]}


def test_ranks_that_hold_partial_sums_are_named_once():
    ranks = [Ranks("9-0", rank, 3) for rank in range(3)]
    for rank in ranks:
        rank.add(said(1, 5.0))
        rank.add(said(2, 5.0 if rank.rank != 2 else 3.1))
    assert [rank.exchange() for rank in reversed(ranks)] == [
        [],
        [],
        [
            (2, "target verify", "slot 0 has norm 5 on rank 0 and 3.1 on rank 2: a sum over ranks is missing"),
            (2, "target verify", "slot 1 has norm 6 on rank 0 and 4.1 on rank 2: a sum over ranks is missing"),
        ],
    ]
    assert ranks[0].exchange() == []
    assert ranks[0].compared == 4
    for rank in ranks:
        rank.close()
    assert list(records.directory().glob("*.ranks")) == []


def test_ranks_compare_only_steps_that_both_saw_and_forgive_rounding():
    first, second = Ranks("9-0", 0, 2), Ranks("9-0", 1, 2)
    first.add(said(1, 5.0))
    second.add(said(2, 9.0))
    second.add(said(1, 5.0005))
    second.exchange()
    assert first.exchange() == []
    assert first.compared == 1


def test_ranks_that_hold_other_slots_are_named_and_one_that_has_written_nothing_is_waited_for():
    first, second = Ranks("9-0", 0, 2), Ranks("9-0", 1, 2)
    first.add(said(1, 5.0))
    assert first.exchange() == []
    second.add(said(1, 5.0, slots=3))
    second.exchange()
    assert first.exchange() == [(1, "target verify", "rank 0 holds 2 slots, rank 1 3")]


def test_ranks_keep_the_last_steps_only():
    first, second = Ranks("9-0", 0, 2), Ranks("9-0", 1, 2)
    steps = range(6 * ranks._KEPT)
    for step in steps:
        first.add(said(step, 5.0))
        second.add(said(step, 4.0))
        second.exchange()
        assert [found[0] for found in first.exchange()] == [step] * 2  # each slot, once
    assert len(first._mine) == ranks._KEPT
    assert len(first._done) <= 8 * ranks._KEPT
    assert len(json.loads((records.directory() / "9-0-1.ranks").read_text())) == ranks._KEPT


class FakeRing:
    def key(self, states):
        return (-1, 0)


class FakeStep:
    def __init__(self, number, ring):
        self.number, self.passes, self.target_ids, self.sent, self.key = number, [], None, False, (-1, 0)

    def measure(self, name, states, key, **more):
        self.passes.append((name, more))

    def take(self):
        assert self.sent
        return self.number, self.passes, b""

    def send(self):
        self.sent = True

    def arrived(self):
        return True


class States:
    shape = (2, 24)

    def dim(self):
        return 2

    def __len__(self):
        return 2


def mode(name):
    return SimpleNamespace(name=name, is_idle=lambda: name == "IDLE", is_decode=lambda: name == "DECODE")


class Serving:
    """Runs passes as an EAGLE worker does: a prefill and its draft extend; decode steps, verify, draft extend."""

    def __init__(self, monkeypatch, spec):
        monkeypatch.setattr(sampling, "Step", FakeStep)
        monkeypatch.setattr(sampling, "Ring", FakeRing)
        monkeypatch.setattr(sampling, "kept_ids", lambda ids: "ids")
        monkeypatch.setattr(sampling, "follows", lambda target, draft: [])
        self.debug = sampling.Debug(spec, Labels((2, 4, 5), None, 8), whole_vocabulary=False)
        self.target = SimpleNamespace(is_draft_worker=False, forward_pass_id=0)
        self.draft = SimpleNamespace(is_draft_worker=True)
        self.rids = ["a", "b"]
        self.ids = None
        self.spec_info = {}

    def run(self, runner, name):
        states = States()
        output = SimpleNamespace(logits_output=SimpleNamespace(hidden_states=states), can_run_graph=True)
        spec_info = SimpleNamespace(**{"hidden_states": states} | self.spec_info)
        batch = SimpleNamespace(forward_mode=mode(name), input_ids=self.ids, rids=self.rids, spec_info=spec_info)
        if not runner.is_draft_worker:
            self.target.forward_pass_id += 1
        self.debug.on_forward(runner, batch, output)

    def prefill(self):
        self.run(self.target, "EXTEND")
        self.run(self.draft, "EXTEND")

    def verify(self, decodes=2):
        for _ in range(decodes):
            self.run(self.draft, "DECODE")
        self.run(self.target, "TARGET_VERIFY")
        self.run(self.draft, "DRAFT_EXTEND")

    def steps(self):
        self.debug.collect(unfinished=True)
        seen = [(number, [name for name, _ in passes]) for number, passes, _ in self.debug.arrived]
        self.debug.arrived.clear()
        return seen


VERIFY = ["draft decode", "draft decode", "target verify", "draft extend"]


def test_a_step_is_a_target_pass_with_its_draft_passes(monkeypatch):
    serving = Serving(monkeypatch, Spec(steps=9, every=0, rate=0))
    serving.prefill()
    serving.verify()
    serving.verify(decodes=0)
    serving.run(serving.target, "IDLE")
    assert serving.steps() == [
        (1, ["target prefill", "draft extend"]),
        (2, VERIFY),
        (3, ["target verify", "draft extend"]),
    ]


def test_a_step_switched_on_in_its_middle_is_left_out(monkeypatch):
    serving = Serving(monkeypatch, Spec(steps=9, every=0, rate=0))
    serving.run(serving.draft, "DECODE")
    serving.run(serving.draft, "DECODE")
    serving.run(serving.target, "TARGET_VERIFY")
    serving.verify()
    assert [names for _, names in serving.steps()][-1] == VERIFY


def test_the_first_steps_then_each_so_many_th(monkeypatch):
    serving = Serving(monkeypatch, Spec(steps=2, every=4, rate=0))
    serving.prefill()
    for _ in range(11):
        serving.verify()
    assert [number for number, _ in serving.steps()] == [1, 2, 4, 8, 12]


def test_the_rate_leaves_steps_out_and_counts_them(monkeypatch):
    serving = Serving(monkeypatch, Spec(steps=100, every=0, rate=3))
    now = [100.0]
    monkeypatch.setattr(sampling.time, "monotonic", lambda: now[0])
    for _ in range(10):
        serving.prefill()
    assert len(serving.steps()) == 3
    assert serving.debug.left_out == 7
    now[0] += 1
    serving.verify()
    assert len(serving.steps()) == 1


def test_steps_that_nobody_takes_do_not_pile_up(monkeypatch):
    serving = Serving(monkeypatch, Spec(steps=10**6, every=0, rate=0))
    for _ in range(200):
        serving.verify()
    assert len(serving.steps()) <= sampling._PENDING + 1
    assert serving.debug.left_out >= 200 - sampling._PENDING - 1


def test_accepted_tokens_and_ids_are_brought_along(monkeypatch):
    serving = Serving(monkeypatch, Spec(steps=9, every=0, rate=0, ids=True))
    serving.spec_info = {"num_accept_tokens": [4, 1, 0]}
    serving.ids = [5, 6]
    serving.prefill()
    serving.verify()
    serving.debug.collect(unfinished=True)
    _, (_, passes, _) = serving.debug.arrived
    brought = {name: more["extra"] for name, more in passes}
    assert brought["target verify"] == [("ids", [5, 6])]
    assert brought["draft extend"] == [("accepted", [4, 1]), ("ids", [5, 6])]


def test_a_pass_without_states_is_passed_over(monkeypatch):
    serving = Serving(monkeypatch, Spec(steps=9, every=0, rate=0))
    serving.spec_info = {"hidden_states": None}
    serving.prefill()
    assert serving.steps() == [(1, ["target prefill"])]


def test_only_passes_with_the_request_count(monkeypatch):
    serving = Serving(monkeypatch, Spec(steps=2, every=0, rate=0, requests=("c",)))
    for _ in range(3):
        serving.verify()
    serving.rids = ["c", "b"]
    for _ in range(5):
        serving.verify()
    assert [number for number, _ in serving.steps()] == [4, 5]


@pytest.mark.parametrize(
    ("lengths", "rows", "spans"),
    [
        ([3, 1], 4, (("a", 0, 3), ("b", 3, 4))),
        (None, 4, (("a", 0, 2), ("b", 2, 4))),
        ([3, 3], 4, (("a", 0, 2), ("b", 2, 4))),
        (None, 5, None),
    ],
)
def test_rows_are_told_apart_by_request(lengths, rows, spans):
    assert spans_of(["a", "b"], lengths, rows) == spans


@pytest.fixture
def worker(monkeypatch):
    monkeypatch.setattr(thread, "labels_of", lambda runner, settings: Labels(None, None, 8))
    monkeypatch.setattr(thread, "_tensor_parallel", lambda: (0, 1))
    notes = {}
    monkeypatch.setattr(records, "note", notes.__setitem__)
    runner = SimpleNamespace(is_draft_worker=False)

    def make(**settings):
        made = thread.DebugThread(runner, Settings(**settings))
        return made, notes

    return make


def test_the_environment_turns_debug_on_and_a_command_switches_it(worker):
    made, notes = worker(debug="steps=7")
    assert len(tap.consumers) == 1
    assert notes["debug"]["spec"].startswith("steps=7,")
    control.write(command(serial=5, on=False))
    made._obey()
    made._note()
    assert tap.consumers == ()
    assert (notes["debug"]["on"], notes["debug"]["serial"]) == (False, 5)
    control.write(command(serial=6, spec="every=3"))
    made._obey()
    assert tap.consumers[0].spec == Spec(every=3)


@pytest.mark.parametrize("bad", ["colour=red", "steps=-1"])
def test_a_bad_spec_in_the_environment_is_one_line(worker, bad, caplog):
    _, notes = worker(debug=bad)
    assert tap.consumers == ()
    assert "EAGLE3_DEBUG is off" in notes["debug"]["problem"]
    assert len(caplog.records) == 1


def test_without_a_usable_runtime_directory_there_is_no_switch_and_debug_goes_on(worker):
    records.directory().chmod(0o755)
    made, notes = worker()
    made._obey()
    assert "there is no live switch" in notes["debug"]["problem"]
    assert "mode 0700" in notes["debug"]["problem"]
    made, notes = worker(debug="1")
    made._obey()
    assert len(tap.consumers) == 1
    assert "there is no live switch" in notes["debug"]["problem"]
    made._off()


def test_a_bad_command_is_one_line_and_leaves_debug_as_it_was(worker, caplog):
    made, notes = worker(debug="1")
    put(b"torn")
    for _ in range(3):
        made._obey()
    made._note()
    assert len(tap.consumers) == 1
    assert [r.getMessage() for r in caplog.records if "not obeyed" in r.getMessage()] != []
    assert len(caplog.records) == 1
    assert "not obeyed" in notes["debug"]["problem"]


def test_a_fault_of_a_pass_turns_debug_off_and_the_record_says_so(worker):
    made, notes = worker(debug="1")
    tap.deliver(SimpleNamespace(), SimpleNamespace(), SimpleNamespace())  # a batch without a mode: a shape nobody has seen
    assert tap.consumers == ()
    made._work(time.monotonic())
    made._note()
    assert notes["debug"]["on"] is False
    assert notes["debug"]["problem"] == "AttributeError: 'types.SimpleNamespace' object has no attribute 'forward_mode'"
    assert tap.failures == {"debug": 1}


def test_a_step_that_a_fault_cut_short_is_not_read(monkeypatch):
    serving = Serving(monkeypatch, Spec(steps=9, every=0, rate=0))
    serving.prefill()
    serving.run(serving.draft, "DECODE")
    serving.rids = 5  # no list of requests: a shape nobody has seen
    with pytest.raises(TypeError):
        serving.run(serving.draft, "DECODE")
    assert [names for _, names in serving.steps()] == [["target prefill", "draft extend"]]
    assert "TypeError" in serving.debug.problem


def test_what_cannot_be_collected_ends_debug_and_neither_its_thread_nor_its_child_stay(worker, monkeypatch):
    made, notes = worker(debug="1")

    def lost(*, unfinished):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(made._debug, "collect", lost)
    made._debug.last_pass = time.monotonic() - 1
    child = made._child
    monkeypatch.setattr(thread, "_CONTROL_S", 0.02)
    made.start()
    until = time.monotonic() + 20
    while notes["debug"]["on"] and time.monotonic() < until:
        time.sleep(0.01)
    assert "illegal memory access" in notes["debug"]["problem"]
    assert child._process.returncode is not None
    control.write(command(serial=2))
    while not notes["debug"]["on"] and time.monotonic() < until:
        time.sleep(0.01)
    assert (notes["debug"]["serial"], notes["debug"]["problem"]) == (2, "")
    made.stop()


def test_the_thread_obeys_and_ends_without_leaving_files(worker, monkeypatch):
    monkeypatch.setattr(thread, "_CONTROL_S", 0.02)
    made, _ = worker()
    made.start()
    control.write(command(serial=9))
    until = time.monotonic() + 20
    while not tap.consumers and time.monotonic() < until:
        time.sleep(0.01)
    assert tap.consumers
    made.stop()
    assert not made.is_alive()
    assert tap.consumers == ()
    assert list(records.directory().iterdir()) == []
