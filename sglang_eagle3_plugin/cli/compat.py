"""`sglang-eagle3 compat`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from sglang_eagle3_plugin import pairs, releases, support
from sglang_eagle3_plugin.cli.options import settings_here
from sglang_eagle3_plugin.cli.untrusted import escape
from sglang_eagle3_plugin.cli.wiring import load_pair
from sglang_eagle3_plugin.compat import matrix, ran, render
from sglang_eagle3_plugin.errors import UserError
from sglang_eagle3_plugin.paths import Alone
from sglang_eagle3_plugin.selection import select

_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
_RELEASES = click.option("--releases", "spec", metavar="SPEC", help="'>=0.5.9', or 0.5.9,0.5.13, or all.")
_INTO = click.option(
    "--into", type=click.Path(path_type=Path, file_okay=False), help="Directory of the matrix.  [default: the checkout's compat/]"
)


@click.group(name="compat", invoke_without_command=True)
@click.option("--draft", metavar="DIR", help="With --target: judge one pair. A directory with its config.json, or a cached id.")
@click.option("--target", metavar="DIR", help="The target of the pair.")
@click.option("--class", "class_name", metavar="CLASS", help="Show one model class, or those whose name holds this.")
@_RELEASES
@_JSON
@click.pass_context
def command(
    ctx: click.Context, draft: str | None, target: str | None, class_name: str | None, spec: str | None, as_json: bool
) -> int | None:
    """The matrix over SGLang releases: does a release serve my target and draft, unmodified or with the plugin?

    Exit status 0: shown. 1: for a pair, that no chosen release serves it rightly, or that it is undecidable what the draft wants.
    """
    if ctx.invoked_subcommand is not None:
        return None
    if (draft is None) != (target is None):
        raise UserError("a pair needs both --draft and --target; give the other one too")
    if draft is not None and target is not None:
        return _pair(draft, target, spec, as_json)
    names = select(spec, releases.known_releases())
    if as_json:
        click.echo(json.dumps(_chosen(names, class_name), indent=1))
    else:
        _show(names, class_name)
    return 0


@command.command()
@_RELEASES
@_INTO
@click.option("--offline", is_flag=True, help="Don't ask the package index for releases; survey the known ones.")
@_JSON
def survey(spec: str | None, into: Path | None, offline: bool, as_json: bool) -> int:
    """Examine SGLang's wheels and write the matrix: fetched into the cache, never imported.

    Exit status 1: a wheel, or a file in one, could not be read; its cells say so and the rest went on.
    """
    from sglang_eagle3_plugin.survey import matrix as tables
    from sglang_eagle3_plugin.survey import wheels

    place = _place(into)
    listed = wheels.recorded() if offline else wheels.listing()
    names = select(spec, listed)
    wanted = wheels.releases_in(names, listed)
    (place / "data").mkdir(parents=True, exist_ok=True)
    alone = Alone(place / "data")  # what is there is read, and written again with more
    with _progress("fetching wheels", len(names)) as step:
        got = wheels.fetch(wanted, lambda release: step(1, None))
    present = {name: path for name, path in got.items() if isinstance(path, Path)}
    absent = {name: line for name, line in got.items() if isinstance(line, str)}
    with _progress("examining files", None) as step:
        found = tables.survey(present, lambda done, total: step(None, (done, total)))
    kept = tables.load(place / "data")
    # A release that could not be fetched keeps the rows of its last survey.
    found.update({n: tables.broken(Path(listed[n].filename), line) for n, line in absent.items() if n not in kept})
    tables.save(place / "data", {**kept, **found})
    alone.close()
    _render(place)
    problems = {
        **absent,
        **{name: "; ".join(s.whole["facts"]["problems"]) for name, s in found.items() if s.whole["facts"]["problems"]},
    }
    classes = {name: len(s.classes) for name, s in found.items()}
    if as_json:
        click.echo(json.dumps({"releases": names, "classes": classes, "problems": problems, "into": str(place)}, indent=1))
    else:
        for name, line in problems.items():
            click.echo(f"{name}: {line}")
        click.echo(f"{len(found)} releases surveyed, {max(classes.values(), default=0)} classes at most; written to {place}")
    return 1 if problems else 0


@command.command()
@click.option("--release", "names", multiple=True, required=True, metavar="R", help="A release; may be given several times.")
@click.option("--class", "class_name", default="", metavar="CLASS", help="Only classes whose name holds this.")
@click.option("--keep", is_flag=True, help="Keep environments that are built for this.")
@_INTO
@_JSON
def run(names: tuple[str, ...], class_name: str, keep: bool, into: Path | None, as_json: bool) -> int:
    """Run real engines of releases, without a GPU, and record what they did. Takes five minutes a release, and 9 GB while it runs.

    Exit status 1: with the plugin, an engine failed or captured other boundaries than the draft was made for.
    """
    from sglang_eagle3_plugin.rig import environments

    place = _place(into)
    good = True
    done: dict[str, Any] = {}
    for name in select(",".join(names), releases.known_releases()):
        had = name in environments.built()
        try:
            found = ran.run_release(name, lambda line: click.echo(line, err=True), class_name)
            ran.record(place / "data", name, found, class_name)
            done[name] = found
        finally:
            if not had and not keep:
                environments.remove(name)
        good = good and all(r["plugin"]["ok"] and r["plugin"]["boundaries"] == list(ran.BOUNDARIES) for r in found.values())
    _render(place)
    if as_json:
        click.echo(json.dumps(done, indent=1))
    else:
        for name, found in done.items():
            for one, ways in found.items():
                click.echo(f"{name} {one}")
                for way, result in ways.items():
                    click.echo(f"  {way}: {json.dumps(result)}")
    return 0 if good else 1


@command.command()
@click.argument("path", type=click.Path(path_type=Path, exists=True))
@click.option("--class", "class_name", metavar="CLASS", help="Only classes whose name holds this.")
@_JSON
def probe(path: Path, class_name: str | None, as_json: bool) -> int:
    """The matrix's row for a tree or a wheel: a fork, a nightly, a checkout, an installed package."""
    from sglang_eagle3_plugin.survey import archive, facts

    with archive.open_any(path) as opened:
        found = facts.of_archive(opened)
    cells = {
        name: matrix.judge(c, found.facts, support.made_for(found.name))
        for name, c in found.classes.items()
        if (class_name or "") in name
    }
    whole = {**asdict(found.facts), "calls": list(found.facts.calls)}
    if as_json:
        rows = {name: {**one.as_json(), "command": f"sglang-eagle3 compat probe {path}"} for name, one in cells.items()}
        click.echo(json.dumps({"release": found.name, "facts": whole, "classes": rows}, indent=1))
        return 0
    console = Console(highlight=False)
    route = "SGLang's plugin entry point" if found.facts.entry_point else ".pth"
    console.print(f"SGLang {escape(found.name)}, {len(cells)} classes; the plugin is reached by {route}")
    for problem in found.facts.problems:
        console.print(f"[red]problem[/red] {escape(problem)}")
    for name, one in cells.items():
        _print_cell(console, escape(name), one)
    return 0


