"""`sglang-eagle3 models`: every class of a release, how it is served, and why not."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from sglang_eagle3_plugin.cli.models import WAYS, command, models_of


def listed(*arguments: str):
    result = CliRunner().invoke(command, [*arguments, "--json"], standalone_mode=False)
    assert result.exception is None, result.output
    return json.loads(result.stdout), result.return_value


@pytest.mark.parametrize(("release", "stock", "served"), [("0.5.9", 29, 120), ("0.5.13", 39, 135), ("0.5.23", 50, 180)])
def test_counts_of_the_releases(release, stock, served):
    data, code = listed("--release", release)
    counts = data["counts"]
    assert code == 0
    assert set(counts) == set(WAYS)
    assert counts["native"] >= stock
    assert sum(counts.values()) - counts["not possible"] >= served
    assert sum(counts.values()) == len(data["models"])
    assert all(row["why"] for row in data["models"]), "each class says how, or why not"


def test_classes_and_their_ways():
    ways = {row["class"]: row["way"] for row in models_of("0.5.9")}
    assert ways["LlamaForCausalLM"] == "native"
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
