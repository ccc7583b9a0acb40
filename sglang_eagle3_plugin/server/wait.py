"""Waiting for a server to be ready, and noticing at once when it never will be.

Readiness is the status of ``/health`` alone; its body is empty. Nothing listens until the model is loaded. Then, read in the
releases: up to 0.4.10 it answers 200; from 0.4.10.post2 to at least 0.5.23 it answers 503 at once while the server warms up, and
after that it generates one token and answers 200 (a second or more; unless ``SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION=0``).
So the checks before the last one cost the server nothing, and the last one costs a token.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path

import httpx

from sglang_eagle3_plugin.errors import UserError
from sglang_eagle3_plugin.server import processes, start_times
from sglang_eagle3_plugin.server.address import Address, client
from sglang_eagle3_plugin.server.log_follow import LogFollower
from sglang_eagle3_plugin.server.log_progress import LogProgress
from sglang_eagle3_plugin.server.process_watch import ProcessWatch, first_started

_LOOK_S = 0.2
"""How often the process and the log are looked at."""
_ASK_S = 1.0
"""How often the server is asked while that costs it nothing."""
_ASK_AGAIN_S = 5.0
"""The same after an answer that took work: a health check that timed out has queued a generation."""
_ANSWER_S = 30.0
"""How long one answer may take: SGLang itself gives a health check 20 s (``SGLANG_HEALTH_CHECK_TIMEOUT``)."""
_SETTLE_S = 0.6
"""How long after the first fatal line or the death the log is read on: the traceback follows its headline."""
_STRANGER_S = 3.0
"""How long something else may answer at the address before that is the result."""
_OLD_LINES_S = 60.0
"""Without a process to tell by, log lines older than this when the wait begins are an earlier run's."""
_OLD_WORDS_S = 600.0
"""The same of a log that nobody writes any more."""
_WRITER_S = 2.0
"""How often it is looked who writes the log, without a process to tell by."""
_BAD_ANSWERS = {"301", "302", "303", "307", "308", "400", "401", "403", "404", "405"}
"""What SGLang's ``/health`` never answers."""


@dataclass(frozen=True)
class Snapshot:
    """What is known at one moment; what a display is made of."""

    elapsed_s: float
    stage: str
    done: int
    total: int
    fraction: float | None
    """None without a log."""
    stage_left_s: float | None
    """By the stage's own bar."""
    left_s: float | None
    """Of the whole start, about, by the last start of the same model; None where none is known."""
    answer: str
    """The last answer of ``/health``: ``refused``, ``503``, ..."""


@dataclass(frozen=True)
class Result:
    """How the wait ended."""

    state: str
    """``ready``, ``failed`` or ``timeout``."""
    reason: str
    elapsed_s: float
    stage: str
    answer: str
    checks: int
    """How many times the server was asked."""
    lines: list[str] = field(default_factory=list)
    """The log lines that say most about a failure."""


def wait(
    address: Address,
    *,
    pid: int | None = None,
    log: Path | None = None,
    timeout_s: float = 1800.0,
    api_key: str | None = None,
    on_look: Callable[[Snapshot], None] = lambda _: None,
) -> Result:
    """Wait until the server is ready, has failed, or the time is over.

    Args:
        address: where it will answer.
        pid: its launcher on this machine, where known.
        log: what it writes, where known; it need not exist yet.
        timeout_s: seconds; 0 looks once.
        api_key: for a server behind a gateway (SGLang itself asks for none at ``/health``).
        on_look: called several times a second.

    Raises:
        UserError: the log is a directory or may not be read.
    """
    waiting = _Waiting(address, pid, log, api_key)
    try:
        return waiting.run(timeout_s, on_look)
    finally:
        waiting.close()


