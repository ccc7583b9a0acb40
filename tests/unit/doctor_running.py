"""The doctor's command, run in this process, and what it found."""

from __future__ import annotations

import json
from typing import Any

from click.testing import CliRunner

from sglang_eagle3_plugin.cli.doctor import command


def run(*arguments: str) -> tuple[int, dict[str, Any]]:
    """Its exit status and what ``--json`` prints; an error of the user's is raised."""
    result = CliRunner().invoke(command, ["--json", *arguments], standalone_mode=False)
    if result.exception:
        raise result.exception
    return result.return_value, json.loads(result.output)


def severe(findings: list[dict[str, Any]]) -> list[str]:
    """Ids of the findings that are no notes."""
    return [f["id"] for f in findings if f["severity"] != "note"]
