"""`sglang-eagle3 patches`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
from packaging.version import InvalidVersion, Version

from sglang_eagle3_plugin import cache
from sglang_eagle3_plugin.errors import UserError
from sglang_eagle3_plugin.series import catalog, export, transaction, tree
from sglang_eagle3_plugin.series.edit import UnfitError
from sglang_eagle3_plugin.series.source import Source, from_directory, from_wheel

_TREE = click.option(
    "--tree",
    "path",
    type=click.Path(path_type=Path),
    required=True,
    help="A checkout, an unpacked wheel, a site-packages directory.",
)
_RELEASE = click.option("--release", metavar="R", help="The release it is; found by its files when not given.")
_IN_PLACE = click.option("--in-place", is_flag=True, help="Yes, change an installed SGLang.")
_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group(name="patches")
def command() -> None:
    """Source patches for each SGLang release: for who builds it, carries a fork, or sends them upstream."""


@command.command("list")
@_JSON
def list_(as_json: bool) -> int:
    """List the releases, the series of each, and its patches."""
    entries = catalog.load()
    rows: list[dict[str, Any]] = [
        {"release": e.release, "series": e.directory.name, "patches": [p.stem[5:] for p in e.patches()], "files": len(e.files)}
        for e in entries.values()
    ]
    if as_json:
        click.echo(json.dumps(rows, indent=2))
    else:
        for row in rows:
            click.echo(f"{row['release']:<13} {len(row['patches'])} patches, {row['files']} files: {', '.join(row['patches'])}")
    return 0


@command.command()
@click.argument("release")
@click.argument("name", required=False)
@_JSON
def show(release: str, name: str | None, as_json: bool) -> int:
    """Show a release's series: the messages, or one patch in full."""
    entry = catalog.entry(catalog.load(), release)
    paths = entry.patches()
    if name is not None:
        chosen = [path for path in paths if name in (path.name, path.stem, path.stem[5:], path.name[:4].lstrip("0"))]
        if len(chosen) != 1:
            raise UserError(f"the series of {entry.release} has no patch {name}; it has {', '.join(p.stem[5:] for p in paths)}")
        click.echo(
            json.dumps({"name": chosen[0].name, "text": chosen[0].read_text()}) if as_json else chosen[0].read_text(), nl=as_json
        )
        return 0
    messages = {path.name: path.read_text().split("\ndiff --git ")[0].split("\n", 3)[3].rstrip() for path in paths}
    if as_json:
        click.echo(
            json.dumps(
                {"release": entry.release, "tag": entry.tag, "directory": str(entry.directory), "patches": messages}, indent=2
            )
        )
    else:
        click.echo(f"SGLang {entry.release}: {entry.directory}\n")
        click.echo("\n\n".join(f"{file}\n{message}" for file, message in messages.items()))
    return 0


@command.command()
@_TREE
@_RELEASE
@_JSON
def check(path: Path, release: str | None, as_json: bool) -> int:
    """Say how far a tree is along its release's series; nothing is changed. A wheel file will do.

    Exit status 0 for clean (and the series fits) and for applied, 1 for every other state.
    """
    opened = tree.open_tree(path)
    report = tree.examine(opened, catalog.load(), release)
    fits = None
    if report.state is tree.State.CLEAN and report.entry:
        transaction.patch(report.entry, {p: opened.read(p) for p in report.entry.files})  # raises where it does not fit
        fits = True
    _print(opened, report, as_json, fits=fits)
    return int(report.state not in (tree.State.CLEAN, tree.State.APPLIED))


@command.command()
@_TREE
@_RELEASE
@_IN_PLACE
@click.option("--allow-modified", is_flag=True, help="Apply to a fork: by context, to files that are not the release's own.")
@_JSON
def apply(path: Path, release: str | None, in_place: bool, allow_modified: bool, as_json: bool) -> int:
    """Apply the series to a tree: all of it, or nothing."""
    opened = _writable(path, in_place)
    transaction.finish(opened)
    report = tree.examine(opened, catalog.load(), release)
    outcome = transaction.apply(opened, report, allow_modified=allow_modified)
    _done(opened, report, outcome, "applied", as_json)
    return 0


@command.command()
@_TREE
@_RELEASE
@_IN_PLACE
@_JSON
def revert(path: Path, release: str | None, in_place: bool, as_json: bool) -> int:
    """Take the series back: the tree is byte for byte as it was."""
    opened = _writable(path, in_place)
    transaction.finish(opened)
    report = tree.examine(opened, catalog.load(), release)
    outcome = transaction.revert(opened, report)
    _done(opened, report, outcome, "reverted", as_json)
    return 0


