"""One draft on one target, release by release: what the draft wants, what stock SGLang captures, what the plugin does. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sglang_eagle3_plugin import drafts, releases, support
from sglang_eagle3_plugin.boundaries import BoundaryError, Decision
from sglang_eagle3_plugin.drafts import Draft
from sglang_eagle3_plugin.releases import Captured, ClassFacts, ReleaseFacts
from sglang_eagle3_plugin.settings import Settings
from sglang_eagle3_plugin.targets import Target


@dataclass(frozen=True)
class Wanted:
    """What a draft wants of a target.

    Attributes:
        decision: how that was decided; None where no reading of its ids can be captured.
        impossible: why not; empty otherwise.
    """

    decision: Decision | None
    impossible: str = ""

    @property
    def boundaries(self) -> tuple[int, ...] | None:
        """The wanted boundaries; None where they are unknown."""
        return self.decision.boundaries if self.decision else None


@dataclass(frozen=True)
class Answer:
    """One release's answer for a pair.

    Attributes:
        level: as in :mod:`sglang_eagle3_plugin.support`, for this draft.
        stock: boundaries asked for in eager passes by stock SGLang; None where it doesn't serve the pair.
        stock_graph: those inside CUDA graphs, likewise.
        stock_emits: those that really reach the draft in eager passes, likewise.
        plugin: boundaries captured with the plugin; None where it doesn't serve the pair, or keeps stock's for want of knowledge.
        needs_plugin: whether the pair needs the plugin; None where the wanted boundaries are unknown.
        why: one sentence.
        exact: False where the release is unknown and the nearest known one answers.
    """

    level: str
    stock: tuple[int, ...] | None
    stock_graph: tuple[int, ...] | None
    stock_emits: tuple[int, ...] | None
    plugin: tuple[int, ...] | None
    needs_plugin: bool | None
    why: str
    exact: bool = True


def wanted(draft: Draft, target: Target, settings: Settings) -> Wanted:
    """Decide what a draft wants; an impossible list is said, not raised."""
    try:
        return Wanted(drafts.decide_for(draft, target.num_layers, settings))
    except BoundaryError as error:
        return Wanted(None, str(error))


@dataclass(frozen=True)
class Place:
    """Where a pair is to be served.

    Attributes:
        facts: of the target's class there; None where there is no such class.
        whole: of the release.
        got: what stock captures for the ids it sees; None where it cannot.
        supported: the plugin is made for the release.
        exact: False where the release is unknown and the nearest known one answers.
    """

    facts: ClassFacts | None
    whole: ReleaseFacts
    got: Captured | None
    supported: bool
    exact: bool = True


def answer(draft: Draft, target: Target, want: Wanted, release: str) -> Answer:
    """Judge a pair in one release.

    Raises:
        LookupError: no release is known at all.
    """
    known, exact = releases.nearest(release)
    if known is None:
        raise LookupError("there is no survey of any release")
    name = target.architecture or ""
    got = releases.captured(release, name, draft.ids_seen_by_sglang, target.num_layers)
    facts, whole = releases.class_facts(release, name), releases.release_facts(known)
    return judge(draft, target, want, Place(facts, whole, got, support.made_for(release), exact))


def judge(draft: Draft, target: Target, want: Wanted, place: Place) -> Answer:
    """Judge a pair in a release, or in a source tree, whose facts are at hand."""
    facts, exact = place.facts, place.exact
    if facts is None:
        return Answer(support.ABSENT, None, None, None, None, None, f"it has no {target.architecture}", exact)
    stopped = _draft_is_not_served(draft, want, place.whole)
    if stopped:
        return Answer(support.BROKEN, None, None, None, None, None, stopped, exact)
    if want.boundaries == ():
        served = facts.accessor is not None
        level = support.NATIVE if served else support.PLUGIN
        return Answer(level, (), (), (), (), not served, "the draft takes no auxiliary states", exact)
    can, how = support.plugin_can(facts) if place.supported else (False, f"the plugin is made for {support.OLDEST} and later")
    got = place.got
    if facts.accessor is None or (got is not None and got.rule == releases.DEAD):
        got = None
    plugin = (want.boundaries or (got.eager if got else None)) if can else None
    needs: bool | None = True
    if want.boundaries is None:
        why = want.impossible or "which boundaries the draft wants is undecidable; the release's own reading is kept"
        level = support.judge(facts, place.whole, place.supported).level
        if got is not None and got.eager != got.graph and not can:
            # Whatever the draft wants, it can't be both.
            level, why = support.BROKEN, f"{why}; CUDA graphs capture others than eager passes do, and {how}"
        needs = None if got or not can else True
    elif got is None:
        level, why = (support.PLUGIN if can else support.BROKEN), how
    elif got.eager == got.graph == got.will_emit == want.boundaries:
        level, why, needs = support.NATIVE, "stock captures what the draft wants", False
    else:
        level, why = (support.REWIRED if can else support.BROKEN), _difference(got, want.boundaries)
    if got is None:
        return Answer(level, None, None, None, plugin, needs, why, exact)
    return Answer(level, got.eager, got.graph, got.will_emit, plugin, needs, why, exact)


def _draft_is_not_served(draft: Draft, want: Wanted, whole: ReleaseFacts) -> str:
    name = draft.architecture or ""
    if "Eagle3" in name and name not in whole.drafts:
        return f"it has no draft class {name}"
    takes, asked = draft.num_aux_hidden_states, len(want.boundaries or ())
    if want.decision and want.decision.from_outside and takes and asked not in (0, takes):
        return f"the draft takes {takes} states, and {asked} boundaries are asked for"
    slots = draft.num_aux_hidden_states or len(want.boundaries or draft.ids or (0, 0, 0))
    if slots not in (0, 3) and name in whole.drafts and "num_aux_hidden_states" not in whole.drafts[name]:
        return f"its {name} takes three states, and this draft {slots}"
    return ""


def _difference(got: Captured, want: Sequence[int]) -> str:
    """Say what is wrong with what stock captures."""
    if got.eager != tuple(want):
        steps = {have - due for have, due in zip(got.eager, want, strict=False)}
        if len(got.eager) == len(want) and len(steps) == 1:
            step = steps.pop()
            said = f"stock is off by {'one' if abs(step) == 1 else abs(step)}"
        else:
            said = f"stock captures {_join(got.eager) or 'nothing'}"
        if got.graph == tuple(want):
            return f"{said} outside CUDA graphs, whose default boundaries happen to be right"
        if got.graph != got.eager:
            return f"{said}, and {_join(got.graph)} inside CUDA graphs"
        return said
    if got.graph != tuple(want):
        return f"right in eager passes, but CUDA graphs capture the default boundaries {_join(got.graph)}"
    return "; ".join(got.faults) or f"only {_join(got.will_emit)} reach the draft"


def _join(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def as_json(one: Answer) -> dict[str, Any]:
    """An answer as ``wiring --json`` prints it: extra keys only where they differ from ``stock``."""
    entry: dict[str, Any] = {"stock": _list(one.stock), "plugin": _list(one.plugin), "needs_plugin": one.needs_plugin}
    if one.stock_graph != one.stock:
        entry["stock_graph"] = _list(one.stock_graph)
    if one.stock_emits != one.stock:
        entry["stock_emits"] = _list(one.stock_emits)
    entry.update(level=one.level, why=one.why)
    if not one.exact:
        entry["exact"] = False
    return entry


def _list(numbers: Sequence[int] | None) -> list[int] | None:
    return None if numbers is None else list(numbers)
