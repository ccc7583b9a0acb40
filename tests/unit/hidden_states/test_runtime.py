"""The serving side of a dump without torch: whose rows are whose, and what becomes of them. Real tensors: tests/engine/dumps."""

import collections
import threading
import time
from types import SimpleNamespace as Thing

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_eagle3_plugin.hidden_states.reader import Dump as Read
from sglang_eagle3_plugin.runtime import dump as dump_module
from sglang_eagle3_plugin.runtime import spool as spool_module
from sglang_eagle3_plugin.runtime import tap
from sglang_eagle3_plugin.runtime.dump import Dump
from sglang_eagle3_plugin.runtime.spool import Budget, Finished, Spool
from sglang_eagle3_plugin.settings import DumpSettings, Settings

from .making import header


class Block:
    """Rows as the copy thread would have them: every row of ``aux`` holds its token id."""

    def __init__(self, ids):
        ids = np.asarray(ids, np.int64)
        aux = np.repeat(ids.astype(np.float32), 12).reshape(len(ids), 12)
        self.rows = {"input_ids": ("I64", (), as_bytes(ids[:, None])), "aux": ("F32", (3, 4), as_bytes(aux))}

    def ready(self):
        pass


def as_bytes(array):
    return np.ascontiguousarray(array).view(np.uint8).reshape(len(array), -1)


class Full:
    """A spool that keeps what it is given, in a queue of so many rows."""

    def __init__(self, room=10**9):
        self.directory = "/d"
        self.counts = collections.Counter()
        self.room = room
        self.busy = False
        self.out = {}

    def copy(self, ids, wait):
        if self.room < len(ids):
            return None
        self.room -= len(ids)
        return list(ids)

    def submit(self, finished):
        rows = [row for block, start, end in finished.parts for row in block[start:end]]
        assert rows == list(finished.token_ids), "a sample with somebody else's rows"
        self.out[finished.request] = (rows, finished.prompt_tokens)


class Target:
    """What a pass's logits processor was given, where a hook ran."""

    seen = None

    def take(self):
        seen, self.seen = self.seen, None
        return seen or {}

    def stop(self):
        pass


def dumping(room=10**9, **options):
    """A dump of no engine: its tensors are the token ids themselves."""
    dump = Dump.__new__(Dump)
    dump.enabled, dump.runner, dump.options = True, object(), DumpSettings(**options)
    dump._pending, dump._done, dump._said = collections.OrderedDict(), collections.OrderedDict(), set()
    dump._lock, dump.spool, dump.target = threading.Lock(), Full(room), Target()
    dump._tensors = lambda seen, rows: seen["input_ids"] if seen else "unseen"
    return dump


def forward(dump, mode, *parts, seen=True, graph=False):
    """One pass over (rid, ids, prefix)."""
    rids, ids, prefixes = zip(*parts, strict=True)
    batch = Thing(
        forward_mode=Thing(name=mode),
        rids=list(rids),
        extend_seq_lens_cpu=[len(i) for i in ids],
        extend_prefix_lens_cpu=list(prefixes),
    )
    if seen:
        dump.target.seen = {"input_ids": [token for part in ids for token in part]}
    dump.on_forward(dump.runner, batch, Thing(can_run_graph=graph))


class FINISH_ABORT:
    pass


def request(rid, prompt, output=(), finished=False, aborted=False):
    return Thing(
        rid=rid,
        origin_input_ids=list(prompt),
        output_ids=list(output),
        finished=lambda: finished,
        finished_reason=FINISH_ABORT() if aborted else None,
    )


def test_a_batch_comes_apart_and_chunks_come_together():
    dump = dumping()
    forward(dump, "EXTEND", ("a", [1, 2], 0), ("b", [3, 4, 5], 0), ("c", [9], 0))
    dump.on_batch_done([request("a", [1, 2]), request("b", [3, 4, 5, 6, 7]), request("c", [9])])
    assert dump.spool.out == {"a": ([1, 2], 2), "c": ([9], 1)}
    forward(dump, "MIXED", ("b", [6, 7], 3), ("a", [50], 2))  # a decodes beside the chunk
    dump.on_batch_done([request("b", [3, 4, 5, 6, 7]), request("a", [1, 2], [50, 51])])
    assert dump.spool.out["b"] == ([3, 4, 5, 6, 7], 5)
    assert len(dump.spool.out) == 3


