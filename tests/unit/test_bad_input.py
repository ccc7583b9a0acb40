"""What a command cannot use: one sentence, exit status 2, no traceback. Checkpoints are in test_doctor_robustness."""

from __future__ import annotations

import pytest

from sglang_eagle3_plugin.cli import main

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
