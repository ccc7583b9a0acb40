"""Options, and kinds of their values, that more than one command takes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import click

from sglang_eagle3_plugin.errors import UserError
from sglang_eagle3_plugin.server import processes
from sglang_eagle3_plugin.settings import Settings


class Finite(click.FloatRange):
    """A number in a range, and a number: ``nan`` is below no bound and above none, so click lets it through."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Read it as click does, then refuse what is not finite."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number", param, ctx)
        return number


SECONDS = Finite(min=0)


def of_a_server(function: Callable[..., Any]) -> Callable[..., Any]:
    """Options ``--url``, ``--pid`` and ``--json`` of a command about a server on this machine; see :func:`pid_of`."""
    function = click.option("--json", "as_json", is_flag=True, help="JSON in place of text.")(function)
    function = click.option("--pid", type=int, help="The server, by the pid of any of its processes.")(function)
    return click.option("--url", metavar="URL", help="The server, by its address on this machine.")(function)


def settings_here() -> Settings:
    """What the ``EAGLE3_*`` variables say, for commands whose answer hangs on them.

    Raises:
        UserError: one of them can't be read. A server goes on with the default; whoever asks a question wants to know.
    """
    settings = Settings.from_environment()
    if settings.problems:
        raise UserError("; ".join(settings.problems))
    return settings


def pid_of(url: str | None, pid: int | None) -> int:
    """The server that ``--url`` or ``--pid`` names.

    Raises:
        click.UsageError: neither or both are given.
        UserError: nobody listens there.
    """
    if bool(url) == bool(pid):
        raise click.UsageError("give --url or --pid")
    return processes.listening_on(url) if url else int(pid or 0)
