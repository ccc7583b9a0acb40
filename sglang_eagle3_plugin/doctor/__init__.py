"""Find a wiring fault in a target, a draft and launch flags before the model loads. Standard library only; only `cli` prints."""

from __future__ import annotations

from sglang_eagle3_plugin.doctor.checks import CHECKS, quality, run
from sglang_eagle3_plugin.doctor.deployment import Deployment
from sglang_eagle3_plugin.doctor.findings import Finding, ordered


def examine(d: Deployment) -> list[Finding]:
    """Run every check that applies to a deployment; errors come first."""
    found = run(CHECKS, d)
    return ordered([*found, *quality.conclude(d, found)])
