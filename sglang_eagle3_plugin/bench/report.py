"""The findings as Markdown and as JSON."""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_eagle3_plugin.bench import analyse
from sglang_eagle3_plugin.bench.analyse import Row
from sglang_eagle3_plugin.bench.plan import BASELINE, Setting
from sglang_eagle3_plugin.bench.store import Store


@dataclass(frozen=True)
class Findings:
    """All that the reports say."""

    rows: list[Row]
    skipped: dict[tuple[str, int], str]
    servers: dict[str, dict[str, Any]]
    about: dict[str, Any]
    """Hardware, command, target, draft, seed: what someone needs to run it again."""
    flushed: bool = True
    """Whether every server emptied its prefix cache before every run."""

    @property
    def batches(self) -> list[int]:
        """The batch sizes measured, ascending."""
        return sorted({row.batch for row in self.rows})

    @property
    def pays(self) -> bool:
        """Whether some setting beats the baseline at some batch size, beyond the ranges."""
        return any(analyse.best(self.rows, batch).case != BASELINE for batch in self.batches)

    def reasons(self, row: Row) -> list[str]:
        """Why this row is slower than the baseline; empty where it is not, beyond the ranges."""
        if not analyse.loses(row):
            return []
        smallest = next(other for other in self.rows if other.case == row.case)
        graphs_off = bool(self.servers.get(row.case, {}).get("graphs_off"))
        return analyse.why_it_loses(row, graphs_off=graphs_off, smallest=smallest if smallest is not row else None)

    def flags(self, case: str) -> str:
        """The flags that serve a case, without the draft's path."""
        setting = Setting.named(case)
        return " ".join(["--speculative-algorithm EAGLE3", *setting.flags]) if setting else ""


def findings(store: Store, about: dict[str, Any]) -> Findings:
    """Put the measurements of a run together."""
    found = analyse.with_draft_shares(analyse.rows(store))
    flushed = all(measurement.flushed for measurement in store.measurements)
    return Findings(found, store.skipped, store.servers, about, flushed)


def as_json(found: Findings) -> dict[str, Any]:
    """Everything, for programs."""
    return {
        "about": found.about,
        "servers": found.servers,
        "rows": [_row_json(found, row) for row in found.rows],
        "skipped": [{"case": case, "batch": batch, "reason": why} for (case, batch), why in found.skipped.items()],
        "recommended": {str(batch): _recommended(found, batch) for batch in found.batches},
        "pays": found.pays,
        "prefix_cache_emptied": found.flushed,
        "stops_paying_at_batch": analyse.stops_paying(found.rows),
    }


def as_markdown(found: Findings, plot: str | None = None) -> str:
    """The same for people.

    Args:
        found: what was found.
        plot: file name of the plot, beside the report; None without one.
    """
    release = found.servers.get(BASELINE, {}).get("release", "unknown")
    lines = [
        "# EAGLE-3 against the baseline",
        "",
        f"SGLang {release} on {found.about['hardware']}, {found.about['date']}.",
        f"Target `{found.about['target']}`, draft `{found.about['draft']}`; {found.about['max_tokens']} tokens an answer, greedy,"
        f" seed {found.about['seed']}. Medians of the runs, least and most in brackets.",
        "",
        "    " + found.about["command"],
        "",
    ]
    for batch in found.batches:
        lines += [
            f"## {batch} at once" if batch > 1 else "## One at a time",
            "",
            *_table(found, batch),
            "",
            *_advice(found, batch),
            "",
        ]
    if (stop := analyse.stops_paying(found.rows)) is not None:
        lines += [f"**{_closing(found, stop)}**", ""]
    if any(_verdict(row) == _UNDECIDED for row in found.rows):
        # Ranges only grow with the runs of one store: more of them help where they vary less, or where there were fewer than three.
        lines += [f"What is {_UNDECIDED} is neither gain nor loss: a quieter machine and more `--repeats` may tell.", ""]
    if plot:
        lines += [f"![throughput against the baseline, acceptance by position]({plot})", ""]
    if found.skipped:
        lines += ["## Left out", "", *(f"- {case}, {batch} at once: {why}" for (case, batch), why in found.skipped.items()), ""]
    notes = _NOTES if found.flushed else [note.replace(_EMPTIED, _NOT_EMPTIED) for note in _NOTES]
    return "\n".join([*lines, *notes, ""])


_EMPTIED = "The prefix cache is emptied before each run."
_NOT_EMPTIED = "**A server would not empty its prefix cache: prompts of a run before may have been found in it.**"


