"""Delegation: a multimodal wrapper hands the EAGLE-3 hooks on to the language model that it wraps.

SGLang calls the hooks on the target class it loaded. A wrapper class without them dies after the weights are read:
``'KimiK25ForConditionalGeneration' object has no attribute 'set_eagle3_layers_to_capture'``. The inner model has them all.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable
from types import ModuleType
from typing import Any

from sglang_eagle3_plugin.patching import Change, Incompatible, Native, Patch, Plan, is_ours

REQUIRED = ("set_eagle3_layers_to_capture", "get_embed_and_head", "set_embed_and_head")
"""Hooks without which EAGLE-3 does not start (ModelRunner, EAGLEWorker)."""
OPTIONAL = ("get_embed", "set_embed")
"""Hooks that some inner models have."""


def delegate(name: str, inner: str) -> Callable[..., Any]:
    """Make the method ``name`` that calls the same method of ``self.<inner>``, an attribute or a dotted path of them."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(functools.reduce(getattr, inner.split("."), self), name)(*args, **kwargs)

    method.__name__ = name
    method.__doc__ = f"Delegates to ``self.{inner}.{name}`` (sglang-eagle3-plugin)."
    return method


def plan_delegation(module: ModuleType, class_name: str) -> Plan:
    """Plan the missing hooks of one wrapper class, found by structure: where it keeps its inner model, and what that can do."""
    remedy = f"EAGLE-3 cannot serve {class_name} here; use a release that `sglang-eagle3 compat` calls native or plugin for it."
    wrapper = vars(module).get(class_name)
    if not isinstance(wrapper, type):
        return Incompatible(f"{module.__name__} has no class {class_name}", remedy)
    missing = [name for name in REQUIRED if not hasattr(wrapper, name)]
    if not missing:
        ours = any(is_ours(getattr(wrapper, name)) for name in REQUIRED)
        return Native("another copy of this plugin delegates already" if ours else "the class has the EAGLE-3 hooks")
    inner = find_inner(module, wrapper, missing)
    if isinstance(inner, str):
        return Incompatible(inner, remedy)
    attribute, inner_class = inner
    wanted = missing + [name for name in OPTIONAL if hasattr(inner_class, name) and not hasattr(wrapper, name)]
    return [Change(wrapper, name, delegate(name, attribute)) for name in wanted]


def find_inner(module: ModuleType, wrapper: type, methods: list[str]) -> tuple[str, type] | str:
    """Find the attribute in which a wrapper keeps its inner language model, and that model's class.

    Reads the wrapper's ``__init__`` for ``self.attribute = SomeClass(...)`` where the class has all of ``methods``, and asks that
    its ``forward`` uses the attribute, since that is the way the auxiliary states take.

    Returns:
        The pair, or a sentence that says what was found instead.
    """
    try:
        assigned = _constructed_attributes(wrapper.__init__)  # type: ignore[misc]
        used = _attributes_of_self(wrapper.forward)  # type: ignore[attr-defined]
    except (OSError, TypeError, SyntaxError, AttributeError) as error:
        return f"the source of {wrapper.__name__} cannot be read ({error})"
    found = []
    for attribute, class_name in assigned:
        candidate = vars(module).get(class_name)
        if isinstance(candidate, type) and all(hasattr(candidate, name) for name in methods):
            found.append((attribute, candidate))
    if len(found) != 1:
        what = ", ".join(f"self.{attribute} ({candidate.__name__})" for attribute, candidate in found) or "none"
        return f"it should keep one inner model that has {', '.join(methods)}, and there is {what}"
    if found[0][0] not in used:
        return f"its forward does not use self.{found[0][0]}, so auxiliary states would be lost"
    return found[0]


def _parse(function: Callable[..., Any]) -> ast.AST:
    return ast.parse(textwrap.dedent(inspect.getsource(function)))


def _constructed_attributes(init: Callable[..., Any]) -> list[tuple[str, str]]:
    """``self.attribute = Name(...)`` in a method, as pairs (attribute, Name)."""
    pairs = []
    for node in ast.walk(_parse(init)):
        if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Name)):
            continue
        for target in node.targets:
            if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self":
                pairs.append((target.attr, node.value.func.id))
    return pairs


def _attributes_of_self(method: Callable[..., Any]) -> set[str]:
    return {
        node.attr
        for node in ast.walk(_parse(method))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    }


PATCHES = (
    Patch(
        id="delegation-kimi-k25",
        module="sglang.srt.models.kimi_k25",
        target="KimiK25ForConditionalGeneration",
        reason="the wrapper lacks the hooks that EAGLE-3 calls on the target, and the server dies after loading the weights",
        probe=functools.partial(plan_delegation, class_name="KimiK25ForConditionalGeneration"),
        upstream="https://github.com/sgl-project/sglang/pull/19689",
        exit_condition="no supported release before 0.5.10 is left",
    ),
)
