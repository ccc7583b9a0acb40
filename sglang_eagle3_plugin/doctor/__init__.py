"""Find a wiring fault in a target, a draft and launch flags before the model loads. Standard library only; only `cli` prints."""

from __future__ import annotations

from sglang_eagle3_plugin.doctor.checks import CHECKS, WHATEVER_SERVES, quality
from sglang_eagle3_plugin.doctor.deployment import Deployment
from sglang_eagle3_plugin.doctor.findings import Finding, ordered


def examine(d: Deployment) -> list[Finding]:
    """Run every check on a deployment, or, where it isn't of EAGLE-3, those that don't presume that; errors come first."""
    found = [finding for check in (CHECKS if d.eagle3 else WHATEVER_SERVES) for finding in check(d)]
    return ordered([*found, *quality.conclude(d, found)])
