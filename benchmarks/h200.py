"""Decode throughput on one GPU, CUDA graphs on: baseline, EAGLE-3, the plugin installed and not, debug, dump, graphs off. One run.

    python benchmarks/h200.py OUT.json [--models DIR] [--seconds 130] [--tokens 512]

Needs a CUDA device of 139 GiB, SGLang and this plugin. Every configuration is an engine of its own; they generate in turn, one at a
time, round after round, and a ratio is the median of the rounds' own ratios, so that a drift of the machine cancels out. The others
are stopped meanwhile (SIGSTOP): an idle scheduler keeps a core busy.

The target has 7.5e9 parameters and is 8192 wide, so that the device sets the pace, as with what people serve; with one of 3e9 the
scheduler's Python does, and its rounds spread with whatever else the host does. Not all engines fit at once: first come those that
are told apart to a thousandth, each configuration twice, since two engines of one configuration can differ by more than that; then
the others, with the plugin once more. Each half lasts so many seconds.

The models (`big_models.py`) are made where DIR lacks them. "Not installed" takes the plugin off the path of that engine; where it
lies in the environment itself, EAGLE3_PLUGIN=0 stands for that, and the answer says so.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import big_models

PROMPT = [5, 6, 8, 9, 10, 11, 12, 13]
LAYERS, HIDDEN = 8, 8192


@dataclass(frozen=True)
class Configuration:
    """What is served, and what it is held against."""

    draft: str | None = None
    plugin: bool = True
    against: str | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Half:
    """Configurations whose engines are up together, each so many times."""

    engines: int
    configurations: dict[str, Configuration]


BASE, STOCK, PLUGIN = "baseline, no draft", "perfect draft, plugin not installed", "perfect draft, plugin"
HALVES = (
    Half(
        2,
        {
            STOCK: Configuration("good", plugin=False),
            PLUGIN: Configuration("good", against=STOCK),
            "perfect draft, EAGLE3_DEBUG, every step": Configuration(
                "good", against=PLUGIN, environment={"EAGLE3_DEBUG": "every=1,rate=0"}
            ),
        },
    ),
    Half(
        1,
        {
            BASE: Configuration(plugin=False),
            PLUGIN: Configuration("good", against=BASE),
            "random draft, plugin": Configuration("random", against=BASE),
            "perfect draft, plugin, boundaries 0 and L captured": Configuration(
                "edges", against=PLUGIN, environment={"EAGLE3_CAPTURE_BOUNDARIES": f"0,{LAYERS // 2},{LAYERS}"}
            ),
            "perfect draft, EAGLE3_DEBUG=1": Configuration("good", against=PLUGIN, environment={"EAGLE3_DEBUG": "1"}),
            "perfect draft, EAGLE3_DUMP_DIR": Configuration(
                "good", against=PLUGIN, environment={"EAGLE3_DUMP_DIR": "{scratch}/dump"}
            ),
            "perfect draft, --disable-cuda-graph": Configuration("good", against=PLUGIN, arguments={"disable_cuda_graph": True}),
        },
    ),
)


def worker(request: dict[str, Any]) -> None:
    import sglang

    engine = sglang.Engine(**request)
    say = os.fdopen(int(os.environ["BENCH_FD"]), "w")
    print("ready", file=say, flush=True)
    for line in sys.stdin:
        sampling = {"max_new_tokens": int(line), "temperature": 0.0, "ignore_eos": True}
        began = time.perf_counter()
        output = engine.generate(input_ids=PROMPT, sampling_params=sampling)
        seconds = time.perf_counter() - began
        meta = output["meta_info"]
        print(json.dumps([meta["completion_tokens"] / seconds, meta.get("spec_accept_length")]), file=say, flush=True)
    engine.shutdown()
    os._exit(0)


def without_plugin() -> dict[str, str]:
    """The environment of an engine without the plugin."""
    found = find_spec("sglang_eagle3_plugin")
    assert found is not None
    assert found.origin is not None
    place = str(Path(found.origin).parent.parent)
    path = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    if place in path:
        return {"PYTHONPATH": os.pathsep.join(entry for entry in path if entry != place)}
    return {"EAGLE3_PLUGIN": "0"}


class Running:
    """One engine."""

    def __init__(self, one: Configuration, options: argparse.Namespace, place: Path) -> None:
        from sglang_eagle3_plugin.rig.engine import CUDA_ARGUMENTS, speculative  # not at the top: some workers have no plugin

        engine = (
            CUDA_ARGUMENTS
            | {"dtype": "bfloat16", "log_level": "error", "max_total_tokens": 4096, "mem_fraction_static": 0.97}
            | json.loads(options.engine)
            | {"model_path": str(options.models / "target")}
            | one.arguments
        )
        if one.draft:
            engine |= speculative(options.models / one.draft)
        place.mkdir(mode=0o700)
        environment = {variable: text.format(scratch=place) for variable, text in one.environment.items()}
        environment |= {"EAGLE3_RUNTIME_DIR": str(place), "EAGLE3_DEBUG_FILE": str(place / "debug.jsonl")}
        read, write = os.pipe()
        self.log = place / "log.txt"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, __file__, "--worker", json.dumps(engine)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                text=True,
                pass_fds=[write],
                env=os.environ | environment | ({} if one.plugin else without_plugin()) | {"BENCH_FD": str(write)},
            )
        os.close(write)
        self.answers = os.fdopen(read)
        self.accepted: float | None = None

    def wait(self) -> bool:
        if self.answers.readline().strip() == "ready":
            return True
        print(self.log.read_text(errors="replace")[-3000:], file=sys.stderr)
        return False

    def generate(self, tokens: int) -> float:
        print(tokens, file=self.process.stdin, flush=True)
        rate, self.accepted = json.loads(self.answers.readline())
        return float(rate)

    def _signal(self, number: int) -> None:
        """To all processes of the engine, children first."""
        import psutil

        own = psutil.Process(self.process.pid)
        for one in [*own.children(recursive=True), own]:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.send_signal(number)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def turn(self, tokens: int) -> float:
        """Generate while every other engine is stopped; the first tokens after the stop don't count."""
        self._signal(signal.SIGCONT)
        self.generate(64)
        rate = self.generate(tokens)
        self.pause()
        return rate


