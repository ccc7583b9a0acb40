"""Delegation: a multimodal wrapper hands the EAGLE-3 hooks on to the language model that it wraps.

The hooks are those of the runtime patch (`patches.delegation`); the signatures are read from the inner model's own methods.
"""

from __future__ import annotations

import ast

from sglang_eagle3_plugin.patches.delegation import OPTIONAL, REQUIRED
from sglang_eagle3_plugin.series.change import Change
from sglang_eagle3_plugin.series.edit import Editor, UnfitError, functions, is_self, walk
from sglang_eagle3_plugin.series.source import ClassInfo, Source

KIMI_PATH, KIMI_CLASS = "sglang/srt/models/kimi_k25.py", "KimiK25ForConditionalGeneration"


def _kimi(source: Source) -> dict[str, str]:
    wrapper = source.class_(KIMI_PATH, KIMI_CLASS)
    if wrapper is None or not _missing(source, wrapper):
        return {}
    inner = _inner(source, wrapper)
    if inner is None:
        raise UnfitError(f"{KIMI_CLASS} of {source.release} keeps no inner model that has {', '.join(REQUIRED)}")
    return _delegate(source, [(wrapper, *inner)])


def _others(source: Source) -> dict[str, str]:
    """Every other entry class that lacks hooks, returns its inner model's result unchanged, and whose inner model has them."""
    found = []
    for path in source.models("EntryClass"):
        if path == KIMI_PATH or not _may_wrap(source.text(path) or ""):
            continue
        for name in _entry_classes(source, path):
            wrapper = source.class_(path, name)
            if wrapper is None or wrapper.path != path or not _missing(source, wrapper):
                continue
            inner = _inner(source, wrapper)
            if inner is not None:
                found.append((wrapper, *inner))
    return _delegate(source, found)


def _may_wrap(text: str) -> bool:
    # Parsing costs far more than this look: a wrapper calls the embedding routine, or its inner model by name.
    return "general_mm_embed_routine" in text or "self.language_model(" in text


def _entry_classes(source: Source, path: str) -> list[str]:
    module = source.module(path)
    names: list[str] = []
    for node in module.body if module else []:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "EntryClass" for t in node.targets):
            names += [n.id for n in walk(node) if isinstance(n, ast.Name) and n.id != "EntryClass"]
            names += [node.value.id] if isinstance(node.value, ast.Name) and node.value.id not in names else []
    return sorted(set(names))


def _missing(source: Source, wrapper: ClassInfo) -> list[str]:
    return [name for name in REQUIRED if source.method(wrapper, name) is None]


def _inner(source: Source, wrapper: ClassInfo) -> tuple[str, ClassInfo] | None:
    """The attribute that holds the inner language model, and its class; None where auxiliary states would not come through."""
    init, forward = source.method(wrapper, "__init__"), source.method(wrapper, "forward")
    if init is None or forward is None:
        return None
    found = []
    for node in walk(init[1]):
        if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Name)):
            continue
        for target in node.targets:
            if not (isinstance(target, ast.Attribute) and is_self(target, target.attr)):
                continue
            inner = source.class_(init[0].path, node.value.func.id)
            if inner and inner.node is not wrapper.node and all(source.method(inner, name) for name in REQUIRED):
                found.append((target.attr, inner))
    if len({inner.node for _, inner in found}) != 1 or len({attribute for attribute, _ in found}) != 1:
        return None
    return found[0] if _returns(forward[1], found[0][0]) else None


def _returns(forward: ast.FunctionDef, attribute: str) -> bool:
    """Whether what the inner model returns is what the wrapper returns, on every path."""
    through: set[str] = set()
    for node in walk(forward):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            (through.add if _calls_inner(node.value, attribute) else through.discard)(node.targets[0].id)
    returned = [node.value for node in walk(forward) if isinstance(node, ast.Return)]
    return bool(returned) and all(
        value is not None and (_calls_inner(value, attribute) or (isinstance(value, ast.Name) and value.id in through))
        for value in returned
    )


def _calls_inner(value: ast.AST, attribute: str) -> bool:
    if not isinstance(value, ast.Call):
        return False
    if isinstance(value.func, ast.Name) and value.func.id == "general_mm_embed_routine":
        return any(k.arg == "language_model" and is_self(k.value, attribute) for k in value.keywords)
    return is_self(value.func, attribute) or (
        isinstance(value.func, ast.Attribute) and value.func.attr == "forward" and is_self(value.func.value, attribute)
    )


