"""Kimi-K2.5 with EAGLE-3 on real SGLang: dead without the plugin in 0.5.9, native later, the tokens of greedy decoding always."""

from __future__ import annotations

import json
import subprocess

import pytest

from sglang_eagle3_plugin.rig import engine, models
from sglang_eagle3_plugin.rig.engine import EngineSpec

from .conftest import NEWEST, OLDEST, RELEASES

pytestmark = pytest.mark.engine

WITHOUT_HOOKS = (OLDEST,)
"""Releases whose KimiK25ForConditionalGeneration lacks the EAGLE-3 hooks."""
HOOKS = ("set_eagle3_layers_to_capture", "get_embed_and_head", "set_embed_and_head")
BOUNDARIES = (3, 5, 6)
GREEDY = tuple(tuple(models.continuation(prompt, 8)) for prompt in engine.PROMPTS)


def kimi(tiny, kind="labelled", **kwargs) -> EngineSpec:
    """The run of the demo, or the same with a draft of another kind."""
    draft = tiny.draft("kimi-k25", kind, BOUNDARIES, kind=kind, convention="output")
    return EngineSpec(tiny.target("kimi-k25").path, draft, **kwargs)


TREES = [(release, kind, topk) for release in RELEASES for kind in ("unsure", "random") for topk in (2, 4)]
if RELEASES == (OLDEST, NEWEST):  # CI has time for half: each release, kind and width once
    TREES = [(OLDEST, "unsure", 2), (OLDEST, "random", 4), (NEWEST, "unsure", 4), (NEWEST, "random", 2)]


# What each test that reads a shared run asks for, from the tiny models and the test's own parameters.
SPECS = {
    "test_stock_dies": lambda tiny, release: kimi(tiny).stock(),
    "test_the_plugin_makes_it_work": lambda tiny, release: kimi(tiny),
    "test_plain_decoding_follows_the_rule": lambda tiny, release: EngineSpec(tiny.target("kimi-k25").path),
    "test_trees_change_no_token": lambda tiny, release, kind, topk: kimi(tiny, kind, topk=topk),
}


@pytest.fixture
def result(request, runs, tiny):
    """The run that a test asks for. The first to ask queues those of all selected tests, so that two go at a time."""
    for item in request.session.items:
        if item.module is request.module and item.originalname in SPECS:
            params = item.callspec.params
            runs.start(params["release"], SPECS[item.originalname](tiny, **params))
    params = request.node.callspec.params
    return runs(params["release"], SPECS[request.node.originalname](tiny, **params))


@pytest.mark.parametrize("release", [r for r in RELEASES if r in WITHOUT_HOOKS])
def test_stock_dies(result, release):
    assert not result.ok
    assert result.error == f"AttributeError: 'KimiK25ForConditionalGeneration' object has no attribute '{HOOKS[0]}'"


@pytest.mark.parametrize("release", RELEASES)
def test_the_plugin_makes_it_work(result, tiny, release):
    assert result.ok, result.error
    assert result.tokens == GREEDY
    assert [meta["spec_accept_length"] for meta in result.meta_info] == [4.0, 4.0]
    assert result.boundaries == BOUNDARIES
    assert {sight["width"] for sight in result.observed} == {3 * tiny.target("kimi-k25").hidden_size}
    assert {sight["mode"] for sight in result.observed} >= {"extend", "target_verify"}
    assert result.patch_states["delegation-kimi-k25"] == ("applied" if release in WITHOUT_HOOKS else "native")


@pytest.mark.parametrize("release", RELEASES)
def test_plain_decoding_follows_the_rule(result, release):
    """The tokens that all others are held to are those of the engine without a draft."""
    assert result.tokens == GREEDY


@pytest.mark.parametrize(("release", "kind", "topk"), TREES)
def test_trees_change_no_token(result, release, kind, topk):
    assert result.ok, result.error
    assert result.tokens == GREEDY
    if kind == "unsure":  # its chains stop at every second choice: only branches explain more
        assert result.spec_accept_length >= 8 / 3
    else:
        assert result.spec_accept_length < 2


@pytest.mark.parametrize("release", RELEASES)
def test_the_hooks_are_whose_they_should_be(environment, release):
    code = f"""
import importlib, inspect, json
module = importlib.import_module("sglang.srt.models.kimi_k25")
methods = [getattr(module.KimiK25ForConditionalGeneration, name) for name in {HOOKS}]
print(json.dumps([[type(m).__name__, inspect.getsourcefile(m) == module.__file__] for m in methods]))
"""
    argv = [str(environment(release).python), "-c", code]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, env={**engine_variables()})
    assert json.loads(done.stdout.splitlines()[-1]) == [["function", release not in WITHOUT_HOOKS]] * 3


def engine_variables() -> dict[str, str]:
    with engine._workplace(EngineSpec(engine.SITE)) as place:
        return place.variables


@pytest.mark.parametrize("release", [OLDEST] if OLDEST in RELEASES else RELEASES)
def test_over_http(environment, tiny, release):
    with engine.serve(environment(release), kimi(tiny)) as server:
        outputs = server.generate()
        observed = server.place.observed()
    assert tuple(tuple(output["output_ids"]) for output in outputs) == GREEDY
    assert [output["meta_info"]["spec_accept_length"] for output in outputs] == [4.0, 4.0]
    assert {tuple(sight["boundaries"]) for sight in observed} == {BOUNDARIES}