_NOTES = [
    "## What the columns say",
    "",
    "- tokens/s: all tokens of all answers over the time of the run. × baseline: of the medians, with what the ranges allow.",
    f"- first token: median over the requests. {_EMPTIED}",
    "- length: tokens a verify step; by position: share of all steps that accepted the 1st, 2nd, ... draft.",
    "- step ×: time of a step over the baseline's time of a token. EAGLE-3 pays where the length is larger.",
    "- draft: estimated share of the draft in a step, from how the step grows with the number of steps; the rest is the verify"
    " and what lies between. A dash: only one length of chain was measured.",
    "- same: answers equal to the baseline's. A near tie can tip by rounding; few equal answers mean a fault.",
]


def hardware() -> str:
    """The GPUs as the driver names them, or the processor."""
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        try:
            done = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True)
            names = [line.strip() for line in done.stdout.splitlines() if line.strip()]
        except (OSError, subprocess.SubprocessError):  # a driver that hangs, or fails
            names = []
        if names:
            return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    try:
        cpus = [
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ]
    except OSError:
        cpus = []
    return f"{os.cpu_count()} cores of {cpus[0] if cpus else platform.processor() or platform.machine()}, no GPU"


def command_line(argv: Sequence[str]) -> str:
    """The command as it can be given again."""
    return shlex.join(["sglang-eagle3", *argv])


def _table(found: Findings, batch: int) -> list[str]:
    lines = [
        "| | tokens/s | × baseline | first token | length | by position | step × | draft | same |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in (row for row in found.rows if row.batch == batch):
        rates = " ".join(f"{rate:.0%}" for rate in row.acceptance.rates())
        cells = [
            row.case,
            f"{row.tokens_per_s[0]:.4g} ({row.tokens_per_s[1]:.4g} to {row.tokens_per_s[2]:.4g})",
            f"**{row.ratio[0]:.2f}** ({row.ratio[1]:.2f} to {row.ratio[2]:.2f})" if row.ratio else "1",
            _milliseconds(row.ttft_s[0]),
            f"{row.acceptance.length:.2f}" if row.acceptance.steps else "–",
            rates or "–",
            f"{row.step_cost:.2f}" if row.step_cost is not None else "1",
            f"{row.draft_share:.0%}" if row.draft_share is not None else "–",
            f"{row.same_answers:.0%}" if row.same_answers is not None else "–",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _advice(found: Findings, batch: int) -> list[str]:
    chosen = _recommended(found, batch)
    lines = [f"Serve it with `{chosen['flags']}`." if chosen["flags"] else f"Serve it with {chosen['case']}."]
    for row in (row for row in found.rows if row.batch == batch):
        if reasons := found.reasons(row):
            lines += ["", f"{row.case} loses: " + "; ".join(reasons) + "."]
        elif row.ratio and _verdict(row) == _UNDECIDED:
            between = f"{row.ratio[1]:.2f} to {row.ratio[2]:.2f} of the baseline"
            lines += ["", f"{row.case}: no gain beyond the ranges, and no loss ({between})."]
    return lines


def _closing(found: Findings, stop: int) -> str:
    """What is said of the batch sizes from ``stop`` on, where nothing gains."""
    there = f"at {stop} at once{' and more' if stop < found.batches[-1] else ''}"
    rows = [row for row in found.rows if row.batch >= stop and row.case != BASELINE]
    if not rows:
        return f"No setting of EAGLE-3 was measured {there}."
    if all(map(analyse.loses, rows)):
        return f"EAGLE-3 does not pay {there}."
    return f"No gain beyond the ranges {there}."


def _recommended(found: Findings, batch: int) -> dict[str, Any]:
    row = analyse.best(found.rows, batch)
    case = row.case if row.case != BASELINE else "the baseline, without a draft"
    return {"case": case, "flags": found.flags(row.case), "ratio": round(row.ratio[0], 4) if row.ratio else 1.0}


def _row_json(found: Findings, row: Row) -> dict[str, Any]:
    plain = {key: value for key, value in vars(row).items() if key != "acceptance"}
    return {
        **plain,
        "acceptance_length": row.acceptance.length or None,
        "rates": row.acceptance.rates(),
        "conditional_rates": row.acceptance.conditional_rates(),
        "steps": row.acceptance.steps,
        "verdict": _verdict(row),
        "reasons": found.reasons(row),
    }


def _verdict(row: Row) -> str | None:
    if row.ratio is None:
        return None
    return "gain" if analyse.gains(row) else "loss" if analyse.loses(row) else _UNDECIDED


_UNDECIDED = "within the ranges"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 10 else f"{seconds:.1f} s"
