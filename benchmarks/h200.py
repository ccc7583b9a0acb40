"""Decode throughput on one GPU, CUDA graphs on: baseline, EAGLE-3, the plugin installed and not, debug, dump, graphs off. One run.

    python benchmarks/h200.py OUT.json [--size 3e9|7e9] [--models DIR] [--seconds 200] [--tokens 512]

Needs a CUDA device, SGLang and this plugin. Every configuration is an engine of its own that stays up; they generate in turn, one
at a time, round after round, and a ratio is the median of the rounds' own ratios, so that a drift of the machine cancels out. The
others are stopped meanwhile (SIGSTOP): an idle scheduler keeps a core busy. Two engines of one configuration differ by more than
the plugin costs, so that what is told to a thousandth is measured with two engines on either side.

Of the two targets, one has 3e9 parameters: the scheduler's Python sets the pace, and its rounds spread with whatever else the host
does. The other has 7e9 and twice the width: the device sets the pace, as with what people serve, and a thousandth can be told.

The models (`big_models.py`) are made where DIR lacks them. "Not installed" takes the plugin off the path of that engine; where it
lies in the environment itself, EAGLE3_PLUGIN=0 stands for that, and the answer says so.
"""

from __future__ import annotations

import argparse
import contextlib
import json
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
SELDOM = 6
"""Configurations whose ratio is far from 1 generate in every sixth round only."""


@dataclass(frozen=True)
class Configuration:
    """What is served, how often, and what it is held against."""

    draft: str | None = None
    plugin: bool = True
    against: str | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    engines: int = 1
    seldom: bool = False
    every_size: bool = False


@dataclass(frozen=True)
class Size:
    """A target's shape, and whether all configurations serve it."""

    layers: int
    hidden: int
    whole: bool = True


