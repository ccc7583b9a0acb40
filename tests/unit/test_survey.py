"""The survey on wheels made here: hostile ones, broken ones, and a small SGLang whose setters do what the real ones do."""

from __future__ import annotations

import hashlib
import json
import os
import time
import zipfile
from pathlib import Path

import pytest
from click.testing import CliRunner

from sglang_eagle3_plugin import paths, support
from sglang_eagle3_plugin.cli import compat as command
from sglang_eagle3_plugin.errors import UserError
from sglang_eagle3_plugin.releases import DEAD, RULES, UNKNOWN
from sglang_eagle3_plugin.survey import archive, facts, matrix, wheels

LAYER = """
class Layer(nn.Module):
    def forward(self, positions, hidden_states, forward_batch, residual):
        hidden_states, residual = self.input_layernorm(hidden_states, residual)
        return hidden_states, residual
class {stack}(nn.Module):
    def __init__(self, config):
        self.layers = make_layers(config.num_hidden_layers, lambda idx, prefix: Layer(config))
        self.layers_to_capture = []
    def forward(self, input_ids, positions, forward_batch):
        for i in range(len(self.layers)):
            {loop}
        return hidden_states
"""
LISTED = "if i in self.layers_to_capture: aux.append(hidden_states + residual)"
MARKED = 'captured = aux if getattr(self.layers[i], "_is_layer_to_capture", False) else None'
HEAD = """
class {name}(nn.Module):
    def __init__(self, config):
        self.config = config
        self.model = {stack}(config)
        self.logits_processor = LogitsProcessor(config)
    def get_embed_and_head(self): return 1
    def set_eagle3_layers_to_capture(self, layer_ids: Optional[List[int]] = None):
        if not self.pp_group.is_last_rank:
            return
        if layer_ids is None:
            num_layers = self.config.num_hidden_layers
            self.model.layers_to_capture = [2, num_layers // 2, num_layers - 3]
        else:
            self.model.layers_to_capture = {value}
EntryClass = [{name}]
"""
CALL = """
class ModelRunner:
    def initialize(self):
        self.model.set_eagle3_layers_to_capture(self.ids)
"""


def model(name: str, value: str, loop: str = LISTED) -> str:
    return LAYER.format(stack=f"{name}Model", loop=loop) + HEAD.format(name=name, stack=f"{name}Model", value=value)


def wheel(directory: Path, files: dict[str, str | bytes], release: str = "9.9.9") -> Path:
    path = directory / f"sglang-{release}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as made:
        for name, content in {"sglang/srt/model_executor/model_runner.py": CALL, **files}.items():
            made.writestr(name, content)
    return path


def surveyed(path: Path) -> facts.Release:
    with archive.open_any(path) as opened:
        return facts.of_archive(opened)


@pytest.mark.parametrize(
    ("value", "rule"),
    [
        ("[val + 1 for val in layer_ids]", "plus-one"),
        ("[val + 1 for val in layer_ids] if layer_ids and layer_ids[0] == 1 else list(layer_ids)", "first-id-one"),
        (
            "list(layer_ids) if layer_ids and max(layer_ids) == self.config.num_hidden_layers else [v + 1 for v in layer_ids]",
            "max-is-last",
        ),
        ("list(layer_ids)", UNKNOWN),
        ("[val + 1 for val in layer_ids] if len(layer_ids) < 4 else list(layer_ids)", UNKNOWN),
    ],
)
def test_a_rule_is_found_by_executing_the_setter(tmp_path, value, rule):
    found = surveyed(wheel(tmp_path, {"sglang/srt/models/a.py": model("AForCausalLM", value)}))
    assert found.classes["AForCausalLM"].rule == rule
    assert rule in RULES or rule == UNKNOWN


def test_a_setter_that_the_layers_do_not_heed_is_dead(tmp_path):
    source = model("AForCausalLM", "[val + 1 for val in layer_ids]", MARKED)
    assert surveyed(wheel(tmp_path, {"sglang/srt/models/a.py": source})).classes["AForCausalLM"].rule == DEAD


