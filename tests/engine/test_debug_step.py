"""The device side of debug on a real torch, without an engine."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

import sglang_eagle3_plugin

from .conftest import RELEASES

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module", params=RELEASES)
def lines(request, environment):
    argv = [str(environment(request.param).python), str(Path(__file__).parent / "debug_step.py")]
    variables = os.environ | {"PYTHONPATH": str(Path(sglang_eagle3_plugin.__file__).parents[1]), "EAGLE3_PLUGIN": "0"}
    done = subprocess.run(argv, capture_output=True, text=True, env=variables, timeout=300)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_the_numbers_are_the_tensors(lines):
    prefill, extend, verify, after = lines[:4]
    assert [said["pass"] for said in lines[:4]] == ["target prefill", "draft extend", "target verify", "draft extend"]
    assert prefill["slots"][2]["norm"] == pytest.approx(prefill["due"]["norm"], rel=1e-5)
    assert prefill["agreement"]["embedding_slots"] == [0]
    assert extend["agreement"] == {"fed": 5, "emitted": 5, "pairs": 3, "follow": 3}
    assert after["agreement"] == {"fed": 3, "emitted": 3}
    assert after["accepted"] == {"a": 1, "b": 2}
    assert prefill["ids"] == [3, 4, 5, 6, 7]
    assert [said["verdicts"] for said in (prefill, extend, verify, after)] == [[]] * 4


def test_one_requests_tokens_alone_where_it_is_asked_for(lines):
    prefill = lines[4]
    assert (prefill["tokens"], prefill["measured"]) == (5, 2)
    assert prefill["slots"][2]["norm"] == pytest.approx(prefill["due"]["b"], rel=1e-5)
    assert "ids" not in prefill


def test_a_token_that_is_not_the_next_one_is_named(lines):
    assert [verdict["verdict"] for verdict in lines[9]["verdicts"]] == ["unpaired"]


def test_a_step_of_any_size_is_measured(lines):
    prefill, extend, verify = lines[12:]
    assert [said["measured"] for said in lines[12:]] == [2500, 2500, 8]
    assert extend["agreement"] == {"fed": 256, "emitted": 256, "pairs": 2498, "follow": 2498}
    for said in (prefill, extend, verify):
        assert said["slots"][2]["norm"] == pytest.approx(said["due"], rel=1e-5)
        assert said["verdicts"] == []
