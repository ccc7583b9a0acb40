"""Which boundaries the draft was trained on, which this release captures, and how wide what is fed to the draft will be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang_eagle3_plugin import drafts
from sglang_eagle3_plugin.boundaries import BoundaryError, Decision, check
from sglang_eagle3_plugin.doctor import facts
from sglang_eagle3_plugin.doctor.deployment import whole
from sglang_eagle3_plugin.releases import Captured
from sglang_eagle3_plugin.settings import Settings

if TYPE_CHECKING:
    from sglang_eagle3_plugin.doctor.deployment import Deployment, Model


@dataclass(frozen=True)
class Wiring:
    """See the module.

    Attributes:
        ids: the layer ids that the draft config lists, wherever it lists them.
        where: the field in which they stand, dots leading into objects; empty where there is none.
        nested_ids: the ids that SGLang's runner sees; None where it falls back to its default layers.
        malformed: what in the draft config cannot be read; empty where all can.
        conflicts: a sentence for each further field that lists other ids.
        aux: whether the draft takes auxiliary states at all (``use_aux_hidden_state``).
        decision: what the draft was trained on; None when it cannot be said (no draft, no depth, or ``impossible``).
        impossible: why no reading of the ids can be captured in this target.
        captures: what the stock release captures; None where the release or the target's class is unknown.
        fc: (out, in) of the draft's ``fc``, None when no weights are at hand or it has none.
        fed_each: width of one auxiliary state: the target's hidden size.
        slots: states that the draft's ``fc`` was made for; None when that cannot be told.
        slots_by: where ``slots`` comes from: ``fc``, ``num_aux_hidden_states``, ``ids`` or ``default``.
    """

    ids: tuple[int, ...] | None
    where: str
    nested_ids: tuple[int, ...] | None
    malformed: str
    conflicts: tuple[str, ...]
    aux: bool
    decision: Decision | None
    impossible: str
    captures: Captured | None
    fc: tuple[int, int] | None
    fed_each: int | None
    slots: int | None
    slots_by: str


def of(d: Deployment) -> Wiring:
    """Work out the wiring of a deployment. Never raises."""
    config: Mapping[str, Any] = d.draft.config if d.draft else {}
    malformed, draft = "", drafts.Draft()
    if d.draft:
        try:
            draft = drafts.read(config, d.draft.path, named=str(d.draft.path or ""))
        except drafts.DraftError as error:
            malformed = str(error)
    depth = d.target.num_layers if d.target else None
    decision, impossible = _decide(d, draft, depth) if d.draft and depth and not malformed else (None, "")
    captures = None
    if depth and draft.uses_aux_hidden_states and d.target and d.eagle3:
        captures = facts.captures(d.release, d.target.architecture, draft.ids_seen_by_sglang, depth)
    fc = _fc(d.draft)
    each = d.target.hidden_size if d.target else None
    each = each or whole(config.get("target_hidden_size")) or (d.draft.hidden_size if d.draft else None)
    slots, slots_by = _slots(draft, fc, each) if d.draft and draft.uses_aux_hidden_states else (None, "")
    return Wiring(
        draft.ids,
        draft.where,
        draft.ids_seen_by_sglang,
        malformed,
        draft.conflicts,
        draft.uses_aux_hidden_states,
        decision,
        impossible,
        captures,
        fc,
        each,
        slots,
        slots_by,
    )


def _fc(draft: Model | None) -> tuple[int, int] | None:
    found = draft.tensor("fc.weight") if draft else None
    if found is None or len(found[1].shape) != 2:
        return None
    return found[1].shape[0], found[1].shape[1]


def _slots(draft: drafts.Draft, fc: tuple[int, int] | None, each: int | None) -> tuple[int | None, str]:
    if fc and each:
        return (fc[1] // each if fc[1] % each == 0 else None), "fc"
    if draft.num_aux_hidden_states:
        return draft.num_aux_hidden_states, "num_aux_hidden_states"
    return (len(draft.ids), "ids") if draft.ids else (3, "default")


def _decide(d: Deployment, draft: drafts.Draft, depth: int) -> tuple[Decision | None, str]:
    try:
        if d.trained is not None:
            return Decision(check(d.trained, depth), "explicit", "user", "you said which boundaries it was trained on"), ""
        return drafts.decide_for(draft, depth, Settings.from_environment(d.environ)), ""
    except BoundaryError as error:
        return None, str(error)


def as_json(d: Deployment) -> dict[str, Any]:
    """The ``wiring`` object of ``doctor --json``."""
    w = d.wiring
    decision = w.decision
    stock = None if w.captures is None else {"cuda_graph": list(w.captures.graph), "eager": list(w.captures.eager)}
    return {
        "release": d.release,
        "target_class": d.target.architecture if d.target else None,
        "target_layers": d.target.num_layers if d.target else None,
        "algorithm": d.flags.algorithm,
        "plugin": d.plugin,
        "ids": None if w.ids is None else list(w.ids),
        "ids_location": w.where or None,
        "convention": decision.convention if decision else ("impossible" if w.impossible else "unknown"),
        "decided_by": decision.decided_by if decision else None,
        "evidence": decision.evidence if decision else (w.impossible or None),
        "wanted": None if decision is None or decision.boundaries is None else list(decision.boundaries),
        "readings": {name: list(boundaries) for name, boundaries in decision.readings} if decision else {},
        "stock": stock,
        "draft_slots": w.slots,
        "fc_input": w.fc[1] if w.fc else None,
        "state_width": w.fed_each,
    }
