import unittest
from types import SimpleNamespace
from unittest.mock import Mock

from sglang.srt.models.kimi_vl import KimiVLForConditionalGeneration
from sglang.srt.models.qwen2_audio import Qwen2AudioForConditionalGeneration
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

register_cpu_ci(est_time=8, suite="base-a-test-cpu")

WRAPPERS = [KimiVLForConditionalGeneration, Qwen2AudioForConditionalGeneration]


class TestEagle3WrapperHooks(CustomTestCase):
    def test_hooks_reach_the_language_model(self):
        for wrapper_class in WRAPPERS:
            with self.subTest(wrapper=wrapper_class.__name__):
                inner = Mock()
                inner.get_embed_and_head.return_value = ("embed", "head")
                wrapper = SimpleNamespace(language_model=inner)
                wrapper_class.set_eagle3_layers_to_capture(wrapper, [1, 2, 3])
                inner.set_eagle3_layers_to_capture.assert_called_once_with([1, 2, 3])
                self.assertEqual(
                    wrapper_class.get_embed_and_head(wrapper), ("embed", "head")
                )
                wrapper_class.set_embed_and_head(wrapper, "embed", "head")
                inner.set_embed_and_head.assert_called_once_with("embed", "head")


if __name__ == "__main__":
    unittest.main()
