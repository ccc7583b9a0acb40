"""The store: what the writer acknowledges, the reader gives back; nothing else, whatever happened in between."""

import contextlib
import json
import os
import random
import signal
import stat
import subprocess
import sys
import time
from concurrent import futures
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_eagle3_plugin.errors import UserError
from sglang_eagle3_plugin.hidden_states import reader as reader_module
from sglang_eagle3_plugin.hidden_states import writer as writer_module
from sglang_eagle3_plugin.hidden_states.layout import Header, sample_key
from sglang_eagle3_plugin.hidden_states.reader import CorruptShardError, Dump, to_float32
from sglang_eagle3_plugin.hidden_states.writer import DumpFullError, Writer

from .making import HEADER, dump, header, sample


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 2**40), min_size=1, max_size=9), max_size=12),
    st.integers(1, 2000),
    st.text(max_size=20),
)
def test_what_is_written_is_read_back(tmp_path_factory, sequences, shard_bytes, request_id):
    directory = tmp_path_factory.mktemp("dump")
    written = [sample(ids, request=request_id, prompt_tokens=1) for ids in sequences]
    dump(directory, written, shard_bytes=shard_bytes)
    read = Dump.open(directory)
    assert read.problems == []
    assert [(ref.key, ref.request, ref.prompt_tokens) for ref in read.refs] == [
        (sample_key(ids), request_id, 1) for ids in sequences
    ]
    for ref, source in zip(read.refs, written, strict=True):
        tensors = read.read(ref)
        assert tensors.input_ids.tolist() == source.token_ids
        assert np.array_equal(tensors.aux, source.tensors["aux"][2])
        assert np.array_equal(tensors.final, source.tensors["final"][2])


def test_the_safetensors_library_reads_the_shards(tmp_path):
    dump(tmp_path, [sample([1, 2, 3]), sample([4])])
    (shard,) = tmp_path.glob("*.safetensors")
    with safetensors.safe_open(shard, framework="numpy") as file:
        assert json.loads(file.metadata()["header"])["boundaries"] == [2, 3, 5]
        assert file.get_slice("0.aux").get_shape() == [3, 3, 4]
        assert file.get_tensor("1.input_ids").tolist() == [4]


def test_files_are_private(tmp_path):
    dump(tmp_path / "new" / "dir", [sample([1])])
    assert stat.S_IMODE((tmp_path / "new" / "dir").stat().st_mode) == 0o700
    assert {stat.S_IMODE(p.stat().st_mode) for p in (tmp_path / "new" / "dir").iterdir()} == {0o600}


def test_a_hostile_request_id_reaches_no_file_name(tmp_path):
    dump(tmp_path / "d", [sample([1], request="../../etc/passwd\n\x00\x1b[31m")])
    assert sorted(p.name for p in tmp_path.rglob("*") if p.is_file()) == ["manifest-w0001.jsonl", "w0001-000000.safetensors"]
    assert Dump.open(tmp_path / "d").refs[0].request == "../../etc/passwd\n\x00\x1b[31m"


def test_two_writers_share_a_directory(tmp_path):
    first, second = (Writer(tmp_path, HEADER, min_free_bytes=0) for _ in range(2))
    first.add(sample([1, 2]))
    second.add(sample([3, 4]))
    second.close()
    third = Writer(tmp_path, HEADER, min_free_bytes=0)  # its sweep must not touch the living first
    first.close()
    third.close()
    assert {ref.shard for ref in Dump.open(tmp_path).refs} == {"w0001-000000.safetensors", "w0002-000000.safetensors"}


def test_a_changed_shard_is_never_read_as_good(tmp_path):
    dump(tmp_path, [sample([1, 2, 3])])
    (shard,) = tmp_path.glob("*.safetensors")
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    read = Dump.open(tmp_path)
    with pytest.raises(CorruptShardError, match="not what was acknowledged"):
        read.read(read.refs[0])


