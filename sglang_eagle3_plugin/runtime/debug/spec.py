"""What EAGLE3_DEBUG asks for: ``1``, or ``steps=20,every=100,values=5,requests=ID,rate=20,ids=1``. Pure."""

from __future__ import annotations

from dataclasses import dataclass

_WHOLE = {"steps": 10**9, "every": 10**9, "values": 64, "rate": 10**6}
"""Keys whose value is a whole number, and the largest one taken."""


class SpecError(ValueError):
    """A spec that does not parse; the message says where and what is meant."""


@dataclass(frozen=True)
class Spec:
    """Which steps are looked at, and what is said of them. A step is a target pass with the draft passes around it.

    Attributes:
        steps: the first so many steps after turning on are looked at.
        every: after them, each so many-th; 1: every step; 0: none.
        values: how many first values of each slot's first token are given.
        requests: only passes with one of these request ids in them, and only their tokens; empty: all.
        rate: at most so many steps a second; 0: no limit. What is over it is not looked at, and counted.
        ids: token ids may be written.
    """

    steps: int = 20
    every: int = 100
    values: int = 5
    requests: tuple[str, ...] = ()
    rate: int = 20
    ids: bool = False

    def __str__(self) -> str:
        """Write it as :func:`parse` reads it."""
        parts = [f"{key}={getattr(self, key)}" for key in _WHOLE]
        parts += [f"requests={rid}" for rid in self.requests]
        return ",".join([*parts, f"ids={int(self.ids)}"])


def parse(text: str) -> Spec:
    """Read a spec; ``1``, ``true``, ``yes``, ``on`` and nothing at all mean the defaults.

    Several requests are given by several ``requests=``; an id that holds a comma can't be named.

    Raises:
        SpecError: it does not parse.
    """
    if text.strip().lower() in ("", "1", "true", "yes", "on"):
        return Spec()
    whole: dict[str, int] = {}
    requests: list[str] = []
    ids = False
    for part in text.split(","):
        key, equals, value = (word.strip() for word in part.partition("="))
        if not equals:
            raise SpecError(f"{part.strip()!r} is no key=value; a spec looks like {Spec()!s}")
        if key == "requests":
            if not value:
                raise SpecError("requests= names no request id")
            requests.append(value)
        elif key == "ids":
            if value not in ("0", "1"):
                raise SpecError(f"ids={value!r} is neither 0 nor 1")
            ids = value == "1"
        elif key in _WHOLE:
            if not (value.isascii() and value.isdigit() and len(value) <= 10 and int(value) <= _WHOLE[key]):
                raise SpecError(f"{key}={value!r} is not a whole number from 0 to {_WHOLE[key]}")
            whole[key] = int(value)
        else:
            raise SpecError(f"{key!r} is unknown; the keys are {', '.join([*_WHOLE, 'requests', 'ids'])}")
    return Spec(requests=tuple(dict.fromkeys(requests)), ids=ids, **whole)
