"""`sglang-eagle3 hidden-states dump`: the dump of a running server."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console

from sglang_eagle3_plugin.cli.options import of_a_server, pid_of
from sglang_eagle3_plugin.cli.untrusted import escape
from sglang_eagle3_plugin.server import dump


@click.group(name="dump")
def command() -> None:
    """Turn the dump of a running server on or off; no restart.

    Requests that began before are not dumped. The other EAGLE3_DUMP_ variables are those that the server was started with.
    """


@command.command("on")
@click.option("--dir", "directory", type=click.Path(path_type=Path), help="Where to; the server's EAGLE3_DUMP_DIR unless given.")
@click.option("--boundaries", default="", metavar="B,B,B", help="Which, or 'all'; as the server was started unless given.")
@of_a_server
def on(directory: Path | None, boundaries: str, url: str | None, pid: int | None, as_json: bool) -> int:
    """Begin a dump; one that is on ends first. Exit status 1 when a process did not obey."""
    return _show(dump.switch(pid_of(url, pid), on=True, directory=directory, boundaries=boundaries, url=url), as_json)


@command.command("off")
@of_a_server
def off(url: str | None, pid: int | None, as_json: bool) -> int:
    """End the dump; what is complete is written. Exit status 1 when a process did not obey."""
    return _show(dump.switch(pid_of(url, pid), on=False), as_json)


@command.command("status")
@of_a_server
def status(url: str | None, pid: int | None, as_json: bool) -> int:
    """Say whether each process dumps, where to, and what became of its requests. Exit status 1 when one has a problem."""
    return _show(dump.states(pid_of(url, pid)), as_json)


def _show(states: list[dump.State], as_json: bool) -> int:
    if as_json:
        click.echo(json.dumps([asdict(state) for state in states], indent=2))
    else:
        console = Console(highlight=False, soft_wrap=True)
        for state in states:
            what = "on" if state.on else "begins with the next pass" if state.waiting else "off"
            where = f" to {escape(state.directory or '')}, boundaries {', '.join(map(str, state.boundaries))}" if state.on else ""
            console.print(f"[bold]{escape(state.role)}[/bold] pid {state.pid}: {what}{where}")
            if state.counts:
                console.print("  " + ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in sorted(state.counts.items())))
            if state.problem:
                console.print(f"  [red]{escape(state.problem)}[/red]")
    return int(any(state.problem for state in states))
