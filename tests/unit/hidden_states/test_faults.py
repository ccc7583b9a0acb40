"""What can go wrong around a dump: a full disk, a directory that can't be written, a quota, hostile ids, two servers at once.

Each time serving goes on (nothing is raised to the caller), what was acknowledged stays, nothing is overwritten, and one line says
it. The disks are real: a tmpfs of a few hundred KB, mounted where the tests may (root); elsewhere these are skipped. Real servers
on one: tests/engine/dumps/test_faults.py.
"""

import json
import logging
import os
import subprocess
import sys
import threading
import time
import weakref
from types import SimpleNamespace as Thing

import pytest

from sglang_eagle3_plugin.hidden_states import writer as writer_module
from sglang_eagle3_plugin.hidden_states.layout import MANIFEST, SHARD, sample_key
from sglang_eagle3_plugin.hidden_states.reader import Dump
from sglang_eagle3_plugin.hidden_states.verify import verify
from sglang_eagle3_plugin.runtime import dump as dumps
from sglang_eagle3_plugin.runtime import dump_switch, tap
from sglang_eagle3_plugin.runtime import spool as spool_module
from sglang_eagle3_plugin.settings import DumpSettings, Settings

from .test_runtime import Block, dumping, finished, forward, make_spool, request
from .test_switch import a_runner, order


@pytest.fixture
def mount(tmp_path):
    """mount(options) -> a directory on a tmpfs of its own, gone after the test."""
    mounted = []

    def do(options):
        place = tmp_path / f"disk{len(mounted)}"
        place.mkdir()
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", place], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"no tmpfs can be mounted here: {done.stderr.strip()}")
        mounted.append(place)
        return place

    yield do
    for place in mounted:
        subprocess.run(["umount", "--lazy", place], check=True)


@pytest.fixture(autouse=True)
def soon(monkeypatch, caplog):
    monkeypatch.setattr(spool_module, "IDLE_FLUSH_S", 0.01)
    caplog.set_level(logging.INFO)


def until(true, seconds=10):
    end = time.monotonic() + seconds
    while not true() and time.monotonic() < end:
        time.sleep(0.01)
    return true()


def said(caplog):
    return [record.getMessage() for record in caplog.records if "serving goes on" in record.getMessage()]


def there(directory):
    return [ref.key for ref in Dump.open(directory).refs]


LONG = list(range(1, 1001))  # 64 KB of states


@pytest.mark.parametrize("seen", ["in time", "too late"])
def test_a_disk_that_fills_up_ends_the_dump_and_nothing_else(mount, caplog, monkeypatch, seen):
    if seen == "too late":  # another process filled it meanwhile
        monkeypatch.setattr(writer_module.shutil, "disk_usage", lambda path: Thing(free=1 << 40))
    directory = mount("size=300k") / "dump"
    ended = []
    spool = make_spool(directory, failed=lambda: ended.append(True))
    for i in range(12):
        spool.submit(finished([1 + i, *LONG]))
        if i < 2:
            assert until(lambda i=i: directory.exists() and len(there(directory)) == i + 1)
    assert until(lambda: ended)
    spool.submit(finished([99]))  # the server goes on handing in
    spool.stop()
    (line,) = said(caplog)
    assert ("MiB free" if seen == "in time" else "No space left on device") in line
    assert str(directory) in line
    kept = there(directory)
    assert kept[:2] == [sample_key([1, *LONG]), sample_key([2, *LONG])]
    assert len(kept) < 12
    assert verify(Dump.open(directory)) == []
    assert not list(directory.glob("*.tmp"))
    assert str(directory) in spool.problem


def test_a_full_disk_from_the_start_is_one_line(mount, caplog):
    place = mount("size=64k")
    with pytest.raises(OSError, match="No space left"):
        (place / "filler").write_bytes(b"x" * (128 << 10))
    ended = []
    spool = make_spool(place / "dump", failed=lambda: ended.append(True))
    spool.submit(finished(LONG))
    assert until(lambda: ended)
    spool.stop()
    assert len(said(caplog)) == 1


