"""The flags of ``launch_server`` that bear on EAGLE-3, read as SGLang's argparse reads them. Standard library only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

_ALIASES: dict[str, str] = {
    "--speculative-draft-model": "--speculative-draft-model-path",
    "--tp": "--tp-size",
    "--tensor-parallel-size": "--tp-size",
    "--pp": "--pp-size",
    "--pipeline-parallel-size": "--pp-size",
    "--dp": "--dp-size",
    "--data-parallel-size": "--dp-size",
    "--ep": "--ep-size",
    "--expert-parallel-size": "--ep-size",
    "--expert-parallel": "--ep-size",
    "--model": "--model-path",
}
_ABBREVIATED = (
    "--speculative-algorithm",
    "--speculative-draft-model-path",
    "--speculative-draft-model-quantization",
    "--speculative-num-steps",
    "--speculative-num-draft-tokens",
    "--speculative-eagle-topk",
    "--quantization",
    "--context-length",
)
"""argparse accepts any unambiguous beginning of a flag (``--speculative-algo``); these are the ones that people shorten."""


@dataclass(frozen=True)
class Flags:
    """Launch flags by canonical name, each with its values (none for a switch).

    Attributes:
        given: canonical flag -> values; the last one given wins, as in argparse.
    """

    given: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def has(self, name: str) -> bool:
        """Whether the flag was given."""
        return name in self.given

    def text(self, name: str) -> str | None:
        """The first value of a flag, or None."""
        values = self.given.get(name)
        return values[0] if values else None

    def number(self, name: str, default: int) -> int:
        """The value of a flag as an integer; the default where it is absent or no integer."""
        value = self.text(name)
        try:
            return default if value is None or len(value) > 18 else int(value)
        except ValueError:
            return default

    @property
    def algorithm(self) -> str | None:
        """``--speculative-algorithm``, upper case, or None when it was not given."""
        value = self.text("--speculative-algorithm")
        return value.upper() if value else None

    @property
    def tp(self) -> int:
        """Tensor-parallel size."""
        return self.number("--tp-size", 1)

    @property
    def pp(self) -> int:
        """Pipeline-parallel size."""
        return self.number("--pp-size", 1)


def parse(arguments: Sequence[str]) -> Flags:
    """Read the flags out of a launch line.

    Everything before the first ``--flag`` (``python -m sglang.launch_server``) is passed over, as are flags of no concern here;
    ``--flag value``, ``--flag=value`` and values such as ``-1`` are understood.
    """
    given: dict[str, tuple[str, ...]] = {}
    name: str | None = None
    values: list[str] = []
    for token in [*arguments, "--"]:
        if token.startswith("--"):
            if name is not None:
                given[name] = tuple(values)
            flag, _, value = token.partition("=")
            name = _canonical(flag)
            values = [value] if "=" in token else []
        elif name is not None:
            values.append(token)
    given.pop("--", None)
    return Flags(given)


def _canonical(flag: str) -> str:
    flag = flag.replace("_", "-")
    if flag in _ALIASES:
        return _ALIASES[flag]
    starting = [known for known in _ABBREVIATED if known.startswith(flag) and len(flag) > 6]
    return starting[0] if len(starting) == 1 else flag
