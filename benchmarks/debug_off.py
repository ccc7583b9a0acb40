"""What the tap costs a forward call while nobody looks: paired, in one process, on a stand-in runner.

Prints nanoseconds of CPU time a call: median of paired differences, tapped minus plain, and its 95 % bootstrap interval. A tap
that is off waits for nothing, so that is all it costs, and other work on the machine doesn't count.
"""

from __future__ import annotations

import json
import platform
import random
import statistics
import time
import timeit
from types import ModuleType
from typing import Any

from sglang_eagle3_plugin import patching
from sglang_eagle3_plugin.patches import forward_tap
from sglang_eagle3_plugin.settings import Settings

CALLS, PAIRS = 20_000, 200


def runner() -> type:
    class ModelRunner:
        def __init__(self) -> None:
            pass

        def forward(self, forward_batch, skip_attn_backend_init=None, pp_proxy_tensors=None):
            return forward_batch

    return ModelRunner


def seconds(made: Any) -> float:
    """CPU seconds of :data:`CALLS` calls."""
    return timeit.timeit(lambda: made.forward("batch", pp_proxy_tensors=None), timer=time.process_time, number=CALLS)


def main() -> None:
    plain, module = runner(), ModuleType("model_runner")
    module.ModelRunner = runner()
    outcome = patching.Ledger(Settings()).apply(forward_tap.PATCHES[0], module)
    assert outcome.state is patching.State.APPLIED, outcome
    one, other = plain(), object.__new__(module.ModelRunner)
    differences = []
    for pair in range(PAIRS):
        order = [("plain", one), ("tapped", other)]
        random.Random(pair).shuffle(order)
        took = {name: seconds(made) for name, made in order}
        differences.append((took["tapped"] - took["plain"]) / CALLS * 1e9)
    draws = random.Random(0)
    medians = sorted(statistics.median(draws.choices(differences, k=PAIRS)) for _ in range(500))
    result = {
        "tap_off_ns": round(statistics.median(differences), 1),
        "interval_95_ns": [round(medians[12], 1), round(medians[487], 1)],
        "pairs": PAIRS,
        "calls": CALLS,
        "python": platform.python_version(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
