"""`sglang-eagle3 status`."""

from __future__ import annotations

import json
from typing import Any

import click
from rich.console import Console

from sglang_eagle3_plugin.cli.untrusted import escape
from sglang_eagle3_plugin.server import processes, status

_COLOURS = {"applied": "green", "native": "green", "incompatible": "red", "failed": "red"}


@click.command(name="status")
@click.option("--url", metavar="URL", help="A running server on this machine, by its address.")
@click.option("--pid", type=int, help="A running server on this machine, by the pid of any of its processes.")
@click.option("--json", "as_json", is_flag=True, help="A JSON list of {patch, target, state, reason, pid, role}.")
def command(url: str | None, pid: int | None, as_json: bool) -> int:
    """Say what is patched, skipped, and why: in this environment, or in each process of a running server.

    Exit status 1 when a patch does not fit or failed, or a scheduler is without the plugin that nobody turned off.
    """
    if url and pid:
        raise click.UsageError("give --url or --pid, not both")
    server = processes.listening_on(url) if url else pid
    rows = status.of_environment() if server is None else status.of_server(server)
    if as_json:
        click.echo(json.dumps(rows, indent=2))
    else:
        _show(rows, None if server is None else status.wiring_of_server(server))
    return int(any(map(status.is_trouble, rows)))


def _show(rows: list[status.Row], wiring: dict[int, Any] | None) -> None:
    console = Console(highlight=False, soft_wrap=True)
    for pid in dict.fromkeys(row["pid"] for row in rows):
        mine = [row for row in rows if row["pid"] == pid]
        first = mine[0]
        about = ", ".join(f"{key} {first[key]}" for key in ("release", "route") if first.get(key))
        console.print(f"[bold]{escape(str(first['role']))}[/bold] pid {pid}" + (f" ({about})" if about else ""))
        if not status.has_record(first) and wiring is not None:  # one reason for all
            colour = "red" if status.is_trouble(first) else "yellow"
            console.print(f"  [{colour}]{first['state']:<12}[/{colour}] every patch: {escape(first['reason'])}")
            continue
        for row in mine:
            colour = _COLOURS.get(row["state"], "yellow")
            console.print(f"  [{colour}]{row['state']:<12}[/{colour}] {row['patch']} on {row['target']}: {escape(row['reason'])}")
        if wiring and pid in wiring:
            note = wiring[pid]
            corrected = f", corrected from {note['stock']}" if note["corrected"] else ""
            console.print(
                escape(f"  wiring       captured {note['captured']}{corrected}; {note['convention']}, by {note['decided_by']}")
            )
