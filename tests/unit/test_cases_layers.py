"""Every case of `tests/data/cases.json` about layers, counts, flags or norms: what its draft wants, and what stock SGLang captures.

The expectations are the file's own. Where the file gives a reading that its draft's config doesn't decide, the case stands in
UNDECIDED with the reason, and the test asserts that we say so instead of guessing.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from sglang_eagle3_plugin import boundaries, drafts, pairs, releases
from sglang_eagle3_plugin.boundaries import Convention
from sglang_eagle3_plugin.settings import Settings
from sglang_eagle3_plugin.targets import Target

CASES: dict[str, dict[str, Any]] = {
    case["id"]: case
    for case in json.loads((Path(__file__).parents[1] / "data" / "cases.json").read_text())["cases"]
    if case["id"][0] in "LAFN"
}

UNDECIDED = {
    "L02": "two drafts with the same ids and the same target were trained on opposite readings",
    "L18": "a fixture of ids without any field, name or format that tells the reading; it states its boundaries itself",
}
NO_LAYERS = {
    "F02": "is about the flag and the draft class; no layers are named",
    "A01": "num_aux_hidden_states is told as '>3', so neither ids nor count are known",
    "A02": "which of the four ids is an input was never settled; no layers are expected",
    "N01": "is about a norm; no layers are named",
    "N02": "is about two norms; no layers are named",
}
OTHER_ENGINES = {
    "L06": "a dump of vLLM, whose last state is boundary L: tested in the conventions below",
    "L08": "two backends of a trainer read one list by the two conventions: tested below",
}


def draft_of(case: dict[str, Any]) -> drafts.Draft:
    config = dict(case["draft_config"] or {})
    return drafts.read(config)


def decide(case: dict[str, Any]) -> boundaries.Decision:
    return drafts.decide_for(draft_of(case), case["num_hidden_layers"], Settings())


def spans(text: str) -> list[str]:
    """Releases meant by '<=0.5.10.post1', '0.5.11-0.5.12.post1' or '>=0.5.13', from 0.5.9 on (the cases were read from there)."""
    known = [r for r in releases.known_releases() if releases.order(r) >= releases.order("0.5.9")]
    match = re.fullmatch(r"(<=|>=)?([\d.post]+)(?:-([\d.post]+))?", text)
    assert match, text
    sign, low, high = match.groups()
    if sign == "<=":
        return [r for r in known if releases.order(r) <= releases.order(low)]
    if sign == ">=":
        return [r for r in known if releases.order(r) >= releases.order(low)]
    return [r for r in known if releases.order(low) <= releases.order(r) <= releases.order(high or low)]


def test_every_case_is_tested_or_listed_with_its_reason():
    decided = {i for i, c in CASES.items() if isinstance(c["expected_capture_layers"], list) and i not in OTHER_ENGINES}
    listed = {*UNDECIDED, *NO_LAYERS, *OTHER_ENGINES}
    assert decided - set(UNDECIDED) | listed == set(CASES)


@pytest.mark.parametrize(
    "case_id",
    [i for i, c in CASES.items() if isinstance(c["expected_capture_layers"], list) and i not in {*UNDECIDED, *OTHER_ENGINES}],
)
def test_the_wanted_boundaries_are_those_of_the_case(case_id):
    case = CASES[case_id]
    assert list(decide(case).boundaries) == case["expected_capture_layers"]


@pytest.mark.parametrize("case_id", UNDECIDED)
def test_an_undecidable_draft_is_called_so_with_both_readings(case_id):
    decision = decide(CASES[case_id])
    assert decision.boundaries is None
    assert decision.decided_by == "undecidable"
    assert dict(decision.readings) == {"output": (3, 31, 59), "boundary": (2, 30, 58)}


@pytest.mark.parametrize("case_id", ["L01", "L03", "L04", "L13"])
def test_what_stock_captures_is_what_the_case_saw(case_id):
    case = CASES[case_id]
    draft = draft_of(case)
    got = releases.captured(case["sglang_version"], case["target_arch"], draft.ids_seen_by_sglang, case["num_hidden_layers"])
    assert list(got.eager) == case["stock_capture_layers"]


@pytest.mark.parametrize("case_id", ["L02", "L17", "L18"])
def test_graphs_and_eager_passes_are_told_apart_by_release(case_id):
    case = CASES[case_id]
    ids = draft_of(case).ids_seen_by_sglang
    checked = 0
    for text, expected in case["stock_capture_layers"].items():
        for release in spans(text):
            got = releases.captured(release, case["target_arch"], ids, case["num_hidden_layers"])
            if got is None:  # 0.5.9 has no setter for Kimi-K2.5
                assert (release, case_id) == ("0.5.9", "L02")
                continue
            both = expected if isinstance(expected, dict) else {"cuda_graph": expected, "eager_prefill": expected}
            assert [list(got.graph), list(got.eager)] == [both["cuda_graph"], both["eager_prefill"]], release
            checked += 1
    assert checked > 10


def test_a_capture_past_the_last_layer_is_told_with_what_will_arrive():
    got = releases.captured("0.5.16", "GptOssForCausalLM", (24, 30, 36), 36)
    assert got.will_emit == (25, 31)
    assert any("37" in fault for fault in got.faults)
    assert releases.captured("0.5.17", "GptOssForCausalLM", (24, 30, 36), 36).will_emit == (24, 30, 36)


def test_speculators_ids_are_boundaries_where_they_stand_and_are_shifted_where_they_are_nested():
    case = CASES["L15"]
    assert list(decide(case).boundaries) == case["expected_capture_layers"]
    ids = case["draft_config"][drafts.IDS]
    for place, expected in case["stock_capture_layers"].items():
        config = {"eagle_config": {drafts.IDS: ids}} if place == "nested" else {drafts.IDS: ids, "speculators_model_type": "eagle3"}
        seen = drafts.read(config).ids_seen_by_sglang
        assert list(releases.captured("0.5.23", "Qwen3ForCausalLM", seen, 36).eager) == expected


def test_two_backends_of_a_trainer_read_one_list_by_the_two_conventions():
    case = CASES["L08"]
    ids = case["draft_config"]["eagle_config"][drafts.IDS]
    assert list(Convention.OUTPUT.to_boundaries(ids)) == case["expected_capture_layers"]["hf_backend"]
    assert list(Convention.BOUNDARY.to_boundaries(ids)) == case["expected_capture_layers"]["vllm_backend"]


def test_the_last_state_of_a_dump_is_boundary_l():
    case = CASES["L06"]
    layers = case["num_hidden_layers"]
    assert [*boundaries.default_boundaries(layers), layers] == case["expected_capture_layers"]
    assert boundaries.check(case["expected_capture_layers"], layers)


def test_the_pair_of_the_drift_release_by_release():
    draft = drafts.read({"eagle_config": {drafts.IDS: [2, 30, 58], drafts.CONVENTION: "output"}})
    target = Target("KimiK25ForConditionalGeneration", 61, 7168)
    want = pairs.wanted(draft, target, Settings())
    assert want.boundaries == (3, 31, 59)
    expected = {
        "0.5.9": ("plugin", None, None, True),
        "0.5.10": ("plugin:rewired", (3, 31, 59), (2, 30, 58), True),
        "0.5.10.post1": ("plugin:rewired", (3, 31, 59), (2, 30, 58), True),
        "0.5.11": ("native", (3, 31, 59), (3, 31, 59), False),
        "0.5.12.post1": ("native", (3, 31, 59), (3, 31, 59), False),
        "0.5.13": ("plugin:rewired", (2, 30, 58), (2, 30, 58), True),
        "0.5.23": ("plugin:rewired", (2, 30, 58), (2, 30, 58), True),
    }
    for release, row in expected.items():
        one = pairs.answer(draft, target, want, release)
        assert (one.level, one.stock, one.stock_graph, one.needs_plugin) == row, release
        assert one.plugin == (3, 31, 59)
    assert "off by one" in pairs.answer(draft, target, want, "0.5.13").why


@pytest.mark.parametrize(
    "entry", json.loads((Path(__file__).parents[1] / "data" / "cases.json").read_text())["draft_configs"], ids=str
)
def test_published_drafts_mean_what_is_known_of_them(entry):
    """Each draft of the file with ids, a depth and numbers for its boundaries; the ambiguous ones must be called ambiguous."""
    layers, truth = entry["target_layers"], entry["true_capture_boundaries"]
    if layers is None or entry["layer_ids"] is None or truth is None:
        if isinstance(truth, list) and layers:
            assert list(boundaries.default_boundaries(layers)) == truth
        return
    ids = {drafts.IDS: entry["layer_ids"]}
    config = {"eagle_config": ids} if entry["ids_location"] == "eagle_config" else ids
    if entry["convention"].startswith("boundary (speculators"):
        config["speculators_model_type"] = "eagle3"
    name = entry["model"].removesuffix(" (published)")
    decision = drafts.decide_for(drafts.read(config, named=name), layers, Settings())
    if entry["convention"] == "AMBIGUOUS":
        assert decision.boundaries is None
    else:
        assert list(decision.boundaries) == truth
