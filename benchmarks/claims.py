"""What this repository promises of its performance: measured by one command, recorded, and written into the tables.

    python benchmarks/claims.py cpu  [NAME ...]               # without a GPU; builds the two releases' environments that it needs
    python benchmarks/claims.py h200 [NAME ...] --into DIR    # on one GPU, where SGLang and this plugin are installed
    python benchmarks/claims.py take DIR                      # what the latter wrote, brought here
    python benchmarks/claims.py render [--check]              # the tables from the records

Records lie in `results/`: the figures with the machine, its load, the date and the command. A claim that was not measured again
keeps its record. `render` writes benchmarks/README.md, and the table between the marks in README.md; with --check it only compares.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
MARKS = ("<!-- figures, written by `python benchmarks/claims.py render` -->", "<!-- end of figures -->")

Figures = dict[str, Any]


@dataclass(frozen=True)
class Claim:
    """What is promised, how it is measured, and how its figures are told.

    Attributes:
        name: its file in `results/`.
        what: the row of the table.
        promise: in words; empty where a figure is only reported.
        command: argv after the interpreter, ``{python:RELEASE}`` first where an environment's own Python runs it, ``{out}`` a file.
        told: figures -> the measured column.
        holds: figures -> whether the promise is kept, or why the run can't tell; None where nothing is promised.
        shown: also in README.md.
        record: name of the claim whose run measures this one too.
    """

    name: str
    what: str
    promise: str
    command: tuple[str, ...]
    told: Callable[[Figures], str]
    holds: Callable[[Figures], bool | str] | None = None
    shown: bool = True
    record: str = ""

    @property
    def file(self) -> str:
        """The record it reads: its own, or that of the claim which is measured by the same run."""
        return self.record or self.name


def row(figures: Figures, configuration: str, before: int | None = None) -> Figures:
    """A configuration's row; of one that both halves of a run have, the first, or the last before a row."""
    found = [one for one in figures["rows"][:before] if one["configuration"] == configuration]
    return found[0 if before is None else -1]


ALIKE = 0.005
"""Engines of one configuration that differ by more are paced by something else on the host, and nothing is concluded from them."""


def unlike(figures: Figures, own: Figures) -> tuple[float, bool]:
    """By how much engines of one configuration differ, at most, and whether those are the ones that the ratio compares.

    Where it compares one engine with one other, all the run's are taken.
    """
    against = row(figures, own["against"], figures["rows"].index(own))
    compared = all(len(one["engines"]) > 1 for one in (own, against))
    found = [one["engines"] for one in ((own, against) if compared else figures["rows"]) if not one.get("failed")]
    return round(max(max(rates) / min(rates) - 1 for rates in found), 4), compared


def ratio(figures: Figures, configuration: str) -> str:
    own = row(figures, configuration)
    if "ratio" not in own:
        return "an engine failed"
    low, high = own["bounds"]
    apart, compared = unlike(figures, own)
    engines = f"like engines within {apart:.1%}" if compared else f"one engine each, and like ones differ by up to {apart:.1%}"
    return f"median {own['ratio']} of {own['rounds']} rounds ({own['confidence']:.0%}: {low} to {high}), {engines}"


def kept(figures: Figures, configuration: str, least: float) -> bool | str:
    """Whether a ratio is at least so much, with all of its interval or none; else what the run leaves open."""
    own = row(figures, configuration)
    if "ratio" not in own:
        return "the run can't tell"
    apart, compared = unlike(figures, own)
    if apart > ALIKE:
        return "the run can't tell"
    low, high = own["bounds"]
    if not compared:
        low, high = round(low * (1 - apart), 4), round(high * (1 + apart), 4)
    if low >= least or high < least:
        return bool(low >= least)
    said = "kept" if own["ratio"] >= least else "not kept"
    reach = f"down to {low}" if own["ratio"] >= least else f"up to {high}"
    return f"{said} by the median, what is uncertain reaches {reach}"


