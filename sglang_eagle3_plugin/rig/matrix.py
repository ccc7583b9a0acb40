"""What each release does with the tiny Kimi-K2.5, one release after the other, recorded as JSON lines.

    python -m sglang_eagle3_plugin.rig.matrix 0.5.13 0.5.18 --out seen.jsonl

An environment takes 8 to 11 GB: one that was not there before is removed again before the next is built.
"""

from __future__ import annotations

import datetime
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from sglang_eagle3_plugin import __version__
from sglang_eagle3_plugin.rig import engine, environments, installing, models
from sglang_eagle3_plugin.rig.demo import BOUNDARIES, PATCH
from sglang_eagle3_plugin.rig.engine import EngineResult, EngineSpec

NEW_TOKENS = 8


def observe(release: str, say: Callable[[str], None]) -> dict[str, Any]:
    """Run a release with the plugin off and on, and with draft trees, and say what was seen.

    Args:
        release: its environment is built if need be, and stays.
        say: is called with a line about each step.

    Returns:
        JSON data: ``release``, ``plugin_version``, ``date`` (UTC), ``state`` of the Kimi-K2.5 patch, and ``runs``, each with
        ``name``, ``ok``, ``error``, ``spec_accept_length``, ``boundaries`` at the draft, and ``greedy``: whether the tokens are
        those of greedy decoding.

    Raises:
        UserError: the environment cannot be had.
    """
    environment = environments.ensure(release, say)
    installing.install_plugin(environment)
    with tempfile.TemporaryDirectory(prefix="eagle3-matrix-") as scratch:
        target = models.target(Path(scratch, "target"), "kimi-k25")
        drafts = {
            kind: models.draft(Path(scratch, kind), target, BOUNDARIES, kind=kind, convention="output")
            for kind in models.DRAFT_KINDS
        }
        labelled = EngineSpec(target.path, drafts["labelled"], max_new_tokens=NEW_TOKENS)
        specs = {"no draft": EngineSpec(target.path, max_new_tokens=NEW_TOKENS), "stock": labelled.stock(), "plugin": labelled}
        for kind in ("unsure", "random"):
            for topk in (2, 4):
                specs[f"{kind} draft, topk {topk}"] = EngineSpec(target.path, drafts[kind], topk=topk, max_new_tokens=NEW_TOKENS)
        results = {}
        for name, spec in specs.items():
            say(f"sglang {environment.release}: {name}")
            results[name] = engine.run(environment, spec)
    return {
        "release": environment.release,
        "plugin_version": __version__,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "state": results["plugin"].patch_states.get(PATCH, "unknown"),
        "runs": [_row(name, result) for name, result in results.items()],
    }


def _row(name: str, result: EngineResult) -> dict[str, Any]:
    greedy = tuple(tuple(models.continuation(prompt, NEW_TOKENS)) for prompt in engine.PROMPTS)
    return {
        "name": name,
        "ok": result.ok,
        "error": result.error,
        "spec_accept_length": result.spec_accept_length,
        "boundaries": result.boundaries,
        "greedy": result.tokens == greedy,
        "seconds": round(result.seconds),
    }


@click.command()
@click.argument("releases", nargs=-1, required=True)
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), required=True, help="Appended to, one JSON line a release.")
@click.option("--keep", is_flag=True, help="Keep the environments that are built.")
def main(releases: tuple[str, ...], out: Path, keep: bool) -> None:
    """Run the tiny Kimi-K2.5 on RELEASES and record what was seen."""
    for release in releases:
        was_there = release in environments.built()
        try:
            seen = observe(release, lambda line: click.echo(line, err=True))
        finally:
            if not was_there and not keep:
                environments.remove(release)
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(seen) + "\n")


if __name__ == "__main__":
    main()
