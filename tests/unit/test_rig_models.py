"""The tiny models, as far as they can be judged without running them: tests/engine runs them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from sglang_eagle3_plugin.rig import attention, models

LAYERS = 8
TARGET = models.Target(Path("unused"), "llama", LAYERS, 256)


def stream(boundary: int) -> np.ndarray:
    """The residual stream at a boundary, as the module's docstring describes it (token 0x3a)."""
    state = np.zeros(256, np.float32)
    state[models.CONST] = models.CONST_SIZE
    state[models.A + 0x3] = state[models.B + 0xA] = models.DIGIT_SIZE
    state[models.LABELS : models.LABELS + boundary] = models.LABEL_SIZE
    return state


@given(st.lists(st.integers(0, LAYERS), min_size=2, max_size=5), st.data())
def test_a_labelled_draft_finds_fault_with_every_other_wiring(made_for: list[int], data: st.DataObject) -> None:
    fed = data.draw(st.one_of(st.just(made_for), st.lists(st.integers(0, LAYERS), min_size=len(made_for), max_size=len(made_for))))
    fc = models._checking_fc(made_for, TARGET)
    assert fc.shape == (256, len(made_for) * 256)
    fault = (fc @ np.concatenate([stream(k) for k in fed]))[models.DRAFT_ERROR]
    if fed == made_for:
        assert abs(fault) < 1e-5
    else:
        assert fault >= 0.99


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("theta", [10000.0, 50000.0])
def test_attention_picks_one_token(theta: float, offset: int) -> None:
    frequency = theta ** (-2 * np.arange(attention.PAIRS) / 64)
    size = attention._amplitude(frequency, offset, scale=1 / 8)
    back = np.arange(600)
    scores = size**2 / 8 * np.cos(np.outer(back - offset, frequency)).sum(axis=1)
    weights = np.exp(scores - scores.max())
    assert weights[offset] / weights.sum() > 1 - 1e-12


def test_tokens_follow_from_the_last_two() -> None:
    assert models.continuation([17], 2) == [models.next_token(17, 17), models.next_token(17, models.next_token(17, 17))]
    long = models.continuation([200, 3, 77], 40)
    assert set(long) <= set(range(models.TOKENS))
    assert len(set(long)) > 5
    assert models.next_token(1 << 4, 5) != models.next_token(2 << 4, 5)
    assert models.next_token(16, 5) != models.next_token(16, 6)


@pytest.mark.parametrize("family", models.FAMILIES)
def test_a_target_on_disk(tmp_path: Path, family: str) -> None:
    made = models.target(tmp_path / "täget", family)
    config = json.loads((made.path / "config.json").read_text(encoding="utf-8"))
    assert config.get("text_config", config)["num_hidden_layers"] == LAYERS == made.labels.count
    assert models.labels_of(made.path) == made.labels
    weights = load_file(str(made.path / "model.safetensors"))
    assert {w.dtype for w in weights.values()} == {np.dtype("float32")}
    # Nothing but layer i's attention writes label i.
    writers = {name: w for name, w in weights.items() if w.ndim == 2 and name.endswith(("o_proj.weight", "down_proj.weight"))}
    for name, w in writers.items():
        written = np.flatnonzero(np.abs(w[models.LABELS : models.LABELS + LAYERS]).sum(axis=1)).tolist()
        layer = int(name.split("layers.")[1].split(".")[0])
        assert written == ([layer] if name.endswith("o_proj.weight") else [])


def test_a_family_or_depth_that_there_is_not(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="families: llama"):
        models.target(tmp_path, "gpt-2")
    with pytest.raises(ValueError, match="with 0 layers"):
        models.target(tmp_path, "llama", layers=0)


@pytest.mark.parametrize(
    ("given_ids", "convention", "written", "stated"),
    [
        (None, None, [2, 4, 5], None),
        (None, "output", [2, 4, 5], "output"),
        (None, "boundary", [3, 5, 6], "boundary"),
        ((1, 2, 3), "boundary", [1, 2, 3], "boundary"),
        ((), None, None, None),
    ],
)
def test_ids_of_a_draft(
    tmp_path: Path, given_ids: tuple[int, ...] | None, convention: str | None, written: list[int] | None, stated: str | None
) -> None:
    models.draft(tmp_path, TARGET, (3, 5, 6), ids=given_ids, convention=convention)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    eagle = config["eagle_config"]
    assert eagle.get("eagle_aux_hidden_state_layer_ids") == written
    assert eagle.get("eagle_aux_hidden_state_layer_convention") == stated


@pytest.mark.parametrize("mla", [False, True])
@pytest.mark.parametrize("kind", ["labelled", "random"])
def test_the_number_of_slots_is_free(tmp_path: Path, kind: str, mla: bool) -> None:
    models.draft(tmp_path, TARGET, (0, 2, 4, 8), kind=kind, mla=mla)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert load_file(str(tmp_path / "model.safetensors"))["fc.weight"].shape == (256, 4 * 256)
    assert config["num_aux_hidden_states"] == 4
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [-1, 1, 3, 7]


def test_a_draft_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"0\.\.8"):
        models.draft(tmp_path, TARGET, (2, 9))
    with pytest.raises(ValueError, match="or more boundaries"):
        models.draft(tmp_path, TARGET, (2,))
    with pytest.raises(ValueError, match="labelled, unsure, random"):
        models.draft(tmp_path, TARGET, kind="good")
    with pytest.raises(ValueError, match="sideways"):
        models.draft(tmp_path, TARGET, convention="sideways")


def test_an_unsure_draft_prefers_another_token_after_every_even_digit(tmp_path: Path) -> None:
    head = load_file(str(models.draft(tmp_path, TARGET, kind="unsure") / "model.safetensors"))["lm_head.weight"]
    for before, last in [(0x10, 0x32), (0xA4, 0x2E), (0x10, 0x33), (0xA4, 0x2F)]:
        state = np.zeros(256, np.float32)
        state[models.B + last % 16] = state[models.PREVIOUS_A + before // 16] = 1
        best = np.argsort(-(head @ state), kind="stable")[:2].tolist()
        right = models.next_token(before, last)
        assert best.index(right) == (1 if last % 2 == 0 else 0)