class _Waiting:
    def __init__(self, address: Address, pid: int | None, log: Path | None, api_key: str | None) -> None:
        self.address = address
        self.started = time.monotonic()
        self.process = ProcessWatch(pid) if pid is not None else None
        self.log = LogFollower(log) if log is not None else None
        self.progress = LogProgress()
        self.written = False
        self.next_look = 0.0
        self.health = _Health(address, api_key)
        self.strange_since: float | None = None
        self.before: dict[str, float] | None = None
        if self.log:
            self._catch_up(self.log)

    def run(self, timeout_s: float, on_look: Callable[[Snapshot], None]) -> Result:
        while True:
            self._read_log()
            if failed := self._failure():
                return self._settled(failed)
            if self.health.ready:
                if self.progress.stage == "ready" and self.progress.model:
                    start_times.remember(self.progress)
                return self._result("ready", f"{self.address.url} is ready")
            elapsed = time.monotonic() - self.started
            if elapsed >= timeout_s and (timeout_s > _LOOK_S or self.health.checks):
                return self._result("timeout", self._why_late(elapsed))
            on_look(self._snapshot(elapsed))
            # SGLang says in its log when it is ready: no need to sit out the pause then, once.
            self.health.ask(ready_in_log=self.progress.stage == "ready")
            time.sleep(min(_LOOK_S, max(0.01, timeout_s - elapsed)) if timeout_s else _LOOK_S)

    def close(self) -> None:
        self.health.close()
        if self.log:
            self.log.close()

    def _catch_up(self, log: LogFollower) -> None:
        """Read what the log holds already. What is written from now on is this run's, whatever its stamps say of time zones."""
        since = self.process.started_at() if self.process else None
        if since is None:
            since = datetime.now() - timedelta(seconds=_OLD_LINES_S)
            # A server started again a moment ago appends to what the one before it left.
            writing = processes.writers(log.path)
            since = max(
                since, first_started(filter(processes.holds_a_server, writing)) or since
            )  # one that copies the log is no server
            self.written = bool(writing)
        not_before = since - timedelta(seconds=1)  # stamps have whole seconds
        lines, modified = log.held()
        # Unstamped words are an interpreter's last ones, and a process that lives has not said them.
        ended = not self.process or bool(self.process.death())
        fresh = datetime.fromtimestamp(modified) >= not_before
        last_words = not self.process and not self.written and time.time() - modified < _OLD_WORDS_S
        if fresh or last_words:
            self.progress.catch_up(lines, not_before=not_before, unstamped_too=ended)

    def _read_log(self) -> None:
        if self.log:
            for line in self.log.lines():
                self.progress.feed(line)
            if self.log.error:
                raise UserError(f"the log {self.log.path} cannot be read ({self.log.error}); give --log a readable file")

    def _failure(self) -> str:
        if self.process and (death := self.process.death()):
            return death
        if self.progress.fatal:
            return self.progress.fatal
        if self.log and not self.process and self.health.answer == "refused" and self._writer_left(self.log):
            return self.progress.uncaught
        return self.health.hopeless or self._stranger()

    def _writer_left(self, log: LogFollower) -> bool:
        """Whether the last words are an exception, and who wrote them has gone: others log exceptions that they survive."""
        if (self.written and not self.progress.uncaught) or time.monotonic() < self.next_look:
            return False
        self.next_look = time.monotonic() + _WRITER_S
        writes = bool(processes.writers(log.path))
        self.written |= writes
        return self.written and not writes and bool(self.progress.uncaught)

    def _stranger(self) -> str:
        """Why what answers (or does not) at the address cannot be the server that is waited for, or an empty string."""
        found = ""
        if self.health.ready and self.process and self.address.is_loopback:
            found = self._listener_elsewhere(self.process.pid)
        elif self.progress.stage == "ready" and self.health.answer == "refused":
            where = f" on port {self.progress.port}" if self.progress.port not in (None, self.address.port) else ""
            found = f"the log says the server is ready{where}, but nothing listens at {self.address.url}; is the port right?"
        elif self.health.answer in _BAD_ANSWERS:
            found = f"what answers at {self.address.url} has no /health ({self.health.answer}); is this an SGLang server's address?"
        if not found:
            self.strange_since = None
            return ""
        self.strange_since = self.strange_since or time.monotonic()
        patience = 0.0 if self.health.ready else _STRANGER_S
        return found if time.monotonic() - self.strange_since >= patience else ""

    def _listener_elsewhere(self, pid: int) -> str:
        try:
            listener = processes.listening_on(self.address.url)
            # One that is younger may be the launcher's own, in a session of its own.
            if listener in processes.tree(pid) or not self.process or not self.process.outlived_by(listener):
                return ""
        except (UserError, OSError):
            # Another user's, or in another network namespace: nothing can be said.
            return ""
        return f"process {listener} answers at {self.address.url}, and is no process of server {pid}; is an older server still up?"

    def _settled(self, failed: str) -> Result:
        until = time.monotonic() + _SETTLE_S
        while time.monotonic() < until:
            self._read_log()
            time.sleep(0.05)
        for line in self.log.rest() if self.log else ():
            self.progress.feed(line)
        death = (self.process.death() if self.process else "") or failed
        why = self.progress.exception or self.progress.fatal
        reasons = [why, death]
        if death.startswith("its process"):
            # A launcher that gives up kills its children, and says so: their deaths tell nothing more then, and most otherwise.
            reasons = [why] if self.progress.fatal else [death, why]
        if self.progress.exit_status == -9:
            reasons.insert(0, "a process of the server was killed (exit status -9): most often for memory")
        if self.process and self.process.killed_for_memory() and "for memory" not in " ".join(reasons):
            reasons.append("the kernel killed a process for memory meanwhile")
        return self._result("failed", "; ".join(dict.fromkeys(filter(None, reasons))))

    def _why_late(self, elapsed: float) -> str:
        last = {"refused": "nothing listened there", "": "no answer came"}.get(
            self.health.answer, f"last answer {self.health.answer}"
        )
        stage = f", the log is at '{self.progress.stage}'" if self.log else ""
        if self.log and not self.log.path.exists():
            stage = f", and there is no log {self.log.path}"
        hint = "" if self.log or self.process or self.health.answer != "refused" else "; is the port right?"
        return f"{self.address.url} was not ready after {elapsed:.0f} s ({last}{stage}){hint}"

    def _snapshot(self, elapsed: float) -> Snapshot:
        p = self.progress
        if self.before is None and p.model:
            self.before = start_times.last(p)
        left = start_times.left(p, self.before or {}, datetime.now())
        fraction = p.fraction if self.log else None
        return Snapshot(elapsed, p.stage, p.done, p.total, fraction, p.stage_left_s, left, self.health.answer)

    def _result(self, state: str, reason: str) -> Result:
        lines = [] if state == "ready" else self.progress.useful_lines()
        elapsed = round(time.monotonic() - self.started, 2)
        return Result(state, reason, elapsed, self.progress.stage, self.health.answer, self.health.checks, lines)


