"""The patch engine: a patch is data and a structural probe; applying it is plan, then commit, or nothing at all.

The probe looks at the imported module and answers with the changes to make, or why none are: the methods are there (`Native`), or
the code has a shape that nobody has seen (`Incompatible`). A version number decides nothing, so forks and nightlies work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from types import ModuleType
from typing import Any

from sglang_eagle3_plugin.settings import Settings

MARK = "__eagle3_patch__"
"""Attribute of every function that we put into SGLang; its value is the patch's id."""

_ABSENT = object()


class State(str, Enum):
    """What became of a patch in this process."""

    PENDING = "pending"
    """The module has not been imported yet."""
    NATIVE = "native"
    """This SGLang has it; nothing was changed."""
    APPLIED = "applied"
    """In place, and read back."""
    DISABLED = "disabled"
    """The user turned it off."""
    INCOMPATIBLE = "incompatible"
    """The code has another shape than the patch knows; nothing was changed."""
    FAILED = "failed"
    """A fault while probing or applying; everything was put back."""
    REVERTED = "reverted"
    """It was applied and taken back."""


TROUBLE = frozenset({State.INCOMPATIBLE, State.FAILED})


@dataclass(frozen=True)
class Change:
    """Set ``owner.name`` (a class or a module) to ``value``; ``how`` is said after the name in reports."""

    owner: Any
    name: str
    value: Any
    how: str = ""


@dataclass(frozen=True)
class Native:
    """The probe's answer where SGLang needs no change."""

    reason: str


@dataclass(frozen=True)
class Incompatible:
    """The probe's answer where the patch does not fit.

    Attributes:
        reason: what was found in place of what was expected.
        remedy: what the user can do.
    """

    reason: str
    remedy: str


Plan = Native | Incompatible | Sequence[Change]


@dataclass(frozen=True)
class Patch:
    """One patch, as data.

    Attributes:
        id: its name in records, in ``EAGLE3_DISABLE_PATCHES``, in the exported series.
        module: the module whose import triggers it.
        target: the class or function that it changes, for reports.
        reason: why SGLang needs it, in a sentence.
        probe: looks at the imported module and plans.
        upstream: the upstream pull request or issue, or ``none``.
        exit_condition: when this patch can be dropped.
    """

    id: str
    module: str
    target: str
    reason: str
    probe: Callable[[ModuleType], Plan]
    upstream: str
    exit_condition: str


@dataclass(frozen=True)
class Outcome:
    """A patch's state in this process, and why."""

    patch: Patch
    state: State
    reason: str
    remedy: str = ""

    def sentence(self, release: str) -> str:
        """Class, release, reason and remedy, for the one warning of auto mode."""
        verb = "does not fit" if self.state is State.INCOMPATIBLE else "failed on"
        return f"patch {self.patch.id} {verb} {self.patch.target} of SGLang {release}: {self.reason}. {self.remedy}".strip()


@dataclass(frozen=True)
class _Done:
    change: Change
    before: Any


class Ledger:
    """The patches of one process: applies, reverts, and knows the state of each."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._outcomes: dict[str, Outcome] = {}
        self._done: dict[str, list[_Done]] = {}

    def outcomes(self) -> list[Outcome]:
        """Every patch that has met its module, in order of meeting."""
        return list(self._outcomes.values())

    def apply(self, patch: Patch, module: ModuleType) -> Outcome:
        """Probe, plan and commit; never raises. Applied once: a patch that is in place is left alone."""
        if patch.id in self.settings.disabled_patches:
            return self._record(patch, State.DISABLED, "EAGLE3_DISABLE_PATCHES names it")
        if patch.id in self._done:
            return self._outcomes[patch.id]
        try:
            plan = patch.probe(module)
            if isinstance(plan, Native):
                return self._record(patch, State.NATIVE, plan.reason)
            if isinstance(plan, Incompatible):
                return self._record(patch, State.INCOMPATIBLE, plan.reason, plan.remedy)
            self._done[patch.id] = _commit(plan, patch.id)
        except Exception as error:
            remedy = f"Nothing was changed; EAGLE3_DISABLE_PATCHES={patch.id} silences this. Please report it."
            return self._record(patch, State.FAILED, f"{type(error).__name__}: {error}", remedy)
        names = ", ".join(f"{change.name} ({change.how})" if change.how else change.name for change in plan)
        return self._record(patch, State.APPLIED, f"set {names}")

    def revert(self, patch: Patch) -> Outcome:
        """Take back what is still ours. What other code has since replaced or wrapped is left, and named."""
        if patch.id not in self._done:
            return self._outcomes.get(patch.id) or Outcome(patch, State.PENDING, "it has not met its module yet")
        left = []
        for done in reversed(self._done.pop(patch.id)):
            if vars(done.change.owner).get(done.change.name) is done.change.value:
                _restore(done)
            else:
                left.append(done.change.name)
        kept = f"; {', '.join(left)} has been replaced since by other code and was left" if left else ""
        return self._record(patch, State.REVERTED, f"taken back{kept}")

    def _record(self, patch: Patch, state: State, reason: str, remedy: str = "") -> Outcome:
        outcome = self._outcomes[patch.id] = Outcome(patch, state, reason, remedy)
        return outcome


def is_ours(value: object) -> bool:
    """Whether a function was put there by this plugin, by this copy of it or another."""
    return hasattr(value, MARK)


def _commit(plan: Sequence[Change], patch_id: str) -> list[_Done]:
    done: list[_Done] = []
    try:
        for change in plan:
            if callable(change.value):
                setattr(change.value, MARK, patch_id)
            done.append(_Done(change, vars(change.owner).get(change.name, _ABSENT)))
            setattr(change.owner, change.name, change.value)
            if vars(change.owner).get(change.name) is not change.value:
                raise RuntimeError(f"{change.name} does not read back as it was set")
    except BaseException:
        for step in reversed(done):
            _restore(step)
        raise
    return done


def _restore(done: _Done) -> None:
    owner, name = done.change.owner, done.change.name
    if done.before is not _ABSENT:
        setattr(owner, name, done.before)
    elif name in vars(owner):
        delattr(owner, name)
