"""Coverage of the lines that a serving process runs, by the unit tests and by real engines: ``make coverage``.

usage: python tests/coverage/measure.py [--report] [PYTEST ARGUMENT...]

Which modules count: all that the entry points can reach (`serving_files` in tests/unit/test_import_graph.py). What the engines' own
processes had imported must be among them, or this fails; and it says what they never imported. ``--report`` only reports what was
measured last. Other arguments take the place of the tests named here, and add to what was measured.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import coverage

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests/unit"))

from test_import_graph import PACKAGE, serving_files  # noqa: E402

from sglang_eagle3_plugin.rig import environments  # noqa: E402

HERE = Path(__file__).parent
BUILD = ROOT / "build/coverage"
DATA = BUILD / "data"
RELEASES = os.environ.get("SGLANG_EAGLE3_TEST_RELEASES", "0.5.9,0.5.23").split(",")
TESTS = (
    "tests/unit",
    "tests/engine/test_orders.py",
    "tests/engine/test_wiring.py",
    "tests/engine/test_startup.py",
    "tests/engine/test_debug.py",
    "tests/engine/test_debug_step.py",
    "tests/engine/test_debug_ranks.py",
    "tests/engine/dumps/test_dump.py::test_with_a_draft_the_dump_holds_what_the_draft_is_fed",
    "tests/engine/dumps/test_dump.py::test_generated_tokens_fp8_and_an_aborted_request",
    "tests/engine/dumps/test_switch.py",
    "tests/engine/dumps/test_families.py",
    "tests/engine/test_families.py",
)
"""Those of a default run and of `-m slow` that run what serves; an engine run takes most of a minute."""

TOO_SLOW_WHEN_TRACED = "tests/engine/test_debug.py::test_numbers_are_those_of_an_independent_model"
"""A pass of eight requests in Triton's interpreter then takes longer than the time after which debug sends a step unfinished."""

LAUNCHERS = ("sglang.launch_server", "/rig/worker.py")
DEBUG_CHILD = f"{PACKAGE}.runtime.debug.writer"


def install() -> None:
    """Coverage for the environments' own Python, beside them: they hold nothing but what a user installs."""
    for release in RELEASES:
        python = environments.ensure(release, print).python
        version = subprocess.run(
            [python, "-c", "import sys; print('python%d.%d' % sys.version_info[:2])"], capture_output=True, text=True, check=True
        )
        place = BUILD / version.stdout.strip()
        if not (place / "coverage").is_dir():
            environments.uv(
                *("pip", "install", "--python", str(python), "--target", str(place)), f"coverage=={coverage.__version__}"
            )


def run(arguments: list[str]) -> int:
    """Run pytest, measured; its exit status."""
    DATA.mkdir(parents=True, exist_ok=True)
    if not arguments:
        for path in DATA.iterdir():
            path.unlink()
    variables = os.environ | {"SERVING_COVERAGE": str(DATA), "PYTHONPATH": str(HERE / "site")}
    argv = [sys.executable, "-m", "pytest", "-m", "not gpu", "--deselect", TOO_SLOW_WHEN_TRACED, *(arguments or TESTS)]
    return subprocess.run(argv, cwd=ROOT, env=variables, check=False).returncode


def imported() -> dict[str, set[str]]:
    """What each kind of process of the engines had imported: the package's modules."""
    found: dict[str, set[str]] = {}
    for path in DATA.glob("modules.*.json"):
        seen = json.loads(path.read_text())
        words = " ".join(seen["argv"])
        if DEBUG_CHILD in words:
            kind = "debug child"
        elif any(name in words for name in LAUNCHERS) and str(environments.cache.directory("envs")) in seen["prefix"]:
            kind = "launcher"
        elif seen["title"].startswith("sglang::"):
            kind = seen["title"].split()[0].rstrip("0123456789_").split("_")[0]
        else:
            continue
        found.setdefault(kind, set()).update(seen["modules"])
    return found


def name_of(path: Path) -> str:
    """``sglang_eagle3_plugin.runtime.tap`` for its file."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def has_code(name: str) -> bool:
    """Whether a module holds more than a docstring, as a package's may."""
    place = ROOT.joinpath(*name.split("."))
    path = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    return len(ast.parse(path.read_text(encoding="utf-8")).body) > 1


def report() -> int:
    """Print the table; 0 where the threshold of pyproject.toml is met and every module that a process imported is counted."""
    files = serving_files()
    names = {name_of(path) for path in files}
    found = imported()
    for kind in sorted(found):
        print(f"{kind}: imported {len(found[kind])} modules of the package")
    seen = set().union(*found.values())
    print(f"counted, but imported by no engine of this run: {', '.join(sorted(names - seen)) or 'none'}")
    missing = [name for name in sorted(seen - names) if has_code(name)]
    if missing:
        print(f"imported while serving, but not counted: {', '.join(missing)}")
    measured = coverage.Coverage(data_file=str(BUILD / ".coverage"), config_file=str(ROOT / "pyproject.toml"))
    measured.combine([str(DATA)], keep=True)
    measured.save()
    percent = measured.report(include=[str(path) for path in files], show_missing=True, skip_empty=True)
    measured.json_report(include=[str(path) for path in files], outfile=str(BUILD / "coverage.json"))
    needed = measured.get_option("report:fail_under")
    print(f"{percent:.1f}% of the lines that a serving process runs; {needed}% are needed")
    return int(bool(missing) or percent < float(str(needed)))


def main(arguments: list[str]) -> int:
    if arguments == ["--report"]:
        return report()
    install()
    failed = run(arguments)
    return report() or failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
