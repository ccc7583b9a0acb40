"""Real engines dump what Hugging Face Transformers computes from the same weights, boundary by boundary."""

import json
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from sglang_eagle3_plugin.hidden_states.layout import sample_key
from sglang_eagle3_plugin.hidden_states.reader import Dump, to_float32
from sglang_eagle3_plugin.hidden_states.verify import verify
from sglang_eagle3_plugin.rig import models

from ..conftest import RELEASES
from .in_environment import run
from .serving import ask, complete, served

SHORT, SHORTER = (17, 34, 51, 68, 85), (200, 3, 77)
BATCH = ((90, 91, 92, 93), (150, 151), tuple(range(100, 135)))
LONG = tuple(tuple(range(start, start + 40)) for start in (30, 80, 130))
CHUNK = 64
"""Each of LONG alone fits into one pass; the three together do not, so that one of them is cut."""
CACHING = {"chunked_prefill_size": CHUNK, "disable_radix_cache": False}
ROUNDING = 1e-6
"""Relative, float32 through eight layers; one boundary off is 1e-2."""


def every(tmp_path):
    return {"EAGLE3_DUMP_DIR": str(tmp_path / "dump"), "EAGLE3_DUMP_BOUNDARIES": "all"}


def make_exact(directory):
    """Rewrite a target so that no sum has two terms that round: its states are the same bits in whatever order BLAS adds.

    A product of matrices takes another kernel, and adds in another order, for another number of rows; then batched and chunked
    states differ by 1.5e-7, which is the engine's doing. Here every row of every matrix that counts has one entry, and attention
    is all on one token: the next best is 160 behind, and exp(-160) is 0 in float32. Norms add along a row, whatever else is there.
    """
    file = directory / "model.safetensors"
    weights = load_file(file)
    for name, matrix in weights.items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            matrix *= 2
        elif name.endswith("o_proj.weight"):
            matrix[models.NOISE :] = 0  # the other heads spread over tokens
        elif name.endswith(("gate_proj.weight", "up_proj.weight")):
            matrix[:, 1:] = 0  # what stays reads the constant channel
        elif name.endswith("down_proj.weight"):
            kept = matrix[models.NOISE :].diagonal().copy()
            matrix[:] = 0
            np.fill_diagonal(matrix[models.NOISE :], kept * 20)
    save_file(weights, file, metadata={"format": "pt"})


