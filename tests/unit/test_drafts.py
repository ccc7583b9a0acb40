"""Draft configs: whatever stands in one, the answer is a draft or a documented error."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from sglang_eagle3_plugin import drafts, releases, targets
from sglang_eagle3_plugin.boundaries import BoundaryError, Convention
from sglang_eagle3_plugin.drafts import CONVENTION, IDS, DraftError
from sglang_eagle3_plugin.settings import Settings

NESTED = "eagle_config"

odd = st.sampled_from(
    [None, True, False, 0, -1, 3, 10**30, 2.0, float("nan"), float("inf"), "", "1,2,3", "ü" * 300, [], [[1], 2], ["2"], [1.0],
     [None], [10**30], [True, 2], {}, {"a": 1}, [{}], list(range(20))],
)  # fmt: skip
ids = st.one_of(st.lists(st.integers(-3, 66), max_size=6), odd)
nested = st.one_of(
    st.fixed_dictionaries(
        {},
        optional={
            IDS: ids,
            "aux_hidden_state_layer_ids": ids,
            CONVENTION: st.one_of(st.sampled_from(["output", "boundary"]), odd),
            "use_aux_hidden_state": st.one_of(st.booleans(), odd),
        },
    ),
    odd,
)
configs = st.fixed_dictionaries(
    {},
    optional={
        NESTED: nested,
        IDS: ids,
        "aux_hidden_state_layer_ids": ids,
        "aux_hidden_states_layer_ids": ids,
        "architectures": st.one_of(st.just(["LlamaForCausalLMEagle3"]), odd),
        "num_aux_hidden_states": st.one_of(st.integers(0, 8), odd),
        "speculators_model_type": odd,
        "_name_or_path": st.one_of(st.sampled_from([*drafts.known_drafts()]), odd),
        "model": odd,
    },
)
user = st.builds(
    Settings,
    layer_convention=st.one_of(st.none(), st.sampled_from(Convention)),
    capture_boundaries=st.one_of(st.none(), st.lists(st.integers(-2, 66), max_size=4).map(tuple)),
)


@hypothesis_settings(max_examples=10_000, deadline=None)
@given(configs, st.integers(1, 64), user, st.sampled_from(releases.known_releases()), st.sampled_from(releases.class_names()))
def test_any_config_is_answered_or_refused_with_a_documented_error(config, layers, chosen, release, class_name):
    try:
        draft = drafts.read(config)
    except DraftError as error:
        message = str(error)
    else:
        message = ""
    assert "\n" not in message
    assert len(message) < 200
    if message:
        return
    got = releases.captured(release, class_name, draft.ids_seen_by_sglang, layers)
    assert got is None or set(got.will_emit) <= set(range(layers + 1))
    try:
        decision = drafts.decide_for(draft, layers, chosen)
    except BoundaryError:
        return
    if decision.boundaries is not None:
        assert list(decision.boundaries) == sorted(set(decision.boundaries))
        assert all(0 <= b <= layers for b in decision.boundaries)
    else:
        assert {name for name, _ in decision.readings} == {"output", "boundary"}


@given(st.lists(st.integers(0, 30), unique=True, min_size=1, max_size=6).map(sorted), st.sampled_from(Convention))
def test_a_stated_convention_is_taken_literally(boundaries, convention):
    config = {NESTED: {IDS: list(convention.to_ids(boundaries)), CONVENTION: convention.value}}
    assert drafts.decide_for(drafts.read(config), 30, Settings()).boundaries == tuple(boundaries)


@pytest.mark.parametrize(
    ("config", "boundaries", "by"),
    [
        ({}, (2, 30, 58), "default"),
        ({NESTED: None}, (2, 30, 58), "default"),
        ({NESTED: {IDS: [1, 29, 57]}}, (2, 30, 58), "pattern"),
        ({NESTED: {IDS: [-1, 29, 57]}}, (0, 30, 58), "range"),
        ({NESTED: {IDS: [3, 30, 61]}}, (3, 30, 61), "range"),
        ({NESTED: {IDS: [2, 30, 58], "use_aux_hidden_state": False}}, (), "draft config"),
        ({"speculators_model_type": "eagle3", IDS: [2, 30, 58]}, (2, 30, 58), "format"),
        ({"speculators_model_type": "eagle3", "aux_hidden_state_layer_ids": [2, 30, 58, 61]}, (2, 30, 58, 61), "format"),
        ({"aux_hidden_states_layer_ids": [2, 30, 58]}, (3, 31, 59), "format"),
        ({NESTED: {IDS: [2, 30, 58]}, IDS: [3, 31, 59]}, (3, 31, 59), "format"),
        ({NESTED: {IDS: [2, 30, 58]}, "model": "lightseekorg/kimi-k2.5-eagle3-mla"}, (2, 30, 58), "provenance"),
        ({NESTED: {IDS: [5, 30, 58]}, "model": "lightseekorg/kimi-k2.5-eagle3-mla"}, None, "undecidable"),
        ({IDS: [2, 30, 58]}, None, "undecidable"),
    ],
)
def test_where_ids_stand_and_what_they_mean(config, boundaries, by):
    decision = drafts.decide_for(drafts.read(config), 61, Settings())
    assert (decision.boundaries, decision.decided_by) == (boundaries, by)


def test_sglang_sees_the_nested_list_alone():
    assert drafts.read({IDS: [1, 2, 3]}).ids_seen_by_sglang is None
    assert drafts.read({NESTED: {IDS: [1, 2, 3]}}).ids_seen_by_sglang == (1, 2, 3)
    assert drafts.read({NESTED: {IDS: []}}).ids_seen_by_sglang == ()


def test_other_lists_are_told_as_conflicts_unless_they_say_the_same():
    assert drafts.read({NESTED: {IDS: [1, 2, 3]}, IDS: [2, 3, 4]}).conflicts == ()
    (conflict,) = drafts.read({NESTED: {IDS: [1, 2, 3]}, IDS: [7, 8, 9]}).conflicts
    assert "[7, 8, 9]" in conflict


def test_the_user_outranks_the_draft_and_the_draft_its_repository():
    config = {NESTED: {IDS: [2, 30, 58], CONVENTION: "output"}, "model": "lightseekorg/kimi-k2.5-eagle3-mla"}
    draft = drafts.read(config)
    assert drafts.decide_for(draft, 61, Settings()).boundaries == (3, 31, 59)
    assert drafts.decide_for(draft, 61, Settings(layer_convention=Convention.BOUNDARY)).boundaries == (2, 30, 58)
    assert drafts.decide_for(draft, 61, Settings(capture_boundaries=(0, 61))).boundaries == (0, 61)


def test_a_repository_is_known_by_the_cache_it_lies_in(tmp_path):
    place = tmp_path / "models--lightseekorg--kimi-k2.5-eagle3-mla" / "snapshots" / "abc"
    draft = drafts.read({NESTED: {IDS: [2, 30, 58]}}, place)
    assert draft.provenance is not None
    assert "25454" in draft.provenance[1]


@pytest.mark.parametrize("name", ["eagle3_manifest.json", "manifest-w0001.jsonl"])
def test_a_manifest_beside_the_draft_names_the_boundaries(tmp_path, name):
    (tmp_path / name).write_text(json.dumps({"kind": "header", "boundaries": [3, 31, 59]}) + "\n")
    draft = drafts.read({NESTED: {IDS: [2, 30, 58]}}, tmp_path)
    decision = drafts.decide_for(draft, 61, Settings())
    assert (decision.boundaries, decision.decided_by) == ((3, 31, 59), "provenance")


def test_a_dump_of_more_boundaries_still_tells_the_readings_apart(tmp_path):
    (tmp_path / drafts.MANIFEST).write_text(json.dumps({"boundaries": [3, 10, 31, 59, 61]}))
    draft = drafts.read({NESTED: {IDS: [2, 30, 58]}}, tmp_path)
    assert drafts.decide_for(draft, 61, Settings()).boundaries == (3, 31, 59)
    # A dump of everything tells nothing, and is no reason to feed a draft everything.
    (tmp_path / drafts.MANIFEST).write_text(json.dumps({"boundaries": list(range(62))}))
    assert drafts.decide_for(drafts.read({NESTED: {IDS: [2, 30, 58]}}, tmp_path), 61, Settings()).boundaries is None
    assert drafts.decide_for(drafts.read({}, tmp_path), 61, Settings()).boundaries == (2, 30, 58)


def test_a_broken_manifest_says_nothing(tmp_path):
    (tmp_path / drafts.MANIFEST).write_text("[" * 100_000)
    assert drafts.read({}, tmp_path).recorded is None


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ({NESTED: {IDS: "1,2,3"}}, "not a list"),
        ({NESTED: {IDS: [1.0, 2, 3]}}, "whole numbers"),
        ({NESTED: {IDS: [[1], 2]}}, "whole numbers"),
        ({NESTED: {IDS: [True]}}, "whole numbers"),
        ({NESTED: {IDS: [10**30]}}, "beyond"),
        ({NESTED: [1]}, "not an object"),
        ({NESTED: {CONVENTION: "after"}}, "neither 'output' nor 'boundary'"),
        ({NESTED: {"use_aux_hidden_state": "no"}}, "neither true nor false"),
        ({"num_aux_hidden_states": -1}, "not a number of states"),
    ],
)
def test_a_malformed_field_is_named(config, word):
    with pytest.raises(DraftError, match=word):
        drafts.read(config)


def test_find_says_none_for_what_is_not_there_and_raises_for_what_is_broken(tmp_path):
    assert drafts.find(None) is None
    assert drafts.find(str(tmp_path / "none")) is None
    (tmp_path / "config.json").write_text(json.dumps({NESTED: 7}))
    with pytest.raises(DraftError):
        drafts.find(str(tmp_path))


@pytest.mark.parametrize("path", [[], ["text_config"], ["llm_config"], ["thinker_config", "text_config"], ["language_config"]])
def test_a_target_is_read_through_its_wrapper(path):
    config: dict[str, object] = {"num_hidden_layers": 61, "hidden_size": 7168}
    for key in reversed(path):
        config = {key: config}
    target = targets.read({**config, "architectures": ["Some"]})
    assert (target.architecture, target.num_layers, target.hidden_size) == ("Some", 61, 7168)


@pytest.mark.parametrize("layers", [None, 0, -1, "61", 61.0, True, 10**9])
def test_a_target_without_a_depth_is_refused(layers):
    with pytest.raises(targets.TargetError):
        targets.read({"num_hidden_layers": layers})
