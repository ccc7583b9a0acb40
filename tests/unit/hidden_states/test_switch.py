"""The live switch of the dump without torch: what is asked for begins and ends between passes, and nothing of it stays."""

import json
import os
import socket
import subprocess
import time
from types import SimpleNamespace as Thing

import pytest

from sglang_eagle3_plugin import records
from sglang_eagle3_plugin.cli import main
from sglang_eagle3_plugin.errors import UserError
from sglang_eagle3_plugin.runtime import dump as dumps
from sglang_eagle3_plugin.runtime import dump_switch, tap
from sglang_eagle3_plugin.runtime.capture import CaptureError
from sglang_eagle3_plugin.runtime.debug import control
from sglang_eagle3_plugin.runtime.dump_target import DumpTarget, refuse_prefill_graphs
from sglang_eagle3_plugin.server import dump as server
from sglang_eagle3_plugin.settings import DumpSettings, Settings

RUNNER = object()


class Dump:
    """A dump of no engine."""

    def __init__(self, runner, directory, options):
        if options.boundaries == (99,):
            raise ValueError("boundary 99 is outside 0..8")
        self.enabled, self.ended, self.ignored, self.released = True, False, [], False
        self.known = options.boundaries or (2, 4, 5)
        self.spool, self.problem = Thing(directory=directory), ""
        self.target = self

    def ignore(self, rids):
        self.ignored += rids

    def end(self):
        self.enabled, self.ended = False, True
        tap.remove(self)
        tap.add(tap.AfterPass(RUNNER, lambda rids: self.release()))

    def release(self):
        self.released = True

    def on_forward(self, runner, forward_batch, output):
        pass