def test_a_changed_header_line_is_never_read_as_good(tmp_path):
    dump(tmp_path, [sample([1, 2, 3])])
    manifest = tmp_path / "manifest-w0001.jsonl"
    manifest.write_text(manifest.read_text().replace('"boundaries":[2,3,5]', '"boundaries":[1,3,5]'))
    read = Dump.open(tmp_path)
    with pytest.raises(CorruptShardError, match="another header"):
        read.read(read.refs[0])


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_manifest_cut_or_garbled_anywhere_yields_only_acknowledged_samples(tmp_path_factory, data):
    directory = tmp_path_factory.mktemp("dump")
    dump(directory, [sample([i, i + 1]) for i in range(4)], shard_bytes=1)
    manifest = directory / "manifest-w0001.jsonl"
    content = manifest.read_bytes()
    cut = data.draw(st.integers(0, len(content)))
    garbage = data.draw(st.binary(max_size=30))
    manifest.write_bytes(content[:cut] + garbage)
    read = Dump.open(directory)
    assert len(read.refs) <= content[:cut].count(b"\n")
    for ref in read.refs:
        assert sample_key(read.read(ref).input_ids.tolist()) == ref.key


def test_a_shard_name_that_leaves_the_directory_is_not_trusted(tmp_path):
    dump(tmp_path, [sample([1])])
    manifest = tmp_path / "manifest-w0001.jsonl"
    manifest.write_text(manifest.read_text().replace("w0001-000000", "../w0001-000000"))
    read = Dump.open(tmp_path)
    assert read.refs == []
    assert "not trusted" in read.problems[0]


def test_mixed_dumps_are_refused_for_one_header(tmp_path):
    dump(tmp_path, [sample([1])])
    other = header(boundaries=(1, 2, 3))
    dump(tmp_path, [sample([1], head=other)], head=other)
    with pytest.raises(UserError, match="mixes dumps with boundaries"):
        Dump.open(tmp_path).header()


def test_duplicates_count_once(tmp_path):
    dump(tmp_path, [sample([1, 2]), sample([3]), sample([1, 2], seed=1)], shard_bytes=1)
    assert [ref.id for ref in Dump.open(tmp_path).unique()] == ["w0001-000000.0", "w0001-000001.0"]


def test_no_dump_is_one_sentence(tmp_path):
    with pytest.raises(UserError, match="holds no dump"):
        Dump.open(tmp_path)


def test_quota_stops_before_it_is_passed(tmp_path):
    writer = Writer(tmp_path, HEADER, min_free_bytes=0, shard_bytes=1, max_bytes=3000)
    fitted = 0
    with contextlib.suppress(DumpFullError):
        for fitted in range(20):
            writer.add(sample([fitted]))
    with pytest.raises(DumpFullError, match="quota"):
        writer.add(sample([99]))
    writer.close()
    assert fitted < 19, "the quota let everything in"
    assert 0 < writer_module.used_bytes(tmp_path) <= 3000
    assert len(Dump.open(tmp_path).refs) == writer.written_samples > 0


@pytest.mark.parametrize("limit", ["quota", "disk"])
def test_shards_on_their_way_count_once(tmp_path, monkeypatch, limit):
    room = 1 << 20
    options = {"min_free_bytes": 0, "max_bytes": room}
    if limit == "disk":
        options = {"min_free_bytes": 5000}
        free = lambda path: 5000 + room - sum(one.stat().st_size for one in tmp_path.glob("*.safetensors*"))  # noqa: E731
        monkeypatch.setattr(writer_module.shutil, "disk_usage", lambda path: SimpleNamespace(free=free(path)))
    writer = Writer(tmp_path, HEADER, shard_bytes=1, parallel=3, **options)
    written = 0
    with contextlib.suppress(DumpFullError):
        for written in range(99):
            writer.add(sample([written] * 1000))
            futures.wait([future for _, future in writer._flying])  # a disk that is faster than the server
    shard = (tmp_path / "w0001-000000.safetensors").stat().st_size
    used = writer_module.used_bytes(tmp_path)
    assert room - shard < used <= room
    assert written == used // shard
    writer.close()
    assert len(Dump.open(tmp_path).refs) == writer.written_samples == used // shard


