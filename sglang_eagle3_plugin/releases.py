"""What each SGLang release does with a draft's layer ids, and the other facts of a release that wiring turns on. Stdlib only.

The facts are data, found by ``sglang-eagle3 compat survey`` in the released wheels: which classes a release has, which of them have
the EAGLE-3 hooks, and by which rule their own ``set_eagle3_layers_to_capture`` reads ids (found by executing it). The rules are the
five functions below; nothing about a release is written in code.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang_eagle3_plugin.boundaries import default_boundaries


@dataclass(frozen=True)
class Rule:
    """How one family of setters reads ids.

    Attributes:
        id: its name in the data.
        text: what it does, in a few words.
        apply: (ids or None, L) -> boundaries it asks the layer stack for, in the order of the ids.
    """

    id: str
    text: str
    apply: Callable[[Sequence[int] | None, int], list[int]]


def _fixed(ids: Sequence[int] | None, num_layers: int) -> list[int]:
    return list(default_boundaries(num_layers))


def _plus_one(ids: Sequence[int] | None, num_layers: int) -> list[int]:
    return list(default_boundaries(num_layers)) if ids is None else [i + 1 for i in ids]


def _first_id_one(ids: Sequence[int] | None, num_layers: int) -> list[int]:
    return _plus_one(ids, num_layers) if ids is None or (ids and ids[0] == 1) else list(ids)


def _max_is_last(ids: Sequence[int] | None, num_layers: int) -> list[int]:
    return list(ids) if ids and max(ids) == num_layers else _plus_one(ids, num_layers)


def _always_plus_one(ids: Sequence[int] | None, num_layers: int) -> list[int]:
    return [i + 1 for i in (default_boundaries(num_layers) if ids is None else ids)]


RULES: dict[str, Rule] = {
    rule.id: rule
    for rule in (
        Rule("fixed", "2, L//2, L-3 whatever the ids", _fixed),
        Rule("plus-one", "id + 1; 2, L//2, L-3 without ids", _plus_one),
        Rule("first-id-one", "id + 1 if the first id is 1, else id (SGLang PR #25454)", _first_id_one),
        Rule("max-is-last", "id if the largest is L, else id + 1 (SGLang PR #32334)", _max_is_last),
        Rule("always-plus-one", "id + 1, and 3, L//2+1, L-2 without ids", _always_plus_one),
    )
}
DEAD = "dead"
"""In place of a rule: the setter runs, and no layer will capture anything."""
UNKNOWN = "unknown"
"""In place of a rule: what the setter does fits none of them, or could not be found out."""


@dataclass(frozen=True)
class ClassFacts:
    """One model class in one release.

    Attributes:
        module: where it is registered, below ``sglang.srt.models``.
        setter: the class that defines its ``set_eagle3_layers_to_capture``: itself or a base; None where it has none.
        accessor: likewise for ``get_embed_and_head``.
        rule: key of ``RULES``, ``DEAD`` or ``UNKNOWN``; None where it has no setter.
        capture: how its layer stack captures: ``list``, or ``mark`` (a flag on each layer, which setters set and never clear);
            None where it doesn't.
        first: boundary 0 can be captured; where not, asking for it raises on the first forward pass.
        last: boundary L can be captured; where not, it never comes.
        beyond: asking for a boundary past L raises in the setter; where not, it never comes.
        wraps: a negative boundary marks a layer counted from the end.
        inner: attribute of the inner model that has both hooks; empty where there is none.
        stack: class of the module that runs the decoder layers; empty where it was not found.
        stream: where the residual stream entering a decoder layer is (:class:`sglang_eagle3_plugin.structure.Stream`), or
            ``refused: why``; empty where the layer's class was not found.
        why: what was in the way of finding the rule; empty where nothing was.
        chosen: attribute of an inner model whose class is chosen when it is loaded, by its config; empty where there is none.
        never: why EAGLE-3 has no meaning for the class; empty where it has.
        around: attribute of the language model that it wraps, whether or not that has hooks; empty for a plain decoder.
    """

    module: str
    setter: str | None = None
    accessor: str | None = None
    rule: str | None = None
    capture: str | None = None
    first: bool = False
    last: bool = False
    beyond: bool = False
    wraps: bool = False
    inner: str = ""
    stack: str = ""
    stream: str = ""
    why: str = ""
    chosen: str = ""
    never: str = ""
    around: str = ""


@dataclass(frozen=True)
class ReleaseFacts:
    """What is true of a whole release.

    Attributes:
        entry_point: SGLang loads plugins by their entry point (``sglang.srt.plugins``); where not, only a ``.pth`` reaches it.
        graph_ids: what the CUDA graphs are captured with: ``configured``, or ``none``: the setter is called without ids for them.
        eager_ids: likewise for eager passes.
        calls: where the setter is called: ``file:function``.
        missing_setter: what a class without setter ends in: ``AttributeError`` or ``ValueError``.
        drafts: draft architecture -> the config fields its code reads, of ``num_aux_hidden_states``, ``norm_before_fc``, ...
        problems: one line for each file that could not be read.
    """

    entry_point: bool
    graph_ids: str
    eager_ids: str
    calls: tuple[str, ...]
    missing_setter: str
    drafts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    problems: tuple[str, ...] = ()


@dataclass(frozen=True)
class Captured:
    """What a stock release captures for a list of ids.

    Attributes:
        eager: boundaries asked for in eager passes, ascending.
        graph: boundaries asked for inside CUDA graphs, ascending.
        will_emit: those that really reach the draft in eager passes. Fewer than ``eager`` where one cannot be captured; more where
            marks are left over from the call for the graphs.
        faults: one sentence for each thing that will go wrong.
        rule: id of the rule.
        source: the setter that says so, and its release.
        exact: False where the release is unknown and its nearest known one answers.
    """

    eager: tuple[int, ...]
    graph: tuple[int, ...]
    will_emit: tuple[int, ...]
    faults: tuple[str, ...]
    rule: str
    source: str
    exact: bool = True


def captured(release: str, class_name: str, ids: Sequence[int] | None, num_layers: int) -> Captured | None:
    """What a stock release captures in a target, given the ids that SGLang sees (``Draft.ids_seen_by_sglang``).

    Args:
        release: ``0.5.9``; where it is unknown, the nearest known release answers and ``exact`` is False.
        class_name: the target's class, the first of its ``architectures``.
        ids: None where SGLang falls back to its default layers.
        num_layers: L.

    Returns:
        None where the release has no such class, or the class no setter with a known rule.
    """
    known, exact = nearest(release)
    facts = class_facts(release, class_name)
    if known is None or facts is None:
        return None
    source = f"SGLang {known}: {facts.setter}.set_eagle3_layers_to_capture"
    return captured_by(facts, release_facts(known), ids, num_layers, source, exact=exact)


def captured_by(
    facts: ClassFacts,
    whole: ReleaseFacts,
    ids: Sequence[int] | None,
    num_layers: int,
    source: str,
    *,
    apply: Callable[[Sequence[int] | None, int], Sequence[int]] | None = None,
    exact: bool = True,
) -> Captured | None:
    """As :func:`captured`, from facts at hand.

    Args:
        facts: of the class.
        whole: of its release.
        ids: as SGLang sees them.
        num_layers: L.
        source: for the answer.
        apply: (ids, L) -> boundaries, in place of the rule's: the setter itself, executed.
        exact: for the answer.
    """
    if facts.setter is None:
        return None
    if facts.rule == DEAD:
        fault = f"{facts.setter}.set_eagle3_layers_to_capture is inherited, and the layers don't heed it: nothing is captured"
        return Captured((), (), (), (fault,), DEAD, source, exact)
    rule = RULES.get(facts.rule or "")
    apply = apply or (rule.apply if rule else None)
    if apply is None:
        return None

    def asked(way: str) -> tuple[int, ...]:
        return tuple(sorted(apply(ids if way == "configured" else None, num_layers)))

    eager, graph = asked(whole.eager_ids), asked(whole.graph_ids)
    faults = [*_faults(eager, facts, num_layers)]
    left_over = graph if facts.capture == "mark" else ()
    emitted = tuple(sorted({*emits(eager, facts, num_layers), *emits(left_over, facts, num_layers)}))
    if graph != eager:
        faults.append(f"CUDA graphs capture the default boundaries {list(graph)}, whatever the ids")
    if set(emitted) - set(eager) and left_over:
        faults.append(f"layers marked for the graphs stay marked, so eager passes capture {list(emitted)}")
    return Captured(eager, graph, emitted, tuple(faults), facts.rule or UNKNOWN, source, exact)


def emits(boundaries: Sequence[int], facts: ClassFacts, num_layers: int) -> tuple[int, ...]:
    """Of the boundaries a setter asked for, those that will be captured by a class's layer stack."""
    found = set()
    for b in boundaries:
        if facts.wraps and -num_layers <= b < 0:
            found.add(b + num_layers)
        elif 0 < b < num_layers or (b == 0 and facts.first) or (b == num_layers and facts.last):
            found.add(b)
    return tuple(sorted(found))