@pytest.fixture
def switch(tmp_path, monkeypatch):
    monkeypatch.setenv("EAGLE3_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setattr(tap, "consumers", ())
    monkeypatch.setattr(dumps, "current", None)
    monkeypatch.setattr(dumps, "Dump", Dump)
    return dump_switch.Switch(RUNNER, Settings(dump_dir="/default"))


def order(switch, serial=1, **changes):
    mine = {"pid": os.getpid(), "start_time": records.start_time(os.getpid()), "serial": serial, "on": True, "spec": ""}
    control.write(control.Command(**mine | changes), "dump")
    switch.look()
    switch._note()
    return switch._noted


def a_pass(*rids, runner=RUNNER):
    tap.deliver(runner, Thing(rids=rids), Thing())


def test_a_dump_begins_after_a_pass_of_the_target_and_skips_who_was_in_it(switch):
    said = order(switch, spec="3,5", file="/other")
    assert (said["serial"], said["on"], said["waiting"]) == (1, False, True)
    a_pass("x", runner=object())  # a draft's
    assert dumps.current is None
    a_pass("a", "b")
    switch._note()
    assert (switch._noted["on"], switch._noted["directory"], switch._noted["boundaries"]) == (True, "/other", [3, 5])
    assert dumps.current.ignored == ["a", "b"]
    assert tap.consumers == (dumps.current,)


def test_off_ends_it_and_gives_the_target_back_after_a_pass(switch):
    order(switch)
    a_pass()
    dump = dumps.current
    assert str(dump.spool.directory) == "/default"
    assert order(switch, serial=2, on=False)["on"] is False
    assert (dump.ended, dump.released, dumps.current) == (True, False, None)
    a_pass()
    assert dump.released
    assert tap.consumers == ()


def test_on_again_ends_the_first_and_keeps_the_captures_of_the_second(switch):
    order(switch)
    a_pass()
    first = dumps.current
    order(switch, serial=2, spec="all")
    assert first.ended
    a_pass()
    assert dumps.current not in (first, None)
    assert tap.consumers == (dumps.current,)


def test_without_a_usable_runtime_directory_there_is_no_switch_and_the_record_says_why(tmp_path, monkeypatch):
    (tmp_path / "open").mkdir(mode=0o755)
    monkeypatch.setenv("EAGLE3_RUNTIME_DIR", str(tmp_path / "open"))
    made = dump_switch.Switch(RUNNER, Settings())
    made.look()
    made._note()
    assert "there is no live switch" in made._noted["problem"]
    assert "mode 0700" in made._noted["problem"]


def test_a_fault_of_the_switch_is_counted_and_it_goes_on_looking(switch, monkeypatch, caplog):
    monkeypatch.setattr(dump_switch, "_LOOK_S", 0.01)
    monkeypatch.setattr(tap, "failures", {})
    looks = []

    def look():
        looks.append(True)
        if len(looks) == 1:
            raise RuntimeError("a fault of ours")

    monkeypatch.setattr(switch, "look", look)
    switch.start()
    until = time.monotonic() + 20
    while len(looks) < 3 and time.monotonic() < until:
        time.sleep(0.01)
    switch.stop()
    assert len(looks) >= 3
    assert tap.failures == {"dump switch": 1}
    assert "a fault of ours" in switch._noted["problem"]


def test_off_before_the_pass_came_leaves_nothing(switch):
    order(switch)
    order(switch, serial=2, on=False)
    a_pass()
    assert (dumps.current, tap.consumers) == (None, ())


def test_what_cannot_be_is_a_problem_in_the_record_and_no_dump(switch, caplog):
    order(switch, spec="99")
    a_pass()
    switch._note()
    assert "boundary 99 is outside" in switch._noted["problem"]
    assert (dumps.current, tap.consumers) == (None, ())
    assert "does not parse" in order(switch, serial=2, spec="two")["problem"]
    assert order(switch, serial=3, spec="2")["problem"] == ""
    bare = dump_switch.Switch(RUNNER, Settings())
    assert "--dir" in order(bare, serial=4)["problem"]


def test_a_dump_that_gave_up_says_why_and_can_be_begun_again(switch):
    order(switch)
    a_pass()
    failed = dumps.current
    failed.enabled, failed.problem = False, "the dump to /default has ended: No space left on device"
    switch._note()
    assert (switch._noted["on"], "No space left" in switch._noted["problem"]) == (False, True)
    order(switch, serial=2)
    a_pass()
    switch._note()
    assert (switch._noted["on"], switch._noted["problem"]) == (True, "")


def test_a_pass_that_cannot_be_read_begins_no_dump_and_is_not_waited_for(switch):
    order(switch)
    tap.deliver(RUNNER, Thing(rids=5), Thing())  # ids of a shape nobody has seen
    switch._note()
    assert (switch._noted["on"], switch._noted["waiting"]) == (False, False)
    assert "not iterable" in switch._noted["problem"]
    assert (dumps.current, tap.consumers) == (None, ())


class Module:
    """A stand-in for an nn.Module: what `DumpTarget` and `LayerStack` use of one."""

    def forward(self, x):
        return [i for i in range(8) if i in self.layers_to_capture]

    def __init__(self, *children, **attributes):
        self.children = children
        vars(self).update(attributes)

    def modules(self):
        yield self
        for child in self.children:
            yield from child.modules()


class LogitsProcessor(Module):
    def forward(self, input_ids, hidden_states, lm_head, metadata, aux_hidden_states=None):
        pass

    def register_forward_pre_hook(self, hook, with_kwargs):
        self.hook = hook
        self.order = [*vars(self).get("order", []), "put"]

        def remove():
            vars(self).pop("hook", None)  # as torch's handle: once more does nothing
            self.order.append("removed")

        return Thing(remove=remove)


def test_the_target_is_as_it_was_once_it_is_released():
    stack = Module(layers=[Module() for _ in range(8)], layers_to_capture=[])
    processor = LogitsProcessor()
    model = Module(stack, processor, capture_aux_hidden_states=False)
    model.set_eagle3_layers_to_capture = lambda ids: vars(model).update(capture_aux_hidden_states=True)
    graphs = type("Graphs", (), {"can_run": lambda self, batch: True})()
    runner = Thing(
        model=model,
        model_config=Thing(num_hidden_layers=8),
        spec_algorithm=Thing(is_none=lambda: True),
        piecewise_cuda_graph_runner=graphs,
        server_args=Thing(tp_size=1),
    )
    target = DumpTarget(runner, DumpSettings(boundaries=(2, 5)), lambda *said: None)
    assert (stack.layers_to_capture, model.capture_aux_hidden_states, graphs.can_run(None)) == ([2, 5], True, False)
    processor.hook(processor, ([7], "final", None), {"aux_hidden_states": "aux"})
    assert target.take() == {"input_ids": [7], "hidden_states": "final", "aux_hidden_states": "aux"}
    assert target.take() == {}
    target.stop()
    assert not hasattr(processor, "hook")
    assert not graphs.can_run(None), "a graph returns no captures, which the target still hands on"
    target.release()
    assert (stack.layers_to_capture, model.capture_aux_hidden_states, graphs.can_run(None)) == ([], False, True)


def a_runner(stack=None, graphs=None, **arguments):
    stack = stack or Module(layers=[Module() for _ in range(8)], layers_to_capture=[])
    model = Module(stack, LogitsProcessor(), capture_aux_hidden_states=False)
    model.set_eagle3_layers_to_capture = lambda ids: vars(model).update(capture_aux_hidden_states=True)
    return Thing(
        model=model,
        model_config=Thing(num_hidden_layers=8),
        spec_algorithm=Thing(is_none=lambda: True),
        prefill_cuda_graph_runner=graphs,
        server_args=Thing(tp_size=1, **arguments) if "tp_size" not in arguments else Thing(**arguments),
    )


def test_a_target_that_cannot_give_what_is_asked_is_as_it_was():
    runner = a_runner(graphs=type("Graphs", (), {"can_run": lambda self, batch: True})())
    with pytest.raises(CaptureError, match="final norm"):
        DumpTarget(runner, DumpSettings(boundaries=(2, 8)), lambda *said: None)
    assert runner.model.children[0].layers_to_capture == []
    assert runner.model.capture_aux_hidden_states is False
    assert runner.prefill_cuda_graph_runner.can_run(None)


def test_graphs_that_are_yet_to_be_captured_are_not():
    prefill = Thing(backend="breakable")
    DumpTarget(a_runner(cuda_graph_config=Thing(prefill=prefill)), DumpSettings(boundaries=(2, 5)), lambda *said: None)
    assert prefill.backend == "disabled"


def test_ranks_decide_alike_about_prefill_graphs():
    def graphs():
        return type("Graphs", (), {"can_run": lambda self, batch: True})()

    late = a_runner(graphs=graphs(), tp_size=2)
    with pytest.raises(CaptureError, match="start the server with EAGLE3_DUMP_DIR"):
        DumpTarget(late, DumpSettings(boundaries=(2, 5)), lambda *said: None)
    assert late.prefill_cuda_graph_runner.can_run(None)
    assert late.model.capture_aux_hidden_states is False
    early = a_runner(graphs=graphs(), tp_size=2)
    refuse_prefill_graphs(early, begun=False)  # as every rank does at the start
    target = DumpTarget(early, DumpSettings(boundaries=(2, 5)), lambda *said: None)
    target.stop()
    target.release()
    assert not early.prefill_cuda_graph_runner.can_run(None), "the other ranks' stay off too"


def test_fused_sums_are_refused_where_one_of_several_ranks_dumps():
    runner = a_runner(tp_size=2, enable_flashinfer_allreduce_fusion=True)
    with pytest.raises(CaptureError, match="enable_flashinfer_allreduce_fusion"):
        DumpTarget(runner, DumpSettings(boundaries=(2, 5)), lambda *said: None)


def test_a_hook_that_was_removed_amid_a_pass_does_no_harm():
    runner = a_runner()
    target = DumpTarget(runner, DumpSettings(boundaries=(2, 5)), lambda *said: None)
    hook = runner.model.children[1].hook
    target.stop()
    assert hook(None, ([7], "final")) is None  # torch forgets the keywords of a hook that has gone
    assert target.take() == {}


def test_a_target_that_is_stopped_while_its_hooks_move_has_none(monkeypatch):
    runner = a_runner()
    target = DumpTarget(runner, DumpSettings(boundaries=(2, 5)), lambda *said: None)
    processor = runner.model.children[1]
    processor.hook(processor, ([7], "final", None), {})
    register = processor.register_forward_pre_hook

    def meanwhile(hook, with_kwargs):
        target.stop()
        return register(hook, with_kwargs)

    monkeypatch.setattr(processor, "register_forward_pre_hook", meanwhile)
    target.take()
    assert not hasattr(processor, "hook")


def test_off_while_the_dump_begins_wins(switch, monkeypatch):
    order(switch)
    waiting = switch._waiting
    switch._off()  # between the pass and its consumer
    waiting.on_forward(RUNNER, Thing(rids=[]), None)
    assert (dumps.current, tap.consumers) == (None, ())


def test_with_a_draft_the_boundaries_are_those_of_the_first_pass_and_stay():
    stack = Module(layers=[Module() for _ in range(8)], layers_to_capture=[])
    runner = Thing(
        model=Module(stack, LogitsProcessor()),
        model_config=Thing(num_hidden_layers=8),
        spec_algorithm=Thing(is_none=lambda: False),
        server_args=Thing(tp_size=1),
    )
    said = []
    target = DumpTarget(runner, DumpSettings(boundaries=(1, 2)), lambda *words: said.append(words))
    assert target.boundaries == ()
    stack.layers_to_capture = [2, 4, 5]  # 0.5.16 and later wire it now
    assert target.boundaries == (2, 4, 5)
    assert [key for key, _ in said] == ["boundaries"]
    processor = runner.model.children[1]
    first = processor.hook
    processor.hook(processor, ([7], "final", None), {})
    assert target.take()["aux_hidden_states"] is None  # what adds the captures stands behind our hook
    assert processor.order == ["put", "removed", "put"]
    processor.hook(processor, ([7], "final", None), {})
    target.take()
    assert processor.order == ["put", "removed", "put"], "once is enough"
    assert first == processor.hook
    target.stop()
    target.release()
    assert stack.layers_to_capture == [2, 4, 5]


@pytest.fixture
def process(tmp_path, monkeypatch):
    """This process as a server's: a switch that obeys in its own thread, and its record."""
    monkeypatch.setenv("EAGLE3_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setattr(tap, "consumers", ())
    monkeypatch.setattr(dumps, "current", None)
    monkeypatch.setattr(dumps, "Dump", Dump)
    monkeypatch.setattr(dump_switch, "_LOOK_S", 0.05)
    monkeypatch.setattr(records, "_ledger", Thing(outcomes=list))
    monkeypatch.setattr(records, "_notes", {})
    running = dump_switch.Switch(RUNNER, Settings())
    running.start()
    yield os.getpid()
    running.stop()


def test_the_command_switches_and_shows(process, tmp_path, capsys):
    def run(*arguments):
        with pytest.raises(SystemExit) as stop:
            main(["hidden-states", "dump", *arguments, "--pid", str(process), "--json"])
        return stop.value.code, json.loads(capsys.readouterr().out)[0]

    assert run("status")[1]["on"] is False
    code, state = run("on", "--dir", str(tmp_path / "d"), "--boundaries", "2, 5")
    assert (code, state["waiting"]) == (0, True)
    a_pass("a")
    time.sleep(0.3)
    assert run("status")[1] | {"counts": 0} == state | {
        "counts": 0,
        "on": True,
        "waiting": False,
        "directory": str(tmp_path / "d"),
        "boundaries": [2, 5],
    }
    code, state = run("off")
    assert (code, state["on"], dumps.current) == (0, False, None)
    code, state = run("on")
    assert (code, "--dir" in state["problem"]) == (1, True)


def test_bad_boundaries_and_no_server_are_one_sentence(process):
    with pytest.raises(UserError, match="comma-separated"):
        server.switch(process, on=True, boundaries="two")
    with subprocess.Popen(["sleep", "60"]) as other:
        with pytest.raises(UserError, match=f"no process of server {other.pid} can dump"):
            server.states(other.pid)
        other.kill()


def test_an_idle_server_is_nudged_at_an_address_as_people_write_it(monkeypatch):
    monkeypatch.setattr(server, "OBEY_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(5)
        server._nudge(f"localhost:{listening.getsockname()[1]}")
        with listening.accept()[0] as asked:
            assert asked.recv(100).startswith(b"GET /health ")
