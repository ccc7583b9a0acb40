"""The cells of the matrix: level, layer-id rule and evidence of a class in a release."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sglang_eagle3_plugin import releases, support
from sglang_eagle3_plugin.compat import ran
from sglang_eagle3_plugin.releases import ClassFacts, ReleaseFacts

SURVEY = "sglang-eagle3 compat survey"


@dataclass(frozen=True)
class Cell:
    """A class in a release.

    Attributes:
        level: one of :data:`sglang_eagle3_plugin.support.LEVELS`.
        rule: how its own setter reads ids (a key of ``releases.RULES``, ``dead`` or ``unknown``); None where it has none.
        why: one clause.
        evidence: ``ran`` (a real engine), ``executed`` (the release's own setter, on stand-ins) or ``read`` (its files).
        date: of the run; empty for the survey, whose result does not depend on the day.
        command: what made the evidence.
        first: boundary 0 can be captured by stock SGLang.
        last: boundary L can be captured by stock SGLang.
    """

    level: str
    rule: str | None
    why: str
    evidence: str
    date: str
    command: str
    first: bool
    last: bool

    def as_json(self) -> dict[str, Any]:
        """The cell as ``compat --json`` prints it."""
        entry: dict[str, Any] = {"level": self.level, "rule": self.rule, "evidence": self.evidence, "why": self.why}
        if self.date:
            entry["date"] = self.date
        entry["command"] = self.command
        return entry


@dataclass(frozen=True)
class Step:
    """Neighbouring releases in which a class has one and the same cell.

    Attributes:
        first: the oldest of them.
        last: the newest.
    """

    first: str
    last: str
    cell: Cell


def cell(release: str, class_name: str, runs: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Cell:
    """The cell of a class in a surveyed release."""
    facts = releases.class_facts(release, class_name)
    if facts is None:
        unread = releases.wheel_of(release)[1] == ""
        why = "its wheel could not be read" if unread else "the release has no such class"
        return Cell(support.ABSENT, None, why, "read", "", SURVEY, False, False)
    run = runs.get(release, {}).get(class_name)
    return judge(facts, releases.release_facts(release), support.made_for(release), run)


def judge(facts: ClassFacts, whole: ReleaseFacts, supported: bool = True, run: Mapping[str, Any] | None = None) -> Cell:
    """The cell that facts make, and a run of a real engine where there is one."""
    found = support.judge(facts, whole, supported)
    followed = facts.rule in releases.RULES
    first, last = followed and facts.first, followed and facts.last
    if run is None:
        return Cell(found.level, facts.rule, found.why, found.evidence, "", SURVEY, first, last)
    level, why = _by_run(found.level, found.why, run)
    return Cell(level, facts.rule, why, "ran", run["date"], run["command"], first, last)


def _by_run(level: str, why: str, run: Mapping[str, Any]) -> tuple[str, str]:
    """What a run says of a level: the same, or that it is broken."""
    with_plugin, stock = run["plugin"], run["stock"]
    if not with_plugin["ok"]:
        return support.BROKEN, f"with the plugin the engine failed: {with_plugin['error']}"
    if with_plugin["boundaries"] != run["wanted"] or not with_plugin["same_tokens"]:
        return support.BROKEN, f"with the plugin boundaries {with_plugin['boundaries']} reached the draft, not {run['wanted']}"
    if level == support.PLUGIN and stock["ok"]:
        return support.NATIVE, "stock serves it, though its files said otherwise"
    if level in (support.NATIVE, support.REWIRED) and not stock["ok"]:
        return support.PLUGIN, f"stock fails: {stock['error']}"
    if level == support.BROKEN:
        return support.PLUGIN, "stock fails, the plugin serves it"
    if stock["ok"] and stock["boundaries"] != run["wanted"]:
        why += f"; a draft made for boundaries {run['wanted']} was fed {stock['boundaries']} by stock, and its own with the plugin"
    return level, why


def steps(class_name: str, runs: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Iterator[Step]:
    """A class's cells over all releases, neighbours that differ in nothing but their evidence's date and command put together."""
    held: list[tuple[str, Cell]] = []
    for release in releases.known_releases():
        one = cell(release, class_name, runs)
        if held and _same(held[-1][1], one):
            held.append((release, one))
            continue
        if held:
            yield Step(held[0][0], held[-1][0], held[0][1])
        held = [(release, one)]
    if held:
        yield Step(held[0][0], held[-1][0], held[0][1])


def _same(one: Cell, other: Cell) -> bool:
    alike = ("level", "rule", "why", "evidence", "first", "last")
    return all(getattr(one, name) == getattr(other, name) for name in alike)


def document() -> dict[str, Any]:
    """The whole matrix, as ``compat --json`` prints it."""
    runs = ran.load()
    names = releases.known_releases()
    return {
        "releases": list(names),
        "activation": {name: "entry point" if releases.release_facts(name).entry_point else ".pth" for name in names},
        "classes": {
            class_name: {name: cell(name, class_name, runs).as_json() for name in names} for class_name in releases.class_names()
        },
    }
