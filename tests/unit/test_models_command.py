"""`sglang-eagle3 models`: every class of a release, how it is served, and why not."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest
from click.testing import CliRunner

from sglang_eagle3_plugin import releases, support
from sglang_eagle3_plugin.cli.models import WAYS, command, models_of


def listed(*arguments: str):
    result = CliRunner().invoke(command, [*arguments, "--json"], standalone_mode=False)
    assert result.exception is None, result.output
    return json.loads(result.stdout), result.return_value


def in_the_docs() -> dict[str, list[int]]:
    """The table of docs/models.md: release -> its numbers."""
    lines = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| 0.5.")]
    return {release: [int(cell) for cell in cells] for release, *cells in rows}


@pytest.mark.parametrize(("release", "served"), [("0.5.9", 130), ("0.5.13", 145), ("0.5.23", 185)])
def test_the_counts_are_those_of_the_docs_and_each_class_says_how_or_why_not(release, served):
    data, code = listed("--release", release)
    counts, wrappers = data["counts"], data["wrappers"]
    assert code == 0
    assert set(counts) == set(wrappers) == set(WAYS)
    assert sum(counts.values()) == len(data["models"])
    assert sum(counts.values()) - counts["not possible"] >= served
    assert all(row["why"] for row in data["models"])
    numbers = [sum(counts.values()), *(counts[way] for way in WAYS), sum(wrappers.values()), *(wrappers[way] for way in WAYS)]
    assert in_the_docs()[release] == numbers


@pytest.mark.parametrize(("release", "lacking", "served"), [("0.5.9", 32, 30), ("0.5.23", 43, 40)])
def test_nearly_every_wrapper_that_stock_cannot_serve_is_served(release, lacking, served):
    wrappers = listed("--release", release)[0]["wrappers"]
    alone = wrappers["native"] + wrappers["plugin:rewired"]
    assert sum(wrappers.values()) - alone >= lacking
    assert sum(wrappers.values()) - alone - wrappers["not possible"] >= served


@pytest.mark.parametrize("release", ["0.5.4", "0.5.9", "0.5.10.post1", "0.5.23"])
def test_the_headline_is_that_of_the_matrix(release, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    levels = Counter(support.support(release, name).level for name in releases.class_names())
    result = CliRunner().invoke(command, ["--release", release], standalone_mode=False)
    headline = result.stdout.splitlines()[0]
    assert [int(number) for number in re.findall(r"(\d+) (?:model|native|plugin|broken)", headline)] == [
        sum(levels[level] for level in support.LEVELS if level != support.ABSENT),
        *(levels[level] for level in (support.NATIVE, support.REWIRED, support.PLUGIN, support.BROKEN)),
    ]
    matrix = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    if row := re.search(rf"^\| {re.escape(release)} \| (\d+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|", matrix, re.MULTILINE):
        assert re.findall(r"(\d+) (?:model|native|plugin|broken)", headline) == list(row.groups())


def test_classes_and_their_ways():
    ways = {row["class"]: row["way"] for row in models_of("0.5.9")}
    assert ways["LlamaForCausalLM"] == "plugin:rewired"
    assert {row["class"]: row["way"] for row in models_of("0.5.23")}["LlamaForCausalLM"] == "native"
    assert ways["KimiVLForConditionalGeneration"] == "delegation"
    assert ways["Qwen2VLForConditionalGeneration"] == "native capture, delivered"
    assert ways["PhiForCausalLM"] == "generic tap"
    assert ways["Grok1ForCausalLM"] == "not possible"


def test_filters_and_exit_codes():
    data, code = listed("--release", "0.5.9", "--class", "kimi", "--way", "delegation")
    assert code == 0
    assert {row["way"] for row in data["models"]} == {"delegation"}
    assert listed("--release", "0.5.9", "--class", "NoSuchModel")[1] == 1


def test_an_unknown_release_names_the_nearest():
    result = CliRunner().invoke(command, ["--release", "9.9.9"], standalone_mode=False)
    assert "9.9.9" in str(result.exception)
    assert "0.5.23" in str(result.exception)
