"""What a dump costs and reaches on a real server: prefill throughput with and without, the disk's own speed, the other ways.

    python benchmarks/dump_server.py OUT.json [--target DIR] [--stages off,disk] [--disk DIR] [--memory DIR]

Runs on a machine with CUDA, SGLang and this plugin. Without a target it makes and serves that of `big_models.py` with 12 layers and
hidden size 4096. Each stage starts a server of its own:

- ``off``; ``memory``: dump to a tmpfs; ``disk``: dump with back-pressure; ``drop``: to the disk, samples dropped when it lags;
- ``fp8``, ``memory-fp8``: as ``disk`` and ``memory``, in half the bytes;
- ``write``: a plain sequential write of the same bytes to the same disk, fsynced;
- ``lists``: SGLang's ``return_hidden_states`` over HTTP;
- ``save``: a synchronous ``torch.save`` a forward; ``save-fsync``: the same made as durable as a dump's acknowledged samples are
  (file and directory fsynced, under a temporary name, renamed); ``memory-save``: to the tmpfs.
"""

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

import big_models

FLAGS = [
    "--skip-tokenizer-init",
    "--dtype=bfloat16",
    "--attention-backend=triton",
    "--sampling-backend=pytorch",
    "--grammar-backend=none",
    "--mem-fraction-static=0.5",
    "--context-length=4096",
    "--chunked-prefill-size=8192",
    "--max-prefill-tokens=16384",
    "--disable-radix-cache",
    "--disable-cuda-graph",
    "--log-level=info",
]

SYNCHRONOUS = """
import os, sys
import sglang_eagle3_plugin._bootstrap
if os.environ.get("BENCH_TORCH_SAVE"):
    import itertools, wrapt
    count = itertools.count()
    def hook(module):
        import torch
        stock = module.LogitsProcessor.forward
        def forward(self, input_ids, hidden_states, *args, **kwargs):
            if len(hidden_states) > 64:
                path = f"{os.environ['BENCH_TORCH_SAVE']}/{os.getpid()}-{next(count)}.pt"
                states = {"input_ids": input_ids.cpu(), "states": torch.stack([hidden_states] * 4, 1).cpu()}
                if os.environ.get("BENCH_FSYNC"):
                    with open(path + ".tmp", "wb") as file:
                        torch.save(states, file)
                        file.flush()
                        os.fsync(file.fileno())
                    os.rename(path + ".tmp", path)
                    directory = os.open(os.path.dirname(path), os.O_RDONLY)
                    os.fsync(directory)
                    os.close(directory)
                else:
                    torch.save(states, path)
            return stock(self, input_ids, hidden_states, *args, **kwargs)
        module.LogitsProcessor.forward = forward
    wrapt.register_post_import_hook(hook, "sglang.srt.layers.logits_processor")
"""


def post(url, body):
    request = urllib.request.Request(url + "/generate", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=500) as answer:
        return answer.read()


def stage(target, prompts, port, environment, flags=(), extra=None, concurrency=32, site=None):
    """Tokens and samples a second of one server over the prompts."""
    log = tempfile.NamedTemporaryFile("w+", suffix=".log", delete=False)  # noqa: SIM115
    path = os.pathsep.join(filter(None, [site, os.environ.get("PYTHONPATH")]))
    argv = [sys.executable, "-m", "sglang.launch_server", "--model-path", target, "--port", str(port), *FLAGS, *flags]
    server = subprocess.Popen(
        argv, env=os.environ | {"PYTHONPATH": path} | environment, stdout=log, stderr=log, start_new_session=True
    )
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(url + "/health", timeout=5)
                break
            except OSError:
                if server.poll() is not None:
                    raise SystemExit(Path(log.name).read_text()[-4000:]) from None
                time.sleep(0.5)

        def ask(ids):
            return post(url, {"input_ids": ids, "sampling_params": {"max_new_tokens": 1, "temperature": 0}} | (extra or {}))

        with ThreadPoolExecutor(concurrency) as pool:
            list(pool.map(ask, [[(7 * t + 1) % 30000 for t in ids] for ids in prompts[:32]]))  # warm up, with other tokens
            before = settled(Path(environment["EAGLE3_DUMP_DIR"]), 32) if "EAGLE3_DUMP_DIR" in environment else {}
            started = time.monotonic()
            list(pool.map(ask, prompts))
            seconds = time.monotonic() - started
        facts = {"seconds": seconds, "tokens_s": sum(map(len, prompts)) / seconds, "samples_s": len(prompts) / seconds}
        if before:
            after = settled(Path(environment["EAGLE3_DUMP_DIR"]), before["acknowledged"] + len(prompts))
            elapsed = after["at"] - started
            written = after["bytes"] - before["bytes"]
            acknowledged = after["acknowledged"] - before["acknowledged"]
            facts |= {
                "acknowledged": acknowledged,
                "acknowledged_after_s": elapsed,
                "acknowledged_samples_s": acknowledged / elapsed,
            }
            facts |= {"written_bytes": written, "written_bytes_s": written / elapsed, "counts": after["counts"]}
        facts["said"] = [line for line in Path(log.name).read_text().splitlines() if "eagle3-plugin" in line][-5:]
        return facts
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, 9)
        server.wait()
        time.sleep(2)