CPU = (
    Claim(
        "startup",
        "start of an interpreter that never imports SGLang",
        "at most 1 ms more",
        ("benchmarks/startup.py", "200"),
        lambda f: f"{f['added_ms']} ms more",
        lambda f: f["added_ms"] <= 1,
    ),
    *(
        Claim(
            f"activation-{release}",
            f"start of a scheduler, {release}",
            "at most 50 ms more",
            (f"{{python:{release}}}", "benchmarks/activation.py", "15"),
            lambda f: f"{f['added_ms']} ms more",
            lambda f: f["added_ms"] <= 50,
            shown=release == "0.5.23",
        )
        for release in ("0.5.9", "0.5.23")
    ),
    Claim(
        "debug-off",
        "a forward call while debug is off",
        "at most 1 µs more",
        ("benchmarks/debug_off.py",),
        lambda f: f"{f['tap_off_ns']:.0f} ns more",
        lambda f: f["tap_off_ns"] <= 1000,
    ),
    Claim(
        "doctor",
        "`doctor` on 200,000 tensors in 1,000 shards",
        "at most 1 s, 200 MiB",
        ("benchmarks/doctor_headers.py",),
        lambda f: f"{f['seconds']} s ({f['cpu_s']} s of processor time), {f['peak_mib']} MiB",
        lambda f: f["seconds"] <= 1 and f["peak_mib"] <= 200,
    ),
    Claim(
        "survey",
        "survey of every release's wheel, warm",
        "at most 60 s, 1 GiB",
        ("benchmarks/survey.py",),
        lambda f: f"{f['releases']} releases in {f['seconds']} s, {f['peak_mib']} MiB",
        lambda f: f["seconds"] <= 60 and f["peak_mib"] <= 1024,
    ),
    Claim(
        "patches-check",
        "every patch series against every release's wheel, warm",
        "at most 60 s",
        ("benchmarks/patches_check.py",),
        lambda f: f"{f['series']} x {f['wheels']} in {f['seconds']} s",
        lambda f: f["seconds"] <= 60,
    ),
)


def on_gpu(name: str, what: str, configuration: str, least: float | None = None) -> Claim:
    """A ratio of the one run on a GPU; the claim named ``h200`` is what runs it."""
    promise, holds = "", None
    if least is not None:
        promise, holds = f"at least {least}", lambda f: kept(f, configuration, least)
    command = ("benchmarks/h200.py", "{out}")
    return Claim(name, what, promise, command, lambda f: ratio(f, configuration), holds, record="" if name == "h200" else "h200")


def dumping(name: str, what: str, stages: str, times: Callable[[Figures], float], least: float) -> Claim:
    """A ratio of two stages of ``dump_server.py``; a claim that names no stages reads those of the one named ``dump``."""
    command = ("benchmarks/dump_server.py", "{out}", "--stages", stages)
    promise, record = f"at least {least:g} times", "" if stages else "dump"
    return Claim(name, what, promise, command, lambda f: f"{times(f):.2f} times", lambda f: times(f) >= least, record=record)


H200 = (
    on_gpu(
        "h200",
        "decode throughput on an H200, CUDA graphs on, target of 7.5e9: with the plugin, against not installed",
        "perfect draft, plugin",
        0.998,
    ),
    on_gpu(
        "h200-debug", "the same: `EAGLE3_DEBUG` reading every step, against off", "perfect draft, EAGLE3_DEBUG, every step", 0.97
    ),
    on_gpu(
        "h200-wiring",
        "the same: boundaries 0 and L captured, against inner ones",
        "perfect draft, plugin, boundaries 0 and L captured",
        0.995,
    ),
    on_gpu("h200-dump", "the same: dumping to disk, against no dump", "perfect draft, EAGLE3_DUMP_DIR"),
    on_gpu(
        "h200-graphs",
        "the same: `--disable-cuda-graph`, which debugging inside a model would need, against graphs",
        "perfect draft, --disable-cuda-graph",
    ),
    dumping(
        "dump",
        "prefill on an H200 while dumping to a tmpfs, against no dump",
        "off,memory,disk,write,drop,lists,save",
        lambda f: f["memory"]["tokens_s"] / f["off"]["tokens_s"],
        0.9,
    ),
    dumping(
        "dump-disk",
        "bytes dumped to its disk a second, against a plain sequential write there",
        "",
        lambda f: f["disk"]["written_bytes_s"] / f["write"]["bytes_s"],
        0.8,
    ),
    dumping(
        "dump-lists",
        "samples dumped to its disk a second, against `return_hidden_states` over HTTP",
        "",
        lambda f: f["disk"]["acknowledged_samples_s"] / f["lists"]["samples_s"],
        10,
    ),
    dumping(
        "dump-durable",
        "the same, against a synchronous `torch.save` a forward that is as durable: out of reach, `benchmarks/dump.md`",
        "disk,save-fsync,memory-save",
        lambda f: f["disk"]["acknowledged_samples_s"] / f["save-fsync"]["samples_s"],
        10,
    ),
)


