"""`hidden-states extract` against a stand-in server that dumps through the real writer, refuses, fails and dies."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_eagle3_plugin.errors import UserError
from sglang_eagle3_plugin.hidden_states import dataset, extract
from sglang_eagle3_plugin.hidden_states.layout import SIDECAR
from sglang_eagle3_plugin.hidden_states.reader import Dump
from sglang_eagle3_plugin.hidden_states.writer import Writer

from .making import HEADER, sample


class StandIn:
    """An SGLang server as far as `extract` sees it. ``fate(ids, times asked)`` says what becomes of a request."""

    def __init__(self, directory, fate=lambda ids, asked: "dump", no_cache=True, namespaces=True):
        self.writer = Writer(directory, HEADER, min_free_bytes=0, shard_bytes=1)
        self.asked = {}
        self.cached = set()
        lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self.reply({"tokenizer_path": "nowhere", "disable_radix_cache": no_cache})

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                ids = tuple(body["input_ids"])
                with lock:
                    outer.asked[ids] = outer.asked.get(ids, 0) + 1
                    what = fate(ids, outer.asked[ids])
                    key = body["extra_key"] if namespaces else "one for all"
                    cached = len(ids) - 1 if (key, ids) in outer.cached else 0
                    outer.cached.add((key, ids))
                    if what == "dump" and (no_cache or not cached):
                        outer.writer.add(sample(ids))
                self.reply({"meta_info": {"cached_tokens": cached}}, 500 if what == "error" else 200)

            def reply(self, value, status=200):
                body = json.dumps(value).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *arguments):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()
        self.writer.close()


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(extract, "SETTLE_S", 0.4)


@pytest.fixture
def serve(tmp_path):
    servers = []

    def start(**options):
        servers.append(StandIn(tmp_path / "dump", **options))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def rows(*sequences):
    return [dataset.Sequence(tuple(ids), ((1, len(ids)),), f"data:{i}") for i, ids in enumerate(sequences)]


def test_each_sequence_once_and_its_mask(serve, tmp_path):
    server = serve()
    done = extract.extract(server.url, rows([1, 2, 3], [4, 5], [1, 2, 3]), tmp_path / "dump")
    assert (done.sequences, done.duplicates, done.added, done.missing) == (2, 1, 2, ())
    assert server.asked == {(1, 2, 3): 1, (4, 5): 1}
    dump = Dump.open(tmp_path / "dump")
    assert {tuple(dump.read(ref).loss_mask.tolist()) for ref in dump.refs} == {(0, 1, 1), (0, 1)}


def test_resuming_asks_only_for_what_is_missing(serve, tmp_path):
    server = serve()
    extract.extract(server.url, rows([1, 2]), tmp_path / "dump")
    done = extract.extract(server.url, rows([1, 2], [3, 4]), tmp_path / "dump")
    assert (done.present, done.added) == (1, 1)
    assert server.asked == {(1, 2): 1, (3, 4): 1}
    again = extract.extract(server.url, rows([1, 2], [3, 4]), tmp_path / "dump")
    assert (again.present, again.added, sum(server.asked.values())) == (2, 0, 2)


def test_what_was_dropped_is_asked_for_again_and_what_never_comes_is_named(serve, tmp_path):
    def fate(ids, asked):
        return {1: "drop" if asked < 2 else "dump", 2: "error", 3: "dump"}[ids[0]]

    done = extract.extract(serve(fate=fate).url, rows([1], [2], [3]), tmp_path / "dump")
    assert (done.added, done.missing) == (2, ("data:1",))
    assert list(done.failed.values()) == [3]


def test_each_request_has_a_key_of_its_own_in_the_prefix_cache(serve, tmp_path):
    server = serve(no_cache=False, fate=lambda ids, asked: "drop" if asked < 4 and len(ids) == 2 else "dump")
    done = extract.extract(server.url, rows([1, 2], [1, 2, 3]), tmp_path / "dump", rounds=4)
    assert (done.added, done.missing) == (2, ())
    assert len({key for key, _ in server.cached}) == sum(server.asked.values())


def test_a_server_that_forgets_the_key_is_refused(serve, tmp_path):
    server = serve(no_cache=False, namespaces=False)
    with pytest.raises(UserError, match="restart it with --disable-radix-cache"):
        extract.extract(server.url, rows([1, 2], [1, 2, 3]), tmp_path / "dump")
    assert server.asked == {(1, 2, 3): 2}


def test_more_than_the_disk_holds_is_refused_before_it_is_asked_for(serve, tmp_path, monkeypatch):
    server = serve()
    extract.extract(server.url, rows([1, 2]), tmp_path / "dump")
    monkeypatch.setattr(extract.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 100}))
    with pytest.raises(UserError, match="GiB are needed for 1 sequences"):
        extract.extract(server.url, rows([1, 2], [3, 4, 5]), tmp_path / "dump")
    assert (3, 4, 5) not in server.asked


def test_no_server_is_one_sentence(tmp_path):
    with pytest.raises(UserError, match="does not answer"):
        extract.extract("http://127.0.0.1:9", rows([1]), tmp_path)


def test_a_torn_mask_line_is_closed_off(tmp_path):
    (tmp_path / SIDECAR).write_bytes(b'{"key": "torn", "ma')
    wanted = {"a": rows([1, 2])[0]}
    extract.record_masks(tmp_path, wanted)
    extract.record_masks(tmp_path, wanted)
    lines = (tmp_path / SIDECAR).read_text().splitlines()
    assert len(lines) == 2
    assert json.loads(lines[1]) == {"key": "a", "mask": [[1, 2]], "origin": "data:0"}


class Template:
    """Turns as <role> words <end>; as Qwen's do, a template may drop earlier thinking once another turn follows."""

    def __call__(self, text):
        return {"input_ids": [ord(c) for c in text]}

    def apply_chat_template(self, messages, tokenize, add_generation_prompt, return_dict):
        last = len(messages) - 1
        text = "".join(
            f"<{m['role'][0]}>{m['content'] if i == last else m['content'].replace('~', '')};" for i, m in enumerate(messages)
        )
        return {"input_ids": [ord(c) for c in text + ("<a>" if add_generation_prompt else "")]}