def test_after_room_was_made_a_new_dump_goes_on_beside_the_old_one(mount):
    place = mount("size=300k")
    directory = place / "dump"
    filler = place / "filler"
    first = make_spool(directory)
    first.submit(finished([1, *LONG]))
    assert until(lambda: directory.exists() and there(directory))
    filler.write_bytes(b"x" * (180 << 10))
    for i in range(4):
        first.submit(finished([2 + i, *LONG]))
    assert until(lambda: first.problem)
    first.stop()
    before = {path.name: path.read_bytes() for path in directory.iterdir()}
    filler.unlink()
    second = make_spool(directory)
    second.submit(finished([9, *LONG]))
    second.stop()
    assert sample_key([9, *LONG]) in there(directory)
    assert {name: (directory / name).read_bytes() for name in before} == before


def test_a_read_only_directory_is_one_line_and_untouched(mount, caplog):
    place = mount("size=300k")
    (place / "dump").mkdir()
    subprocess.run(["mount", "-o", "remount,ro", place], check=True)
    ended = []
    spool = make_spool(place / "dump", failed=lambda: ended.append(True))
    for i in range(5):
        spool.submit(finished([i]))
    assert until(lambda: ended)
    spool.stop()
    (line,) = said(caplog)
    assert "Read-only file system" in line
    assert list((place / "dump").iterdir()) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere; the read-only file system stands for it")
def test_a_directory_of_somebody_else_is_one_line(tmp_path, caplog):
    (tmp_path / "theirs").mkdir(mode=0o500)
    spool = make_spool(tmp_path / "theirs" / "dump")
    spool.submit(finished([1]))
    assert until(lambda: said(caplog))
    spool.stop()
    assert "Permission denied" in said(caplog)[0]


def test_a_quota_keeps_what_fits_and_says_so_once(tmp_path, caplog):
    ended = []
    spool = make_spool(tmp_path / "d", failed=lambda: ended.append(True), max_bytes=150_000)
    for i in range(6):
        spool.submit(finished([1 + i, *LONG]))
        until(lambda i=i: ended or ((tmp_path / "d").exists() and len(there(tmp_path / "d")) > i))
    spool.stop()
    (line,) = said(caplog)
    assert "quota" in line
    assert len(there(tmp_path / "d")) == 2
    assert sum(path.stat().st_size for path in (tmp_path / "d").glob("*.safetensors")) < 150_000


def test_a_hostile_request_id_names_no_file_and_breaks_no_line(tmp_path):
    hostile = ["../../etc/passwd", "a\nb\x00\x1b[31m", "x" * 5000, '{"kind":"shard"}', "", "manifest-w0001.jsonl", "\ud800"]
    dump = dumping()
    for i, rid in enumerate(hostile):
        forward(dump, "EXTEND", (rid, [1 + i, 7], 0))
        dump.on_batch_done([request(rid, [1 + i, 7])])
    assert set(dump.spool.out) == set(hostile)
    spool = make_spool(tmp_path / "d")
    for i, rid in enumerate(hostile):
        spool.submit(finished([1 + i, 7], rid))
    spool.stop()
    names = [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()]
    assert all(name.startswith("d/") and (MANIFEST.fullmatch(name[2:]) or SHARD.fullmatch(name[2:])) for name in names)
    assert [ref.request for ref in Dump.open(tmp_path / "d").refs] == hostile
    assert verify(Dump.open(tmp_path / "d")) == []


def test_two_servers_in_one_directory_write_beside_each_other(tmp_path):
    directory = tmp_path / "d"
    spools = [make_spool(directory) for _ in range(2)]

    def serve(number):
        for i in range(40):
            spools[number].submit(finished([1 + number, 1 + i], f"r{i}"))  # the same request ids in both
            time.sleep(0.002)
        spools[number].stop()

    servers = [threading.Thread(target=serve, args=(number,)) for number in range(2)]
    for server in servers:
        server.start()
    for server in servers:
        server.join()
    dump = Dump.open(directory)
    assert sorted(ref.key for ref in dump.refs) == sorted(sample_key([1 + number, 1 + i]) for number in range(2) for i in range(40))
    assert verify(dump) == []
    headers = [json.loads(path.read_text().splitlines()[0])["kind"] for path in sorted(directory.glob("manifest-*"))]
    assert headers == ["header", "header"]


