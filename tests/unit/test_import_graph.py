"""What a serving process imports through us: wrapt and the standard library, and nothing of the command line."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import sglang_eagle3_plugin

ROOT = Path(sglang_eagle3_plugin.__file__).parent
PACKAGE = "sglang_eagle3_plugin"
SERVING = ("plugin", "_bootstrap", "activation", "patching", "records", "settings", "boundaries")
FORBIDDEN_AT_START = {
    "click",
    "rich",
    "pydantic",
    "torch",
    "httpx",
    "platformdirs",
    "packaging",
    "safetensors",
    "numpy",
    "git",
    "libcst",
}
CLI_ONLY = {"cli", "rig", "server", "survey", "series", "bench"}
ANYWHERE_IN_SERVING = {"wrapt", "torch", "huggingface_hub", "sglang", "numpy"}


def imports(path: Path) -> set[str]:
    """Every module named by an import statement, in functions too."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def serving_files() -> list[Path]:
    """The files reachable from the entry points, patches and runtime included, deferred imports followed."""
    # What lies below runtime is imported by name too, where something is switched on.
    queue = (
        [ROOT / f"{name}.py" for name in SERVING] + list((ROOT / "patches").glob("*.py")) + list((ROOT / "runtime").rglob("*.py"))
    )
    seen: dict[Path, None] = {}
    while queue:
        path = queue.pop()
        if path in seen:
            continue
        seen[path] = None
        for name in imports(path):
            if name.split(".")[0] == PACKAGE:
                stem = ROOT.joinpath(*name.split(".")[1:])
                queue += [p for p in (stem.with_suffix(".py"), stem / "__init__.py") if p.exists()]
    return list(seen)


def test_activation_imports_no_cli_library_pydantic_or_torch():
    code = (
        "import sys, json; from sglang_eagle3_plugin.plugin import activate; activate();"
        "import sglang_eagle3_plugin.patches; print(json.dumps(sorted(sys.modules)))"
    )
    modules = json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    assert "wrapt" in modules
    assert not {name.split(".")[0] for name in modules} & FORBIDDEN_AT_START
    assert not [name for name in modules if name.startswith(PACKAGE) and name.split(".")[1:2] and name.split(".")[1] in CLI_ONLY]


def test_an_interpreter_that_never_imports_sglang_loads_two_small_modules():
    code = "import sys, json; print(json.dumps(sorted(sys.modules)))"
    modules = json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    assert [name for name in modules if name.startswith(PACKAGE)] == [PACKAGE, f"{PACKAGE}._bootstrap"]
    assert "wrapt" not in modules


def test_nothing_a_serving_process_can_reach_belongs_to_the_command_line():
    for path in serving_files():
        for name in imports(path):
            head, *rest = name.split(".")
            if head == PACKAGE:
                assert not rest or rest[0] not in CLI_ONLY, f"{path.name} imports {name}"
            else:
                assert head in sys.stdlib_module_names | ANYWHERE_IN_SERVING, f"{path.name} imports {name}"
