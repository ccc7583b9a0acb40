"""`sglang-eagle3 bench`."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from itertools import zip_longest
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from sglang_eagle3_plugin.bench import plan, report, run
from sglang_eagle3_plugin.bench.store import Store
from sglang_eagle3_plugin.cli.options import SECONDS
from sglang_eagle3_plugin.errors import UserError
from sglang_eagle3_plugin.server import prompts
from sglang_eagle3_plugin.server.address import parse

_SWEEP_STEPS = "1,2,3,5,7"
_EAGLE = "eagle3"


@click.command(name="bench", context_settings={"ignore_unknown_options": False})
@click.option("--target", type=click.Path(path_type=Path), help="The target's directory.")
@click.option("--draft", type=click.Path(path_type=Path), help="The draft's directory.")
@click.option("--python", default=sys.executable, help="The interpreter that has SGLang.  [default: this one]")
@click.option("--baseline-url", metavar="URL", help="A running server without a draft; none is started then.")
@click.option("--eagle-url", metavar="URL", help="A running server with one.")
@click.option("--sweep", is_flag=True, help=f"Try steps {_SWEEP_STEPS}, unless --num-steps says others.")
@click.option("--num-steps", metavar="LIST", help="Draft steps to try, like 1,3,5.  [default: 3]")
@click.option("--topk", default="1", show_default=True, metavar="LIST", help="Beams to try.")
@click.option("--num-draft-tokens", metavar="LIST", help="Sizes of the tree to try where topk is above 1.")
@click.option("--batch", default="1,8", show_default=True, metavar="LIST", help="Requests under way together.")
@click.option(
    "--requests", default=16, show_default=True, type=click.IntRange(1), help="Requests a run, at least; and two a batch slot."
)
@click.option("--max-tokens", default=128, show_default=True, type=click.IntRange(4), help="Tokens of every answer.")
@click.option("--repeats", default=5, show_default=True, type=click.IntRange(1), help="Runs of each, after a warm-up.")
@click.option("--seed", default=0, show_default=True, help="Of the random prompts for a server without a tokenizer.")
@click.option("--prompts", "prompt_file", type=click.Path(path_type=Path), help="JSON lines with text, messages or input_ids.")
@click.option("--out", default="eagle3-bench", show_default=True, type=click.Path(path_type=Path), help="Where everything goes.")
@click.option("--start-timeout", default=1800.0, show_default=True, type=SECONDS, help="Seconds a server may take to start.")
@click.option("--api-key", envvar="SGLANG_API_KEY", help="For running servers that want one.  [env: SGLANG_API_KEY]")
@click.option("--json", "as_json", is_flag=True, help="Print report.json instead of report.md.")
@click.argument("flags", nargs=-1, type=click.UNPROCESSED)
def command(flags: tuple[str, ...], **given: Any) -> int:
    """Measure a target with and without its draft: the same prompts, tokens per second, first token, acceptance.

    Starts `sglang.launch_server` once for the baseline and once for each draft setting; FLAGS after `--` go to all of them.
    Writes report.md, report.json and report.png to --out, and goes on where it stopped when it is run again.
    Exit status 1 when EAGLE-3 pays at no batch size.
    """
    job, about = _job(given, flags)
    out: Path = given["out"]
    store = Store(out, _identity(job, about))
    total = (1 + len(job.settings) if not job.urls else len(job.urls)) * len(job.batches) * job.repeats
    with _display(store, total) as say:
        run.run(job, store, out / "logs", say)
    found = report.findings(store, about)
    store.close()
    plot = _draw(found, out / "report.png")
    text, data = report.as_markdown(found, plot), json.dumps(report.as_json(found), indent=2)
    _write(out / "report.md", text)
    _write(out / "report.json", data + "\n")
    click.echo(data if given["as_json"] else text)
    return int(not found.pays)


def _job(given: dict[str, Any], flags: tuple[str, ...]) -> tuple[run.Job, dict[str, Any]]:
    urls = {name: url for name, url in ((plan.BASELINE, given["baseline_url"]), (_EAGLE, given["eagle_url"])) if url}
    if urls:
        if len(urls) < 2:
            raise click.UsageError("give --baseline-url and --eagle-url together")
        if given["sweep"] or given["num_steps"] or flags:
            raise click.UsageError("a running server has its settings already: leave out --sweep, --num-steps and flags")
        urls = {name: parse(url).url for name, url in urls.items()}
    elif not (given["target"] and given["draft"]):
        raise click.UsageError("give --target and --draft, or --baseline-url and --eagle-url")
    steps = plan.numbers(given["num_steps"] or (_SWEEP_STEPS if given["sweep"] else "3"), "--num-steps")
    tokens = plan.numbers(given["num_draft_tokens"], "--num-draft-tokens") if given["num_draft_tokens"] else []
    settings = [] if urls else plan.settings(steps, plan.numbers(given["topk"], "--topk"), tokens)
    for name in ("target", "draft"):
        if not urls and not given[name].is_dir():
            raise UserError(f"--{name} {given[name]} is no directory")
    job = run.Job(
        batches=plan.numbers(given["batch"], "--batch"),
        repeats=given["repeats"],
        requests=given["requests"],
        max_tokens=given["max_tokens"],
        seed=given["seed"],
        prompts=prompts.from_file(given["prompt_file"]) if given["prompt_file"] else None,
        settings=settings,
        target=str(given["target"].resolve()) if given["target"] else "",
        draft=str(given["draft"].resolve()) if given["draft"] else "",
        python=given["python"],
        flags=flags,
        start_timeout_s=given["start_timeout"],
        urls=urls,
        api_key=_key(flags) or given["api_key"],
    )
    about = {
        "target": job.target or urls[plan.BASELINE],
        "draft": job.draft or urls[_EAGLE],
        "max_tokens": job.max_tokens,
        "seed": job.seed,
        "hardware": report.hardware() if all(parse(url).is_loopback for url in urls.values()) else "machines that were not asked",
        "date": datetime.now().date().isoformat(),
        "command": report.command_line(_without_key(sys.argv[1:])),
    }
    return job, about


def _identity(job: run.Job, about: dict[str, Any]) -> dict[str, Any]:
    """What must be the same for measurements to be comparable. Settings, batch sizes and repeats may be added later."""
    sent = hashlib.sha256(json.dumps(job.prompts).encode()).hexdigest()[:16] if job.prompts else "built in"
    same = {key: about[key] for key in ("target", "draft", "max_tokens", "seed", "hardware")}
    files = {f"{name}'s files": _files(Path(path)) for name, path in (("target", job.target), ("draft", job.draft)) if path}
    started = {"python": job.python, "flags": _without_key(list(job.flags)), "urls": job.urls}
    return {**same, **files, "prompts": sent, "requests": job.requests, **started}


def _files(directory: Path) -> str:
    """Tells a checkpoint from one trained since in its place: its JSON files, names, sizes and times of its weights."""
    said = hashlib.sha256()
    for path in sorted(directory.glob("*.json")):
        said.update(path.read_bytes())
    for path in sorted(path for path in directory.glob("*") if path.suffix in (".safetensors", ".bin", ".pt")):
        said.update(f"{path.name} {path.stat().st_size} {path.stat().st_mtime_ns}".encode())
    return said.hexdigest()[:16]


def _draw(found: report.Findings, path: Path) -> str | None:
    from sglang_eagle3_plugin.bench import plot

    try:
        plot.save(found, path)
    except UserError as error:
        click.echo(f"no plot: {error}", err=True)
        return None
    return path.name


@contextmanager
def _display(store: Store, total: int) -> Iterator[Callable[[str], None]]:
    console = Console(stderr=True, highlight=False)
    if not (sys.stderr.isatty() and console.is_terminal):
        yield lambda text: click.echo(f"{datetime.now():%H:%M:%S} {text}", err=True)
        return
    columns = [
        BarColumn(bar_width=12),
        TextColumn("{task.completed}/{task.total}"),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    ]
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=total)

        def say(text: str) -> None:
            done = len(store.measurements)
            progress.update(task, description=text, completed=min(done, total))

        yield say


def _write(path: Path, text: str) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    Path(name).chmod(0o644)
    Path(name).replace(path)


def _key(flags: Sequence[str]) -> str | None:
    """The one that servers started here will want."""
    for word, following in zip_longest(flags, flags[1:]):
        if word == "--api-key" or word.startswith("--api-key="):
            return following if word == "--api-key" else word.partition("=")[2]
    return None


def _without_key(argv: list[str]) -> list[str]:
    found, hide = [], False
    for word in argv:
        found.append("***" if hide else "--api-key=***" if word.startswith("--api-key=") else word)
        hide = word == "--api-key"
    return found