@command.command("render")
@_INTO
def render_(into: Path | None) -> int:
    """Write the pages from the data again."""
    _render(_place(into))
    return 0


def _place(into: Path | None) -> Path:
    if into is not None:
        return into
    data = releases.data_directory()
    if data.name != "data":
        raise UserError("this is an installed plugin, whose matrix is not changed; say where to write one with --into DIR")
    return data.parent


def _render(place: Path) -> None:
    # Pages show what the package itself reads, so only the checkout's own have data to be rendered from.
    if (place / "data").resolve() == releases.data_directory().resolve():
        releases.forget()
        render.render(place)


def _pair(draft_path: str, target_path: str, spec: str | None, as_json: bool) -> int:
    draft, target = load_pair(draft_path, target_path)
    want = pairs.wanted(draft, target, settings_here())
    names = select(spec or f">={support.OLDEST}", releases.known_releases())
    answers = {name: pairs.answer(draft, target, want, name) for name in names}
    order = [name for level in support.LEVELS for name in reversed(names) if answers[name].level == level]
    if as_json:
        document = {
            "wanted": None if want.boundaries is None else list(want.boundaries),
            "releases": {name: pairs.as_json(answers[name]) for name in order},
        }
        click.echo(json.dumps(document, indent=1))
    else:
        console = Console(highlight=False)
        said = "undecidable" if want.boundaries is None else ", ".join(map(str, want.boundaries)) or "no auxiliary states"
        console.print(f"{escape(target.architecture or '')}, {target.num_layers} layers; the draft wants {said}\n")
        groups: list[tuple[list[str], pairs.Answer]] = []
        for name in order:
            if groups and groups[-1][1] == answers[name]:
                groups[-1][0].append(name)
            else:
                groups.append(([name], answers[name]))
        for held, one in groups:
            span = held[0] if len(held) == 1 else f"{held[-1]} to {held[0]}"
            console.print(f"[bold]{span}[/bold]  {one.level}")
            console.print(Padding(escape(one.why), (0, 0, 0, 2)))
    served = any(one.level in (support.NATIVE, support.REWIRED, support.PLUGIN) for one in answers.values())
    return 0 if served and want.boundaries is not None else 1


