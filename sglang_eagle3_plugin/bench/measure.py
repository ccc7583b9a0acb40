"""One measurement: the prompts through one server, so many at once, timed from outside."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import httpx

from sglang_eagle3_plugin.errors import UserError
from sglang_eagle3_plugin.server import acceptance
from sglang_eagle3_plugin.server.acceptance import Acceptance
from sglang_eagle3_plugin.server.generate import Prompt, generate_all

_WARM_TOKENS = 16


@dataclass(frozen=True)
class Measurement:
    """One run of the prompts. Times in seconds."""

    case: str
    """``baseline`` or a setting's name."""
    batch: int
    """Requests under way together."""
    repeat: int
    tokens_per_s: float
    """All tokens of all answers over the time of the run."""
    ttft_s: float
    """Median over the requests, from the request to the first piece of its answer."""
    step_s: float
    """Median over the requests of its decode time over its steps; a step of the baseline is a token."""
    acceptance: Acceptance
    digests: tuple[str, ...]
    """Of the answers, in the prompts' order."""
    wall_s: float
    output_tokens: int
    flushed: bool = True
    """Whether the server emptied its prefix cache before."""

    def as_json(self) -> dict[str, Any]:
        """One line of the store."""
        return {**vars(self), "acceptance": vars(self.acceptance)}

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> Measurement:
        """Read it back."""
        counted = line["acceptance"]
        accepted = Acceptance(counted["steps"], counted["accepted"], tuple(counted["histogram"]))
        return cls(**{**line, "acceptance": accepted, "digests": tuple(line["digests"])})


def warm_up(http: httpx.Client, prompts: list[Prompt], batch: int, max_tokens: int) -> None:
    """Run the batch size once, shortly, so that compilation and graphs are no part of the measurement."""
    generate_all(http, prompts[:batch], at_once=batch, max_tokens=min(max_tokens, _WARM_TOKENS))


def measure(http: httpx.Client, prompts: list[Prompt], case: str, batch: int, repeat: int, max_tokens: int) -> Measurement:
    """Run the prompts once, greedily, every answer ``max_tokens`` long.

    The prefix cache is emptied before: the prompts of the last repeat would be found in it, and the time to the first token
    would be that of no prefill.

    Raises:
        UserError: a request failed.
    """
    flushed = _flush(http)
    began = time.perf_counter()
    answers = generate_all(http, prompts, at_once=batch, max_tokens=max_tokens)
    wall = time.perf_counter() - began
    if short := [answer for answer in answers if answer.completion_tokens < max_tokens]:
        raise UserError(
            f"an answer has {short[0].completion_tokens} tokens instead of {max_tokens}: the context is too short;"
            " lower --max-tokens or raise --context-length"
        )
    accepted = acceptance.total(answer.acceptance for answer in answers)
    steps = [(answer.acceptance.steps or answer.completion_tokens - 1, answer.total_s - answer.ttft_s) for answer in answers]
    return Measurement(
        case=case,
        batch=batch,
        repeat=repeat,
        tokens_per_s=sum(answer.completion_tokens for answer in answers) / wall,
        ttft_s=median(answer.ttft_s for answer in answers),
        step_s=median(seconds / count for count, seconds in steps),
        acceptance=accepted,
        digests=tuple(answer.digest for answer in answers),
        wall_s=wall,
        output_tokens=sum(answer.completion_tokens for answer in answers),
        flushed=flushed,
    )


def _flush(http: httpx.Client) -> bool:
    # 400 while a request is being cleaned up: asked again. Others don't pass: no such path behind a gateway, a key that is refused.
    for _ in range(20):
        try:
            status = http.post("/flush_cache").status_code
        except httpx.HTTPError as error:
            raise UserError(f"{http.base_url} does not answer ({type(error).__name__}); see the server's log") from error
        if status == 200 or status in (401, 403, 404, 405, 501):
            return status == 200
        time.sleep(0.25)
    return False