def _faults(boundaries: Sequence[int], facts: ClassFacts, num_layers: int) -> Iterator[str]:
    for b in boundaries:
        if b == 0 and not facts.first:
            yield "boundary 0 is captured before there is a residual, which fails on the first request"
        elif b >= num_layers and facts.beyond:
            yield f"boundary {b} stops the start with an IndexError (the target has {num_layers} layers)"
        elif b > num_layers or (b == num_layers and not facts.last):
            yield f"boundary {b} never comes (the target has {num_layers} layers)"
        elif b < 0 and facts.wraps:
            yield f"boundary {b} is taken as boundary {b + num_layers}"
        elif b < 0:
            yield f"boundary {b} never comes"


@functools.cache
def known_releases() -> tuple[str, ...]:
    """Every release that was surveyed, oldest first."""
    return tuple(_data()["releases"])


@functools.cache
def release_facts(release: str) -> ReleaseFacts:
    """The facts of a known release.

    Raises:
        KeyError: it was not surveyed.
    """
    values = _data()["releases"][release]["facts"]
    return ReleaseFacts(
        **{
            **values,
            "calls": tuple(values["calls"]),
            "problems": tuple(values["problems"]),
            "drafts": {name: tuple(read) for name, read in values["drafts"].items()},
        }
    )


