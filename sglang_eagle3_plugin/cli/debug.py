"""`sglang-eagle3 debug`: EAGLE3_DEBUG of a running server."""

from __future__ import annotations

import json
from dataclasses import asdict

import click
from rich.console import Console

from sglang_eagle3_plugin import records
from sglang_eagle3_plugin.cli.options import of_a_server, pid_of
from sglang_eagle3_plugin.cli.untrusted import escape
from sglang_eagle3_plugin.runtime.debug.report import line_of
from sglang_eagle3_plugin.server import debug


@click.group(name="debug")
def command() -> None:
    """See what the draft is fed in a running server, CUDA graphs on; no restart.

    docs/debug.md says what the lines mean. Every process of the server that runs a model is switched.
    """


@command.command("on")
@click.argument("spec", default="1")
@click.option("--file", metavar="FILE", help="Where JSON lines go; by default to a file of its own for each process.")
@of_a_server
def on(spec: str, file: str | None, url: str | None, pid: int | None, as_json: bool) -> int:
    """Turn debug on, with a SPEC such as steps=20,every=100,values=5,requests=ID,rate=20,ids=1.

    The first STEPS steps, then each EVERY-th. Exit status 1 when a process did not obey.
    """
    return _show(debug.switch(pid_of(url, pid), on=True, spec=spec, file=file), as_json)


@command.command("off")
@of_a_server
def off(url: str | None, pid: int | None, as_json: bool) -> int:
    """Turn debug off. Exit status 1 when a process did not obey."""
    return _show(debug.switch(pid_of(url, pid), on=False), as_json)


@command.command("status")
@of_a_server
def status(url: str | None, pid: int | None, as_json: bool) -> int:
    """Say what debug does in each process. Exit status 1 when one has a problem."""
    return _show(debug.states(pid_of(url, pid)), as_json)


@command.command("tail")
@click.option("-n", "last", type=click.IntRange(min=0), default=10, show_default=True, help="Lines from before.")
@click.option("--no-follow", is_flag=True, help="Print those and stop.")
@of_a_server
def tail(last: int, no_follow: bool, url: str | None, pid: int | None, as_json: bool) -> int:
    """Print debug's lines as they come, until the server ends or Ctrl-C; with --json as they are written."""
    server = pid_of(url, pid)
    began = records.start_time(server)
    for line in debug.tail(server, last, lambda: not no_follow and records.start_time(server) == began):
        click.echo(line if as_json else line_of(line))
    return 0


def _show(states: list[debug.State], as_json: bool) -> int:
    if as_json:
        click.echo(json.dumps([asdict(state) for state in states], indent=2))
    else:
        console = Console(highlight=False, soft_wrap=True)
        for state in states:
            what = f"[green]on[/green] {escape(state.spec or '')}" if state.on else "off"
            console.print(f"[bold]{escape(state.role)}[/bold] pid {state.pid}: {what}")
            if state.on:
                more = f", {state.left_out} left out by the rate" if state.left_out else ""
                more += f", {state.ranks_compared} passes compared between ranks" if state.ranks_compared else ""
                console.print(f"  {state.steps} steps, {state.lines} lines{more}; JSON lines: {escape(state.file or 'none')}")
            if state.problem:
                console.print(f"  [red]{escape(state.problem)}[/red]")
    return int(any(state.problem for state in states))