def test_a_cached_prefix_is_refused_and_counted_once(caplog):
    dump = dumping()
    for rid in ("a", "b"):
        forward(dump, "EXTEND", (rid, [3], 2))
        dump.on_batch_done([request(rid, [1, 2, 3])])
        dump.on_batch_done([request(rid, [1, 2, 3], [4], finished=True)])
    assert dump.spool.out == {}
    assert dump.spool.counts == {"cached_prefix": 2}
    assert caplog.text.count("--disable-radix-cache") == 1


def test_an_aborted_request_is_dropped():
    dump = dumping()
    forward(dump, "EXTEND", ("a", [1, 2], 0))
    dump.on_batch_done([request("a", [1, 2, 3, 4], finished=True, aborted=True)])
    assert (dump.spool.out, dump.spool.counts) == ({}, {"aborted": 1})


def test_a_retracted_request_starts_again():
    dump = dumping()
    forward(dump, "EXTEND", ("a", [1, 2], 0))
    dump.on_batch_done([request("a", [1, 2, 3])])
    forward(dump, "EXTEND", ("a", [1, 2, 3], 0))
    dump.on_batch_done([request("a", [1, 2, 3])])
    assert dump.spool.out == {"a": ([1, 2, 3], 3)}
    assert dump.spool.counts == {"retracted": 1}


def test_generated_tokens_join_and_a_surplus_pass_is_cut():
    dump = dumping(generated=True)
    forward(dump, "EXTEND", ("a", [1, 2], 0))
    dump.on_batch_done([request("a", [1, 2], [3])])
    for token in (3, 4, 5):  # 5 is the end; an overlapped scheduler runs it all the same
        forward(dump, "DECODE", ("a", [token], 0))
    dump.on_batch_done([request("a", [1, 2], [3, 4, 5], finished=True)])
    assert dump.spool.out == {"a": ([1, 2, 3, 4], 2)}


def test_generated_tokens_in_a_graph_are_refused():
    dump = dumping(generated=True)
    forward(dump, "EXTEND", ("a", [1, 2], 0))
    forward(dump, "DECODE", ("a", [3], 0), seen=False, graph=True)
    dump.on_batch_done([request("a", [1, 2], [3, 4], finished=True)])
    assert (dump.spool.out, dump.spool.counts) == ({}, {"generated_in_graph": 1})


def test_a_chunk_that_ran_beyond_the_end_is_cut_in_its_middle():
    dump = dumping(generated=True)
    forward(dump, "EXTEND", ("a", [1, 2, 3, 4], 0))
    dump.on_batch_done([request("a", [1, 2, 3], finished=True)])
    assert dump.spool.out == {"a": ([1, 2, 3], 3)}


def test_a_refused_request_stays_refused_and_is_counted_once():
    dump = dumping()
    for prefix in (2, 3, 4):
        forward(dump, "EXTEND", ("a", [9], prefix))
    dump.on_batch_done([request("a", [1, 2, 9, 9, 9], finished=True)])
    assert (dump.spool.out, dump.spool.counts) == ({}, {"cached_prefix": 1})


def test_requests_that_go_on_decoding_are_remembered_up_to_a_limit(monkeypatch):
    monkeypatch.setattr(dump_module, "_REMEMBERED", 3)
    dump = dumping()
    for i in range(5):
        forward(dump, "EXTEND", (f"r{i}", [i], 0))
        dump.on_batch_done([request(f"r{i}", [i])])
    assert list(dump._done) == ["r2", "r3", "r4"]


