"""Real engines dump what Hugging Face Transformers computes from the same weights, boundary by boundary."""

import json
import time

import httpx
import numpy as np
import pytest

from sglang_eagle3_plugin.hidden_states.layout import sample_key
from sglang_eagle3_plugin.hidden_states.reader import Dump, to_float32
from sglang_eagle3_plugin.hidden_states.verify import verify
from sglang_eagle3_plugin.rig import engine, environments, installing, models

from .in_environment import run

SHORT, SHORTER, CHUNKED = (17, 34, 51, 68, 85), (200, 3, 77), tuple(range(30, 70))
BATCH = ((90, 91, 92, 93), (150, 151), tuple(range(100, 135)))
SEQUENCES = (SHORT, SHORTER, CHUNKED, *BATCH)
ROUNDING = 1e-6
"""Relative, float32 through eight layers; one boundary off is 1e-2."""


def served(tmp_path, release, draft=None, arguments=None, **variables):
    environment = environments.ensure(release)
    installing.install_plugin(environment)
    target = models.target(tmp_path / "target")
    settings = {"EAGLE3_DUMP_DIR": str(tmp_path / "dump"), "EAGLE3_DUMP_MIN_FREE_GB": "0", **variables}
    spec = engine.EngineSpec(
        target.path,
        draft=draft and models.draft(tmp_path / "draft", target, draft, convention="output"),
        arguments={"chunked_prefill_size": 16, **(arguments or {})},
        environment=settings,
    )
    return target, engine.serve(environment, spec)


def complete(directory, sequences, seconds=30):
    """The dump, once all sequences are acknowledged."""
    keys = {sample_key(ids) for ids in sequences}
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if directory.exists() and keys <= {ref.key for ref in Dump.open(directory).refs}:
            break
        time.sleep(0.2)
    return Dump.open(directory)


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
def test_every_boundary_equals_hugging_face_single_chunked_and_batched_and_cached_is_refused(tmp_path, release):
    target, server = served(tmp_path, release, arguments={"disable_radix_cache": False}, EAGLE3_DUMP_BOUNDARIES="all")
    with server as running:
        for prompt in (SHORT, SHORTER, CHUNKED):
            running.generate((prompt,), 2)
        running.generate(BATCH, 2)
        complete(tmp_path / "dump", SEQUENCES)
        running.generate(((*CHUNKED, 50, 51),), 2)  # its first 40 tokens are in the prefix cache now
        time.sleep(2)
    dump = complete(tmp_path / "dump", SEQUENCES)
    assert dump.header().boundaries == tuple(range(target.layers + 1))
    assert verify(dump) == []
    assert dump.counts["cached_prefix"] == 1
    assert sample_key((*CHUNKED, 50, 51)) not in {ref.key for ref in dump.refs}
    assert_equal_to_hugging_face(dump, target, SEQUENCES, release, tmp_path)


@pytest.mark.engine
@pytest.mark.slow
def test_with_a_draft_the_dump_holds_what_the_draft_is_fed(tmp_path):
    target, server = served(tmp_path, "0.5.23", draft=(2, 3, 6))
    with server as running:
        running.generate((SHORT,), 8)
        running.generate(BATCH, 8)
        complete(tmp_path / "dump", (SHORT, *BATCH))
    dump = complete(tmp_path / "dump", (SHORT, *BATCH))
    assert dump.header().boundaries == (2, 3, 6)
    assert_equal_to_hugging_face(dump, target, (SHORT, *BATCH), "0.5.23", tmp_path)


@pytest.mark.engine
@pytest.mark.slow
def test_generated_tokens_fp8_and_an_aborted_request(tmp_path):
    target, server = served(tmp_path, "0.5.23", EAGLE3_DUMP_GENERATED="1", EAGLE3_DUMP_DTYPE="fp8")
    whole = (*SHORT, *models.continuation(SHORT, 6))
    with server as running:
        running.generate((SHORT,), 7)
        sampling = {"max_new_tokens": 500, "ignore_eos": True}
        with pytest.raises(httpx.TimeoutException):
            httpx.post(f"{running.url}/generate", json={"input_ids": CHUNKED, "sampling_params": sampling}, timeout=4)
        complete(tmp_path / "dump", (whole,))
        running.generate((SHORTER,), 1)
        dump = complete(tmp_path / "dump", (whole, SHORTER))
        time.sleep(1)
    dump = Dump.open(tmp_path / "dump")
    by_key = {ref.key: ref for ref in dump.refs}
    ref = by_key[sample_key(whole)]
    assert (ref.tokens, ref.prompt_tokens) == (11, 5)
    assert dump.counts["aborted"] == 1
    assert not any(ref.prompt_tokens == len(CHUNKED) for ref in dump.refs)
    tensors = dump.read(ref)
    run("program_reference.py", target.path, json.dumps([whole]), tmp_path / "reference.npz")
    expected = np.load(tmp_path / "reference.npz")["boundaries_0"][:, list(dump.header().boundaries)]
    got = to_float32(tensors.aux, tensors.aux_scale)
    assert dump.header().dtype == "F8_E4M3"
    assert np.linalg.norm(got - expected) < 0.04 * np.linalg.norm(expected)  # e4m3 keeps four significant bits