def test_a_wrapper_is_followed_to_its_inner_model(tmp_path):
    inner = model("InnerForCausalLM", "[val + 1 for val in layer_ids]")
    wrapper = """
from sglang.srt.models.inner import InnerForCausalLM
class WrapForConditionalGeneration(nn.Module):
    def __init__(self, config):
        self.language_model = InnerForCausalLM(config.text_config)
EntryClass = WrapForConditionalGeneration
"""
    files = {"sglang/srt/models/inner.py": inner, "sglang/srt/models/wrap.py": wrapper}
    found = surveyed(wheel(tmp_path, files)).classes["WrapForConditionalGeneration"]
    assert (found.setter, found.inner, found.stack) == (None, "language_model", "InnerForCausalLMModel")


TAPPED = """
class Layer(nn.Module):
    def forward(self, position_ids, hidden_states, forward_batch):
        return hidden_states + self.mlp(hidden_states)
class Crossing(nn.Module):
    def forward(self, hidden_states, cross_attention_states, forward_batch):
        return hidden_states
class Stack(nn.Module):
    def __init__(self, config):
        {filled}
class AForCausalLM(nn.Module):
    def __init__(self, config):
        self.{attribute} = Stack(config)
        self.logits_processor = LogitsProcessor(config{keywords})
EntryClass = AForCausalLM
"""


@pytest.mark.parametrize("attribute", ["model", "transformer", "inner"])
@pytest.mark.parametrize(
    ("filled", "stream"),
    [
        ("self.h = nn.ModuleList([Layer(config) for i in range(6)])", "hidden_states"),
        ("self.blocks = make_layers(6, lambda idx, prefix: Layer(config))", "hidden_states"),
        ("self.layers = nn.ModuleList()\n        self.layers.append(Layer(config))", "hidden_states"),
        ("some = []\n        some.append(Layer(config))\n        self.layers = nn.ModuleList(some)", "hidden_states"),
        (
            "some = []\n        some.append(CrossingLayer())\n        some.append(Layer())\n        self.h = nn.ModuleList(some)",
            "refused",
        ),
        ("self.h = [Layer(config)]", ""),
    ],
)
def test_the_layers_are_found_whatever_their_list_is_called(tmp_path, attribute, filled, stream):
    source = TAPPED.format(filled=filled, attribute=attribute, keywords="").replace("class Crossing(", "class CrossingLayer(")
    found = surveyed(wheel(tmp_path, {"sglang/srt/models/a.py": source})).classes["AForCausalLM"]
    assert found.stream.partition(":")[0] == stream
    assert found.stack == ("Stack" if stream else "")


def test_an_inner_model_that_is_chosen_by_its_version_or_by_its_config_is_followed(tmp_path):
    inner = model("InnerForCausalLM", "[val + 1 for val in layer_ids]")
    wrapper = """
from sglang.srt.models.inner import InnerForCausalLM
class Two(nn.Module):
    def __init__(self, config):
        self.llm = self.init_llm(config)
    def init_llm(self, config):
        return InnerForCausalLM(config)
VERSIONS = {(2, 6): Two}
class ByVersion:
    def __init__(self, config):
        one = VERSIONS.get(config.version)
        made = one(config)
        self.made = made
class ByConfig(nn.Module):
    def __init__(self, config):
        cls = self.class_for(config)
        self.language_model = cls(config)
class Held:
    def __init__(self, **kwargs):
        self.inner = ByConfig(**kwargs)
class ByVersionForConditionalGeneration(ByVersion): ...
class ByConfigForConditionalGeneration(Held): ...
EntryClass = [ByVersionForConditionalGeneration, ByConfigForConditionalGeneration]
"""
    files = {"sglang/srt/models/inner.py": inner, "sglang/srt/models/wrap.py": wrapper}
    found = surveyed(wheel(tmp_path, files)).classes
    assert found["ByVersionForConditionalGeneration"].stack == "InnerForCausalLMModel"
    assert found["ByVersionForConditionalGeneration"].capture == "list"
    assert found["ByConfigForConditionalGeneration"].chosen == "language_model"
    assert support.plugin_can(found["ByConfigForConditionalGeneration"])[0]


