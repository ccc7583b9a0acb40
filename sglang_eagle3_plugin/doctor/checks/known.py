"""Combinations that were reported broken, with the report; nothing in the files shows them."""

from __future__ import annotations

from collections.abc import Iterator

from sglang_eagle3_plugin.doctor import facts
from sglang_eagle3_plugin.doctor.deployment import Deployment
from sglang_eagle3_plugin.doctor.findings import Finding


def check(d: Deployment) -> Iterator[Finding]:
    """Find a target class and release that were measured bad together."""
    name = d.target.architecture if d.target else None
    for report in facts.KNOWN_BAD:
        inside = facts.since(d.release, report.first) and facts.before(d.release, report.fixed)
        if name in report.classes and inside and d.eagle3:
            yield Finding(
                "ERR_KNOWN_BAD_RELEASE",
                f"{name} with EAGLE-3 is known to be bad on SGLang {d.release}: {report.what} ({report.source}).",
                (d.of_release(), d.target.says("architectures") if d.target else d.of_release()),
                f"Use SGLang {report.fixed} or newer, or {report.good} as the reporter did.",
                (f"OK_FROM_{report.fixed}",),
                "likely",
            )
