"""What EAGLE3_DEBUG at every step costs the thread that serves, and the one that hands steps to the child: paired, in one process.

    ENVIRONMENT/bin/python benchmarks/debug_on.py [--batch 1] [--hidden 4096] [--rounds 200]

Run it with a Python that has torch. A step is a draft decode, a target verify of four tokens a request, and a draft extend, as fake
passes with real tensors on the CPU. A round is 13 steps with debug off and 13 with ``every=1,rate=0``, in an order drawn anew; what
is taken is the CPU time of the thread, so other work on the machine counts less. Then the steps go to a real child that writes a
JSON file, as the light thread hands them over twenty times a second at 260 steps a second. Prints one JSON line, microseconds a
step: the median of the paired differences and its 95 % interval; the median CPU time of handing over; the CPU time of the child for
everything.

On a GPU reductions are launched, not run. Here the first figure holds their arithmetic too, and so grows with the batch.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sglang_eagle3_plugin.runtime import tap
from sglang_eagle3_plugin.runtime.debug import thread
from sglang_eagle3_plugin.runtime.debug.child import Child
from sglang_eagle3_plugin.runtime.debug.output import Output
from sglang_eagle3_plugin.runtime.debug.report import Labels
from sglang_eagle3_plugin.runtime.debug.sampling import Debug
from sglang_eagle3_plugin.runtime.debug.spec import parse

STEPS = 13
TOKENS = 4


class Mode(Enum):
    TARGET_VERIFY = 1
    DRAFT_EXTEND = 2
    DECODE = 3

    def is_idle(self) -> bool:
        return False

    def is_decode(self) -> bool:
        return self is Mode.DECODE


def passes(batch: int, hidden: int) -> Callable[[], None]:
    """A function that delivers the passes of :data:`STEPS` steps."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    verified = torch.randn(TOKENS * batch, 3 * hidden).bfloat16()
    drafted = torch.randn(batch, hidden).bfloat16()
    target = SimpleNamespace(is_draft_worker=False, forward_pass_id=1, model=None)
    draft = SimpleNamespace(is_draft_worker=True)
    output = SimpleNamespace(logits_output=SimpleNamespace(hidden_states=verified), can_run_graph=True)
    rids = [f"request-{i}" for i in range(batch)]
    accepted = torch.full((batch,), TOKENS)

    def one(runner: Any, mode: Mode, fed: Any) -> None:
        info = SimpleNamespace(hidden_states=fed, accept_length=accepted)
        whole = SimpleNamespace(forward_mode=mode, input_ids=None, rids=rids, extend_seq_lens_cpu=None, spec_info=info)
        tap.deliver(runner, whole, output)

    def run() -> None:
        for _ in range(STEPS):
            target.forward_pass_id += 1
            one(draft, Mode.DECODE, drafted)
            one(target, Mode.TARGET_VERIFY, None)
            one(draft, Mode.DRAFT_EXTEND, verified)

    return run


def took(act: Callable[[], Any]) -> float:
    """CPU microseconds of this thread a step."""
    began = time.thread_time()
    act()
    return (time.thread_time() - began) / STEPS * 1e6


def interval(values: list[float]) -> list[float]:
    """95 % interval of the median: the values at ranks n/2 -+ 0.98 sqrt(n)."""
    ordered, half = sorted(values), 0.98 * len(values) ** 0.5
    low, high = int(len(values) / 2 - half), int(len(values) / 2 + half)
    return [round(ordered[max(low, 0)], 1), round(ordered[min(high, len(values) - 1)], 1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("batch", 1), ("hidden", 4096), ("rounds", 200)):
        parser.add_argument(f"--{name}", type=int, default=default)
    asked = parser.parse_args()
    run = passes(asked.batch, asked.hidden)
    debug = Debug(parse("every=1,rate=0"), Labels((2, 6, 9), (2, 6, 9), asked.hidden), whole_vocabulary=True)
    differences, handed = [], []

    def arm(on: bool) -> float:
        tap.consumers = (debug,) if on else ()
        return took(run)

    with tempfile.TemporaryDirectory() as scratch:
        output = Output(str(Path(scratch, "lines.jsonl")))
        child = Child(0, None, output.path, output.descriptor)
        try:
            for turn in range(-10, asked.rounds):
                order = [True, False]
                random.Random(turn).shuffle(order)
                times = {on: arm(on) for on in order}
                debug.collect(unfinished=True)
                while not child.ready():
                    time.sleep(0.01)
                hand = took(lambda: child.ready() and thread.hand_over(debug, child))
                if turn >= 0:
                    differences.append(times[True] - times[False])
                    handed.append(hand)
        finally:
            child.close(60)
            output.close()
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        lines = len(Path(scratch, "lines.jsonl").read_text(encoding="utf-8").splitlines())
    if lines != 3 * debug.steps or tap.failures:
        raise SystemExit(f"{lines} lines of {debug.steps} steps; faults: {tap.failures}")
    result = {
        "serving_us": round(statistics.median(differences), 1),
        "serving_interval_95_us": interval(differences),
        "handing_over_us": round(statistics.median(handed), 1),
        "child_us": round((used.ru_utime + used.ru_stime) / debug.steps * 1e6, 1),
        "batch": asked.batch,
        "hidden": asked.hidden,
        "rounds": asked.rounds,
        "steps_a_round": STEPS,
        "python": platform.python_version(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
