"""One generation through a running server, timed from outside."""

from __future__ import annotations

import contextlib
import hashlib
import json
import queue
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from sglang_eagle3_plugin.errors import UserError
from sglang_eagle3_plugin.server.acceptance import Acceptance, of_meta_info
from sglang_eagle3_plugin.server.address import get_json

Prompt = Mapping[str, Any]
"""What ``/generate`` takes: ``{"input_ids": [...]}`` or ``{"text": "..."}``."""

_TAIL = 1 << 22
"""Bytes kept of what is no stream of events."""


@dataclass(frozen=True)
class Generation:
    """One answer. Times in seconds."""

    ttft_s: float
    """From the request to the first piece of the answer."""
    total_s: float
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    acceptance: Acceptance
    digest: str
    """Of the answer, to tell whether two servers gave the same one; the answer itself is not kept."""


def generate(
    http: httpx.Client, prompt: Prompt, *, max_tokens: int, temperature: float = 0.0, ignore_eos: bool = True
) -> Generation:
    """Send one prompt and read its stream to the end.

    Raises:
        UserError: the server refuses it, breaks off, or cannot be reached.
    """
    sampling = {"max_new_tokens": max_tokens, "temperature": temperature, "ignore_eos": ignore_eos}
    where = str(http.base_url).rstrip("/")
    began, first, tail = time.perf_counter(), 0.0, b""
    try:
        with http.stream("POST", "/generate", json={**prompt, "sampling_params": sampling, "stream": True}) as answer:
            for piece in answer.iter_raw():
                first = first or time.perf_counter()
                # Every event repeats the whole answer so far: the last one is parsed, before the stream's own [DONE].
                tail = _last_two(tail + piece)
            status = answer.status_code
    except httpx.HTTPError as error:
        raise UserError(f"a generation at {where} broke off ({type(error).__name__}: {error}); see the server's log") from error
    ended = time.perf_counter()
    if status != 200:
        raise UserError(f"{where}/generate answers {status}: {tail[:300].decode(errors='replace')}; see the server's log")
    last = _last_event(tail)
    if last is None or "meta_info" not in last:
        raise UserError(
            f"{where}/generate ended without an answer ({tail[-200:].decode(errors='replace')!r}); see the server's log"
        )
    meta = last["meta_info"]
    said = last.get("output_ids") if last.get("output_ids") is not None else last.get("text", "")
    return Generation(
        ttft_s=first - began,
        total_s=ended - began,
        prompt_tokens=int(meta.get("prompt_tokens", 0)),
        completion_tokens=int(meta.get("completion_tokens", 0)),
        cached_tokens=int(meta.get("cached_tokens") or 0),
        acceptance=of_meta_info(meta),
        digest=hashlib.sha256(json.dumps(said).encode()).hexdigest()[:16],
    )


def generate_all(
    http: httpx.Client, prompts: list[Prompt], *, at_once: int, max_tokens: int, temperature: float = 0.0
) -> list[Generation]:
    """Send all prompts, always ``at_once`` of them under way, and return their answers in the prompts' order.

    Raises:
        UserError: one of them failed; the others are given up.
    """
    todo: queue.SimpleQueue[int | None] = queue.SimpleQueue()
    done: queue.SimpleQueue[tuple[int, Generation | BaseException]] = queue.SimpleQueue()
    workers = min(at_once, len(prompts))
    for turn in (*range(len(prompts)), *[None] * workers):
        todo.put(turn)

    def work() -> None:
        while (turn := todo.get()) is not None:
            try:
                done.put((turn, generate(http, prompts[turn], max_tokens=max_tokens, temperature=temperature)))
            except BaseException as error:  # told where the answers are awaited
                done.put((turn, error))

    # Daemons, and no executor: that one is waited for at exit, which after Ctrl-C can last as long as an answer may take.
    for _ in range(workers):
        threading.Thread(target=work, daemon=True, name="request").start()
    answers: dict[int, Generation] = {}
    try:
        while len(answers) < len(prompts):
            turn, outcome = done.get()
            if isinstance(outcome, BaseException):
                raise outcome
            answers[turn] = outcome
    finally:
        with contextlib.suppress(queue.Empty):
            while True:
                todo.get_nowait()  # what nobody has begun
        for _ in range(workers):
            todo.put(None)
    return [answers[turn] for turn in range(len(prompts))]


@dataclass(frozen=True)
class ServerInfo:
    """What a server says of itself."""

    release: str
    model: str
    draft: str
    algorithm: str
    """``EAGLE3``, ...; empty when it does not speculate."""
    num_steps: int
    topk: int
    num_draft_tokens: int
    graphs_off: bool
    takes_ids_only: bool
    """``skip_tokenizer_init``: it has no tokenizer, so text cannot be sent."""
    mean_length: float | None
    """SGLang's own running mean of the acceptance length, over all requests since it was last reset."""


def server_info(http: httpx.Client) -> ServerInfo:
    """Ask ``/server_info`` (0.5.6 and later), or ``/get_server_info``.

    Raises:
        UserError: there is no such server, or it wants a key.
    """
    said = get_json(http, "/server_info", "/get_server_info")
    states = said.get("internal_states") or [{}]
    means = [state["avg_spec_accept_length"] for state in states if state.get("avg_spec_accept_length")]
    algorithm = said.get("speculative_algorithm")
    return ServerInfo(
        release=str(said.get("version", "unknown")),
        model=str(said.get("model_path", "")),
        draft=str(said.get("speculative_draft_model_path") or ""),
        algorithm="" if algorithm in (None, "None", "NONE") else str(algorithm),
        num_steps=int(said.get("speculative_num_steps") or 0),
        topk=int(said.get("speculative_eagle_topk") or 0),
        num_draft_tokens=int(said.get("speculative_num_draft_tokens") or 0),
        graphs_off=bool(said.get("disable_cuda_graph")),
        takes_ids_only=bool(said.get("skip_tokenizer_init")),
        # One state a data-parallel rank.
        mean_length=sum(means) / len(means) if means else None,
    )


def _last_two(stream: bytes) -> bytes:
    """The last two whole events and what follows them; copying more for every piece would cost a fast server's client dearly."""
    end = len(stream)
    for _ in range(3):
        end = stream.rfind(b"\n\n", 0, end)
        if end < 0:
            return stream if len(stream) < 2 * _TAIL else stream[-_TAIL:]
    return stream[end + 2 :]


def _last_event(tail: bytes) -> dict[str, Any] | None:
    for line in reversed(tail.splitlines()):
        if line.startswith(b"data:") and not line.startswith(b"data: [DONE]"):
            try:
                found = json.loads(line[5:])
            except ValueError:
                continue
            return found if isinstance(found, dict) else None
    return None
