"""The prompts that `accept` and `bench` send: from a file, or a small set of ours."""

from __future__ import annotations

import json
import random
from importlib import resources
from pathlib import Path
from typing import Any

import httpx

from sglang_eagle3_plugin.errors import UserError
from sglang_eagle3_plugin.server.generate import Prompt

_FIELDS = ("input_ids", "text", "messages")


def built_in() -> list[dict[str, Any]]:
    """Our own set: chat, code, mathematics, summary, extraction, translation; one user message each."""
    text = (resources.files("sglang_eagle3_plugin") / "data" / "prompts.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def from_file(path: Path) -> list[dict[str, Any]]:
    """Read JSON lines, each an object with ``input_ids``, ``text`` or ``messages``.

    Raises:
        UserError: a line is something else, or there is none.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"the prompts {path} cannot be read ({error}); give a file of JSON lines") from error
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            prompt = json.loads(line)
        except (ValueError, RecursionError):
            prompt = None
        if not isinstance(prompt, dict) or sum(key in prompt for key in _FIELDS) != 1:
            raise UserError(f"line {number} of {path} is no JSON object with one of {', '.join(_FIELDS)}; one prompt a line")
        if fault := _fault(prompt):
            raise UserError(f"line {number} of {path}: {fault}; mend that prompt")
        found.append({key: prompt[key] for key in _FIELDS if key in prompt})
    if not found:
        raise UserError(f"{path} holds no prompt; write one JSON object with 'text', 'messages' or 'input_ids' a line")
    return found


def _fault(prompt: dict[str, Any]) -> str:
    """What a server would stumble over, or an empty string."""
    if "input_ids" in prompt:
        ids = prompt["input_ids"]
        good = isinstance(ids, list) and ids and all(type(one) is int and 0 <= one < 1 << 31 for one in ids)
        return "" if good else "'input_ids' is no list of token ids"
    if "text" in prompt:
        if not isinstance(prompt["text"], str):
            return "'text' is no string"
    else:
        messages = prompt["messages"]
        good = isinstance(messages, list) and messages and all(isinstance(one, dict) for one in messages)
        # The content may be a list of parts, or null beside calls of tools.
        if not good or not all(isinstance(one.get("role"), str) and "content" in one for one in messages):
            return "'messages' is no list of objects with 'role' and 'content'"
    try:
        json.dumps(prompt, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return "half a surrogate pair is no text"
    return ""


def random_ids(count: int, length: int, seed: int) -> list[dict[str, Any]]:
    """Prompts of random token ids from 10 to 249, for a server without a tokenizer: any vocabulary has those."""
    rng = random.Random(seed)  # noqa: S311
    return [{"input_ids": [rng.randrange(10, 250) for _ in range(length)]} for _ in range(count)]


def for_server(http: httpx.Client, prompts: list[dict[str, Any]]) -> tuple[list[Prompt], bool]:
    """Turn messages into what ``/generate`` takes, with the model's own chat template where the server can apply it.

    ``/tokenize`` takes messages from 0.5.12 on. Elsewhere the message goes in as plain text, which
    a chat model accepts worse than a conversation: a draft that was trained on conversations then looks worse than it is.

    Returns:
        The prompts, and whether every message went through the template.
    """
    ready: list[Prompt] = []
    templated = True
    for prompt in prompts:
        if "messages" not in prompt:
            ready.append(prompt)
            continue
        ids = _templated(http, prompt["messages"]) if templated else None
        templated = ids is not None
        ready.append({"input_ids": ids} if ids else {"text": "\n".join(map(_plain, prompt["messages"]))})
    return ready, templated


def _plain(message: dict[str, Any]) -> str:
    content = message["content"] or ""
    parts = [part.get("text", "") for part in content if isinstance(part, dict)] if isinstance(content, list) else [content]
    return "\n".join(map(str, parts))


def _templated(http: httpx.Client, messages: list[dict[str, str]]) -> list[int] | None:
    try:
        answer = http.post("/tokenize", json={"messages": messages})
        tokens = answer.json().get("tokens") if answer.status_code == 200 else None
    except (httpx.HTTPError, ValueError, AttributeError):
        return None
    return tokens if isinstance(tokens, list) and tokens and all(isinstance(token, int) for token in tokens) else None
