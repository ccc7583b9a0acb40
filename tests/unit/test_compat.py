"""The matrix: its data fit their schemas, its pages follow from them, and its cells claim no more than their evidence."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import pytest
from click.testing import CliRunner

from sglang_eagle3_plugin import releases, support
from sglang_eagle3_plugin.cli import compat as command
from sglang_eagle3_plugin.cli import wiring as wiring_command
from sglang_eagle3_plugin.compat import matrix, ran, render
from sglang_eagle3_plugin.errors import UserError
from sglang_eagle3_plugin.selection import select

COMPAT = Path(__file__).parents[2] / "compat"


@pytest.mark.parametrize("name", ["releases", "classes", "ran"])
def test_data_fit_their_schema(name):
    schema = json.loads((COMPAT / "schema" / f"{name}.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(json.loads((COMPAT / "data" / f"{name}.json").read_text()))


@pytest.mark.parametrize(("file", "made"), [(render.MARKDOWN, render.markdown), (render.PAGE, render.page)])
def test_the_committed_pages_follow_from_the_data(file, made):
    assert (COMPAT / file).read_text() == made(), "run `sglang-eagle3 compat render`"


def test_the_readme_holds_the_summary_that_follows_from_the_data(tmp_path):
    text = (COMPAT.parent / "README.md").read_text()
    assert text.count(render.MARKS[0]) == text.count(render.MARKS[1]) == 1
    assert render.readme(text) == text, "run `sglang-eagle3 compat render`"
    assert "| 0.5.9 |" in text
    assert render.readme("no place for it") == "no place for it"


def test_the_matrix_covers_every_final_release():
    names = releases.known_releases()
    assert (len(names), names[0], names[-1]) >= (63, "0.4.5.post3", "0.5.23")
    document = matrix.document()
    assert document["releases"] == list(names)
    for cells in document["classes"].values():
        assert list(cells) == list(names)


def test_a_cell_claims_no_more_than_its_evidence():
    runs = ran.load()
    for class_name, cells in matrix.document()["classes"].items():
        for release, cell in cells.items():
            run = runs.get(release, {}).get(class_name)
            assert (cell["evidence"] == "ran") is (run is not None)
            if cell["evidence"] == "executed":
                assert cell["rule"] in releases.RULES
            if run is not None:
                assert (cell["date"], cell["command"]) == (run["date"], run["command"])
                if not run["stock"]["ok"]:
                    assert cell["level"] in (support.PLUGIN, support.BROKEN)
                if not run["plugin"]["ok"]:
                    assert cell["level"] == support.BROKEN


@pytest.mark.parametrize(
    ("plugin", "stock", "read_as", "level"),
    [
        ({"ok": False, "error": "ValueError: x"}, {"ok": True}, support.NATIVE, support.BROKEN),
        ({"ok": True, "boundaries": [2, 4, 5], "same_tokens": True}, {"ok": True}, support.NATIVE, support.BROKEN),
        ({"ok": True, "boundaries": [3, 5, 6], "same_tokens": False}, {"ok": True}, support.NATIVE, support.BROKEN),
        ({"ok": True, "boundaries": [3, 5, 6], "same_tokens": True}, {"ok": False, "error": "x"}, support.NATIVE, support.PLUGIN),
        ({"ok": True, "boundaries": [3, 5, 6], "same_tokens": True}, {"ok": False, "error": "x"}, support.BROKEN, support.PLUGIN),
        (
            {"ok": True, "boundaries": [3, 5, 6], "same_tokens": True},
            {"ok": True, "boundaries": None},
            support.NATIVE,
            support.NATIVE,
        ),
    ],
)
def test_a_run_outranks_what_was_read(plugin, stock, read_as, level):
    assert matrix._by_run(read_as, "", {"plugin": plugin, "stock": stock, "wanted": [3, 5, 6]})[0] == level


def test_records_are_added_and_replaced_without_losing_others(tmp_path):
    assert ran.load(tmp_path) == {}
    one = {"stock": {"ok": False, "error": "x"}, "plugin": {"ok": False, "error": "y"}}
    ran.record(tmp_path, "0.5.10", {"A": one})
    ran.record(tmp_path, "0.5.9", {"A": one, "B": one})
    ran.record(tmp_path, "0.5.9", {"A": {**one, "stock": {"ok": False, "error": "z"}}})
    runs = ran.load(tmp_path)
    assert list(runs) == ["0.5.9", "0.5.10"]
    assert runs["0.5.9"]["A"]["stock"]["error"] == "z"
    assert runs["0.5.9"]["B"]["stock"]["error"] == "x"
    schema = json.loads((COMPAT / "schema" / "ran.json").read_text())
    jsonschema.validate(json.loads((tmp_path / "ran.json").read_text()), schema)


def test_a_run_that_fails_with_and_without_the_plugin_alike_is_no_evidence(tmp_path):
    same = {"stock": {"ok": False, "error": "ImportError: x"}, "plugin": {"ok": False, "error": "ImportError: x"}}
    ran.record(tmp_path, "0.5.9", {"A": same})
    assert ran.load(tmp_path) == {}
    assert "ImportError: x" in ran.could_not(tmp_path)["0.5.9"]
    schema = json.loads((COMPAT / "schema" / "ran.json").read_text())
    jsonschema.validate(json.loads((tmp_path / "ran.json").read_text()), schema)
    missing = "AttributeError: 'A' object has no attribute 'set_eagle3_layers_to_capture'"
    ran.record(tmp_path, "0.5.9", {"A": {way: {"ok": False, "error": missing} for way in same}})
    assert ran.could_not(tmp_path) == {}
    assert list(ran.load(tmp_path)["0.5.9"]) == ["A"], "a plugin that supplies no hook has failed"


def test_recorded_errors_name_no_path_of_a_machine():
    assert "/home" not in ran._clean("FileNotFoundError: [Errno 2] No such file: '/home/someone/x/config.json'")
    assert not re.search(r"/(root|home|work|tmp)\b", (COMPAT / "data" / "ran.json").read_text())


def test_the_page_loads_nothing_from_elsewhere_and_is_of_a_sane_size():
    text = (COMPAT / render.PAGE).read_text()
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//|@import|url\(""", text)
    assert len(text) < 500_000
    assert "width=device-width" in text


