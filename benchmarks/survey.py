"""Time and memory of `sglang-eagle3 compat survey` over every release whose wheel is in the cache, warm.

usage: python benchmarks/survey.py      fetches what is missing first; the second of two runs is told
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time

with tempfile.TemporaryDirectory() as place:
    command = [sys.executable, "-m", "sglang_eagle3_plugin", "compat", "survey", "--offline", "--json", "--into", place]
    for _ in range(2):
        begin = time.perf_counter()
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True)
        seconds = time.perf_counter() - begin
used = resource.getrusage(resource.RUSAGE_CHILDREN)
releases = len(json.loads(done.stdout)["releases"])
print(json.dumps({"releases": releases, "seconds": round(seconds, 1), "peak_mib": round(used.ru_maxrss / 1024)}))
