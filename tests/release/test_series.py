"""Each release's series against its own wheel: applies, reverses, applies again, compiles, and is what the changes give."""

from __future__ import annotations

import ast
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Optional

import pytest

from sglang_eagle3_plugin import cache
from sglang_eagle3_plugin.errors import UserError
from sglang_eagle3_plugin.series import catalog, export, transaction, tree
from sglang_eagle3_plugin.series.source import Source, from_wheel

pytestmark = pytest.mark.release

ENTRIES = catalog.load()
LAYERS = 61


def _wheel(release: str) -> Path:
    found = sorted(cache.directory("wheels").glob(f"sglang-{release}-*.whl"))
    assert found, f"download sglang=={release} into {cache.directory('wheels')} first"
    return found[0]


def _unpack(release: str, target: Path) -> Path:
    """The files of a release that its series touches, and the directory that must be there."""
    source = from_wheel(_wheel(release))
    (target / "sglang" / "srt").mkdir(parents=True)
    for path in ENTRIES[release].files:
        text = source.text(path)
        if text is not None:
            (target / path).parent.mkdir(parents=True, exist_ok=True)
            (target / path).write_bytes(text.encode())
    return target


def test_every_release_from_0_5_6_to_0_5_23_has_a_series() -> None:
    # fmt: off
    assert list(ENTRIES) == [
        "0.5.6", "0.5.6.post1", "0.5.6.post2", "0.5.7", "0.5.8", "0.5.8.post1", "0.5.9", "0.5.10", "0.5.10.post1", "0.5.11",
        "0.5.12", "0.5.12.post1", "0.5.13", "0.5.13.post1", "0.5.14", "0.5.15", "0.5.15.post1", "0.5.16", "0.5.17", "0.5.18",
        "0.5.19", "0.5.20", "0.5.21", "0.5.22", "0.5.23",
    ]
    # fmt: on


@pytest.mark.parametrize("release", ENTRIES)
def test_the_committed_series_is_what_the_changes_give(release: str) -> None:
    series = export.build(from_wheel(_wheel(release)))
    entry = ENTRIES[release]
    assert {p.name: p.read_text() for p in entry.patches()} == series.patches, "run `sglang-eagle3 patches export --all`"
    assert {p: list(ids) for p, ids in entry.files.items()} == series.stages


@pytest.mark.parametrize("release", ENTRIES)
def test_a_series_applies_reverses_and_applies_again(release: str, tmp_path: Path) -> None:
    root = _unpack(release, tmp_path)
    opened = tree.open_tree(root)
    before = {p: opened.read(p) for p in ENTRIES[release].files}

    report = tree.examine(opened, ENTRIES)
    assert (report.state, report.entry and report.entry.directory) == (tree.State.CLEAN, ENTRIES[release].directory)
    transaction.apply(opened, report)
    applied = {p: opened.read(p) or b"" for p in ENTRIES[release].files}
    assert tree.examine(opened, ENTRIES).state is tree.State.APPLIED
    for path, text in applied.items():
        compile(text, path, "exec")

    transaction.revert(opened, tree.examine(opened, ENTRIES))
    assert {p: opened.read(p) for p in ENTRIES[release].files} == before
    transaction.apply(opened, tree.examine(opened, ENTRIES))
    assert {p: opened.read(p) for p in ENTRIES[release].files} == applied


@pytest.mark.parametrize("release", ENTRIES)
def test_a_series_is_refused_on_the_next_release(release: str, tmp_path: Path) -> None:
    others = [r for r, entry in ENTRIES.items() if entry.directory != ENTRIES[release].directory]
    other = next((r for r in others if list(ENTRIES).index(r) > list(ENTRIES).index(release)), others[-1])
    opened = tree.open_tree(_unpack(other, tmp_path))
    before = {p: opened.read(p) for p in ENTRIES[other].files}
    report = tree.examine(opened, ENTRIES, release)
    assert report.state is tree.State.WRONG_RELEASE
    with pytest.raises(UserError, match=f"is not SGLang {release}"):
        transaction.apply(opened, report)
    assert {p: opened.read(p) for p in ENTRIES[other].files} == before


# -- what the patched code does -----------------------------------------------------------------------------------------------


def _patched(release: str) -> tuple[Source, Source]:
    """A release as it is, and after its series."""
    stock = from_wheel(_wheel(release))
    entry = ENTRIES[release]
    before = {p: None if (text := stock.text(p)) is None else text.encode() for p in entry.files}
    after = {p: (content or b"").decode() for p, content in transaction.patch(entry, before).items()}
    return stock, stock.updated(after)


