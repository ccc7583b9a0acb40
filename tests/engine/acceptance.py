"""EAGLE-3 on labelled families, in whole engines: the same prompts with the right boundaries, then with each shifted by one.

As a program it adds what came out to tests/data/family_runs.json, which test_families.py reads; a run takes a minute or two:
    python -m tests.engine.acceptance RELEASE FAMILY [FAMILY ...]
"""

from __future__ import annotations

import datetime
import json
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from sglang_eagle3_plugin.rig import engine, families, installing
from sglang_eagle3_plugin.rig.environments import ensure
from tests.engine.prefill import BOUNDARIES, IDS

RECORDED = Path(__file__).parents[1] / "data" / "family_runs.json"
SHIFTED = tuple(i - 1 for i in IDS)
NEW_TOKENS, STEPS = 8, 3
FEWEST, MOST = 2, 7
"""Verifications a prompt: one token comes of the prefill, the other seven of two when STEPS + 1 tokens come of each, of seven when
nothing of the draft's is accepted."""


def spec(directory: Path, name: str) -> engine.EngineSpec:
    """One engine for both; outputs with shifted boundaries follow those with the right ones."""
    family = families.family(name)
    target, draft, variables = families.write(directory, family, BOUNDARIES, IDS)
    return engine.EngineSpec(
        target,
        draft,
        max_new_tokens=NEW_TOKENS,
        num_steps=STEPS,
        environment=variables,
        arguments=family.engine_arguments,
        rewired_ids=SHIFTED,
        timeout_s=900,
    )


def facts(name: str, result: engine.EngineResult, prompts: tuple[tuple[int, ...], ...] = engine.PROMPTS) -> dict[str, Any]:
    """What a run shows: verifications with right and with shifted boundaries over all prompts, and whether the tokens are due."""
    if not result.ok:
        return {"error": result.error}
    count, tied = len(prompts), families.family(name).tied
    due = [families.continuation(prompt, NEW_TOKENS, tied) for prompt in prompts]
    rows = [row for record in result.records for row in record["patches"] if row["patch"] == "completion"]
    return {
        "right": sum(meta["spec_verify_ct"] for meta in result.meta_info[:count]),
        "shifted": sum(meta["spec_verify_ct"] for meta in result.meta_info[count:]),
        "tokens_as_due": [list(t) for t in result.tokens] == [*due, *due],
        "boundaries": sorted({tuple(sight["boundaries"]) for sight in result.observed}),
        "completion": [f"{row['state']}: {row['reason']}" for row in rows],
        "seconds": round(result.seconds),
    }


if __name__ == "__main__":
    release, *names = sys.argv[1:]
    installing.install_plugin(ensure(release))
    for name in names:
        with tempfile.TemporaryDirectory() as scratch:
            one = spec(Path(scratch), name)
            if os.environ.get("EAGLE3_TEST_PATH"):
                path = os.pathsep.join((str(engine.SITE), os.environ["EAGLE3_TEST_PATH"]))
                one = replace(one, environment={**one.environment, "PYTHONPATH": path})
            row = facts(name, engine.run(ensure(release), one))
        data = json.loads(RECORDED.read_text(encoding="utf-8")) if RECORDED.exists() else {"runs": []}
        data["runs"] = [run for run in data["runs"] if (run["release"], run["family"]) != (release, name)]
        today = datetime.datetime.now(tz=datetime.timezone.utc).date().isoformat()
        command = f"python -m tests.engine.acceptance {release} {name}"
        data["runs"].append({"release": release, "family": name, "date": today, "command": command, **row})
        RECORDED.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        print(release, name, row, flush=True)
