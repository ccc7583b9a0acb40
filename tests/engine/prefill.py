"""Prefill labelled families in a release's own ModelRunner; see prefill_driver.py.

As a program it writes what came out to tests/data/families.json, which test_families.py reads:
    python -m tests.engine.prefill RELEASE [FAMILY ...]
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sglang_eagle3_plugin.rig import engine, families, models
from sglang_eagle3_plugin.rig.environments import Environment, ensure

RECORDED = Path(__file__).parents[1] / "data" / "families.json"
DRIVER = Path(__file__).with_name("prefill_driver.py")
BOUNDARIES, IDS = (2, 4, 5), (1, 3, 4)
PROMPT_END = 51
"""The last token of the driver's prompt."""
COMPARED = ("llama", "qwen2")
"""Families with a capture of SGLang's own, with which the generic tap is compared."""


def prefill(environment: Environment, names: list[str], path: str = "") -> list[dict[str, Any]]:
    """Run the driver. ``path``: further directories of Python's path, before the rig's."""
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        requests = [_request(root / name, environment.release, name) for name in names]
        (root / "records").mkdir(mode=0o700)
        # From 0.5.20 or so a process publishes its arguments once.
        together = [requests] if shares_a_process(environment.release) else [[one] for one in requests]
        return [result for some in together for result in _run(environment, root, some, path)]


def shares_a_process(release: str) -> bool:
    """Whether one process of this release may load one target after another."""
    from packaging.version import Version

    return Version(release) < Version("0.5.16")


def _request(directory: Path, release: str, name: str) -> dict[str, Any]:
    family = families.family(name)
    target, draft, variables = families.write(directory, family, BOUNDARIES, IDS)
    spec = engine.EngineSpec(target, draft, arguments=family.engine_arguments)
    labels = models.Target(target, name, families.LAYERS, family.hidden_size).labels
    return {
        "name": name,
        "arguments": spec.engine_arguments(release),
        "label": variables["EAGLE3_RIG_LABEL"],
        "labels": asdict(labels),
        "boundaries": BOUNDARIES,
        "compare": name in COMPARED,
    }


def _run(environment: Environment, root: Path, requests: list[dict[str, Any]], path: str) -> list[dict[str, Any]]:
    (root / "request.json").write_text(json.dumps(requests), encoding="utf-8")
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("EAGLE3_", "PYTHON"))}
    variables |= {
        **engine.ENVIRONMENT,
        "PYTHONPATH": os.pathsep.join(filter(None, (path, str(engine.SITE)))),
        "EAGLE3_RIG_LABEL": requests[0]["label"],
        "EAGLE3_RUNTIME_DIR": str(root / "records"),
    }
    argv = [str(environment.python), str(DRIVER), str(root / "request.json")]
    done = subprocess.run(argv, env=variables, capture_output=True, text=True, timeout=900)
    lines = [line.removeprefix("RESULT ") for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    rows = [json.loads(line) for line in lines]
    # A process that dies takes the rest of its targets along.
    died = {"error": f"the process died ({done.returncode}): {engine.last_error(done.stderr)}"[:400], "completion": []}
    return [*rows, *({"name": one["name"], **died} for one in requests[len(rows) :])]


if __name__ == "__main__":
    release, *wanted = sys.argv[1:]
    rows = prefill(ensure(release), wanted or families.names(), os.environ.get("EAGLE3_TEST_PATH", ""))
    data = json.loads(RECORDED.read_text(encoding="utf-8")) if RECORDED.exists() else {"runs": {}}
    run = data["runs"].setdefault(release, {"date": "", "command": f"python -m tests.engine.prefill {release}", "families": {}})
    run["date"] = datetime.datetime.now(tz=datetime.timezone.utc).date().isoformat()
    run["families"].update({row.pop("name"): row for row in rows})
    RECORDED.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    for name, row in run["families"].items():
        print(name, row)