def test_of_an_encoder_and_a_decoder_the_decoder_speaks(tmp_path):
    source = """
class EncoderLayer(nn.Module):
    def forward(self, hidden_states, forward_batch):
        return hidden_states
class DecoderLayer(nn.Module):
    def forward(self, decoder_hidden_states, encoder_hidden_states, forward_batch):
        return decoder_hidden_states
class Encoder(nn.Module):
    def __init__(self, config):
        self.layers = nn.ModuleList([EncoderLayer()])
class Decoder(nn.Module):
    def __init__(self, config):
        self.layers = nn.ModuleList([DecoderLayer()])
class HearForConditionalGeneration(nn.Module):
    def __init__(self, config):
        self.encoder = Encoder(config)
        self.decoder = Decoder(config)
        self.logits_processor = LogitsProcessor(config)
EntryClass = HearForConditionalGeneration
"""
    found = surveyed(wheel(tmp_path, {"sglang/srt/models/a.py": source})).classes["HearForConditionalGeneration"]
    can, why = support.plugin_can(found)
    assert not can
    assert "encoder-decoder" in why


def test_block_diffusion_is_refused_with_its_reason(tmp_path):
    source = TAPPED.format(filled="self.h = nn.ModuleList([Layer()])", attribute="model", keywords=", return_full_logits=True")
    found = surveyed(wheel(tmp_path, {"sglang/srt/models/a.py": source})).classes["AForCausalLM"]
    can, why = support.plugin_can(found)
    assert not can
    assert "block diffusion" in why


def test_the_survey_runs_nothing_but_setters(tmp_path):
    mark = tmp_path / "ran"
    source = f"open({str(mark)!r}, 'w')\n" + model("AForCausalLM", "[val + 1 for val in layer_ids]")
    sneaky = model("BForCausalLM", f"[open({str(mark)!r}, 'w')]")
    importing = model("CForCausalLM", "[__import__('os').getpid()]")
    found = surveyed(wheel(tmp_path, {f"sglang/srt/models/{n}.py": s for n, s in (("a", source), ("b", sneaky), ("c", importing))}))
    assert found.classes["AForCausalLM"].rule == "plus-one"
    assert {found.classes[name].rule for name in ("BForCausalLM", "CForCausalLM")} == {UNKNOWN}
    assert not mark.exists()


def test_bad_files_are_a_line_each_and_the_rest_goes_on(tmp_path):
    files = {
        "sglang/srt/models/good.py": "\ufeff" + model("GoodForCausalLM", "[val + 1 for val in layer_ids]"),
        "sglang/srt/models/latin.py": "x = 'ä'".encode("latin-1"),
        "sglang/srt/models/broken.py": "class (:",
        "sglang/srt/models/null.py": "x = 1\0",
        "sglang/srt/models/deep.py": "x = " + "(" * 5000 + ")" * 5000,
        "../../escape.py": "x = 1",
        "/etc/absolute.py": "x = 1",
    }
    found = surveyed(wheel(tmp_path, files))
    assert list(found.classes) == ["GoodForCausalLM"]
    problems = "\n".join(found.facts.problems)
    for word in (
        "latin: is not UTF-8",
        "broken: it does not parse",
        "null:",
        "deep:",
        "'../../escape.py' leaves",
        "'/etc/absolute.py' leaves",
    ):
        assert word in problems
    assert len(found.facts.problems) == 6
    assert not (tmp_path.parent / "escape.py").exists()


def test_a_damaged_member_is_a_line(tmp_path):
    path = wheel(tmp_path, {"sglang/srt/models/a.py": "x = 1  # " + "a" * 4000})
    data = path.read_bytes()
    path.write_bytes(data.replace(b"a" * 4000, b"b" * 4000, 1))
    (problem,) = surveyed(path).facts.problems
    assert "a:" in problem


def test_a_truncated_wheel_leaves_the_others_alone(tmp_path):
    good = wheel(tmp_path, {"sglang/srt/models/a.py": model("AForCausalLM", "[val + 1 for val in layer_ids]")})
    bad = tmp_path / "sglang-9.9.8-py3-none-any.whl"
    bad.write_bytes(good.read_bytes()[:200])
    found = matrix.survey({"9.9.8": bad, "9.9.9": good})
    assert found["9.9.8"].classes == {}
    (problem,) = found["9.9.8"].whole["facts"]["problems"]
    assert "cannot be read" in problem
    assert str(tmp_path) not in problem
    assert list(found["9.9.9"].classes) == ["AForCausalLM"]


