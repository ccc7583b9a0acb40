"""The layer ids by themselves: readable, where SGLang looks for them, within the target, each once, ascending, enough of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from sglang_eagle3_plugin.boundaries import Convention, default_boundaries
from sglang_eagle3_plugin.doctor import facts
from sglang_eagle3_plugin.doctor.deployment import Deployment
from sglang_eagle3_plugin.doctor.findings import REMOVE, Evidence, Finding
from sglang_eagle3_plugin.drafts import CONVENTION, IDS

NESTED = f"eagle_config.{IDS}"


def _field(d: Deployment) -> Evidence:
    assert d.draft is not None
    return d.draft.says(d.wiring.where or NESTED)


def rewritten(d: Deployment, ids: Sequence[int], boundaries: Sequence[int]) -> dict[str, Any]:
    """Return the changes to the draft config that write ids where SGLang reads them, and say what they mean."""
    convention = Convention.BOUNDARY if list(ids) == list(boundaries) else Convention.OUTPUT
    changes: dict[str, Any] = {NESTED: list(ids), f"eagle_config.{CONVENTION}": convention.value}
    if d.wiring.ids and d.wiring.nested_ids is None:
        changes[d.wiring.where] = REMOVE
    return changes


def check_place(d: Deployment) -> Iterator[Finding]:
    """Find ids that the engine does not read: SGLang's runner looks in `eagle_config` only and swallows the rest."""
    if d.draft is None:
        return
    w = d.wiring
    if w.malformed:
        yield Finding(
            "ERR_CONFIG_MALFORMED",
            f"The draft config cannot be read: {w.malformed}. SGLang swallows such an error and captures its default layers.",
            (_field(d),),
            f"Correct it; layer ids are a list of integers in {NESTED}.",
        )
        return
    depth = d.target.num_layers if d.target else None
    default = default_boundaries(depth) if depth else None
    wanted = w.decision.boundaries if w.decision else None
    if d.engine == "llama.cpp" and w.nested_ids is not None:
        yield Finding(
            "ERR_CONFIG_IDS_IGNORED",
            f"The ids stand in eagle_config, and {d.engine} reads them at the top level only: its default layers are used.",
            (_field(d),),
            f"Repeat the ids at the top level as {IDS}.",
        )
    if d.engine == "sglang" and w.ids and w.nested_ids is None:
        if default is not None and wanted == default:
            yield Finding(
                "INFO_CONFIG_IDS_IGNORED",
                f"The ids stand in {w.where}, where SGLang does not look; its default {list(default)} happens to be what they "
                f"mean.",
                (_field(d),),
            )
            return
        target = d.target.architecture if d.target else None
        ids = facts.ids_for(d.release, target, wanted, depth) if wanted and depth else None
        yield Finding(
            "INFO_FIXED_BY_PLUGIN" if d.plugin else "ERR_CONFIG_IDS_IGNORED",
            f"The ids stand in {w.where} of the draft config, where SGLang's runner does not look: IGNORED, the default "
            + (f"{list(default)} will be captured." if default else "(2, L//2, L-3) will be captured."),
            (_field(d), d.draft.says("eagle_config")),
            f"Nest them: {NESTED} = {list(ids if ids else w.ids)}"
            + ("" if ids else ", translated to what this release makes of them")
            + "; sglang-eagle3-plugin reads both places.",
            ("FIXABLE_BY_PLUGIN", "FIXABLE_BY_OVERRIDE"),
            "certain" if wanted else "likely",
            rewritten(d, ids, wanted) if ids and wanted else {},
        )
    if w.conflicts:
        yield Finding(
            "WARN_CONFIG_IDS_DISAGREE",
            f"The draft config lists layer ids twice, and the lists differ: {w.conflicts[0]}. SGLang uses {NESTED}.",
            (_field(d),),
            "Delete the list that is wrong.",
        )


def check_range(d: Deployment) -> Iterator[Finding]:
    """Find ids that no layer of the target answers to, that stand twice, or that do not ascend."""
    w = d.wiring
    depth = d.target.num_layers if d.target else None
    if d.draft is None or not w.ids or not w.aux or not depth:
        return
    ids = list(w.ids)
    where = (_field(d), d.target.says("num_hidden_layers") if d.target else d.of_release())
    outside = [i for i in ids if i < 0 or i > depth]
    said = w.decision is not None and (w.decision.from_outside or w.decision.decided_by == "draft config")
    if outside and d.plugin and said:
        return  # id -1 of layer outputs, say: the embeddings, which the plugin captures
    if outside:
        decided = w.decision.boundaries if w.decision and w.decision.from_outside else None
        meant = decided or default_boundaries(depth)
        target = d.target.architecture if d.target else None
        new = facts.ids_for(d.release, target, meant, depth) or tuple(b - 1 for b in meant)
        yield Finding(
            "ERR_LAYER_ID_RANGE",
            f"Layer id {', '.join(map(str, outside))} names no layer of a target with {depth} layers: at most "
            f"{len(ids) - len(outside)} of {len(ids)} states can be right.",
            where,
            f"Write the ids that the draft was trained with; for boundaries {list(meant)}"
            + ("" if decided else " (EAGLE-3's default for this depth)")
            + f" write {NESTED} = {list(new)}.",
            ("FIXABLE_BY_OVERRIDE",),
            changes=rewritten(d, new, meant),
        )
        return
    if len(set(ids)) != len(ids):
        yield Finding(
            "ERR_LAYER_ID_DUPLICATE",
            f"An id stands twice in {ids}; a layer is captured once, so {len(set(ids))} of {len(ids)} states arrive.",
            where,
            f"Correct {NESTED}.",
        )
    elif ids != sorted(ids):
        yield Finding(
            "ERR_LAYER_ID_ORDER",
            f"The ids {ids} do not ascend. SGLang captures in layer order, so the slots of fc are fed "
            f"{sorted(ids)}: permuted, unless the trainer sorted too.",
            where,
            "List them in ascending order, and permute the column blocks of fc.weight accordingly if the trainer did not sort.",
            sure="likely",
        )


