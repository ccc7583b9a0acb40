"""Changing a module right after it is imported, and standing in for packages that cannot be imported here."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any


class Finder(importlib.abc.MetaPathFinder):
    """A meta path finder for a few names; every other import passes through untouched.

    Args:
        after: module name -> what to do with the module once it has been executed.
        stubs: modules to stand in for; ``name.*`` is every submodule of ``name``.
        lenders: stub -> module whose own names it lends back, also while that module is being executed.
    """

    def __init__(
        self, after: Mapping[str, Callable[[ModuleType], None]], stubs: Sequence[str], lenders: Mapping[str, str] | None = None
    ) -> None:
        self.after = after
        self.stubs = stubs
        self.lenders = lenders or {}
        self._asking: set[str] = set()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """See :class:`importlib.abc.MetaPathFinder`."""
        if name in self.stubs or f"{name.partition('.')[0]}.*" in self.stubs:
            return importlib.machinery.ModuleSpec(name, _StubLoader(self.lenders.get(name)), is_package=True)
        if name not in self.after or name in self._asking:
            return None
        self._asking.add(name)  # the real finders are asked through the same list that this one is in
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._asking.discard(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _ThenLoader(spec.loader, self.after[name])
        return spec


def both(first: Callable[[ModuleType], None] | None, second: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
    """Do one thing and then another with a module."""

    def then(module: ModuleType) -> None:
        if first is not None:
            first(module)
        second(module)

    return then


class _ThenLoader(importlib.abc.Loader):
    def __init__(self, loader: Any, then: Callable[[ModuleType], None]) -> None:
        self.loader = loader
        self.then = then

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self.loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        self.then(module)


class _StubLoader(importlib.abc.Loader):
    def __init__(self, lender: str | None) -> None:
        self.lender = lender

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return Stub(spec.name, self.lender)

    def exec_module(self, module: ModuleType) -> None:
        pass


class Stub(ModuleType):
    """A module any of whose names can be imported and none called, but for those that its lender has."""

    def __init__(self, name: str, lender: str | None = None) -> None:
        super().__init__(name)
        self._lender = lender

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if self._lender is not None and name in vars(sys.modules[self._lender]):
            return vars(sys.modules[self._lender])[name]
        return Absent(f"{self.__name__}.{name}")


class Absent:
    """A kernel that is not there. Calling it says which one and ends the run, so a wrong result can't come of it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self._name}.{name}")

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Raise NotImplementedError, always."""
        raise NotImplementedError(f"the rig has no stand-in for {self._name}, and this run called it")
