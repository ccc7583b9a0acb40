"""The light thread behind debug: reads the control file once a second, hands what has arrived to a child, keeps the status.

It is the one writer of the tap's list for debug, so that the serving thread never waits for a switch. It makes no lines itself: the
serving thread gives the interpreter up at each of torch's calls, and would wait for a line each time.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
from pathlib import Path
from typing import Any

from sglang_eagle3_plugin import records
from sglang_eagle3_plugin.runtime import parallel, tap
from sglang_eagle3_plugin.runtime.debug.child import Child
from sglang_eagle3_plugin.runtime.debug.control import Command, ControlError, ControlFile, lines_for
from sglang_eagle3_plugin.runtime.debug.labels import labels_of
from sglang_eagle3_plugin.runtime.debug.output import Output, logger
from sglang_eagle3_plugin.runtime.debug.ranks import Ranks
from sglang_eagle3_plugin.runtime.debug.sampling import Debug
from sglang_eagle3_plugin.runtime.debug.spec import SpecError, parse
from sglang_eagle3_plugin.settings import Settings

_CONTROL_S = 1.0
_WORK_S = 0.05
_IDLE_S = 0.2
_UNFINISHED_S = 5.0
"""A step without a pass for so long gets no more: on a CPU one pass may take a second."""
_LABELS_S = 5.0
_COLLECT_S = 1.0
"""For what is under way to the host when debug is turned off."""
_AT_EXIT_S = 3.5
_CLOSE_S = 2.0
"""For the child to finish its lines; then it is killed."""

_thread: DebugThread | None = None


def begin(runner: Any, settings: Settings) -> None:
    """Start the thread of this process with its first target; turn debug on where EAGLE3_DEBUG says so."""
    global _thread
    if runner.is_draft_worker or _thread is not None:
        return
    _thread = DebugThread(runner, settings)
    _thread.start()
    atexit.register(_thread.stop)


class DebugThread(threading.Thread):
    """Switches :class:`Debug` on and off, and writes what it saw.

    Args:
        runner: the target's ``ModelRunner``.
        settings: of the process.
    """

    def __init__(self, runner: Any, settings: Settings) -> None:
        super().__init__(name="eagle3-debug", daemon=True)
        self._runner = runner
        self._settings = settings
        self._stopping = threading.Event()
        self._debug: Debug | None = None
        self._output = Output(None)
        self._child: Child | None = None
        self._ranks: Ranks | None = None
        self._rank = 0
        self._serial = 0
        self._problem = self._unswitchable = ""
        self._noted: dict[str, Any] = {}
        self._labels_read = 0.0
        self._control: ControlFile | None = None
        self._own_lines: Path | None = None
        try:
            self._control = ControlFile()
            self._own_lines = lines_for(os.getpid())
        except OSError as error:
            self._unswitchable = f"there is no live switch: {error}"
        if settings.debug:
            self._switch(Command(0, 0, 0, True, settings.debug, settings.debug_file))
        self._note()

    def run(self) -> None:
        """Until the process ends."""
        looked = 0.0
        while not self._stopping.wait(_WORK_S if self._debug else _CONTROL_S):
            try:
                now = time.monotonic()
                if now - looked >= _CONTROL_S:
                    looked = now
                    self._obey()
                    self._note()
                self._work(now)
            except Exception as error:
                self._fail(error)
                self._note()
        self._off()

    def stop(self) -> None:
        """At exit: let the thread write what has arrived, and leave nothing behind."""
        self._stopping.set()
        self.join(_AT_EXIT_S)
        if self._control is not None:
            self._control.remove()

    def _obey(self) -> None:
        if self._control is None:
            return
        try:
            command = self._control.poll()
        except (ControlError, OSError) as error:
            self._problem = f"a debug command is not obeyed: {error}"
            logger.warning("sglang-eagle3-plugin: %s.", self._problem)
            return
        if command is not None:
            self._serial = command.serial
            self._switch(command)

    def _switch(self, command: Command) -> None:
        self._off()
        self._problem = ""
        if not command.on:
            return
        try:
            spec = parse(command.spec)
        except SpecError as error:
            self._problem = f"EAGLE3_DEBUG is off: {error}"
            logger.warning("sglang-eagle3-plugin: %s.", self._problem)
            return
        self._rank, size = _tensor_parallel()
        self._output = Output(command.file)
        self._ranks = self._ranks_of(size)
        self._debug = Debug(spec, labels_of(self._runner, self._settings), whole_vocabulary=size == 1)
        self._labels_read = time.monotonic()
        try:
            group = (self._ranks.group, size) if self._ranks is not None else None
            self._child = Child(self._rank, group, self._output.path, self._output.descriptor)
        except Exception as error:
            self._fail(error)
            return
        tap.add(self._debug)

    def _fail(self, error: Exception) -> None:
        self._off()
        self._problem = f"{type(error).__name__}: {error}"
        tap.failed("debug", error)

    def _off(self) -> None:
        """End what is on, every part of it whatever becomes of the others; never raises, for the thread must go on obeying."""
        debug, self._debug = self._debug, None
        child, self._child = self._child, None
        output, self._output = self._output, Output(None)
        ranks, self._ranks = self._ranks, None
        if debug is not None:
            tap.remove(debug)
        try:
            with contextlib.ExitStack() as ending:  # the last one first
                if ranks is not None:
                    ending.callback(ranks.close)
                if self._own_lines is not None and output.path == str(self._own_lines):
                    ending.callback(self._own_lines.unlink, missing_ok=True)
                ending.callback(output.close)
                if child is not None:
                    ending.callback(child.close, _CLOSE_S)
                if debug is not None:
                    _collect(debug)
                if debug is not None and child is not None:
                    with contextlib.suppress(Exception):  # it is gone, and so are its lines
                        hand_over(debug, child)
        except Exception as error:
            self._problem = f"{type(error).__name__}: {error}"
            tap.failed("debug", error)

    def _work(self, now: float) -> None:
        debug = self._debug
        if debug is None:
            return
        if debug not in tap.consumers:  # it failed on the serving thread, which has said so in the log
            self._off()
            self._problem = debug.problem
            return
        idle = now - debug.last_pass
        if idle > _IDLE_S and not tap.capturing():
            debug.collect(unfinished=idle > _UNFINISHED_S)
        # From 0.5.16 a target is wired after its runner has been built: labels that are not there yet are looked for again sooner.
        if debug.arrived and now - self._labels_read > (_LABELS_S if debug.labels.captured else _CONTROL_S / 2):
            debug.labels = labels_of(self._runner, self._settings)
            self._labels_read = now
        if self._child is not None and self._child.ready():
            hand_over(debug, self._child)

    def _ranks_of(self, size: int) -> Ranks | None:
        if size == 1 or parallel.attention_data_parallel(self._runner.server_args):
            return None
        # The first rank's device tells apart the groups that share a parent: pipeline stages, which SGLang puts on devices tp_size
        # apart, and data parallel replicas, tp_size * pp_size * gpu_id_step apart. A group's own ranks are gpu_id_step apart.
        first = self._runner.gpu_id - self._rank * getattr(self._runner.server_args, "gpu_id_step", 1)
        try:
            return Ranks(f"{os.getppid()}-{first}", self._rank, size)
        except OSError as error:
            logger.warning("sglang-eagle3-plugin: ranks are not compared: %s.", error)
            return None

    def _note(self) -> None:
        debug, child = self._debug, self._child
        noted = {
            "on": debug is not None,
            "spec": str(debug.spec) if debug else None,
            "serial": self._serial,
            "steps": debug.steps if debug else 0,
            "left_out": debug.left_out if debug else 0,
            "lines": child.lines if child else 0,
            "file": self._output.path,
            "ranks_compared": child.ranks_compared if child else 0,
            "problem": self._problem or self._output.problem or (child.problem if child else "") or self._unswitchable,
        }
        if noted != self._noted:
            self._noted = noted
            records.note("debug", noted)


def _collect(debug: Debug) -> None:
    """Take in what is under way to the host, for as long as that may take."""
    until = time.monotonic() + _COLLECT_S
    while not debug.collect(unfinished=True) and time.monotonic() < until:
        time.sleep(_WORK_S)


def hand_over(debug: Debug, child: Child) -> None:
    """Give a child that is ready what has arrived, in one message."""
    steps = []
    while debug.arrived:
        steps.append(debug.arrived.popleft())
    if steps:
        child.steps(steps, debug.labels)


def _tensor_parallel() -> tuple[int, int]:
    from sglang.srt.distributed.parallel_state import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

    return get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
