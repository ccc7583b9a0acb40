"""Time and memory of `sglang-eagle3 doctor` on a very large checkpoint: 1,000 shards whose headers total 200,000 tensors.

    python benchmarks/doctor_headers.py [--shards 1000] [--tensors 200000] [--runs 5]

The shards are sparse files (a terabyte to the eye, a few dozen MB on disk), made in a temporary directory. Measured is the whole
process, interpreter start included: wall time and peak resident memory. Must hold: at most 1 s and 200 MiB.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HIDDEN, LAYERS = 7168, 61


def make_target(root: Path, shards: int, tensors: int) -> None:
    """Write a sparse checkpoint of a Kimi-K2.5 by its names: experts' matrices, 5 GB a shard."""
    root.mkdir()
    config = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "text_config": {"num_hidden_layers": LAYERS, "hidden_size": HIDDEN, "vocab_size": 163840, "max_position_embeddings": 4096},
    }
    (root / "config.json").write_text(json.dumps(config))
    weight_map = {}
    each = tensors // shards
    for shard in range(shards):
        name = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        header, at = {"__metadata__": {"format": "pt"}}, 0
        for i in range(each):
            number = shard * each + i
            tensor = f"language_model.model.layers.{number % LAYERS}.mlp.experts.{number // LAYERS}.down_proj.weight"
            shape = [HIDDEN, 2048]
            if number == 0:
                tensor, shape = "language_model.model.embed_tokens.weight", [163840, HIDDEN]
            size = shape[0] * shape[1] * 2
            header[tensor] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
            weight_map[tensor] = name
            at += size
        text = json.dumps(header).encode()
        with (root / name).open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + at)
    (root / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def make_draft(root: Path) -> None:
    """Write a draft's config; its weights are of no concern here."""
    root.mkdir()
    ids = {"eagle_aux_hidden_state_layer_ids": [1, 29, 57], "use_aux_hidden_state": True}
    config = {"architectures": ["LlamaForCausalLMEagle3"], "hidden_size": HIDDEN, "num_hidden_layers": 1, "eagle_config": ids}
    (root / "config.json").write_text(json.dumps(config))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, default=1000)
    parser.add_argument("--tensors", type=int, default=200_000)
    parser.add_argument("--runs", type=int, default=5)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        make_target(root / "target", asked.shards, asked.tensors)
        make_draft(root / "draft")
        command = [sys.executable, "-m", "sglang_eagle3_plugin", "doctor", "--json", "--release", "0.5.23"]
        command += ["--target", str(root / "target"), "--draft", str(root / "draft"), "--", "--speculative-algorithm", "EAGLE3"]
        seconds = []
        for _ in range(asked.runs):
            start = time.perf_counter()
            done = subprocess.run(command, capture_output=True, text=True, env=os.environ)
            seconds.append(time.perf_counter() - start)
            assert done.returncode == 0, done.stdout + done.stderr
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = (used.ru_utime + used.ru_stime) / asked.runs
        sizes = sum(p.stat().st_size for p in (root / "target").glob("*.safetensors"))
        figures = {
            "tensors": asked.tensors,
            "shards": asked.shards,
            "terabytes": round(sizes / 1e12, 1),
            "seconds": round(statistics.median(seconds), 2),
            "range_s": [round(min(seconds), 2), round(max(seconds), 2)],
            "cpu_s": round(cpu, 2),
            "peak_mib": round(used.ru_maxrss / 1024),
        }
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
