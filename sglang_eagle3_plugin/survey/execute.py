"""Run a release's own ``set_eagle3_layers_to_capture`` on stand-ins, and see what it makes the layer stack capture.

Neither SGLang nor torch is imported. The setter's source is compiled alone, with a handful of harmless builtins; every other name
in it is a stand-in that answers anything. The objects it works on have the classes that the release's own ``__init__`` makes.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sglang_eagle3_plugin.runtime.capture import MARK
from sglang_eagle3_plugin.runtime.target import SETTER
from sglang_eagle3_plugin.survey.classes import INNER, Class, Classes
from sglang_eagle3_plugin.survey.modules import LIST

_HARMLESS = (
    "AttributeError", "IndexError", "NotImplementedError", "TypeError", "ValueError", "False", "None", "True", "abs", "bool",
    "enumerate", "getattr", "hasattr", "int", "isinstance", "len", "list", "max", "min", "range", "reversed", "set", "setattr",
    "sorted", "str", "sum", "tuple", "zip",
)  # fmt: skip
_BUILTINS = {name: getattr(builtins, name) for name in _HARMLESS}


@dataclass(frozen=True)
class Outcome:
    """What a setter did.

    Attributes:
        listed: what it assigned to ``layers_to_capture``, ascending; None where it assigned nothing.
        marked: indices of the layers that carry a mark afterwards.
        error: type and text of what it raised; empty where it returned.
        stack: the class of the object it assigned to; None where that class is not known.
    """

    listed: tuple[int, ...] | None
    marked: tuple[int, ...]
    error: str
    stack: Class | None


class _Anything:
    """A stand-in for a name of the module: true, callable, and everything on it is another."""

    def __getattr__(self, name: str) -> _Anything:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> _Anything:
        return self


class _Layer:
    pass


class _Config:
    """A config that says the same at every level of nesting."""

    def __init__(self, num_layers: int) -> None:
        self.num_hidden_layers = num_layers
        self.n_layer = num_layers
        self.num_layers = num_layers

    def __getattr__(self, name: str) -> _Config:
        if name.startswith("__") or not name.endswith("config"):
            raise AttributeError(name)
        return self

    def get_text_config(self) -> _Config:
        return self


class _Model:
    """A stand-in for an instance of one class: the attributes that matter, the setters of its class, nothing else."""

    def __init__(self, classes: Classes, cls: Class | None, num_layers: int, depth: int = 4) -> None:
        self.config = _Config(num_layers)
        self.pp_group = _Anything()
        self._classes, self._class, self._depth = classes, cls, depth
        self._children: dict[str, _Model] = {}
        if cls is None:
            self.layers = [_Layer() for _ in range(num_layers)]
            return
        inner = [(a, classes.made(cls, a)) for a in INNER]
        for attribute, made in inner:
            owned = any(attribute in c.summary.attributes for c in classes.lineage(cls))
            if owned and depth:
                child = _Model(classes, made[0] if made else None, num_layers, depth - 1)
                self._children[attribute] = child
                setattr(self, attribute, child)
        if not self._children:
            self.layers = [_Layer() for _ in range(num_layers)]

    def __getattr__(self, name: str) -> Any:
        if name == "layers" and "model" in self.__dict__:  # a property that reaches into the stack
            return self.__dict__["model"].layers
        cls = self.__dict__.get("_class")
        source = self._classes.setter_of(cls, name) if cls is not None else None
        if source is None:
            raise AttributeError(f"{cls.name if cls else 'the inner model'!s} has no attribute {name!r}")
        return _compile(source[1]).__get__(self)

    def walk(self) -> list[_Model]:
        return [self, *(m for child in self._children.values() for m in child.walk())]


def run_setter(classes: Classes, cls: Class, calls: Sequence[Sequence[int] | None], num_layers: int) -> Outcome:
    """Call a class's setter once for each list of ids, in order, on one stand-in; ``None`` calls it without ids."""
    model = _Model(classes, cls, num_layers)
    error = ""
    for ids in calls:
        try:
            setter = getattr(model, SETTER)
            setter() if ids is None else setter(list(ids))
        except Exception as raised:
            error = f"{type(raised).__name__}: {' '.join(str(raised).split())[:120]}"
    touched = [m for m in model.walk() if LIST in m.__dict__]
    stack = touched[-1] if touched else None
    marked: list[int] = []
    for one in model.walk():
        layers = one.__dict__.get("layers", [])
        marked = [i for i, layer in enumerate(layers) if getattr(layer, MARK, False)] or marked
    listed = None if stack is None else tuple(sorted(stack.__dict__[LIST]))
    return Outcome(listed, tuple(marked), error, stack.__dict__["_class"] if stack else None)


def _compile(source: str) -> Any:
    tree = ast.parse(source)
    function = tree.body[0]
    assert isinstance(function, ast.FunctionDef)
    names = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)} - set(_BUILTINS)
    space: dict[str, Any] = {name: _Anything() for name in names}
    space["__builtins__"] = dict(_BUILTINS)
    exec(compile(tree, f"<{function.name}>", "exec"), space)  # noqa: S102  the release's own function, see the module
    return space[function.name]
