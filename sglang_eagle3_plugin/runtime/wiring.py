"""One wiring a server, and the right one: what the target captures is what the draft was trained on.

After the target is loaded its ``set_eagle3_layers_to_capture`` is shadowed, on that one object, by a setter that first lets the
release's own do its work and then makes the layer stack capture the wanted boundaries. Whoever calls it, with which ids, before or
after the CUDA graphs are captured (0.5.9 to 0.5.10.post1 call it without ids for the graphs, with them afterwards): the
result is one.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sglang_eagle3_plugin import drafts, records
from sglang_eagle3_plugin.boundaries import BoundaryError, Decision
from sglang_eagle3_plugin.runtime import parallel
from sglang_eagle3_plugin.runtime.capture import CaptureError
from sglang_eagle3_plugin.runtime.stacks import CapturingStack, stack_of
from sglang_eagle3_plugin.runtime.target import SETTER
from sglang_eagle3_plugin.settings import Settings

logger = logging.getLogger("sglang_eagle3_plugin")


def attach(runner: Any, settings: Settings) -> None:
    """Wire the target that a ModelRunner has just loaded; for one that ``serves_eagle3`` (runtime/target.py).

    Args:
        runner: SGLang's ``ModelRunner`` after ``load_model`` (sglang/srt/model_executor/model_runner.py).
        settings: the process's settings.
    """
    stock = getattr(runner.model, SETTER, None)
    if stock is None:
        logger.warning(
            "sglang-eagle3-plugin: %s has no %s and no patch gave it one, so SGLang will stop now; "
            "`sglang-eagle3 status` says what each patch found.",
            type(runner.model).__name__,
            SETTER,
        )
        return
    num_layers = int(runner.model_config.num_hidden_layers)
    draft = drafts.find(runner.server_args.speculative_draft_model_path, runner.server_args.speculative_draft_model_revision)
    if draft is None:
        logger.warning(
            "sglang-eagle3-plugin: the draft's config.json is not on this machine yet; its layer ids stay as SGLang reads them."
        )
        return
    runner.model.set_eagle3_layers_to_capture = Setter(runner, stock, draft, num_layers, settings)


@dataclass(frozen=True)
class Wired:
    """What came of a wiring, for whoever labels what a target emits.

    Attributes:
        stack: reads, by effect and at any later time, what the target captures.
        wanted: the boundaries the draft was trained on; None where that could not be decided.
    """

    stack: CapturingStack
    wanted: tuple[int, ...] | None


def wired(model: Any) -> Wired | None:
    """The wiring of a loaded target; None where :func:`attach` did nothing, or its setter has not been called."""
    return getattr(vars(model).get(SETTER), "wired", None)


class Setter:
    """Stands in for one target's ``set_eagle3_layers_to_capture``; every call leaves the same boundaries captured."""

    def __init__(self, runner: Any, stock: Any, draft: drafts.Draft, num_layers: int, settings: Settings) -> None:
        self.runner = runner
        self.stock = stock
        self.draft = draft
        self.num_layers = num_layers
        self.settings = settings
        self._said = False
        self.wired: Wired | None = None

    def __call__(self, layer_ids: Sequence[int] | None = None) -> None:
        """Call the release's own setter with the ids that SGLang read from the draft, then correct what it captures."""
        fault = self._call_stock(layer_ids)
        if not parallel.is_last_stage(self.runner):
            return  # SGLang's setters do nothing there either: what a stage before the last one captures is dropped
        try:
            self._correct(fault)
        except (CaptureError, BoundaryError) as error:
            self._refuse(str(error))
        except Exception:
            logger.warning("sglang-eagle3-plugin: wiring failed; layer ids stay as SGLang reads them.", exc_info=True)

    def _call_stock(self, layer_ids: Sequence[int] | None) -> str:
        """Let the release's own setter do its work; return what it failed with, or an empty string.

        A setter that marks layers indexes past the last one when boundary L is asked for; without ids it always works.
        """
        seen = self.draft.ids_seen_by_sglang
        # As they come: a source that was patched, or reads a convention itself, says more than a list does.
        ids = layer_ids if layer_ids is not None else None if seen is None else list(seen)
        try:
            self.stock(ids)
        except Exception as error:
            self.stock(None)
            return f"{type(error).__name__}: {error}"
        return ""

    def _correct(self, fault: str) -> None:
        decision = drafts.decide_for(self.draft, self.num_layers, self.settings)
        stack = stack_of(self.runner.model, self.num_layers)
        stock = None if fault else stack.captured
        wanted = stock if decision.boundaries is None else decision.boundaries
        if wanted is None:
            raise CaptureError(f"{decision.evidence}, and this SGLang's own setter fails on these ids ({fault})")
        if stock != wanted or decision.boundaries is not None:
            stack.capture(wanted)
        parallel.check(self.runner, stack)
        self.wired = Wired(stack, decision.boundaries)
        self._say(decision, stock, stack.captured)

    def _say(self, decision: Decision, stock: tuple[int, ...] | None, captured: tuple[int, ...]) -> None:
        if self._said:
            return
        self._said = True
        ids = list(self.draft.ids) if self.draft.ids else None
        corrected = captured != stock
        records.note(
            "wiring",
            {
                "ids": ids,
                "convention": decision.convention,
                "decided_by": decision.decided_by,
                "evidence": decision.evidence,
                "wanted": None if decision.boundaries is None else list(decision.boundaries),
                "stock": None if stock is None else list(stock),
                "captured": list(captured),
                "corrected": corrected,
            },
        )
        if decision.boundaries is None:
            logger.warning(
                "sglang-eagle3-plugin: wiring undecided: %s. This release's own reading is kept: boundaries %s are captured. "
                "Set EAGLE3_LAYER_CONVENTION=output or =boundary to say which is meant.",
                decision.evidence,
                list(captured),
            )
            return
        logger.info(
            "sglang-eagle3-plugin: wiring: ids %s, convention %s, decided by %s (%s), wanted boundaries %s, captured %s (%s)",
            "none" if ids is None else ids,
            decision.convention,
            decision.decided_by,
            decision.evidence,
            list(decision.boundaries),
            list(captured),
            "SGLang's own setter fails on these ids"
            if stock is None
            else f"corrected from {list(stock)}"
            if corrected
            else "as SGLang had it",
        )

    def _refuse(self, why: str) -> None:
        message = f"sglang-eagle3-plugin: this wiring cannot be right: {why}."
        if not self.settings.allow_miswired:
            raise SystemExit(f"{message} Correct the draft's layer ids, or set EAGLE3_ALLOW_MISWIRED=1 to serve all the same.")
        logger.warning("%s EAGLE3_ALLOW_MISWIRED=1: serving all the same.", message)
