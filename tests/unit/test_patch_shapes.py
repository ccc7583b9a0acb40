"""Every patch on a module of a shape that nobody has seen, and beside another copy of this plugin: left alone, with a sentence."""

from __future__ import annotations

from types import ModuleType

import pytest

from sglang_eagle3_plugin.patches import REGISTRY, delegation
from sglang_eagle3_plugin.patching import Ledger, Patch, State
from sglang_eagle3_plugin.settings import Settings


def module(**classes: type) -> ModuleType:
    made = ModuleType("as_a_fork_has_it")
    vars(made).update(classes)
    return made


class Model:
    def set_eagle3_layers_to_capture(self, layer_ids=None): ...
    def get_embed_and_head(self): ...
    def set_embed_and_head(self, embed, head): ...


class KimiK25ForConditionalGeneration:
    def __init__(self):
        self.language_model = Model()

    def forward(self):
        return self.language_model


class ModelRunner:
    def __init__(self): ...
    def forward(self, forward_batch): ...
    def load_model(self): ...


class Scheduler:
    def process_batch_result(self, batch, result): ...


class ServerArgs:
    def __post_init__(self): ...


class GraphRunner:
    def replay(self, forward_batch): ...


KNOWN = {
    "delegation-kimi-k25": (KimiK25ForConditionalGeneration, Model),
    "boundary-wiring": (ModelRunner,),
    "forward-tap": (ModelRunner,),
    "dump-requests": (Scheduler,),
    "startup-check": (ServerArgs,),
    "draft-decode-tap": (GraphRunner,),
    "draft-extend-tap": (GraphRunner,),
}


def copies(patch: Patch) -> ModuleType:
    """A module of the shape that a patch knows, of classes of its own."""
    classes = {kind.__name__: type(kind.__name__, (kind,), dict(vars(kind))) for kind in KNOWN[patch.id]}
    return module(**{patch.target if name == "GraphRunner" else name: kind for name, kind in classes.items()})


@pytest.mark.parametrize("patch", REGISTRY, ids=lambda patch: patch.id)
@pytest.mark.parametrize("shape", ["empty", "no class"])
def test_an_unknown_shape_is_left_alone_with_a_reason_and_a_remedy(patch, shape):
    made = module() if shape == "empty" else module(**{patch.target: object()})
    before = dict(vars(made))
    outcome = Ledger(Settings()).apply(patch, made)
    assert outcome.state is State.INCOMPATIBLE
    assert outcome.reason
    assert outcome.remedy.endswith(".")
    assert vars(made) == before


@pytest.mark.parametrize("patch", REGISTRY, ids=lambda patch: patch.id)
def test_another_copy_of_this_plugin_is_not_wrapped_again(patch):
    made = copies(patch)
    assert Ledger(Settings()).apply(patch, made).state is State.APPLIED
    put = {name: dict(vars(kind)) for name, kind in vars(made).items() if isinstance(kind, type)}
    outcome = Ledger(Settings()).apply(patch, made)
    assert outcome.state is State.NATIVE
    assert "another copy" in outcome.reason
    assert {name: dict(vars(kind)) for name, kind in vars(made).items() if isinstance(kind, type)} == put


def test_a_wrapper_without_source_is_left_alone():
    made = module(Model=Model)
    exec("class KimiK25ForConditionalGeneration:\n    def __init__(self): ...\n    def forward(self): ...", vars(made))
    outcome = Ledger(Settings()).apply(delegation.PATCHES[0], made)
    assert outcome.state is State.INCOMPATIBLE
    assert "source of KimiK25ForConditionalGeneration cannot be read" in outcome.reason


def test_a_check_at_start_that_fails_lets_the_launch_go_on(monkeypatch, caplog):
    from sglang_eagle3_plugin.runtime import startup

    patch = next(patch for patch in REGISTRY if patch.id == "startup-check")
    made = copies(patch)
    Ledger(Settings()).apply(patch, made)
    monkeypatch.setattr(startup, "check", lambda arguments, settings: 1 / 0)
    made.ServerArgs().__post_init__()
    assert "the check at start failed; the launch goes on" in caplog.text


def test_a_wiring_that_fails_lets_the_target_load(monkeypatch, caplog):
    from sglang_eagle3_plugin.runtime import target

    patch = next(patch for patch in REGISTRY if patch.id == "boundary-wiring")
    made = copies(patch)
    made.ModelRunner.load_model = lambda self: "loaded"
    Ledger(Settings()).apply(patch, made)
    monkeypatch.setattr(target, "serves_eagle3", lambda runner: 1 / 0, raising=False)
    assert made.ModelRunner().load_model() == "loaded"
    assert "layer ids stay as SGLang reads them" in caplog.text