def test_twice_in_a_row_not_a_byte_differs_and_a_new_release_changes_no_old_line(tmp_path):
    first = wheel(tmp_path, {"sglang/srt/models/a.py": model("AForCausalLM", "[val + 1 for val in layer_ids]")}, "9.9.8")
    files = {
        "sglang/srt/models/a.py": model("AForCausalLM", "list(layer_ids)"),
        "sglang/srt/models/b.py": model("BForCausalLM", "[9]"),
    }
    second = wheel(tmp_path, files, "9.9.10")
    out = tmp_path / "data"
    matrix.save(out, matrix.survey({"9.9.8": first}))
    old = (out / "classes.json").read_text().splitlines()
    both = matrix.survey({"9.9.10": second, "9.9.8": first})
    matrix.save(out, both)
    once = {p.name: p.read_bytes() for p in out.iterdir()}
    matrix.save(out, {**matrix.load(out), **matrix.survey({"9.9.8": first})})
    assert {p.name: p.read_bytes() for p in out.iterdir()} == once
    assert {line.rstrip(",") for line in old} <= {line.rstrip(",") for line in (out / "classes.json").read_text().splitlines()}
    assert list(json.loads(once["releases.json"])["releases"]) == ["9.9.8", "9.9.10"]
    assert matrix.load(out) == {name: both[name] for name in ("9.9.8", "9.9.10")}


def test_a_file_shared_by_releases_is_read_once(tmp_path, monkeypatch):
    files = {"sglang/srt/models/a.py": model("AForCausalLM", "[val + 1 for val in layer_ids]")}
    read = []
    monkeypatch.setattr(
        archive.Archive, "text", lambda self, path, real=archive.Archive.text: (read.append(path), real(self, path))[1]
    )
    matrix.survey({r: wheel(tmp_path, files, r) for r in ("9.9.7", "9.9.8", "9.9.9")})
    assert read.count("sglang/srt/models/a.py") == 1


def test_a_failed_write_leaves_the_old_table(tmp_path, monkeypatch):
    path = tmp_path / "t.json"
    paths.write_text(path, "old")

    def fail(*arguments):
        raise OSError("disk full")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        paths.write_text(path, "new")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["t.json"]


PAGE = {
    "files": [
        {"filename": "sglang-0.4.5-py3-none-any.whl", "hashes": {"sha256": "a"}},
        {"filename": "sglang-9.9.9.tar.gz", "hashes": {"sha256": "b"}},
        {"filename": "sglang-9.9.9-cp310-cp310-manylinux_2_34_x86_64.whl", "hashes": {"sha256": "c"}},
        {"filename": "sglang-9.9.9-cp311-cp311-manylinux_2_34_aarch64.whl", "hashes": {"sha256": "d"}},
        {"filename": "sglang-9.9.9-cp311-cp311-manylinux_2_34_x86_64.whl", "hashes": {"sha256": "e"}},
        {"filename": "sglang-9.9.10rc1-py3-none-any.whl", "hashes": {"sha256": "f"}},
        {"filename": "sglang-9.9.8-py3-none-any.whl", "hashes": {"sha256": "g"}, "yanked": "broken"},
    ]
}


def test_the_index_tells_final_releases_and_one_wheel_of_each():
    found = wheels.listing(lambda url: json.dumps(PAGE))
    assert found == {"9.9.9": wheels.Listed("sglang-9.9.9-cp311-cp311-manylinux_2_34_x86_64.whl", "e")}


@pytest.mark.parametrize("answer", ["<html>", "[]", '{"files": [{}]}'])
def test_an_index_that_answers_something_else_is_one_sentence(answer):
    with pytest.raises(UserError, match="did not answer"):
        wheels.listing(lambda url: answer)


@pytest.fixture
def fake_pip(tmp_path, monkeypatch):
    """A pip that gives whatever lies in ``served``; returns that directory and the list of calls."""
    monkeypatch.setenv("SGLANG_EAGLE3_CACHE", str(tmp_path / "cache ü"))
    served, calls = tmp_path / "served", []
    served.mkdir()

    def download(release, scratch, filename):
        calls.append(release)
        source = next(served.glob(f"sglang-{release}-*"), None)
        if source is None:
            raise UserError(f"sglang {release} cannot be downloaded (offline); see to the network, and run it again")
        target = scratch / source.name
        target.write_bytes(source.read_bytes())
        return target

    monkeypatch.setattr(wheels, "_download", download)
    return served, calls


