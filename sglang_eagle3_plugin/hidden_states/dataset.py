"""Rows of a data set as token ids and loss mask: chats, texts or ids, from JSON lines or Parquet."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_eagle3_plugin.errors import UserError

_ROLES = {"human": "user", "gpt": "assistant"}
"""ShareGPT's names of the roles."""


@dataclass(frozen=True)
class Sequence:
    """One sequence to run.

    Attributes:
        ids: token ids.
        mask: runs [start, end) where the loss counts.
        origin: file and line, for messages.
    """

    ids: tuple[int, ...]
    mask: tuple[tuple[int, int], ...]
    origin: str


def read(path: Path, tokenizer: Any = None, max_length: int | None = None) -> Iterator[Sequence]:
    """Read a data set. A row has ``input_ids`` (and ``loss_mask``), ``messages`` or ``conversations``, or ``text``.

    Args:
        path: ``.jsonl`` or ``.parquet``.
        tokenizer: of transformers; needed for chats and texts.
        max_length: longer sequences are cut.

    Raises:
        UserError: a row is none of these, or the file cannot be read.
    """
    for number, row in _rows(path):
        origin = f"{path.name}:{number}"
        try:
            ids, mask = _tokens(row, tokenizer)
        except (TypeError, ValueError, KeyError) as error:
            raise UserError(f"{origin} cannot be used: {error}") from error
        if max_length is not None:
            ids, mask = ids[:max_length], [(start, min(end, max_length)) for start, end in mask if start < max_length]
        if ids:
            yield Sequence(tuple(ids), tuple(mask), origin)


def needs_tokenizer(path: Path) -> bool:
    """Whether the first row is a chat or a text.

    Raises:
        UserError: as :func:`read`.
    """
    return any(row.get("input_ids") is None for _, row in itertools.islice(_rows(path), 1))


def load_tokenizer(directory: str) -> Any:
    """A tokenizer of transformers.

    Raises:
        UserError: transformers is absent, or there is no tokenizer.
    """
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise UserError(
            "chats and texts need transformers for their tokenizer; install it, run this in SGLang's environment, or give input_ids"
        ) from error
    try:
        return AutoTokenizer.from_pretrained(directory)
    except (OSError, ValueError) as error:
        raise UserError(f"there is no tokenizer in {directory} ({str(error).splitlines()[0]}); give --tokenizer") from error


def _rows(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    if path.suffix == ".parquet":
        try:
            from pyarrow import parquet
        except ImportError as error:
            raise UserError("reading Parquet needs pyarrow; install it, or give JSON lines") from error
        try:
            file = parquet.ParquetFile(path)
        except (OSError, ValueError) as error:
            raise UserError(f"{path} cannot be read as Parquet ({error})") from error
        number = 0
        for batch in file.iter_batches(1024):
            for row in batch.to_pylist():
                number += 1
                yield number, row
        return
    try:
        with path.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield number, _object(path, number, line)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read as JSON lines ({error})") from error


def _object(path: Path, number: int, line: str) -> Mapping[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path.name}:{number} is no JSON ({error})") from error
    if not isinstance(row, dict):
        raise UserError(f"{path.name}:{number} is no JSON object")
    return row


def _tokens(row: Mapping[str, Any], tokenizer: Any) -> tuple[list[int], list[tuple[int, int]]]:
    if row.get("input_ids") is not None:
        ids = [int(i) for i in row["input_ids"]]
        given = row.get("loss_mask")
        if given is not None and len(given) != len(ids):
            raise ValueError(f"its loss_mask has {len(given)} entries for {len(ids)} tokens")
        return ids, runs([1] * len(ids) if given is None else given)
    chat = row.get("messages") or row.get("conversations")
    if chat is None and not isinstance(row.get("text"), str):
        raise ValueError("it has none of input_ids, messages, conversations and text")
    if tokenizer is None:
        raise ValueError("chats and texts need a tokenizer; give --tokenizer")
    if chat is None:
        ids = list(tokenizer(row["text"])["input_ids"])
        return ids, [(0, len(ids))]
    return _chat([_message(m) for m in chat], tokenizer)


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    if "role" in message:
        return dict(message)
    role = str(message["from"])
    return {"role": _ROLES.get(role, role), "content": message["value"]}


def _chat(messages: list[dict[str, Any]], tokenizer: Any) -> tuple[list[int], list[tuple[int, int]]]:
    """The template's tokens, and the runs that the assistant says: what each of its turns adds to what came before."""

    def render(upto: int, prompt: bool) -> list[int]:
        options = {"tokenize": True, "add_generation_prompt": prompt, "return_dict": True}
        return list(tokenizer.apply_chat_template(messages[:upto], **options)["input_ids"])

    ids = render(len(messages), False)
    mask = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        start, end = len(_common(render(index, True), ids)), len(_common(render(index + 1, False), ids))
        if start < end:
            mask.append((start, end))
    return ids, mask


def _common(some: list[int], other: list[int]) -> list[int]:
    """The common beginning: a template may write a turn otherwise once another follows."""
    length = 0
    while length < min(len(some), len(other)) and some[length] == other[length]:
        length += 1
    return some[:length]


def runs(mask: Any) -> list[tuple[int, int]]:
    """A mask of 0 and 1 as runs [start, end) of ones."""
    found: list[tuple[int, int]] = []
    for index, value in enumerate(mask):
        if value and found and found[-1][1] == index:
            found[-1] = (found[-1][0], index + 1)
        elif value:
            found.append((index, index + 1))
    return found
