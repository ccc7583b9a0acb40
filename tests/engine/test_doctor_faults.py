"""The doctor's errors are real: each is made on a real engine, seen to fail, mended as the doctor prints, and seen to work.

CI runs the first, two engine runs. `SGLANG_EAGLE3_TEST_FAULTS=all` runs every one (half an hour), or a comma-separated list of
ids; with `SGLANG_EAGLE3_RECORD_FAULTS=FILE` what happened is recorded. `tests/data/doctor_faults.json` is the record, and
`tests/unit/test_doctor_faults.py` holds the doctor to it without an engine.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from sglang_eagle3_plugin.cli.doctor import command
from sglang_eagle3_plugin.rig import engine, environments, models
from sglang_eagle3_plugin.rig.engine import EngineResult, EngineSpec

from .doctor_faults import FAULTS, STOCK, Fault

pytestmark = pytest.mark.engine

CHOSEN = os.environ.get("SGLANG_EAGLE3_TEST_FAULTS", FAULTS[0].id)
RUN = [fault for fault in FAULTS if CHOSEN == "all" or fault.id in CHOSEN.split(",")]
RIGHT, WRONG = 4.0, 1.5


def doctor(target: Path, draft: Path, release: str, algorithm: str, *more: str) -> dict[str, dict[str, Any]]:
    arguments = ["--json", "--target", str(target), "--draft", str(draft), "--release", release, *more]
    result = CliRunner().invoke(command, [*arguments, "--", "--speculative-algorithm", algorithm], standalone_mode=False)
    assert result.exception is None, result.exception
    return {f["id"]: f for f in json.loads(result.output)["findings"]}


@pytest.mark.parametrize("fault", RUN, ids=lambda fault: fault.key)
def test_the_fault_happens_and_the_printed_fix_mends_it(fault: Fault, tiny, environment, tmp_path: Path) -> None:
    target = tiny.target(fault.family)
    draft = models.draft(tmp_path / "draft", target, fault.boundaries, ids=fault.ids)
    fault.spoil(draft)

    corrected = tmp_path / "corrected.json"
    found = doctor(target.path, draft, fault.release, fault.algorithm, "--fix-config", str(corrected))
    assert fault.id in found
    broken = run(environments.ensure(fault.release, print), target.path, draft, fault.algorithm, STOCK)
    assert not broken.ok or broken.spec_accept_length is None or broken.spec_accept_length < WRONG

    if corrected.exists():
        corrected.replace(draft / "config.json")
    if fault.mend:
        fault.mend(draft)
    release = fault.mended_release or fault.release
    left = doctor(target.path, draft, release, fault.mended_algorithm, *(["--plugin"] if fault.mended_by_plugin else []))
    assert fault.id not in left
    # Where the fix is not the plugin, it must do without.
    env, variables = (environment(release), {}) if fault.mended_by_plugin else (environments.ensure(release, print), STOCK)
    mended = run(env, target.path, draft, fault.mended_algorithm, variables)
    assert mended.ok, mended.error
    assert mended.spec_accept_length == RIGHT
    record(fault, found[fault.id], broken, mended, release)


def run(env: environments.Environment, target: Path, draft: Path, algorithm: str, variables: dict[str, str]) -> EngineResult:
    return engine.run(env, EngineSpec(target, draft, algorithm=algorithm, environment=variables))


def record(fault: Fault, finding: dict[str, Any], broken: EngineResult, mended: EngineResult, release: str) -> None:
    file = os.environ.get("SGLANG_EAGLE3_RECORD_FAULTS")
    if not file:
        return
    entry = {
        "id": fault.id,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "command": f"SGLANG_EAGLE3_TEST_FAULTS={fault.id} pytest tests/engine/test_doctor_faults.py",
        "release": fault.release,
        "target": fault.family,
        "fault": said(broken),
        "fix": finding["fix"],
        "mended_release": release,
        "mended": said(mended),
    }
    with Path(file).open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(entry) + "\n")


def said(result: EngineResult) -> dict[str, Any]:
    return {
        "answered": result.ok,
        "spec_accept_length": result.spec_accept_length,
        "boundaries": result.boundaries,
        "error": None if result.ok else (result.error or "")[:300],
        "seconds": round(result.seconds),
    }