def out_of_memory(*args, **kwargs):
    raise RuntimeError("CUDA out of memory")


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A runner whose passes go through the real tap, and the switch of its process; the modules are stand-ins."""
    monkeypatch.setenv("EAGLE3_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setattr(tap, "consumers", ())
    monkeypatch.setattr(tap, "failures", {})
    monkeypatch.setattr(dumps, "current", None)
    monkeypatch.setattr(dumps, "_attention_rank", lambda: 0)
    monkeypatch.setattr(dump_switch, "_switch", None)
    graphs = type("Graphs", (), {"can_run": lambda self, batch: True})()
    runner = a_runner(graphs=graphs, model_path=str(tmp_path / "model"), tp_size=1, pp_size=1)
    runner.is_draft_worker = False
    switch = dump_switch.Switch(runner, Settings(dump_dir=str(tmp_path / "d")))
    yield Thing(runner=runner, switch=switch, graphs=graphs, stack=runner.model.children[0], processor=runner.model.children[1])
    switch._off()


def a_pass(runner, **batch):
    tap.deliver(runner, Thing(**{"rids": [], "forward_mode": Thing(name="IDLE")} | batch), Thing(can_run_graph=False))


def is_untouched(server):
    return (server.stack.layers_to_capture, server.runner.model.capture_aux_hidden_states, hasattr(server.processor, "hook")) == (
        [],
        False,
        False,
    ) and server.graphs.can_run(None)


@pytest.mark.parametrize("where", ["in a pass", "at a result"])
def test_a_fault_ends_all_of_the_dump_and_the_record_says_why(server, monkeypatch, where):
    order(server.switch)
    a_pass(server.runner)
    dump = dumps.current
    assert (tap.consumers, server.stack.layers_to_capture != []) == ((dump,), True)
    held = Block([7])
    dump._pending["earlier"] = dumps._Pending([(held, 0, 1)], 1)
    held = weakref.ref(held)
    if where == "in a pass":
        monkeypatch.setitem(sys.modules, "torch", Thing(stack=out_of_memory))
        server.processor.hook(server.processor, ([1, 2], "final", None), {"aux_hidden_states": ["one", "two"]})
        a_pass(
            server.runner,
            rids=["a"],
            forward_mode=Thing(name="EXTEND"),
            extend_seq_lens_cpu=[2],
            extend_prefix_lens_cpu=[0],
        )
    else:
        dumps.batch_done(Thing(reqs=[Thing(finished=out_of_memory, rid="a")]))
        dumps.batch_done(Thing(reqs=[Thing(finished=out_of_memory, rid="a")]))  # said once
    server.switch._note()
    noted = server.switch._noted
    assert (noted["on"], noted["waiting"], noted["directory"]) == (False, False, None)
    assert "has ended: RuntimeError: CUDA out of memory" in noted["problem"]
    assert (dump.enabled, dump._pending, held()) == (False, {}, None)
    assert dump.spool.counts["faults"] == 1
    assert tap.failures == {"dump": 1}
    assert not hasattr(server.processor, "hook")
    a_pass(server.runner)
    assert is_untouched(server)
    assert tap.consumers == ()
    order(server.switch, serial=2)
    a_pass(server.runner)
    server.switch._note()
    assert (server.switch._noted["on"], server.switch._noted["problem"]) == (True, "")


def test_a_block_that_cannot_be_made_takes_no_bytes(tmp_path, monkeypatch):
    device = type("Device", (), {"type": "cuda"})()
    tensor = Thing(device=device, shape=(4, 8), dtype="bf16", numel=lambda: 32, element_size=lambda: 2)
    spool = make_spool(tmp_path / "d")
    monkeypatch.setitem(sys.modules, "torch", Thing(empty=out_of_memory, cuda=Thing(Stream=lambda device: object())))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="out of memory"):
            spool.copy({"aux": tensor}, wait=False)
    assert (spool.budget.used, spool.budget.peak) == (0, 64)
    spool.stop()


def test_a_dump_without_a_writer_gives_the_target_back(server, tmp_path, monkeypatch):
    monkeypatch.setattr(threading.Thread, "start", out_of_memory)
    with pytest.raises(RuntimeError):
        dumps.Dump(server.runner, tmp_path / "d", DumpSettings())
    assert is_untouched(server)


def test_a_dump_that_cannot_begin_with_the_server_is_a_problem_in_the_record(server, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="99"):
        dumps.start(server.runner, Settings(dump_dir=str(tmp_path / "d"), dump=DumpSettings(boundaries=(2, 99))))
    begun = dump_switch._switch
    begun.stop()
    begun._note()
    assert (begun._noted["on"], "there is no dump: " in begun._noted["problem"]) == (False, True)