def _chosen(names: list[str], class_name: str | None) -> dict[str, Any]:
    whole = matrix.document()
    return {
        "releases": names,
        "activation": {name: whole["activation"].get(name) for name in names},
        "classes": {
            c: {name: cells[name] for name in names if name in cells}
            for c, cells in whole["classes"].items()
            if (class_name or "") in c
        },
    }


def _show(names: list[str], class_name: str | None) -> None:
    console = Console(highlight=False)
    runs = ran.load()
    if class_name is None:
        newest = names[-1]
        counts: dict[str, int] = {}
        for c in releases.class_names():
            level = support.support(newest, c).level
            counts[level] = counts.get(level, 0) + 1
        console.print(f"{len(releases.class_names())} model classes, {len(names)} releases, {names[0]} to {newest}.")
        console.print(f"In {newest}: " + ", ".join(f"{counts[level]} {level}" for level in support.LEVELS if level in counts) + ".")
        console.print("One class: --class KimiK25. One pair: --draft DIR --target DIR. All: --json, or compat/matrix.html.")
        return
    found = [c for c in releases.class_names() if class_name in c]
    if not found:
        raise UserError(f"no release has a class with {class_name!r} in its name; case counts")
    for c in found:
        console.print(f"[bold]{c}[/bold]")
        for step in matrix.steps(c, runs):
            if step.cell.level != support.ABSENT and any(_holds(step, name) for name in names):
                span = step.first if step.first == step.last else f"{step.first} to {step.last}"
                _print_cell(console, span, step.cell, 2)


def _holds(step: matrix.Step, release: str) -> bool:
    known = releases.known_releases()
    return release in known and known.index(step.first) <= known.index(release) <= known.index(step.last)


def _print_cell(console: Console, name: str, one: matrix.Cell, indent: int = 0) -> None:
    console.print(
        Padding(f"{name}  [bold]{one.level}[/bold], {one.evidence}" + (f" {one.date}" if one.date else ""), (0, 0, 0, indent))
    )
    rule = f"layer ids: {releases.RULES[one.rule].text}. " if one.rule in releases.RULES else ""
    why = "" if one.rule in releases.RULES and one.why == releases.RULES[one.rule].text else f"{one.why}."
    console.print(Padding(escape(f"{rule}{why}".strip()), (0, 0, 0, indent + 2)))


@contextmanager
def _progress(what: str, total: int | None) -> Iterator[Callable[[int | None, tuple[int, int] | None], None]]:
    console = Console(stderr=True)
    if not (sys.stderr.isatty() and console.is_terminal):
        click.echo(what, err=True)
        yield lambda advance, state: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=None), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True, expand=True) as bar:
        task = bar.add_task(what, total=total)

        def step(advance: int | None, state: tuple[int, int] | None) -> None:
            if state is not None:
                bar.update(task, completed=state[0], total=state[1])
            elif advance is not None:
                bar.advance(task, advance)

        yield step
