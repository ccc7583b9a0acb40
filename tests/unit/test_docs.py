"""What the documents say can be typed: every command parses, every link leads somewhere, every figure is the record's."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest

from sglang_eagle3_plugin.cli.main import group, main
from sglang_eagle3_plugin.rig import models

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/*.md", "benchmarks/*.md", "patches/*.md", "compat/README.md")
    for path in ROOT.glob(pattern)
    if path.name != "CHANGELOG.md"
)


def commands() -> list[tuple[str, list[str]]]:
    """Every command of ours in an indented block or between backticks, with the page it is on."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        lines = [line.strip() for line in text.splitlines() if line.startswith("    ")]
        # Within a sentence only what has an option is meant to be typed as it stands.
        lines += [match for match in re.findall(r"`(sglang-eagle3 [^`]*)`", text) if " --" in match]
        for line in lines:
            line = re.sub(r"^(?:[A-Z0-9_]+=\S+ )+", "", line.partition(" #")[0].partition(" > ")[0].strip())
            if line.startswith("sglang-eagle3 "):
                line = re.sub(r"\[(.*?)\]", r"\1", line)  # what may be left out is there too
                found += [(page.relative_to(ROOT).as_posix(), shlex.split(one)[1:]) for one in _alternatives(line)]
    return found


def _alternatives(line: str) -> list[str]:
    """`on|off` stands for two commands; `A | --all` for a choice of options."""
    match = re.search(r"(\S+) \| (--\S+)", line)
    if match:
        return [*_alternatives(line.replace(f" | {match[2]}", "")), *_alternatives(line.replace(f"{match[1]} | ", ""))]
    match = re.search(r"(?<= )([a-z-]+(?:\|[a-z-]+)+)(?= |$)", line)
    if match:
        return [one for word in match[1].split("|") for one in _alternatives(line.replace(match[1], word, 1))]
    return [line]


@pytest.mark.parametrize(("page", "argv"), commands(), ids=lambda value: value if isinstance(value, str) else " ".join(value))
def test_every_command_in_the_documents_exists_with_its_options(page: str, argv: list[str]) -> None:
    command: click.Command = group
    context = click.Context(group)
    rest = list(argv)
    while isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
        inner = command.get_command(context, rest[0])
        if inner is None:
            break  # an argument, of a group that is a command too
        command, rest = inner, rest[1:]
        context = click.Context(command, parent=context)
    assert command is not group or argv == ["--version"], f"{page}: no command {argv[0]}"
    if "--" in rest:
        rest = rest[: rest.index("--")]
    command.make_parser(context).parse_args(rest)


def test_the_documents_hold_commands_of_every_kind() -> None:
    assert {argv[0] for _, argv in commands()} >= {
        *("doctor", "wiring", "compat", "models", "status", "debug", "wait", "hidden-states", "accept", "patches", "bench")
    }


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("doctor --target TARGET --draft DRAFT --release 0.5.13", 1),
        ("doctor --target TARGET --draft DRAFT -- --speculative-algorithm EAGLE3 --tp 8", None),
        ("wiring --draft DRAFT --target TARGET", 0),
        ("compat --draft DRAFT --target TARGET", 0),
        ("models --release 0.5.9", 0),
        ("compat --class KimiK25", 0),
        ("patches list", 0),
        ("patches show 0.5.9 graph-capture-wiring", 0),
    ],
)
def test_what_needs_no_server_runs_as_the_guides_give_it(line: str, code: int | None, tmp_path: Path, capsys) -> None:
    target = models.target(tmp_path / "target", "kimi-k25")
    draft = models.draft(tmp_path / "draft", target, (3, 5, 6), convention="output")
    with pytest.raises(SystemExit) as ended:
        main(line.replace("TARGET", str(target.path)).replace("DRAFT", str(draft)).split())
    shown = capsys.readouterr()
    assert ended.value.code in ({0, 1} if code is None else {code}), shown.out + shown.err
    assert shown.out.strip()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_leads_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), f"{page.name} links to {link}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", one.lower()).replace(" ", "-") for one in headings}, f"{page.name}: {link}"


def test_the_figures_are_those_of_the_records() -> None:
    done = subprocess.run([sys.executable, "benchmarks/claims.py", "render", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_record_says_what_made_it() -> None:
    for path in (ROOT / "benchmarks" / "results").glob("*.json"):
        record = json.loads(path.read_text(encoding="utf-8"))
        assert record["command"].startswith("python "), path
        assert re.fullmatch(r"\d{4}-\d{2}-\d{2}", record["date"]), path


def test_the_module_map_names_every_package() -> None:
    said = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    package = ROOT / "sglang_eagle3_plugin"
    for path in sorted(package.iterdir()):
        name = path.name if path.is_dir() else path.stem
        if not name.startswith("_") and name != "data" and (path.is_dir() or path.suffix == ".py"):
            assert f"`{name}" in said or f"{name}`" in said, name
