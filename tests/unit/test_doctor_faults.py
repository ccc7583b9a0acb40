"""The record of faults made on real engines holds, and the doctor still finds each, and nothing in the mended draft."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent.parent
sys.path.insert(0, str(TESTS))

from engine.doctor_faults import FAULTS, Fault  # noqa: E402

from sglang_eagle3_plugin.doctor import examine, fix, load  # noqa: E402
from sglang_eagle3_plugin.doctor.deployment import Deployment  # noqa: E402
from sglang_eagle3_plugin.doctor.flags import parse  # noqa: E402
from sglang_eagle3_plugin.rig import models  # noqa: E402

RECORD: list[dict[str, Any]] = json.loads((TESTS / "data" / "doctor_faults.json").read_text(encoding="utf-8"))["faults"]


def fault_of(entry: dict[str, Any]) -> Fault:
    return next(fault for fault in FAULTS if (fault.id, fault.release) == (entry["id"], entry["release"]))


def test_at_least_ten_errors_were_seen_to_happen_and_to_be_mended() -> None:
    assert len({e["id"] for e in RECORD if e["id"].startswith("ERR_")}) >= 10
    for entry in RECORD:
        broken, mended = entry["fault"], entry["mended"]
        assert not broken["answered"] or broken["spec_accept_length"] is None or broken["spec_accept_length"] < 1.5, entry["id"]
        assert mended["answered"], entry["id"]
        assert mended["spec_accept_length"] == 4.0, entry["id"]


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, models.Target]:
    root = tmp_path_factory.mktemp("targets")
    return {family: models.target(root / family, family) for family in {fault.family for fault in FAULTS}}


@pytest.mark.parametrize("entry", RECORD, ids=lambda e: fault_of(e).key)
def test_a_recorded_fault_is_found_and_mended_as_printed(
    entry: dict[str, Any], targets: dict[str, models.Target], tmp_path: Path
) -> None:
    fault = fault_of(entry)
    target = targets[fault.family]
    draft = models.draft(tmp_path / "draft", target, fault.boundaries, ids=fault.ids)
    fault.spoil(draft)

    def judge(release: str, algorithm: str, plugin: bool = False) -> Deployment:
        flags = parse(["--speculative-algorithm", algorithm])
        return Deployment(load.target(str(target.path), {}), load.draft(str(draft), {}), flags, release, plugin=plugin)

    d = judge(fault.release, fault.algorithm)
    findings = examine(d)
    found = next(f for f in findings if f.id == fault.id)
    assert found.fix
    assert found.evidence
    assert d.draft is not None
    config, changed = fix.corrected(d.draft.config, findings)
    if changed:
        (draft / "config.json").write_text(json.dumps(config))
    if fault.mend:
        fault.mend(draft)
    left = examine(judge(fault.mended_release or fault.release, fault.mended_algorithm, fault.mended_by_plugin))
    assert [f.id for f in left if f.severity != "note"] == []
