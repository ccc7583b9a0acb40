"""Every case H* and R* of `tests/data/cases.json`: tested here with the file's own numbers, or listed with its reason."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace as Thing
from typing import Any

import pytest
from doctor_cases import deployment
from hidden_states.making import HEADER, dump, header, sample
from hidden_states.test_runtime import dumping, forward, request

from sglang_eagle3_plugin.doctor import examine
from sglang_eagle3_plugin.errors import UserError
from sglang_eagle3_plugin.hidden_states import dataset, extract
from sglang_eagle3_plugin.hidden_states.layout import SIDECAR

CASES: dict[str, dict[str, Any]] = {
    case["id"]: case
    for case in json.loads((Path(__file__).parents[1] / "data" / "cases.json").read_text())["cases"]
    if case["id"][0] in "HR"
}
ELSEWHERE = {
    "H02": "is about speed, which is a benchmark and no test: benchmarks/dump.md; of its flags the doctor speaks, below",
    "H06": "wants any boundary of any release in one format: tests/engine/dumps. The stock flag of 0.5.23 is not used: it wants "
    "one pipeline stage and no draft too, and takes ids where this takes boundaries",
}
TESTED = {"H01", "H03", "H04", "H08", "R01"}


def test_every_case_is_tested_or_listed_with_its_reason():
    assert TESTED | set(ELSEWHERE) == set(CASES)


@pytest.mark.parametrize("case_id", sorted(CASES))
def test_the_doctor_says_of_each_what_it_should(case_id):
    # The verdicts that speak of a deployment; those of a dump under way are tested below.
    found = {finding.id for finding in examine(deployment(CASES[case_id]))}
    expected = {v for v in CASES[case_id]["expected_verdict"] if v.startswith("WARN")}
    assert expected <= found


def test_h01_the_need_is_told_before_anything_is_asked_for(tmp_path, monkeypatch):
    case = CASES["H01"]
    layers, width = case["num_hidden_layers"], case["hidden_size"]
    head = header(num_layers=layers, hidden_size=width, boundaries=tuple(case["expected_capture_layers"]))
    whole = head.bytes_per_token() * 65536
    assert round(whole / 1e9, 2) == 1.51  # the file: "65536x4x2880x2 = 1.51 GB"
    assert header(dtype="F8_E4M3", num_layers=layers, hidden_size=width).bytes_per_token() * 65536 < 0.51 * whole
    dump(tmp_path, [sample([1], head=head)], head=head)
    monkeypatch.setattr(extract.shutil, "disk_usage", lambda path: Thing(free=62 << 30))
    todo = [dataset.Sequence(tuple(range(65536)), (), "")] * 53
    with pytest.raises(UserError, match=r"74\.\d GiB are needed for 53 sequences .* 62\.0 GiB free; .*fp8"):
        extract._check_room(tmp_path, todo)


def test_h03_sixteen_prompts_of_1500_tokens_are_whole_or_not_there():
    output = dumping()
    prompts = {f"r{i}": [10_000 * i + j for j in range(1500)] for i in range(16)}
    budget, todo = 4096, [(rid, ids, 0) for rid, ids in prompts.items()]
    while todo:  # SGLang's chunked prefill: as much as fits, the last one cut
        parts, room = [], budget
        while todo and room:
            rid, ids, start = todo.pop(0)
            end = min(len(ids), start + room)
            parts.append((rid, ids[start:end], start))
            room -= end - start
            if end < len(ids):
                todo.insert(0, (rid, ids, end))
        forward(output, "EXTEND", *parts)
        output.on_batch_done([request(rid, prompts[rid]) for rid, *_ in parts])
    assert {rid: rows for rid, (rows, _) in output.spool.out.items()} == prompts
    # The same with a cached prefix: fewer states than tokens, so no sample, and it is counted.
    forward(output, "EXTEND", ("short", prompts["r0"][700:], 700))
    output.on_batch_done([request("short", prompts["r0"], finished=True)])
    assert "short" not in output.spool.out
    assert output.spool.counts == {"cached_prefix": 1}


def test_h04_what_a_speculating_server_verifies_is_never_dumped():
    output = dumping(generated=True)
    forward(output, "EXTEND", ("a", [1, 2], 0), ("b", [3, 4], 0))
    for _ in range(3):  # candidates of both, some of them wrong: 4 rows each
        forward(output, "TARGET_VERIFY", ("a", [9, 9, 9, 9], 2), ("b", [8, 8, 8, 8], 2))
    output.on_batch_done([request("a", [1, 2], [5, 6, 7], finished=True), request("b", [3, 4], [6], finished=True)])
    # b's one generated token was never run, so its sample is whole; a's is short, and is dropped.
    assert output.spool.out == {"b": ([3, 4], 2)}
    assert output.spool.counts == {"incomplete": 1}


def test_h08_resuming_with_nothing_missing_asks_for_nothing(tmp_path, monkeypatch):
    dump(tmp_path, [sample([1, 2]), sample([3])], HEADER)
    monkeypatch.setattr(extract, "server_info", lambda url: {})
    rows = [dataset.Sequence((1, 2), (), "a"), dataset.Sequence((3,), (), "b"), dataset.Sequence((1, 2), (), "c")]
    for _ in range(2):  # no server answers there: any request would fail
        done = extract.extract("http://127.0.0.1:9", rows, tmp_path)
        assert (done.present, done.added, done.missing, done.failed, done.duplicates) == (2, 0, (), {}, 1)
    assert len((tmp_path / SIDECAR).read_text().splitlines()) == 2


def test_r01_a_short_context_is_the_doctors_to_say():
    found = {finding.id for finding in examine(deployment(CASES["R01"]))}
    assert "WARN_MAXPOS" in found
