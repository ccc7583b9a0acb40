"""Decode throughput on one GPU, CUDA graphs on: baseline, EAGLE-3, the plugin installed and not, debug on, graphs off. One run.

    python benchmarks/h200.py TARGET GOOD_DRAFT RANDOM_DRAFT OUT.json [--rounds 12] [--tokens 512]

Needs a CUDA device, SGLang and this plugin. Every configuration is an engine of its own that stays up; they generate in turn, one
at a time, round after round, and a ratio is the median of the rounds' own ratios, so that a drift of the machine cancels out.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ARGUMENTS = {
    "device": "cuda",
    "dtype": "bfloat16",
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "skip_tokenizer_init": True,
    "enable_multimodal": False,
    "disable_radix_cache": True,
    "mem_fraction_static": 0.9,
    "max_total_tokens": 16384,
    "max_running_requests": 8,
    "context_length": 4096,
    "log_level": "error",
}
EAGLE3 = {
    "speculative_algorithm": "EAGLE3",
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 4,
}
PROMPT = [5, 6, 8, 9, 10, 11, 12, 13]

# name -> draft, further arguments, environment, the configuration that it is measured against
CONFIGURATIONS = {
    "baseline": (None, {}, {"EAGLE3_PLUGIN": "0"}, None),
    "EAGLE-3, perfect draft, plugin off": ("good", {}, {"EAGLE3_PLUGIN": "0"}, "baseline"),
    "EAGLE-3, perfect draft, plugin": ("good", {}, {}, "EAGLE-3, perfect draft, plugin off"),
    "EAGLE-3, random draft, plugin off": ("random", {}, {"EAGLE3_PLUGIN": "0"}, "baseline"),
    "EAGLE-3, random draft, plugin": ("random", {}, {}, "EAGLE-3, random draft, plugin off"),
    "debug, every step": ("good", {}, {"EAGLE3_DEBUG": "every=1,rate=0"}, "EAGLE-3, perfect draft, plugin"),
    "graphs off": ("good", {"disable_cuda_graph": True}, {}, "EAGLE-3, perfect draft, plugin"),
}


def worker(request: dict) -> None:
    import sglang

    engine = sglang.Engine(**request["engine"])
    say = os.fdopen(int(os.environ["BENCH_FD"]), "w")
    print("ready", file=say, flush=True)
    for line in sys.stdin:
        began = time.perf_counter()
        output = engine.generate(
            input_ids=PROMPT, sampling_params={"max_new_tokens": int(line), "temperature": 0.0, "ignore_eos": True}
        )
        seconds = time.perf_counter() - began
        meta = output["meta_info"]
        print(json.dumps([meta["completion_tokens"] / seconds, meta.get("spec_accept_length")]), file=say, flush=True)
    engine.shutdown()
    os._exit(0)


class Running:
    def __init__(self, name: str, options: argparse.Namespace) -> None:
        draft, arguments, environment, self.against = CONFIGURATIONS[name]
        engine = ARGUMENTS | {"model_path": str(options.target)} | arguments
        if draft:
            engine |= EAGLE3 | {"speculative_draft_model_path": str(getattr(options, draft))}
        read, write = os.pipe()
        self.log = Path(f"{options.out}.{list(CONFIGURATIONS).index(name)}.log").open("w")  # noqa: SIM115
        debug = {"EAGLE3_DEBUG_FILE": f"{options.out}.debug.jsonl"} if "EAGLE3_DEBUG" in environment else {}
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--worker", json.dumps({"engine": engine})],
            stdin=subprocess.PIPE,
            stdout=self.log,
            stderr=self.log,
            text=True,
            pass_fds=[write],
            env=os.environ | environment | debug | {"BENCH_FD": str(write)},
        )
        os.close(write)
        self.answers = os.fdopen(read)

    def wait(self) -> bool:
        return self.answers.readline().strip() == "ready"

    def generate(self, tokens: int) -> tuple[float, float | None]:
        print(tokens, file=self.process.stdin, flush=True)
        rate, accepted = json.loads(self.answers.readline())
        return rate, accepted


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("target", "good", "random", "out"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=512)
    options = parser.parse_args()
    first, *rest = CONFIGURATIONS
    running = {first: Running(first, options)}
    running[first].wait()  # alone: it fills the kernels' caches
    running |= {name: Running(name, options) for name in rest}
    running = {name: one for name, one in running.items() if name == first or one.wait()}
    for one in running.values():
        one.generate(64)
    rates: dict[str, list[float]] = {name: [] for name in running}
    accepted = {}
    for round_ in range(options.rounds):
        order = list(running) if round_ % 2 else list(reversed(running))
        for name in order:
            rate, accepted[name] = running[name].generate(options.tokens)
            rates[name].append(rate)
    import torch

    rows = []
    for name in CONFIGURATIONS:
        if name not in rates:
            rows.append({"configuration": name, "failed": True})
            continue
        against = CONFIGURATIONS[name][3]
        row = {
            "configuration": name,
            "tokens_per_s": round(statistics.median(rates[name]), 1),
            "spec_accept_length": accepted[name],
        }
        row["range"] = [round(min(rates[name]), 1), round(max(rates[name]), 1)]
        if against in rates:
            ratios = [a / b for a, b in zip(rates[name], rates[against], strict=True)]
            row |= {"against": against, "ratio": round(statistics.median(ratios), 4)}
        rows.append(row)
    from importlib.metadata import version

    answer = {
        "device": torch.cuda.get_device_name(),
        "sglang": version("sglang"),
        "torch": torch.__version__,
        "rounds": options.rounds,
        "tokens": options.tokens,
        "rows": rows,
    }
    options.out.write_text(json.dumps(answer, indent=1) + "\n")
    print(json.dumps(answer, indent=1))
    for one in running.values():
        one.process.kill()


if __name__ == "__main__":
    worker(json.loads(sys.argv[2])) if sys.argv[1:2] == ["--worker"] else main()