class _Health:
    """Asks ``/health`` in a thread, one question at a time, so that a slow answer never hides a death."""

    def __init__(self, address: Address, api_key: str | None) -> None:
        self.ready = False
        self.answer = ""
        self.hopeless = ""
        self.checks = 0
        self._http = client(address, timeout_s=_ANSWER_S, api_key=api_key)
        self._thread: threading.Thread | None = None
        self._next = 0.0
        self._hurried = False

    def ask(self, *, ready_in_log: bool) -> None:
        now = time.monotonic()
        at_once = ready_in_log and not self._hurried and self._next - now < _ASK_S
        if self.ready or (self._thread and self._thread.is_alive()) or (now < self._next and not at_once):
            return
        self._hurried |= ready_in_log
        self._thread = threading.Thread(target=self._ask, daemon=True, name="health")
        self._thread.start()

    def close(self) -> None:
        # A question still under way keeps the thread; it is a daemon, and closing under it would only make it complain.
        if not (self._thread and self._thread.is_alive()):
            self._http.close()

    def _ask(self) -> None:
        began = time.monotonic()
        try:
            status = self._http.get("/health").status_code
        except httpx.ConnectError as error:
            if "CERTIFICATE" in str(error).upper():
                self.hopeless = f"the certificate is not accepted ({error})"
            if "WRONG_VERSION_NUMBER" in str(error):
                self.hopeless = "what answers speaks no TLS; is it http:// and not https://?"
            self.answer = "refused" if "refused" in str(error).lower() else f"no connection ({error})"
        except httpx.TimeoutException:
            self.answer = "no answer in time"
        except httpx.HTTPError as error:
            self.answer = f"broken ({type(error).__name__})"
            if "illegal" in str(error).lower():  # and no broken connection, as a tunnel has it while nothing listens behind it
                self.hopeless = f"what answers is no HTTP server ({error}); is the port right?"
        except Exception as error:  # a redirection that httpx can't read, say: whatever it is, this thread ends with an answer
            self.answer = f"broken ({type(error).__name__}: {error})"
        else:
            self.answer = str(status)
            self.ready = status == 200
        self.checks += 1
        took = time.monotonic() - began
        self._next = time.monotonic() + (_ASK_AGAIN_S if took > _ASK_S / 2 else _ASK_S)
