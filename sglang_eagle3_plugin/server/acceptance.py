"""The arithmetic of acceptance, from what SGLang reports of a finished generation.

A verify step checks the draft's tokens in order; with j of them accepted it yields j + 1 tokens. SGLang's ``meta_info`` carries,
per request, how many steps accepted 0, 1, 2, ... drafts. Its own ``spec_accept_length`` is completion tokens over steps, which
counts the token of the prefill too: 8 tokens without one accepted draft give 8/7. Here the acceptance
length is 1 + accepted drafts / steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

# sglang/srt/managers/tokenizer_manager.py, _calculate_spec_decoding_metrics: the newer name first (0.5.13 sends both).
_HISTOGRAM = ("spec_correct_drafts_histogram", "spec_accept_histogram")
_ACCEPTED = ("spec_num_correct_drafts", "spec_accepted_drafts", "spec_accept_token_num")


@dataclass(frozen=True)
class Acceptance:
    """Verify steps and what they accepted, of one request or of many."""

    steps: int = 0
    accepted: int = 0
    """Draft tokens accepted, the target's own tokens not counted."""
    histogram: tuple[int, ...] = ()
    """Entry j: steps that accepted j drafts. Empty where the release does not report it (before 0.5.9)."""

    @property
    def length(self) -> float:
        """Tokens per verify step: 1 when nothing is accepted; 0 without a step."""
        return 1 + self.accepted / self.steps if self.steps else 0.0

    def rates(self) -> list[float]:
        """For position 1, 2, ...: the share of all steps that accepted the draft there. Their sum is ``length`` - 1."""
        total = sum(self.histogram)
        return [sum(self.histogram[position:]) / total for position in range(1, len(self.histogram))] if total else []

    def conditional_rates(self) -> list[float]:
        """The same among the steps that accepted every position before."""
        rates = self.rates()
        return [rate / before if before else 0.0 for rate, before in zip(rates, [1.0, *rates], strict=False)]

    def __add__(self, other: Acceptance) -> Acceptance:
        whole = tuple(a + b for a, b in zip_longest(self.histogram, other.histogram, fillvalue=0))
        return Acceptance(self.steps + other.steps, self.accepted + other.accepted, whole)


def of_meta_info(meta: Mapping[str, Any]) -> Acceptance:
    """Read a generation's ``meta_info``; no step where the server does not speculate or does not say."""
    steps = int(meta.get("spec_verify_ct") or 0)
    histogram = tuple(int(count) for count in next((meta[key] for key in _HISTOGRAM if meta.get(key)), ()))
    accepted = next((int(meta[key]) for key in _ACCEPTED if meta.get(key) is not None), None)
    if accepted is None:
        # Releases that give the number of steps alone (0.5.4 and before): every token but the prefill's came of a step.
        accepted = sum(j * count for j, count in enumerate(histogram)) or max(int(meta.get("completion_tokens", 0)) - 1 - steps, 0)
    return Acceptance(steps, accepted if steps else 0, histogram if steps else ())


def total(parts: Iterable[Acceptance]) -> Acceptance:
    """The sum of several."""
    return sum(parts, Acceptance())


def standard_error(parts: Iterable[Acceptance]) -> float:
    """Of the acceptance length, in tokens, taking the requests as the independent draws (steps of one text are not)."""
    counted = [part for part in parts if part.steps]
    if len(counted) < 2:
        return float("inf")
    whole = total(counted)
    mean = whole.accepted / whole.steps
    residuals = sum((part.accepted - mean * part.steps) ** 2 for part in counted)
    n = len(counted)
    return float((residuals * n / (n - 1)) ** 0.5 / whole.steps)