def test_what_a_shard_has_beside_its_tensors_counts_too(tmp_path):
    one = sample([1, 2, 3])
    writer = Writer(tmp_path, HEADER, min_free_bytes=0, shard_bytes=1, max_bytes=one.nbytes + 8)
    with pytest.raises(DumpFullError, match="quota"):
        writer.add(one)
    writer.close()
    assert writer_module.used_bytes(tmp_path) == 0


def test_low_disk_stops(tmp_path):
    writer = Writer(tmp_path, HEADER, min_free_bytes=1 << 60, shard_bytes=1)
    with pytest.raises(DumpFullError, match="would leave less than"):
        writer.add(sample([1]))
    writer.close()
    assert Dump.open(tmp_path).refs == []


def test_a_failed_write_leaves_no_trace_and_the_next_one_works(tmp_path, monkeypatch):
    writer = Writer(tmp_path, HEADER, min_free_bytes=0, shard_bytes=1)
    fsync = os.fsync
    monkeypatch.setattr(writer_module.os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        writer.add(sample([1]))
    monkeypatch.setattr(writer_module.os, "fsync", fsync)
    writer.add(sample([2]))
    writer.close()
    read = Dump.open(tmp_path)
    assert [read.read(ref).input_ids.tolist() for ref in read.refs] == [[2]]
    assert read.unacknowledged() == []


def test_a_sample_is_acknowledged_only_when_it_is_on_the_disk(tmp_path, monkeypatch):
    stock_fsync, stock_write = os.fsync, os.write
    on_disk, acknowledged = {}, []

    def fsync(descriptor):
        stock_fsync(descriptor)
        found = os.fstat(descriptor)
        # Of a directory: which names it had.
        on_disk[found.st_ino] = sorted(os.listdir(tmp_path)) if stat.S_ISDIR(found.st_mode) else found.st_size

    def write(descriptor, data):
        if bytes(data).startswith(b'{"kind":"shard"'):
            name = json.loads(bytes(data))["file"]
            shard = (tmp_path / name).stat()
            acknowledged.append((on_disk.get(shard.st_ino) == shard.st_size, name in on_disk[tmp_path.stat().st_ino]))
        return stock_write(descriptor, data)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "write", write)
    dump(tmp_path, [sample([1, 2, 3]), sample([4])], shard_bytes=1)
    assert acknowledged == [(True, True), (True, True)]


def test_a_shard_of_many_pieces_is_checked_like_any_other(tmp_path, monkeypatch):
    monkeypatch.setattr(writer_module, "PIECE", 64)
    monkeypatch.setattr(reader_module, "PIECE", 64)
    dump(tmp_path, [sample(list(range(40)))])
    assert len(Dump.open(tmp_path).read(Dump.open(tmp_path).refs[0]).input_ids) == 40
    (shard,) = tmp_path.glob("*.safetensors")
    damaged = bytearray(shard.read_bytes())
    damaged[-100] ^= 1
    shard.write_bytes(damaged)
    again = Dump.open(tmp_path)
    with pytest.raises(CorruptShardError):
        again.read(again.refs[0])


def test_a_new_writer_sweeps_what_a_dead_one_never_acknowledged_and_nothing_else(tmp_path):
    dump(tmp_path, [sample([1, 2])])
    left = ["w0001-000007.safetensors", "w0001-000008.safetensors.tmp"]
    living = Writer(tmp_path, HEADER, min_free_bytes=0)
    under_way = f"{living.id}-000000.safetensors.tmp"
    for name in (*left, under_way, "w0001-notes.txt"):
        (tmp_path / name).write_bytes(b"half")
    Writer(tmp_path, HEADER, min_free_bytes=0).close()
    names = {path.name for path in tmp_path.iterdir()}
    assert not names & set(left)
    assert {under_way, "w0001-notes.txt", "w0001-000000.safetensors"} <= names
    living.close()
    assert [ref.key for ref in Dump.open(tmp_path).refs] == [sample_key([1, 2])]


