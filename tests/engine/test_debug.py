"""EAGLE3_DEBUG in real servers: its numbers against transformers', live switching under load, files it must not obey, miswirings.

One server a release does it all; a target whose layers are labelled, a draft that is always right.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import threading
import time
from pathlib import Path

import pytest

from sglang_eagle3_plugin.rig import engine, models
from sglang_eagle3_plugin.rig.engine import EngineSpec
from sglang_eagle3_plugin.runtime.debug import control
from sglang_eagle3_plugin.server import debug

from .conftest import RELEASES

pytestmark = [pytest.mark.engine, pytest.mark.slow]

BOUNDARIES = (3, 5, 6)
CHUNK = 16
LONG = tuple((7 * i + 200) % 256 for i in range(40))
EIGHT = tuple((i, 3 * i + 1, 5 * i + 2) for i in range(1, 9))
TOKENS = 8
TOGGLES = 20
CLOSE = 1e-3


class Scene:
    """A server with debug, what it has said, and the ways to disturb it."""

    def __init__(self, server, place: Path, environment, target):
        self.server, self.place, self.environment, self.target = server, place, environment, target
        self.file = place / "lines.jsonl"

    def generate(self, *prompts):
        outputs = self.server.generate(prompts, TOKENS)
        assert [output["output_ids"] for output in outputs] == [models.continuation(prompt, TOKENS) for prompt in prompts]

    def switch(self, on: bool, spec: str = "steps=100000,rate=0,ids=1") -> list[debug.State]:
        states = debug.switch(self.server.pid, on=on, spec=spec, file=str(self.file))
        until = time.monotonic() + 60  # a machine with other work may take longer than a command waits
        while any(state.on is not on for state in states) and time.monotonic() < until:
            time.sleep(0.2)
            states = debug.states(self.server.pid)
        return states

    def lines(self) -> list[dict]:
        return [json.loads(line) for line in self.file.read_text().splitlines()] if self.file.exists() else []

    def said_during(self, act, kind: str) -> list[dict]:
        """The lines of passes of a kind that an act brings."""
        before = len(self.lines())
        act()
        until = time.monotonic() + 30
        while not (found := [said for said in self.lines()[before:] if said["pass"] == kind]) and time.monotonic() < until:
            time.sleep(0.2)
        return found

    def log(self) -> str:
        return self.server.place.log.read_text(errors="replace")

    def sabotage(self, word: str):
        (self.place / "sabotage").write_text(word)


@contextlib.contextmanager
def staged(ready, tiny, place, environment=None, **arguments):
    """Serve with the witness and the saboteur in each process; variables and arguments are further ones of the server."""
    variables = {
        # eagle3_rig lies beside the rig's sitecustomize.
        "PYTHONPATH": f"{Path(__file__).parent / 'debug_site'}{os.pathsep}{engine.SITE}",
        "EAGLE3_TEST_RIG": str(engine.SITE),
        "EAGLE3_TEST_WITNESS": str(place / "witness.jsonl"),
        "EAGLE3_TEST_SABOTAGE": str(place / "sabotage"),
        **(environment or {}),
    }
    target = tiny.target("llama")
    draft = tiny.draft("llama", "labelled-debug", BOUNDARIES, convention="output")
    spec = EngineSpec(target.path, draft, environment=variables, arguments={"chunked_prefill_size": CHUNK, **arguments})
    with engine.serve(ready, spec) as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("EAGLE3_RUNTIME_DIR", str(server.place.records))
        made = Scene(server, place, ready, target)
        made.generate((9, 8, 7))  # what is only done once is done
        yield made


@pytest.fixture(scope="module", params=RELEASES)
def scene(request, environment, tiny, tmp_path_factory):
    with staged(environment(request.param), tiny, tmp_path_factory.mktemp("debug")) as made:
        yield made


def expected(scene, sequences):
    (scene.place / "sequences.json").write_text(json.dumps(sequences))
    argv = [str(scene.environment.python), str(Path(__file__).parent / "debug_states.py"), str(scene.target.path)]
    subprocess.run([*argv, str(scene.place / "sequences.json"), str(scene.place / "states.json")], check=True, env=clean())
    return json.loads((scene.place / "states.json").read_text())


def clean():
    return {name: value for name, value in os.environ.items() if not name.startswith(("EAGLE3_", "PYTHON"))}


def test_numbers_are_those_of_an_independent_model(scene):
    assert all(state.on for state in scene.switch(True))
    witnessed = len(witness(scene))
    for prompts in ((LONG,), EIGHT):
        scene.generate(*prompts)
    time.sleep(7)  # a step whose requests ended with their verify is written when the server has been idle
    assert [(state.on, state.faults, state.problem) for state in scene.switch(False)] == [(False, 0, "")]
    lines, seen = scene.lines(), witness(scene)[witnessed:]

    prompts = [*EIGHT, LONG]
    full = [[*prompt, *models.continuation(prompt, TOKENS + 8)] for prompt in prompts]
    states = expected(scene, full)
    # Request ids are the server's; the first token of each prompt tells them apart.
    which: dict[str, int] = {}
    at: dict[str, int] = {}
    checked: dict[tuple[str, int], int] = {}
    rows: list[tuple[int, int]] = []
    for said in lines:
        if said["pass"] == "draft decode":
            continue
        requests = said["requests"]
        if said["pass"] == "target prefill":
            rows, ids = [], list(said["ids"])
            while ids:
                rid = next(r for r in requests if r not in which or at[r] < len(prompts[which[r]]))
                if rid not in which:
                    which[rid] = next(i for i, prompt in enumerate(prompts) if prompt[0] == ids[0])
                    at[rid] = 0
                n = min(len(ids), len(prompts[which[rid]]) - at[rid])
                rows += [(which[rid], at[rid] + i) for i in range(n)]
                assert ids[:n] == full[which[rid]][at[rid] : at[rid] + n]
                at[rid] += n
                ids = ids[n:]
        elif said["pass"] == "target verify":
            rows = [(which[rid], at[rid] + i) for rid in requests for i in range(4)]
            assert said["ids"] == [full[sequence][position] for sequence, position in rows]
        elif said["after"] == "verify":
            of = dict(zip((tuple(row) for row in rows), rows, strict=True))
            rows = [row for rid in requests for row in of if row[0] == which[rid]]
            for rid, count in said["accepted"].items():
                assert count == 4
                at[rid] += count
        assert said["verdicts"] == []
        assert said["tokens"] == len(rows)
        for slot, boundary in zip(said["slots"], BOUNDARIES, strict=True):
            due = [states[sequence][boundary][position] for sequence, position in rows]
            assert slot["boundary"] == boundary
            assert slot["norm"] == pytest.approx(sum(row[0] for row in due) / len(due), rel=CLOSE)
            assert slot["norm_min"] == pytest.approx(min(row[0] for row in due), rel=CLOSE)
            assert slot["mean"] == pytest.approx(sum(row[1] for row in due) / len(due), rel=CLOSE)
            assert slot["first"] == pytest.approx(due[0][2], rel=CLOSE, abs=CLOSE)
        key = (said["pass"], len(set(requests)))
        checked[key] = checked.get(key, 0) + 1
    for name in ("target prefill", "target verify", "draft extend"):
        assert {count for kind, count in checked if kind == name} >= {1}, checked
        assert max(count for kind, count in checked if kind == name) > 1, checked
    assert checked[("target prefill", 1)] >= 3, "the long prompt is prefilled in chunks"
    assert ("target verify", 8) in checked, checked

    decodes = [said for said in lines if said["pass"] == "draft decode"]
    inside = [line for line in seen if line["mode"] == "DECODE"]
    assert len(decodes) >= 2
    for said, line in zip(decodes, inside, strict=True):
        assert said["slots"][0]["norm"] == pytest.approx(line["norm"], rel=CLOSE)
        assert said["slots"][0]["mean"] == pytest.approx(line["mean"], rel=CLOSE)
        assert said["slots"][0]["first"] == pytest.approx(line["first"], rel=CLOSE, abs=CLOSE)


def witness(scene) -> list[dict]:
    return [json.loads(line) for line in (scene.place / "witness.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("word", "verdict", "what"),
    [
        ("zero", "zeroed", "slot 1 (boundary 5) is all zero"),
        ("nan", "nan", "slot 1 (boundary 5) holds NaN"),
        ("repeat", "shifted", "slot 1 (boundary 5) holds the same values as slot 0 (boundary 3)"),
        ("shift", "shifted", "boundaries 4,6,7 are captured, the draft was trained on 3,5,6: shifted by +1"),
    ],
)
def test_a_miswiring_is_named(scene, word, verdict, what):
    # Switched on while it lasts: labels are read then, and every few seconds.
    scene.sabotage(word)
    try:
        scene.server.generate(((1, 2, 3),), 1)
        scene.switch(True)
        said = scene.said_during(lambda: scene.generate((1, 2, 3)), "target verify")
    finally:
        scene.sabotage("")
        scene.server.generate(((1, 2, 3),), 1)
        scene.switch(False)
    found = [(v["verdict"], v["says"]) for one in said for v in one["verdicts"]]
    assert any(name == verdict and what in says for name, says in found), found


@pytest.mark.parametrize("fault", ["torn", "link", "readable", "another user's", "a bad spec"])
def test_a_control_file_that_is_not_to_be_obeyed_costs_a_line(scene, fault):
    [state] = debug.states(scene.server.pid)
    path = control.path_for(state.pid)
    path.unlink(missing_ok=True)
    elsewhere = scene.place / "elsewhere"
    spec = "colour=red" if fault == "a bad spec" else "1"
    text = json.dumps(vars(control.Command(state.pid, state.start_time, 1, True, spec)))
    made = elsewhere if fault == "link" else path
    made.write_text(text[:20] if fault == "torn" else text)
    made.chmod(0o644 if fault == "readable" else 0o600)
    if fault == "link":
        path.symlink_to(elsewhere)
    elif fault == "another user's":
        if os.geteuid():
            pytest.skip("only root can make another user's file")
        os.chown(path, 12345, -1)
    before = scene.log().count("a debug command is not obeyed")
    time.sleep(3)
    scene.generate((4, 5, 6))
    assert scene.log().count("a debug command is not obeyed") == before + 1
    assert not debug.states(scene.server.pid)[0].on
    path.unlink()


def test_toggled_under_load_nothing_fails_and_nothing_grows(scene):
    [state] = debug.states(scene.server.pid)
    stop, faults = threading.Event(), []

    def load():
        while not stop.is_set():
            try:
                scene.generate((11, 12, 13))
            except BaseException as error:
                faults.append(error)
                return

    threads = [threading.Thread(target=load) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        debug.switch(state.pid, on=True, spec="every=1,rate=0")
        debug.switch(state.pid, on=False)
        before = size(state.pid)
        for _ in range(TOGGLES):
            for on in (True, False):
                [now] = debug.switch(state.pid, on=on, spec="every=1,rate=0")
                assert (now.on, now.problem) == (on, "")
        after = size(state.pid)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert faults == []
    assert after[0] <= before[0] + 2, "file handles"  # sockets of requests under way come and go
    assert after[1] <= before[1] + 64, "MiB resident"
    assert debug.states(scene.server.pid)[0].faults == 0


def size(pid: int) -> tuple[int, float]:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return len(list(Path(f"/proc/{pid}/fd").iterdir())), pages * os.sysconf("SC_PAGE_SIZE") / 2**20
