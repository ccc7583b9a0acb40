"""One tap for everything that looks at a serving process's passes: outside the CUDA graphs, after any replay.

Debug prints inside a model vanish when a graph replays. The result of ``ModelRunner.forward`` does not: in EAGLE-3 its
``logits_output.hidden_states`` is the concatenation of the captured boundaries, which is what the draft will be fed.

What can be seen of a pass, read in the wheels 0.5.9 to 0.5.23 (`patches/forward_tap.py` puts the taps in):

==================  =================================================  ==========================================================
pass                eager                                              CUDA graph
==================  =================================================  ==========================================================
target prefill      ``ModelRunner.forward``                            the same (piecewise graphs too)
target verify       ``ModelRunner.forward``                            the same
draft extend        ``ModelRunner.forward`` of the draft runner        the draft extend graph runner, input and output
draft decode        ``ModelRunner.forward``, once a step               the draft decode graph runner: the input of its first step;
                                                                       the steps after it stay inside the graph and can't be seen
==================  =================================================  ==========================================================

SGLang warms up and captures its draft graphs through the same calls; those are not delivered. (Capturing boundaries inside
a model that has no capture of its own is another matter: :mod:`sglang_eagle3_plugin.runtime.layer_tap`.)
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from sglang_eagle3_plugin import records
from sglang_eagle3_plugin.settings import Settings

logger = logging.getLogger("sglang_eagle3_plugin")


class Consumer(Protocol):
    """Looks at passes. May raise: that disables it, and nothing else."""

    def on_forward(self, runner: Any, forward_batch: Any, output: Any) -> None:
        """Look at one pass, on the thread and the stream that ran it; must not synchronise the device.

        Args:
            runner: SGLang's ``ModelRunner``; ``is_draft_worker`` tells target from draft.
            forward_batch: its ``ForwardBatch``, as the pass left it: ``input_ids`` (N,), ``spec_info.hidden_states`` (N, width) is
                what a draft was fed.
            output: ``ModelRunnerOutput``, or a :class:`PassOutput` where SGLang has none: ``logits_output`` (``hidden_states``
                (N, width); a view of a graph's buffer under replay, overwritten by the next pass on the stream) and
                ``can_run_graph``.
        """


@dataclass(frozen=True)
class PassOutput:
    """The shape of a ``ModelRunnerOutput``, for a draft's graph runners, and for releases before 0.5.7, which return a pair.

    Attributes:
        logits_output: None for the draft decode graph, which hands out tokens only.
        can_run_graph: whether a graph was replayed.
    """

    logits_output: Any
    can_run_graph: bool


consumers: tuple[Consumer, ...] = ()
"""Who looks. The taps test this one attribute of the module, and do nothing more while it is empty."""

_STARTERS: tuple[str, ...] = ("sglang_eagle3_plugin.runtime.debug", "sglang_eagle3_plugin.runtime.dump")
"""Modules whose ``start(runner, settings)`` is called once for each ModelRunner, target and draft, when it has been built."""

_CAPTURE_MODE = ("sglang.srt.model_executor.runner_utils.capture_mode", "sglang.srt.model_executor.cuda_graph_runner")
"""Where SGLang keeps ``is_capture_mode``: newer releases, and older ones."""

failures: dict[str, int] = {}
"""Faults of consumers and starters of this process, by name."""


_changing = threading.Lock()
"""Held while ``consumers`` is changed; who only reads it needs none."""


def add(consumer: Consumer) -> None:
    """Begin to deliver passes to a consumer; adding it again changes nothing. Safe from any thread."""
    global consumers
    with _changing:
        if consumer not in consumers:
            consumers = (*consumers, consumer)


def remove(consumer: Consumer) -> None:
    """Deliver nothing more to a consumer. A pass that is under way may still reach it once. Safe from any thread."""
    global consumers
    with _changing:
        consumers = tuple(one for one in consumers if one is not consumer)


class AfterPass:
    """A consumer that acts once, after the next pass of one runner: between two passes, on the thread that runs them.

    Args:
        runner: whose pass.
        act: called with the pass's ``ForwardBatch``; once, also where it raises.
    """

    def __init__(self, runner: Any, act: Callable[[Any], None]) -> None:
        self._runner = runner
        self._act = act

    def on_forward(self, runner: Any, forward_batch: Any, output: Any) -> None:
        """See :class:`Consumer`."""
        if runner is self._runner:
            remove(self)
            self._act(forward_batch)


def runner_ready(runner: Any) -> None:
    """Let debug and dump begin, now that a ModelRunner has been built; never raises."""
    settings = Settings.from_environment()
    for module in _STARTERS:
        name = module.rpartition(".")[2]
        if name in failures:
            continue
        try:
            importlib.import_module(module).start(runner, settings)
        except Exception as error:
            failed(name, error)


def deliver(runner: Any, forward_batch: Any, output: Any) -> None:
    """Show a pass to every consumer; never raises. A consumer that does is removed, counted, and named in one log line."""
    if capturing():
        return
    if isinstance(output, tuple):
        output = PassOutput(*output[:2])
    for consumer in consumers:
        try:
            consumer.on_forward(runner, forward_batch, output)
        except Exception as error:
            remove(consumer)
            failed(type(consumer).__name__.lower(), error)


def request_ids(forward_batch: Any) -> list[str] | None:
    """The ids of a batch's requests, in its order; None where this pass carries none (an idle rank)."""
    rids = getattr(forward_batch, "rids", None)
    return None if rids is None else [str(rid) for rid in rids]


def capturing() -> bool:
    """Whether SGLang is warming up or capturing CUDA graphs now."""
    for name in _CAPTURE_MODE:
        found = getattr(sys.modules.get(name), "is_capture_mode", None)
        if found is not None:
            return bool(found)
    return False


def failed(name: str, error: Exception) -> None:
    """Count a fault of debug or dump, and say it in one log line and in this process's record; never raises."""
    failures[name] = failures.get(name, 0) + 1
    with contextlib.suppress(Exception):  # logging raises where stderr is closed, and here that would reach a request
        logger.warning(
            "sglang-eagle3-plugin: %s failed and is off in this process; serving goes on (%s: %s).",
            name,
            type(error).__name__,
            error,
            exc_info=logger.isEnabledFor(logging.DEBUG),
        )
    records.note("tap_failures", dict(failures))
