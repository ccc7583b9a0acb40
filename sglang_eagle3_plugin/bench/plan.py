"""What is measured: the baseline, and a grid of draft settings."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from sglang_eagle3_plugin.errors import UserError


@dataclass(frozen=True, order=True)
class Setting:
    """One way to draft, in SGLang's own terms."""

    topk: int
    num_steps: int
    num_draft_tokens: int
    """Nodes of the tree that is verified, the root included."""

    @property
    def name(self) -> str:
        """As tables and logs call it."""
        return f"steps {self.num_steps}, topk {self.topk}, tokens {self.num_draft_tokens}"

    @classmethod
    def named(cls, name: str) -> Setting | None:
        """The setting of that name; None where it is none's."""
        found = re.fullmatch(r"steps (\d+), topk (\d+), tokens (\d+)", name)
        return cls(num_steps=int(found[1]), topk=int(found[2]), num_draft_tokens=int(found[3])) if found else None

    @property
    def flags(self) -> list[str]:
        """The flags of ``sglang.launch_server`` for it, the draft's own not among them."""
        return [
            "--speculative-num-steps",
            str(self.num_steps),
            "--speculative-eagle-topk",
            str(self.topk),
            "--speculative-num-draft-tokens",
            str(self.num_draft_tokens),
        ]


DEFAULT = Setting(topk=1, num_steps=3, num_draft_tokens=4)
"""SGLang's own default for a chain (``auto_choose_speculative_params``, server_args.py)."""

BASELINE = "baseline"


def settings(steps: Sequence[int], topks: Sequence[int], tokens: Sequence[int]) -> list[Setting]:
    """The grid, the cheapest first: a chain (topk 1) verifies its steps and the root, whatever ``tokens`` says.

    Raises:
        UserError: a number is below 1, or no setting is left because no tree of these steps and topk has so many tokens.
    """
    if min([*steps, *topks], default=0) < 1 or any(count < 2 for count in tokens):
        raise UserError(
            "steps and topk must be 1 or more, and draft tokens 2 or more; mend --num-steps, --topk, --num-draft-tokens"
        )
    found = set()
    for num_steps, topk in product(steps, topks):
        if topk == 1:
            found.add(Setting(1, num_steps, num_steps + 1))
            continue
        # The tree has topk nodes after the first step and topk * topk more after each further one (eagle_utils.py).
        largest = 1 + topk + (num_steps - 1) * topk * topk
        wanted = tokens or (min(2 * num_steps + 2, largest), min(16, largest))
        found |= {Setting(topk, num_steps, count) for count in wanted if num_steps < count <= largest}
    if not found:
        raise UserError("no tree of these --num-steps and --topk has so many --num-draft-tokens; leave the last out")
    return sorted(found)


def numbers(text: str, what: str) -> list[int]:
    """Read ``1,2,4`` into distinct ascending numbers of 1 or more.

    Raises:
        UserError: it is something else.
    """
    try:
        found = sorted({int(part) for part in text.split(",") if part.strip()})
    except ValueError:
        found = []
    if not found or found[0] < 1:
        raise UserError(f"{what} {text!r} is no list like 1,2,4")
    return found
