"""`sglang-eagle3 hidden-states`: info, dump, extract, verify, export, compare, score."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from sglang_eagle3_plugin.cli import dump as dump_commands
from sglang_eagle3_plugin.cli.options import SECONDS
from sglang_eagle3_plugin.cli.untrusted import escape
from sglang_eagle3_plugin.errors import UserError
from sglang_eagle3_plugin.server.address import parse

_DIRECTORY = click.Path(path_type=Path)
_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group(name="hidden-states")
def command() -> None:
    """Hidden states from a live server: look at a dump, check it, make training data of it, compare wirings."""
    try:
        import numpy  # noqa: F401
    except ImportError as error:
        raise UserError("hidden-states needs numpy; install sglang-eagle3-plugin[hidden-states]") from error


command.add_command(dump_commands.command)


@command.command()
@click.argument("dump", type=_DIRECTORY)
@_json
def info(dump: Path, as_json: bool) -> int:
    """Say what is in DUMP, a directory that EAGLE3_DUMP_DIR named."""
    from sglang_eagle3_plugin.hidden_states.reader import Dump

    opened = Dump.open(dump)
    unique = opened.unique()
    headers = list(dict.fromkeys(ref.header for ref in opened.refs))
    facts = {
        "samples": len(opened.refs),
        "sequences": len(unique),
        "tokens": sum(ref.tokens for ref in unique),
        "bytes": sum(size for size, _ in opened.shards.values()),
        "shards": len(opened.shards),
        "with_loss_mask": sum(ref.key in opened.masks for ref in unique),
        "counts": opened.counts,
        "unacknowledged": opened.unacknowledged(),
        "problems": opened.problems,
        "headers": [header.to_json() for header in headers],
    }
    if as_json:
        click.echo(json.dumps(facts, indent=2))
        return 0
    click.echo(f"{facts['samples']} samples of {facts['sequences']} sequences, {facts['tokens']} tokens")
    click.echo(f"{facts['shards']} shards, {_size(facts['bytes'])}; {facts['with_loss_mask']} sequences with a loss mask")
    for header in headers:
        boundaries = ", ".join(map(str, header.boundaries))
        click.echo(f"boundaries {boundaries} of {header.num_layers} layers, {header.hidden_size} wide, {header.dtype}")
        click.echo(f"final: {header.final.replace('_', ' ')}; {header.architecture} {header.model}")
        click.echo(f"SGLang {header.sglang}, plugin {header.plugin}, {header.created}")
    for name, count in sorted(opened.counts.items()):
        click.echo(f"{name.replace('_', ' ')}: {count}")
    for problem in opened.problems:
        click.echo(problem)
    return 0


@command.command()
@click.option("--url", help="A server of this machine, started with EAGLE3_DUMP_DIR.")
@click.option("--target", metavar="DIR", help="Without --url: start SGLang for this target, and end it afterwards.")
@click.option("--data", type=_DIRECTORY, required=True, help="JSON lines or Parquet: messages, conversations, text or input_ids.")
@click.option("--dump", type=_DIRECTORY, required=True, help="The server's EAGLE3_DUMP_DIR.")
@click.option("--tokenizer", metavar="DIR", help="For chats and texts; the server's own unless given.")
@click.option("--max-length", type=click.IntRange(1), help="Cut longer sequences.")
@click.option("--concurrency", type=click.IntRange(1, 1024), default=8, show_default=True, help="Requests at a time.")
@click.option(
    "--start-timeout", default=1800.0, show_default=True, type=SECONDS, help="Seconds that a server started here may take."
)
@click.argument("flags", nargs=-1, type=click.UNPROCESSED)
@_json
def extract(url: str | None, target: str | None, flags: tuple[str, ...], start_timeout: float, dump: Path, **given: Any) -> int:
    """Have a server dump a data set, each sequence once; interrupted, run it again and it goes on.

    With --target a server is started here, with FLAGS after `--` and the EAGLE3_DUMP_ variables that are set.
    Exit status 1 when some sequences are still missing.
    """
    if bool(url) == bool(target):
        raise click.UsageError("give --url, or --target to have a server started")
    if url:
        if flags:
            raise click.UsageError("flags go to a server that is started here; give --target, or leave them out")
        return _extract(parse(url).url, dump, **given)
    from sglang_eagle3_plugin.cli.wait import display
    from sglang_eagle3_plugin.hidden_states import dataset
    from sglang_eagle3_plugin.hidden_states.launch import serving

    dataset.needs_tokenizer(given["data"])  # a file that can't be read is told before a model is loaded
    with ExitStack() as stack:
        with display(str(target)) as on_look:
            started = stack.enter_context(serving(str(target), dump, flags, timeout_s=start_timeout, on_look=on_look))
        return _extract(started, dump, **given)


def _extract(
    url: str, dump: Path, data: Path, tokenizer: str | None, max_length: int | None, concurrency: int, as_json: bool
) -> int:
    from sglang_eagle3_plugin.hidden_states import dataset
    from sglang_eagle3_plugin.hidden_states import extract as extraction

    extraction.check_directory(dump)
    chosen = tokenizer or extraction.server_info(url).get("tokenizer_path")
    loaded = dataset.load_tokenizer(str(chosen)) if dataset.needs_tokenizer(data) else None
    with _progress("extracting", 0) as advance:
        done = extraction.extract(
            url,
            dataset.read(data, loaded, max_length),
            dump,
            concurrency=concurrency,
            progress=lambda there, all_: advance(there, all_),
        )
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(done), indent=2))
    else:
        rate = done.tokens / done.seconds if done.seconds else 0.0
        click.echo(
            f"{done.added} sequences added, {done.present} were there, {done.duplicates} rows repeat others; {rate:.0f} tokens/s"
        )
        for reason, times in done.failed.items():
            click.echo(f"{times} times: {reason}")
        if done.missing:
            shown = ", ".join(done.missing[:5])
            more = f" and {len(done.missing) - 5} more" if len(done.missing) > 5 else ""
            click.echo(f"{len(done.missing)} sequences are missing: {shown}{more}. `hidden-states info` says what was refused.")
    return int(bool(done.missing))


@command.command()
@click.argument("dump", type=_DIRECTORY)
@_json
def verify(dump: Path, as_json: bool) -> int:
    """Check every sample of DUMP: checksums, counts, order, identity, non-finite and all-zero states.

    Exit status 1 when something is wrong.
    """
    from sglang_eagle3_plugin.hidden_states import verify as checks
    from sglang_eagle3_plugin.hidden_states.reader import Dump

    opened = Dump.open(dump)
    with _progress("verifying", len(opened.refs)) as advance:
        findings = checks.verify(opened, advance)
    if as_json:
        facts = {"samples": len(opened.refs), "findings": [finding.to_json() for finding in findings], "counts": opened.counts}
        click.echo(json.dumps(facts, indent=2))
    else:
        for finding in findings:
            click.echo(f"{finding.where}: {finding.what}")
        click.echo(f"{len(opened.refs)} samples, {len(findings)} findings")
    return int(bool(findings))


@command.command()
@click.argument("dump", type=_DIRECTORY)
@click.option("--to", "target_format", type=click.Choice(["specforge", "speculators", "pt"]), required=True)
@click.option("--out", type=_DIRECTORY, required=True, help="A new directory, or an earlier export to go on with.")
@_json
def export(dump: Path, target_format: str, out: Path, as_json: bool) -> int:
    """Make training data of DUMP: each sequence once, its loss mask from `extract`."""
    from sglang_eagle3_plugin.hidden_states import export as exports
    from sglang_eagle3_plugin.hidden_states.reader import CorruptShardError, Dump

    opened = Dump.open(dump)
    try:
        with _progress("exporting", len(opened.unique())) as advance:
            done = exports.export(opened, target_format, out, advance)
    except CorruptShardError as error:
        raise UserError(f"{error}; see `sglang-eagle3 hidden-states verify`") from error
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(done)))
    else:
        click.echo(f"{done.written} samples written to {out}" + (f", {done.present} were there" if done.present else ""))
    return 0


@command.command()
@click.option("--train", type=_DIRECTORY, required=True, help="What the draft was trained on: SpecForge, speculators, .pt, a dump.")
@click.option("--capture", type=_DIRECTORY, required=True, help="A dump of the server, best of all boundaries.")
@click.option("--served", metavar="B,B,B", help="The boundaries the server feeds the draft, if the dump has others too.")
@_json
def compare(train: Path, capture: Path, served: str | None, as_json: bool) -> int:
    """Say which boundary each training slot really is, and whether the server captures the same.

    Exit status 1 when it does not.
    """
    from sglang_eagle3_plugin.hidden_states import compare as comparison
    from sglang_eagle3_plugin.hidden_states import training

    _, trained = training.read(train)
    header, captured = training.read(capture)
    if header is None:
        raise UserError(f"{capture} is no dump, and only a dump says which boundaries it holds; give one as --capture")
    result = comparison.compare(trained, captured, header, _boundaries(served))
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(result), indent=2))
    else:
        _show_errors(result)
        for sentence in result.verdict:
            click.echo(sentence)
        if result.config:
            click.echo(json.dumps({"eagle_config": result.config}))
    return int(not result.right)


@command.command()
@click.option("--draft", type=_DIRECTORY, required=True, help="The draft's directory.")
@click.option("--data", type=_DIRECTORY, required=True, help="A dump, or a trainer's data, of the draft's boundaries.")
@click.option("--target", type=_DIRECTORY, help="The target's directory: lends embedding and head as SGLang does.")
@click.option("--steps", type=click.IntRange(1, 32), default=3, show_default=True, help="As --speculative-num-steps.")
@click.option("--topk", type=click.IntRange(1), default=4, show_default=True, help="Guesses that count as near.")
@click.option("--device", default="cpu", show_default=True, help="A torch device.")
@_json
def score(draft: Path, data: Path, target: Path | None, steps: int, topk: int, device: str, as_json: bool) -> int:
    """Run a draft on dumped states and say which acceptance length it would have in the server."""
    from sglang_eagle3_plugin.hidden_states import score as scores
    from sglang_eagle3_plugin.hidden_states import training
    from sglang_eagle3_plugin.hidden_states.reader import CorruptShardError

    header, states = training.read(data)
    try:
        with _progress("scoring", None) as advance:
            result = scores.score(draft, states, target, steps=steps, k=topk, device=device, progress=advance)
    except CorruptShardError as error:
        raise UserError(f"{error}; see `sglang-eagle3 hidden-states verify`") from error
    facts = dataclasses.asdict(result) | {"boundaries": header and list(header.boundaries)}
    if as_json:
        click.echo(json.dumps(facts, indent=2))
        return 0
    click.echo(
        f"{result.sequences} sequences, {result.anchors} guesses" + (f", boundaries {facts['boundaries']}" if header else "")
    )
    for step, (first, near) in enumerate(zip(result.top1, result.topk, strict=True), 1):
        click.echo(f"step {step}: {first:6.1%} right, {near:6.1%} among the best {result.k}")
    click.echo(f"implied acceptance length {result.acceptance_length:.2f} with {steps} steps in a chain")
    if result.greedy_share is not None and result.greedy_share < 0.9:
        click.echo(f"The target itself would say only {result.greedy_share:.0%} of this text; score on what it generates.")
    return 0


def _show_errors(result: Any) -> None:
    table = Table(title=f"relative error over {result.samples} sequences")
    table.add_column("")
    for row in result.rows:
        table.add_column(row, justify="right")
    for j, column in enumerate(result.columns):
        cells = []
        for i in range(len(result.rows)):
            text = f"{result.errors[i][j]:.4f}"
            cells.append(f"[bold green]{text}[/bold green]" if result.matched[i] == column else text)
        table.add_row(escape(column), *cells)
    Console(highlight=False).print(table)


def _boundaries(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise UserError(f"--served {text!r} is not a comma-separated list of boundaries like 2,30,58") from error


def _size(count: Any) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:.1f} {unit}" if unit != "bytes" else f"{count} bytes"


class _Advance(Protocol):
    def __call__(self, done: int, total: int | None = None, /) -> None: ...


@contextmanager
def _progress(what: str, total: int | None) -> Iterator[_Advance]:
    """A bar on stderr when that is a terminal, else a line every ten seconds; yields a function that takes the number done."""
    if sys.stderr.isatty():
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(what, total=total)
            yield lambda done, all_=None: bar.update(task, completed=done, **({} if all_ is None else {"total": all_}))
        return
    started = said = time.monotonic()

    def line(done: int, all_: int | None = None) -> None:
        nonlocal said
        now = time.monotonic()
        if now - said >= 10:
            said = now
            of = f" of {all_ or total}" if all_ or total else ""
            click.echo(f"{what}: {done}{of}, {done / (now - started):.1f}/s", err=True)

    yield line
