import unittest
from types import SimpleNamespace

from sglang.srt.speculative.eagle3_config import check_algorithm
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

register_cpu_ci(est_time=1, suite="base-a-test-cpu")


class TestEagle3AlgorithmGuard(CustomTestCase):
    def test_an_eagle3_draft_under_eagle_is_refused(self):
        for name in ("LlamaForCausalLMEagle3", "Eagle3DeepseekV2ForCausalLM"):
            with self.assertRaisesRegex(ValueError, "EAGLE3"):
                check_algorithm(SimpleNamespace(architectures=[name]), is_eagle3=False)

    def test_other_pairs_pass(self):
        for name, is_eagle3 in [
            ("LlamaForCausalLMEagle3", True),
            ("LlamaForCausalLMEagle", False),
            ("DeepseekV3ForCausalLMNextN", False),
        ]:
            check_algorithm(SimpleNamespace(architectures=[name]), is_eagle3=is_eagle3)
        check_algorithm(SimpleNamespace(architectures=None), is_eagle3=False)


if __name__ == "__main__":
    unittest.main()
