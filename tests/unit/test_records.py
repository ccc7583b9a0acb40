"""Records: private, atomic, gone with their process, and never a reason for the server to fail."""

from __future__ import annotations

import json
import os
import stat

import pytest

from sglang_eagle3_plugin import records

SERVE = """
import sys, time, sglang.srt.models.kimi_k25
print("ready", flush=True)
sys.stdin.read()
"""


def test_a_record_is_private_complete_and_removed_at_exit(stand_in, tmp_path):
    snippet = """
    import os, json, stat, sglang.srt.models.kimi_k25
    from sglang_eagle3_plugin import records
    path = records.directory() / f"{os.getpid()}.json"
    print(oct(stat.S_IMODE(path.stat().st_mode)), oct(stat.S_IMODE(path.parent.stat().st_mode)))
    print(path.read_text())
    """
    modes, text = stand_in(snippet).stdout.splitlines()
    assert modes == "0o600 0o700"
    record = json.loads(text)
    assert record["route"] == "pth"
    assert record["release"] == "0.5.9+stand-in"
    assert {row["patch"]: row["state"] for row in record["patches"]} == {"delegation-kimi-k25": "applied"}
    assert list((tmp_path / "records").iterdir()) == []


def test_the_record_of_a_dead_process_or_a_reused_pid_is_not_believed(tmp_path, monkeypatch):
    monkeypatch.setenv("EAGLE3_RUNTIME_DIR", str(tmp_path))
    tmp_path.chmod(0o700)
    for name, pid, start in (("1", 2**22 + 7, 1), ("2", os.getpid(), 12345)):
        (tmp_path / f"{name}.json").write_text(json.dumps({"pid": pid, "ppid": 1, "start_time": start, "patches": []}))
    (tmp_path / f"{2**22 + 9}.json").write_text("{torn")
    assert records.read_all() == []
    assert list(tmp_path.iterdir()) == []
    living = tmp_path / f"{os.getppid()}.json"
    living.write_text("{torn")  # another user's affair than ours: its process may be about to mend it
    assert records.read_all() == []
    assert living.exists()


@pytest.mark.parametrize("kind", ["open to others", "symlink", "file"])
def test_a_directory_that_is_not_ours_alone_is_refused_and_serving_goes_on(stand_in, tmp_path, kind):
    place = tmp_path / "records"
    if kind == "open to others":
        place.mkdir(mode=0o777)
        place.chmod(0o777)
    elif kind == "symlink":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        place.symlink_to(tmp_path / "elsewhere")
    else:
        place.write_text("mine")
    done = stand_in("from sglang.srt.models.kimi_k25 import KimiK25ForConditionalGeneration as K; print(K().get_embed_and_head())")
    assert done.stdout == "('embed', 'head')\n"
    if kind == "file":
        assert place.read_text() == "mine"
    else:
        assert list(place.iterdir()) == []


def test_mode_of_the_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("EAGLE3_RUNTIME_DIR", str(tmp_path / "a/b"))
    assert stat.S_IMODE(records.directory().stat().st_mode) == 0o700
