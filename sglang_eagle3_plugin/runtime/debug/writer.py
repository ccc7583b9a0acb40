"""The process that makes debug's lines: a child of the serving one, so that no line is made under that one's interpreter lock.

It reads steps from its stdin, writes each pass's lines to SGLang's log and the JSON file, compares ranks, and says once a second
how far it is. It ends when its stdin does, or with its parent. Neither torch nor SGLang is imported here.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from sglang_eagle3_plugin.runtime.debug.output import NAME, Output
from sglang_eagle3_plugin.runtime.debug.ranks import Ranks
from sglang_eagle3_plugin.runtime.debug.read import Arrived, reports
from sglang_eagle3_plugin.runtime.debug.report import FORMAT, Labels, human
from sglang_eagle3_plugin.runtime.debug.wire import Frames, Place, frame

_SECOND = 1.0
_READ = 1 << 20


class Log:
    """SGLang's log as seen from here.

    Args:
        back: takes a frame to the serving process, where lines go whose place only that one knows.
        process: pid and name of the serving process; the lines are its own.
    """

    def __init__(self, back: Callable[[bytes], None], process: tuple[int, str]) -> None:
        self.level = logging.CRITICAL + 1
        self.places: list[Place] | None = None
        self._back = back
        self._process = process
        self._formatters: dict[tuple[str, str | None], logging.Formatter] = {}

    def __call__(self, level: int, text: str) -> None:
        """Write one line.

        Raises:
            OSError: it can't be written.
        """
        if level < self.level:
            return
        if self.places is None:
            self._back(frame("log", level, text))
            return
        pid, name = self._process
        record = logging.LogRecord(NAME, level, "", 0, text, None, None)
        record.process, record.processName, record.threadName = pid, name, "eagle3-debug"
        for descriptor, lowest, form, dates, encoding, errors in self.places:
            if level >= lowest:
                formatter = self._formatters.setdefault((form, dates), logging.Formatter(form, dates, validate=False))
                with contextlib.suppress(BlockingIOError):  # whoever reads a log without waiting loses a line
                    _write_all(descriptor, (formatter.format(record) + "\n").encode(encoding, errors))


class Writer:
    """Turns steps into lines.

    Args:
        start: of the first message: pid, process name, rank, (group, size) of the ranks that are compared or None, path and
            descriptor of the JSON file.
        back: takes a frame to the serving process.
    """

    def __init__(self, start: tuple[Any, ...], back: Callable[[bytes], None]) -> None:
        self._pid, name, self._rank, group, path, descriptor = start
        self._back = back
        self._log = Log(back, (self._pid, name))
        self._output = Output(path, log=self._log, descriptor=descriptor)
        self._ranks = Ranks(group[0], self._rank, group[1]) if group else None
        self._labels = Labels(None, None, 1)
        self._said: tuple[Any, ...] = ()

    def obey(self, message: tuple[Any, ...]) -> None:
        """Do what one message asks."""
        kind, *values = message
        if kind == "steps":
            for step in values[0]:
                self._write(step)
        elif kind == "labels":
            self._labels = Labels(*values)
        elif kind == "log":
            self._log.level, self._log.places = values

    def each_second(self) -> None:
        """Compare ranks, and say how far the lines are."""
        if self._ranks is not None:
            for step, name, says in self._ranks.exchange():
                verdict = {"verdict": "partial-sums", "says": says}
                self._write_one({"step": step, "pass": name, "verdicts": [verdict]})
        self.tell()

    def tell(self) -> None:
        """Say how far the lines are, if that is news."""
        said = (self._output.lines, self._output.problem, self._ranks.compared if self._ranks else 0)
        if said != self._said:
            self._said = said
            self._back(frame("status", *said))

    def _write(self, step: Arrived) -> None:
        for said in reports(step, self._labels):
            self._write_one(said)
            if self._ranks is not None:
                self._ranks.add(said)

    def _write_one(self, said: dict[str, Any]) -> None:
        stamp = {"v": FORMAT, "time": round(time.time(), 3), "pid": self._pid, "rank": self._rank}
        self._output.write(stamp | said, human(said))


def main(back: int, parent: int) -> None:
    """Make lines until stdin ends, or the parent is gone.

    Args:
        back: descriptor for what is said to the serving process.
        parent: its pid. Asked for once a second: a process that it forked may hold our stdin open when it is dead. The kernel's own
            signal for this (PR_SET_PDEATHSIG) comes when the thread ends that started us, and so may come too early.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the server's; we end when it does
    send = _sender(back)
    try:
        _serve(send, parent)
    except (BrokenPipeError, KeyboardInterrupt):  # nobody is there any more
        return
    except Exception as error:
        with contextlib.suppress(OSError):
            send(frame("failed", f"{type(error).__name__}: {error}"))
        sys.exit(1)


def _serve(send: Callable[[bytes], None], parent: int) -> None:
    frames, writer, looked = Frames(), None, time.monotonic()
    while os.getppid() == parent:
        ready, _, _ = select.select([0], [], [], _SECOND)
        if ready:
            data = os.read(0, _READ)
            if not data:
                break
            for message in frames.feed(data):
                if writer is None:
                    writer = Writer(message, send)
                else:
                    writer.obey(message)
        if writer is not None and time.monotonic() - looked >= _SECOND:
            looked = time.monotonic()
            writer.each_second()
    if writer is not None:
        writer.tell()


def _sender(descriptor: int) -> Callable[[bytes], None]:
    return lambda data: _write_all(descriptor, data)


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
