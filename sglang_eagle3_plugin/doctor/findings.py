"""What a check returns. Standard library only: the cheap checks run inside a server too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

REMOVE = object()
"""As the value of a change: delete the field."""

_SEVERITY = {"ERR": "error", "WARN": "warning"}
_RANK = {"error": 0, "warning": 1, "note": 2}


@dataclass(frozen=True)
class Evidence:
    """What a finding rests on: a field of a file (or a flag, or a release) and its value, as text."""

    file: str
    field: str
    value: str


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, or worth knowing.

    Attributes:
        id: ``ERR_...``, ``WARN_...`` or another prefix for a note.
        message: what is wrong and what follows from it, in a sentence or two.
        evidence: what it rests on.
        fix: the exact change that mends it; empty where there is nothing to do.
        tags: who can mend it and from which release on it is mended: ``FIXABLE_BY_PLUGIN``, ``OK_FROM_0.5.13``, ...
        sure: ``certain``, or ``likely`` where a step of the reasoning is not written in the files.
        changes: the change to the draft config that mends it: dotted field -> value, or ``REMOVE``.
    """

    id: str
    message: str
    evidence: tuple[Evidence, ...] = ()
    fix: str = ""
    tags: tuple[str, ...] = ()
    sure: str = "certain"
    changes: dict[str, Any] = field(default_factory=dict, compare=False)

    @property
    def severity(self) -> str:
        """``error``, ``warning`` or ``note``, by the prefix of the id."""
        return _SEVERITY.get(self.id.split("_", 1)[0], "note")

    def as_json(self) -> dict[str, Any]:
        """The finding as it stands in ``doctor --json``."""
        return {
            "id": self.id,
            "severity": self.severity,
            "message": self.message,
            "evidence": [{"file": e.file, "field": e.field, "value": e.value} for e in self.evidence],
            "fix": self.fix,
            "tags": list(self.tags),
            "sure": self.sure,
        }


def verdict(findings: Sequence[Finding]) -> str:
    """``error`` or ``warn`` when there is such a finding, else ``ok``."""
    severities = {f.severity for f in findings}
    return "error" if "error" in severities else "warn" if "warning" in severities else "ok"


def ordered(findings: Sequence[Finding]) -> list[Finding]:
    """Errors first, then warnings, then notes; each once, in the order found."""
    unique: dict[tuple[str, str], Finding] = {}
    for finding in findings:
        unique.setdefault((finding.id, finding.message), finding)
    return sorted(unique.values(), key=lambda f: _RANK[f.severity])


def for_json(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """The findings as JSON, and after them each tag once, as a note of its own, so that a tag is found like any id."""
    listed = [finding.as_json() for finding in findings]
    carriers: dict[str, list[str]] = {}
    for finding in findings:
        for tag in finding.tags:
            carriers.setdefault(tag, []).append(finding.id)
    known = {finding.id for finding in findings}
    for tag, ids in carriers.items():
        if tag not in known:
            listed.append(Finding(tag, f"Said of {', '.join(dict.fromkeys(ids))}.").as_json())
    return listed
