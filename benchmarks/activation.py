"""What the plugin adds to the start of a process that imports what a scheduler imports of SGLang.

usage (with the Python of an environment that has SGLang and the plugin): python benchmarks/activation.py [RUNS]

Every run is a process of its own. The time is that of activation and of every patch's probe, taken inside the process, where it is
not lost in the seconds that SGLang's own imports take.
"""

import json
import os
import statistics
import subprocess
import sys

from sglang_eagle3_plugin.rig.engine import ENVIRONMENT, SITE

INSIDE = """
import json, sys, time
from sglang_eagle3_plugin import _bootstrap
_bootstrap._WaitForSGLang.waiting = False
import torch  # with the parts of the standard library that a scheduler imports in any case
begin = time.perf_counter()
from sglang_eagle3_plugin import activation
import sglang_eagle3_plugin.patches
spent = {"imports": time.perf_counter() - begin}
stock = activation._Hook.__call__
def timed(self, module):
    begin = time.perf_counter()
    try:
        return stock(self, module)
    finally:
        spent[module.__name__] = time.perf_counter() - begin
activation._Hook.__call__ = timed
begin = time.perf_counter()
activation.activate("pth")
spent["activate"] = time.perf_counter() - begin
for patch in sglang_eagle3_plugin.patches.REGISTRY:
    __import__(patch.module)
print("\\n" + json.dumps(spent))
"""

# SGLang's kernels want a GPU when they are imported; the rig's stand-ins don't.
CPU = os.environ | ENVIRONMENT | {"PYTHONPATH": str(SITE)}

runs = int(sys.argv[1]) if len(sys.argv) > 1 else 7
totals = []
for _ in range(runs):
    done = subprocess.run([sys.executable, "-c", INSIDE], capture_output=True, text=True, check=True, env=CPU)
    spent = json.loads(done.stdout.splitlines()[-1])
    totals.append(sum(spent.values()) * 1000)
parts = {name.rpartition(".")[2]: round(seconds * 1000, 1) for name, seconds in spent.items()}
figures = {
    "processes": runs,
    "added_ms": round(statistics.median(totals), 1),
    "range_ms": [round(min(totals), 1), round(max(totals), 1)],
}
print(json.dumps({**figures, "the_last_ms": parts}))
