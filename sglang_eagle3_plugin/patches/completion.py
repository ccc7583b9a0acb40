"""Completion: give the class of the target that was just loaded what EAGLE-3 calls on it and it lacks.

Unlike the other patches this one has no module to wait for: which of SGLang's some 300 classes is served is known when it has
been loaded, and no other is looked at. It decides by the structure of the loaded object:

- the setter: delegated to the inner model where that has one and the wrapper hands its whole forward on to it; else SGLang's own
  capture in the stack with our delivery; else the generic tap;
- ``get_embed_and_head``: delegated, else the weights found in the loaded model.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from sglang_eagle3_plugin.patches.delegation import delegate
from sglang_eagle3_plugin.patching import Change, Incompatible, Native, Outcome, Patch, Plan, is_ours
from sglang_eagle3_plugin.runtime.capture import CaptureError, LayerStack
from sglang_eagle3_plugin.runtime.layer_tap import LayerTap
from sglang_eagle3_plugin.runtime.sharing import make_accessor
from sglang_eagle3_plugin.runtime.stacks import DeliveredStack, keep, make_setter
from sglang_eagle3_plugin.runtime.target import ACCESSOR, SETTER, Decoder, StructureError, find_decoder, is_a, logits_processors
from sglang_eagle3_plugin.structure import source_of_forward


def complete(runner: Any, apply: Callable[[Patch, Any], Outcome | None]) -> None:
    """Complete the class of a runner's target, if EAGLE-3 is to serve it and it lacks something.

    Args:
        runner: SGLang's ``ModelRunner`` after ``load_model``.
        apply: applies a patch to a module, records and reports it (:func:`sglang_eagle3_plugin.activation.apply`).
    """
    model = runner.model
    cls = type(model)
    if all(hasattr(model, name) for name in (SETTER, ACCESSOR)) and _captures(model):
        return
    if is_ours(getattr(cls, SETTER, None)):  # a second object of a class that is complete needs its own stack
        _plan_setter(model, find_decoder(model, int(runner.model_config.num_hidden_layers)))
        return
    apply(
        Patch(
            id="completion",
            module=cls.__module__,
            target=cls.__name__,
            reason="the class lacks methods that EAGLE-3 calls on the target",
            probe=lambda module: plan(runner),
            upstream="none",
            exit_condition="SGLang wires every class, or captures without the class's help",
        ),
        sys.modules[cls.__module__],
    )


def plan(runner: Any) -> Plan:
    """Plan what the loaded target's class lacks. Leaves a tap or a delivery on the object, without any hook yet."""
    model, cls = runner.model, type(runner.model)
    remedy = f"EAGLE-3 cannot serve {cls.__name__} here; `sglang-eagle3 models` lists what can be served."
    if any(getattr(processor, "return_full_logits", False) for processor in logits_processors(model)):
        return Incompatible(
            f"{cls.__name__} is decoded by block diffusion, so there is no next token for a draft to propose", remedy
        )
    try:
        decoder = find_decoder(model, int(runner.model_config.num_hidden_layers))
        changes = _plan_setter(model, decoder)
        if not hasattr(model, ACCESSOR):
            changes.append(_plan_accessor(model, decoder, int(runner.model_config.hidden_size)))
    except (StructureError, CaptureError) as error:
        return Incompatible(str(error), remedy)
    return changes or Native("the class has the EAGLE-3 hooks")


def _captures(model: Any) -> bool:
    """Whether some module of the model has SGLang's own capture; a setter that some class inherits proves nothing."""
    return any(hasattr(module, "layers_to_capture") for module in model.modules())


def _plan_setter(model: Any, decoder: Decoder) -> list[Change]:
    cls = type(model)
    native = hasattr(decoder.stack, "layers_to_capture")
    if hasattr(model, SETTER) and native:
        return []
    if native:
        inner = _inner_with(decoder, SETTER)
        if inner and _hands_on(decoder, inner):
            return [Change(cls, SETTER, delegate(SETTER, inner), f"delegated to {inner}")]
        keep(model, DeliveredStack(model, LayerStack(decoder.stack, decoder.num_layers)))
        how = f"native capture of {type(decoder.stack).__name__}, delivered"
    else:
        keep(model, LayerTap(model, decoder))
        how = f"generic tap of {type(decoder.stack).__name__}"
    return [Change(cls, SETTER, make_setter(), how)]


def _plan_accessor(model: Any, decoder: Decoder, hidden_size: int) -> Change:
    inner = _inner_with(decoder, ACCESSOR)
    if inner:
        return Change(type(model), ACCESSOR, delegate(ACCESSOR, inner), f"delegated to {inner}")
    return Change(type(model), ACCESSOR, make_accessor(decoder, hidden_size), "weights found by structure")


def _inner_with(decoder: Decoder, method: str) -> str:
    """Path of the outermost inner model that has a method; empty where none has."""
    return next((decoder.path_to(link.module) for link in decoder.chain[1:] if hasattr(link.module, method)), "")


def _hands_on(decoder: Decoder, inner: str) -> bool:
    """Whether every model above the inner one hands its whole forward on, so that the pair is undone by the inner one alone.

    A model with a logits processor of its own, or that reaches past the inner model into its layers, doesn't.
    """
    for above, below in zip(decoder.chain, decoder.chain[1:], strict=False):
        if decoder.path_to(above.module) == inner:
            return True
        source = source_of_forward(type(above.module))
        past = any(f"self.{below.name}.{name}(" in source for name in ("model", "forward", "logits_processor"))
        own = any(is_a(child, "LogitsProcessor") for child in above.module.children()) and "logits_processor" in source
        if past or own or f"self.{below.name}" not in source:
            return False
    return False
