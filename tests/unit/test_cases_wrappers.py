"""Every case of `tests/data/cases.json` about wrappers (W*) and parallelism (P*): what the releases lack, and where it is tested.

What the plugin does about them is tested on loaded objects (test_completion.py, test_parallel.py) and on real engines; here stands
what each case says of the releases, which is looked up in the survey, and the list that no case falls out of.
"""

from __future__ import annotations

import ast
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from sglang_eagle3_plugin import releases, support
from sglang_eagle3_plugin.cli.models import models_of
from sglang_eagle3_plugin.runtime import parallel, sharing
from sglang_eagle3_plugin.runtime.target import Decoder, Link, StructureError

HERE = Path(__file__).parent
CASES = [c for c in json.loads((HERE.parent / "data" / "cases.json").read_text(encoding="utf-8"))["cases"] if c["id"][0] in "WP"]
TESTED = {
    "W01": ("test_cases_wrappers.py::test_w01", "test_completion.py::test_a_wrapper_with_a_logits_processor_of_its_own"),
    "W03": ("test_doctor_cases.py::test_case_gets_its_verdict", "test_completion.py::test_w10_both_hooks"),
    "W04": ("test_cases_wrappers.py::test_w04", "../engine/test_shows.py::test_the_plugin_makes_it_work"),
    "W05": ("test_cases_wrappers.py::test_w05", "test_completion.py::test_w05", "../engine/test_dead_setter.py::test_"),
    "W06": ("test_cases_wrappers.py::test_w06", "test_completion.py::test_w06"),
    "W08": ("test_completion.py::test_w08",),
    "W10": (
        "test_cases_wrappers.py::test_w10",
        "test_completion.py::test_w10",
        "../engine/test_families.py::test_families_recorded",
    ),
    "W12": ("test_cases_wrappers.py::test_w12", "test_doctor_cases.py::test_case_gets_its_verdict"),
    "P01": ("test_parallel.py::test_p01",),
    "P02": ("test_parallel.py::test_p02",),
    "P03": ("test_parallel.py::test_p03", "test_doctor.py::test_"),
    "P06": ("test_cases_wrappers.py::test_p06", "test_parallel.py::test_p06"),
}
"""Case -> the tests about it, by the beginning of their names."""


def lacks(release: str, class_name: str) -> list[str]:
    facts = releases.class_facts(release, class_name)
    assert facts is not None, f"{release} has no {class_name}"
    return [name for name, owner in (("setter", facts.setter), ("accessor", facts.accessor)) if owner is None]


def test_every_case_has_its_tests():
    assert set(TESTED) == {case["id"] for case in CASES}
    for tests in TESTED.values():
        for test in tests:
            file, _, name = test.partition("::")
            tree = ast.parse((HERE / file).read_text(encoding="utf-8"))
            assert any(isinstance(f, ast.FunctionDef) and f.name.startswith(name) for f in tree.body), test


def test_w01_qwen3_vl_moe_of_0_5_7_has_neither_hook_and_the_plugin_supplies_both():
    assert lacks("0.5.7", "Qwen3VLMoeForConditionalGeneration") == ["setter", "accessor"]
    found = support.support("0.5.7", "Qwen3VLMoeForConditionalGeneration")
    assert found.level == support.PLUGIN
    assert "set_eagle3_layers_to_capture and get_embed_and_head" in found.why


def test_w04_kimi_k25_got_its_hooks_in_0_5_10():
    assert lacks("0.5.9", "KimiK25ForConditionalGeneration") == ["setter", "accessor"]
    assert lacks("0.5.10", "KimiK25ForConditionalGeneration") == []


@pytest.mark.parametrize(
    ("release", "rule"), [("0.5.12.post1", "dead"), ("0.5.13", "dead"), ("0.5.20", "dead"), ("0.5.23", "plus-one")]
)
def test_w05_qwen3_5_inherits_a_setter_that_does_nothing_up_to_0_5_20(release, rule):
    facts = releases.class_facts(release, "Qwen3_5MoeForConditionalGeneration")
    assert facts.setter is not None
    assert facts.rule == rule
    assert support.support(release, "Qwen3_5MoeForConditionalGeneration").level == (
        support.PLUGIN if rule == "dead" else support.NATIVE
    )


def test_w06_half_a_pair_of_hooks_is_told_by_the_half_that_is_missing():
    assert lacks("0.5.5.post1", "MiniMaxM2ForCausalLM") == ["accessor"]
    why = support.support("0.5.5.post1", "MiniMaxM2ForCausalLM").why
    assert "supplies get_embed_and_head;" in why


@pytest.mark.parametrize("class_name", ["Mistral3ForConditionalGeneration", "PixtralForConditionalGeneration"])
def test_w10_mistral3_and_pixtral_of_0_5_23_have_the_accessor_alone(class_name):
    assert lacks("0.5.23", class_name) == ["setter"]
    assert "on to the inner model (language_model)" in support.support("0.5.23", class_name).why


def test_w12_a_missing_setter_shows_in_two_ways_and_its_call_moved_twice():
    assert [releases.release_facts(r).missing_setter for r in ("0.5.9", "0.5.20", "0.5.23")] == [
        "AttributeError",
        "AttributeError",
        "ValueError",
    ]
    places = {releases.release_facts(r).calls[-1] for r in ("0.5.10", "0.5.13", "0.5.16", "0.5.23")}
    assert len(places) == 3


class Identity:
    """A module of a stand-in stage; PPMissingLayer is SGLang's, and an identity too."""

    def __init__(self, **children):
        self._children = children

    def named_children(self):
        return list(self._children.items())


class PPMissingLayer(Identity): ...


def test_p06_a_stage_without_the_embedding_says_where_it_is():
    stack = Identity(embed_tokens=PPMissingLayer())
    decoder = Decoder((Link("", Identity(model=stack)), Link("model", stack)), stack, [])
    with pytest.raises(StructureError, match="embed_tokens lies on the first pipeline stage"):
        sharing.make_accessor(decoder, 8)


def test_p06_the_stage_is_read_from_the_group_where_the_runner_has_no_numbers():
    """As from 0.5.16 on; taken for a single stage, every stage but the last would be wired and checked as if it were the last."""
    first = SimpleNamespace(pp_group=SimpleNamespace(rank_in_group=0, world_size=2))
    last = SimpleNamespace(pp_group=SimpleNamespace(rank_in_group=1, world_size=2))
    assert [parallel.is_last_stage(runner) for runner in (first, last)] == [False, True]


@pytest.mark.parametrize("release", ["0.5.9", "0.5.13", "0.5.23"])
def test_what_no_class_is_served_by_has_a_reason_that_was_read(release):
    for row in models_of(release):
        if row["way"] == "not possible":
            assert "not found in its files" not in row["why"], row
            assert "not one of SGLang's usual shapes" not in row["why"], row
