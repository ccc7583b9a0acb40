"""`hidden-states info|verify|compare` as a user runs them, on dumps made by the writer. Exports need torch: tests/engine."""

import json

import numpy as np
import pytest

from sglang_eagle3_plugin.cli import main
from sglang_eagle3_plugin.hidden_states.layout import SIDECAR, sample_key
from sglang_eagle3_plugin.hidden_states.writer import Writer

from .making import HEADER, dump, header, sample, to_bf16


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as stop:
        main(["hidden-states", *map(str, arguments)])
    out, err = capsys.readouterr()
    return stop.value.code, out, err


def test_info_tells_what_is_there(tmp_path, capsys):
    directory = tmp_path / "dümp"
    writer = Writer(directory, HEADER, min_free_bytes=0)
    for ids in ([1, 2, 3], [4, 5], [1, 2, 3]):
        writer.add(sample(ids))
    writer.note_counts({"aborted": 1})
    writer.note_counts({"aborted": 2, "cached_prefix": 1})
    writer.close()
    (directory / SIDECAR).write_text(json.dumps({"key": sample_key([4, 5]), "mask": [[1, 2]]}) + "\n")
    code, out, _ = run(capsys, "info", directory)
    assert code == 0
    assert "3 samples of 2 sequences, 5 tokens" in out
    assert "1 sequences with a loss mask" in out
    assert "boundaries 2, 3, 5 of 8 layers" in out
    assert "aborted: 2" in out
    code, out, _ = run(capsys, "info", directory, "--json")
    assert json.loads(out)["counts"] == {"aborted": 2, "cached_prefix": 1}


def test_a_good_dump_verifies(tmp_path, capsys):
    dump(tmp_path, [sample([1, 2, 3])])
    assert run(capsys, "verify", tmp_path)[:2] == (0, "1 samples, 0 findings\n")


@pytest.mark.parametrize(
    ("changes", "finding"),
    [
        ({"aux": ("BF16", (3, 3, 4), to_bf16(np.full((3, 3, 4), np.nan)))}, "rows of boundary 2 are not finite"),
        ({"aux": ("BF16", (3, 3, 4), np.zeros((3, 3, 4), np.uint16))}, "3 of 3 rows of boundary 5 are all zero"),
        ({"positions": ("I64", (3,), np.array([0, 2, 1]))}, "positions are not 0, 1, 2"),
        ({"input_ids": ("I64", (3,), np.array([7, 8, 9]))}, "token ids are not those"),
        ({"aux": ("BF16", (2, 3, 4), np.ones((2, 3, 4), np.uint16))}, "aux has shape (2, 3, 4), not (3, 3, 4)"),
        ({"final": ("BF16", (3, 2), np.ones((3, 2), np.uint16))}, "final has shape"),
    ],
)
def test_a_bad_sample_is_found(tmp_path, capsys, changes, finding):
    bad = sample([1, 2, 3])
    dump(tmp_path, [sample([4]), type(bad)(bad.token_ids, {**bad.tensors, **changes}, bad.request, bad.prompt_tokens)])
    code, out, _ = run(capsys, "verify", tmp_path)
    assert code == 1
    assert finding in out
    assert "w0001-000000.1" in out


def test_a_flipped_bit_is_found(tmp_path, capsys):
    dump(tmp_path, [sample([1, 2, 3])])
    (shard,) = tmp_path.glob("*.safetensors")
    data = bytearray(shard.read_bytes())
    data[-5] ^= 4
    shard.write_bytes(data)
    code, out, _ = run(capsys, "verify", tmp_path, "--json")
    assert code == 1
    assert "not what was acknowledged" in json.loads(out)["findings"][0]["what"]


def streams(n, layers=8, width=4, seed=3):
    """A residual stream that, like a real one, changes a little at each layer: (n, layers + 1, width)."""
    random = np.random.default_rng(seed)
    return np.cumsum(np.concatenate([random.normal(size=(n, 1, width)) * 3, random.normal(size=(n, layers, width))], 1), 1)


def make_pair(tmp_path, trained, captured, final="post_norm"):
    """A training set of boundaries ``trained`` and a capture of ``captured``, of the same sequences."""
    for name, boundaries in (("train", trained), ("capture", captured)):
        head = header(boundaries=boundaries)
        samples = []
        for ids in ([1, 2, 3, 4], [9, 8, 7]):
            stream = streams(len(ids), seed=sum(ids))
            norm = stream[:, 8] / np.sqrt(np.square(stream[:, 8]).mean(-1, keepdims=True))
            samples.append(sample(ids, head, aux=stream[:, list(boundaries)], final=norm))
        dump(tmp_path / name, samples, head)
    return "--train", tmp_path / "train", "--capture", tmp_path / "capture"


def test_compare_names_a_shift_and_mends_it(tmp_path, capsys):
    pair = make_pair(tmp_path, (2, 3, 5), tuple(range(9)))
    code, out, _ = run(capsys, "compare", *pair, "--served", "3,4,6", "--json")
    result = json.loads(out)
    assert code == 1
    assert (
        "trained on boundaries 2, 3, 5 and the server captures 3, 4, 6: off by one, too late in the server" in result["verdict"][-1]
    )
    assert "EAGLE3_CAPTURE_BOUNDARIES=2,3,5" in result["verdict"][-1]
    assert result["config"]["eagle_aux_hidden_state_layer_ids"] == [1, 2, 4]
    assert result["matched"] == ["boundary 2", "boundary 3", "boundary 5", "post-norm"]


def test_compare_is_content_with_the_right_wiring(tmp_path, capsys):
    code, out, _ = run(capsys, "compare", *make_pair(tmp_path, (2, 3, 5), (2, 3, 5)))
    assert code == 0
    assert "The server captures what the draft was trained on: boundaries 2, 3, 5." in out


def test_compare_tells_pre_norm_from_post_norm(tmp_path, capsys):
    _, out, _ = run(capsys, "compare", *make_pair(tmp_path, (2, 8), tuple(range(9))), "--json")
    verdict = json.loads(out)["verdict"]
    assert any(line.startswith("boundary 8 is boundary 8 (the last layer's output before the final norm)") for line in verdict)
    assert any("post-norm (the final hidden state after the norm)" in line for line in verdict)


def test_compare_asks_for_more_boundaries_where_none_fits(tmp_path, capsys):
    code, out, _ = run(capsys, "compare", *make_pair(tmp_path, (2, 3, 5), (3, 4, 6)), "--json")
    verdict = json.loads(out)["verdict"]
    assert code == 1
    assert verdict[0].startswith("boundary 2 equals no captured state; the nearest is")
    assert "EAGLE3_DUMP_BOUNDARIES=all" in verdict[-1]


def test_compare_needs_the_same_sequences(tmp_path, capsys):
    dump(tmp_path / "a", [sample([1, 2])])
    dump(tmp_path / "b", [sample([3, 4])])
    code, _, err = run(capsys, "compare", "--train", tmp_path / "a", "--capture", tmp_path / "b")
    assert code == 2
    assert "no sequence is in both" in err


@pytest.mark.parametrize("arguments", [("info",), ("verify",), ("export", "--to", "pt", "--out", "x")])
def test_a_directory_without_a_dump_is_one_sentence(tmp_path, capsys, arguments):
    code, out, err = run(capsys, arguments[0], tmp_path, *arguments[1:])
    assert (code, out) == (2, "")
    assert "holds no dump" in err
    assert err.count("\n") == 1
