"""Wiring on real SGLang: what reaches the draft is what it was trained on, on every release, read off the tensor itself.

The same ids [2, 4, 5] stand in two drafts' configs: one was trained on layer outputs (boundaries 3, 5, 6), one on boundaries
(2, 4, 5). Each says which in its config. Stock SGLang reads both alike, and from 0.5.13 on otherwise than before: one of the two
is miswired, whatever the release. Stock means here: with delegation alone, which 0.5.9 needs to run at all.
"""

from __future__ import annotations

import pytest
from packaging.version import Version

from sglang_eagle3_plugin.rig import engine, models
from sglang_eagle3_plugin.rig.engine import EngineSpec

from .conftest import NEWEST, OLDEST, RELEASES

pytestmark = pytest.mark.engine

IDS = (2, 4, 5)
TRAINED_ON = {"output": (3, 5, 6), "boundary": (2, 4, 5)}
STOCK = {"EAGLE3_DISABLE_PATCHES": "boundary-wiring"}
GREEDY = tuple(tuple(models.continuation(prompt, 8)) for prompt in engine.PROMPTS)


def stock_captures(release: str) -> tuple[int, ...]:
    """What this release's DeepSeek-family setter makes of ids [2, 4, 5]; CUDA graphs are off here (PR #25454, 0.5.13)."""
    return (3, 5, 6) if Version(release) < Version("0.5.13") else (2, 4, 5)


def spec(tiny, convention: str, **kwargs) -> EngineSpec:
    draft = tiny.draft("kimi-k25", f"says-{convention}", TRAINED_ON[convention], ids=IDS, convention=convention)
    return EngineSpec(tiny.target("kimi-k25").path, draft, **kwargs)


EDGES = (
    # family, boundaries, release in CI: boundary 0, boundary L, both, and other numbers of slots than three
    ("llama", (0, 4, 8), OLDEST),
    ("kimi-k25", (0, 4, 8), NEWEST),
    ("qwen3-moe", (0, 3, 8), OLDEST),
    ("llama", (0, 8), NEWEST),
    ("qwen3-moe", (1, 3, 5, 7, 8), NEWEST),
)
MORE_EDGES = (
    ("llama", (0, 4, 8), NEWEST),
    ("kimi-k25", (0, 4, 8), OLDEST),
    ("qwen3-moe", (0, 3, 8), NEWEST),
    ("kimi-k25", (0, 2, 4, 8), NEWEST),
    ("llama", (8,), NEWEST),
)


def edge(tiny, family: str, boundaries: tuple[int, ...]) -> EngineSpec:
    name = "at-" + "-".join(map(str, boundaries))
    # A single slot as wide as the draft: SGLang skips fc, which the check at start refuses. A random draft shows what reaches it.
    one = len(boundaries) == 1
    draft = tiny.draft(family, name, boundaries, convention="output", kind="random" if one else "labelled")
    return EngineSpec(tiny.target(family).path, draft, environment={"EAGLE3_ALLOW_MISWIRED": "1"} if one else {})


def edges_of(release: str) -> list[tuple[str, tuple[int, ...], str]]:
    every = EDGES if RELEASES == (OLDEST, NEWEST) else EDGES + MORE_EDGES
    return [case for case in every if case[2] == release]


EDGE_CASES = [case for release in RELEASES for case in edges_of(release)]


@pytest.fixture(scope="module", autouse=True)
def all_started(runs, tiny):
    for release in RELEASES:
        for convention in TRAINED_ON:
            runs.start(release, spec(tiny, convention))
            if TRAINED_ON[convention] != stock_captures(release):
                runs.start(release, spec(tiny, convention, environment=STOCK))
    for family, boundaries, release in EDGE_CASES:
        runs.start(release, edge(tiny, family, boundaries))


@pytest.mark.parametrize("convention", TRAINED_ON)
@pytest.mark.parametrize("release", RELEASES)
def test_a_draft_gets_the_boundaries_it_was_trained_on(runs, tiny, release, convention):
    result = runs(release, spec(tiny, convention))
    assert result.ok, result.error
    assert result.boundaries == TRAINED_ON[convention]
    assert result.tokens == GREEDY
    assert result.spec_accept_length == 4.0
    line = next(line for line in result.log.splitlines() if "sglang-eagle3-plugin: wiring: ids [2, 4, 5]" in line)
    assert f"convention {convention}, decided by draft config" in line
    assert f"captured {list(TRAINED_ON[convention])}" in line
    corrected = TRAINED_ON[convention] != stock_captures(release)
    assert (f"corrected from {list(stock_captures(release))}" in line) is corrected


@pytest.mark.parametrize("release", RELEASES)
def test_stock_miswires_one_of_the_two(runs, tiny, release):
    convention = next(c for c, trained in TRAINED_ON.items() if trained != stock_captures(release))
    result = runs(release, spec(tiny, convention, environment=STOCK))
    assert result.ok, result.error
    assert result.boundaries == stock_captures(release)
    assert result.tokens == GREEDY, "a miswired draft costs acceptance, never a token"
    # Acceptance length 1.0 after the first token, which prefill gives: each verification adds its one token and no draft's.
    assert [meta["spec_verify_ct"] for meta in result.meta_info] == [7, 7]


@pytest.mark.parametrize(("family", "boundaries", "release"), EDGE_CASES)
def test_edges_and_other_numbers_of_slots(runs, tiny, family, boundaries, release):
    result = runs(release, edge(tiny, family, boundaries))
    assert result.ok, result.error
    assert result.boundaries == boundaries
    assert {sight["width"] for sight in result.observed} == {len(boundaries) * tiny.target(family).hidden_size}
    assert result.tokens == GREEDY
    if len(boundaries) > 1:
        assert result.spec_accept_length == 4.0
