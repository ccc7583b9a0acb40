"""EAGLE3_DUMP_DIR on a CUDA device with CUDA graphs on: what is dumped is what the target computed, and what it dumps eagerly.

Runs where SGLang is installed beside this plugin: ``pytest -m gpu tests/gpu/test_dump.py``. Prompts of a labelled target, alone and
in a batch, with a draft that answers right only when it is fed the right boundaries, and without one; decoding runs in graphs.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import engines
import numpy as np
import pytest

from sglang_eagle3_plugin.hidden_states.layout import sample_key
from sglang_eagle3_plugin.hidden_states.reader import Dump, to_float32
from sglang_eagle3_plugin.hidden_states.verify import verify
from sglang_eagle3_plugin.rig import engine, models

pytestmark = pytest.mark.gpu

STEPS, NEW_TOKENS = 3, 17
DRAFT = (3, 5, 6)
PROMPTS = [[17, 34, 51, 68, 85], *([200 - i, 3 + i, 77] for i in range(7))]
CLOSE = 5e-3
"""Relative, float16: kernels of a graph and of an eager pass may sum in another order."""
CASES = {"graphs, draft": (True, True), "eager, draft": (False, True), "graphs, no draft": (True, False)}


def serve(request_path: str, result_path: str) -> None:
    """In a process of its own: generate, and wait until what was generated is acknowledged."""
    import sglang

    served = sglang.Engine(**json.loads(Path(request_path).read_text()))
    sampling = {"max_new_tokens": NEW_TOKENS, "temperature": 0.0, "ignore_eos": True}
    outputs = [served.generate(input_ids=PROMPTS[0], sampling_params=sampling)]
    outputs += served.generate(input_ids=PROMPTS[1:], sampling_params=sampling)
    until, place = time.monotonic() + 60, Path(os.environ["EAGLE3_DUMP_DIR"])
    while time.monotonic() < until and len(Dump.open(place).refs) < len(PROMPTS):
        time.sleep(0.2)
    Path(result_path).write_text(json.dumps(outputs))
    served.shutdown()
    os._exit(0)


def run(root: Path, name: str) -> dict:
    graphs, drafted = CASES[name]
    place = root / name.replace(", ", "-").replace(" ", "-")
    target = models.target(place / "target", "llama")
    arguments = engines.arguments() | {
        "model_path": str(target.path),
        "mem_fraction_static": 0.2,
        "disable_cuda_graph": not graphs,
    }
    if drafted:
        arguments |= engine.speculative(models.draft(place / "draft", target, DRAFT, convention="output"), STEPS)
    variables = {
        "EAGLE3_DUMP_DIR": str(place / "dump"),
        "EAGLE3_DUMP_BOUNDARIES": "" if drafted else "all",
        "EAGLE3_DUMP_MIN_FREE_GB": "0",
    }
    outputs, log = engines.answer(place, [__file__], arguments, variables)
    return {"log": log, "outputs": outputs, "dump": Dump.open(place / "dump") if outputs else None, "target": target}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    root = tmp_path_factory.mktemp("dumps")
    return engines.all_of(lambda name: run(root, name), list(CASES), at_once=2)


def samples(result: dict) -> dict[str, tuple]:
    """Key -> float32 states of every boundary and the final ones."""
    dump = result["dump"]
    read = {ref.key: dump.read(ref) for ref in dump.refs}
    return {
        key: ([to_float32(found.aux[:, slot]) for slot in range(found.aux.shape[1])], to_float32(found.final))
        for key, found in read.items()
    }


@pytest.mark.parametrize("name", CASES)
def test_every_state_carries_its_boundary_while_decoding_runs_in_graphs(results, name):
    result = results[name]
    assert result["outputs"], result["log"][-3000:]
    assert ("graph end" in result["log"].lower()) == CASES[name][0]
    labels = result["target"].labels
    boundaries = result["dump"].header().boundaries
    assert boundaries == (DRAFT if CASES[name][1] else tuple(range(result["target"].layers + 1)))
    assert verify(result["dump"]) == []
    found = samples(result)
    for prompt, output in zip(PROMPTS, result["outputs"], strict=True):
        said = models.continuation(prompt, NEW_TOKENS)
        assert output["output_ids"] == said
        if CASES[name][1]:
            assert output["meta_info"]["spec_verify_ct"] == -(-(NEW_TOKENS - 1) // (STEPS + 1)), "every draft is accepted"
        states, final = found[sample_key(prompt)]
        assert final.shape == (len(prompt), labels.hidden_size)
        for boundary, state in zip(boundaries, states, strict=True):
            marked = np.zeros(labels.count)
            marked[:boundary] = labels.value
            assert np.abs(state[:, labels.first : labels.first + labels.count] - marked).max() < 0.05 * labels.value, boundary


def test_graphs_dump_what_eager_passes_dump(results):
    graphs, eager = samples(results["graphs, draft"]), samples(results["eager, draft"])
    assert graphs.keys() == eager.keys()
    for key, (states, final) in graphs.items():
        for one, other in zip([*states, final], [*eager[key][0], eager[key][1]], strict=True):
            assert np.linalg.norm(one - other) <= CLOSE * np.linalg.norm(other)


if __name__ == "__main__":
    serve(*sys.argv[1:])