def test_a_writer_whose_number_was_taken_meanwhile_takes_the_next(tmp_path, monkeypatch):
    stock = Path.iterdir
    monkeypatch.setattr(writer_module, "sweep", lambda directory: [])
    dump(tmp_path, [sample([1])])
    monkeypatch.setattr(Path, "iterdir", lambda path: iter(()) if path == tmp_path else stock(path))
    assert dump(tmp_path, [sample([2])]).id == "w0002"


def test_a_tensor_of_another_size_than_its_shape_is_refused():
    with pytest.raises(ValueError, match=r"tensor aux of shape \(2, 3\) and dtype F32 has 8 bytes, not 24"):
        writer_module.serialize({"aux": ("F32", (2, 3), b"12345678")}, {})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"version": 99}, "is not a"),
        ({"format": "else"}, "is not a"),
        ({"dtype": "F12"}, "F12"),
        ({"boundaries": None}, "boundaries"),
    ],
)
def test_a_header_of_another_format_says_so(changes, says):
    line = {key: value for key, value in (HEADER.to_json() | changes).items() if value is not None}
    with pytest.raises(ValueError, match=says):
        Header.from_json(line)


def test_fp8_codes_become_the_numbers_of_the_standard():
    codes = np.array([[0x00, 0x38, 0xB8, 0x7E, 0x01, 0x7F]], np.uint8)
    numbers = to_float32(codes, np.array([2.0], np.float32))
    assert np.array_equal(numbers, [[0.0, 2.0, -2.0, 896.0, 2 * 2.0**-9, np.nan]], equal_nan=True)


KILLED = """
import sys, itertools
sys.path.insert(0, {tests!r})
from pathlib import Path
from hidden_states.making import HEADER, sample
from sglang_eagle3_plugin.hidden_states.reader import Dump
from sglang_eagle3_plugin.hidden_states.writer import Writer

directory, total = Path(sys.argv[1]), int(sys.argv[2])
writer = Writer(directory, HEADER, min_free_bytes=0, shard_bytes=1)
done = {{tuple(Dump.open(directory).read(ref).input_ids.tolist()) for ref in Dump.open(directory).refs}}
print("start", flush=True)
for i in range(total):
    if (i, i + 1) not in done:
        writer.add(sample([i, i + 1]))
        print(i, flush=True)
print("end", flush=True)
"""


def test_sigkill_loses_nothing_that_was_acknowledged_and_resume_completes_the_set(tmp_path):
    """Killed again and again at random moments, then left to finish; benchmarks/dump.md records 100 kills."""
    kills = int(os.environ.get("DUMP_KILLS", "20"))
    kill_until_complete(tmp_path / "d", kills=kills, total=20 * kills, seed=1)


def kill_until_complete(directory, kills, total, seed):
    clock = random.Random(seed)
    program = KILLED.format(tests=str(Path(__file__).parents[1]))
    acknowledged = set()
    for kill in range(kills + 1):
        process = subprocess.Popen([sys.executable, "-c", program, directory, str(total)], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "start\n"
        if kill < kills:
            time.sleep(clock.random() * 0.03)
            process.send_signal(signal.SIGKILL)
        lines = process.stdout.read().split("\n")[:-1]
        process.wait()
        acknowledged |= {int(line) for line in lines if line.isdigit()}
        read = Dump.open(directory)
        good = [read.read(ref).input_ids.tolist() for ref in read.refs]  # raises if anything listed is corrupt
        assert acknowledged <= {ids[0] for ids in good}
    assert lines[-1] == "end"
    assert sorted(good) == [[i, i + 1] for i in range(total)]
    assert Dump.open(directory).unacknowledged() == []
