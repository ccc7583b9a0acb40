"""The live switch of the dump: a thread that looks once a second for what `sglang-eagle3 hidden-states dump on` or `off` asks.

A dump changes what a pass of the target returns, so it begins and ends between two passes, on the thread that runs them: the switch
puts a consumer into the tap that acts once, after the next pass. Until then a dump that was asked for is `waiting`.
"""

from __future__ import annotations

import atexit
import dataclasses
import logging
import re
import threading
from pathlib import Path
from typing import Any

from sglang_eagle3_plugin import records
from sglang_eagle3_plugin.runtime import dump as dumps
from sglang_eagle3_plugin.runtime import tap
from sglang_eagle3_plugin.runtime.debug.control import Command, ControlError, ControlFile
from sglang_eagle3_plugin.runtime.debug.spec import SpecError
from sglang_eagle3_plugin.settings import DumpSettings, Settings

logger = logging.getLogger("sglang_eagle3_plugin")

KIND = "dump"
NOTE = "dump_switch"
"""Key of the switch's state in this process's record."""
_LOOK_S = 1.0
_AT_EXIT_S = 2.0

_switch: Switch | None = None


def begin_switch(runner: Any, settings: Settings) -> Switch:
    """Start the switch of this process with its first target."""
    global _switch
    if _switch is None:
        _switch = Switch(runner, settings)
        _switch.start()
        atexit.register(_switch.stop)
    return _switch


def boundaries_of(spec: str, options: DumpSettings) -> DumpSettings:
    """The options with the boundaries that a command's spec asks for: ``all``, ``2,4,5``, or as they are for an empty one.

    Raises:
        SpecError: it is none of these.
    """
    if not spec:
        return options
    if spec == "all":
        return dataclasses.replace(options, boundaries=None, all_boundaries=True)
    if not re.fullmatch(r"\d{1,6}(,\d{1,6})*", spec):
        raise SpecError(f"{spec!r} is not a comma-separated list of boundaries like 2,30,58, nor 'all'")
    return dataclasses.replace(options, boundaries=tuple(map(int, spec.split(","))), all_boundaries=False)


class Switch(threading.Thread):
    """Obeys this process's control file.

    Args:
        runner: the target's ``ModelRunner``.
        settings: of the process.
    """

    def __init__(self, runner: Any, settings: Settings) -> None:
        super().__init__(name="eagle3-dump-switch", daemon=True)
        self._runner = runner
        self._settings = settings
        self._stopping = threading.Event()
        self._serial = 0
        self._problem = ""
        self._waiting: tap.AfterPass | None = None
        self._changing = threading.Lock()
        self._noted: dict[str, Any] = {}
        self._control: ControlFile | None = None
        try:
            self._control = ControlFile(KIND, lambda spec: boundaries_of(spec, settings.dump))
        except OSError as error:
            self._problem = f"there is no live switch: {error}"
        self._note()

    def run(self) -> None:
        """Until the process ends."""
        while not self._stopping.wait(_LOOK_S):
            try:
                self.look()
                self._note()
            except Exception as error:
                self._problem = f"{type(error).__name__}: {error}"
                tap.failed("dump switch", error)

    def stop(self) -> None:
        """At exit: leave nothing behind."""
        self._stopping.set()
        self.join(_AT_EXIT_S)
        if self._control is not None:
            self._control.remove()

    def not_begun(self, error: Exception) -> None:
        """Have the record say why a dump that was asked for could not begin."""
        self._problem = f"there is no dump: {error}"

    def look(self) -> None:
        """Obey what is new in the control file."""
        if self._control is None:
            return
        try:
            command = self._control.poll()
        except (ControlError, OSError) as error:
            self._problem = f"a command for the dump is not obeyed: {error}"
            logger.warning("sglang-eagle3-plugin: %s.", self._problem)
            return
        if command is not None:
            self._problem = ""
            self._on(command) if command.on else self._off()
            self._serial = command.serial

    def _on(self, command: Command) -> None:
        directory = command.file or self._settings.dump_dir
        if directory is None:
            self._problem = "it was started without EAGLE3_DUMP_DIR; say with --dir where to dump"
            return
        self._off()
        options = boundaries_of(command.spec, self._settings.dump)
        waiting = tap.AfterPass(self._runner, lambda batch: self._begin(waiting, Path(directory), options, batch))
        self._waiting = waiting
        tap.add(waiting)

    def _begin(self, waiting: tap.AfterPass, directory: Path, options: DumpSettings, batch: Any) -> None:
        with self._changing:
            if self._waiting is not waiting:  # taken back by the switch's thread while the pass ran
                return
            try:
                rids = tap.request_ids(batch) or []
                dumps.begin(self._runner, directory, options).ignore(rids)
                logger.info("sglang-eagle3-plugin: hidden states are dumped to %s from now on.", directory)
            except Exception as error:
                self.not_begun(error)
                logger.warning("sglang-eagle3-plugin: %s.", self._problem)
            finally:
                self._waiting = None  # last, so that the record never says neither waiting nor on

    def _off(self) -> None:
        with self._changing:
            if self._waiting is not None:
                tap.remove(self._waiting)
                self._waiting = None
            dump, dumps.current = dumps.current, None
        if dump is not None:
            dump.end()
            logger.info("sglang-eagle3-plugin: hidden states are dumped no more.")

    def _note(self) -> None:
        waiting = self._waiting is not None
        dump = dumps.current
        on = dump is not None and dump.enabled
        noted = {
            "serial": self._serial,
            "on": on,
            "waiting": waiting and not on,
            "directory": str(dump.spool.directory) if on and dump else None,
            "boundaries": list(dump.target.known) if on and dump else [],
            "problem": self._problem or (dump.problem if dump is not None else ""),
        }
        if noted != self._noted:
            self._noted = noted
            records.note(NOTE, noted)
