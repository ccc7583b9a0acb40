"""What the ids mean to the draft against what the release makes of them, in its CUDA graphs and outside."""

from __future__ import annotations

from collections.abc import Iterator

from sglang_eagle3_plugin.boundaries import Convention, default_boundaries
from sglang_eagle3_plugin.doctor import facts
from sglang_eagle3_plugin.doctor.checks.layer_ids import NESTED, rewritten
from sglang_eagle3_plugin.doctor.deployment import Deployment
from sglang_eagle3_plugin.doctor.findings import Evidence, Finding
from sglang_eagle3_plugin.drafts import CONVENTION
from sglang_eagle3_plugin.releases import DEAD


def _shown(d: Deployment) -> Evidence:
    assert d.draft is not None
    return d.draft.says(d.wiring.where or NESTED)


def check_meaning(d: Deployment) -> Iterator[Finding]:
    """Find captured boundaries other than the trained ones, or a draft that does not say which it was trained on."""
    w = d.wiring
    depth = d.target.num_layers if d.target else None
    if d.draft is None or d.target is None or not depth or not w.aux or d.engine != "sglang":
        return
    if w.impossible:
        if w.ids and all(0 <= i <= depth for i in w.ids) and sorted(set(w.ids)) == list(w.ids):
            yield Finding(
                "ERR_LAYER_CONVENTION", f"As read, the ids cannot be captured: {w.impossible}.", (_shown(d),), "Correct them."
            )
        return
    decision, captures = w.decision, w.captures
    if decision is None:
        return
    if decision.boundaries is None:
        readings = dict(decision.readings)
        now = f" SGLang {d.release} captures {list(captures.eager)}." if captures else ""
        yield Finding(
            "WARN_LAYER_CONVENTION_AMBIGUOUS",
            f"Nothing says what the layer ids {list(w.ids or ())} mean: boundaries {list(readings['output'])} if they name layer "
            f"outputs (SpecForge, ModelOpt), {list(readings['boundary'])} if they name boundaries (vLLM, speculators).{now}",
            (_shown(d), d.of_release()),
            "Serve the same prompts twice, with EAGLE3_LAYER_CONVENTION=output and with =boundary (sglang-eagle3-plugin), and "
            "keep the "
            "one with the longer acceptance length: sglang-eagle3 bench shows it. Then write eagle_config."
            f"{CONVENTION} into the draft config.",
            ("RUN_AB_TEST", "FIXABLE_BY_PLUGIN"),
        )
        return
    if captures is None or captures.rule == DEAD or captures.eager == decision.boundaries:
        return
    if set(captures.eager) - set(captures.will_emit) or any(i < 0 or i > depth for i in w.ids or ()):
        return  # layer_ids reports what never fires
    if w.ids and w.nested_ids is None:
        return  # layer_ids reports that they are not read
    later = facts.captured_from(d.release, d.target.architecture, w.nested_ids, depth, decision.boundaries)
    ids = facts.ids_for(d.release, d.target.architecture, decision.boundaries, depth)
    rewrite = f" or write {NESTED} = {list(ids)}, which this release reads so," if ids else ""
    if d.plugin:
        yield Finding(
            "INFO_FIXED_BY_PLUGIN",
            f"SGLang {d.release} alone would capture {list(captures.eager)}; the plugin captures {list(decision.boundaries)}.",
            (_shown(d), d.of_release()),
        )
        return
    yield Finding(
        f"ERR_LAYER_CONVENTION_BEFORE_{later}" if later else "ERR_LAYER_CONVENTION",
        f"The draft was trained on boundaries {list(decision.boundaries)} ({decision.decided_by}: {decision.evidence}), and SGLang "
        f"{d.release} captures {list(captures.eager)} on {d.target.architecture}. It serves, with a shorter acceptance length.",
        (_shown(d), d.of_release()),
        f"Install sglang-eagle3-plugin, which captures the right ones,{rewrite} "
        + (f"or use SGLang {later} or newer." if later else "or set EAGLE3_CAPTURE_BOUNDARIES with the plugin."),
        ("FIXABLE_BY_PLUGIN", *((f"OK_FROM_{later}",) if later else ())),
        changes=rewritten(d, ids, decision.boundaries) if ids else {},
    )


