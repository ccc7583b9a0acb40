"""Where a decoder layer keeps the residual stream, from layers written the way SGLang's families write theirs."""

from __future__ import annotations

import pytest

from sglang_eagle3_plugin.structure import Refusal, Stream, skips_layers, stream_of_layer

SUM = """
    def forward(self, positions, hidden_states, forward_batch, residual):
        if residual is None:
            residual = hidden_states
            hidden_states = self.input_layernorm(hidden_states)
        else:
            hidden_states, residual = self.input_layernorm(hidden_states, residual)
        return self.mlp(hidden_states), residual
"""
COMMUNICATOR = """
    def forward(self, positions, hidden_states, forward_batch, residual):
        hidden_states, residual = self.layer_communicator.prepare_attn(hidden_states, residual, forward_batch)
        return hidden_states, residual
"""
OVERWRITTEN = """
    def forward(self, positions, hidden_states, forward_batch, residual):
        residual = hidden_states
        hidden_states, residual = self.input_layernorm(hidden_states, residual)
        hidden_states = residual + self.self_attn(hidden_states) + self.mlp(hidden_states)
        return hidden_states, residual
"""
HIDDEN = """
    def forward(self, position_ids, forward_batch, hidden_states):
        residual = hidden_states
        return residual + self.mlp(self.input_layernorm(hidden_states))
"""
BATCH = """
    def forward(self, positions, hidden_states, forward_batch):
        hidden_states = self.attn_boundary.prepare(hidden_states, forward_batch)
        return self.ffn_boundary.finish(self.mlp(hidden_states), forward_batch)
"""


@pytest.mark.parametrize(
    ("source", "stream"),
    [(SUM, Stream.SUM), (COMMUNICATOR, Stream.SUM), (OVERWRITTEN, Stream.HIDDEN), (HIDDEN, Stream.HIDDEN), (BATCH, Stream.BATCH)],
)
def test_shapes_of_sglang(source, stream):
    assert stream_of_layer("Layer", source) is stream


def test_a_residual_that_is_overwritten_unread_is_no_part_of_the_stream():
    """Cohere's and MiniCPM's: adding the two would capture twice the stream."""
    assert stream_of_layer("CohereDecoderLayer", OVERWRITTEN) is Stream.HIDDEN


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("def forward(self, hidden_states, forward_batch, residual, deferred_norm): ...", "norm that the next layer applies"),
        ("def forward(self, hidden_states, forward_batch, loop_idx): ...", "several times"),
        ("def forward(self, hidden_states, forward_batch, cross_attention_states): ...", "come and go"),
        ("def forward(self, x, forward_batch): ...", "no hidden_states"),
        ("def forward(self, hidden_states): ...", "no forward_batch"),
        ("def forward(self, hidden_states, forward_batch, novelty): ...", "takes novelty"),
        ("def forward(self, hidden_states, forward_batch):\n    return self.altup(hidden_states)", "several streams"),
        ("def forward(self, hidden_states, forward_batch, residual):\n    return f(residual), hidden_states", "reads residual"),
        ("def forward(:", "cannot be read"),
        ("", "no forward"),
    ],
)
def test_what_fits_no_shape_is_refused_by_name_and_reason(source, why):
    refusal = stream_of_layer("OddLayer", source)
    assert isinstance(refusal, Refusal)
    assert "OddLayer" in str(refusal)
    assert why in str(refusal)


def test_branches_that_disagree_are_refused():
    source = """
        def forward(self, hidden_states, forward_batch, residual):
            if self.first:
                hidden_states, residual = self.norm(hidden_states, residual)
            else:
                residual = hidden_states
            return hidden_states, residual
    """
    assert isinstance(stream_of_layer("Layer", source), Refusal)


def test_a_stack_that_passes_layers_over():
    loop = "def forward(self, x):\n    for layer in self.layers:\n        {}x = layer(x)\n    return x\n"
    assert skips_layers(loop.format("if self.text_only: continue\n        "))
    assert not skips_layers(loop.format(""))


def test_several_streams_are_told_of_by_the_layers_class_where_its_forward_does_not():
    assert stream_of_layer("Layer", BATCH) is Stream.BATCH
    several = stream_of_layer("Layer", BATCH, "def __init__(self):\n    self.hc_attn_layer = Mixer()")
    assert isinstance(several, Refusal)
    assert "several streams" in several.reason