def wheel_of(release: str) -> tuple[str, str]:
    """File name and SHA-256 of the wheel that a known release's facts were found in."""
    entry = _data()["releases"][release]
    return entry["wheel"], entry["sha256"]


@functools.cache
def class_facts(release: str, class_name: str) -> ClassFacts | None:
    """The facts of a class in a release, or in its nearest known one; None where that has no such class."""
    known, _ = nearest(release)
    if known is None:
        return None
    positions = _positions()
    found: dict[str, Any] | None = None
    for run in _data()["classes"].get(class_name, ()):
        if positions[run["since"]] > positions[known]:
            break
        found = run
    if found is None or found.get("absent"):
        return None
    return ClassFacts(**{key: value for key, value in found.items() if key != "since"})


def class_names() -> tuple[str, ...]:
    """Every class of any surveyed release, by name."""
    return tuple(_data()["classes"])


@functools.cache
def nearest(release: str) -> tuple[str | None, bool]:
    """The known release that answers for another: itself, else its newest elder, else the oldest; and whether it is itself."""
    plain = re.split(r"[+]", release.removeprefix("v"))[0]
    names = known_releases()
    if plain in names:
        return plain, True
    place = order(plain)
    if place is None or not names:
        return (names[-1] if names else None), False
    older = [name for name in names if (order(name) or ()) <= place]
    return (older[-1] if older else names[0]), False


def order(release: str) -> tuple[int, ...] | None:
    """A key that sorts SGLang's release names (0.5.2rc1 < 0.5.2 < 0.5.2.post1 < 0.5.10); None for any other name."""
    match = re.match(r"v?(\d{1,4})\.(\d{1,4})\.(\d{1,4})(?:rc(\d{1,4}))?(?:\.post(\d{1,4}))?(?:[.+-]|$)", release)
    if match is None:
        return None
    major, minor, patch, candidate, post = match.groups()
    return (int(major), int(minor), int(patch), -1 if candidate is not None else 0, int(candidate or 0), int(post or 0))


def data_directory() -> Path:
    """Where the surveyed facts lie: in an installed wheel inside the package, in a checkout in ``compat/data``."""
    packaged = Path(__file__).parent / "_compat"
    return packaged if packaged.is_dir() else Path(__file__).parents[1] / "compat" / "data"


@functools.cache
def _positions() -> dict[str, int]:
    return {name: position for position, name in enumerate(known_releases())}


@functools.cache
def _data() -> dict[str, Any]:
    directory = data_directory()
    releases = json.loads((directory / "releases.json").read_text(encoding="utf-8"))
    classes = json.loads((directory / "classes.json").read_text(encoding="utf-8"))
    return {"releases": releases["releases"], "classes": classes["classes"]}


def forget() -> None:
    """Read the facts anew when next asked: they were surveyed again in this process."""
    for cached in (_data, _positions, known_releases, release_facts, class_facts, nearest):
        cached.cache_clear()