def test_a_dump_that_is_off_takes_nothing():
    dump = dumping()
    dump.enabled = False
    forward(dump, "EXTEND", ("a", [1], 0))
    dump.on_batch_done([request("a", [1], finished=True)])
    assert (dump.spool.out, dump.spool.counts) == ({}, {})


@pytest.fixture
def quiet(monkeypatch):
    monkeypatch.setattr(tap, "consumers", ())
    monkeypatch.setattr(dump_module, "current", None)


@pytest.mark.usefixtures("quiet")
def test_a_fault_of_the_dumps_own_turns_it_off_and_the_scheduler_goes_on(monkeypatch, caplog):
    dump_module.batch_done(Thing(reqs=[request("a", [1])]))  # none is on
    dump = dumping()
    dump.runner = "runner"
    released = []
    dump.target.release = lambda: released.append(True)
    tap.add(dump)
    monkeypatch.setattr(dump_module, "current", dump)
    for _ in range(2):
        dump_module.batch_done(Thing(reqs=[Thing(rid="a")]))  # a request of a shape nobody has seen
    assert not dump.enabled
    assert dump not in tap.consumers
    assert caplog.text.count("dump failed and is off in this process; serving goes on (AttributeError") == 1
    assert released == []
    tap.deliver("runner", Thing(rids=["a"]), Thing())
    assert released  # the target is given back between two passes


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("asked", [True, False])
def test_a_pipeline_stage_dumps_nothing_and_says_so_where_it_was_asked_to(caplog, asked):
    runner = Thing(is_draft_worker=False, server_args=Thing(pp_size=2))
    dump_module.start(runner, Settings(dump_dir="/d" if asked else None))
    assert dump_module.current is None
    assert caplog.text.count("no dump with pipeline parallelism") == asked


def test_rows_wait_for_room_only_while_some_is_to_come(tmp_path):
    spool = make_spool(tmp_path / "d")
    eight = {"x": Thing(numel=lambda: 8, element_size=lambda: 1)}
    assert spool.budget.take(spool.budget.limit)
    began = time.monotonic()
    assert spool.copy(eight, wait=True) is None  # nobody writes: none will come
    assert spool.copy(eight, wait=False) is None
    assert time.monotonic() - began < 5
    too_large = {"x": Thing(numel=lambda: spool.budget.limit + 1, element_size=lambda: 1)}
    assert spool.copy(too_large, wait=True) is None
    spool.stop()


def test_an_unseen_pass_and_a_full_queue_are_counted():
    dump = dumping(room=3)
    forward(dump, "EXTEND", ("a", [1], 0), seen=False)
    dump.on_batch_done([request("a", [1], finished=True)])
    dump.spool.busy = True
    forward(dump, "EXTEND", ("b", [1, 2, 3, 4], 0))
    dump.on_batch_done([request("b", [1, 2, 3, 4], finished=True)])
    assert dump.spool.counts == {"unseen": 1, "lagging": 1}


def test_rows_that_nobody_comes_back_for_make_room():
    dump = dumping(room=3)
    spool = dump.spool
    forward(dump, "EXTEND", ("gone", [1, 2, 3], 0))
    copy = spool.copy

    def freed(ids, wait):  # blocks give their room back when the last reference goes
        spool.room = 3 - sum(end - start for p in dump._pending.values() for _, start, end in p.parts)
        return copy(ids, wait)

    spool.copy = freed
    forward(dump, "EXTEND", ("new", [7, 8], 0))
    dump.on_batch_done([request("new", [7, 8])])
    assert spool.out == {"new": ([7, 8], 2)}


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_schedule_of_chunks_gives_each_request_its_own_rows(data):
    dump = dumping()
    prompts = {
        f"r{i}": [100 * i + j for j in range(length)] for i, length in enumerate(data.draw(st.lists(st.integers(1, 9), max_size=5)))
    }
    done = dict.fromkeys(prompts, 0)
    while open_ones := [rid for rid in prompts if done[rid] < len(prompts[rid])]:
        chosen = data.draw(st.lists(st.sampled_from(open_ones), min_size=1, unique=True))
        parts = []
        for rid in chosen:
            size = data.draw(st.integers(1, len(prompts[rid]) - done[rid]))
            parts.append((rid, prompts[rid][done[rid] : done[rid] + size], done[rid]))
            done[rid] += size
        forward(dump, "EXTEND", *parts)
        dump.on_batch_done([request(rid, prompts[rid]) for rid in chosen])
    assert {rid: rows for rid, (rows, _) in dump.spool.out.items()} == prompts