def check_reach(d: Deployment) -> Iterator[Finding]:
    """Find boundaries that the stock release is asked for and cannot capture: the embeddings, the final residual, and beyond."""
    w = d.wiring
    depth = d.target.num_layers if d.target else None
    if w.captures is None or not depth or not w.ids or any(i < 0 or i > depth for i in w.ids) or d.target is None:
        return
    asked = w.captures.eager
    lost = [b for b in asked if b not in w.captures.will_emit]
    if not lost:
        return
    wanted = w.decision.boundaries if w.decision else None
    fires = len(asked) - len(lost)
    each = w.fed_each or 0
    width = f", {fires * each} wide where fc wants {w.slots * each}" if each and w.slots else ""
    later = facts.captured_from(d.release, d.target.architecture, w.nested_ids, depth, wanted)
    last = max(lost) >= depth
    yield Finding(
        (
            "INFO_FIXED_BY_PLUGIN"
            if d.plugin
            else "ERR_FINAL_BOUNDARY_UNSUPPORTED"
            if last
            else "ERR_EMBEDDING_BOUNDARY_UNSUPPORTED"
        ),
        f"SGLang {d.release} reads ids {list(w.ids)} as boundaries {list(asked)}, and {', '.join(map(str, lost))} never fires on "
        f"{d.target.architecture} with {depth} layers: {fires} of {len(asked)} states arrive{width}. "
        + ("The server starts and dies on the first request." if last else "There is no residual stream before the first layer."),
        (_field(d), d.of_release(), d.target.says("num_hidden_layers")),
        "Install sglang-eagle3-plugin, which captures it" + (f", or use SGLang {later} or newer." if later else "."),
        ("FIXABLE_BY_PLUGIN", *((f"OK_FROM_{later}",) if later else ())),
    )


def check_count(d: Deployment) -> Iterator[Finding]:
    """Find a number of captured states other than the number that the draft's `fc` takes."""
    w = d.wiring
    if d.draft is None or not w.aux or not w.slots or d.engine != "sglang":
        return
    read = w.ids if d.plugin and w.ids else w.nested_ids  # the plugin reads ids wherever a trainer puts them
    given = len(set(read)) if read is not None else 3
    evidence = [d.draft.says("num_aux_hidden_states" if w.slots_by == "num_aux_hidden_states" else NESTED)]
    found = d.draft.tensor("fc.weight")
    if w.slots_by == "fc" and found:
        evidence.append(d.draft.holds(found))
    heard = d.plugin or d.trained is not None  # stock SGLang reads neither the variables nor a manifest
    decided = w.decision if heard and w.decision and w.decision.from_outside else None
    known = w.slots_by in ("fc", "num_aux_hidden_states")  # not so by a list of ids that was overruled
    if known and decided and decided.boundaries is not None and len(decided.boundaries) != w.slots:
        yield Finding(
            "ERR_AUX_COUNT_MISMATCH",
            f"The draft takes {w.slots} auxiliary states (by {w.slots_by}), and {len(decided.boundaries)} boundaries are asked "
            f"for, {list(decided.boundaries)} ({decided.evidence}).",
            tuple(evidence),
            f"Name {w.slots} boundaries, one for each state that fc takes.",
        )
    elif w.slots != given and not (d.plugin and decided):
        listed = "ids are listed where they are read" if read is not None else "states are the default without nested ids"
        yield Finding(
            "ERR_AUX_COUNT_MISMATCH",
            f"The draft takes {w.slots} auxiliary states (by {w.slots_by}), but {given} {listed}: the width that reaches fc is "
            + (f"{given * w.fed_each}, not {w.slots * w.fed_each}." if w.fed_each else f"that of {given} states."),
            tuple(evidence),
            f"List the {w.slots} layer ids in {NESTED}, one for each state that fc takes.",
        )
    elif w.slots != 3 and facts.before(d.release, facts.SEVERAL_AUX_FROM):
        yield Finding(
            "ERR_AUX_COUNT_MISMATCH",
            f"The draft takes {w.slots} auxiliary states (by {w.slots_by}), and SGLang {d.release} has 3 hard-coded.",
            (*evidence, d.of_release()),
            f"Use SGLang {facts.SEVERAL_AUX_FROM} or newer.",
            (f"OK_FROM_{facts.SEVERAL_AUX_FROM}",),
        )
    if w.slots_by == "fc" and w.ids and len(w.ids) == w.slots + 1 and w.nested_ids is None:
        yield Finding(
            "INFO_LAST_ID_IS_TARGET",
            f"{len(w.ids)} ids are listed and fc takes {w.slots}: the last, {w.ids[-1]}, names the state to be predicted, not an "
            f"input.",
            tuple(evidence),
        )
