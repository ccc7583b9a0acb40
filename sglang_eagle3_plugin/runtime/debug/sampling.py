"""The thread that serves: which steps are looked at, and which measures of each pass are enqueued. It does as little as it can."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any

from sglang_eagle3_plugin.runtime import tap
from sglang_eagle3_plugin.runtime.debug.read import Arrived
from sglang_eagle3_plugin.runtime.debug.report import Labels
from sglang_eagle3_plugin.runtime.debug.spec import Spec
from sglang_eagle3_plugin.runtime.debug.step import Ring, Step, embedding_measures, follows, kept_ids

_PENDING = 64
"""Steps under way to the host at most; beyond them steps are left out."""
_IDS = 256

_TARGET_PREFILL = ("EXTEND", "MIXED", "SPLIT_PREFILL")


class Debug:
    """Samples steps and measures their passes; a consumer of the tap.

    Args:
        spec: what to look at.
        labels: of the target's slots; the thread renews them, for reading them from the layers takes too long for a pass.
        whole_vocabulary: whether this rank holds all of the embedding table.
    """

    def __init__(self, spec: Spec, labels: Labels, *, whole_vocabulary: bool) -> None:
        self.spec = spec
        self.labels = labels
        self.steps = 0
        self.left_out = 0
        """Steps that were due, and over the rate or the pending limit."""
        self.arrived: deque[Arrived] = deque()
        """For the thread: steps whose measures are on the host, in order."""
        self.problem = ""
        """What a pass raised; the tap delivers no more then."""
        self.last_pass = 0.0
        self._whole_vocabulary = whole_vocabulary
        self._ring: Any = None
        self._pending: deque[Step] = deque()
        self._lock = threading.Lock()
        self._step: Step | None = None
        self._phase = "extend"
        self._target_number: int | None = None
        self._counted = False
        self._window = (0.0, 0)

    def on_forward(self, runner: Any, forward_batch: Any, output: Any) -> None:
        """Measure a pass if its step is sampled."""
        with self._lock:
            try:
                self._look(runner, forward_batch, output)
            except Exception as error:
                self.problem = f"{type(error).__name__}: {error}"
                self._step = None  # its measures may lie elsewhere than its passes say
                raise

    def collect(self, *, unfinished: bool) -> bool:
        """For the thread, while no pass does it: take in what has arrived. True when nothing is under way any more.

        Args:
            unfinished: also send a step whose draft extend has not come: that of requests that ended with their verify.
        """
        with self._lock:
            if unfinished:
                self._send()
            self._collect()
            return not self._pending

    def _look(self, runner: Any, forward_batch: Any, output: Any) -> None:
        mode = forward_batch.forward_mode
        if mode.is_idle():
            return
        self.last_pass = time.monotonic()
        phase = "target" if not runner.is_draft_worker else "decode" if mode.is_decode() else "extend"
        # A step is: draft decode passes, the target's verify, draft extend; or the target's prefill, draft extend.
        if phase != "extend" and self._phase != "decode":
            self._begin(runner, phase)
        if phase == "target":
            self._target_number = runner.forward_pass_id
        self._phase = phase
        if self._step is not None:
            self._measure(self._step, phase, runner, forward_batch, output)
            if phase == "extend":
                self._send()

    def _begin(self, runner: Any, phase: str) -> None:
        self._send()
        self._collect()
        if phase == "target":
            number = runner.forward_pass_id
        elif self._target_number is not None:
            number = self._target_number + 1
        else:  # switched on amid a step: its target pass has a number to go by
            return
        self._counted = False
        spec = self.spec
        if (self.steps < spec.steps or (spec.every and number % spec.every == 0)) and self._within_rate():
            if self._ring is None:
                self._ring = Ring()
            self._step = Step(number, self._ring)

    def _within_rate(self) -> bool:
        if len(self._pending) + len(self.arrived) >= _PENDING:
            self.left_out += 1
            return False
        if self.spec.rate:
            began, taken = self._window
            if self.last_pass - began >= 1:
                began, taken = self.last_pass, 0
            if taken >= self.spec.rate:
                self.left_out += 1
                return False
            self._window = (began, taken + 1)
        return True

    def _measure(self, step: Step, phase: str, runner: Any, batch: Any, output: Any) -> None:
        if phase == "target":
            states = getattr(output.logits_output, "hidden_states", None)
        else:
            states = getattr(batch.spec_info, "hidden_states", None)
        if states is None or states.dim() != 2 or not states.shape[0]:
            return
        requests = tap.request_ids(batch)
        spec = self.spec
        if spec.requests and not set(spec.requests) & set(requests or ()):
            return
        key = self._ring.key(states)
        if step.passes and step.key != key:  # this pass runs on another stream
            self._send()
            step = self._step = Step(step.number, self._ring)
        name = f"draft {phase}" if phase != "target" else f"target {_target_kind(batch.forward_mode)}"
        lengths = getattr(batch, "extend_seq_lens_cpu", None)
        step.measure(
            name,
            states,
            key,
            graph=bool(output.can_run_graph),
            # The draft's own passes after the first carry its own states, of its own width.
            slots=1 if phase == "decode" else self.labels.slots(states.shape[1]),
            values=spec.values,
            requests=requests,
            lengths=[int(length) for length in lengths] if isinstance(lengths, list | tuple) else None,
            chosen=spec.requests,
            extra=self._extra(step, name, runner, batch, output, states.shape[0], requests),
        )
        if not self._counted:
            self._counted = True
            self.steps += 1

    def _extra(
        self, step: Step, name: str, runner: Any, batch: Any, output: Any, rows: int, requests: list[str] | None
    ) -> list[tuple[str, Any]]:
        extra: list[tuple[str, Any]] = []
        ids = batch.input_ids
        if name == "target prefill":
            step.target_ids = kept_ids(ids)
            if self._whole_vocabulary and not self.spec.requests and ids is not None and len(ids) == rows:
                extra += embedding_measures(runner.model, ids)
        elif name == "draft extend":
            extra += follows(step.target_ids, ids)
            accepted = getattr(batch.spec_info, "num_accept_tokens", None)
            if accepted is None:
                accepted = getattr(batch.spec_info, "accept_length", None)  # up to 0.5.12
            if accepted is not None and requests and step.target_ids is None:
                extra.append(("accepted", accepted[: len(requests)]))
        # A draft's decode graph gets its tokens from the step before, not from the batch.
        if self.spec.ids and ids is not None and output.logits_output is not None:
            extra.append(("ids", ids[:_IDS]))
        return extra

    def _send(self) -> None:
        step, self._step = self._step, None
        if step is not None and step.passes:
            step.send()
            self._pending.append(step)

    def _collect(self) -> None:
        while self._pending and self._pending[0].arrived():
            self.arrived.append(self._pending.popleft().take())


def _target_kind(mode: Any) -> str:
    name = mode.name
    return "prefill" if name in _TARGET_PREFILL else "verify" if name == "TARGET_VERIFY" else "decode"