def measure(claim: Claim) -> Figures:
    """Run one, and return its record.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch, "out.json")
        argv = [_python(word) if word.startswith("{python:") else word.format(out=out) for word in claim.command]
        if not claim.command[0].startswith("{python:"):
            argv = [sys.executable, *argv]
        load = os.getloadavg()[0]
        done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT)
        figures = json.loads(out.read_text() if out.exists() else done.stdout.splitlines()[-1])
    return {
        "command": _shown(claim),
        "date": datetime.datetime.now(tz=datetime.timezone.utc).date().isoformat(),
        "machine": _machine(),
        "load": round(load, 1),
        "figures": figures,
    }


def _python(word: str) -> str:
    from sglang_eagle3_plugin.rig import environments, installing

    environment = environments.ensure(word[len("{python:") : -1], print)
    installing.install_plugin(environment)
    return str(environment.python)


def _shown(claim: Claim) -> str:
    words = ["OUT.json" if word == "{out}" else word for word in claim.command if not word.startswith("{python:")]
    release = claim.command[0].removeprefix("{python:").removesuffix("}") if claim.command[0].startswith("{python:") else ""
    return shlex.join(["python", *words]) + (f" (Python of {release})" if release else "")


def _machine() -> str:
    gpu = ""
    try:
        asked = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        names = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split("\n")
        gpu = f"{names[0]}, "
    except (OSError, subprocess.CalledProcessError):
        pass
    return f"{gpu}{os.cpu_count()} cores, Python {platform.python_version()}"


def record(place: Path, name: str, told: Figures) -> None:
    place.mkdir(parents=True, exist_ok=True)
    (place / f"{name}.json").write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


def run(claims: tuple[Claim, ...], names: list[str], place: Path) -> int:
    """Measure those named, or all; go on where one fails."""
    measured = {claim.name: claim for claim in claims if not claim.record}
    if unknown := set(names) - measured.keys():
        print(f"{', '.join(sorted(unknown))}: no such measurement; name some of {', '.join(measured)}", file=sys.stderr)
        return 2
    failed = []
    for claim in measured.values():
        if names and claim.name not in names:
            continue
        print(f"{claim.name}: {_shown(claim)}", flush=True)
        try:
            told = measure(claim)
        except subprocess.CalledProcessError as error:
            failed.append(claim.name)
            print(f"{claim.name}: failed, exit status {error.returncode}", flush=True)
            continue
        record(place, claim.name, told)
        print(f"{claim.name}: {claim.told(told['figures'])} ({claim.promise or 'no promise'})", flush=True)
    return 1 if failed else 0


def recorded() -> dict[str, Figures]:
    found = {claim.file: RESULTS / f"{claim.file}.json" for claim in CPU + H200}
    return {name: json.loads(path.read_text(encoding="utf-8")) for name, path in found.items() if path.exists()}


def table(shown_only: bool) -> str:
    lines = ["| what | promised | measured |", "|---|---|---|"]
    if not shown_only:
        lines = ["| what | promised | measured | with | on |", "|---|---|---|---|---|"]
    records = recorded()
    for claim in CPU + H200:
        if claim.file not in records or (shown_only and not claim.shown):
            continue
        told = records[claim.file]
        holds = claim.holds is None or claim.holds(told["figures"])
        said = "" if holds is True else f" (**{holds or 'not kept'}**)"
        cells = [claim.what, claim.promise, claim.told(told["figures"]) + said]
        if not shown_only:
            load = f", load {told['load']}" if "load" in told else ""
            cells += [f"`{told['command']}`", f"{told['date']}, {told['machine']}{load}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def throughput() -> str:
    """The rows of the run on a GPU."""
    told = recorded().get("h200")
    if told is None:
        return ""
    found = told["figures"]
    lines = [
        "\n## Decode throughput on one GPU, one run\n",
        f"{found['device']}, SGLang {found['sglang']}, torch {found['torch']}, {found['model']} (7.5e9 parameters); CUDA graphs",
        f"on, batch 1, num_steps 3, topk 1, {found['tokens']} tokens a generation, every configuration in turn. {told['date']},",
        f"`{told['command']}`. Not installed means here: {found['not_installed']}.",
        "A ratio is the median of the rounds'; it lies between the bounds beside it with that confidence. The plugin has two rows,",
        "since not all engines fit at once. The target always says one token; so does a perfect draft, and a random one never.",
        f"The dump wrote {found['files_dumped']} files, debug {found['debug_lines']} lines.\n",
        "| served | tokens/s (least to most) | each engine's | `spec_accept_length` | ratio | rounds | to |",
        "|---|---|---|---|---|---|---|",
        *map(_throughput_row, found["rows"]),
    ]
    return "\n".join(lines) + "\n"


def _throughput_row(one: Figures) -> str:
    if one.get("failed"):
        return f"| {one['configuration']} | failed | | | | | |"
    told = f"{one['ratio']} ({one['confidence']:.0%}: {one['bounds'][0]} to {one['bounds'][1]})" if "ratio" in one else ""
    length = f"{one['spec_accept_length']:.2f}" if one["spec_accept_length"] else ""
    spread = f"{one['tokens_per_s']} ({one['range'][0]} to {one['range'][1]})"
    cells = (one["configuration"], spread, ", ".join(map(str, one["engines"])), length, told, one["rounds"], one.get("against", ""))
    return "| " + " | ".join(map(str, cells)) + " |"


def pages() -> dict[Path, str]:
    """Each page that holds figures, as the records have them."""
    own = (
        "# What is measured\n\nWritten by `python benchmarks/claims.py render` from `results/`; `claims.py cpu` and"
        " `claims.py h200` measure again.\n\n" + table(shown_only=False) + throughput()
    )
    others = sorted(path.name for path in (ROOT / "benchmarks").glob("*.md") if path.name != "README.md")
    own += "\nIn more detail: " + ", ".join(f"[{name}]({name})" for name in others) + ".\n"
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    begin, end = MARKS
    if begin in readme:
        before, _, rest = readme.partition(begin)
        readme = f"{before}{begin}\n\n{table(shown_only=True)}\n{end}{rest.partition(end)[2]}"
    return {ROOT / "benchmarks" / "README.md": own, ROOT / "README.md": readme}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="what", required=True)
    cpu = commands.add_parser("cpu")
    h200 = commands.add_parser("h200")
    for one in (cpu, h200):
        one.add_argument("names", nargs="*")
    h200.add_argument("--into", type=Path, default=RESULTS)
    commands.add_parser("take").add_argument("place", type=Path)
    commands.add_parser("render").add_argument("--check", action="store_true")
    asked = parser.parse_args()
    code = 0
    if asked.what == "h200":
        return run(H200, asked.names, asked.into)
    if asked.what == "cpu":
        code = run(CPU, asked.names, RESULTS)
    if asked.what == "take":
        brought = {claim.file: path for claim in H200 if (path := asked.place / f"{claim.file}.json").exists()}
        if not brought:
            print(f"{asked.place} holds no record of claims.py h200", file=sys.stderr)
            return 2
        for name, path in brought.items():
            record(RESULTS, name, json.loads(path.read_text(encoding="utf-8")))
    for path, text in pages().items():
        if asked.what == "render" and asked.check:
            if not path.exists() or path.read_text(encoding="utf-8") != text:
                print(f"{path.relative_to(ROOT)} differs from the records; run python benchmarks/claims.py render")
                code = 1
        else:
            path.write_text(text, encoding="utf-8")
    return code


if __name__ == "__main__":
    sys.exit(main())
