"""The patch engine: plan, commit, read back, and put everything back when something goes wrong."""

from __future__ import annotations

from types import ModuleType

import pytest

from sglang_eagle3_plugin.patching import Change, Incompatible, Ledger, Native, Patch, State
from sglang_eagle3_plugin.settings import Settings


class Base:
    def inherited(self):
        return "base"


def target() -> type:
    class Target(Base):
        def own(self):
            return "own"

    return Target


def patch(plan, name="p") -> Patch:
    return Patch(name, "m", "Target", "why", lambda module: plan() if callable(plan) else plan, "none", "never")


def new(self):
    return "new"


MODULE = ModuleType("m")


def test_applies_and_reverts_own_inherited_and_absent_alike():
    cls = target()
    own = vars(cls)["own"]
    ledger = Ledger(Settings())
    changes = [Change(cls, name, lambda self: "new") for name in ("own", "inherited", "absent")]
    p = patch(changes)
    assert ledger.apply(p, MODULE).state is State.APPLIED
    assert [getattr(cls(), name)() for name in ("own", "inherited", "absent")] == ["new"] * 3
    assert ledger.revert(p).state is State.REVERTED
    assert vars(cls)["own"] is own
    assert "inherited" not in vars(cls), "true absence is restored, not a copy of the inherited method"
    assert cls().inherited() == "base"
    assert not hasattr(cls, "absent")
    assert ledger.apply(p, MODULE).state is State.APPLIED, "a reverted patch can be applied again"


def test_a_fault_half_way_puts_everything_back():
    cls = target()

    class Refuses(type):
        def __setattr__(cls, name, value):
            raise TypeError("no")

    class Frozen(metaclass=Refuses):
        pass

    before = dict(vars(cls))
    outcome = Ledger(Settings()).apply(
        patch([Change(cls, "own", new), Change(cls, "absent", new), Change(Frozen, "x", new)]), MODULE
    )
    assert outcome.state is State.FAILED
    assert "TypeError: no" in outcome.reason
    assert dict(vars(cls)) == before


def test_applied_is_only_said_after_reading_back():
    class Swallows(type):
        def __setattr__(cls, name, value):
            pass

    class Deaf(metaclass=Swallows):
        pass

    outcome = Ledger(Settings()).apply(patch([Change(Deaf, "x", new)]), MODULE)
    assert outcome.state is State.FAILED
    assert "does not read back" in outcome.reason


def test_what_others_replaced_since_is_left_and_named():
    cls = target()
    ledger = Ledger(Settings())
    p = patch([Change(cls, "own", new), Change(cls, "absent", new)])
    ledger.apply(p, MODULE)
    theirs = lambda self: "theirs"  # noqa: E731
    cls.own = theirs
    outcome = ledger.revert(p)
    assert cls.own is theirs
    assert not hasattr(cls, "absent")
    assert "own has been replaced since" in outcome.reason


def test_applied_once():
    cls = target()
    ledger = Ledger(Settings())
    calls = []

    def plan():
        calls.append(1)
        return [Change(cls, "own", new)]

    p = patch(plan)
    assert ledger.apply(p, MODULE) is ledger.apply(p, MODULE)
    assert calls == [1]


@pytest.mark.parametrize(
    ("plan", "state"),
    [(Native("there"), State.NATIVE), (Incompatible("odd", "do this"), State.INCOMPATIBLE)],
)
def test_answers_of_the_probe(plan, state):
    outcome = Ledger(Settings()).apply(patch(plan), MODULE)
    assert outcome.state is state


def test_a_probe_that_raises_never_escapes():
    def plan():
        raise ZeroDivisionError("oops")

    outcome = Ledger(Settings()).apply(patch(plan), MODULE)
    assert outcome.state is State.FAILED
    sentence = outcome.sentence("0.5.99")
    assert all(part in sentence for part in ("ZeroDivisionError", "0.5.99", "Target", "EAGLE3_DISABLE_PATCHES=p"))


def test_disabled_by_name():
    cls = target()
    outcome = Ledger(Settings(disabled_patches=frozenset({"p"}))).apply(patch([Change(cls, "own", new)]), MODULE)
    assert outcome.state is State.DISABLED
    assert cls().own() == "own"