def check_graphs(d: Deployment) -> Iterator[Finding]:
    """Find releases that capture default boundaries in the CUDA graphs and the configured ones outside (up to 0.5.10.post1)."""
    w = d.wiring
    if d.draft is None or w.captures is None or w.captures.graph == w.captures.eager or d.flags.has("--disable-cuda-graph"):
        return
    if w.impossible:
        return  # layer_ids reports ids that no layer answers to
    union = facts.marks(d.release, d.target.architecture if d.target else None)
    yield Finding(
        "INFO_FIXED_BY_PLUGIN" if d.plugin else "ERR_GRAPH_USES_DEFAULT_LAYERS",
        f"SGLang {d.release} captures its CUDA graphs before it applies the draft's ids: decoding uses boundaries "
        f"{list(w.captures.graph)}, eager prefill {list(w.captures.eager)}."
        + (" This family marks layers and never clears the marks, so prefill captures the union of both." if union else ""),
        (_shown(d), d.of_release(), Evidence("SGLang", "cuda graph", str(list(w.captures.graph)))),
        "Install sglang-eagle3-plugin, which makes them one, add --disable-cuda-graph, or use SGLang 0.5.11 or newer.",
        ("FIXABLE_BY_PLUGIN", "FIXABLE_BY_FLAG", "OK_FROM_0.5.11"),
    )


def check_engines(d: Deployment) -> Iterator[Finding]:
    """Find ids that another engine, or SGLang after a conversion, reads as other layers than those trained."""
    w = d.wiring
    depth = d.target.num_layers if d.target else None
    if d.draft is None or not w.ids or not depth or w.decision is None or w.decision.boundaries is None:
        return
    wanted, fix = (
        w.decision.boundaries,
        "Record the boundaries with the states, and find those of an existing dump by correlation: ",
    )
    if d.engine == "vllm" and Convention.BOUNDARY.to_boundaries(w.ids) != wanted:
        yield Finding(
            "ERR_LAYER_CONVENTION_CROSS_ENGINE",
            f"vLLM reads the ids {list(w.ids)} as boundaries; the draft's trainer means {list(wanted)}. The same list gives "
            f"states of "
            "other layers in each engine.",
            (_shown(d),),
            f"{fix}sglang-eagle3 hidden-states compare. In vLLM's counting write {list(wanted)}.",
            ("IDENTIFY_BY_CORRELATION",),
        )
    speculators = any(key in d.draft.config for key in ("speculators_model_type", "speculators_config"))
    if d.engine == "sglang" and speculators and w.ids and w.nested_ids is None:
        nested = facts.captures(d.release or facts.newest(), d.target.architecture if d.target else None, w.ids, depth)
        if nested is None or nested.eager == wanted:
            return
        ids = facts.ids_for(d.release or facts.newest(), d.target.architecture if d.target else None, wanted, depth)
        stay = "happens to be right" if wanted == default_boundaries(depth) else f"is {list(default_boundaries(depth))}"
        yield Finding(
            "INFO_FIXED_BY_PLUGIN" if d.plugin else "ERR_LAYER_CONVENTION_CROSS_ENGINE",
            f"speculators writes boundaries {list(wanted)} at the top level. Nested into eagle_config as they are, SGLang shifts "
            f"them "
            f"to {list(nested.eager)}; left there they are ignored, and the default {stay}.",
            (_shown(d), d.draft.says("speculators_model_type"), d.of_release()),
            f"Convert the draft with {NESTED} = {list(ids) if ids else 'ids that this release cannot express (use the plugin)'}; "
            "sglang-eagle3-plugin reads the speculators form as it is.",
            ("FIXABLE_BY_PLUGIN",),
            changes=rewritten(d, ids, wanted) if ids else {},
        )


def check_no_aux(d: Deployment) -> Iterator[Finding]:
    """Note a draft that takes the last state only, and doubt one that lists ids all the same."""
    w = d.wiring
    if d.draft is None or w.aux:
        return
    flag = d.draft.says("eagle_config.use_aux_hidden_state")
    yield Finding(
        "INFO_NO_AUX", "The draft takes the target's last state alone: nothing is captured, and fc is not called.", (flag,)
    )
    if w.ids:
        yield Finding(
            "WARN_IDS_WITHOUT_AUX",
            f"The draft config says use_aux_hidden_state: false and lists layer ids {list(w.ids)} as well; they are not used.",
            (flag, _shown(d)),
            "Remove the ids, or set use_aux_hidden_state to true if the draft was trained with them.",
        )
