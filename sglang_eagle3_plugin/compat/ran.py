"""Runs of real engines, and their records: the evidence that outranks what was read or executed."""

from __future__ import annotations

import datetime
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_eagle3_plugin import __version__, cache, releases
from sglang_eagle3_plugin.survey.matrix import write

IDS = (2, 4, 5)
BOUNDARIES = (3, 5, 6)
"""What the draft of every run was made for, of 8 layers; its config lists IDS and says that they name layer outputs."""
NUM_STEPS = 3
FAMILIES = {
    "kimi-k25": "KimiK25ForConditionalGeneration",
    "llama": "LlamaForCausalLM",
    "qwen3-moe": "Qwen3MoeForCausalLM",
}
"""The rig's tiny targets: a wrapper of a DeepSeek model, a dense model, a mixture of experts that captures by marks."""


@dataclass(frozen=True)
class Run:
    """One engine run.

    Attributes:
        ok: it served.
        boundaries: what reached the draft; None where nothing did, or it differed between forward modes.
        accept_length: acceptance length over all prompts, NUM_STEPS + 1 at best.
        same_tokens: its tokens are those of greedy decoding.
        error: the last exception's line where it did not serve.
    """

    ok: bool
    boundaries: tuple[int, ...] | None
    accept_length: float | None
    same_tokens: bool
    error: str

    def as_json(self) -> dict[str, Any]:
        """The run as it is recorded."""
        if not self.ok:
            return {"ok": False, "error": self.error}
        listed = None if self.boundaries is None else list(self.boundaries)
        return {"ok": True, "boundaries": listed, "accept_length": self.accept_length, "same_tokens": self.same_tokens}


def run_release(release: str, say: Callable[[str], None], only: str = "") -> dict[str, dict[str, Any]]:
    """Run every family of a release: without the plugin, then with it.

    Args:
        release: its environment is built where there is none.
        say: is called with a line about each step.
        only: run only classes whose name holds this.

    Returns:
        Class -> ``{"stock": run, "plugin": run}``; a class that the release has not is left out.

    Raises:
        UserError: the environment cannot be had.
    """
    from sglang_eagle3_plugin.rig import engine, environments, installing, models

    environment = environments.ensure(release, say)
    installing.install_plugin(environment)
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="eagle3-compat-") as scratch:
        for family, class_name in FAMILIES.items():
            if releases.class_facts(release, class_name) is None or only not in class_name:
                continue
            target = models.target(Path(scratch, family, "target"), family)
            draft = models.draft(Path(scratch, family, "draft"), target, BOUNDARIES, ids=IDS, convention="output")
            spec = engine.EngineSpec(target.path, draft, num_steps=NUM_STEPS)
            greedy = tuple(tuple(models.continuation(prompt, spec.max_new_tokens)) for prompt in spec.prompts)
            found[class_name] = {}
            for way, one in (("stock", spec.stock()), ("plugin", spec)):
                result = engine.run(environment, one)
                accepted = result.spec_accept_length
                run = Run(
                    result.ok, result.boundaries, None if accepted is None else round(accepted, 2), result.tokens == greedy,
                    _clean(result.error or ""),
                )  # fmt: skip
                found[class_name][way] = run.as_json()
                say(f"{release} {class_name} {way}: {run.as_json()} ({result.seconds:.0f} s)")
    return found


def _clean(error: str) -> str:
    """An error without paths of this machine."""
    words = (word if "/" not in word else "..." + word.rsplit("/", 1)[-1] for word in error.split())
    return " ".join(words)[:240]


def load(directory: Path | None = None) -> dict[str, dict[str, dict[str, Any]]]:
    """The records: release -> class -> ``{date, command, plugin_version, wanted, stock, plugin}``."""
    path = (directory or releases.data_directory()) / "ran.json"
    if not path.is_file():
        return {}
    runs: dict[str, dict[str, dict[str, Any]]] = json.loads(path.read_text(encoding="utf-8"))["runs"]
    return runs


def record(directory: Path, release: str, found: dict[str, dict[str, Any]], only: str = "") -> None:
    """Add a release's runs, as :func:`run_release` found them, in place of older ones. Two processes may record at once."""
    from sglang_eagle3_plugin.rig.environments import locked

    with locked(cache.directory("envs") / ".locks" / "compat-ran"):
        _record(directory, release, found, only)


def _record(directory: Path, release: str, found: dict[str, dict[str, Any]], only: str) -> None:
    runs = load(directory)
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    about = {
        "date": today,
        "command": f"sglang-eagle3 compat run --release {release}" + (f" --class {only}" if only else ""),
        "plugin_version": __version__,
        "wanted": list(BOUNDARIES),
    }
    runs[release] = {**runs.get(release, {}), **{name: {**about, **ways} for name, ways in found.items()}}
    blocks = []
    for name in sorted(runs, key=lambda n: releases.order(n) or ()):
        lines = [f"   {json.dumps(c)}: {json.dumps(entry, ensure_ascii=False)}" for c, entry in sorted(runs[name].items())]
        blocks.append(f"  {json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n  }")
    write(directory / "ran.json", '{\n "runs": {\n' + ",\n".join(blocks) + "\n }\n}\n")
