"""A change: one correction of SGLang's source, written once and carried out on any release that needs it."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from dataclasses import dataclass

from sglang_eagle3_plugin.series.source import Source


@dataclass(frozen=True)
class Change:
    """One patch of a series, as data.

    Attributes:
        id: its name; the runtime patch of the same idea, where there is one, has the same.
        subject: the patch's subject line.
        why: what goes wrong without it, and what it does.
        tested: how it was tested.
        upstream: the upstream pull request or issue, or that there is none.
        drop_when: when it can be dropped.
        transform: source -> path -> new text; empty where this release needs nothing. Raises `edit.UnfitError` on a shape that it
            does not know: a release that needs the change and can't have it stops the export, it is never left out silently.
    """

    id: str
    subject: str
    why: str
    tested: str
    upstream: str
    drop_when: str
    transform: Callable[[Source], dict[str, str]]

    def message(self) -> str:
        """The commit message; it names no release, so that releases with the same files share one series."""
        paragraphs = [
            self.why,
            f"Tested: {self.tested}",
            f"Upstream: {self.upstream}",
            f"Drop when: {self.drop_when}",
            f"Written by `sglang-eagle3 patches export`, change {self.id}.",
        ]
        return "\n\n".join(
            [self.subject, *(textwrap.fill(p, 72, break_long_words=False, break_on_hyphens=False) for p in paragraphs)]
        )