def assert_equal_to_hugging_face(dump, target, sequences, release, tmp_path):
    run("program_reference.py", target.path, json.dumps(sequences), tmp_path / "reference.npz", release=release)
    reference = np.load(tmp_path / "reference.npz")
    refs = {ref.key: ref for ref in dump.refs}
    for index, ids in enumerate(sequences):
        tensors = dump.read(refs[sample_key(ids)])
        expected = [reference[f"boundaries_{index}"][:, b] for b in dump.header().boundaries]
        got = [to_float32(tensors.aux[:, slot]) for slot in range(len(expected))]
        for one, other in zip([*got, to_float32(tensors.final)], [*expected, reference[f"final_{index}"]], strict=True):
            assert np.linalg.norm(one - other) < ROUNDING * np.linalg.norm(other)


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize("release", ["0.5.9", "0.5.13", "0.5.23"])
def test_every_boundary_equals_hugging_face_and_a_cached_prefix_is_refused(tmp_path, release):
    target, server = served(tmp_path, release, arguments=CACHING, **every(tmp_path))
    everything = (SHORT, SHORTER, *BATCH, *LONG)
    with server as running:
        for prompt in (SHORT, SHORTER):
            ask(running, [prompt])
        ask(running, BATCH)
        ask(running, LONG)
        complete(tmp_path / "dump", everything)
        ask(running, [(*LONG[0], 50, 51)])  # its first 40 tokens come from the cache
        time.sleep(2)
    dump = complete(tmp_path / "dump", everything)
    assert dump.header().boundaries == tuple(range(target.layers + 1))
    assert verify(dump) == []
    assert dump.counts["cached_prefix"] == 1
    assert sample_key((*LONG[0], 50, 51)) not in {ref.key for ref in dump.refs}
    assert_equal_to_hugging_face(dump, target, everything, release, tmp_path)


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize("release", ["0.5.9", "0.5.13", "0.5.23"])
def test_chunked_batched_and_cached_runs_give_the_bytes_of_single_ones(tmp_path, release):
    # Up to 0.5.10 the scheduler forgets a request's key, so that what is cached can't be run again: the test above.
    arguments = CACHING | ({"disable_radix_cache": True} if release == "0.5.9" else {})
    target, server = served(tmp_path, release, arguments=arguments, change=make_exact, **every(tmp_path))
    sequences = (SHORT, *BATCH, *LONG)
    with server as running:
        for prompt in sequences:
            ask(running, [prompt])
        complete(tmp_path / "dump", sequences)
        # All of them are in the prefix cache now, and are run again whole because their keys are new. While the first is run
        # alone, the others arrive; on a busy machine they may come one by one, and nothing is cut: ask again then.
        for attempt in range(5):
            together = (tuple(range(180, 240)), *LONG, SHORT, *BATCH)
            with ThreadPoolExecutor(len(together)) as pool:  # one by one: 0.5.13 hands a list of keys to every request of a batch
                keys = [f"{attempt}-{i}" for i in range(len(together))]
                list(pool.map(lambda prompt, key: ask(running, [prompt], extra_key=key), together, keys))
            if f"#new-token: {CHUNK}," in (log := running.place.log.read_text()):
                break
        dump = complete(tmp_path / "dump", sequences, times=2)
    assert f"#new-token: {CHUNK}," in log, "nothing was chunked"
    assert dump.counts.get("cached_prefix", 0) == 0
    for ids in sequences:
        single, *others = [dump.read(ref) for ref in dump.refs if ref.key == sample_key(ids)]
        assert others
        for other in others:
            assert other.aux.tobytes() == single.aux.tobytes()
            assert other.final.tobytes() == single.final.tobytes()
    assert_equal_to_hugging_face(dump, target, sequences, release, tmp_path)


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize("release", RELEASES)
def test_with_a_draft_the_dump_holds_what_the_draft_is_fed(tmp_path, release):
    target, server = served(tmp_path, release, draft=(2, 3, 6), EAGLE3_DUMP_DIR=str(tmp_path / "dump"))
    with server as running:
        running.generate((SHORT,), 8)
        running.generate(BATCH, 8)
        complete(tmp_path / "dump", (SHORT, *BATCH))
        assert running.place.observed()[0]["boundaries"] == [2, 3, 6]
    dump = complete(tmp_path / "dump", (SHORT, *BATCH))
    assert dump.header().boundaries == (2, 3, 6)
    assert_equal_to_hugging_face(dump, target, (SHORT, *BATCH), release, tmp_path)


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize("release", RELEASES)
def test_generated_tokens_fp8_and_an_aborted_request(tmp_path, release):
    variables = {"EAGLE3_DUMP_GENERATED": "1", "EAGLE3_DUMP_DTYPE": "fp8"}
    target, server = served(tmp_path, release, EAGLE3_DUMP_DIR=str(tmp_path / "dump"), **variables)
    whole = (*SHORT, *models.continuation(SHORT, 6))
    aborted = LONG[0]
    with server as running:
        running.generate((SHORT,), 7)
        sampling = {"max_new_tokens": 500, "ignore_eos": True}
        with pytest.raises(httpx.TimeoutException):
            httpx.post(f"{running.url}/generate", json={"input_ids": aborted, "sampling_params": sampling}, timeout=4)
        complete(tmp_path / "dump", (whole,))
        running.generate((SHORTER,), 1)
        complete(tmp_path / "dump", (whole, SHORTER))
        until = time.monotonic() + 60  # the server notices after some seconds that its client is gone
        while not (dump := Dump.open(tmp_path / "dump")).counts.get("aborted") and time.monotonic() < until:
            time.sleep(0.5)
    by_key = {ref.key: ref for ref in dump.refs}
    ref = by_key[sample_key(whole)]
    assert (ref.tokens, ref.prompt_tokens) == (11, 5)
    assert dump.counts["aborted"] == 1
    assert not any(ref.prompt_tokens == len(aborted) for ref in dump.refs)
    tensors = dump.read(ref)
    run("program_reference.py", target.path, json.dumps([whole]), tmp_path / "reference.npz", release=release)
    expected = np.load(tmp_path / "reference.npz")["boundaries_0"][:, list(dump.header().boundaries)]
    got = to_float32(tensors.aux, tensors.aux_scale)
    assert dump.header().dtype == "F8_E4M3"
    assert np.linalg.norm(got - expected) < 0.04 * np.linalg.norm(expected)  # e4m3 keeps four significant bits