def pair(tmp_path: Path, **eagle) -> list[str]:
    for name, config in (
        ("target", {"architectures": ["KimiK25ForConditionalGeneration"], "text_config": {"num_hidden_layers": 61}}),
        ("draft ü", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 30, 58], **eagle}}),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    return ["--target", str(tmp_path / "target"), "--draft", str(tmp_path / "draft ü")]


def call(what, arguments):
    result = CliRunner().invoke(what, arguments, standalone_mode=False)
    if result.exception:
        raise result.exception
    return result


def test_the_answer_for_a_pair(tmp_path):
    arguments = pair(tmp_path, eagle_aux_hidden_state_layer_convention="output")
    result = call(command.command, [*arguments, "--json"])
    answers = json.loads(result.stdout)["releases"]
    assert result.return_value == 0
    assert list(answers)[:3] == ["0.5.12.post1", "0.5.12", "0.5.11"], "the best releases come first"
    assert answers["0.5.9"]["stock"] is None
    assert answers["0.5.9"]["plugin"] == [3, 31, 59]
    for release in ("0.5.10", "0.5.10.post1"):
        assert (answers[release]["stock"], answers[release]["stock_graph"]) == ([3, 31, 59], [2, 30, 58])
        assert "CUDA graphs" in answers[release]["why"]
    for release in [r for r in releases.known_releases() if releases.order(r) >= releases.order("0.5.13")]:
        assert (answers[release]["stock"], answers[release]["plugin"]) == ([2, 30, 58], [3, 31, 59])
        assert "off by one" in answers[release]["why"]


