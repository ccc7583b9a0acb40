"""`hidden-states extract --target`, as a user of a release's environment runs it: it starts the real engine, and ends it."""

import json
import os
import subprocess

import pytest

from sglang_eagle3_plugin.hidden_states.layout import sample_key
from sglang_eagle3_plugin.hidden_states.reader import Dump
from sglang_eagle3_plugin.hidden_states.verify import verify
from sglang_eagle3_plugin.rig import engine, environments, installing, models

from ..conftest import OLDEST


@pytest.mark.engine
@pytest.mark.slow
def test_extract_starts_the_engine_dumps_every_row_and_ends_it(tmp_path):
    environment = environments.ensure(OLDEST)
    installing.install_plugin(environment)
    target = models.target(tmp_path / "target")
    rows = [list(range(start, start + 30)) for start in (10, 50, 90)]
    rows.append([*rows[0], 7, 8])  # begins as another does
    (tmp_path / "data.jsonl").write_text(
        "".join(json.dumps({"input_ids": row, "loss_mask": [0, *[1] * (len(row) - 1)]}) + "\n" for row in rows)
    )
    spec = engine.EngineSpec(target.path)
    flags = {
        name: value for name, value in spec.engine_arguments(OLDEST).items() if name not in ("model_path", "disable_radix_cache")
    }
    variables = {
        "PYTHONPATH": str(engine.SITE),
        "EAGLE3_RUNTIME_DIR": str(tmp_path / "records"),
        "EAGLE3_DUMP_BOUNDARIES": "1,6",
        "EAGLE3_DUMP_MIN_FREE_GB": "0",
    }
    command = [environment.python, "-m", "sglang_eagle3_plugin", "hidden-states", "extract", "--target", target.path, "--json"]
    command += ["--data", tmp_path / "data.jsonl", "--dump", tmp_path / "dump", "--", *engine.flags(flags)]
    done = subprocess.run(command, env=os.environ | engine.ENVIRONMENT | variables, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-4000:]
    said = json.loads(done.stdout)
    assert (said["added"], said["missing"], said["failed"]) == (4, [], {})
    dump = Dump.open(tmp_path / "dump")
    assert verify(dump) == []
    assert {ref.key for ref in dump.refs} >= {sample_key(row) for row in rows}  # and SGLang's own warm-up
    assert dump.header().boundaries == (1, 6)
    assert all(dump.read(ref).loss_mask[0] == 0 for ref in dump.refs if ref.key == sample_key(rows[0]))
    running = subprocess.run(["pgrep", "-f", str(target.path)], capture_output=True, text=True).stdout.split()
    assert running == []
