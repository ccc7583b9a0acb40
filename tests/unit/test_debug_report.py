"""What debug says: spec, labels, verdicts, lines. Pure; measures are made by hand."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from sglang_eagle3_plugin.runtime.debug.report import Labels, Measures, Sight, human, line_of, report
from sglang_eagle3_plugin.runtime.debug.spec import Spec, SpecError, parse

LABELS = Labels((2, 4, 5), (2, 4, 5), 8)
SIGHT = Sight("target verify", True, 2, 24, "bfloat16", (("a", 0, 1), ("b", 1, 2)))
GOOD = Measures(norm=[[3.0, 5.0, 6.0], [4.0, 7.0, 8.0]], mean=[[0.1, 0.2, 0.3], [0.2, 0.3, 0.4]], first=[[1.0, -1.0]] * 3)


def words(said):
    return [verdict["verdict"] for verdict in said["verdicts"]]


def says(said):
    return " ".join(verdict["says"] for verdict in said["verdicts"])


@pytest.mark.parametrize("text", ["1", "", "on", "True", str(Spec())])
def test_the_default_spec(text):
    assert parse(text) == Spec(steps=20, every=100, values=5, requests=(), rate=20, ids=False)


def test_a_spec_reads_back_as_it_is_written():
    spec = parse("steps=0, every=1,values=64,requests=a=b,requests=cmpl-1,rate=0,ids=1")
    assert spec == Spec(0, 1, 64, ("a=b", "cmpl-1"), 0, True)
    assert parse(str(spec)) == spec


@pytest.mark.parametrize(
    "text",
    [
        "steps",
        "steps=-1",
        "steps=1.5",
        "steps=٣",
        "values=65",
        "colour=red",
        "ids=2",
        "requests=",
        "steps=5,,",
        "every=" + "9" * 50,
        "2",
    ],
)
def test_a_spec_that_does_not_parse_says_where(text):
    with pytest.raises(SpecError):
        parse(text)


def test_each_slot_has_its_boundary_and_the_numbers_of_its_tokens():
    said = report(SIGHT, GOOD, LABELS)
    assert [slot["boundary"] for slot in said["slots"]] == [2, 4, 5]
    assert said["slots"][0] == {
        "slot": 0,
        "boundary": 2,
        "label": "b2",
        "norm": 3.5,
        "norm_min": 3.0,
        "norm_max": 4.0,
        "mean": 0.15,
        "first": [1.0, -1.0],
        "nonfinite": 0,
        "zero": 0,
    }
    assert said["verdicts"] == []
    assert said["requests"] == ["a", "b"]


def test_nan_and_infinity_are_named_and_the_json_stays_json():
    bad = replace(GOOD, norm=[[3.0, math.nan, math.inf], [4.0, 7.0, math.inf]], first=[[1.0, math.nan]] * 3)
    said = report(SIGHT, bad, LABELS)
    assert words(said) == ["nan", "nan"]
    assert "slot 1 (boundary 4) holds NaN or infinity in 1 of 2 tokens" in says(said)
    assert said["slots"][1]["norm"] == 7.0
    assert said["slots"][2]["norm"] is None
    json.loads(json.dumps(said), parse_constant=lambda constant: pytest.fail(constant))


def test_a_zeroed_slot_is_named_and_a_padding_row_is_not():
    zeroed = replace(GOOD, norm=[[3.0, 0.0, 6.0], [4.0, 0.0, 8.0]])
    assert words(report(SIGHT, zeroed, LABELS)) == ["zeroed"]
    padding = replace(GOOD, norm=[[3.0, 5.0, 6.0], [0.0, 0.0, 0.0]])
    said = report(SIGHT, padding, LABELS)
    assert said["verdicts"] == []
    assert [slot["zero"] for slot in said["slots"]] == [1, 1, 1]


@pytest.mark.parametrize(
    ("captured", "wanted", "what"),
    [((3, 5, 6), (2, 4, 5), "shifted by +1"), ((2, 4, 5), (3, 5, 6), "shifted by -1"), ((2, 4, 6), (2, 4, 5), "not those")],
)
def test_boundaries_that_are_not_the_drafts_are_named(captured, wanted, what):
    said = report(SIGHT, GOOD, Labels(captured, wanted, 8))
    assert words(said) == ["shifted"]
    assert what in says(said)
    assert [slot["boundary"] for slot in said["slots"]] == list(captured)


def test_nothing_is_claimed_where_the_wanted_boundaries_are_undecided():
    assert report(SIGHT, GOOD, Labels((3, 5, 6), None, 8))["verdicts"] == []


def test_a_slot_that_repeats_another_is_named():
    twice = replace(GOOD, norm=[[3.0, 5.0, 5.0], [4.0, 7.0, 7.0]], mean=[[0.1, 0.2, 0.2], [0.2, 0.3, 0.3]])
    said = report(SIGHT, twice, LABELS)
    assert words(said) == ["shifted"]
    assert "slot 2 (boundary 5) holds the same values as slot 1 (boundary 4)" in says(said)


def test_equal_norms_alone_are_no_sameness():
    assert report(SIGHT, replace(GOOD, norm=[[3.0, 5.0, 5.0], [4.0, 7.0, 7.0]]), LABELS)["verdicts"] == []


def test_missing_auxiliary_states_are_named_by_their_width():
    one = Measures(norm=[[3.0]], mean=[[0.1]], first=[[1.0]])
    said = report(replace(SIGHT, width=8, tokens=1, spans=None), one, LABELS)
    assert words(said) == ["width"]
    assert "width 8 where 3 captured boundaries of 8 are due" in says(said)


PREFILL = replace(SIGHT, name="target prefill")


@pytest.mark.parametrize("scale", [1.0, 5.5])
def test_a_slot_that_holds_the_embeddings_is_known(scale):
    embedded = replace(GOOD, embedding_norm=[5.0 / scale, 7.0 / scale], embedding_mean=[0.2 / scale, 0.3 / scale])
    said = report(PREFILL, embedded, LABELS)
    assert words(said) == ["shifted"]
    assert "slot 1 (boundary 4) holds the embeddings of its tokens" in says(said)
    right = report(PREFILL, replace(embedded), Labels((0, 4, 5), None, 8))
    assert "slot 0 (boundary 0) does not hold the embeddings" in says(right)
    moved = replace(GOOD, embedding_norm=[3.0 / scale, 4.0 / scale], embedding_mean=[0.1 / scale, 0.2 / scale])
    said = report(PREFILL, moved, Labels((0, 4, 5), None, 8))
    assert said["verdicts"] == []
    assert said["agreement"]["embedding_slots"] == [0]


EXTEND = replace(SIGHT, name="draft extend")


def test_states_fed_to_the_draft_are_found_among_those_the_target_gave():
    gave = replace(GOOD, norm=[*GOOD.norm, [9.0, 9.5, 9.7]], mean=[*GOOD.mean, [0.5, 0.6, 0.7]])
    accepted = Measures(norm=[GOOD.norm[1], [9.0, 9.5, 9.7]], mean=[GOOD.mean[1], [0.5, 0.6, 0.7]], first=[], accepted=[1.0, 1.0])
    said = report(EXTEND, accepted, LABELS, gave)
    assert said["agreement"] == {"fed": 2, "emitted": 2}
    assert said["accepted"] == {"a": 1, "b": 1}
    assert said["after"] == "verify"
    assert said["verdicts"] == []
    other = report(EXTEND, replace(accepted, norm=[GOOD.norm[1], [9.0, 9.5, 1.0]]), LABELS, gave)
    assert words(other) == ["unpaired"]


def test_tokens_that_are_not_the_next_ones_are_named_and_the_end_of_a_request_is_not():
    sight = replace(EXTEND, tokens=5, spans=(("a", 0, 3), ("b", 3, 5)), after_prefill=True)
    rows = Measures(norm=[[1.0, 2.0, 3.0]] * 5, mean=[[0.1, 0.2, 0.3]] * 5, first=[], follows=[1.0, 1.0, 0.0, 1.0])
    said = report(sight, rows, LABELS)
    assert said["agreement"] == {"pairs": 3, "follow": 3}
    assert said["verdicts"] == []
    assert words(report(sight, replace(rows, follows=[1.0, 0.0, 0.0, 1.0]), LABELS)) == ["unpaired"]


def test_token_ids_appear_only_where_they_were_brought_along():
    assert "ids" not in report(SIGHT, GOOD, LABELS)
    assert report(SIGHT, replace(GOOD, ids=[7.0, 9.0]), LABELS)["ids"] == [7, 9]


def test_the_human_line_and_the_json_line_say_the_same():
    said = {"v": 1, "time": 1.5, "pid": 1, "rank": 0, "step": 57, "index": 1, **report(SIGHT, GOOD, LABELS)}
    line = human(said)
    assert line.startswith(
        "EAGLE3 step 57 target verify graph tokens 2 width 24 bfloat16 | b2 norm 3.5 mean 0.15 first 1 -1 | b4 norm 6 "
    )
    assert "\n" not in line
    assert line_of(json.dumps(said)) == line
    assert line_of("no json") == "no json"
    assert human({**said, "ids": [7, 9]}).endswith(" | ids 7,9")
    ranks = {"step": 5, "pass": "target verify", "verdicts": [{"verdict": "partial-sums", "says": "so"}]}
    assert human(ranks) == "EAGLE3 step 5 target verify | WRONG partial-sums: so"


def test_the_documentation_names_every_key_and_verdict():
    text = (Path(__file__).parents[2] / "docs/debug.md").read_text(encoding="utf-8")
    said = {
        **report(SIGHT, replace(GOOD, ids=[1.0]), LABELS),
        **report(EXTEND, replace(GOOD, accepted=[1.0], follows=[1.0], embedding_norm=[9.0], embedding_mean=[9.0]), LABELS, GOOD),
    }
    keys = {*said, *said["agreement"], *said["slots"][0], "v", "time", "pid", "rank", "step", "index"}
    verdicts = {"nan", "zeroed", "shifted", "width", "unpaired", "partial-sums"}
    assert {key for key in keys | verdicts if not re.search(rf"`{key}`", text)} == set()
