"""The serving process's end of :mod:`~sglang_eagle3_plugin.runtime.debug.writer`: starts it, feeds it, hears of it, ends it.

For the light thread. Nothing here waits for the child but :meth:`Child.close`, and that not for long.
"""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import sglang_eagle3_plugin
from sglang_eagle3_plugin.runtime.debug.output import logger, to_logger
from sglang_eagle3_plugin.runtime.debug.report import Labels
from sglang_eagle3_plugin.runtime.debug.wire import Frames, Place, frame, log_level, log_places

_PIPE = 1 << 20
_READ = 1 << 16
_CODE = (
    "import sys; sys.path.append(sys.argv[1]); "
    "from sglang_eagle3_plugin.runtime.debug.writer import main; main(int(sys.argv[2]), int(sys.argv[3]))"
)


class ChildError(RuntimeError):
    """The child ended, or said that it can't go on; the message says why."""


class Child:
    """One child, from switching debug on to switching it off.

    Args:
        rank: tensor-parallel rank of this process.
        ranks: (group, size) where ranks are compared, else None; see :class:`~sglang_eagle3_plugin.runtime.debug.ranks.Ranks`.
        path: of the JSON lines file, or None.
        descriptor: of that file, open; -1 for none. The caller keeps it.

    Raises:
        OSError: it can't be started.
    """

    def __init__(self, rank: int, ranks: tuple[str, int] | None, path: str | None, descriptor: int) -> None:
        self.lines = 0
        self.ranks_compared = 0
        self._problem = self._log_problem = ""
        self._frames = Frames()
        self._unsent = b""
        self._labels: Labels | None = None
        self._log: tuple[int, list[Place] | None] | None = None
        self._data = self._status = -1
        theirs: list[int] = []
        try:
            stdin, self._data = _pipe(theirs)
            self._status, back = _pipe(theirs, read_end=True)
            os.set_blocking(self._data, False)
            os.set_blocking(self._status, False)
            with contextlib.suppress(OSError, AttributeError):  # a user may have used up their share of pipes
                fcntl.fcntl(self._data, fcntl.F_SETPIPE_SZ, _PIPE)
            # -S, -I: no site's own customisation, no PYTHONPATH; what we need lies beside this very package.
            root = str(Path(sglang_eagle3_plugin.__file__).parents[1])
            argv = [sys.executable, "-I", "-S", "-c", _CODE, root, str(back), str(os.getpid())]
            keep = [back] + ([descriptor] if descriptor >= 0 else [])
            environment = os.environ | {"EAGLE3_PLUGIN": "0"}
            self._process = subprocess.Popen(argv, stdin=stdin, pass_fds=keep, env=environment)
        except BaseException:
            self._close_descriptors()
            raise
        finally:
            for one in theirs:
                os.close(one)
        group = ranks and (str(ranks[0]), ranks[1])
        try:
            self._send(frame(os.getpid(), multiprocessing.current_process().name, rank, group, path, descriptor))
        except BaseException:
            self.close(0.0)
            raise

    @property
    def pid(self) -> int:
        """Of the child."""
        return self._process.pid

    @property
    def problem(self) -> str:
        """Why something is not written, or an empty string."""
        return self._problem or self._log_problem

    def ready(self) -> bool:
        """Whether it has taken all it was given, after another try; while it lags, steps wait where they are bounded.

        Raises:
            ChildError: it has ended.
        """
        self.hear()
        self._flush()
        return not self._unsent

    def steps(self, steps: list[Any], labels: Labels) -> None:
        """Give it steps, once :meth:`ready`, and what has changed for them: the slots' labels, and where the log goes.

        Raises:
            ChildError: it has ended.
        """
        log = (log_level(logger), log_places(logger))
        data = b""
        if log != self._log:
            self._log = log
            data += frame("log", *log)
        if labels != self._labels:
            self._labels = labels
            data += frame("labels", labels.captured, labels.wanted, labels.hidden_size)
        self._send(data + frame("steps", steps))

    def hear(self) -> None:
        """Take in what it says: how far it is, and lines for a log that only this process can write.

        Raises:
            ChildError: it has ended.
        """
        while True:
            try:
                data = os.read(self._status, _READ)
            except BlockingIOError:
                return
            if not data:
                raise ChildError(f"the process that writes its lines ended ({self._how()})")
            for kind, *values in self._frames.feed(data):
                if kind == "status":
                    self.lines, self._problem, self.ranks_compared = values
                elif kind == "log":
                    self._say(*values)
                elif kind == "failed":
                    raise ChildError(values[0])

    def _say(self, level: int, text: str) -> None:
        if self._log_problem:
            return
        try:
            to_logger(level, text)
        except Exception as error:  # a closed stderr
            self._log_problem = f"the log cannot be written ({type(error).__name__}: {error})"

    def close(self, within: float) -> None:
        """Let it finish what it has, for so many seconds at most, and be rid of it; never raises."""
        until = time.monotonic() + within
        try:
            self._finish(until)
        except (ChildError, OSError):
            pass
        finally:
            self._close_descriptors()
            try:
                self._process.wait(max(until - time.monotonic(), 0))
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def _finish(self, until: float) -> None:
        # Heard as well: a child that cannot say its lines does not read on.
        while self._unsent and self._poll(until, (self._data, select.POLLOUT), (self._status, select.POLLIN)):
            self.ready()
        os.close(self._data)
        self._data = -1
        while self._poll(until, (self._status, select.POLLIN)):  # its end, which is a ChildError
            self.hear()

    @staticmethod
    def _poll(until: float, *wanted: tuple[int, int]) -> bool:
        poll = select.poll()
        for descriptor, event in wanted:
            poll.register(descriptor, event)
        return bool(poll.poll(max(until - time.monotonic(), 0) * 1e3))

    def _send(self, data: bytes) -> None:
        self._unsent += data
        self._flush()

    def _flush(self) -> None:
        while self._unsent:
            try:
                written = os.write(self._data, self._unsent)
            except BlockingIOError:
                return
            except BrokenPipeError:
                self.hear()  # it may have said why
                raise ChildError(f"the process that writes its lines ended ({self._how()})") from None
            self._unsent = self._unsent[written:]

    def _how(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(0.1)
            return f"signal {-code}" if code < 0 else f"exit status {code}"
        return "it has closed its pipe"

    def _close_descriptors(self) -> None:
        for one in (self._data, self._status):
            if one >= 0:
                os.close(one)
        self._data = self._status = -1


def _pipe(theirs: list[int], *, read_end: bool = False) -> tuple[int, int]:
    """A pipe whose ends are no standard streams, even where those are closed; the end that is not kept goes to ``theirs``.

    Args:
        theirs: gets the child's end, to be closed here.
        read_end: the read end is the one kept.
    """
    ends = []
    for one in os.pipe():
        ends.append(fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, 3))
        os.close(one)
    theirs.append(ends[1] if read_end else ends[0])
    return ends[0], ends[1]
