"""The setter that stands in for a target's own, on a stand-in stack: what it captures, says, refuses. Real: tests/engine."""

from __future__ import annotations

import json
from types import SimpleNamespace as Thing

import pytest

from sglang_eagle3_plugin import records
from sglang_eagle3_plugin.runtime import stacks, wiring
from sglang_eagle3_plugin.runtime.capture import CaptureError
from sglang_eagle3_plugin.settings import Settings


class Stack:
    """Captures what it is told, of six layers."""

    num_layers = 6
    captured = ()

    def capture(self, boundaries):
        if 5 in boundaries:
            raise CaptureError("the stack would not capture 5")
        self.captured = tuple(boundaries)


class Target:
    """Its own setter reads ids as boundaries, and trips over one past the last layer."""

    def __init__(self):
        stacks.keep(self, Stack())

    def set_eagle3_layers_to_capture(self, layer_ids=None):
        if layer_ids and max(layer_ids) > 5:
            raise IndexError("list index out of range")
        stacks.stack_of(self, 6).captured = tuple(layer_ids or (2, 3, 4))


@pytest.fixture
def notes(monkeypatch):
    noted = {}
    monkeypatch.setattr(records, "note", noted.__setitem__)
    return noted


@pytest.fixture
def loaded(tmp_path, notes, caplog):
    """A target that has been loaded and wired, with a draft of these ids."""
    caplog.set_level("INFO")

    def load(ids, settings=None, model=None, rank=0, **config):
        eagle = {"eagle_aux_hidden_state_layer_ids": ids} if ids else {}
        (tmp_path / "config.json").write_text(json.dumps({"eagle_config": eagle | config}))
        arguments = Thing(speculative_draft_model_path=str(tmp_path), speculative_draft_model_revision=None)
        made = Thing(
            model=model or Target(),
            server_args=arguments,
            model_config=Thing(num_hidden_layers=6),
            pp_size=2 if rank else 1,
            pp_rank=0,
        )
        wiring.attach(made, settings or Settings())
        return made.model

    return load


OUTPUT = {"eagle_aux_hidden_state_layer_convention": "output"}


def test_what_the_draft_wants_is_captured_whoever_calls_and_said_once(loaded, notes, caplog):
    model = loaded([1, 2, 3], **OUTPUT)
    assert wiring.wired(model) is None
    for ids in (None, [1, 2, 3], None):
        model.set_eagle3_layers_to_capture(ids)
        assert stacks.stack_of(model, 6).captured == (2, 3, 4)
    assert wiring.wired(model).wanted == (2, 3, 4)
    assert notes["wiring"]["stock"] == [1, 2, 3]
    assert notes["wiring"]["corrected"] is True
    assert caplog.text.count("wanted boundaries [2, 3, 4], captured [2, 3, 4] (corrected from [1, 2, 3])") == 1


def test_a_setter_that_trips_over_the_ids_is_corrected_all_the_same(loaded, caplog):
    model = loaded([1, 2, 5], **OUTPUT)
    stacks.stack_of(model, 6).capture = lambda boundaries: vars(stacks.stack_of(model, 6)).update(captured=tuple(boundaries))
    model.set_eagle3_layers_to_capture([2, 3, 6])
    assert stacks.stack_of(model, 6).captured == (2, 3, 6)
    assert "SGLang's own setter fails on these ids" in caplog.text


def test_what_cannot_be_decided_stays_as_the_release_has_it_with_a_warning(loaded, notes, caplog):
    model = loaded([2, 3, 4])
    model.set_eagle3_layers_to_capture([2, 3, 4])
    assert stacks.stack_of(model, 6).captured == (2, 3, 4)
    assert notes["wiring"]["wanted"] is None
    assert "wiring undecided" in caplog.text
    assert "Set EAGLE3_LAYER_CONVENTION=output or =boundary" in caplog.text
    assert wiring.wired(model).wanted is None


@pytest.mark.parametrize(
    ("ids", "called_with", "convention", "why"),
    [
        ([1, 2, 6], [1, 2, 6], OUTPUT, "boundary 7 is outside 0..6"),
        ([1, 3, 4], [1, 3, 4], OUTPUT, "the stack would not capture 5"),
        ([2, 3, 4], [2, 3, 6], {}, "this SGLang's own setter fails on these ids (IndexError"),
    ],
)
def test_a_wiring_that_cannot_be_right_stops_the_process_unless_the_user_says_otherwise(
    loaded, caplog, ids, called_with, convention, why
):
    with pytest.raises(SystemExit) as stopped:
        loaded(ids, **convention).set_eagle3_layers_to_capture(called_with)
    assert why in str(stopped.value)
    assert "EAGLE3_ALLOW_MISWIRED=1 to serve all the same" in str(stopped.value)
    loaded(ids, Settings(allow_miswired=True), **convention).set_eagle3_layers_to_capture(called_with)
    assert why in caplog.text
    assert "serving all the same" in caplog.text


def test_a_fault_of_ours_leaves_the_releases_own_reading(loaded, monkeypatch, caplog):
    model = loaded([1, 2, 3], **OUTPUT)
    monkeypatch.setattr(wiring.parallel, "check", lambda runner, stack: 1 / 0)
    model.set_eagle3_layers_to_capture([1, 2, 3])
    assert "wiring failed; layer ids stay as SGLang reads them" in caplog.text


def test_a_stage_before_the_last_is_left_to_sglang(loaded, notes):
    model = loaded([1, 2, 3], rank=1, **OUTPUT)
    model.set_eagle3_layers_to_capture([1, 2, 3])
    assert stacks.stack_of(model, 6).captured == (1, 2, 3)
    assert notes == {}


def test_a_target_that_got_no_setter_is_said_before_sglang_stops(loaded, caplog):
    model = loaded([1, 2, 3], model=Thing())
    assert vars(model) == {}
    assert "has no set_eagle3_layers_to_capture and no patch gave it one" in caplog.text


def test_a_draft_that_is_not_here_yet_is_left_to_sglang(tmp_path, caplog):
    model = Target()
    arguments = Thing(speculative_draft_model_path="some/draft-that-is-nowhere", speculative_draft_model_revision=None)
    wiring.attach(Thing(model=model, server_args=arguments, model_config=Thing(num_hidden_layers=6)), Settings())
    assert "set_eagle3_layers_to_capture" not in vars(model)
    assert "is not on this machine yet" in caplog.text
