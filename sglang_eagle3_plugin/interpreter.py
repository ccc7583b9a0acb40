"""What a Python command line runs, read as the interpreter reads it (``python --help``)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Program:
    """A module (``-m NAME``) or a script, and the words that it is given.

    Attributes:
        module: its dotted name; empty for a script.
        script: its path; empty for a module.
        words: what follows.
    """

    module: str
    script: str
    words: list[str]

    @property
    def server_flags(self) -> list[str] | None:
        """The flags of ``sglang.launch_server`` or ``sglang serve`` (sglang/cli/serve.py), if that is what runs; else None."""
        if self.module == "sglang.launch_server" or self.script.endswith("sglang/launch_server.py"):
            return self.words
        command = Path(self.script).name == "sglang" or self.module in ("sglang.cli", "sglang.cli.main")
        if not command or self.words[:1] != ["serve"]:
            return None
        model = ["--model-path"] if len(self.words) > 1 and not self.words[1].startswith("-") else []
        return [*model, *self.words[1:]]


def launch_flags(words: Sequence[str]) -> list[str] | None:
    """The flags of the server that a command line launches; None for another program."""
    run = program(words)
    return run.server_flags if run else None


def program(words: Sequence[str]) -> Program | None:
    """Read a command line, the interpreter first; None for ``-c``, standard input, and an interactive one.

    A program that merely names another among its own words, as a supervisor does, is the program.
    """
    rest = list(words[1:])
    while rest:
        word = rest.pop(0)
        if word.startswith("--"):
            rest = rest[1:] if word == "--check-hash-based-pycs" else rest
            continue
        if not word.startswith("-") or word == "-":
            return None if word == "-" else Program("", word, rest)
        # Single letters may stand together, and the first that takes a value ends them: -m, -c, -W, -X.
        found = re.search(r"[mcWX]", word)
        if found is None:
            continue
        value = word[found.end() :] or (rest.pop(0) if rest else "")
        if found.group() in "mc":
            return Program(value, "", rest) if found.group() == "m" else None
    return None
