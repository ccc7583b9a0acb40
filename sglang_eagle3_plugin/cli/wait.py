"""`sglang-eagle3 wait`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from sglang_eagle3_plugin.cli.options import SECONDS
from sglang_eagle3_plugin.cli.untrusted import escape
from sglang_eagle3_plugin.server.address import parse
from sglang_eagle3_plugin.server.wait import Result, Snapshot, wait

_CODES = {"ready": 0, "failed": 1, "timeout": 3}
_SAY_AGAIN_S = 30.0


@click.command(name="wait")
@click.option("--url", required=True, metavar="URL", help="Where the server will answer: http://127.0.0.1:30000, [::1]:30000, ...")
@click.option("--pid", type=click.IntRange(min=1), help="The pid of its launcher: its death ends the wait at once.")
@click.option("--log", type=click.Path(path_type=Path, dir_okay=False), help="What it writes to: shows progress and failures.")
@click.option("--timeout", default=1800.0, show_default=True, type=SECONDS, help="Seconds; 0 asks once.")
@click.option("--api-key", envvar="SGLANG_API_KEY", help="For a gateway that wants one.  [env: SGLANG_API_KEY]")
@click.option("--json", "as_json", is_flag=True, help="A JSON object of {state, reason, elapsed_s, stage, answer, checks, lines}.")
def command(url: str, pid: int | None, log: Path | None, timeout: float, api_key: str | None, as_json: bool) -> int:
    """Wait for a server to be ready, and stop at once when it has failed.

    Exit status 0: ready. 1: it failed, with the reason and the log lines that say why. 3: the time is over.
    """
    address = parse(url)
    with display(address.url) as on_look:
        result = wait(address, pid=pid, log=log, timeout_s=timeout, api_key=api_key, on_look=on_look)
    if as_json:
        click.echo(json.dumps({**asdict(result), "url": address.url, "pid": pid}, indent=2))
    else:
        _show(result)
    return _CODES[result.state]


def _show(result: Result) -> None:
    console = Console(highlight=False, soft_wrap=True)
    colour = {"ready": "green", "failed": "red", "timeout": "yellow"}[result.state]
    console.print(f"[{colour}]{result.state}[/{colour}] after {result.elapsed_s:.1f} s: {escape(result.reason)}")
    for line in result.lines:
        # The line that holds every server argument is thousands of characters long.
        console.print("  " + escape(line if len(line) <= 400 else line[:397] + "..."))


@contextmanager
def display(url: str) -> Iterator[Callable[[Snapshot], None]]:
    """How far a start is, on stderr: a bar on a terminal, else a line now and then; yields what `wait` calls."""
    console = Console(stderr=True, highlight=False)
    if not (sys.stderr.isatty() and console.is_terminal):
        yield _Plain(url).look
        return
    columns = [
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        TextColumn("{task.fields[percent]:>4}"),
        TextColumn("{task.fields[clock]:>6}"),
        TextColumn("{task.fields[left]}"),
    ]
    with Progress(*columns, console=console, transient=True, expand=True) as progress:
        task = progress.add_task("waiting", total=None, percent="", clock="", left="")

        def look(now: Snapshot) -> None:
            known = now.fraction is not None
            progress.update(
                task,
                description=_what(now),
                total=1.0 if known else None,
                completed=now.fraction or 0.0,
                percent=f"{now.fraction:.0%}" if now.fraction is not None else "",
                clock=_clock(now.elapsed_s),
                left=_left(now),
            )

        yield look


class _Plain:
    """A line when the stage changes, and one now and then in between: for a file, a pipe, a CI log."""

    def __init__(self, url: str) -> None:
        click.echo(f"waiting for {url}", err=True)
        self.stage = ""
        self.said = 0.0

    def look(self, now: Snapshot) -> None:
        stage = now.stage if now.fraction is not None else ""
        if stage != self.stage or now.elapsed_s - self.said >= _SAY_AGAIN_S:
            self.stage, self.said = stage, now.elapsed_s
            left = f", {_left(now)}" if _left(now) else ""
            click.echo(f"{_clock(now.elapsed_s)} {_what(now)}{left}", err=True)


def _what(now: Snapshot) -> str:
    if now.fraction is None:
        return {"": "asking", "refused": "not listening yet", "503": "loading (503)"}.get(now.answer, now.answer)
    return f"{now.stage} {now.done}/{now.total}" if now.total else now.stage


def _left(now: Snapshot) -> str:
    if now.left_s is not None:
        return f"about {_clock(now.left_s)} left"
    return f"{_clock(now.stage_left_s)} left of {now.stage}" if now.stage_left_s is not None else ""


def _clock(seconds: float) -> str:
    whole = int(seconds)
    return f"{whole // 60}:{whole % 60:02d}" if whole < 3600 else f"{whole // 3600}:{whole % 3600 // 60:02d}:{whole % 60:02d}"