BASE, STOCK, PLUGIN = "baseline, no draft", "perfect draft, plugin not installed", "perfect draft, plugin"
CONFIGURATIONS = {
    BASE: Configuration(plugin=False, seldom=True),
    STOCK: Configuration("good", plugin=False, against=BASE, engines=2, every_size=True),
    PLUGIN: Configuration("good", against=STOCK, engines=2, every_size=True),
    "perfect draft, plugin, boundaries 0 and L captured": Configuration(
        "edges", against=PLUGIN, environment={"EAGLE3_CAPTURE_BOUNDARIES": "0,{middle},{layers}"}
    ),
    "perfect draft, EAGLE3_DEBUG, every step": Configuration(
        "good", against=PLUGIN, environment={"EAGLE3_DEBUG": "every=1,rate=0"}, engines=2, every_size=True
    ),
    "perfect draft, EAGLE3_DEBUG=1": Configuration("good", against=PLUGIN, environment={"EAGLE3_DEBUG": "1"}),
    "perfect draft, EAGLE3_DUMP_DIR": Configuration("good", against=PLUGIN, environment={"EAGLE3_DUMP_DIR": "{scratch}/dump"}),
    "perfect draft, --disable-cuda-graph": Configuration(
        "good", against=PLUGIN, arguments={"disable_cuda_graph": True}, seldom=True
    ),
    "random draft, plugin": Configuration("random", against=BASE, seldom=True),
}
SIZES = {"3e9": Size(13, 4096), "7e9": Size(8, 8192, whole=False)}


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

    def __init__(self, name: str, number: int, options: argparse.Namespace, scratch: Path) -> None:
        from sglang_eagle3_plugin.rig.engine import CUDA_ARGUMENTS, speculative  # not at the top: some workers have no plugin

        one, size, models = CONFIGURATIONS[name], SIZES[options.size], options.models / options.size
        engine = (
            CUDA_ARGUMENTS
            | {"dtype": "bfloat16", "log_level": "error"}
            | json.loads(options.engine)
            | {"model_path": str(models / "target")}
            | one.arguments
        )
        if one.draft:
            engine |= speculative(models / one.draft)
        place = scratch / f"{list(CONFIGURATIONS).index(name)}-{number}"
        place.mkdir(mode=0o700)
        values = {"scratch": str(place), "layers": size.layers, "middle": size.layers // 2}
        environment = {variable: text.format(**values) for variable, text in one.environment.items()}
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
        self.rates: list[float] = []
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


def start(options: argparse.Namespace, scratch: Path) -> dict[str, list[Running]]:
    """Start every engine, and stop it once it is up.

    One without and one with a draft come first, which fill the kernels' caches, then the others.
    """
    wanted = {name: one for name, one in CONFIGURATIONS.items() if SIZES[options.size].whole or one.every_size}
    numbered = [(name, number) for name, one in wanted.items() for number in range(one.engines)]
    numbered.sort(key=lambda which: which not in ((BASE, 0), (PLUGIN, 0)))
    running: dict[str, list[Running]] = {name: [] for name in wanted}
    for wave in (numbered[:2], numbered[2:]):
        started = [(name, Running(name, number, options, scratch)) for name, number in wave]
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


def measure(running: dict[str, list[Running]], options: argparse.Namespace) -> dict[str, list[list[float]]]:
    """Rates by configuration, round and engine; an empty list for a round that a configuration sat out."""
    for one in everyone(running):
        one.turn(64)
    rates: dict[str, list[list[float]]] = {name: [] for name in running}
    until = time.perf_counter() + options.seconds
    number = 0
    while time.perf_counter() < until:
        for name in list(running) if number % 2 else list(reversed(running)):
            sits_out = CONFIGURATIONS[name].seldom and number % SELDOM
            rates[name].append([] if sits_out else [one.turn(options.tokens) for one in running[name]])
        number += 1
    return rates


def interval(sorted_ratios: list[float]) -> list[float]:
    """Where the median lies with 95 % confidence: order statistics, which assume no distribution."""
    count = len(sorted_ratios)
    rank = max(int(count / 2 - 0.98 * count**0.5), 0)
    return [round(sorted_ratios[rank], 4), round(sorted_ratios[count - 1 - rank], 4)]


def row(name: str, running: list[Running], rates: dict[str, list[list[float]]]) -> dict[str, Any]:
    own = [statistics.mean(found) for found in rates[name] if found]
    if not own:
        return {"configuration": name, "failed": True}
    against = CONFIGURATIONS[name].against
    told: dict[str, Any] = {
        "configuration": name,
        "tokens_per_s": round(statistics.median(own), 1),
        "range": [round(min(own), 1), round(max(own), 1)],
        "spec_accept_length": running[0].accepted,
        "engines": [round(statistics.median(engine), 1) for engine in zip(*filter(None, rates[name]), strict=True)],
        "rounds": len(own),
    }
    if against in rates:
        pairs = zip(rates[name], rates[against], strict=True)
        ratios = sorted(statistics.mean(a) / statistics.mean(b) for a, b in pairs if a and b)
        if ratios:
            told |= {"against": against, "ratio": round(statistics.median(ratios), 4), "ratio_95": interval(ratios)}
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--size", choices=SIZES, default="3e9")
    parser.add_argument("--models", type=Path, default=Path(tempfile.gettempdir(), "eagle3-big-models"))
    parser.add_argument("--seconds", type=float, default=200)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--vocab", type=int, default=32768)
    parser.add_argument("--engine", default="{}", help="further engine arguments, JSON")
    options = parser.parse_args()
    size, place = SIZES[options.size], options.models / options.size
    if not (place / "random" / "config.json").exists():
        argv = [sys.executable, big_models.__file__, str(place), "--layers", str(size.layers), "--hidden", str(size.hidden)]
        subprocess.run([*argv, "--vocab", str(options.vocab)], check=True)
    with tempfile.TemporaryDirectory() as scratch:
        running = start(options, Path(scratch))
        try:
            rates = measure(running, options)
            dumped = sum(path.is_file() for path in Path(scratch).rglob("dump/**/*"))
            lines = sum(path.read_text().count("\n") for path in Path(scratch).rglob("debug.jsonl"))
        finally:
            for one in everyone(running):
                one.kill()
    from importlib.metadata import version

    import torch

    answer = {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "sglang": version("sglang"),
        "torch": torch.__version__,
        "model": f"Llama, {size.layers} layers, hidden size {size.hidden}",
        "not_installed": "not on the path" if "PYTHONPATH" in without_plugin() else "EAGLE3_PLUGIN=0",
        "tokens": options.tokens,
        "files_dumped": dumped,
        "debug_lines": lines,
        "rows": [row(name, running[name], rates) for name in running],
    }
    options.out.write_text(json.dumps(answer, indent=1) + "\n")
    print(json.dumps(answer))


if __name__ == "__main__":
    worker(json.loads(sys.argv[2])) if sys.argv[1:2] == ["--worker"] else main()