def _helper(source: Source) -> dict[str, Any]:
    space: dict[str, Any] = {}
    exec(source.text("sglang/srt/speculative/eagle3_config.py") or "", space)
    return space


def _captured(source: Source, path: str, name: str, ids: list[int] | None, helper: dict[str, Any]) -> list[int] | None:
    """Run a class's own setter on stand-in modules: the layers that it asks for, None where it only hands on to another model."""
    info = source.class_(path, name)
    assert info
    found = source.method(info, "set_eagle3_layers_to_capture")
    if found is None:
        return None
    space = {
        "Optional": Optional,
        "List": list,
        "OutputLayerIds": helper.get("OutputLayerIds"),
        "get_pp_group": lambda: SimpleNamespace(is_last_rank=True),
        "get_parallel": lambda: SimpleNamespace(pp_group=SimpleNamespace(is_last_rank=True)),
    }

    def method(node: ast.FunctionDef, file: str) -> Any:
        exec(textwrap.dedent(ast.unparse(node)), space)
        return space[node.name]

    layers = [SimpleNamespace() for _ in range(LAYERS)]
    model = SimpleNamespace(layers=layers, layers_to_capture=None)
    text = ast.unparse(found[1])
    if ".set_eagle3_layers_to_capture(layer_ids)" in text:
        return None
    if "self.model.set_eagle3_layers_to_capture" in text and "hasattr" not in text:
        inner = [
            (c, functions["set_eagle3_layers_to_capture"])
            for file in {path, path.replace("qwen3_moe", "qwen2_moe").replace("qwen3_5_text", "qwen3_5")}
            for c in (source.module(file) or ast.Module([], [])).body
            if isinstance(c, ast.ClassDef)
            and "set_eagle3_layers_to_capture" in (functions := {f.name: f for f in c.body if isinstance(f, ast.FunctionDef)})
            and ast.unparse(functions["set_eagle3_layers_to_capture"].args).startswith("self, layers_to_capture")
        ]
        if len(inner) != 1:
            return None
        marks = method(inner[0][1], path)
        model.set_eagle3_layers_to_capture = lambda layers: marks(model, layers)
    config = SimpleNamespace(num_hidden_layers=LAYERS, text_config=SimpleNamespace(num_hidden_layers=LAYERS))
    wrapper = SimpleNamespace(model=model, language_model=model, config=config, pp_group=SimpleNamespace(is_last_rank=True))
    method(found[1], path)(wrapper, ids)
    marked = [n for n, layer in enumerate(layers) if getattr(layer, "_is_layer_to_capture", False)]
    assert not marked or marked == [n for n in model.layers_to_capture if n < LAYERS], f"{name}: the marks are not the list"
    return model.layers_to_capture


@pytest.mark.parametrize("release", ENTRIES)
def test_an_explicit_convention_is_obeyed_by_every_setter_and_without_one_nothing_changes(release: str) -> None:
    stock, patched = _patched(release)
    helper = _helper(patched)

    def read(ids: list[int] | None, convention: str | None) -> list[int] | None:
        nested = {"eagle_aux_hidden_state_layer_ids": ids, "eagle_aux_hidden_state_layer_convention": convention}
        return helper["get_layer_ids"](SimpleNamespace(eagle_config={k: v for k, v in nested.items() if v is not None}))

    checked = 0
    for path in patched.models("def set_eagle3_layers_to_capture"):
        for node in (patched.module(path) or ast.Module([], [])).body:
            if not (isinstance(node, ast.ClassDef) and "layer_ids" in _parameters(node)):
                continue
            if _captured(patched, path, node.name, read([2, 30, 58], "output"), helper) is None:
                continue
            checked += 1
            assert _captured(patched, path, node.name, read([2, 30, 58], "output"), helper) == [3, 31, 59], node.name
            assert _captured(patched, path, node.name, read([1, 30, 60], "output"), helper) == [2, 31, 61], node.name
            assert _captured(patched, path, node.name, read([-1, 30, 60], "output"), helper) == [0, 31, 61], node.name
            assert _captured(patched, path, node.name, read([2, 30, 58], "boundary"), helper) == [2, 30, 58], node.name
            assert _captured(patched, path, node.name, read([0, 30, 61], "boundary"), helper) == [0, 30, 61], node.name
            assert _captured(patched, path, node.name, read([1, 30, 58], "boundary"), helper) == [1, 30, 58], node.name
            for ids in (None, [2, 30, 58], [1, 29, 57]):
                assert _captured(patched, path, node.name, read(ids, None), helper) == _captured(
                    stock, path, node.name, ids, helper
                ), f"{node.name}: ids {ids} without a convention"
    assert checked >= 8
    with pytest.raises(ValueError, match="output"):
        read([1], "index")