def test_a_wheel_is_fetched_once_and_again_when_it_is_damaged(fake_pip):
    served, calls = fake_pip
    made = wheel(served, {}, "9.9.9")
    listed = {"9.9.9": wheels.Listed(made.name, hashlib.sha256(made.read_bytes()).hexdigest())}
    (path,) = wheels.fetch(listed).values()
    assert wheels.fetch(listed) == {"9.9.9": path}
    assert calls == ["9.9.9"]
    path.write_bytes(path.read_bytes()[:100])
    assert wheels.fetch(listed) == {"9.9.9": path}
    assert path.read_bytes() == made.read_bytes()
    assert calls == ["9.9.9", "9.9.9"]


def test_a_wheel_with_another_hash_is_not_kept(fake_pip):
    served, _ = fake_pip
    made = wheel(served, {}, "9.9.9")
    (line,) = wheels.fetch({"9.9.9": wheels.Listed(made.name, "0" * 64)}).values()
    assert "another hash" in line
    assert not list(Path(wheels.cache.directory("wheels")).iterdir())


def test_what_a_killed_survey_left_is_cleared_away(fake_pip):
    directory = Path(wheels.cache.directory("wheels"))
    for name, age in ((".fetching-old", 7200), (".fetching-new", 0)):
        (directory / name).mkdir()
        os.utime(directory / name, (time.time() - age,) * 2)
    wheels.fetch({})
    assert [p.name for p in directory.iterdir()] == [".fetching-new"]


def test_one_release_that_cannot_be_had_does_not_stop_the_others(fake_pip):
    served, _ = fake_pip
    made = wheel(served, {}, "9.9.9")
    told = []
    found = wheels.fetch({"9.9.8": wheels.Listed("x.whl", ""), "9.9.9": wheels.Listed(made.name, "")}, told.append)
    assert "offline" in found["9.9.8"]
    assert isinstance(found["9.9.9"], Path)
    assert sorted(told) == ["9.9.8", "9.9.9"]


def test_the_command_writes_the_tables_and_reports_what_it_could_not_read(fake_pip, tmp_path, monkeypatch):
    served, _ = fake_pip
    good = wheel(served, {"sglang/srt/models/a.py": model("AForCausalLM", "[v + 1 for v in layer_ids]")}, "9.9.9")
    listed = {"9.9.8": wheels.Listed("gone.whl", ""), "9.9.9": wheels.Listed(good.name, "")}
    monkeypatch.setattr(wheels, "listing", lambda: listed)
    arguments = ["survey", "--into", str(tmp_path / "out"), "--json"]
    result = CliRunner().invoke(command.command, arguments, standalone_mode=False)
    assert result.exception is None
    assert result.return_value == 1
    assert list(json.loads(result.stdout)["problems"]) == ["9.9.8"]
    once = {p: p.read_bytes() for p in (tmp_path / "out" / "data").iterdir()}
    assert len(once) == 2
    CliRunner().invoke(command.command, arguments, standalone_mode=False)
    assert {p: p.read_bytes() for p in (tmp_path / "out" / "data").iterdir()} == once


def test_a_tree_is_probed_without_being_imported(tmp_path):
    models = tmp_path / "fork" / "python" / "sglang" / "srt" / "models"
    models.mkdir(parents=True)
    (models / "a.py").write_text("raise SystemExit\n" + model("AForCausalLM", "[v + 1 for v in layer_ids]"))
    (models.parents[1] / "version.py").write_text('__version__ = "0.5.9+fork"\n')
    (models / "out.py").symlink_to("/etc/hostname")
    result = CliRunner().invoke(command.command, ["probe", str(tmp_path / "fork"), "--json"], standalone_mode=False)
    row = json.loads(result.stdout)
    assert row["release"] == "0.5.9+fork"
    assert row["classes"]["AForCausalLM"]["rule"] == "plus-one"
    assert row["classes"]["AForCausalLM"]["evidence"] == "executed"
    assert any("out.py" in line for line in row["facts"]["problems"])


def test_a_rule_that_no_release_follows_is_still_executed(tmp_path):
    found = surveyed(wheel(tmp_path, {"sglang/srt/models/a.py": model("AForCausalLM", "[v + 2 for v in layer_ids]")}))
    assert found.classes["AForCausalLM"].rule == UNKNOWN
    got = found.captured("AForCausalLM", (2, 30, 58), 61)
    assert (got.eager, got.graph, got.will_emit) == ((4, 32, 60),) * 3


def test_what_is_no_sglang_is_refused(tmp_path):
    for path in (tmp_path, tmp_path / "x.txt"):
        path.touch() if path.suffix else None
        with pytest.raises(UserError):
            surveyed(path)
