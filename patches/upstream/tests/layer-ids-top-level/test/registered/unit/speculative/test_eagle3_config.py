import unittest
from types import SimpleNamespace

from sglang.srt.speculative.eagle3_config import get_layer_ids, uses_aux_hidden_state
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

register_cpu_ci(est_time=1, suite="base-a-test-cpu")

IDS = "eagle_aux_hidden_state_layer_ids"


class TestEagle3Config(CustomTestCase):
    def test_top_level_ids_are_read(self):
        self.assertEqual(
            get_layer_ids(SimpleNamespace(**{IDS: [2, 30, 58]})), [2, 30, 58]
        )

    def test_nested_ids_come_first(self):
        config = SimpleNamespace(eagle_config={IDS: [1, 29, 57]}, **{IDS: [2, 30, 58]})
        self.assertEqual(get_layer_ids(config), [1, 29, 57])

    def test_nested_config_may_be_an_object(self):
        config = SimpleNamespace(eagle_config=SimpleNamespace(**{IDS: [1, 29, 57]}))
        self.assertEqual(get_layer_ids(config), [1, 29, 57])

    def test_no_ids(self):
        self.assertIsNone(get_layer_ids(SimpleNamespace()))
        self.assertIsNone(get_layer_ids(SimpleNamespace(eagle_config=None)))

    def test_use_aux_hidden_state(self):
        self.assertTrue(uses_aux_hidden_state(SimpleNamespace()))
        config = SimpleNamespace(eagle_config={"use_aux_hidden_state": False})
        self.assertFalse(uses_aux_hidden_state(config))


if __name__ == "__main__":
    unittest.main()
