"""What the slots are called where our wiring is off (`EAGLE3_DISABLE_PATCHES=boundary-wiring`): read from target and draft."""

from __future__ import annotations

import json
from types import SimpleNamespace as Thing

import pytest

from sglang_eagle3_plugin.runtime.debug.labels import labels_of
from sglang_eagle3_plugin.runtime.debug.report import Labels
from sglang_eagle3_plugin.settings import Settings


class Stack:
    """A stand-in for SGLang's own capturing stack."""

    def __init__(self, captured):
        self.layers, self.layers_to_capture = [Thing() for _ in range(8)], captured

    def forward(self):
        return [i for i, _ in enumerate(self.layers) if i in self.layers_to_capture]


class Model:
    def __init__(self, *modules):
        self._modules = modules

    def modules(self):
        return [self, *self._modules]


def runner(place, *modules):
    arguments = Thing(speculative_draft_model_path=str(place), speculative_draft_model_revision=None)
    return Thing(model=Model(*modules), server_args=arguments, model_config=Thing(num_hidden_layers=8, hidden_size=64))


@pytest.mark.parametrize(
    ("eagle", "wanted"),
    [
        ({"eagle_aux_hidden_state_layer_ids": [2, 4, 5], "eagle_aux_hidden_state_layer_convention": "output"}, (3, 5, 6)),
        ({"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}, None),  # undecidable
        ({"eagle_aux_hidden_state_layer_ids": [2, 4, 50]}, None),  # impossible
        ({"eagle_aux_hidden_state_layer_ids": "2,4,5"}, None),  # malformed
    ],
)
def test_captured_is_read_from_the_stack_and_wanted_from_the_draft(tmp_path, eagle, wanted):
    (tmp_path / "config.json").write_text(json.dumps({"eagle_config": eagle}))
    assert labels_of(runner(tmp_path, Stack([2, 4, 5])), Settings()) == Labels((2, 4, 5), wanted, 64)


def test_a_target_that_captures_nothing_and_a_draft_that_is_not_here_have_no_labels(tmp_path):
    for modules in ((), (Stack([]),), (Stack([2]), Stack([3]))):
        assert labels_of(runner(tmp_path / "nowhere", *modules), Settings()) == Labels(None, None, 64)