def test_wiring_prints_the_documented_object(tmp_path):
    arguments = pair(tmp_path, eagle_aux_hidden_state_layer_convention="output")
    result = call(wiring_command.command, [*arguments, "--releases", "0.5.9,0.5.12,0.5.13", "--json"])
    document = json.loads(result.stdout)
    assert (document["wanted"], document["convention"], document["decided_by"]) == ([3, 31, 59], "output", "draft config")
    rows = {name: (row["stock"], row["plugin"], row["needs_plugin"]) for name, row in document["releases"].items()}
    assert rows == {
        "0.5.9": (None, [3, 31, 59], True),
        "0.5.12": ([3, 31, 59], [3, 31, 59], False),
        "0.5.13": ([2, 30, 58], [3, 31, 59], True),
    }


def test_an_undecidable_pair_is_a_finding(tmp_path):
    arguments = pair(tmp_path)
    result = call(wiring_command.command, [*arguments, "--json"])
    document = json.loads(result.stdout)
    assert result.return_value == 1
    assert (document["wanted"], document["convention"]) == (None, "ambiguous")
    assert document["readings"] == {"output": [3, 31, 59], "boundary": [2, 30, 58]}
    assert document["releases"]["0.5.13"]["plugin"] == [2, 30, 58], "the release's own reading is kept"


def test_stock_that_captures_two_things_is_broken_where_the_plugin_does_not_reach(tmp_path):
    """Whichever reading the draft was trained on: eager passes and CUDA graphs of 0.5.4 can't both be right."""
    llama = tmp_path / "llama"
    llama.mkdir()
    (llama / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 32, "hidden_size": 64}')
    draft = {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "hidden_size": 64}
    for name, more in (("listed", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 16, 29]}}), ("unlisted", {})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(draft | more))
    levels = {}
    for name in ("listed", "unlisted"):
        arguments = ["--draft", str(tmp_path / name), "--target", str(llama), "--releases", "0.5.4,0.5.9,0.5.23", "--json"]
        levels[name] = json.loads(call(wiring_command.command, arguments).stdout)["releases"]
    row = levels["listed"]["0.5.4"]
    assert (row["stock"], row["stock_graph"], row["plugin"], row["level"]) == ([3, 17, 30], [2, 16, 29], None, "broken")
    assert "CUDA graphs" in row["why"]
    assert "made for 0.5.4.post2" in row["why"]
    assert [levels["listed"][release]["level"] for release in ("0.5.9", "0.5.23")] == ["plugin:rewired", "native"]
    assert levels["unlisted"]["0.5.4"]["level"] == "native"


def test_the_user_can_decide_it(tmp_path, monkeypatch):
    monkeypatch.setenv("EAGLE3_LAYER_CONVENTION", "boundary")
    result = call(wiring_command.command, [*pair(tmp_path), "--json"])
    assert result.return_value == 0
    assert json.loads(result.stdout)["wanted"] == [2, 30, 58]


def test_wiring_fits_sixty_columns(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    for line in call(wiring_command.command, pair(tmp_path)).stdout.splitlines():
        assert len(line) <= 60


@pytest.mark.parametrize("arguments", [["--draft", "x"], ["--class", "NoSuchClass"], ["--releases", ">9"], ["--releases", "what"]])
def test_bad_input_is_one_sentence(arguments):
    with pytest.raises(UserError) as error:
        call(command.command, arguments)
    assert "\n" not in str(error.value)


def test_selecting_releases():
    names = ["0.5.9", "0.5.10", "0.5.10.post1", "0.5.11"]
    assert select(None, names) == names
    assert select(">=0.5.10,<0.5.11", names) == ["0.5.10", "0.5.10.post1"]
    assert select("0.5.13, 0.5.9", names) == ["0.5.9", "0.5.13"], "a listed release need not be known"


def test_an_unknown_release_is_answered_by_its_nearest_and_says_so():
    newest = releases.known_releases()[-1]
    assert releases.nearest("0.5.99") == (newest, False)
    assert releases.nearest("0.5.12.post1+local") == ("0.5.12.post1", True)
    assert releases.nearest("0.5.10rc0") == ("0.5.9", False)
    assert releases.nearest("fork-of-mine") == (newest, False)
    got = releases.captured("0.5.12.post7", "DeepseekV3ForCausalLM", (2, 30, 58), 61)
    assert (got.eager, got.exact) == ((3, 31, 59), False)
