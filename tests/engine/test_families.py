"""Show 2 and 3 of "every wrapper, then every decoder": classes that SGLang never wired, in the release's own ModelRunner.

A few families are built and run here; what came of all of them, in three releases, is recorded in tests/data/families.json
(`python -m tests.engine.prefill RELEASE` makes it anew, some minutes a release). Whole engines with EAGLE-3 on are recorded in
tests/data/family_runs.json; one runs here, others with `SGLANG_EAGLE3_TEST_FAMILIES=gemma2,kimi-vl`.
"""

from __future__ import annotations

import json
import os

import pytest

from sglang_eagle3_plugin.rig import families
from tests.engine import acceptance
from tests.engine.prefill import BOUNDARIES, COMPARED, PROMPT_END, RECORDED, prefill

LIVE = ("kimi-vl", "qwen3-omni", "cohere", "gemma2", "phi", "llama")
"""A delegation, a native capture that is delivered, three generic taps (one whose layers overwrite ``residual``), a native one."""

RECORD = json.loads(RECORDED.read_text(encoding="utf-8"))["runs"]
NOT_WITHOUT_A_GPU = ("Found no NVIDIA driver", "No accelerator", "not compiled with CUDA", "sgl_kernel", "no stand-in")
UNKNOWN_THERE = ("does not recognize this architecture",)
DUMMY_LOADING = ("has no attribute 'shared_experts_config'",)
"""MiniCPMV of 0.5.23: SGLang's loader sets it where weights are loaded, and here none are."""


def holds(name: str, row: dict) -> None:
    family = families.family(name)
    assert row["seen"] == list(BOUNDARIES)
    assert len(set(row["constants"])) == 1, "the stream is captured once, not twice over"
    assert row["next"] == [families.following(PROMPT_END, family.tied)], "the target says what it says without us"
    if name in COMPARED:
        assert row["equal"] is True, "the generic tap's tensors are those of SGLang's own capture, bit for bit"


@pytest.mark.engine
def test_families_live(env059):
    rows = {row["name"]: row for row in prefill(env059, list(LIVE))}
    assert set(rows) == set(LIVE)
    for name, row in rows.items():
        assert "error" not in row, f"{name}: {row}"
        holds(name, row)
    assert "delegated to language_model" in rows["kimi-vl"]["completion"][0]
    assert "delivered" in rows["qwen3-omni"]["completion"][0]
    assert "generic tap" in rows["cohere"]["completion"][0]
    assert rows["llama"]["completion"] == [], "a class that has everything is left alone"


RAN = [(r, n, row) for r, run in RECORD.items() for n, row in run["families"].items() if "error" not in row]
FAILED = [(r, n, row) for r, run in RECORD.items() for n, row in run["families"].items() if "error" in row]


@pytest.mark.parametrize(("release", "name", "row"), RAN, ids=[f"{r}-{n}" for r, n, _ in RAN])
def test_families_recorded(release, name, row):
    holds(name, row)


@pytest.mark.parametrize(("release", "name", "row"), FAILED, ids=[f"{r}-{n}" for r, n, _ in FAILED])
def test_what_did_not_run_did_not_for_want_of_a_gpu_or_of_the_class(release, name, row):
    assert any(reason in row["error"] for reason in NOT_WITHOUT_A_GPU + UNKNOWN_THERE + DUMMY_LOADING), row["error"]


def test_the_record_holds_eight_wrappers_and_six_decoders_that_stock_cannot_serve():
    served = {name for r, name, row in RAN if row["completion"] and r == "0.5.9"}
    wrappers = {name for name in served if any(key.endswith("_config") for key in families.family(name).config)}
    assert len(wrappers) >= 8, sorted(wrappers)
    assert len(served - wrappers) >= 6, sorted(served - wrappers)


ENGINE_FAMILIES = os.environ.get("SGLANG_EAGLE3_TEST_FAMILIES", "phi").split(",")
PROMPTS = 2


def serves(row: dict) -> None:
    """Tokens are those of plain decoding, by the rule; all drafts are accepted, none with the boundaries shifted by one."""
    assert "error" not in row, row
    assert row["tokens_as_due"] is True
    assert row["right"] == PROMPTS * acceptance.FEWEST, "every draft token is accepted: num_steps + 1 a verification"
    assert row["shifted"] == PROMPTS * acceptance.MOST, "no draft token is accepted: one a verification"
    assert [list(b) for b in row["boundaries"]] == [[b - 1 for b in BOUNDARIES], list(BOUNDARIES)]


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize("name", ENGINE_FAMILIES)
def test_eagle3_serves_a_family(env059, runs, tmp_path, name):
    serves(acceptance.facts(name, runs(env059.release, acceptance.spec(tmp_path, name))))


RECORDED_RUNS = json.loads(acceptance.RECORDED.read_text(encoding="utf-8"))["runs"]
RUNS = [run for run in RECORDED_RUNS if "error" not in run]


@pytest.mark.parametrize("run", RUNS, ids=[f"{run['release']}-{run['family']}" for run in RUNS])
def test_recorded_engines_serve(run):
    assert run["date"]
    assert run["command"]
    serves(run)


def test_an_engine_that_did_not_serve_is_recorded_with_the_reason():
    assert all(run["reason"] for run in RECORDED_RUNS if "error" in run)


def test_the_recorded_engines_hold_eight_wrappers_and_six_decoders_that_stock_cannot_serve():
    served = {run["family"] for run in RUNS if run["release"] == "0.5.9" and run["completion"]}
    wrappers = {name for name in served if any(key.endswith("_config") for key in families.family(name).config)}
    assert len(wrappers) >= 8, sorted(wrappers)
    assert len(served - wrappers) >= 6, sorted(served - wrappers)
    assert wrappers >= {"kimi-vl", "internvl", "qwen2-audio", "pixtral", "llava-mistral3", "minicpmv", "deepseek-vl2", "qwen3-omni"}
    assert served - wrappers >= {"phi", "gemma2", "olmo2", "granite", "cohere", "starcoder2"}
