"""What goes between a serving process and the one that makes its debug lines: framed plain values, and where the log goes. Pure.

Both ends run the same interpreter, so `marshal` will do: it is made of plain values alone, and costs a step some microseconds.
"""

from __future__ import annotations

import logging
import marshal
import struct
import sys
from collections.abc import Iterator
from typing import Any

_LENGTH = struct.Struct("<I")

Place = tuple[int, int, str, "str | None", str, str]
"""Of a log: descriptor, level of its handler, format, date format, encoding, and what to do with what can't be encoded."""


def frame(*message: Any) -> bytes:
    """One message, ready to be written; its first value says what it is.

    Raises:
        ValueError: it holds other than plain values.
    """
    data = marshal.dumps(message)
    return _LENGTH.pack(len(data)) + data


class Frames:
    """Takes messages apart as their bytes come in."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[Any, ...]]:
        """The messages that are complete with these bytes."""
        self._data += data
        while len(self._data) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._data)[0]
            if len(self._data) < end:
                return
            message = marshal.loads(self._data[_LENGTH.size : end])  # noqa: S302  from our own other end
            del self._data[:end]
            yield message


def log_level(logger: logging.Logger) -> int:
    """The lowest level of our lines that this logger takes; above every level where it takes none."""
    return next((level for level in (logging.INFO, logging.WARNING) if logger.isEnabledFor(level)), logging.CRITICAL + 1)


def log_places(logger: logging.Logger) -> list[Place] | None:
    """Where a logger's lines end up, if that is stdout or stderr, plainly formatted; None where it is anything else.

    Plain handlers alone will do: what a subclass, a filter or a formatter of somebody's own does can't be known elsewhere.
    """
    places: list[Place] = []
    at: logging.Logger | None = logger
    while at is not None:
        if logger.filters:
            return None
        for handler in at.handlers:
            place = _place(handler)
            if place is None:
                return None
            places.append(place)
        at = at.parent if at.propagate else None
    return places or None


def _place(handler: logging.Handler) -> Place | None:
    formatter = handler.formatter or logging.Formatter()
    if type(handler) is not logging.StreamHandler or handler.filters or type(formatter) is not logging.Formatter:
        return None
    stream = handler.stream
    if stream is None or stream not in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        return None
    if type(formatter._style) is not logging.PercentStyle or handler.terminator != "\n":
        return None
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError, AttributeError):
        return None
    if descriptor not in (1, 2):
        return None
    return (descriptor, handler.level, formatter._style._fmt, formatter.datefmt, stream.encoding, stream.errors or "strict")
