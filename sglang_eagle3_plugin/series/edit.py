"""Structural edits of one source file that leave every untouched byte as it was: found by syntax tree, written by position."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator


class UnfitError(Exception):
    """The file has a shape that the change does not know; the message says what was looked for."""


class Editor:
    """Collects edits of one file against its original text; :meth:`result` carries them out.

    Raises:
        UnfitError: the text is not Python.
    """

    def __init__(self, path: str, text: str) -> None:
        self.path = path
        self.text = text
        try:
            self.tree = ast.parse(text)
        except SyntaxError as error:
            raise UnfitError(f"{path} does not parse: {error}") from error
        self._lines = [line.encode() for line in text.splitlines(keepends=True)]
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line))
        self._edits: list[tuple[int, int, str]] = []

    def class_(self, name: str) -> ast.ClassDef:
        """Find a top-level class."""
        for node in self.tree.body:
            if isinstance(node, ast.ClassDef) and node.name == name:
                return node
        raise UnfitError(f"{self.path} has no class {name}")

    def source(self, node: ast.AST) -> str:
        """The exact text of a node."""
        start, end = self._span(node)
        return self.text.encode()[start:end].decode()

    def line(self, number: int) -> str:
        """A line of the original, counted from 1, without its end."""
        return self._lines[number - 1].decode().rstrip("\n")

    def indent(self, node: ast.stmt) -> str:
        """The white space before a statement."""
        return " " * node.col_offset

    def replace(self, node: ast.AST, text: str) -> None:
        """Put ``text`` in place of an expression or statement. Its further lines carry their own indentation."""
        start, end = self._span(node)
        self._edits.append((start, end, text))

    def replace_lines(self, first: int, last: int, text: str) -> None:
        """Put ``text`` (whole lines, or nothing) in place of the lines first..last."""
        self._edits.append((self._starts[first - 1], self._starts[last], text))

    def insert_before(self, statement: ast.stmt, block: str) -> None:
        """Insert a block of lines before a statement (and its comments), at its indentation."""
        at = self._starts[self.first_line(statement) - 1]
        self._edits.append((at, at, textwrap.indent(block, self.indent(statement))))

    def insert_after(self, statement: ast.stmt, block: str) -> None:
        """Insert a block of lines after a statement, at its indentation."""
        at = self._starts[statement.end_lineno or statement.lineno]
        self._edits.append((at, at, textwrap.indent(block, self.indent(statement))))

    def append(self, block: str) -> None:
        """Append lines to the file."""
        end = self._starts[-1]
        self._edits.append((end, end, block))

    def first_line(self, statement: ast.stmt) -> int:
        """The line on which a statement begins, the comments directly above it at its indentation included."""
        first = min([statement.lineno, *(d.lineno for d in getattr(statement, "decorator_list", []))])
        while first > 1 and self.line(first - 1).startswith(self.indent(statement) + "#"):
            first -= 1
        return int(first)

    def lines_of(self, statement: ast.stmt) -> tuple[int, int]:
        """First and last line of a statement with the comments above it."""
        return self.first_line(statement), statement.end_lineno or statement.lineno

    def add_import(self, module: str, *names: str) -> None:
        """Add ``from module import names`` in alphabetical place among the file's top-level imports of sglang.

        Raises:
            UnfitError: no such import to stand beside.
        """
        beside = [
            node
            for node in self.tree.body
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sglang.") and not node.level
        ]
        if not beside:
            raise UnfitError(f"{self.path} imports nothing of sglang")
        listed = ", ".join(sorted(names))
        line = f"from {module} import {listed}\n"
        if len(line) > 89:  # black's 88, and the line's end
            line = f"from {module} import (\n" + "".join(f"    {name},\n" for name in sorted(names)) + ")\n"
        # The first run only: a file may have a second group of imports further down, behind a condition or a constant.
        before = [node for node in beside if (node.module or "") <= module]
        if before:
            self.insert_after(before[-1], line)
        else:
            self.insert_before(beside[0], line)

    @property
    def changed(self) -> bool:
        """Whether there is any edit."""
        return bool(self._edits)

    def result(self) -> str:
        """The edited text.

        Raises:
            UnfitError: two edits overlap, or the result is not Python.
        """
        text = self.text.encode()
        last = len(text) + 1
        # From the back, so that positions stay true; edits at one position keep the order in which they were asked for.
        for _, (start, end, new) in sorted(enumerate(self._edits), key=lambda e: (e[1][0], e[0]), reverse=True):
            if end > last:
                raise UnfitError(f"{self.path}: two edits overlap")
            text = text[:start] + new.encode() + text[end:]
            last = start
        try:
            ast.parse(text)
        except SyntaxError as error:
            raise UnfitError(f"{self.path} would not parse after the change: {error}") from error
        return text.decode()

    def _span(self, node: ast.AST) -> tuple[int, int]:
        where = node  # every statement and expression has a position
        start = self._starts[where.lineno - 1] + where.col_offset  # type: ignore[attr-defined]
        end = self._starts[where.end_lineno - 1] + where.end_col_offset  # type: ignore[attr-defined]
        return start, end


def walk(node: ast.AST) -> Iterator[ast.AST]:
    """Every node below, in source order."""
    for child in ast.iter_child_nodes(node):
        yield child
        yield from walk(child)


def functions(owner: ast.ClassDef | ast.Module) -> dict[str, ast.FunctionDef]:
    """The functions that a class or module defines itself."""
    return {node.name: node for node in owner.body if isinstance(node, ast.FunctionDef)}


def is_self(node: ast.AST, attribute: str) -> bool:
    """Whether a node is ``self.<attribute>``."""
    return (
        isinstance(node, ast.Attribute) and node.attr == attribute and isinstance(node.value, ast.Name) and node.value.id == "self"
    )


def calls(node: ast.AST, name: str) -> list[ast.Call]:
    """The calls of a function or method of that name below a node."""
    return [
        call
        for call in walk(node)
        if isinstance(call, ast.Call)
        and (
            (isinstance(call.func, ast.Attribute) and call.func.attr == name)
            or (isinstance(call.func, ast.Name) and call.func.id == name)
        )
    ]


def statements(body: list[ast.stmt]) -> Iterator[tuple[list[ast.stmt], ast.stmt]]:
    """Every statement of a block and of the blocks in it, each with the list in which it stands."""
    for statement in body:
        yield body, statement
        for name in ("body", "orelse", "finalbody"):
            yield from statements(getattr(statement, name, []))
        for handler in getattr(statement, "handlers", []):
            yield from statements(handler.body)
