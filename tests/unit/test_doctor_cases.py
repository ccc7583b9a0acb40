"""Every public case gets its verdict, and whatever is no miswiring gets none."""

from __future__ import annotations

from typing import Any

import pytest
from doctor_cases import CASES, deployment

from sglang_eagle3_plugin.doctor import examine
from sglang_eagle3_plugin.doctor.findings import for_json, verdict
from sglang_eagle3_plugin.doctor.wiring import as_json

UNDECIDED = {
    # The case's release, 0.5.5, is guessed from the thread's date. Its wheel has neither method; 0.5.5.post1 and .post2 have one.
    "W06": "ERR_WRAPPER_PARTIAL_HOOKS",
}
CONTROLS = [case for case in CASES if "OK" in case["expected_verdict"] or case["kind"] == "not_miswiring"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_case_gets_its_verdict(case: dict[str, Any], tmp_path: Any) -> None:
    d = deployment(case, tmp_path)
    found = {f["id"] for f in for_json(examine(d))}
    expected = {v for v in case["expected_verdict"] if v != "OK"}
    assert expected - {UNDECIDED.get(case["id"])} <= found


def test_half_of_the_hooks_came_one_release_after_the_one_guessed_in_w06() -> None:
    case = next(case for case in CASES if case["id"] == "W06")
    assert "ERR_WRAPPER_NO_HOOKS" in [f.id for f in examine(deployment(case))]
    found = {f["id"] for f in for_json(examine(deployment({**case, "sglang_version": "0.5.5.post1"})))}
    assert set(case["expected_verdict"]) <= found


@pytest.mark.parametrize("case", CONTROLS, ids=lambda case: case["id"])
def test_what_is_no_miswiring_gets_no_error_and_no_warning(case: dict[str, Any]) -> None:
    findings = examine(deployment(case))
    assert verdict(findings) == "ok", [f.id for f in findings if f.severity != "note"]


@pytest.mark.parametrize(
    "case", [c for c in CASES if isinstance(c["expected_capture_layers"], list) and c["draft_config"]], ids=lambda c: c["id"]
)
def test_case_gets_the_boundaries_it_should_have(case: dict[str, Any]) -> None:
    wiring = as_json(deployment({**case, "id": ""}))
    if wiring["convention"] == "ambiguous":
        assert case["expected_capture_layers"] in wiring["readings"].values()
    else:
        assert wiring["wanted"] == case["expected_capture_layers"]


@pytest.mark.parametrize(
    "case", [c for c in CASES if c["stock_capture_layers"] and c["sglang_version"] and c["draft_config"]], ids=lambda c: c["id"]
)
def test_case_gets_the_boundaries_that_stock_captures(case: dict[str, Any]) -> None:
    expected = case["stock_capture_layers"]
    if isinstance(expected, dict):
        ranges = {
            "0.5.13": ">=0.5.13",
            "0.5.10.post1": "<=0.5.10.post1",
        }
        expected = expected.get(ranges.get(case["sglang_version"], ""), expected.get("top_level"))
    stock = as_json(deployment({**case, "id": ""}))["stock"]
    if isinstance(expected, dict):
        assert stock == {"cuda_graph": expected["cuda_graph"], "eager": expected["eager_prefill"]}
    else:
        assert stock is not None
        assert stock["eager"] == expected
