"""A patched source tree on real engines: the same wiring and acceptance as the plugin, which then stands down."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sglang_eagle3_plugin.rig import engine, models
from sglang_eagle3_plugin.rig.engine import EngineResult, EngineSpec
from sglang_eagle3_plugin.rig.environments import Environment
from sglang_eagle3_plugin.series import catalog, transaction, tree
from tests.engine.conftest import RELEASES

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.parametrize("release", RELEASES)]

NUM_STEPS = 3


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory, environment: Callable[[str], Environment]) -> Callable[[str], dict[str, str]]:
    """Return the variables that put a patched copy of a release's package first on the path. The environment is not touched."""
    ready: dict[str, dict[str, str]] = {}

    def get(release: str) -> dict[str, str]:
        if release not in ready:
            (package,) = environment(release).python.parent.parent.glob("lib/python*/site-packages/sglang")
            root = tmp_path_factory.mktemp(f"patched-{release}")
            shutil.copytree(package, root / "sglang")
            opened, entries = tree.open_tree(root), catalog.load()
            transaction.apply(opened, tree.examine(opened, entries, release))
            assert tree.examine(opened, entries).state is tree.State.APPLIED
            ready[release] = {"PYTHONPATH": f"{root}:{engine.SITE}"}
        return ready[release]

    return get


@pytest.fixture(scope="module")
def run(environment: Callable[[str], Environment], patched: Callable[[str], dict[str, str]]) -> Callable[..., EngineResult]:
    """Run a spec on a release: with its source patched or not, with the plugin or not."""

    def call(release: str, spec: EngineSpec, *, source: bool, plugin: bool) -> EngineResult:
        variables = {**(patched(release) if source else {}), **({} if plugin else {"EAGLE3_PLUGIN": "0"})}
        result = engine.run(environment(release), replace(spec, environment={**spec.environment, **variables}))
        print(release, source, plugin, result.ok, result.boundaries, result.spec_accept_length, result.patch_states, result.error)
        return result

    return call


def _spec(root: Path, family: str, boundaries: tuple[int, ...], **draft: Any) -> EngineSpec:
    target = models.target(root / "target", family)
    return EngineSpec(target.path, models.draft(root / "draft", target, boundaries, **draft), num_steps=NUM_STEPS)


def _wirings(result: EngineResult) -> list[dict[str, Any]]:
    return [record["wiring"] for record in result.records if "wiring" in record]


def _seen(result: EngineResult) -> tuple[Any, ...]:
    return result.ok, result.boundaries, result.spec_accept_length, result.tokens


def test_patched_source_and_plugin_give_the_same_and_together_the_plugin_stands_down(
    release: str, run: Callable[..., EngineResult], tmp_path: Path
) -> None:
    # Ids 1, 4, 6 that name boundaries: every stock rule reads them as outputs of layers.
    spec = _spec(tmp_path, "kimi-k25", (1, 4, 6), convention="boundary")
    by_source = run(release, spec, source=True, plugin=False)
    by_plugin = run(release, spec, source=False, plugin=True)
    both = run(release, spec, source=True, plugin=True)
    assert (by_source.boundaries, by_source.spec_accept_length) == ((1, 4, 6), NUM_STEPS + 1), by_source.error
    assert _seen(by_plugin) == _seen(by_source), by_plugin.error
    assert _seen(both) == _seen(by_source), both.error
    assert both.patch_states["delegation-kimi-k25"] == "native"
    assert [wiring["corrected"] for wiring in _wirings(by_plugin)] == [True]
    assert [wiring["corrected"] for wiring in _wirings(both)] == [False], (
        "the source captures what is wanted: nothing is left to do"
    )


@pytest.mark.parametrize("family", ["llama", "kimi-k25", "qwen3-moe"])
def test_embeddings_and_last_layer_reach_the_draft(
    release: str, family: str, run: Callable[..., EngineResult], tmp_path: Path
) -> None:
    result = run(release, _spec(tmp_path, family, (0, 4, 8), convention="boundary"), source=True, plugin=False)
    assert (result.boundaries, result.spec_accept_length) == ((0, 4, 8), NUM_STEPS + 1), result.error


def test_layer_ids_at_the_top_level_are_read(release: str, run: Callable[..., EngineResult], tmp_path: Path) -> None:
    spec = _spec(tmp_path, "llama", (3, 5, 6))
    config = spec.draft / "config.json"  # type: ignore[operator]
    values = json.loads(config.read_text())
    values["eagle_aux_hidden_state_layer_ids"] = values.pop("eagle_config")["eagle_aux_hidden_state_layer_ids"]
    config.write_text(json.dumps(values))
    result = run(release, spec, source=True, plugin=False)
    assert (result.boundaries, result.spec_accept_length) == ((3, 5, 6), NUM_STEPS + 1), result.error


def test_an_eagle3_draft_under_eagle_is_refused_by_name(release: str, run: Callable[..., EngineResult], tmp_path: Path) -> None:
    result = run(release, replace(_spec(tmp_path, "llama", (2, 4, 5)), algorithm="EAGLE"), source=True, plugin=False)
    assert not result.ok
    assert "use --speculative-algorithm EAGLE3" in result.log
