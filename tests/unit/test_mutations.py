"""The ten lines that `make mutations` breaks are still there, each once, and so are the tests that must notice."""

from __future__ import annotations

import ast
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MUTATIONS = runpy.run_path(str(ROOT / "tests/mutations.py"))["MUTATIONS"]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.title)
def test_a_mutation_still_fits(mutation):
    text = (ROOT / "sglang_eagle3_plugin" / mutation.file).read_text()
    assert text.count(mutation.line) == 1
    ast.parse(text.replace(mutation.line, mutation.mutant))
    path, _, name = mutation.test.partition("::")
    assert f"def {name}(" in (ROOT / path).read_text()


def test_ten_behaviours_are_broken():
    assert len({mutation.title for mutation in MUTATIONS}) == 10
