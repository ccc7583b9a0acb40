"""Run as a module in a subprocess: import what each patch changes, and print, as one JSON line, what became of each."""

from __future__ import annotations

import importlib
import json
import os
import sys

from sglang_eagle3_plugin import activation, loaded
from sglang_eagle3_plugin.patches import REGISTRY
from sglang_eagle3_plugin.settings import Settings


def _report() -> dict[str, object]:
    settings = Settings.from_environment()
    if not settings.active:
        rows = [{"patch": p.id, "target": p.target, "state": "disabled", "reason": settings.why_inactive} for p in REGISTRY]
        return {"pid": os.getpid(), "release": "unknown", "patches": rows}
    rows = []
    for patch in REGISTRY:
        try:
            importlib.import_module(patch.module)
        except ModuleNotFoundError as error:
            if error.name is None or not patch.module.startswith(error.name):
                return {"error": f"{patch.module}: {error}"}
            rows.append(
                {"patch": patch.id, "target": patch.target, "state": "pending", "reason": f"this SGLang has no {patch.module}"}
            )
        except Exception as error:
            return {"error": f"{patch.module}: {type(error).__name__}: {error}"}
    rows += [
        {"patch": o.patch.id, "target": o.patch.target, "state": o.state.value, "reason": o.reason} for o in activation.outcomes()
    ]
    order = [patch.id for patch in REGISTRY]
    return {
        "pid": os.getpid(),
        "release": loaded.sglang_release(),
        "patches": sorted(rows, key=lambda row: order.index(row["patch"])),
    }


if __name__ == "__main__":
    activation.activate("probe")
    sys.stdout.write("\n" + json.dumps(_report()) + "\n")
