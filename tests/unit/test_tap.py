"""The tap: what a consumer gets, what it costs when there is none, and that its faults stay its own. Stand-ins, no torch."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from sglang_eagle3_plugin import patching
from sglang_eagle3_plugin.patches import forward_tap
from sglang_eagle3_plugin.runtime import tap
from sglang_eagle3_plugin.settings import Settings


class Seen:
    def __init__(self):
        self.passes = []

    def on_forward(self, runner, forward_batch, output):
        self.passes.append((runner, forward_batch, output))


class Broken:
    def __init__(self):
        self.calls = 0

    def on_forward(self, runner, forward_batch, output):
        self.calls += 1
        raise ValueError("no such slot")


@pytest.fixture(autouse=True)
def _quiet_tap(monkeypatch):
    monkeypatch.setattr(tap, "consumers", ())
    monkeypatch.setattr(tap, "failures", {})
    monkeypatch.setattr(tap, "_STARTERS", ())


def module(batch_class: type | None = None, result: Any = "output") -> ModuleType:
    class ModelRunner:
        def __init__(self, name):
            self.name = name

        def forward(self, forward_batch, skip_attn_backend_init=False, pp_proxy_tensors=None):
            return result

    made = ModuleType("model_runner")
    made.ModelRunner = ModelRunner
    if batch_class:
        made.ForwardBatch = batch_class
    return made


def apply(patch: patching.Patch, made: ModuleType) -> patching.Outcome:
    return patching.Ledger(Settings()).apply(patch, made)


RUNNER, DECODE, EXTEND = forward_tap.PATCHES


@pytest.mark.parametrize("call", [lambda r: r.forward("batch", pp_proxy_tensors=None), lambda r: r.forward(forward_batch="batch")])
def test_a_consumer_sees_runner_batch_and_result_and_the_caller_gets_the_result(call):
    made = module()
    assert apply(RUNNER, made).state is patching.State.APPLIED
    runner, seen = made.ModelRunner("target"), Seen()
    assert call(runner) == "output"
    tap.add(seen)
    tap.add(seen)
    assert call(runner) == "output"
    assert seen.passes == [(runner, "batch", "output")]
    tap.remove(seen)
    assert call(runner) == "output"
    assert len(seen.passes) == 1


def test_a_pair_as_older_releases_return_it_reads_like_a_model_runner_output():
    made = module(result=("logits", True))
    apply(RUNNER, made)
    seen = Seen()
    tap.add(seen)
    assert made.ModelRunner("target").forward("batch") == ("logits", True)
    assert seen.passes[0][2] == tap.PassOutput("logits", True)


def test_a_consumer_that_raises_is_dropped_counted_and_said_once_and_the_others_go_on(caplog):
    made = module()
    apply(RUNNER, made)
    broken, seen = Broken(), Seen()
    tap.add(broken)
    tap.add(seen)
    runner = made.ModelRunner("target")
    with caplog.at_level(logging.WARNING):
        assert [runner.forward("batch") for _ in range(3)] == ["output"] * 3
    assert broken.calls == 1
    assert len(seen.passes) == 3
    assert tap.failures == {"broken": 1}
    assert [r.getMessage() for r in caplog.records if "no such slot" in r.getMessage()] == [
        "sglang-eagle3-plugin: broken failed and is off in this process; serving goes on (ValueError: no such slot)."
    ]


def test_a_fault_that_cannot_be_said_reaches_no_request(monkeypatch):
    class Closed:
        def write(self, text):
            raise ValueError("I/O operation on closed file")

        flush = write

    monkeypatch.setattr(sys, "stderr", Closed())
    monkeypatch.setattr(tap.logger, "propagate", False)
    handler = logging.StreamHandler(Closed())
    tap.logger.addHandler(handler)
    try:
        tap.add(Broken())
        tap.deliver("runner", "batch", "output")
    finally:
        tap.logger.removeHandler(handler)
    assert (tap.consumers, tap.failures) == ((), {"broken": 1})


@pytest.mark.parametrize("name", tap._CAPTURE_MODE)
def test_warm_up_and_capture_of_graphs_are_not_delivered(monkeypatch, name):
    made = module()
    apply(RUNNER, made)
    seen = Seen()
    tap.add(seen)
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(is_capture_mode=True))
    made.ModelRunner("draft").forward("batch")
    assert seen.passes == []
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(is_capture_mode=False))
    made.ModelRunner("draft").forward("batch")
    assert len(seen.passes) == 1


@dataclass
class Batch:
    """0.5.9's, in one field: it does not know its requests."""

    input_ids: list

    @classmethod
    def init_new(cls, batch, runner):
        return cls(batch.input_ids)


@dataclass
class NewerBatch(Batch):
    rids: list | None = None


def test_a_batch_of_0_5_9_learns_its_requests_ids_while_somebody_looks():
    made = module(Batch)
    assert "init_new" in apply(RUNNER, made).reason
    worker_batch = SimpleNamespace(input_ids=[1], reqs=[SimpleNamespace(rid="a"), SimpleNamespace(rid="b")])
    assert tap.request_ids(made.ForwardBatch.init_new(worker_batch, None)) is None
    tap.add(Seen())
    assert tap.request_ids(made.ForwardBatch.init_new(worker_batch, None)) == ["a", "b"]


def test_a_batch_that_knows_its_requests_is_left_alone():
    assert "init_new" not in apply(RUNNER, module(NewerBatch)).reason


@pytest.mark.parametrize("method", ["replay", "execute"])
@pytest.mark.parametrize(
    ("patch", "logits"), [(DECODE, None), (EXTEND, "result")], ids=["decode gives tokens only", "extend gives states"]
)
def test_a_drafts_graph_replay_is_seen_as_a_pass_of_the_draft_runner(method, patch, logits):
    cls = type(patch.target, (), {method: lambda self, forward_batch, *more: "result"})
    made = ModuleType("graph_runner")
    setattr(made, patch.target, cls)
    assert apply(patch, made).state is patching.State.APPLIED
    graph_runner, seen = cls(), Seen()
    graph_runner.model_runner = "draft runner"
    tap.add(seen)
    assert getattr(graph_runner, method)("batch", "select") == "result"
    assert seen.passes == [("draft runner", "batch", tap.PassOutput(logits, True))]


def test_unknown_shapes_are_left_alone_and_named():
    for patch in forward_tap.PATCHES:
        outcome = apply(patch, ModuleType("other"))
        assert outcome.state is patching.State.INCOMPATIBLE
        assert "EAGLE3_DEBUG" in outcome.remedy


def test_a_starter_that_fails_costs_a_line_not_the_runner(monkeypatch, caplog):
    monkeypatch.setattr(tap, "_STARTERS", ("sglang_eagle3_plugin.runtime.no_such_module",))
    made = module()
    apply(RUNNER, made)
    assert made.ModelRunner("target").name == "target"
    assert tap.failures == {"no_such_module": 1}
