"""Ten lines of the serving code, broken one at a time in a copy of the tree: a test must fail each time. ``make mutations``.

usage: python tests/mutations.py [WORD...]      those whose title holds a word; all ten without

Each runs only the test that should notice, first on the line as it is (it must pass), then on the broken one (it must fail). Two of
them run in an environment of SGLang, where torch is; the plugin of this tree is put back there at the end.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import textwrap
import venv
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = "sglang_eagle3_plugin"
LEFT_OUT = shutil.ignore_patterns(".git", ".venv", "build", "dist", ".*_cache", ".hypothesis", "__pycache__")


@dataclass(frozen=True)
class Mutation:
    """One broken line.

    Attributes:
        title: the behaviour that it breaks.
        file: below the package.
        line: the text that stands there once, and only once.
        mutant: what takes its place.
        test: the pytest id of the test that must notice.
    """

    title: str
    file: str
    line: str
    mutant: str
    test: str


MUTATIONS = (
    Mutation(
        "ids of layer outputs become boundaries by adding one",
        "boundaries.py",
        "return tuple(i + shift for i in ids)",
        "return tuple(i - shift for i in ids)",
        "tests/unit/test_drafts.py::test_where_ids_stand_and_what_they_mean",
    ),
    Mutation(
        "delegation is added only where it lacks",
        "patches/delegation.py",
        "missing = [name for name in REQUIRED if not hasattr(wrapper, name)]",
        "missing = list(REQUIRED)",
        "tests/unit/test_activation.py::test_half_hooked_wrapper_gets_the_missing_half",
    ),
    Mutation(
        "a patch that does not fit is skipped, not raised",
        "patching.py",
        "        except Exception as error:\n            remedy",
        "        except SyntaxError as error:\n            remedy",
        "tests/unit/test_patching.py::test_a_probe_that_raises_never_escapes",
    ),
    Mutation(
        "boundary 0 is what enters the first layer",
        "runtime/capture.py",
        "first = module.layers[0]",
        "first = module.layers[1]",
        "tests/engine/test_orders.py::test_layer_stacks_of_every_shape",
    ),
    Mutation(
        "boundary L comes after those of the layers",
        "runtime/capture.py",
        "return hidden, type(aux)([*before, *aux, *after])",
        "return hidden, type(aux)([*before, *after, *aux])",
        "tests/engine/test_orders.py::test_layer_stacks_of_every_shape",
    ),
    Mutation(
        "debug that is off looks at nothing",
        "runtime/debug/thread.py",
        "            tap.remove(debug)\n",
        "            pass\n",
        "tests/unit/test_debug_switch.py::test_the_environment_turns_debug_on_and_a_command_switches_it",
    ),
    Mutation(
        "another user's control file is not obeyed",
        "runtime/debug/control.py",
        "if found.st_uid != os.geteuid():",
        "if found.st_uid == -1:",
        "tests/unit/test_debug_switch.py::test_another_users_file_is_not_obeyed",
    ),
    Mutation(
        "a sample is acknowledged once it is on the disk",
        "hidden_states/writer.py",
        "                os.fsync(file.fileno())\n",
        "",
        "tests/unit/hidden_states/test_store.py::test_a_sample_is_acknowledged_only_when_it_is_on_the_disk",
    ),
    Mutation(
        "a request whose prefix was cached is never dumped short",
        "runtime/dump.py",
        "if prefix == pending.rows:",
        "if prefix >= pending.rows:",
        "tests/unit/hidden_states/test_runtime.py::test_a_cached_prefix_is_refused_and_counted_once",
    ),
    Mutation(
        "a launch that is certain to be wrong is refused",
        "runtime/startup.py",
        "if not settings.allow_miswired:",
        "if settings.allow_miswired:",
        "tests/unit/test_activation.py::test_a_launch_that_is_certain_to_be_wrong_is_refused",
    ),
)


def copy_of_the_tree(place: Path) -> tuple[Path, Path]:
    """A copy of the tree, and an interpreter that has this one's packages and takes the plugin from the copy, `.pth` and all."""
    tree = place / "tree"
    shutil.copytree(ROOT, tree, ignore=LEFT_OUT)
    venv.create(place / "venv", with_pip=False)
    python = place / "venv/bin/python"
    site = next((place / "venv").glob("lib/python*/site-packages"))
    # In this order: the copy, and behind it what is installed here, whose own `.pth` files are not read.
    (site / "a.pth").write_text(f"{tree}\n{sysconfig.get_paths()['purelib']}\n", encoding="utf-8")
    shutil.copy(ROOT / f"{PACKAGE}.pth", site / "b.pth")
    return tree, python


def run(tree: Path, python: Path, test: str) -> tuple[int, str]:
    """Pytest's exit status, and the tests that failed."""
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "SERVING_COVERAGE")}
    # Byte code is told by time and size: a line that is as long as the one before it would not be seen to have changed.
    variables["PYTHONDONTWRITEBYTECODE"] = "1"
    argv = [str(python), "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", test]
    done = subprocess.run(argv, cwd=tree, env=variables, capture_output=True, text=True, check=False)
    failed = re.findall(r"^(?:FAILED|ERROR) (.*)", done.stdout, flags=re.MULTILINE)
    return done.returncode, "; ".join(failed) or done.stdout[-600:]


def judge(mutation: Mutation, tree: Path, python: Path, sound: set[str]) -> tuple[bool, str]:
    """Whether the test noticed; and which of its cases did first, or what is wrong."""
    path = tree / PACKAGE / mutation.file
    text = path.read_text(encoding="utf-8")
    if text.count(mutation.line) != 1:
        return False, f"{mutation.file} has {mutation.line!r} {text.count(mutation.line)} times"
    if mutation.test not in sound:
        status, said = run(tree, python, mutation.test)
        if status:
            return False, f"it fails without the mutation: {said}"
        sound.add(mutation.test)
    path.write_text(text.replace(mutation.line, mutation.mutant), encoding="utf-8")
    try:
        status, said = run(tree, python, mutation.test)
    finally:
        path.write_text(text, encoding="utf-8")
    # 1: tests were run and failed. Anything else is no test that noticed.
    if status == 1 and said.startswith(mutation.test):
        return True, said.partition(" - ")[0]
    return False, f"no test noticed (exit status {status}): {said}"


def main(words: list[str]) -> int:
    chosen = [m for m in MUTATIONS if not words or any(word in m.title for word in words)]
    unnoticed = 0
    sound: set[str] = set()
    with tempfile.TemporaryDirectory(prefix="eagle3-mutations-") as place:
        tree, python = copy_of_the_tree(Path(place))
        for mutation in chosen:
            noticed, said = judge(mutation, tree, python, sound)
            unnoticed += not noticed
            print(f"{'noticed' if noticed else 'NOT NOTICED'}: {mutation.title}\n    {PACKAGE}/{mutation.file}")
            for sign, text in (("-", mutation.line), ("+", mutation.mutant)):
                print(textwrap.indent(textwrap.dedent(text).strip() or "(nothing)", f"    {sign} "))
            print(f"    {said}", flush=True)
    if any("tests/engine" in mutation.test for mutation in chosen):
        from sglang_eagle3_plugin.rig import environments, installing

        installing.install_plugin(environments.ensure("0.5.9", print))
    print(f"{len(chosen) - unnoticed} of {len(chosen)} were noticed")
    return int(unnoticed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