def start(half: Half, options: argparse.Namespace, scratch: Path) -> dict[str, list[Running]]:
    """Start every engine of a half, and stop it once it is up. Where kernels are still to be compiled, the first does so alone."""
    running: dict[str, list[Running]] = {name: [] for name in half.configurations}
    places = [(name, scratch / f"{which}-{number}") for which, name in enumerate(running) for number in range(half.engines)]
    alone = 1 if half is HALVES[0] else 0
    for wave in (places[:alone], places[alone:]):
        started = [(name, Running(half.configurations[name], options, place)) for name, place in wave]
        with ThreadPoolExecutor() as pool:
            ready = pool.map(lambda pair: pair[1].wait(), started)
        for (name, one), well in zip(started, ready, strict=True):
            if well:
                running[name].append(one)
        print(f"{time.perf_counter():.0f} s: {sum(map(len, running.values()))} engines are up", file=sys.stderr, flush=True)
    for one in everyone(running):
        one.pause()
    return running


def everyone(running: dict[str, list[Running]]) -> list[Running]:
    return [one for engines in running.values() for one in engines]


def rounds(running: dict[str, list[Running]], options: argparse.Namespace) -> dict[str, list[list[float]]]:
    """Rates by configuration, round and engine."""
    for one in everyone(running):
        one.turn(64)
    rates: dict[str, list[list[float]]] = {name: [] for name in running}
    until = time.perf_counter() + options.seconds
    number = 0
    while time.perf_counter() < until:
        for name in list(running) if number % 2 else list(reversed(running)):
            rates[name].append([one.turn(options.tokens) for one in running[name]])
        number += 1
    return rates


def measure(half: Half, options: argparse.Namespace, scratch: Path) -> list[dict[str, Any]]:
    """The rows of a half."""
    scratch.mkdir()
    running = start(half, options, scratch)
    try:
        rates = rounds(running, options)
    finally:
        for one in everyone(running):
            one.kill()
    for one in everyone(running):
        one.process.wait()  # the memory is the next half's
    return [row(name, half.configurations[name].against, running[name], rates) for name in running]


def interval(ratios: list[float]) -> tuple[list[float], float]:
    """Where the median lies, and with what confidence: order statistics, which assume no distribution.

    The narrowest of at least 95 %, or all there is. The median is below the k-th smallest of n as often as a coin thrown n times
    shows heads less than k times.
    """
    ordered, count = sorted(ratios), len(ratios)
    below, outside = 0, 0.5**count
    while (wider := outside + math.comb(count, below + 1) * 0.5**count) <= 0.025 and below + 1 < count / 2:
        below, outside = below + 1, wider
    return [round(ordered[below], 4), round(ordered[count - 1 - below], 4)], round(1 - 2 * outside, 3)


def row(name: str, against: str | None, running: list[Running], rates: dict[str, list[list[float]]]) -> dict[str, Any]:
    if not running:
        return {"configuration": name, "failed": True}
    own = [statistics.mean(found) for found in rates[name]]
    told: dict[str, Any] = {
        "configuration": name,
        "tokens_per_s": round(statistics.median(own), 1),
        "range": [round(min(own), 1), round(max(own), 1)],
        "spec_accept_length": running[0].accepted,
        "engines": [round(statistics.median(engine), 1) for engine in zip(*rates[name], strict=True)],
        "rounds": len(own),
    }
    if against and all(rates[against]):
        ratios = [mine / statistics.mean(theirs) for mine, theirs in zip(own, rates[against], strict=True)]
        bounds, confidence = interval(ratios)
        told |= {"against": against, "ratio": round(statistics.median(ratios), 4), "bounds": bounds, "confidence": confidence}
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--models", type=Path, default=Path(tempfile.gettempdir(), "eagle3-big-models"))
    parser.add_argument("--seconds", type=float, default=130)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--vocab", type=int, default=32768)
    parser.add_argument("--hidden", type=int, default=HIDDEN)
    parser.add_argument("--engine", default="{}", help="further engine arguments, JSON")
    options = parser.parse_args()
    big_models.at(options.models, LAYERS, options.hidden, options.vocab)
    with tempfile.TemporaryDirectory() as scratch:
        rows = [told for which, half in enumerate(HALVES) for told in measure(half, options, Path(scratch, str(which)))]
        dumped = sum(path.is_file() for path in Path(scratch).rglob("dump/**/*"))
        lines = sum(path.read_text().count("\n") for path in Path(scratch).rglob("debug.jsonl"))
    from importlib.metadata import version

    import torch

    answer = {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "sglang": version("sglang"),
        "torch": torch.__version__,
        "model": f"Llama, {LAYERS} layers, hidden size {options.hidden}",
        "not_installed": "not on the path" if "PYTHONPATH" in without_plugin() else "EAGLE3_PLUGIN=0",
        "tokens": options.tokens,
        "files_dumped": dumped,
        "debug_lines": lines,
        "rows": rows,
    }
    options.out.write_text(json.dumps(answer, indent=1) + "\n")
    print(json.dumps(answer))


if __name__ == "__main__":
    worker(json.loads(sys.argv[2])) if sys.argv[1:2] == ["--worker"] else main()
