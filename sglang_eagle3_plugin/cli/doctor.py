"""`sglang-eagle3 doctor`."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sglang_eagle3_plugin.checkpoints import read_json
from sglang_eagle3_plugin.cli.options import settings_here
from sglang_eagle3_plugin.cli.untrusted import escape
from sglang_eagle3_plugin.doctor import described, examine, fix, load
from sglang_eagle3_plugin.doctor.deployment import Deployment
from sglang_eagle3_plugin.doctor.findings import Finding, for_json, verdict
from sglang_eagle3_plugin.doctor.flags import parse
from sglang_eagle3_plugin.doctor.wiring import as_json
from sglang_eagle3_plugin.errors import UserError
from sglang_eagle3_plugin.settings import Settings

if TYPE_CHECKING:
    from rich.console import Console

_COLOURS = {"error": "red", "warning": "yellow", "note": "dim"}
_HEADLINE = {"ok": "[green]ok[/green]", "warn": "[yellow]warn[/yellow]", "error": "[red]error[/red]"}


@click.command(
    name="doctor",
    context_settings={"ignore_unknown_options": False},
    epilog="Exit status: 0 clean or notes, 1 findings, 2 bad input.",
)
@click.option("--target", metavar="PATH", help="Directory, .safetensors file, or id of a repository in the Hugging Face cache.")
@click.option("--draft", metavar="PATH", help="The same, for the draft.")
@click.option("--release", metavar="R", help="Judge this SGLang release, unpatched; default: the one installed here, as it stands.")
@click.option("--sglang", "source", type=click.Path(path_type=Path), help="Read classes from this source tree: a fork.")
@click.option("--plugin/--no-plugin", default=None, help="Whether this plugin is active in the server that is judged.")
@click.option("--observed", metavar="TEXT", default="", help="What was seen: an error text, widths, an acceptance length.")
@click.option("--log", type=click.Path(path_type=Path), help="A server's log, for the same purpose.")
@click.option("--trained", metavar="K,K,K", help="Boundaries that the draft is known to have been trained on.")
@click.option("--engine", type=click.Choice(["sglang", "vllm", "llama.cpp"]), default="sglang", help="What reads the draft's ids.")
@click.option("--collect-tokens", type=click.IntRange(min=0), help="Tokens whose hidden states are to be dumped.")
@click.option("--states", type=click.Path(path_type=Path), help="A directory of dumped hidden states.")
@click.option("--case", type=click.Path(path_type=Path), help="A JSON description in place of files, as from an issue thread.")
@click.option(
    "--fix-config", "out", type=click.Path(path_type=Path), help="Write a corrected draft config here, never over a file."
)
@click.option("--json", "as_json_", is_flag=True, help='{"verdict", "findings": [{"id", "severity", ...}], "wiring"}.')
@click.argument("launch_flags", nargs=-1, type=click.UNPROCESSED, metavar="[-- LAUNCH_SERVER_FLAGS]")
def command(
    target: str | None,
    draft: str | None,
    release: str | None,
    source: Path | None,
    plugin: bool | None,
    observed: str,
    log: Path | None,
    trained: str | None,
    engine: str,
    collect_tokens: int | None,
    states: Path | None,
    case: Path | None,
    out: Path | None,
    as_json_: bool,
    launch_flags: tuple[str, ...],
) -> int:
    """Find a wiring fault in a target, a draft and launch flags before the model loads.

    Reads configs and safetensors headers, never weights. Flags of launch_server follow a double dash.
    """
    if out is not None and os.path.lexists(out):
        raise UserError(f"{out} exists and is not overwritten; give --fix-config another path")
    environ = dict(os.environ)
    settings_here()
    if case is not None:
        if target or draft:
            raise click.UsageError("--case stands in place of --target and --draft")
        d = described.deployment(read_json(case))
        d.environ = {**environ, **d.environ}
    else:
        flags = parse(launch_flags)
        named = load.named_by(flags)
        target, draft = target or named[0], draft or named[1]
        if not target and not draft and not flags.given and not observed and not log:
            raise click.UsageError("give --target and --draft, or launch flags that name them")
        d = Deployment(flags=flags, environ=environ)
        d.target = load.target(target, environ) if target else None
        d.draft = load.draft(draft, environ, flags.text("--speculative-draft-model-revision")) if draft else None
    _judge(d, release, source, plugin)
    d.observed = "\n".join(filter(None, (d.observed, observed, _tail(log))))
    d.engine = d.engine if case is not None and engine == "sglang" else engine
    d.collect_tokens = d.collect_tokens if collect_tokens is None else collect_tokens
    d.states, d.trained = states, _boundaries(trained)
    findings = examine(d)
    changed = _write_fix(d, findings, out) if out is not None else []
    result = verdict(findings)
    if as_json_:
        click.echo(json.dumps({"verdict": result, "findings": for_json(findings), "wiring": as_json(d)}, indent=2))
    else:
        _show(d, result, findings, out, changed)
    return 0 if result == "ok" else 1


def _judge(d: Deployment, release: str | None, source: Path | None, plugin: bool | None) -> None:
    """Settle which SGLang is judged: the one asked for, stock; else the one installed here, with us in it if we are active."""
    if release is not None:
        d.release = release
    if source is not None:
        d.source = load.source_tree(source)
    if d.release is None and d.source is None:
        d.release, d.source = load.installed()
        d.plugin = d.release is not None and Settings.from_environment(d.environ).active
    if plugin is not None:
        d.plugin = plugin


def _boundaries(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UserError(f"--trained {text!r} is no list of boundaries like 2,30,58") from None


def _tail(log: Path | None) -> str:
    if log is None:
        return ""
    try:
        with log.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 100_000))
            return file.read(100_000).decode("utf-8", "replace")
    except OSError as error:
        raise UserError(f"{log} cannot be read ({error.strerror})") from error


def _write_fix(d: Deployment, findings: Sequence[Finding], out: Path) -> list[str]:
    if d.draft is None:
        raise UserError("--fix-config corrects a draft's config; give --draft")
    config, changed = fix.corrected(d.draft.config, findings)
    if changed:
        fix.write(config, out)
    return changed


def _show(d: Deployment, result: str, findings: Sequence[Finding], out: Path | None, changed: Sequence[str]) -> None:
    # Here, not above: --json needs no rich, and starts a quarter faster without.
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    counts = [(s, sum(f.severity == s for f in findings)) for s in ("error", "warning", "note")]
    said = ", ".join(f"{n} {s}{'s' if n > 1 else ''}" for s, n in counts if n)
    console.print(f"[bold]{_HEADLINE[result]}[/bold]: {said or 'nothing found'}")
    _show_wiring(console, as_json(d))
    for finding in findings:
        colour = _COLOURS[finding.severity]
        sure = "" if finding.sure == "certain" else f" ({finding.sure})"
        console.print(f"\n[{colour}]{finding.severity}[/{colour}] [bold]{finding.id}[/bold]{sure}")
        console.print(f"  {escape(finding.message)}")
        for e in finding.evidence:
            console.print(f"  [dim]evidence: {escape(f'{e.file}: {e.field} = {e.value}')}[/dim]")
        if finding.fix:
            console.print(f"  fix: {escape(finding.fix)}")
        if finding.tags:
            console.print(f"  [dim]{escape(' '.join(finding.tags))}[/dim]")
    if out is not None:
        console.print(
            escape(f"\nwritten: {out} (changed: {', '.join(changed)})" if changed else "\nnothing to correct in the draft config")
        )


def _show_wiring(console: Console, w: dict[str, Any]) -> None:
    if w["wanted"] is not None:
        console.print(escape(f"  wanted boundaries    {w['wanted']}  ({w['convention']}, by {w['decided_by']})"))
    for name, boundaries in w["readings"].items():
        console.print(escape(f"  if ids mean {name:<9}{boundaries}"))
    if w["stock"] is not None:
        graph, eager = w["stock"]["cuda_graph"], w["stock"]["eager"]
        rows = {"captured": eager} if graph == eager else {"captured in graphs": graph, "captured eagerly": eager}
        for name, row in rows.items():
            console.print(escape(f"  {name:<21}{row}  (SGLang {w['release']}, unpatched)"))
