"""One release's source, read lazily, and the classes in it with what they inherit."""

from __future__ import annotations

import ast
import re
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sglang_eagle3_plugin.errors import UserError
from sglang_eagle3_plugin.series.edit import functions

Reader = Callable[[str], str | None]
"""Path inside the package (``sglang/srt/...``) -> text, or None where there is no such file."""


@dataclass(frozen=True)
class ClassInfo:
    """A class, and the file in which it is defined."""

    path: str
    node: ast.ClassDef


class Source:
    """The files of one release as a change sees them: paths ``sglang/srt/...``, texts with LF line ends.

    Args:
        release: the release's number.
        paths: every Python file below ``sglang/srt``.
        read: reads one of them.
    """

    def __init__(self, release: str, paths: list[str], read: Reader) -> None:
        self.release = release
        self.paths = sorted(paths)
        self._read = read
        self._texts: dict[str, str | None] = {}
        self._modules: dict[str, ast.Module | None] = {}

    def text(self, path: str) -> str | None:
        """A file's text, or None where the release has no such file."""
        if path not in self._texts:
            self._texts[path] = self._read(path)
        return self._texts[path]

    def models(self, word: str) -> list[str]:
        """The model files in whose text a word stands.

        Without those that the release has with CRLF line ends (`apertus.py` up to 0.5.13): `git am` strips the CR from a patch, so
        a patch of such a file applies to nothing.
        """
        found = [p for p in self.paths if p.startswith("sglang/srt/models/") and word in (self.text(p) or "")]
        return [p for p in found if "\r\n" not in (self.text(p) or "")]

    def updated(self, changed: dict[str, str]) -> Source:
        """The same source with some files changed or added."""
        after = Source(self.release, sorted({*self.paths, *changed}), self._read)
        after._texts = {**self._texts, **changed}
        after._modules = {path: module for path, module in self._modules.items() if path not in changed}
        return after

    def module(self, path: str) -> ast.Module | None:
        """A file's syntax tree."""
        if path not in self._modules:
            text = self.text(path)
            self._modules[path] = None if text is None else ast.parse(text)
        return self._modules[path]

    def class_(self, path: str, name: str) -> ClassInfo | None:
        """Find a class by the name it has in a file, through imports."""
        seen = set()
        while (path, name) not in seen:
            seen.add((path, name))
            module = self.module(path)
            if module is None:
                return None
            for node in module.body:
                if isinstance(node, ast.ClassDef) and node.name == name:
                    return ClassInfo(path, node)
            for node in module.body:
                if not (isinstance(node, ast.ImportFrom) and node.module and not node.level):
                    continue
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        path, name = node.module.replace(".", "/") + ".py", alias.name
        return None

    def method(self, info: ClassInfo, name: str) -> tuple[ClassInfo, ast.FunctionDef] | None:
        """Find a method in a class or, depth first, in its bases."""
        own = functions(info.node).get(name)
        if own is not None:
            return info, own
        for base in info.node.bases:
            if isinstance(base, ast.Name) and (parent := self.class_(info.path, base.id)) and parent.node is not info.node:
                found = self.method(parent, name)
                if found:
                    return found
        return None


def from_wheel(wheel: Path) -> Source:
    """The source of a release's wheel.

    Raises:
        UserError: the file is no wheel of SGLang, or is damaged.
    """
    match = re.match(r"sglang-([^-]+)-", wheel.name)
    if match is None:
        raise UserError(f"{wheel} is not named like a wheel of SGLang (sglang-<release>-...whl); name one")
    try:
        archive = zipfile.ZipFile(wheel)
    except (OSError, zipfile.BadZipFile) as error:
        raise UserError(f"the wheel {wheel} cannot be read ({error}); download it again") from error
    names = {name for name in archive.namelist() if name.startswith("sglang/srt/") and name.endswith(".py")}
    return Source(match[1], list(names), lambda path: archive.read(path).decode() if path in names else None)


def from_directory(package: Path, release: str) -> Source:
    """The source below an unpacked package directory (the one named ``sglang``)."""

    def read(path: str) -> str | None:
        file = package.parent / path
        return file.read_bytes().decode().replace("\r\n", "\n") if file.is_file() else None

    return Source(release, [p.relative_to(package.parent).as_posix() for p in (package / "srt").rglob("*.py")], read)
