"""A wrapper of a shape that nobody has seen: the server goes on with one warning; under EAGLE3_STRICT=1 it stops, saying why."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sglang_eagle3_plugin.rig import engine, models
from sglang_eagle3_plugin.rig.engine import EngineSpec

from .conftest import OLDEST, RELEASES

pytestmark = [pytest.mark.engine, pytest.mark.skipif(OLDEST not in RELEASES, reason=f"shown on {OLDEST}")]

SITES = os.pathsep.join((str(Path(__file__).parent / "odd_site"), str(engine.SITE)))
GREEDY = tuple(tuple(models.continuation(prompt, 8)) for prompt in engine.PROMPTS)


def odd(tiny, **variables: str) -> EngineSpec:
    environment = {"PYTHONPATH": SITES, "EAGLE3_TEST_RIG_SITE": str(engine.SITE), **variables}
    draft = tiny.draft("llama", "good", (3, 5, 6), convention="output")
    return EngineSpec(tiny.target("llama").path, draft, environment=environment)


@pytest.fixture(scope="module", autouse=True)
def all_started(runs, tiny):
    runs.start(OLDEST, odd(tiny))
    runs.start(OLDEST, odd(tiny, EAGLE3_STRICT="1"))


def warnings(log: str) -> list[str]:
    return [line for line in log.splitlines() if "patch delegation-kimi-k25 does not fit" in line]


def test_it_serves_on_with_one_warning(runs, tiny):
    result = runs(OLDEST, odd(tiny))
    assert result.ok, result.error
    assert result.tokens == GREEDY
    assert result.spec_accept_length == 4.0
    (warning,) = warnings(result.log)
    for part in ("KimiK25ForConditionalGeneration", OLDEST, "its forward does not use self.language_model", "sglang-eagle3 compat"):
        assert part in warning
    assert result.patch_states["delegation-kimi-k25"] == "incompatible"


def test_strict_mode_stops_the_real_thing(runs, tiny):
    result = runs(OLDEST, odd(tiny, EAGLE3_STRICT="1"))
    assert not result.ok
    assert warnings(result.log)
    assert "EAGLE3_STRICT=1: this process stops here" in result.log
