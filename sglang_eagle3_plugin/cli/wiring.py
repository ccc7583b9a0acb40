"""`sglang-eagle3 wiring`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.padding import Padding

from sglang_eagle3_plugin import checkpoints, drafts, pairs, releases, support, targets
from sglang_eagle3_plugin.boundaries import Decision
from sglang_eagle3_plugin.cli.options import settings_here
from sglang_eagle3_plugin.cli.untrusted import escape
from sglang_eagle3_plugin.drafts import Draft, DraftError
from sglang_eagle3_plugin.errors import UserError
from sglang_eagle3_plugin.pairs import Answer
from sglang_eagle3_plugin.selection import select
from sglang_eagle3_plugin.targets import Target, TargetError

DEFAULT_RELEASES = ">=0.5.4.post2"


@click.command(name="wiring")
@click.option(
    "--draft", "draft_path", required=True, metavar="DIR", help="The draft: a directory with its config.json, or a cached id."
)
@click.option("--target", "target_path", required=True, metavar="DIR", help="The target, likewise. No weights are read.")
@click.option("--releases", "spec", metavar="SPEC", help=f"'>=0.5.9', or 0.5.9,0.5.13, or all.  [default: {DEFAULT_RELEASES}]")
@click.option("--tree", type=click.Path(path_type=Path, exists=True), help="Judge this wheel, checkout or installed package too.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print {wanted, convention, decided_by, releases: {R: {stock, plugin, ...}}}."
)
def command(draft_path: str, target_path: str, spec: str | None, tree: Path | None, as_json: bool) -> int:
    """Which boundaries each SGLang release captures for a draft, and which it should.

    Boundary k is the residual stream entering decoder layer k. EAGLE3_LAYER_CONVENTION and EAGLE3_CAPTURE_BOUNDARIES count here
    as they do in a server. What a --tree captures is found by executing its own setter on stand-ins; SGLang is not imported.

    Exit status 0: it is known what the draft wants. 1: it is undecidable, or no target of this depth can deliver it.
    """
    draft, target = load_pair(draft_path, target_path)
    want = pairs.wanted(draft, target, settings_here())
    names = select(spec or DEFAULT_RELEASES, releases.known_releases())
    answers = {name: pairs.answer(draft, target, want, name) for name in names}
    if tree is not None:
        answers.update(_of_tree(draft, target, want, tree))
    if as_json:
        click.echo(json.dumps(_document(draft, target, want, answers), indent=2))
    else:
        _show(draft, target, want, answers)
    return 0 if want.boundaries is not None else 1


def _of_tree(draft: Draft, target: Target, want: pairs.Wanted, tree: Path) -> dict[str, Answer]:
    from sglang_eagle3_plugin.survey import archive, facts

    with archive.open_any(tree) as opened:
        found = facts.of_archive(opened)
    name = target.architecture or ""
    got = found.captured(name, draft.ids_seen_by_sglang, target.num_layers)
    place = pairs.Place(found.classes.get(name), found.facts, got, support.made_for(found.name))
    return {f"{found.name} ({tree.name}, executed)": pairs.judge(draft, target, want, place)}


def load_pair(draft_path: str, target_path: str) -> tuple[Draft, Target]:
    """Read the two configs.

    Raises:
        UserError: one is missing or cannot be read.
    """
    draft_config, draft_file = checkpoints.config_of(checkpoints.locate(draft_path))
    target_config, target_file = checkpoints.config_of(checkpoints.locate(target_path))
    try:
        draft = drafts.read(draft_config, draft_file.parent, named=draft_path)
    except DraftError as error:
        raise UserError(f"{draft_file} cannot be used: {error}; correct the field") from error
    try:
        target = targets.read(target_config)
    except TargetError as error:
        raise UserError(f"{target_file} cannot be used: {error}; give the target's own config.json") from error
    if target.architecture is None:
        raise UserError(f"{target_file} names no architectures, so SGLang cannot load it; add the class name")
    return draft, target


def _document(draft: Draft, target: Target, want: pairs.Wanted, answers: dict[str, Answer]) -> dict[str, Any]:
    decision = want.decision
    return {
        "wanted": None if want.boundaries is None else list(want.boundaries),
        "convention": decision.convention if decision else "impossible",
        "decided_by": decision.decided_by if decision else "range",
        "evidence": decision.evidence if decision else want.impossible,
        "readings": {name: list(boundaries) for name, boundaries in decision.readings} if decision else {},
        "ids": None if draft.ids is None else list(draft.ids),
        "ids_from": draft.where or None,
        "conflicts": list(draft.conflicts),
        "target": {"class": target.architecture, "layers": target.num_layers},
        "releases": {name: pairs.as_json(one) for name, one in answers.items()},
    }


def _show(draft: Draft, target: Target, want: pairs.Wanted, answers: dict[str, Answer]) -> None:
    console = Console(highlight=False)
    console.print(f"target  {escape(target.architecture or '')}, {target.num_layers} layers")
    listed = f"ids {_join(draft.ids)} in {draft.where}" if draft.ids else "lists no layer ids"
    console.print(f"draft   {escape(draft.architecture or 'draft')}, {escape(listed)}")
    console.print(f"wanted  {escape(_wanted(want, want.decision))}")
    for conflict in draft.conflicts:
        console.print(f"note    {escape(conflict)}")
    console.print()
    for (first, last), one in _grouped(answers):
        span = first if first == last else f"{first} to {last}"
        inexact = "" if one.exact else " (by the nearest known release)"
        console.print(f"[bold]{span}[/bold]  {one.level}{inexact}")
        if one.stock is not None or one.plugin is not None:
            plugin = _join(one.plugin) if one.plugin is not None else "-"
            console.print(Padding(f"stock {_stock(one)}; plugin {plugin}", (0, 0, 0, 2)))
        console.print(Padding(escape(one.why), (0, 0, 0, 2)))


def _wanted(want: pairs.Wanted, decision: Decision | None) -> str:
    if decision is None:
        return f"impossible: {want.impossible}"
    if decision.boundaries is None:
        return f"undecidable: {decision.evidence}; set EAGLE3_LAYER_CONVENTION=output or =boundary to say which"
    said = _join(decision.boundaries) or "no auxiliary states"
    return f"{said} (convention {decision.convention}, by {decision.decided_by}: {decision.evidence})"


def _stock(one: Answer) -> str:
    if one.stock is None:
        return "-"
    others = []
    if one.stock_graph != one.stock:
        others.append(f"{_join(one.stock_graph) or 'none'} in CUDA graphs")
    if one.stock_emits != one.stock:
        others.append(f"{_join(one.stock_emits) or 'none'} arrive")
    return (_join(one.stock) or "none") + (f" ({'; '.join(others)})" if others else "")


def _grouped(answers: dict[str, Answer]) -> list[tuple[tuple[str, str], Answer]]:
    """Neighbouring releases with the same answer, as one."""
    groups: list[tuple[tuple[str, str], Answer]] = []
    for name, one in answers.items():
        if groups and groups[-1][1] == one:
            groups[-1] = ((groups[-1][0][0], name), one)
        else:
            groups.append(((name, name), one))
    return groups


def _join(numbers: Sequence[int] | None) -> str:
    return ", ".join(map(str, numbers or ()))
