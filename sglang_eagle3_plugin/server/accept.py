"""How much of a draft a running server accepts, and whether that is what it should be."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import httpx

from sglang_eagle3_plugin.errors import UserError
from sglang_eagle3_plugin.server import acceptance
from sglang_eagle3_plugin.server.generate import Prompt, ServerInfo, generate_all, server_info

_HARDLY = 0.1
"""Below this share of accepted first drafts something is wrong with what the draft is fed, whatever its quality."""
_FEW_STEPS = 100
"""With fewer verify steps than this the verdict says that they are few."""


@dataclass(frozen=True)
class Expected:
    """The acceptance length that is due, in tokens a step, and the part of its excess over 1 that may be missing."""

    length: float
    tolerance: float = 0.1

    @property
    def least(self) -> float:
        """The lowest length that is still as expected: the loss is measured on the accepted drafts, not on the 1 that is free."""
        return 1 + (self.length - 1) * (1 - self.tolerance)


@dataclass(frozen=True)
class Report:
    """What was measured, and the verdict."""

    server: ServerInfo
    measured: acceptance.Acceptance
    standard_error: float
    """Of the measured length, in tokens; infinite for fewer than two requests."""
    requests: int
    gauge: float | None
    """``sglang:spec_accept_length`` of ``/metrics``: the last few steps of all users; None without ``--enable-metrics``."""
    ok: bool
    verdict: str

    def as_json(self) -> dict[str, Any]:
        """A JSON object; see ``sglang-eagle3 accept --help``."""
        has_error = self.standard_error != float("inf")
        return {
            "ok": self.ok,
            "verdict": self.verdict,
            "release": self.server.release,
            "algorithm": self.server.algorithm,
            "num_steps": self.server.num_steps,
            "topk": self.server.topk,
            "num_draft_tokens": self.server.num_draft_tokens,
            "length": round(self.measured.length, 4) if self.measured.steps else None,
            "standard_error": round(self.standard_error, 4) if has_error else None,
            "rates": [round(rate, 4) for rate in self.measured.rates()],
            "conditional_rates": [round(rate, 4) for rate in self.measured.conditional_rates()],
            "steps": self.measured.steps,
            "requests": self.requests,
            "server_mean_length": self.server.mean_length,
            "server_gauge_length": self.gauge,
        }


def measure(http: httpx.Client, prompts: list[Prompt], *, max_tokens: int, at_once: int, expected: Expected | None) -> Report:
    """Send the prompts, read what was accepted, and judge it. Without prompts the server's own running mean is judged.

    Raises:
        UserError: the server cannot be reached or refuses a prompt, or there is nothing to judge yet.
    """
    before = server_info(http)
    answers = generate_all(http, prompts, at_once=at_once, max_tokens=max_tokens) if prompts and before.algorithm else []
    parts = [answer.acceptance for answer in answers]
    measured, error = acceptance.total(parts), acceptance.standard_error(parts)
    # Asked again: the running mean and the gauge should include what was just sent.
    server, gauge = (server_info(http) if answers else before), _gauge(http)
    if measured.steps:
        length = measured.length
    elif not before.algorithm:
        return Report(
            server, measured, error, len(answers), gauge, False, "the server does not speculate: no --speculative-algorithm"
        )
    else:
        seen = server.mean_length or gauge
        if seen is None:
            raise UserError(f"{http.base_url} has not reported an acceptance length yet; leave out --passive, or ask again later")
        length = seen
    ok, verdict = _judge(server, length, measured, error, expected)
    return Report(server, measured, error, len(answers), gauge, ok, verdict)


def _judge(
    server: ServerInfo, length: float, measured: acceptance.Acceptance, error: float, expected: Expected | None
) -> tuple[bool, str]:
    few = f" (only {measured.steps} verify steps: send more)" if 0 < measured.steps < _FEW_STEPS else ""
    if expected is not None:
        against = f"{length:.2f} against {expected.length:.2f} expected, {expected.least:.2f} the least"
        if length >= expected.least:
            return True, f"as expected: {against}{few}"
        if error != float("inf") and length + 2 * error >= expected.least:
            return True, f"lower, but within two standard errors ({error:.2f}): {against}{few}"
        return False, f"too low: {against}{few}; {_suspect(server)}"
    if length - 1 < _HARDLY:
        return False, f"hardly a draft is accepted: {length:.2f} tokens a step, 1.00 being none{few}; {_suspect(server)}"
    return True, f"{length:.2f} tokens a step{few}; give --expect to have it judged"


def _suspect(server: ServerInfo) -> str:
    if server.algorithm != "EAGLE3":
        return (
            f"the server runs --speculative-algorithm {server.algorithm}, which feeds an EAGLE-3 draft one state, not its aux ones"
        )
    return "see `sglang-eagle3 status` for the boundaries captured and `sglang-eagle3 doctor` for the draft"


def _gauge(http: httpx.Client) -> float | None:
    """The mean of ``sglang:spec_accept_length`` over the ranks that report it; 0 means that nothing ran lately."""
    try:
        answer = http.get("/metrics", follow_redirects=True)
    except httpx.HTTPError:
        return None
    if answer.status_code != 200:
        return None
    values = [float(value) for value in re.findall(r"^sglang:spec_accept_length(?:\{[^}]*\})? (\S+)$", answer.text, re.MULTILINE)]
    values = [value for value in values if value > 0]
    return sum(values) / len(values) if values else None
