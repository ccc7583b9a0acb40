"""Headers are read strictly, and a damaged file is one sentence."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from checkpoint_making import int64s, write_config, write_safetensors

from sglang_eagle3_plugin.checkpoints import config_of, locate, read_checkpoint, read_header, read_table
from sglang_eagle3_plugin.errors import UserError


def raw(file: Path, header: object, data: int = 0, claim: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes((len(text) if claim is None else claim).to_bytes(8, "little") + text + bytes(data))
    return file


def entry(shape: list[int], begin: int, end: int, dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_a_header_tells_names_dtypes_shapes_and_places(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "a.safetensors", {"d2t": ("I64", [3], int64s([5, 6, 7])), "fc.weight": ("BF16", [4, 12])})
    tensors, count = read_header(tmp_path / "a.safetensors")
    assert count == 2
    assert (tensors["fc.weight"].dtype, tensors["fc.weight"].shape) == ("BF16", (4, 12))
    assert read_table(tensors["d2t"]) == [5, 6, 7]


def test_what_the_library_writes_is_read(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    save = pytest.importorskip("safetensors.numpy").save_file
    save({"b": numpy.zeros((2, 3), "float32"), "a": numpy.arange(5)}, tmp_path / "m.safetensors", {"format": "pt"})
    tensors, count = read_header(tmp_path / "m.safetensors")
    assert count == 2
    assert read_table(tensors["a"]) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("header", "data", "claim", "says"),
    [
        (b"{}", 0, 1 << 60, "claims 1152921504606846976 bytes"),
        (b"{}", 0, (1 << 64) - 1, "claims"),
        (b"[]", 0, None, "no object"),
        (b'{"a": ', 0, None, "no JSON"),
        (b"\xff\xfe{}", 0, None, "no JSON"),
        (b'{"a":' * 5000 + b"1" + b"}" * 5000, 0, None, "no JSON"),
        ({"a": entry([2], 0, 8)}, 4, None, "cut short"),
        ({"a": entry([3], 0, 8)}, 8, None, "does not fit"),
        ({"a": entry([2], 0, 8), "b": entry([2], 4, 12)}, 12, None, "overlap"),
        ({"a": entry([2], 4, 12)}, 12, None, "gap"),
        ({"a": entry([2], 0, 8)}, 12, None, "cover"),
        ({"a": entry([-2], 0, 8)}, 8, None, "malformed"),
        ({"a": entry([2], 8, 0)}, 8, None, "malformed"),
        ({"a": 7}, 0, None, "malformed"),
        ({"a": {"dtype": [], "shape": [], "data_offsets": [0, 0]}}, 0, None, "malformed"),
        ({"a": entry([1 << 70], 0, 8)}, 8, None, "malformed"),
        ({"a": entry([True], 0, 8)}, 8, None, "malformed"),
        ({"a": {"dtype": "F32", "shape": "2", "data_offsets": [0, 8]}}, 8, None, "malformed"),
        ({"a": entry([1] * 65, 0, 4)}, 4, None, "malformed"),
    ],
)
def test_a_damaged_header_is_one_sentence(tmp_path: Path, header: object, data: int, claim: int | None, says: str) -> None:
    with pytest.raises(UserError, match=says) as caught:
        read_header(raw(tmp_path / "m.safetensors", header, data, claim))
    assert "\n" not in str(caught.value)
    assert "m.safetensors" in str(caught.value)


def test_tensors_need_not_stand_in_the_order_of_their_bytes(tmp_path: Path) -> None:
    raw(tmp_path / "m.safetensors", {"b": entry([2], 8, 16), "a": entry([2], 0, 8), "none": entry([0], 0, 0)}, 16)
    assert read_header(tmp_path / "m.safetensors")[1] == 3


@pytest.mark.parametrize("name", ["model.gguf", "pytorch_model.bin", "model.pt"])
def test_other_formats_are_refused_with_a_sentence(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"whatever")
    with pytest.raises(UserError, match=r"GGUF|pickled"):
        locate(str(tmp_path / name))
    with pytest.raises(UserError, match=r"GGUF|pickled"):
        read_checkpoint(tmp_path)


def test_a_single_file_is_read_with_the_config_beside_it(tmp_path: Path) -> None:
    write_config(tmp_path, {"hidden_size": 4})
    write_safetensors(tmp_path / "model.safetensors", {"fc.weight": ("BF16", [4, 12])})
    place = locate(str(tmp_path / "model.safetensors"))
    assert config_of(place)[0] == {"hidden_size": 4}
    assert read_checkpoint(place).count == 1


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("", "is no path"),
        ("a\0b", "is no path"),
        ("x" * 5000, "is no path"),
        ("notes.txt", "neither a directory nor a .safetensors file"),
        ("pipe.safetensors", "neither a directory nor a .safetensors file"),
    ],
)
def test_what_is_no_checkpoint_is_one_sentence(tmp_path: Path, given: str, says: str) -> None:
    (tmp_path / "notes.txt").write_text("whatever")
    os.mkfifo(tmp_path / "pipe.safetensors")
    with pytest.raises(UserError, match=says):
        locate(str(tmp_path / given) if "." in given else given)


def test_a_file_too_short_for_a_header_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "m.safetensors").write_bytes(b"short")
    with pytest.raises(UserError, match=r"5 bytes long, too short for a safetensors file"):
        read_header(tmp_path / "m.safetensors")


def test_a_header_larger_than_the_format_allows_is_not_read(tmp_path: Path) -> None:
    file = raw(tmp_path / "m.safetensors", b"{}", claim=200_000_000)
    with file.open("r+b") as stream:
        stream.truncate(8 + 200_000_000)  # a hole: it takes no room
    with pytest.raises(UserError, match="more than safetensors allows"):
        read_header(file)


def test_the_one_snapshot_of_a_cached_repository_needs_no_name(tmp_path: Path) -> None:
    repository = tmp_path / "models--some--draft"
    write_config(repository / "snapshots" / "abc", {"hidden_size": 1})
    assert config_of(locate(str(repository)))[0] == {"hidden_size": 1}
    write_config(repository / "snapshots" / "def", {"hidden_size": 2})
    with pytest.raises(UserError, match="holds 2 snapshots and no refs/main"):
        locate(str(repository))


def test_an_index_tells_of_missing_and_short_shards(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "a.safetensors", {"x": ("F32", [1])})
    write_safetensors(tmp_path / "consolidated.safetensors", {"whole": ("F32", [1])})
    index = {"weight_map": {"x": "a.safetensors", "y": "a.safetensors", "z": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    found = read_checkpoint(tmp_path)
    assert set(found.tensors) == {"x"}
    assert any("b.safetensors" in p for p in found.problems)
    assert any("lists 2 tensors in a.safetensors" in p for p in found.problems)


@pytest.mark.parametrize("value", ["../../etc/passwd", "/etc/passwd", "", ["a"], 7])
def test_an_index_cannot_lead_out_of_its_directory(tmp_path: Path, value: object) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": value}}))
    with pytest.raises(UserError, match=r"outside its own directory|no weight_map"):
        read_checkpoint(tmp_path)


def test_the_hugging_face_cache_is_followed(tmp_path: Path) -> None:
    repository = tmp_path / "models--some--draft"
    write_config(repository / "snapshots" / "abc", {"hidden_size": 1})
    write_config(repository / "snapshots" / "def", {"hidden_size": 2})
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("def")
    environ = {"HF_HUB_CACHE": str(tmp_path)}
    assert config_of(locate("some/draft", environ=environ))[0] == {"hidden_size": 2}
    assert config_of(locate("some/draft", environ=environ, revision="abc"))[0] == {"hidden_size": 1}
    assert config_of(locate(str(repository)))[0] == {"hidden_size": 2}
    with pytest.raises(UserError, match="no revision"):
        locate("some/draft", environ=environ, revision="gone")
    (repository / "refs" / "main").write_text("../../..")
    with pytest.raises(UserError, match="names a snapshot that is not"):
        locate(str(repository))


def test_what_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="neither a path"):
        locate("no/such", environ={"HF_HUB_CACHE": str(tmp_path)})
    with pytest.raises(UserError, match=r"config\.json is missing"):
        config_of(locate(str(tmp_path)))
