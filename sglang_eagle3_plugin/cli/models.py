"""`sglang-eagle3 models`."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from sglang_eagle3_plugin import releases, support
from sglang_eagle3_plugin.cli.untrusted import escape
from sglang_eagle3_plugin.errors import UserError

NATIVE, REWIRED = support.NATIVE, support.REWIRED
DELEGATION, DELIVERY, TAP, NOT_POSSIBLE = "delegation", "native capture, delivered", "generic tap", "not possible"
WAYS = (NATIVE, REWIRED, DELEGATION, DELIVERY, TAP, NOT_POSSIBLE)
"""The levels of the matrix, its ``plugin`` told apart by how; its ``broken`` is not possible."""
_COLOURS = {NATIVE: "green", NOT_POSSIBLE: "red"}


@click.command(name="models")
@click.option("--release", metavar="RELEASE", help="An SGLang release.  [default: the newest known one]")
@click.option("--class", "class_name", metavar="CLASS", help="Only the classes whose name holds this.")
@click.option("--way", type=click.Choice(WAYS), help="Only the classes that are served this way.")
@click.option("--json", "as_json", is_flag=True, help="{release, counts, wrappers, models: [{class, way, why, evidence, around}]}.")
def command(release: str | None, class_name: str | None, way: str | None, as_json: bool) -> int:
    """List every model class of a release: served by SGLang alone, by the plugin and how, or not, and why.

    The headline counts by the levels of the matrix (compat/MATRIX.md).

    Read from the release's files; in a server the plugin decides by the structure of the model that was loaded, and
    `sglang-eagle3 status` says what it found. Exit status 1 when nothing matches.
    """
    known = releases.known_releases()
    chosen = release or known[-1]
    if chosen not in known:
        nearest, _ = releases.nearest(chosen)
        raise UserError(f"nothing is recorded of SGLang {chosen}; the nearest release that is known is {nearest}")
    rows = models_of(chosen)
    counts = Counter(row["way"] for row in rows)
    wrappers = Counter(row["way"] for row in rows if row["around"])
    rows = [row for row in rows if (way is None or row["way"] == way) and (class_name or "").lower() in row["class"].lower()]
    if as_json:
        both = {name: {w: some[w] for w in WAYS} for name, some in (("counts", counts), ("wrappers", wrappers))}
        click.echo(json.dumps({"release": chosen, **both, "models": rows}, indent=1))
    else:
        _show(chosen, counts, wrappers, rows)
    return int(not rows)


def models_of(release: str) -> list[dict[str, Any]]:
    """Every target class of a release: ``class``, ``way`` (one of ``WAYS``), ``why``, ``evidence`` (``support``), ``around``."""
    rows = []
    for name in releases.class_names():
        facts = releases.class_facts(release, name)
        if facts is not None:
            found = support.support(release, name)
            row = {"class": name, "way": _way(facts, found), "why": found.why, "evidence": found.evidence, "around": facts.around}
            rows.append(row)
    return rows


def _way(facts: releases.ClassFacts, found: support.Support) -> str:
    if found.level == support.BROKEN:
        return NOT_POSSIBLE
    if found.level in (support.NATIVE, support.REWIRED):
        return found.level
    if (facts.inner or facts.chosen) and facts.setter is None:
        return DELEGATION
    # A class that has its setter and lacks only the accessor captures on SGLang's own path, as does one whose setter was dead.
    if facts.setter is not None and facts.capture is not None:
        return DELEGATION
    return DELIVERY if facts.capture is not None else TAP


def _show(release: str, counts: Counter[str], wrappers: Counter[str], rows: list[dict[str, Any]]) -> None:
    console = Console(highlight=False)
    for what, some in (("model classes", counts), ("of them around a language model", wrappers)):
        plugin = some[DELEGATION] + some[DELIVERY] + some[TAP]
        console.print(
            f"SGLang {release}: {some.total()} {what}; {some[NATIVE]} native (by SGLang alone), {some[REWIRED]} plugin:rewired "
            f"(with their capture corrected), {plugin} plugin, {some[NOT_POSSIBLE]} broken (not possible)"
        )
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("class", "way", "how, or why not"):
        table.add_column(heading, overflow="fold")
    for row in sorted(rows, key=lambda r: (WAYS.index(r["way"]), r["class"])):
        table.add_row(escape(row["class"]), f"[{_COLOURS.get(row['way'], 'yellow')}]{row['way']}[/]", escape(row["why"]))
    console.print(table)
