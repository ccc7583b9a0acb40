"""What the generic tap costs beside SGLang's own capture: a Llama's forward passes in a release's ModelRunner, in one process.

    python benchmarks/tap.py RELEASE [--rounds 100] [--tokens 64]

A round is a prefill and ten decode steps (batch 4) for each of three arms, in an order drawn anew each time: nothing captured,
SGLang's own capture, the generic tap; three boundaries. What is taken is the CPU time of the thread that runs the pass, the second
one after each switch, with one thread for torch, so that other work on the machine counts less. A ratio is the median of the
neighbours' own ratios; its interval is that of the median (binomial, 95 %). Without a GPU and its graphs the hooks' Python runs at
every pass, which under graphs it doesn't, so this is the tap's worst case.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

LAYERS, HIDDEN, BATCH, STEPS = 12, 512, 4, 10
BOUNDARIES = (2, 6, 9)
NONE, NATIVE, TAP = "nothing captured", "SGLang's own capture", "generic tap"


def interval(values: list[float]) -> tuple[float, float]:
    """95 % interval of the median: the values at ranks n/2 -+ 0.98 sqrt(n)."""
    ordered, half = sorted(values), 0.98 * len(values) ** 0.5
    low, high = int(len(values) / 2 - half), int(len(values) / 2 + half)
    return ordered[max(low, 0)], ordered[min(high, len(values) - 1)]


def outside(release: str, rounds: int, tokens: int) -> int:
    """Make the target, run the inside in the release's environment, print the table."""
    from sglang_eagle3_plugin.rig import engine, families, installing
    from sglang_eagle3_plugin.rig.environments import ensure

    with tempfile.TemporaryDirectory() as scratch:
        llama = families.family("llama")
        sizes = {"num_hidden_layers": LAYERS, "hidden_size": HIDDEN, "intermediate_size": 1536, "num_attention_heads": 8}
        family = replace(llama, config={**llama.config, **sizes}, hidden_size=HIDDEN)
        target, draft, _ = families.write(Path(scratch), family, (2, 4, 5), (1, 3, 4))
        (target / "labels.json").unlink()
        spec = engine.EngineSpec(target, draft, arguments={**family.engine_arguments, "attention_backend": "torch_native"})
        arguments = spec.engine_arguments(release) | {"max_total_tokens": 2 * BATCH * (tokens + 6 * STEPS)}
        request = Path(scratch) / "request.json"
        request.write_text(json.dumps({"arguments": arguments, "rounds": rounds, "tokens": tokens}), encoding="utf-8")
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("EAGLE3_", "PYTHON"))}
        variables = {**inherited, **engine.ENVIRONMENT, "PYTHONPATH": str(engine.SITE), "EAGLE3_RUNTIME_DIR": scratch}
        environment = ensure(release)
        installing.install_plugin(environment)
        argv = [str(environment.python), __file__, "--inside", str(request)]
        done = subprocess.run(argv, env=variables, capture_output=True, text=True)
    line = next((line for line in done.stdout.splitlines() if line.startswith("RESULT ")), None)
    if line is None:
        print(f"tap: the run failed: {engine.last_error(done.stderr)}", file=sys.stderr)
        return 1
    taken: dict[str, dict[str, list[float]]] = json.loads(line.removeprefix("RESULT "))
    print(f"SGLang {release}, {LAYERS} layers of {HIDDEN}, {len(BOUNDARIES)} boundaries, {rounds} rounds, CPU time in ms")
    for what, arms in taken.items():
        medians = ", ".join(f"{arm} {statistics.median(values) * 1000:.2f}" for arm, values in arms.items())
        print(f"{what}: {medians}")
        for arm, base in ((TAP, NATIVE), (NATIVE, NONE), (TAP, NONE)):
            ratios = [a / b for a, b in zip(arms[arm], arms[base], strict=True)]
            low, high = interval(ratios)
            print(f"    {arm} / {base}: {statistics.median(ratios):.4f} ({low:.4f} to {high:.4f})")
    return 0


def inside(path: str) -> None:
    """Load the target and take the times; one JSON line after ``RESULT ``: pass -> arm -> seconds, one a pass."""
    import torch

    torch.set_num_threads(1)  # of a shared machine; two threads would wait for each other
    request = json.loads(Path(path).read_text(encoding="utf-8"))
    bench, runner, spent = load(request["arguments"])
    arms = switches(getattr(runner, "torch_runner", runner))
    prompts = [[token % 250 for token in range(3, 3 + request["tokens"])] for _ in range(BATCH)]
    taken: dict[str, dict[str, list[float]]] = {what: {arm: [] for arm in arms} for what in ("prefill", "decode")}
    with torch.no_grad():
        for number in range(request["rounds"] + 2):
            for what, passes in each_pass(bench, runner, prompts):
                for arm in random.sample(list(arms), len(arms)):
                    arms[arm]()
                    spent.clear()
                    passes()
                    passes()  # the first after a switch runs code that has gone cold
                    if number >= 2:  # the first two rounds warm up
                        taken[what][arm].append(spent[-1])
    print("RESULT " + json.dumps(taken), flush=True)


def load(given: dict[str, Any]) -> tuple[Any, Any, list[float]]:
    """SGLang's own offline benchmark, a runner that it loaded, and the list that each forward pass adds its seconds to."""
    from sglang_eagle3_plugin.rig import one_batch

    spent: list[float] = []

    def observe(forward: Any) -> Any:
        def timed(self: Any, *args: Any, **kwargs: Any) -> Any:
            begin = time.thread_time()
            output = forward(self, *args, **kwargs)
            spent.append(time.thread_time() - begin)
            return output

        return timed

    bench = one_batch.prepare(observe)
    return bench, one_batch.load(bench, given), spent


def switches(model_runner: Any) -> dict[str, Callable[[], None]]:
    """How to turn each arm on, and the others off."""
    from sglang_eagle3_plugin.runtime.layer_tap import LayerTap
    from sglang_eagle3_plugin.runtime.target import find_decoder

    model = model_runner.model
    decoder = find_decoder(model, LAYERS)
    tap = LayerTap(model, decoder)

    def turn(native: bool, tapped: bool) -> None:
        model.capture_aux_hidden_states = native
        decoder.stack.layers_to_capture = list(BOUNDARIES) if native else []
        tap.capture(BOUNDARIES if tapped else ())

    return {NONE: lambda: turn(False, False), NATIVE: lambda: turn(True, False), TAP: lambda: turn(False, True)}


def each_pass(bench: Any, runner: Any, prompts: list[list[int]]) -> Iterator[tuple[str, Callable[[], None]]]:
    """A prefill, then decode steps after the last one made; each can be made any number of times."""
    from sglang_eagle3_plugin.rig import one_batch

    model_runner = getattr(runner, "torch_runner", runner)
    decode = runner.decode if hasattr(runner, "decode") else lambda t, b: bench.decode(t, b, runner)
    last: list[Any] = []

    def prefill() -> None:
        model_runner.req_to_token_pool.clear()
        model_runner.token_to_kv_pool_allocator.clear()
        last[:] = one_batch.extend(bench, runner, bench.prepare_synthetic_inputs_for_latency_test(BATCH, len(prompts[0]), prompts))

    def step() -> None:
        last[0] = decode(last[0], last[2])[0]

    yield "prefill", prefill
    for _ in range(STEPS):
        yield "decode", step


if __name__ == "__main__":
    if sys.argv[1:2] == ["--inside"]:
        inside(sys.argv[2])
        sys.exit(0)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("release")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=64)
    chosen = parser.parse_args()
    sys.exit(outside(chosen.release, chosen.rounds, chosen.tokens))
