"""EAGLE3_DEBUG on a CUDA device with CUDA graphs on: what it says of graphs equals what it says eagerly.

``python tests/gpu/test_debug.py`` where SGLang and this plugin are installed; prints one JSON line. Also a pytest test.
Graphs and eager are two engines over one labelled model; debug is switched on and off by its live switch. What it costs is
measured by ``benchmarks/h200.py``.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path

try:
    import pytest

    pytestmark = pytest.mark.gpu
except ModuleNotFoundError:  # the machine with the device may have no pytest
    pass

import engines

from sglang_eagle3_plugin.rig import engine, models

BOUNDARIES = (3, 5, 6)
PROMPTS = [[17, 34, 51, 68, 85], *([200 - i, 3 + i, 77] for i in range(7))]
CLOSE = 5e-3
"""Relative, of norms: kernels of a graph and of an eager pass may sum in another order, in float16."""


def engine_arguments(target: Path, draft: Path, graphs: bool) -> dict:
    return (
        engines.arguments()
        | engine.speculative(draft)
        | {
            "model_path": str(target),
            "mem_fraction_static": 0.3,
            "disable_cuda_graph": not graphs,
            "log_level": "warning",
        }
    )


def serve(request_path: str, result_path: str) -> None:
    """In a process of its own: one engine; the lines of a fixed set of requests, and the tokens while debug is on and after."""
    import sglang

    from sglang_eagle3_plugin.server import debug

    request = json.loads(Path(request_path).read_text())
    served = sglang.Engine(**request["engine"])

    def generate(prompts: list, tokens: int) -> list:
        sampling = {"max_new_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
        outputs = served.generate(input_ids=prompts, sampling_params=sampling)
        return [output["output_ids"] for output in outputs]

    def switch(spec: str | None, file: str | None = None) -> None:
        states = debug.switch(os.getpid(), on=spec is not None, spec=spec or "1", file=file)
        assert states, states
        assert not [state.problem for state in states if state.problem], states

    lines = request["lines"]
    generate(PROMPTS[:1], 16)
    switch("steps=1000,rate=0,ids=1", lines)
    tokens = [generate(PROMPTS[:1], 16), generate(PROMPTS, 16)]
    time.sleep(6)  # the steps of requests that ended with a verify are sent when the engine has been idle
    switch(None)
    result = {"tokens": tokens, "after": generate(PROMPTS, 16)}
    Path(result_path).write_text(json.dumps(result))
    served.shutdown()
    os._exit(0)


def run(root: Path, graphs: bool) -> tuple[dict, list[dict]]:
    place = root / ("graphs" if graphs else "eager")
    target = models.target(place / "target", "llama")
    draft = models.draft(place / "draft", target, BOUNDARIES, convention="output")
    request = {"engine": engine_arguments(target.path, draft, graphs), "lines": str(place / "lines.jsonl")}
    result, log = engines.answer(place, [__file__, "serve"], request, {})
    if result is None:
        raise RuntimeError(log[-4000:])
    return result, [json.loads(line) for line in (place / "lines.jsonl").read_text().splitlines()]


def check(root: Path) -> dict[str, int]:
    """Everything; returns how many passes were compared, by name.

    Raises:
        AssertionError: something isn't as it must be.
    """
    graphs, with_graphs = run(root, graphs=True)
    eager, without = run(root, graphs=False)
    assert graphs["tokens"] == eager["tokens"]
    for said in with_graphs + without:
        assert said["verdicts"] == [], said
    replayed = {said["pass"] for said in with_graphs if said["graph"]}
    assert replayed >= {"target verify", "draft extend", "draft decode"}, replayed
    assert not any(said["graph"] for said in without)
    compared = compare(with_graphs, without)
    assert compared.keys() >= {"target prefill", "target verify", "draft extend"}, compared
    assert graphs["after"] == graphs["tokens"][1] == eager["after"]
    print(json.dumps({"compared": compared}), flush=True)
    return compared


def compare(with_graphs: list[dict], without: list[dict]) -> dict[str, int]:
    """Match passes by what they were run over (pass and token ids) and hold their slots to each other; passes compared, by name."""
    # Request ids differ between engines; the token ids of a pass say which it is. A draft's decode has none of its own in a graph.
    eager: dict[tuple, list[dict]] = {}
    for said in without:
        eager.setdefault((said["pass"], tuple(said.get("ids", ()))), []).append(said)
    compared: dict[str, int] = {}
    for said in with_graphs:
        found = eager.get((said["pass"], tuple(said.get("ids", ())))) if said.get("ids") else None
        if not found:
            continue
        other = found[0]
        for slot, twin in zip(said["slots"], other["slots"], strict=True):
            assert slot["boundary"] == twin["boundary"]
            for name in ("norm", "norm_min", "norm_max"):
                assert abs(slot[name] - twin[name]) <= CLOSE * abs(twin[name]), (said["pass"], name, slot, twin)
            for one, two in zip(slot["first"], twin["first"], strict=True):
                assert abs(one - two) <= CLOSE * twin["norm"], (said["pass"], slot, twin)
        compared[said["pass"]] = compared.get(said["pass"], 0) + 1
    return compared


def test_graphs_say_what_eager_says(tmp_path):
    check(tmp_path)


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve(*sys.argv[2:])
    else:
        with tempfile.TemporaryDirectory() as scratch:
            check(Path(scratch))
