"""EAGLE3_DEBUG over two tensor-parallel ranks, on the CPU: whether they hold the same, and what is said where they don't."""

from __future__ import annotations

import os
import time

import pytest

from sglang_eagle3_plugin.server import debug

from .conftest import RELEASES
from .test_debug import staged

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.fixture(scope="module", params=RELEASES)
def scene(request, environment, tiny, tmp_path_factory):
    variables = {
        "SGLANG_CPU_OMP_THREADS_BIND": "0|1",  # more CPU ranks than NUMA nodes are refused unless each is told its cores
        "SGLANG_NCCL_SO_PATH": os.devnull,  # no NCCL: it would be asked for a communicator of a device that isn't there
    }
    place = tmp_path_factory.mktemp("ranks")
    with staged(environment(request.param), tiny, place, variables, tp_size=2, disable_custom_all_reduce=True) as made:
        yield made


def compared(scene) -> list[dict]:
    """The lines so far about ranks that differ: rank 0 writes them, a second or so after the pass.

    Those about the draft's own states are left out: what it makes of different states differs too.
    """
    return [said for said in scene.lines() if "slots" not in said and said["pass"] != "draft decode"]


def test_ranks_that_hold_the_same_are_compared_and_nothing_is_said(scene):
    assert [state.role for state in scene.switch(True)] == ["scheduler TP0", "scheduler TP1"]
    scene.generate((1, 2, 3), (4, 5, 6))
    until = time.monotonic() + 30
    while not any(state.ranks_compared for state in debug.states(scene.server.pid)) and time.monotonic() < until:
        time.sleep(0.5)
    assert [bool(state.ranks_compared) for state in debug.states(scene.server.pid)] == [True, False]
    scene.switch(False)
    said = scene.lines()
    assert {line["rank"] for line in said} == {0, 1}
    assert [line["verdicts"] for line in said if line["verdicts"]] == []


def test_partial_sums_are_named(scene):
    scene.switch(True)
    before = len(compared(scene))
    scene.sabotage("partial")
    try:
        scene.server.generate(((1, 2, 3),), 8)
        until = time.monotonic() + 30
        while len(compared(scene)) == before and time.monotonic() < until:
            time.sleep(0.5)
    finally:
        scene.sabotage("")
        scene.switch(False)
    found = [verdict for said in compared(scene)[before:] for verdict in said["verdicts"]]
    assert found
    assert {verdict["verdict"] for verdict in found} == {"partial-sums"}
    # The share of rank 0 is a quarter, that of rank 1 three; no other slot is named.
    assert all(verdict["says"].startswith("slot 1 has norm ") and "on rank 1" in verdict["says"] for verdict in found), found
    numbers = [[float(word) for word in verdict["says"].split() if word.replace(".", "").isdigit()] for verdict in found]
    assert all(theirs == pytest.approx(3 * mine, rel=0.01) for _, mine, _, theirs, *_ in numbers), numbers
    assert scene.log().count("WRONG partial-sums: slot 1 has norm ") >= 1