def _delegate(source: Source, found: list[tuple[ClassInfo, str, ClassInfo]]) -> dict[str, str]:
    editors: dict[str, Editor] = {}
    for wrapper, attribute, inner in found:
        text = source.text(wrapper.path) or ""
        editor = editors.setdefault(wrapper.path, Editor(wrapper.path, text))
        node = editor.class_(wrapper.node.name)
        names = _missing(source, wrapper)
        names += [n for n in OPTIONAL if source.method(inner, n) and source.method(wrapper, n) is None]
        methods = [_method(source, inner, name, attribute, text) for name in names]
        editor.insert_after(_last_before_load(node), "".join("\n" + method for method in methods))
    return {path: editor.result() for path, editor in editors.items()}


def _last_before_load(node: ast.ClassDef) -> ast.stmt:
    """The statement after which new methods go: the forward method, else the last of the class."""
    # insert_after indents by the statement's own column, which is the class body's.
    return functions(node).get("forward") or node.body[-1]


def _method(source: Source, inner: ClassInfo, name: str, attribute: str, text: str) -> str:
    """The source of one delegating method, with the inner method's own parameters."""
    found = source.method(inner, name)
    if found is None:
        raise UnfitError(f"{inner.node.name} has no method {name}")
    arguments = found[1].args
    if arguments.posonlyargs or arguments.vararg or arguments.kwarg:
        raise UnfitError(f"{inner.node.name}.{name} takes arguments of a kind that a delegating method is not written for")
    parameters, passed = ["self"], []
    defaults: list[ast.expr | None] = [None] * (len(arguments.args) - len(arguments.defaults)) + list(arguments.defaults)
    for argument, default in list(zip(arguments.args, defaults, strict=True))[1:]:
        parameters.append(argument.arg + ("" if default is None else f"={ast.unparse(default)}"))
        passed.append(argument.arg)
    if arguments.kwonlyargs:
        parameters.append("*")
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
            parameters.append(argument.arg + ("" if default is None else f"={ast.unparse(default)}"))
            passed.append(f"{argument.arg}={argument.arg}")
    head, call = f"def {name}({', '.join(parameters)}):", f"return self.{attribute}.{name}({', '.join(passed)})"
    if len(call) > 80:
        call = f"return self.{attribute}.{name}(\n        {', '.join(passed)}\n    )"
    return f"{head}\n    {call}\n"


KIMI_K25 = Change(
    id="delegation-kimi-k25",
    subject="[Spec] Kimi-K2.5: delegate the EAGLE-3 hooks to the language model",
    why="""KimiK25ForConditionalGeneration wraps a DeepseekV3ForCausalLM and lacks the hooks that EAGLE-3 calls on the target, so
the server dies after the weights are loaded: 'KimiK25ForConditionalGeneration' object has no attribute
'set_eagle3_layers_to_capture', and get_embed_and_head is the next. The inner model has them all; delegate to it.""",
    tested="""read by syntax tree, compiled. A tiny Kimi-K2.5 with an EAGLE-3 draft on the engine of 0.5.9, without a GPU: with
this series it answers with acceptance length 4.00 of 4; without it the scheduler dies.""",
    upstream="https://github.com/sgl-project/sglang/pull/19689 (in 0.5.10)",
    drop_when="the base is 0.5.10 or newer.",
    transform=_kimi,
)

OTHER_WRAPPERS = Change(
    id="delegation-wrappers",
    subject="[Spec] Multimodal wrappers: delegate the EAGLE-3 hooks to the language model",
    why="""These entry classes wrap a language model that has the EAGLE-3 hooks and return its result unchanged, but lack the
hooks themselves, so EAGLE-3 can't be started on them although nothing else is missing. Delegate to the inner model.""",
    tested="""read by syntax tree: the inner class has the hooks, and forward returns what the inner model returns. Compiled. Not
run on an engine: no draft is published for most of them.""",
    upstream="none for these classes; the same as https://github.com/sgl-project/sglang/pull/19689 for Kimi-K2.5",
    drop_when="the classes have the hooks.",
    transform=_others,
)
