"""`sglang-eagle3 accept`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from sglang_eagle3_plugin.checkpoints import read_json
from sglang_eagle3_plugin.cli.options import Finite
from sglang_eagle3_plugin.cli.untrusted import escape
from sglang_eagle3_plugin.errors import UserError
from sglang_eagle3_plugin.server import accept, prompts
from sglang_eagle3_plugin.server.address import client, parse
from sglang_eagle3_plugin.server.generate import Prompt, server_info

_REQUEST_S = 600.0


@click.command(name="accept")
@click.option("--url", required=True, metavar="URL", help="A running server.")
@click.option("--requests", default=16, show_default=True, type=click.IntRange(1), help="How many prompts to send.")
@click.option("--max-tokens", default=128, show_default=True, type=click.IntRange(2), help="Tokens to generate for each.")
@click.option("--at-once", default=4, show_default=True, type=click.IntRange(1), help="Requests under way together.")
@click.option("--prompts", "prompt_file", type=click.Path(path_type=Path), help="JSON lines with text, messages or input_ids.")
@click.option("--passive", is_flag=True, help="Send nothing: judge the server's own running mean (no rate per position).")
@click.option("--expect", type=Finite(min=1), help="The acceptance length that is due.")
@click.option("--score", type=click.Path(path_type=Path), help="Take it from the JSON of `hidden-states score`.")
@click.option("--tolerance", default=0.1, show_default=True, type=Finite(0, 1), help="Share of accepted drafts that may miss.")
@click.option("--api-key", envvar="SGLANG_API_KEY", help="For a server that wants one.  [env: SGLANG_API_KEY]")
@click.option("--json", "as_json", is_flag=True, help="A JSON object of {ok, verdict, length, rates, conditional_rates, ...}.")
def command(
    url: str,
    requests: int,
    max_tokens: int,
    at_once: int,
    prompt_file: Path | None,
    passive: bool,
    expect: float | None,
    score: Path | None,
    tolerance: float,
    api_key: str | None,
    as_json: bool,
) -> int:
    """Say how many draft tokens a running server accepts, per step and per position, and whether that is what it should be.

    Sends a few greedy requests of its own. Exit status 1 when too little is accepted.
    """
    if expect is not None and score is not None:
        raise click.UsageError("give --expect or --score, not both")
    due = expect if score is None else _of_score(score)
    with client(parse(url), timeout_s=_REQUEST_S, api_key=api_key) as http:
        chosen: list[Prompt] = []
        templated = True
        if not passive:
            chosen, templated = _chosen(http, prompt_file, requests)
        expected = None if due is None else accept.Expected(due, tolerance)
        report = accept.measure(http, chosen, max_tokens=max_tokens, at_once=at_once, expected=expected)
    if as_json:
        click.echo(json.dumps({**report.as_json(), "chat_template": templated, "expected_length": due}, indent=2))
    else:
        _show(report, templated)
    return int(not report.ok)


def _chosen(http: Any, prompt_file: Path | None, requests: int) -> tuple[list[Prompt], bool]:
    if prompt_file is not None:
        found = prompts.from_file(prompt_file)
    elif server_info(http).takes_ids_only:
        found = prompts.random_ids(requests, 16, seed=0)
    else:
        found = prompts.built_in()
    return prompts.for_server(http, [found[i % len(found)] for i in range(requests)])


def _of_score(path: Path) -> float:
    try:
        return float(read_json(path)["acceptance_length"])
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(
            f"{path} is no score with an 'acceptance_length' ({error}); give the JSON of `hidden-states score`"
        ) from error


def _show(report: accept.Report, templated: bool) -> None:
    console = Console(highlight=False, soft_wrap=True)
    server = report.server
    console.print(
        escape(
            f"SGLang {server.release}, {server.algorithm or 'no speculation'}"
            + (
                f": {server.num_steps} steps, topk {server.topk}, {server.num_draft_tokens} draft tokens"
                if server.algorithm
                else ""
            )
        )
    )
    measured = report.measured
    if measured.steps:
        error = f" ± {report.standard_error:.2f}" if report.standard_error != float("inf") else ""
        console.print(f"acceptance length {measured.length:.2f}{error} ({measured.steps} steps of {report.requests} requests)")
    if measured.rates():
        table = Table(box=None, pad_edge=False)
        for name in ("position", "accepted", "if reached"):
            table.add_column(name, justify="right")
        for position, (rate, conditional) in enumerate(zip(measured.rates(), measured.conditional_rates(), strict=True), 1):
            table.add_row(str(position), f"{rate:.1%}", f"{conditional:.1%}")
        console.print(table)
    if server.mean_length is not None:
        console.print(f"the server's own mean, all requests: {server.mean_length:.2f}")
    if report.gauge is not None:
        console.print(f"the server's gauge, its last steps: {report.gauge:.2f}")
    if not templated:
        console.print("sent as plain text: this release's /tokenize takes no messages, so chat models accept less than in a chat")
    colour = "green" if report.ok else "red"
    console.print(f"[{colour}]{escape(report.verdict)}[/{colour}]")
