"""The whole loop, without a GPU: a target that learnt real text, dump, export, draft, served; then miswired, told and predicted.

    python benchmarks/loop.py WORK [--release 0.5.9] [--target-steps 700] [--draft-steps 300] [--texts 240] [--held-out 16]

Each stage leaves its figures in WORK/figures.json and is passed over when they are there: run it again and it goes on. WORK/target
and WORK/draft are ordinary checkpoints afterwards. The engine is the unmodified release of the rig, on the CPU.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from sglang_eagle3_plugin.rig import engine, environments, installing

HERE = Path(__file__).parent
BOUNDARIES, SHIFTED = "2,3,4", "1,2,3"
PROMPT, NEW, STEPS = 96, 40, 3
SPECFORGE, TRAINER_RELEASE = "specforge==0.2.0", "0.5.23"


class Loop:
    """The stages, and where they leave their things."""

    def __init__(self, options):
        self.options = options
        self.work = options.work
        self.work.mkdir(parents=True, exist_ok=True)
        self.environment = environments.ensure(options.release, print)
        installing.install_plugin(self.environment)
        self.file = self.work / "figures.json"
        self.figures = json.loads(self.file.read_text()) if self.file.exists() else {}

    def stage(self, name, what):
        """Do it, unless its figures are there."""
        if name not in self.figures:
            started = time.monotonic()
            self.figures[name] = what() | {"took_s": round(time.monotonic() - started, 1)}
            self.file.write_text(json.dumps(self.figures, indent=1) + "\n")
            print(name, json.dumps(self.figures[name]), flush=True)

    def python(self, *arguments, ok=(0,), environment=None, path=HERE.parent, **variables):
        """Run the environment's interpreter; its output as JSON, or its last line where it is none."""
        done = subprocess.run(
            [(environment or self.environment).python, *map(str, arguments)],
            env=os.environ | {"PYTHONPATH": str(path), "CUDA_VISIBLE_DEVICES": ""} | variables,
            capture_output=True,
            text=True,
        )
        if done.returncode not in ok:
            raise SystemExit(f"{arguments} ended with {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        try:
            return json.loads(done.stdout)
        except ValueError:
            return {"said": done.stdout.strip().splitlines()[-1:]}

    def command(self, *arguments, ok=(0,), **variables):
        """Run `sglang-eagle3 ... --json`."""
        return self.python("-m", "sglang_eagle3_plugin", *arguments, "--json", ok=ok, **variables)

    @contextlib.contextmanager
    def server(self, draft=None, **variables):
        """An engine of the release: plain decoding with torch's attention, or EAGLE-3."""
        arguments = {"max_total_tokens": 8192, "chunked_prefill_size": 4096}
        spec = engine.EngineSpec(
            self.work / "target",
            draft=draft,
            num_steps=STEPS,
            arguments=arguments | ({} if draft else {"attention_backend": "torch_native"}),
            environment={"EAGLE3_DUMP_MIN_FREE_GB": "0", "EAGLE3_DUMP_WHEN_FULL": "wait"} | variables,
        )
        with engine.serve(self.environment, spec) as running:
            yield running

    def extract(self, url, data, dump):
        return self.command("hidden-states", "extract", "--url", url, "--data", data, "--dump", dump, "--concurrency", 16)

    def run(self):
        options, work = self.options, self.work
        target, draft, export = work / "target", work / "draft", work / "export"
        teach = (HERE / "loop_target.py", "--threads", options.threads)
        self.stage("target", lambda: self.python(*teach, "train", target, "--steps", options.target_steps))
        for name, count, more in (("train", options.texts, ()), ("held-out", options.held_out, ("--held-out",))):
            sizes = ("--texts", count, "--prompt", PROMPT, "--new", NEW)
            write = (*teach, "write", target, work / f"{name}.jsonl", *sizes, *more)
            self.stage(f"{name} text", lambda write=write: self.python(*write))
        self.stage("dump", self.dump)
        self.stage("export", lambda: self.command("hidden-states", "export", work / "dump", "--to", "specforge", "--out", export))
        self.stage("draft", self.train)
        self.stage("served", lambda: self.served("right", {}, extract=True))
        score = ("hidden-states", "score", "--draft", draft, "--target", target, "--data", work / "dump-right", "--steps", STEPS)
        self.stage("score", lambda: self.command(*score))
        self.stage("all boundaries", self.every_boundary)
        compare = ("hidden-states", "compare", "--train", export, "--capture", work / "dump-all", "--served")
        self.stage("compare, right", lambda: self.command(*compare, BOUNDARIES))
        self.stage("compare, shifted", lambda: self.command(*compare, SHIFTED, ok=(1,)))
        self.stage("shifted", lambda: self.served("shifted", {"EAGLE3_CAPTURE_BOUNDARIES": SHIFTED}))
        self.table()

    def dump(self):
        work = self.work
        with self.server(EAGLE3_DUMP_DIR=str(work / "dump"), EAGLE3_DUMP_BOUNDARIES=BOUNDARIES) as running:
            ready(work / "dump")
            return self.extract(running.url, work / "train.jsonl", work / "dump")

    def train(self):
        """With SpecForge, beside the newest release's environment, which has what it imports."""
        place = self.work / "specforge"
        if not place.exists():
            environments.uv("pip", "install", "--no-deps", "--python-version", "3.11", "--target", str(place), SPECFORGE)
        options, work = self.options, self.work
        arguments = (work / "export", work / "target", work / "draft", "--steps", options.draft_steps, "--length", STEPS + 1)
        threads = ("--threads", options.threads)
        newest = environments.ensure(TRAINER_RELEASE, print)
        return self.python(HERE / "loop_draft.py", *arguments, *threads, environment=newest, path=place)

    def every_boundary(self):
        work = self.work
        few = (work / "train.jsonl").read_text().splitlines()[:8]
        (work / "few.jsonl").write_text("\n".join(few) + "\n")
        with self.server(EAGLE3_DUMP_DIR=str(work / "dump-all"), EAGLE3_DUMP_BOUNDARIES="all") as running:
            ready(work / "dump-all")
            return self.extract(running.url, work / "few.jsonl", work / "dump-all")

    def served(self, name, variables, extract=False):
        """Acceptance of a real server on the beginnings of the held-out texts; also its dump of what its draft is fed there."""
        work = self.work
        prompts = work / "prompts.jsonl"
        rows = [json.loads(line)["input_ids"] for line in (work / "held-out.jsonl").read_text().splitlines()]
        prompts.write_text("".join(json.dumps({"input_ids": row[:PROMPT]}) + "\n" for row in rows))
        dump = work / f"dump-{name}"
        with self.server(work / "draft", **variables) as running:
            flags = ("--requests", len(rows), "--max-tokens", NEW, "--at-once", 8, "--prompts", prompts)
            measured = self.command("accept", "--url", running.url, *flags, ok=(0, 1))
            if extract:  # from now on: what was measured with is no part of it
                runtime = {"EAGLE3_RUNTIME_DIR": str(running.place.records)}
                self.command("hidden-states", "dump", "on", "--url", running.url, "--dir", dump, **runtime)
                ready(dump)
                measured["extract"] = self.extract(running.url, work / "held-out.jsonl", dump)
            wiring = [line for line in running.place.log.read_text().splitlines() if "wiring:" in line]
            measured["wiring"] = wiring[0].partition("wiring: ")[2] if wiring else ""
        return measured

    def table(self):
        f = self.figures
        right, shifted, predicted = f["served"]["length"], f["shifted"]["length"], f["score"]["acceptance_length"]
        print(f"acceptance length with {STEPS} steps: {right:.2f} served right, {predicted:.2f} predicted by score")
        print(f"({abs(predicted - right) / right:.1%} apart); {shifted:.2f} served with {SHIFTED} in place of {BOUNDARIES}")
        print("compare:", f["compare, shifted"]["verdict"][-1])


def ready(dump):
    """The server makes the directory with its first sample; `extract` wants to see it."""
    dump.mkdir(mode=0o700, exist_ok=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("work", type=Path)
    parser.add_argument("--release", default="0.5.9")
    parser.add_argument("--target-steps", type=int, default=700)
    parser.add_argument("--draft-steps", type=int, default=300)
    parser.add_argument("--threads", type=int, default=1, help="Of torch; more than idle cores are slower than one.")
    parser.add_argument("--texts", type=int, default=240)
    parser.add_argument("--held-out", type=int, default=16)
    Loop(parser.parse_args()).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
