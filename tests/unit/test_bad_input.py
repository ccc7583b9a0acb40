"""What a command cannot use: one sentence, exit status 2, no traceback. Checkpoints are in test_doctor_robustness."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from checkpoint_making import draft_config, draft_tensors, target_config, write_config, write_safetensors

from sglang_eagle3_plugin.cli import main
from sglang_eagle3_plugin.paths import Alone
from sglang_eagle3_plugin.server import prompts

NOWHERE = "http://127.0.0.1:9"


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    said = capsys.readouterr().err
    assert ended.value.code == 2, said
    assert said.count("\n") == 1, said
    return said


@pytest.mark.parametrize("number", ["nan", "inf", "-inf", "-1", "1e999"])
@pytest.mark.parametrize(
    "argv",
    [
        ["wait", "--url", NOWHERE, "--timeout"],
        ["accept", "--url", NOWHERE, "--expect"],
        ["accept", "--url", NOWHERE, "--tolerance"],
        ["bench", "--target", ".", "--draft", ".", "--start-timeout"],
        ["hidden-states", "extract", "--target", ".", "--data", "d.jsonl", "--dump", "d", "--start-timeout"],
    ],
)
def test_numbers_that_measure_nothing(argv, number, capsys) -> None:
    assert number.strip("-")[:2] in refused(capsys, *argv, number) or number == "1e999"


@pytest.mark.parametrize(
    "url",
    [
        "",
        "http://[::1",
        "::1",
        "ftp://host",
        "http://:1",
        "http://host:99999",
        "http://user:pw@host",
        "http://256.256.256.256",
        "http://a..b",
        "http://" + "a" * 300,
        "http://host/\x01",
    ],
)
@pytest.mark.parametrize(
    "argv",
    [
        ["wait"],
        ["accept"],
        ["bench", "--eagle-url", NOWHERE, "--baseline-url"],
        ["status"],
        ["debug", "status"],
        ["hidden-states", "dump", "status"],
        ["hidden-states", "extract", "--data", "d.jsonl", "--dump", "d"],
    ],
)
def test_addresses_that_lead_nowhere(argv, url, capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    refused(capsys, *argv, *([] if argv[-1].endswith("url") else ["--url"]), url)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("release", ["-1", "main", "0.5.9 or so"])
def test_no_version(release, capsys) -> None:
    assert "no version of SGLang" in refused(capsys, "patches", "export", "--release", release)


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n"


@pytest.fixture
def pair(tmp_path: Path) -> list[str]:
    target = write_config(tmp_path / "target", target_config())
    draft = write_config(tmp_path / "draft", draft_config([2, 4, 5]))
    write_safetensors(draft / "model.safetensors", draft_tensors())
    return ["--target", str(target), "--draft", str(draft)]


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_git_lfs_pointer_is_called_one(name, pair, capsys) -> None:
    Path(pair[3], name).write_text(POINTER)
    assert "run `git lfs pull`" in refused(capsys, "doctor", *pair)


def test_weights_that_are_a_link_to_nothing_are_missing(pair, capsys) -> None:
    weights = Path(pair[3], "model.safetensors")
    weights.unlink()
    weights.symlink_to("../../blobs/0123")  # as in a Hugging Face cache whose download was broken off
    with pytest.raises(SystemExit) as ended:
        main(["doctor", *pair, "--json"])
    said = json.loads(capsys.readouterr().out)
    assert ended.value.code == 1
    assert any(f["id"] == "ERR_SHARD_MISSING" and str(weights) in f["message"] for f in said["findings"])


def test_a_config_cannot_steer_the_terminal(pair, capsys) -> None:
    hidden = "\x1b[2K\x1b[1A\x9b31m[/red]"
    write_config(Path(pair[3]), draft_config([2, 4, 5], architectures=[hidden]))
    (Path(pair[3]) / "model.safetensors").unlink()
    for argv in (["doctor", *pair], ["wiring", *pair], ["compat", *pair], ["doctor", *pair, "--trained", hidden]):
        with pytest.raises(SystemExit):
            main(argv)
        said = "".join(capsys.readouterr())
        assert not set("\x1b\x9b") & set(said)
    assert "\\x1b[2K" in said


DEEP = "[" * 200_000


@pytest.mark.parametrize(
    "argv",
    [
        ["doctor", "--case", "deep"],
        ["accept", "--url", NOWHERE, "--score", "deep"],
        ["bench", "--eagle-url", NOWHERE, "--baseline-url", NOWHERE, "--prompts", "deep"],
        ["hidden-states", "extract", "--target", ".", "--data", "deep", "--dump", "d"],
    ],
)
def test_json_that_is_nested_without_end(argv, capsys, tmp_path, monkeypatch) -> None:
    pytest.importorskip("numpy")
    monkeypatch.chdir(tmp_path)
    Path("deep").write_text(DEEP)
    refused(capsys, *argv)


def test_a_byte_order_mark_is_no_fault(pair, capsys, tmp_path) -> None:
    main_of = {}
    for name in ("as it is", "as Windows writes it"):
        draft = tmp_path / name
        shutil.copytree(pair[3], draft)
        config = draft / "config.json"
        if name != "as it is":
            config.write_bytes(
                b"\xef\xbb\xbf" + json.dumps(json.loads(config.read_text()), indent=1).replace("\n", "\r\n").encode()
            )
        with pytest.raises(SystemExit):
            main(["wiring", "--json", "--target", pair[1], "--draft", str(draft)])
        main_of[name] = capsys.readouterr().out
    assert len(set(main_of.values())) == 1
    (tmp_path / "prompts.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n{"text": "b"}\r\n')
    assert prompts.from_file(tmp_path / "prompts.jsonl") == [{"text": "a"}, {"text": "b"}]


def test_a_user_without_a_home(pair, capsys, monkeypatch) -> None:
    for home in ("~nobody-of-this-name/target", "~/target"):
        monkeypatch.setenv("HOME", "/nonexistent")
        assert "neither a path" in refused(capsys, "wiring", "--draft", pair[3], "--target", home)
    monkeypatch.setenv("SGLANG_EAGLE3_CACHE", "~nobody-of-this-name/cache")
    monkeypatch.chdir(pair[1])
    assert "no wheel" in refused(capsys, "patches", "export", "--release", "0.5.9")


def test_two_surveys_never_write_over_each_other(capsys, tmp_path) -> None:
    (tmp_path / "data").mkdir()
    with Alone(tmp_path / "data"):
        said = refused(capsys, "compat", "survey", "--offline", "--releases", "0.5.9", "--into", str(tmp_path))
    assert "another run is writing" in said
    assert list((tmp_path / "data").iterdir()) == []