def _parameters(node: ast.ClassDef) -> list[str]:
    setters = [f for f in node.body if isinstance(f, ast.FunctionDef) and f.name == "set_eagle3_layers_to_capture"]
    return [a.arg for f in setters for a in f.args.args]


def test_the_helper_reads_both_places_nested_first() -> None:
    helper = _helper(_patched("0.5.23")[1])
    ids, uses, check = helper["get_layer_ids"], helper["uses_aux_hidden_state"], helper["check_algorithm"]
    name = "eagle_aux_hidden_state_layer_ids"
    assert ids(SimpleNamespace(**{name: [1, 2]})) == [1, 2]
    assert ids(SimpleNamespace(eagle_config={name: [3]}, **{name: [1, 2]})) == [3]
    assert ids(SimpleNamespace(eagle_config=SimpleNamespace(**{name: [3]}))) == [3]
    assert ids(SimpleNamespace(eagle_config=None)) is None
    assert ids(SimpleNamespace()) is None
    assert uses(SimpleNamespace()) is True
    assert uses(SimpleNamespace(eagle_config={"use_aux_hidden_state": False})) is False
    draft = SimpleNamespace(architectures=["LlamaForCausalLMEagle3"])
    with pytest.raises(ValueError, match="--speculative-algorithm EAGLE3"):
        check(draft, False)
    check(draft, True)
    check(SimpleNamespace(architectures=["LlamaForCausalLMEagle"]), False)
    check(SimpleNamespace(architectures=None), False)


@pytest.mark.parametrize("release", [r for r in ENTRIES if "graph-capture-wiring" in {p.stem[5:] for p in ENTRIES[r].patches()}])
def test_the_configured_layers_are_set_once_and_before_the_graphs(release: str) -> None:
    _, patched = _patched(release)
    runner = patched.text("sglang/srt/model_executor/model_runner.py") or ""
    assert "set_eagle3_layers_to_capture()" not in runner
    assert "set_eagle3_layers_to_capture" not in (patched.text("sglang/srt/model_executor/cuda_graph_runner.py") or "")
    initialize = runner[runner.index("    def initialize(") :]
    assert initialize.index("set_eagle3_layers_to_capture(") < initialize.index("self.init_attention_backend()")
    assert runner.count("set_eagle3_layers_to_capture(") == 1


@pytest.mark.parametrize("release", [r for r in ENTRIES if "dead-setters" in {p.stem[5:] for p in ENTRIES[r].patches()}])
def test_qwen3_5_marks_the_layers_that_its_inner_model_looks_at(release: str) -> None:
    _, patched = _patched(release)
    space: dict[str, Any] = {"Optional": Optional, "List": list}
    layers = [SimpleNamespace() for _ in range(LAYERS)]
    model = SimpleNamespace(layers=layers)
    inner = patched.class_("sglang/srt/models/qwen3_5.py", "Qwen3_5ForCausalLM")
    assert inner
    marks = patched.method(inner, "set_eagle3_layers_to_capture")
    assert marks
    exec(ast.unparse(marks[1]), space)
    marking = space["set_eagle3_layers_to_capture"]
    model.set_eagle3_layers_to_capture = lambda wanted: marking(model, wanted)
    wrapper = patched.class_("sglang/srt/models/qwen3_5.py", "Qwen3_5ForConditionalGeneration")
    assert wrapper
    setter = patched.method(wrapper, "set_eagle3_layers_to_capture")
    assert setter
    exec(ast.unparse(setter[1]), space)
    target = SimpleNamespace(
        model=model, config=SimpleNamespace(num_hidden_layers=LAYERS), pp_group=SimpleNamespace(is_last_rank=True)
    )
    for ids in ([2, 30, 58], [1, 5]):
        space["set_eagle3_layers_to_capture"](target, ids)
        assert [n for n, layer in enumerate(layers) if layer._is_layer_to_capture] == [i + 1 for i in ids]


def test_the_series_for_upstream_is_what_the_changes_and_its_tests_give() -> None:
    directory = catalog.root() / "upstream"
    series = export.build(from_wheel(_wheel("0.5.23")), export.upstream_tests(directory))
    assert {p.name: p.read_text() for p in directory.glob("*.patch")} == series.patches, (
        "patches export --upstream --release 0.5.23"
    )
    for name, text in series.patches.items():
        assert "+++ b/test/registered/unit/" in text, f"{name} has no test"
        assert (directory / name).with_suffix(".md").read_text().startswith("# [Spec] "), f"{name} has no description"
