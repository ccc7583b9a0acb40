"""Every order of activation, import, second activation, revert and a second plugin, on real releases and both routes."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from sglang_eagle3_plugin.rig import engine

HERE = Path(__file__).parent
pytestmark = pytest.mark.engine


def drive(environment, script: str, *words: str, **variables: str):
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("EAGLE3_", "PYTHON"))}
    done = subprocess.run(
        [str(environment.python), str(HERE / script), *words],
        capture_output=True,
        text=True,
        timeout=400,
        env={
            **inherited,
            **engine.ENVIRONMENT,
            "PYTHONPATH": str(engine.SITE),
            "EAGLE3_RIG_LAUNCHER": str(os.getpid()),
            "SGLANG_PLUGINS": "eagle3",
            **variables,
        },
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def expected(order: list[str], native: bool) -> dict:
    """What must be found after an order of steps: the rules in a few lines, beside the code that has to follow them."""
    active = imported = applied = reverted = other = other_saw_hook = False
    for step in order:
        active |= step in ("activate", "again")
        imported |= step in ("import", "other")
        # Activation is idempotent: what was reverted is not put back by a second one.
        applied |= active and imported and not native and not reverted
        if step == "revert" and applied:
            applied, reverted = False, True
        if step == "other":
            other, other_saw_hook = True, native or applied
    ours = [] if not applied else ["get_embed_and_head", "set_eagle3_layers_to_capture", "set_embed_and_head"]
    return {
        # The release's own setter returns nothing; ours hands on what the inner model's returned.
        "setter": None if native else "setter" if applied else "absent",
        "embed": ["other's", "inner's" if other_saw_hook else None] if other else "absent",
        "state": "native" if native else "reverted" if reverted else "applied",
        "ours": ours,
    }


def check(found: dict, native: bool) -> None:
    assert len(found) == 120
    for name, answer in found.items():
        want = expected(name.split("-"), native)
        # The second plugin set get_embed_and_head last, or first, and then it was not ours to set.
        want["ours"] = [hook for hook in want["ours"] if hook != "get_embed_and_head"]
        assert answer == want, name


def test_on_059_by_the_pth(env059):
    check(drive(env059, "orders_driver.py", "pth"), native=False)


def test_on_0523_native_methods_stay_whatever_the_order(env0523):
    check(drive(env0523, "orders_driver.py", "entry-point"), native=True)


@pytest.mark.parametrize("route", ["pth", "entry-point"])
def test_on_0523_as_a_fork_that_lacks_the_hooks(env0523, route):
    check(drive(env0523, "orders_driver.py", route, "without-hooks"), native=False)


def test_layer_stacks_of_every_shape(env059):
    assert drive(env059, "capture_driver.py") == {
        "inner": [1, 3, 5],
        "both edges": [0, 3, 6],
        "edges alone": [0, 6],
        "every boundary": [0, 1, 2, 3, 4, 5, 6],
        "marks": [1, 3, 6],
        "marks, after another wiring": [2, 3, 5],
        "marks left over by a setter": [2, 3],
        "packed": [0, 3, 6],
        "packed into a decode buffer": [0, 3, 6],
        "packed, inner alone, into a decode buffer": [1, 3, 5],
        "packed, edges alone": [0, 6],
        "idle rank": ["0 rows", "0 rows"],
        "a prefill graph": [0, 3, 6],
        "a prefill graph, edges alone": [0, 6],
        "a forward that goes around": True,
        "taken back leaves nothing": True,
        "generic tap": [1, 3, 5],
        "generic tap, both edges": [0, 3, 6],
        "generic tap, unused or taken back, leaves nothing": True,
    }
