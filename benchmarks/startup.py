"""Interpreter start-up with the `.pth` against without, paired runs in one environment where SGLang is never imported.

usage: python benchmarks/startup.py [RUNS]      builds a wheel, installs it into a temporary environment (needs uv)

`added_ms` is the median of the paired differences.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RUNS = int(sys.argv[1]) if len(sys.argv) > 1 else 300
ROOT = Path(__file__).resolve().parent.parent


def start(python: Path) -> float:
    begin = time.perf_counter()
    subprocess.run([str(python), "-c", "pass"], check=True)
    return (time.perf_counter() - begin) * 1000


with tempfile.TemporaryDirectory() as scratch:
    env = Path(scratch, "env")
    for command in (
        [sys.executable, "-m", "uv", "build", "-q", "--wheel", "-o", scratch, str(ROOT)],
        [sys.executable, "-m", "uv", "venv", "-q", "--python", sys.executable, str(env)],
    ):
        subprocess.run(command, check=True)
    wheel = next(Path(scratch).glob("*.whl"))
    subprocess.run(
        [sys.executable, "-m", "uv", "pip", "install", "-q", "--compile-bytecode", "--python", str(env / "bin/python"), str(wheel)],
        check=True,
    )
    pth = next(env.glob("lib/python*/site-packages/sglang_eagle3_plugin.pth"))
    away = pth.with_suffix(".away")
    with_pth, without = [], []
    for _ in range(RUNS):
        with_pth.append(start(env / "bin/python"))
        pth.rename(away)
        without.append(start(env / "bin/python"))
        away.rename(pth)
    paired = statistics.median(a - b for a, b in zip(with_pth, without, strict=True))
    figures = {
        "pairs": RUNS,
        "with_ms": round(statistics.median(with_pth), 2),
        "without_ms": round(statistics.median(without), 2),
        "added_ms": round(paired, 2),
    }
    print(json.dumps(figures))
