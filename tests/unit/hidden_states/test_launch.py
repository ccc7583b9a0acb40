"""`extract --target`: a server is started, used and gone. SGLang is a stand-in here; the real one: tests/engine/dumps."""

import json
import os
import sys
import time
from pathlib import Path

import pytest

from sglang_eagle3_plugin import records
from sglang_eagle3_plugin.cli import main
from sglang_eagle3_plugin.hidden_states import extract
from sglang_eagle3_plugin.hidden_states.reader import Dump

SERVER = """
import json, os, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
place = Path(os.environ["EAGLE3_TEST_PLACE"])
flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
(place / "argv.json").write_text(json.dumps(sys.argv[1:]))
(place / "pid").write_text(str(os.getpid()))
(place / "when_full").write_text(os.environ["EAGLE3_DUMP_WHEN_FULL"])
if flags["--model-path"] == "broken":
    raise ValueError("this model is broken")
from hidden_states.making import HEADER, sample
from sglang_eagle3_plugin.hidden_states.writer import Writer
writer = Writer(Path(os.environ["EAGLE3_DUMP_DIR"]), HEADER, min_free_bytes=0, shard_bytes=1)
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.reply({"disable_radix_cache": "--disable-radix-cache" in sys.argv})
    def do_POST(self):
        writer.add(sample(json.loads(self.rfile.read(int(self.headers["Content-Length"])))["input_ids"]))
        self.reply({})
    def reply(self, value):
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *arguments):
        pass
ThreadingHTTPServer(("127.0.0.1", int(flags["--port"])), Handler).serve_forever()
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A package `sglang` on the path of this process and its children; where its server leaves its traces."""
    (tmp_path / "site/sglang").mkdir(parents=True)
    (tmp_path / "site/sglang/__init__.py").touch()
    (tmp_path / "site/sglang/launch_server.py").write_text(SERVER)
    here = Path(__file__).parents[1]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (tmp_path / "site", here, here.parents[1]))))
    monkeypatch.setenv("EAGLE3_PLUGIN", "0")
    monkeypatch.setenv("EAGLE3_TEST_PLACE", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setattr(extract, "SETTLE_S", 0.4)
    (tmp_path / "data.jsonl").write_text("".join(json.dumps({"input_ids": [i, 5]}) + "\n" for i in (1, 2, 3)))
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "sglang"]:
        del sys.modules[name]


def run(capsys, place, *arguments):
    with pytest.raises(SystemExit) as stop:
        main(["hidden-states", "extract", "--data", str(place / "data.jsonl"), "--dump", str(place / "d"), *arguments])
    out, err = capsys.readouterr()
    return stop.value.code, out, err


def gone(place):
    pid = int((place / "pid").read_text())
    until = time.monotonic() + 5
    while records.start_time(pid) is not None and time.monotonic() < until:
        time.sleep(0.05)
    return records.start_time(pid) is None


def test_a_server_is_started_used_and_gone(place, capsys):
    code, out, _ = run(capsys, place, "--target", "/some/target", "--", "--dtype", "bfloat16")
    assert (code, "3 sequences added" in out) == (0, True)
    argv = json.loads((place / "argv.json").read_text())
    assert argv[:2] == ["--model-path", "/some/target"]
    assert argv[-3:] == ["--disable-radix-cache", "--dtype", "bfloat16"]
    assert (place / "when_full").read_text() == "wait"
    assert gone(place)
    assert len(Dump.open(place / "d").refs) == 3
    assert (place / "d").stat().st_mode & 0o777 == 0o700
    code, out, _ = run(capsys, place, "--target", "/some/target")
    assert (code, "0 sequences added, 3 were there" in out) == (0, True)


def test_one_that_fails_is_one_sentence_with_its_reason(place, capsys):
    code, _, err = run(capsys, place, "--target", "broken")
    (line,) = [line for line in err.splitlines() if line.startswith("sglang-eagle3:")]
    assert code == 2
    assert "the server for broken did not start: ValueError: this model is broken" in line
    assert gone(place)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((), "give --url, or --target"),
        (("--url", "http://127.0.0.1:9", "--target", "x"), "give --url, or --target"),
        (("--url", "http://127.0.0.1:9", "--", "--dtype", "auto"), "flags go to a server that is started here"),
        (("--target", "x", "--", "--port=1"), "--port=1 is set by"),
    ],
)
def test_what_cannot_be_is_one_sentence(place, capsys, arguments, sentence):
    code, _, err = run(capsys, place, *arguments)
    assert (code, sentence in err, "Traceback" in err) == (2, True, False)
    assert not (place / "pid").exists()


def test_data_that_cannot_be_read_is_told_before_a_model_is_loaded(place, capsys):
    (place / "data.jsonl").write_text("{")
    code, _, err = run(capsys, place, "--target", "x")
    assert (code, "data.jsonl:1 is no JSON" in err) == (2, True)
    assert not (place / "pid").exists()


def test_without_sglang_it_says_so(tmp_path, capsys, monkeypatch):
    (tmp_path / "data.jsonl").write_text('{"input_ids": [1]}\n')
    code, _, err = run(capsys, tmp_path, "--target", "x")
    assert (code, "SGLang is not installed in this environment" in err) == (2, True)
