"""`sglang-eagle3 demo`."""

from __future__ import annotations

import json
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from sglang_eagle3_plugin.cli.untrusted import escape
from sglang_eagle3_plugin.rig.demo import DEFAULT_RELEASE, NUM_STEPS, Demonstration, demonstrate
from sglang_eagle3_plugin.rig.engine import EngineResult
from sglang_eagle3_plugin.rig.site.eagle3_rig import replacements


@click.command(name="demo")
@click.option("--release", default=DEFAULT_RELEASE, show_default=True, metavar="VERSION", help="The SGLang release to run.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object {release, stock, plugin, state}.")
@click.option("--replaced", is_flag=True, help="Only list what stands in for a GPU's kernels, and why.")
def command(release: str, as_json: bool, replaced: bool) -> int:
    """Run real SGLang without a GPU: a tiny Kimi-K2.5 with an EAGLE-3 draft, without the plugin and with it.

    Builds the release's environment in the cache on first use (8 to 11 GB); then it takes two minutes. Exit status 1 when it does
    not work with the plugin.
    """
    if replaced:
        _list_replaced(as_json)
        return 0
    seen = _with_progress(release)
    if as_json:
        click.echo(json.dumps(_as_json(seen), indent=2))
    else:
        _show(seen)
    return int(not seen.works)


def _with_progress(release: str) -> Demonstration:
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    if not console.is_terminal:
        return demonstrate(release, lambda line: click.echo(line, err=True))
    with console.status("starting") as status:

        def say(line: str) -> None:
            console.print(escape(line))
            status.update(escape(line))

        return demonstrate(release, say)


def _as_json(seen: Demonstration) -> dict[str, Any]:
    return {
        "release": seen.release,
        "stock": {"ok": seen.stock.ok, "error": seen.stock.error},
        "plugin": {
            "ok": seen.plugin.ok,
            "spec_accept_length": seen.plugin.spec_accept_length,
            "boundaries": list(seen.plugin.boundaries) if seen.plugin.boundaries is not None else None,
        },
        "state": seen.state,
    }


def _show(seen: Demonstration) -> None:
    table = Table(title=f"SGLang {seen.release}, tiny Kimi-K2.5 + EAGLE-3", title_justify="left")
    for heading in ("", "stock", "plugin"):
        table.add_column(heading)
    table.add_row("generates", _yes(seen.stock), _yes(seen.plugin))
    table.add_row(f"acceptance length (of {NUM_STEPS + 1})", _length(seen.stock), _length(seen.plugin))
    table.add_row("boundaries at the draft", _boundaries(seen.stock), _boundaries(seen.plugin))
    table.add_row("hooks", "", seen.state)
    console = Console(highlight=False)
    console.print(table)
    for name, result in (("stock", seen.stock), ("plugin", seen.plugin)):
        if result.error:
            console.print(f"{name}: {escape(result.error)}")


def _list_replaced(as_json: bool) -> None:
    rows = [{"names": r.names, "module": r.module, "reason": r.reason, "releases": r.releases} for r in replacements.REPLACEMENTS]
    rows += [{"names": ", ".join(s.modules), "module": "-", "reason": s.reason, "releases": s.releases} for s in replacements.STUBS]
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    console = Console(highlight=False)
    for row in rows:
        console.print(f"[bold]{escape(row['names'])}[/bold]" + (f" in {row['module']}" if row["module"] != "-" else ""))
        console.print(f"  {escape(row['reason'])} ({row['releases']})")


def _yes(result: EngineResult) -> str:
    return "[green]yes[/green]" if result.ok else "[red]no[/red]"


def _length(result: EngineResult) -> str:
    return "-" if result.spec_accept_length is None else f"{result.spec_accept_length:.2f}"


def _boundaries(result: EngineResult) -> str:
    if result.boundaries is not None:
        return ", ".join(map(str, result.boundaries))
    return " / ".join(f"{sight['mode']} {sight['boundaries']}" for sight in result.observed) or "-"
