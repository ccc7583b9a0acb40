"""Wiring on a CUDA device, CUDA graphs on: what the graphs replay is what the draft was trained on.

Runs where SGLang is installed beside this plugin: ``pytest -m gpu tests/gpu``. The labelled draft of the rig answers right only
when each of its slots carries the boundary it was made for, so acceptance num_steps + 1 proves the wiring of every replayed pass.
"""

from __future__ import annotations

import tempfile
import threading
from pathlib import Path

import engines
import pytest

from sglang_eagle3_plugin.rig import engine, models

pytestmark = pytest.mark.gpu

STEPS = 3
NEW_TOKENS = 33
STOCK = {"EAGLE3_DISABLE_PATCHES": "boundary-wiring"}
IDS = (2, 4, 5)

# name -> family, boundaries the draft was made for, ids and convention in its config, further environment
CASES = {
    "output convention": ("kimi-k25", (3, 5, 6), IDS, "output", {}),
    "output convention, stock": ("kimi-k25", (3, 5, 6), IDS, "output", STOCK),
    "boundary convention": ("kimi-k25", (2, 4, 5), IDS, "boundary", {}),
    "boundary convention, llama": ("llama", (2, 4, 5), IDS, "boundary", {}),
    "boundary convention, llama, stock": ("llama", (2, 4, 5), IDS, "boundary", STOCK),
    "both edges, kimi": ("kimi-k25", (0, 4, 8), None, "output", {}),
    "both edges, llama": ("llama", (0, 4, 8), None, "output", {}),
    "both edges, qwen3 moe": ("qwen3-moe", (0, 4, 8), None, "output", {}),
    "both edges, compiled prefill asked for": ("llama", (0, 4, 8), None, "output", {"GPU_TEST_PREFILL": "tc_piecewise"}),
    "five slots": ("llama", (1, 2, 4, 6, 7), None, "output", {}),
    # Kimi-K2.5's own widths, four layers.
    "full width, output convention": ("kimi-k25-full", (1, 2, 3), (0, 1, 2), "output", {}),
    "full width, output convention, stock": ("kimi-k25-full", (1, 2, 3), (0, 1, 2), "output", STOCK),
    "full width, both edges": ("kimi-k25-full", (0, 2, 4), None, "output", {}),
}
# The same with the target's layers split over two GPUs: a captured state must be whole on both.
ON_TWO = {
    "two GPUs, output convention": CASES["output convention"],
    "two GPUs, both edges, llama": CASES["both edges, llama"],
    "two GPUs, both edges, kimi": CASES["both edges, kimi"],
}


TARGETS: dict[tuple[Path, str], models.Target] = {}
ONE_AT_A_TIME = threading.Lock()


def target_of(root: Path, family: str) -> models.Target:
    """The cases' common target: one of full width takes minutes, and gigabytes, to make."""
    with ONE_AT_A_TIME:
        if (root, family) not in TARGETS:
            TARGETS[root, family] = models.target(root / family, family, layers=4 if family.endswith("full") else 8)
        return TARGETS[root, family]


def run(root: Path, name: str) -> dict:
    family, boundaries, ids, convention, extra = (CASES | ON_TWO)[name]
    split = {"tp_size": 2, "disable_custom_all_reduce": True} if name in ON_TWO else {}
    place = Path(tempfile.mkdtemp(dir=root))
    prefill = {"cuda_graph_backend_prefill": extra["GPU_TEST_PREFILL"]} if "GPU_TEST_PREFILL" in extra else {}
    target = target_of(root, family)
    draft = models.draft(place / "draft", target, boundaries, ids=ids, convention=convention)
    request = {
        "engine": engines.arguments() | engine.speculative(draft, STEPS) | split | prefill | {"model_path": str(target.path)},
        "prompts": engine.PROMPTS,
        "sampling_params": {"max_new_tokens": NEW_TOKENS, "temperature": 0.0, "ignore_eos": True},
        "return_hidden_states": False,
        "rewired_ids": None,
        "records": str(place / "records"),
    }
    result, log = engines.answer(place, [engine.WORKER], request, extra)
    return {"log": log, **(result or {"outputs": [], "records": []})}


def run_all(root: Path, names: list[str]) -> dict[str, dict]:
    return engines.all_of(lambda name: run(root, name), names, at_once=4)


def selected(request: pytest.FixtureRequest) -> list[str]:
    """The cases that this session asks the fixture for."""
    items = request.session.items
    return [item.callspec.params["name"] for item in items if request.fixturename in getattr(item, "fixturenames", ())]


@pytest.fixture(scope="module")
def results(request, tmp_path_factory):
    return run_all(tmp_path_factory.mktemp("gpu"), selected(request))


@pytest.fixture(scope="module")
def results_on_two(request, tmp_path_factory):
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    return run_all(tmp_path_factory.mktemp("two-gpus"), selected(request))


def check(name: str, result: dict) -> None:
    assert result["outputs"], result["log"][-3000:]
    assert "graph end" in result["log"].lower(), "no CUDA graph was captured"
    for prompt, output in zip(engine.PROMPTS, result["outputs"], strict=True):
        assert output["output_ids"] == list(models.continuation(prompt, NEW_TOKENS))
        verified = output["meta_info"]["spec_verify_ct"]
        if "stock" in name:
            assert verified == NEW_TOKENS - 1, "miswired: no draft token is accepted"
        else:
            assert verified == -(-(NEW_TOKENS - 1) // (STEPS + 1)), "wired right: every draft token is accepted"
            told = [record["wiring"] for record in result["records"] if "wiring" in record]
            assert told, result["records"]
            assert {tuple(wiring["captured"]) for wiring in told} == {(CASES | ON_TWO)[name][1]}


@pytest.mark.parametrize("name", CASES)
def test_wiring_under_cuda_graphs(results, name):
    check(name, results[name])


@pytest.mark.parametrize("name", ON_TWO)
def test_wiring_over_two_gpus(results_on_two, name):
    check(name, results_on_two[name])
