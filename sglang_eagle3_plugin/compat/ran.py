"""Runs of real engines, and their records: the evidence that outranks what was read or executed."""

from __future__ import annotations

import datetime
import json
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_eagle3_plugin import __version__, cache, releases
from sglang_eagle3_plugin.paths import write_text

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
    runs: dict[str, dict[str, dict[str, Any]]] = _read(directory)["runs"]
    return runs


def could_not(directory: Path | None = None) -> dict[str, str]:
    """The releases that could not be run, with or without the plugin, and why: nothing is known of them."""
    reasons: dict[str, str] = _read(directory)["could_not"]
    return reasons


def _read(directory: Path | None) -> dict[str, Any]:
    path = (directory or releases.data_directory()) / "ran.json"
    if not path.is_file():
        return {"runs": {}, "could_not": {}}
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return {"runs": {}, "could_not": {}, **document}


def failure_of_the_rig(ways: dict[str, Any]) -> str:
    """The error in which a run ended with the plugin and without it alike; empty where it is a missing hook, our own business."""
    stock, plugin = ways["stock"], ways["plugin"]
    same = not stock["ok"] and not plugin["ok"] and stock["error"] == plugin["error"]
    return str(stock["error"]) if same and "set_eagle3_layers_to_capture" not in stock["error"] else ""


def record(directory: Path, release: str, found: dict[str, dict[str, Any]], only: str = "") -> None:
    """Add a release's runs, as :func:`run_release` found them, in place of older ones. Two processes may record at once."""
    from sglang_eagle3_plugin.rig.environments import locked

    with locked(cache.directory("envs") / ".locks" / "compat-ran"):
        _record(directory, release, found, only)


def _record(directory: Path, release: str, found: dict[str, dict[str, Any]], only: str) -> None:
    document = _read(directory)
    runs, reasons = document["runs"], document["could_not"]
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    about = {
        "date": today,
        "command": f"sglang-eagle3 compat run --release {release}" + (f" --class {only}" if only else ""),
        "plugin_version": __version__,
        "wanted": list(BOUNDARIES),
    }
    failures = {name: why for name, ways in found.items() if (why := failure_of_the_rig(ways))}
    good = {name: {**about, **ways} for name, ways in found.items() if name not in failures}
    if good:
        runs[release] = {**runs.get(release, {}), **good}
        reasons.pop(release, None)
    elif failures:
        reasons[release] = f"{today}: {next(iter(failures.values()))}"
    _write(directory, runs, reasons)


def _write(directory: Path, runs: dict[str, dict[str, dict[str, Any]]], reasons: dict[str, str]) -> None:
    """A line for each class of a release, in the order of releases."""

    def by_release(names: Iterable[str]) -> list[str]:
        return sorted(names, key=lambda name: releases.order(name) or ())

    def block(name: str) -> str:
        lines = [f"   {json.dumps(c)}: {json.dumps(entry, ensure_ascii=False)}" for c, entry in sorted(runs[name].items())]
        return f"  {json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n  }"

    lost = [f"  {json.dumps(name)}: {json.dumps(reasons[name], ensure_ascii=False)}" for name in by_release(reasons)]
    sections = (("runs", [block(name) for name in by_release(runs)]), ("could_not", lost))
    parts = [f' "{title}": {{\n' + ",\n".join(body) + "\n }" for title, body in sections]
    write_text(directory / "ran.json", "{\n" + ",\n".join(parts) + "\n}\n")