@command.command("export")
@click.option("--release", "releases", metavar="R", multiple=True, help="A release; may be given more than once.")
@click.option("--all", "every", is_flag=True, help="Every release that has a series.")
@click.option("--upstream", is_flag=True, help="With one --release: the series for SGLang's maintainers, with its tests.")
@click.option("--wheel", type=click.Path(path_type=Path), help="The release's wheel, when it is not in the cache.")
@click.option("--tree", "path", type=click.Path(path_type=Path), help="An unpacked tree of the release, in place of a wheel.")
@click.option("--output", type=click.Path(path_type=Path), help="Where to write; the checkout's patches/ unless given.")
@click.option("--check", "compare", is_flag=True, help="Write nothing; exit 1 if what is there differs.")
@_JSON
def export_(
    releases: tuple[str, ...],
    every: bool,
    upstream: bool,
    wheel: Path | None,
    path: Path | None,
    output: Path | None,
    compare: bool,
    as_json: bool,
) -> int:
    """Write a release's series anew from the one source of truth."""
    chosen = [r.removeprefix("v") for r in releases] or (list(catalog.load()) if every else [])
    if not chosen or ((wheel or path or upstream) and len(chosen) != 1):
        raise click.UsageError("give --release, or --all; --wheel, --tree and --upstream go with one release")
    for release in chosen:
        try:
            Version(release)
        except InvalidVersion:
            raise UserError(f"{release!r} is no version of SGLang; give --release one like 0.5.9") from None
    root = output or catalog.root()
    # All anew: which releases share a directory is found again, too.
    known = {} if every and not compare else catalog.read_map(root)
    differing = []
    for release in sorted(chosen, key=Version):
        source = from_directory(tree.open_tree(path).package, release) if path else from_wheel(wheel or _cached_wheel(release))
        if source.release != release:
            raise UserError(f"{wheel} is the wheel of SGLang {source.release}, not of {release}; name the right one")
        series = _build(source, export.upstream_tests(root / "upstream") if upstream else {})
        if compare:
            written = export.is_written(series, root / "upstream") if upstream else _is_written(series, root, known)
            if not written:
                differing.append(release)
            continue
        directory = export.write_upstream(series, root) if upstream else export.write(series, root, known)
        if not as_json:
            click.echo(f"{release}: {len(series.patches)} patches in {root / directory}")
    if not compare and not upstream:
        export.write_map(root, known)
    if as_json:
        click.echo(json.dumps({"releases": chosen, "directory": str(root), "differing": differing}, indent=2))
    elif compare:
        click.echo(
            f"differing: {', '.join(differing)}; write them with `patches export`"
            if differing
            else f"{len(chosen)} series are as written"
        )
    return int(bool(differing))


def _build(source: Source, tests: dict[str, dict[str, str]]) -> export.Series:
    try:
        return export.build(source, tests)
    except UnfitError as error:
        raise UserError(f"a change does not fit SGLang {source.release}: {error}; please report it") from error


def _is_written(series: export.Series, root: Path, known: dict[str, Any]) -> bool:
    entry = known.get(series.release)
    return entry is not None and export.is_written(series, root / entry["series"]) and entry == series.entry(entry["series"])


def _cached_wheel(release: str) -> Path:
    directory = cache.directory("wheels")
    found = sorted(directory.glob(f"sglang-{release}-*.whl"))
    if not found:
        raise UserError(
            f"there is no wheel of SGLang {release} in {directory}; get it with `pip download --no-deps -d {directory} "
            f"sglang=={release}`, or name one with --wheel"
        )
    return found[0]


def _writable(path: Path, in_place: bool) -> tree.Tree:
    opened = tree.open_tree(path)
    if opened.kind is tree.Kind.INSTALLED and not in_place:
        raise UserError(
            f"{opened.package} is an installed SGLang and nothing was changed; pass --in-place to change it, or patch a copy"
        )
    return opened


def _print(opened: tree.Tree, report: tree.Report, as_json: bool, *, fits: bool | None) -> None:
    odd = {path: kind for path, kind in report.files.items() if kind not in ("base", "patched")}
    if as_json:
        value = {
            "tree": str(opened.package),
            "kind": opened.kind.value,
            "repository": None if opened.repository is None else str(opened.repository),
            "state": report.state.value,
            "release": report.entry.release if report.entry else None,
            "says": report.says,
            "fits": fits,
            "recorded": report.recorded,
            "files": report.files,
            "crlf": list(report.crlf),
            "leftovers": list(report.leftovers),
        }
        click.echo(json.dumps(value, indent=2))
        return
    release = f"SGLang {report.entry.release}" if report.entry else f"no release with a series (it calls itself {report.says})"
    nested = opened.repository is not None and opened.kind is not tree.Kind.CHECKOUT
    click.echo(
        f"{opened.package}: {opened.kind.value}"
        + (f", inside the repository {opened.repository}, which is left alone" if nested else "")
    )
    click.echo(f"{report.state.value}: {release}, {len(report.files)} files" + (", and the series fits" if fits else ""))
    for path, kind in sorted(odd.items()) if report.state is not tree.State.WRONG_RELEASE else []:
        click.echo(f"  {kind}: {path}")
    if report.crlf:
        click.echo(f"CRLF line ends in {len(report.crlf)} files; they are kept")
    if report.leftovers:
        click.echo(f"left by a killed run, not in use, removed by the next apply or revert: {', '.join(report.leftovers)}")
    if report.state not in (tree.State.CLEAN, tree.State.APPLIED, tree.State.INTERRUPTED):
        click.echo(transaction.refusal(opened, report))


def _done(opened: tree.Tree, report: tree.Report, outcome: transaction.Outcome, verb: str, as_json: bool) -> None:
    release = report.entry.release if report.entry else report.says
    if as_json:
        click.echo(
            json.dumps(
                {"tree": str(opened.package), "release": release, "was": report.state.value, "changed": outcome.files}, indent=2
            )
        )
    elif outcome.files:
        click.echo(f"{verb}: the series of SGLang {release}, {len(outcome.files)} files in {opened.package}")
    else:
        click.echo(f"nothing to do: {opened.package} is {report.state.value}")
