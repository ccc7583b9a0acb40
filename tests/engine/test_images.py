"""Show 4 of "every wrapper, then every decoder": image prompts through a wrapper with EAGLE-3 on, tokens equal to those without it.

Qwen2-VL, whose class lacks both hooks in every release: its stack captures, and the captures are delivered. The runs that were made
are recorded in tests/data/image_runs.json (`python -m tests.engine.images RELEASE`); `pytest -m slow` makes them again.
"""

from __future__ import annotations

import json

import pytest

from sglang_eagle3_plugin.rig import families, pictures
from tests.engine import images
from tests.engine.prefill import BOUNDARIES

VERIFICATIONS = 2
"""A prompt's: one token comes of the prefill, the other seven of two when all of the draft's three are accepted."""


def holds(row: dict) -> None:
    assert all("error" not in row[name] for name in ("labelled", "labelled, no draft", "noisy", "noisy, no draft")), row
    widened = (pictures.SIDE // 28) ** 2 - 1
    assert row["noisy"]["prompt_tokens"] == [len(prompt) + widened for prompt in images.PROMPTS], "a picture takes its place"
    labelled, noisy = row["labelled"], row["noisy"]
    assert labelled["tokens"] == row["labelled, no draft"]["tokens"]
    assert labelled["tokens"] == [families.continuation(prompt, images.NEW_TOKENS, tied=False) for prompt in images.PROMPTS]
    assert labelled["verifications"] == [VERIFICATIONS] * len(images.PROMPTS), "every draft token is accepted"
    assert [list(b) for b in labelled["boundaries"]] == [list(BOUNDARIES)]
    assert noisy["tokens"] == row["noisy, no draft"]["tokens"]
    assert noisy["tokens"][0] != noisy["tokens"][1], "two prompts that differ in their picture alone are continued differently"


@pytest.mark.engine
@pytest.mark.slow
def test_an_image_prompt_gives_the_same_tokens_with_eagle3_and_without(env059, runs, tmp_path):
    holds(images.facts(tmp_path, lambda spec: runs(env059.release, spec)))


RUNS = json.loads(images.RECORDED.read_text(encoding="utf-8"))["runs"]


@pytest.mark.parametrize("run", RUNS, ids=[run["release"] for run in RUNS])
def test_recorded_image_prompts(run):
    assert run["date"]
    assert run["command"]
    holds(run)
