"""An image prompt through a wrapper: the engine with and without EAGLE-3, on a tiny Qwen2-VL with a processor of its own.

As a program it adds what came out to tests/data/image_runs.json, which test_images.py reads; four engine runs:
    python -m tests.engine.images RELEASE
"""

from __future__ import annotations

import datetime
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from sglang_eagle3_plugin.rig import engine, families, installing, pictures
from sglang_eagle3_plugin.rig.environments import ensure
from tests.engine.prefill import BOUNDARIES, IDS

RECORDED = Path(__file__).parents[1] / "data" / "image_runs.json"
NAME = "qwen2-vl"
PROMPTS = ((17, 34, *pictures.IMAGE, 51, 68), (17, 34, *pictures.IMAGE, 51, 68), (200, 3, *pictures.IMAGE, 77))
"""The first two differ in their picture alone."""
PICTURES = (1, 2, 3)
NEW_TOKENS = 8


def specs(directory: Path) -> dict[str, engine.EngineSpec]:
    """Four engines: a labelled target, and one of random weights whose tokens depend on the picture; with EAGLE-3 and without."""
    family = families.family(NAME)
    target, draft, variables = families.write(directory, family, BOUNDARIES, IDS)
    pictures.write_processor(target)
    images = tuple(pictures.picture(directory / f"{seed}.png", seed) for seed in PICTURES)
    labelled = engine.EngineSpec(
        target,
        draft,
        prompts=PROMPTS,
        images=images,
        max_new_tokens=NEW_TOKENS,
        environment=variables,
        arguments=family.engine_arguments,
        timeout_s=900,
    )
    noisy = replace(labelled, environment={"EAGLE3_RIG_LABEL": json.dumps({"noise": 0.05})})
    return {
        "labelled": labelled,
        "labelled, no draft": replace(labelled, draft=None),
        "noisy": noisy,
        "noisy, no draft": replace(noisy, draft=None),
    }


def facts(directory: Path, run: Callable[[engine.EngineSpec], engine.EngineResult]) -> dict[str, Any]:
    """What the four runs show."""
    found: dict[str, Any] = {}
    for name, spec in specs(directory).items():
        result = run(spec)
        if not result.ok:
            found[name] = {"error": result.error}
            continue
        found[name] = {
            "tokens": [list(tokens) for tokens in result.tokens],
            "prompt_tokens": [meta["prompt_tokens"] for meta in result.meta_info],
            "verifications": [meta.get("spec_verify_ct", 0) for meta in result.meta_info],
            "boundaries": sorted({tuple(sight["boundaries"]) for sight in result.observed}),
            "seconds": round(result.seconds),
        }
    return found


if __name__ == "__main__":
    release = sys.argv[1]
    installing.install_plugin(ensure(release))
    with tempfile.TemporaryDirectory() as scratch:
        row = facts(Path(scratch), lambda spec: engine.run(ensure(release), spec))
    data = json.loads(RECORDED.read_text(encoding="utf-8")) if RECORDED.exists() else {"runs": []}
    data["runs"] = [run for run in data["runs"] if run["release"] != release]
    today = datetime.datetime.now(tz=datetime.timezone.utc).date().isoformat()
    data["runs"].append({"release": release, "date": today, "command": f"python -m tests.engine.images {release}", **row})
    RECORDED.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    print(release, json.dumps(row), flush=True)
