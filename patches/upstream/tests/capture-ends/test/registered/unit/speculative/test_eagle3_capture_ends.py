import unittest
from types import SimpleNamespace
from unittest.mock import patch

import torch

from sglang.srt.models import llama
from sglang.srt.models.qwen2_moe import Qwen2MoeModel
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

register_cpu_ci(est_time=8, suite="base-a-test-cpu")

NUM_LAYERS = 4


def _llama_forward(layers_to_capture):
    """LlamaModel.forward with layers that add one and an identity as final norm."""

    def layer(positions, hidden_states, forward_batch, capture_output=None):
        if capture_output is not None:
            capture_output(hidden_states)
        return hidden_states + 1

    def final_norm(hidden_states, forward_batch, norm, capture=None):
        if capture is not None:
            capture(hidden_states)
        return hidden_states

    model = SimpleNamespace(
        pp_group=SimpleNamespace(is_first_rank=True, is_last_rank=True),
        layers=[layer] * NUM_LAYERS,
        start_layer=0,
        end_layer=NUM_LAYERS,
        layers_to_capture=layers_to_capture,
        norm=None,
    )
    residual_batch = SimpleNamespace(start=lambda batch: None, final_norm=final_norm)
    with patch.object(llama, "residual_batch", residual_batch):
        return llama.LlamaModel.forward(
            model, None, None, None, input_embeds=torch.zeros(1, 1)
        )


class TestEagle3CaptureEnds(CustomTestCase):
    def test_embeddings_and_last_layer_are_captured(self):
        hidden_states, captured = _llama_forward([0, 2, NUM_LAYERS])
        self.assertEqual([state.item() for state in captured], [0, 2, NUM_LAYERS])
        self.assertEqual(hidden_states.item(), NUM_LAYERS)

    def test_the_last_layer_is_left_out_when_not_asked_for(self):
        _, captured = _llama_forward([1, 2])
        self.assertEqual([state.item() for state in captured], [1, 2])

    def test_marks_follow_the_list(self):
        model = SimpleNamespace(layers=[SimpleNamespace() for _ in range(NUM_LAYERS)])
        for layers in ([0, 2, NUM_LAYERS], [1]):
            Qwen2MoeModel.set_eagle3_layers_to_capture(model, layers)
            marked = [i for i, x in enumerate(model.layers) if x._is_layer_to_capture]
            self.assertEqual(marked, [i for i in layers if i < NUM_LAYERS])


if __name__ == "__main__":
    unittest.main()
