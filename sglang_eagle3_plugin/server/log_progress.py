"""How far a starting server is, and whether it failed, read from SGLang's log.

The lines looked for are the same from 0.5.9 to 0.5.23 unless a comment says otherwise. Where they are written, in ``sglang/srt``:
``model_executor/model_runner.py`` and ``model_loader/weight_utils.py`` (weights), ``model_executor/cuda_graph_runner.py``,
``runner/`` and ``speculative/eagle_worker*.py`` (graphs), ``entrypoints/http_server.py`` (ready), ``managers/scheduler.py`` and
``entrypoints/engine.py`` (failures).
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime

STAGES = {"start": 14, "weights": 45, "memory": 2, "graphs": 22, "draft weights": 4, "draft graphs": 8, "warm-up": 5, "ready": 0}
"""Stage -> its rough share of a start, in percent: what the bar goes by. A server without a draft skips the draft's two, and
releases differ in their order (0.5.9 captures the target's graphs before it loads the draft)."""

_STAMP = re.compile(r"^\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)[^\]]*?\] ")
_RANK = re.compile(r"^\[\d{4}-\d\d-\d\d [\d:.]+([^\]]*)\] ")
# tqdm, with the default format and with SGLang's own ("{desc}: {percentage}% Completed | {n}/{total} [{elapsed}<{remaining}, ...").
_BAR = re.compile(r"(?P<what>[A-Za-z\[][^\r\n%|]*?):?\s+\d{1,3}%.*?\|\s*(?P<done>\d+)/(?P<total>\d+)\s*\[[\d:]+<(?P<left>[\d:?]+)")
_BAR_MARKS = ("%", "|", "/", "<")
"""What every bar holds. The pattern costs seven times what all the others do together, and most lines are no bars."""
_LONGEST_BAR = 400
_FATAL = re.compile(
    r"(?:Scheduler|DetokenizerManager|TokenizerManager|DataParallelController|TokenizerWorker) hit an exception"
    r"|[Rr]eceived sigquit from a child process|SIGQUIT received\."
    r"|Initialization failed\."
    r"|Rank \d+ scheduler (?:is dead|died during initialization)"
    r"|terminated with -?[1-9]\d*$"
    r"|Child process unexpectedly failed"
    r"|error while attempting to bind on address"
    r"|(?:launch_server(?:\.py)?|sglang(?: serve)?): error: "  # argparse; 0.5.13 names itself `sglang serve` either way
    r"|^\S*python\S*: No module named '?sglang"
)
_KILLED = re.compile(r"(?:exit code|Exit code|terminated with|exitcode)\W*(-\d+)")
_SECRET = re.compile(r"""((?:api_?key|token|password|secret)['"]?\s*[=:]\s*)(['"])[^'"]+\2""", re.IGNORECASE)
_SECRET_FLAG = re.compile(r"((?<![\w-])--[\w-]{0,40}?(?:api-key|token|password|secret)[= ])(?!-)\S+", re.IGNORECASE)
_HARMLESS = re.compile(r"^(?:Exception ignored in|Exception in thread|Task exception was never retrieved|Process \S+:)")
"""Before a traceback that ends no launcher."""


@dataclass
class LogProgress:
    """The state of a start as its log tells it."""

    stage: str = "start"
    done: int = 0
    total: int = 0
    """Of the current stage's own bar (shards, graphs); 0 of 0 where it has none."""
    stage_left_s: float | None = None
    """What that bar says is left of the stage, in seconds."""
    has_draft: bool = False
    model: str = ""
    port: int | None = None
    """The port the log says the server listens on."""
    fatal: str = ""
    """The first line that means the start has failed, or an empty string."""
    exception: str = ""
    """The exception behind it, as ``Type: message``; of the present stage, since a start goes on after a harmless one."""
    uncaught: str = ""
    """The exception that the last line says the interpreter ended with, or an empty string."""
    exit_status: int | None = None
    """Of a child process the log reports as gone; negative: a signal."""
    entered: dict[str, datetime] = field(default_factory=dict)
    """Stage -> when it began, by the log's own stamps (local time, whole seconds)."""
    recent: deque[str] = field(default_factory=lambda: deque(maxlen=400))
    """The last lines that are no progress bar, secrets blanked."""
    _last_stamp: datetime | None = None
    _loads: Counter[str] = field(default_factory=Counter)
    _in_traceback: bool = False
    _harmless: bool = False

    def catch_up(self, lines: Sequence[str], *, not_before: datetime, unstamped_too: bool) -> None:
        """Take what the log held when it was first looked at, without what an earlier run wrote.

        Args:
            lines: of the log.
            not_before: when this run can have begun, in local time. A line without a stamp is as old as the one before it.
            unstamped_too: whether the lines before the first stamp can be this run's.
        """
        stamps, ours = [_STAMP.match(line) for line in lines], unstamped_too
        if not any(stamps):
            # Another's stamps, such as a container's, or none: what follows the last start's first line is the last run's.
            starts = [number for number, line in enumerate(lines) if "server_args=" in line]
            first, ours = (starts[-1], True) if starts else (0, ours)
            lines, stamps = lines[first:], stamps[first:]
        for line, stamp in zip(lines, stamps, strict=True):
            if (at := _time(stamp)) is not None:
                ours = at >= not_before
            if ours:
                self.feed(line)

    def feed(self, line: str) -> None:
        """Take one line of the log."""
        stamp = _STAMP.match(line)
        self._last_stamp = _time(stamp) or self._last_stamp
        # The line with all server arguments has ten thousand characters, a bar two hundred at most.
        if len(line) <= _LONGEST_BAR and all(mark in line for mark in _BAR_MARKS) and (bar := _BAR.search(line)):
            self._bar(bar)
            return
        self.recent.append(_blanked(line.rstrip()))
        self.uncaught = ""
        text = line[stamp.end() :] if stamp else line
        if "server_args=" in text:
            self._new_start(text)
        elif _FATAL.search(text):
            self._fail(text)
        self._traceback(text, stamped=stamp is not None)
        self._advance(line, text)

    @property
    def fraction(self) -> float:
        """How much of the start is behind, 0 to 1, by rough shares."""
        if self.stage == "ready":
            return 1.0
        due = [stage for stage in STAGES if self.has_draft or not stage.startswith("draft")]
        if self.stage == "warm-up":
            # What was not seen by now (graphs, where they are off) never comes.
            return 1 - STAGES["warm-up"] / sum(STAGES[stage] for stage in due)
        within = self.done / self.total if self.total else 0.0
        behind = sum(STAGES[stage] for stage in self.entered if stage != self.stage) + STAGES[self.stage] * within
        return min(behind / sum(STAGES[stage] for stage in due), 1.0)

    def useful_lines(self, count: int = 15) -> list[str]:
        """The lines worth showing of a failed start: around the first fatal line, or the last ones."""
        lines = list(self.recent)
        if self.exception:
            # The exception and the innermost frames before it say more than the shutdown that follows.
            last = max(
                (i for i, line in enumerate(lines) if line.strip() and self.exception.startswith(line.strip()[:200])), default=None
            )
            if last is not None:
                return lines[max(0, last - count + 1) : last + 1]
        return lines[-count:]

    def _new_start(self, text: str) -> None:
        # The first line of every start (entrypoints/engine.py); a log that is appended to holds earlier ones.
        self.fatal = self.exception = ""
        self.exit_status = None
        self._loads.clear()
        self.entered.clear()
        self._begin("start")
        algorithm = re.search(r"speculative_algorithm['\"]?\s*[=:]\s*['\"]?(\w+)", text)
        self.has_draft = algorithm is not None and algorithm.group(1) != "None"
        model = re.search(r"model_path['\"]?\s*[=:]\s*['\"]([^'\"]+)", text)
        self.model = model.group(1) if model else ""

    def _fail(self, text: str) -> None:
        killed = _KILLED.search(text)
        if killed:
            self.exit_status = int(killed.group(1))
        if not self.fatal:
            self.fatal = _blanked(text.strip().splitlines()[0])[:300]

    def _traceback(self, text: str, *, stamped: bool) -> None:
        if stamped:
            self._harmless = False
        if _HARMLESS.match(text):
            self._harmless = True
        elif "Traceback (most recent call last)" in text:
            self._in_traceback = True
        elif self._in_traceback and text.strip() and not text[0].isspace() and not stamped:
            self._in_traceback = False
            # A chained traceback says the cause first and what came of it last; SGLang's own report is the last one.
            if re.match(r"[A-Za-z_][\w.]*(?::|$)", text):
                self.exception = _blanked(text.strip())[:500]
                self.uncaught = "" if self._harmless else self.exception
        if self.fatal and (killed := _KILLED.search(text)):
            self.exit_status = int(killed.group(1))

    def _advance(self, line: str, text: str) -> None:
        if "Load weight begin" in text:
            rank = _RANK.match(line)
            # Each rank loads the target first and the draft second.
            self._loads[rank.group(1) if rank else ""] += 1
            self._to("draft weights" if max(self._loads.values()) > 1 else "weights")
        elif "Memory pool end" in text:
            self._to("memory")
        elif re.search(r"Capture .*begin\b", text):
            # 0.5.23 names the role ("draft decode", "target prefill"), older ones only the draft's ("draft cuda graph").
            self._to("draft graphs" if re.search(r"\bdraft\b", text) else "graphs")
        elif listening := re.search(r"Uvicorn running on \w+://\S*?:(\d+)", text):
            self.port = int(listening.group(1))
            self._to("warm-up")
        elif "fired up and ready to roll" in text:
            self._to("ready")

    def _to(self, stage: str) -> None:
        # The second rank's line, or the draft's own small pool, is no new stage.
        if stage not in self.entered:
            self._begin(stage)

    def _begin(self, stage: str) -> None:
        if not self.fatal:
            self.exception = ""
        self.stage, self.done, self.total, self.stage_left_s = stage, 0, 0, None
        self.entered[stage] = self._last_stamp or datetime.now()

    def _bar(self, bar: re.Match[str]) -> None:
        what = bar["what"].lower()
        graphs, weights = "capturing" in what or "compiling num tokens" in what, "loading" in what or "shards" in what
        if (graphs and self.stage.endswith("graphs")) or (weights and self.stage.endswith("weights")):
            self.done, self.total = int(bar["done"]), int(bar["total"])
            self.stage_left_s = None if "?" in bar["left"] else _seconds(bar["left"])


def _time(stamp: re.Match[str] | None) -> datetime | None:
    """Of a line's stamp; None where there is none, or one that names no time."""
    try:
        return datetime.strptime(stamp.group(1), "%Y-%m-%d %H:%M:%S") if stamp else None
    except ValueError:
        return None


def _seconds(clock: str) -> float | None:
    """Read ``1:02:03``; None where other processes' words ended the bar."""
    seconds = 0.0
    for part in clock.split(":"):
        if not part:
            return None
        seconds = seconds * 60 + float(part)
    return seconds


def _blanked(line: str) -> str:
    return _SECRET_FLAG.sub(r"\1***", _SECRET.sub(r"\1\2***\2", line))
