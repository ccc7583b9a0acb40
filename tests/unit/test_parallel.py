"""Cases P*: what parallelism does to captured states is refused or said when the target has been loaded."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from sglang_eagle3_plugin.runtime import parallel
from sglang_eagle3_plugin.runtime.capture import CaptureError
from sglang_eagle3_plugin.runtime.layer_tap import LayerTap


class Module:
    def __init__(self, **children):
        self.__dict__.update(children)
        self._children = children

    def named_children(self):
        return [(name, child) for name, child in self._children.items() if isinstance(child, Module)]

    def children(self):
        return [child for _, child in self.named_children()]


class ModuleList(Module):
    def __init__(self, items):
        super().__init__(**{str(i): item for i, item in enumerate(items)})
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


class Layer(Module):
    def forward(self, positions, hidden_states, forward_batch, residual):
        hidden_states, residual = self.input_layernorm(hidden_states, residual)
        return hidden_states, residual


class CapturingLayer(Module):
    def forward(self, positions, hidden_states, forward_batch, residual, captured_last_layer_outputs=None):
        hidden_states, residual = self.input_layernorm(hidden_states, residual)
        return hidden_states, residual


class Stack(Module):
    pass


def runner(layer=Layer, start=0, pp=1, tp=1, **arguments):
    model = Module(model=Stack(layers=ModuleList([layer() for _ in range(6)]), start_layer=start))
    return SimpleNamespace(model=model, pp_size=pp, pp_rank=pp - 1, server_args=SimpleNamespace(tp_size=tp, **arguments))


def native(*captured):
    return SimpleNamespace(num_layers=6, captured=captured)


def tap():
    made = object.__new__(LayerTap)
    made.num_layers = 6
    return made


def test_p02_boundaries_on_an_earlier_stage_are_refused_by_number():
    with pytest.raises(CaptureError, match=r"boundaries \[2\].*begins with layer 3"):
        parallel.check(runner(start=3, pp=2), native(2, 4, 5))


def test_p02_boundaries_that_all_lie_on_the_last_stage_are_served():
    parallel.check(runner(start=3, pp=2), native(3, 4, 5))


def test_p06_only_the_last_stage_is_wired():
    assert parallel.is_last_stage(SimpleNamespace(pp_size=2, pp_rank=1))
    assert not parallel.is_last_stage(SimpleNamespace(pp_size=2, pp_rank=0))


def test_p01_partial_sums_are_said_for_layers_that_capture_before_the_sum(caplog):
    with caplog.at_level(logging.WARNING):
        parallel.check(runner(tp=8, enable_flashinfer_allreduce_fusion=True), native(2, 4, 5))
    assert "enable_flashinfer_allreduce_fusion" in caplog.text
    assert "28343" in caplog.text


def test_p01_nothing_is_said_where_layers_capture_after_the_sum_or_there_is_one_rank(caplog):
    with caplog.at_level(logging.WARNING):
        parallel.check(runner(CapturingLayer, tp=8, enable_flashinfer_allreduce_fusion=True), native(2, 4, 5))
        parallel.check(runner(tp=1, enable_flashinfer_allreduce_fusion=True), native(2, 4, 5))
    assert not caplog.text


@pytest.mark.parametrize("flag", [{"enable_dp_attention": True}, {"enable_dp_attention": False, "attn_dp_size": 2}])
def test_p03_dp_attention_is_said(caplog, flag):
    with caplog.at_level(logging.WARNING):
        parallel.check(runner(tp=4, **flag), native(2, 4, 5))
    assert f"{[*flag][-1]}: acceptance fell from 2.35 to 1.48" in caplog.text


@pytest.mark.parametrize(
    ("made", "named"),
    [
        (runner(pp=2), "pipeline stages"),
        (runner(tp=2, enable_flashinfer_allreduce_fusion=True), "enable_flashinfer_allreduce_fusion"),
        (runner(enable_two_batch_overlap=True), "enable_two_batch_overlap"),
        (runner(enable_torch_compile=True), "enable_torch_compile"),
        (runner(attn_cp_size=2), "attn_cp_size"),
    ],
)
def test_the_generic_tap_refuses_by_name_what_it_cannot_serve(made, named):
    with pytest.raises(CaptureError, match=named):
        parallel.check(made, tap())


@pytest.mark.parametrize("flags", [{"disable_piecewise_cuda_graph": False}, {"enable_breakable_cuda_graph": True}])
def test_the_generic_tap_turns_prefill_graphs_off_and_says_so(flags, caplog):
    made = runner(**flags)
    with caplog.at_level(logging.WARNING):
        parallel.check(made, tap())
    assert {name: getattr(made.server_args, name) for name in flags} == {name: not value for name, value in flags.items()}
    assert "prefill graphs are turned off" in caplog.text


@pytest.mark.parametrize(
    ("backend", "stack", "left"),
    [
        ("breakable", tap(), "disabled"),
        ("full", tap(), "disabled"),
        ("tc_piecewise", native(0, 4, 5), "disabled"),
        ("tc_piecewise", native(2, 4, 5), "tc_piecewise"),
        ("breakable", native(0, 4, 5), "breakable"),
        ("disabled", tap(), "disabled"),
    ],
)
def test_prefill_graphs_that_would_leave_captures_out_are_turned_off(backend, stack, left):
    made = runner(cuda_graph_config=SimpleNamespace(prefill=SimpleNamespace(backend=backend)))
    parallel.check(made, stack)
    assert made.server_args.cuda_graph_config.prefill.backend == left