def finished(ids, request_id="r"):
    return Finished(ids, [(Block(ids), 0, len(ids))], request_id, len(ids))


def make_spool(directory, failed=lambda: None, **options):
    return Spool(
        directory, lambda shape, dtype: header(dtype=dtype, final="none"), {"min_free_bytes": 0} | options, 1 << 20, failed
    )


def test_the_spool_writes_what_the_reader_reads(tmp_path):
    spool = make_spool(tmp_path / "d")
    one = Block([5, 6, 7, 8])
    spool.submit(Finished([6, 7, 9], [(one, 1, 3), (Block([9]), 0, 1)], "joined", 2))
    spool.submit(finished([1, 2]))
    spool.stop()
    read = Read.open(tmp_path / "d")
    tensors = [read.read(ref) for ref in read.refs]
    assert [t.input_ids.tolist() for t in tensors] == [[6, 7, 9], [1, 2]]
    assert tensors[0].aux[:, 1, 2].tolist() == [6.0, 7.0, 9.0]
    assert tensors[0].positions.tolist() == [0, 1, 2]
    assert read.refs[0].prompt_tokens == 2
    assert read.counts["samples"] == 2


def test_rows_of_other_tokens_never_become_a_sample(tmp_path):
    spool = make_spool(tmp_path)
    spool.submit(Finished([1, 2], [(Block([1, 3]), 0, 2)], "mixed", 2))
    spool.submit(finished([4]))
    spool.stop()
    assert [ref.tokens for ref in Read.open(tmp_path).refs] == [1]
    assert spool.counts["mismatched"] == 1


@pytest.mark.parametrize("fault", ["quota", "not a directory"])
def test_when_the_disk_fails_the_dump_stops_with_one_line_and_the_caller_goes_on(tmp_path, monkeypatch, caplog, fault):
    monkeypatch.setattr(spool_module, "IDLE_FLUSH_S", 0.01)
    directory = tmp_path / "d"
    if fault == "not a directory":
        directory.write_text("in the way")
    stopped = []
    spool = make_spool(directory, failed=lambda: stopped.append(True), max_bytes=10 if fault == "quota" else None)
    for i in range(5):
        spool.submit(finished([i]))
    spool.stop()
    spool.submit(finished([9]))
    assert stopped == [True]
    assert caplog.text.count("serving goes on") == 1
    if fault == "not a directory":
        assert directory.read_text() == "in the way"
    else:
        assert Read.open(directory).refs == []


def test_the_budget_is_never_exceeded():
    budget = Budget(10)
    assert budget.take(7)
    assert not budget.take(4)
    budget.give(7)
    assert budget.take(10)
    assert budget.peak == 10


def test_dump_settings_are_read_and_bad_ones_named():
    read = Settings.from_environment(
        {
            "EAGLE3_DUMP_DIR": "/d",
            "EAGLE3_DUMP_BOUNDARIES": "2, 5",
            "EAGLE3_DUMP_MAX_GB": "0.5",
            "EAGLE3_DUMP_WHEN_FULL": "wait",
            "EAGLE3_DUMP_DTYPE": "int4",
            "EAGLE3_DUMP_QUEUE_GB": "lots",
        }
    )
    assert read.dump == DumpSettings(boundaries=(2, 5), max_bytes=1 << 29, wait=True)
    assert len(read.problems) == 2
    assert "EAGLE3_DUMP_DTYPE" in read.problems[1] or "EAGLE3_DUMP_DTYPE" in read.problems[0]
    assert Settings.from_environment({"EAGLE3_DUMP_BOUNDARIES": "all"}).dump.all_boundaries
