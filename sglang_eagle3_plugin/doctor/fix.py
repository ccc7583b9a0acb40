"""A corrected draft config, written beside the old one and never over anything."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from sglang_eagle3_plugin.doctor.findings import REMOVE, Finding
from sglang_eagle3_plugin.errors import UserError


def corrected(config: Mapping[str, Any], findings: Iterable[Finding]) -> tuple[dict[str, Any], list[str]]:
    """Apply what the findings change to a copy of a draft config; return it and the changed fields, dots leading into objects."""
    new: dict[str, Any] = json.loads(json.dumps(config))
    changed: list[str] = []
    for finding in findings:
        for name, value in finding.changes.items():
            if name in changed:  # the first, most severe finding has the say
                continue
            *parents, last = name.split(".")
            place = new
            for parent in parents:
                if not isinstance(place.get(parent), dict):
                    place[parent] = {}
                place = place[parent]
            if value is REMOVE:
                place.pop(last, None)
            else:
                place[last] = value
            changed.append(name)
    return new, changed


def write(config: Mapping[str, Any], out: Path) -> None:
    """Write a config to a file that does not exist yet: whole, or not at all.

    Raises:
        UserError: the file exists, or cannot be written.
    """
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    try:
        handle, temporary = tempfile.mkstemp(prefix=f".{out.name}.", suffix=".tmp", dir=out.parent)
    except OSError as error:
        raise UserError(f"{out} cannot be written ({error.strerror}); give a path in an existing directory") from error
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        # A link, unlike a rename, fails where the name is taken.
        os.link(temporary, out)
    except FileExistsError:
        raise UserError(f"{out} exists and is not overwritten; give another path") from None
    except (OSError, UnicodeEncodeError) as error:
        raise UserError(f"{out} cannot be written ({error}); give another path") from error
    finally:
        Path(temporary).unlink(missing_ok=True)