def spoken(sequence):
    return ["".join(map(chr, sequence.ids[start:end])) for start, end in sequence.mask]


def test_chats_count_what_the_assistant_says(tmp_path):
    data = tmp_path / "d.jsonl"
    chat = [("user", "hi"), ("assistant", "yo"), ("user", "and"), ("assistant", "bye")]
    with data.open("w") as file:
        file.write(json.dumps({"messages": [{"role": r, "content": c} for r, c in chat]}) + "\n\n")
        file.write(json.dumps({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}) + "\n")
        file.write(json.dumps({"text": "abc"}) + "\n")
        file.write(json.dumps({"input_ids": [7, 8, 9], "loss_mask": [0, 1, 1]}) + "\n")
    read = list(dataset.read(data, Template()))
    assert [spoken(s) for s in read[:3]] == [["yo;", "bye;"], ["a;"], ["abc"]]
    assert (read[3].ids, read[3].mask, read[3].origin) == ((7, 8, 9), ((1, 3),), "d.jsonl:5")
    assert list(dataset.read(data, Template(), max_length=2))[3].mask == ((1, 2),)


def test_a_turn_that_the_template_rewrote_is_not_what_the_assistant_said(tmp_path):
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "~yo"}] * 2
    (tmp_path / "d.jsonl").write_text(json.dumps({"messages": chat}))
    (read,) = dataset.read(tmp_path / "d.jsonl", Template())
    assert spoken(read) == ["~yo;"]


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("{", "d.jsonl:1 is no JSON"),
        ("[1]", "no JSON object"),
        ('{"a": 1}', "none of input_ids, messages"),
        ('{"input_ids": [1], "loss_mask": []}', "loss_mask has 0 entries for 1 tokens"),
        ('{"text": "a"}', "give --tokenizer"),
        ('{"input_ids": ["x"]}', "d.jsonl:1 cannot be used"),
    ],
)
def test_a_bad_row_is_named(tmp_path, line, sentence):
    (tmp_path / "d.jsonl").write_text(line + "\n")
    with pytest.raises(UserError, match=sentence):
        list(dataset.read(tmp_path / "d.jsonl"))


@given(st.lists(st.booleans()))
def test_runs_say_what_the_mask_says(mask):
    spread = [False] * len(mask)
    for start, end in dataset.runs(mask):
        spread[start:end] = [True] * (end - start)
    assert spread == mask
