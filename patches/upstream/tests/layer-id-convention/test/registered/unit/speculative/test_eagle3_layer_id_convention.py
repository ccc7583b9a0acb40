import unittest
from types import SimpleNamespace

from sglang.srt.models.deepseek_v2 import DeepseekV2ForCausalLM
from sglang.srt.models.glm4_moe_lite import Glm4MoeLiteForCausalLM
from sglang.srt.models.gpt_oss import GptOssForCausalLM
from sglang.srt.models.llama import LlamaForCausalLM
from sglang.srt.models.qwen3 import Qwen3ForCausalLM
from sglang.srt.speculative.eagle3_config import get_layer_ids
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

register_cpu_ci(est_time=10, suite="base-a-test-cpu")

MODELS = [
    DeepseekV2ForCausalLM,
    Glm4MoeLiteForCausalLM,
    GptOssForCausalLM,
    LlamaForCausalLM,
    Qwen3ForCausalLM,
]


def _draft_config(layer_ids, convention=None):
    eagle_config = {"eagle_aux_hidden_state_layer_ids": layer_ids}
    if convention is not None:
        eagle_config["eagle_aux_hidden_state_layer_convention"] = convention
    return SimpleNamespace(eagle_config=eagle_config)


def _captured(model_class, draft_config):
    model = SimpleNamespace(
        pp_group=SimpleNamespace(is_last_rank=True),
        config=SimpleNamespace(num_hidden_layers=61),
        model=SimpleNamespace(),
    )
    model_class.set_eagle3_layers_to_capture(model, get_layer_ids(draft_config))
    return model.model.layers_to_capture


class TestEagle3LayerIdConvention(CustomTestCase):
    def test_every_model_obeys_the_stated_convention(self):
        for model_class in MODELS:
            for layer_ids, convention, captured in [
                ([2, 30, 58], "output", [3, 31, 59]),
                ([1, 29, 57], "output", [2, 30, 58]),
                ([2, 30, 58], "boundary", [2, 30, 58]),
                ([1, 29, 57], "boundary", [1, 29, 57]),
                ([0, 30, 61], "boundary", [0, 30, 61]),
            ]:
                with self.subTest(model=model_class.__name__, convention=convention):
                    config = _draft_config(layer_ids, convention)
                    self.assertEqual(_captured(model_class, config), captured)

    def test_ids_without_a_convention_are_read_as_before(self):
        ids = _draft_config([2, 30, 58])
        self.assertEqual(_captured(DeepseekV2ForCausalLM, ids), [2, 30, 58])
        self.assertEqual(_captured(LlamaForCausalLM, ids), [3, 31, 59])

    def test_an_unknown_convention_is_refused(self):
        with self.assertRaisesRegex(ValueError, "'output' or 'boundary'"):
            get_layer_ids(_draft_config([2, 30, 58], "input"))


if __name__ == "__main__":
    unittest.main()