def settled(directory, expected):
    """Wait for the writer: what is acknowledged, and when the last of it was."""
    from sglang_eagle3_plugin.hidden_states.reader import Dump

    seen, since = -1, time.monotonic()
    while time.monotonic() - since < 4 and seen < expected:
        now = len(Dump.open(directory).refs)
        if now != seen:
            seen, since = now, time.monotonic()
        time.sleep(0.1)
    dump = Dump.open(directory)
    return {
        "acknowledged": len(dump.refs),
        "bytes": sum(size for size, _ in dump.shards.values()),
        "at": since,
        "counts": dump.counts,
    }


def plain_write(directory, size):
    """Bytes a second of a plain sequential write with a final fsync."""
    block = os.urandom(64 << 20)
    path = directory / "plain"
    started = time.monotonic()
    with path.open("wb", buffering=0) as file:
        for _ in range(max(1, size // len(block))):
            file.write(block)
        os.fsync(file.fileno())
    seconds = time.monotonic() - started
    total = path.stat().st_size
    path.unlink()
    return {"bytes": total, "bytes_s": total / seconds}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--target", type=Path)
    parser.add_argument("--disk", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--prompts", type=int, default=192)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--stages", default="off,memory,disk,write,drop,lists,save,save-fsync,memory-save,fp8,memory-fp8")
    options = parser.parse_args()
    models = Path(tempfile.gettempdir(), "eagle3-dump-models")
    target = str(options.target or big_models.at(models, layers=12, hidden=4096) / "target")
    prompts = [[(i * 131 + j * 17) % 30000 for j in range(options.length)] for i in range(options.prompts)]
    site = tempfile.mkdtemp()
    Path(site, "sitecustomize.py").write_text(SYNCHRONOUS)
    results = json.loads(options.out.read_text()) if options.out.exists() else {}
    results["about"] = {"sglang": version("sglang"), "target": target, "prompts": options.prompts, "length": options.length}
    for number, name in enumerate(options.stages.split(",")):
        port, place = 31000 + number, (options.memory if name.startswith("memory") else options.disk) / f"dump-{name}"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        dump = {"EAGLE3_DUMP_DIR": str(place), "EAGLE3_DUMP_WHEN_FULL": "wait"}
        if name == "off":
            results[name] = stage(target, prompts, port, {}, site=site)
        elif name in ("memory", "disk", "drop", "fp8", "memory-fp8"):
            how = {"EAGLE3_DUMP_WHEN_FULL": "drop"} if name == "drop" else {}
            how |= {"EAGLE3_DUMP_DTYPE": "fp8"} if name.endswith("fp8") else {}
            results[name] = stage(target, prompts, port, dump | how, site=site)
        elif name == "write":
            results[name] = plain_write(place, results.get("disk", {}).get("written_bytes", 4 << 30))
        elif name == "lists":
            few = prompts[: max(4, len(prompts) // 12)]
            flags = ("--enable-return-hidden-states",)
            results[name] = stage(target, few, port, {}, flags, {"return_hidden_states": True}, site=site)
        elif name in ("save", "save-fsync", "memory-save"):
            how = {"BENCH_TORCH_SAVE": str(place)} | ({"BENCH_FSYNC": "1"} if name == "save-fsync" else {})
            results[name] = stage(target, prompts, port, how, site=site)
        shutil.rmtree(place, ignore_errors=True)
        options.out.write_text(json.dumps(results, indent=2) + "\n")
        print(name, json.dumps(results[name]), flush=True)


if __name__ == "__main__":
    main()
