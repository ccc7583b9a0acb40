"""What `releases` says of layer ids, against every release's own setter, executed from its wheel.

Nothing is listed here: the classes are those that a wheel registers, the ids are chosen to tell all rules apart, and what is
expected is what the release's own code did.
"""

from __future__ import annotations

import pytest
from packaging.version import Version

from sglang_eagle3_plugin import releases
from sglang_eagle3_plugin.survey import archive, facts, wheels

pytestmark = pytest.mark.release

IDS = (
    (61, None), (61, (2, 30, 58)), (61, (1, 29, 57)), (61, (-1, 2, 30)), (36, (24, 30, 36)), (36, (1, 17, 35)), (24, ()),
    (24, (5,)), (24, (1, 5, 11, 17)), (61, (58, 30, 2)), (61, (-2, 5)), (61, (3, 61, 70)), (8, (0, 1, 2, 3, 4, 5, 6, 7)),
)  # fmt: skip
SINCE = Version("0.5.4.post2")
RELEASES = [r for r in releases.known_releases() if Version(r) >= SINCE]


@pytest.fixture(scope="module", params=RELEASES)
def found(request) -> facts.Release:
    """One release at a time, its files parsed once for all its tests."""
    with archive.of_wheel(wheels.ensure(request.param)) as opened:
        return facts.of_archive(opened)


def test_captured_is_what_the_releases_own_setter_does(found):
    whole = releases.release_facts(found.name)
    with_setter = [name for name, c in found.classes.items() if c.setter is not None]
    assert len(with_setter) >= 15
    for name in with_setter:
        if found.classes[name].rule == releases.UNKNOWN:
            assert releases.captured(found.name, name, None, 61) is None
            assert found.run(name, [None], 61).error, f"{name} could be executed after all"
            continue
        for layers, ids in IDS:
            got = releases.captured(found.name, name, ids, layers)
            assert got is not None, name
            where = f"{name}, ids {ids} of {layers} layers"
            alone = found.run(name, [ids], layers)
            dead = found.classes[name].rule == releases.DEAD
            default = found.run(name, [None], layers).listed
            assert got.eager == (() if dead else alone.listed), where
            assert got.graph == (() if dead else default if whole.graph_ids == "none" else alone.listed), where
            if dead:
                assert alone.marked == (), where
            elif found.classes[name].capture == "mark":
                # The marks are what emits. With the graphs' call before it, as the release's runner makes it.
                before = [None] if whole.graph_ids == "none" else []
                assert set(got.will_emit) - {layers} == set(found.run(name, [*before, ids], layers).marked), where
            else:
                assert set(got.will_emit) <= set(alone.listed), where


def test_a_tree_without_any_table_is_told_the_same_by_executing_it(found):
    for name in found.classes:
        for layers, ids in IDS[:6]:
            told, executed = releases.captured(found.name, name, ids, layers), found.captured(name, ids, layers)
            assert (told is None) is (executed is None), name
            if told is not None:
                assert (told.eager, told.graph, told.will_emit) == (executed.eager, executed.graph, executed.will_emit)
                assert executed.source.endswith("executed")


def test_the_committed_facts_are_what_the_wheel_says(found):
    assert releases.release_facts(found.name) == found.facts
    assert {name: releases.class_facts(found.name, name) for name in found.classes} == found.classes
    assert {name for name in releases.class_names() if releases.class_facts(found.name, name)} == set(found.classes)


def test_every_rule_is_one_that_some_release_follows():
    every = [releases.class_facts(release, name) for release in releases.known_releases() for name in releases.class_names()]
    assert set(releases.RULES) <= {c.rule for c in every if c is not None}


def test_the_probes_tell_all_rules_apart():
    seen = {tuple(tuple(sorted(rule.apply(ids, layers))) for layers, ids in facts.PROBES) for rule in releases.RULES.values()}
    assert len(seen) == len(releases.RULES)
