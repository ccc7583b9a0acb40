"""Which EAGLE-3 hooks a target class has, by the syntax tree of SGLang's source: a fork, or an installed copy. Nothing is run."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from sglang_eagle3_plugin.doctor.facts import Hooks
from sglang_eagle3_plugin.runtime.target import ACCESSOR, SETTER

_LARGEST = 4 * 1024 * 1024
_MOST_BASES = 12


def hooks(package: Path, architecture: str) -> Hooks | None:
    """Read the hooks of a class and of the language models that its module builds.

    Args:
        package: the ``sglang`` package directory.
        architecture: the target's class name.

    Returns:
        None where no module of ``srt/models`` defines the class, or it cannot be parsed.
    """
    found = _methods(package, architecture, set())
    if found is None:
        return None
    own, module = found
    setter, accessor = SETTER in own, ACCESSOR in own
    inner = (setter and accessor) or any(
        {SETTER, ACCESSOR} <= methods[0]
        for name in _called(module)
        if name != architecture and (methods := _methods(package, name, set())) is not None
    )
    return Hooks(setter, accessor, False, inner)


def _methods(package: Path, name: str, seen: set[str]) -> tuple[set[str], ast.Module] | None:
    """Return the methods of a class, inherited ones included, and the module that defines it."""
    if name in seen or len(seen) > _MOST_BASES:
        return None
    seen.add(name)
    module = _module(package, name)
    node = next((n for n in module.body if isinstance(n, ast.ClassDef) and n.name == name), None) if module else None
    if module is None or node is None:
        return None
    methods = {n.name for n in node.body if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))}
    methods |= {t.id for n in node.body if isinstance(n, ast.Assign) for t in n.targets if isinstance(t, ast.Name)}
    for base in node.bases:
        if isinstance(base, ast.Name) and (inherited := _methods(package, base.id, seen)):
            methods |= inherited[0]
    return methods, module


def _module(package: Path, name: str) -> ast.Module | None:
    wanted = re.compile(rf"^class {re.escape(name)}\b".encode(), re.MULTILINE)
    for file in sorted((package / "srt" / "models").glob("*.py")):
        try:
            if file.stat().st_size > _LARGEST:
                continue
            text = file.read_bytes()
            if wanted.search(text):
                return ast.parse(text)
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
            continue
    return None


def _called(module: ast.Module) -> set[str]:
    """Names that a module calls and that look like language models."""
    return {
        n.func.id
        for n in ast.walk(module)
        if isinstance(n, ast.Call)
        and isinstance(n.func, ast.Name)
        and n.func.id.endswith(("ForCausalLM", "ForConditionalGeneration"))
    }
