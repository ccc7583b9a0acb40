"""The draft's architecture name and depth, against the classes that the release has and the tensors in the file."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterator

from sglang_eagle3_plugin.checkpoints import Checkpoint
from sglang_eagle3_plugin.doctor import facts
from sglang_eagle3_plugin.doctor.checks.algorithm import looks_like_first_eagle
from sglang_eagle3_plugin.doctor.deployment import Deployment
from sglang_eagle3_plugin.doctor.findings import Evidence, Finding

LAYER = re.compile(r"(?:^|\.)(midlayer|layers\.(\d{1,6}))\.")


def layers_in(weights: Checkpoint) -> int:
    """Count the decoder layers that a draft's weights hold."""
    found = {match.group(2) or "0" for name in weights.tensors if (match := LAYER.search(name))}
    return len(found)


def is_latent(d: Deployment) -> bool:
    """Whether the draft has multi-head latent attention (DeepSeek's) rather than Llama's."""
    assert d.draft is not None
    return d.draft.tensor("kv_a_proj_with_mqa.weight") is not None or "Deepseek" in (d.draft.architecture or "")


def _may_have_been_added(d: Deployment) -> bool:
    """Whether the server may have classes that the release as published has not: a fork, a package of models, another plugin."""
    if not facts.surveyed(d.release) or "+" in (d.release or "") or d.source is not None:
        return True
    if d.environ.get("SGLANG_EXTERNAL_MODEL_PACKAGE"):  # sglang/srt/models/registry.py
        return True
    return d.plugin and any(point.name != "eagle3" for point in importlib.metadata.entry_points(group="sglang.srt.plugins"))


def check_name(d: Deployment) -> Iterator[Finding]:
    """Find an architecture name that SGLang has no EAGLE-3 class for."""
    if d.draft is None or d.draft.architecture is None or looks_like_first_eagle(d.draft):
        return
    name = d.draft.architecture
    known_from = facts.draft_class_from(name)
    if known_from is not None:
        if facts.before(d.release, known_from):
            yield Finding(
                "ERR_DRAFT_ARCH_UNKNOWN",
                f"SGLang {d.release} has no draft class {name}; it first ships in {known_from}.",
                (d.draft.says("architectures"), d.of_release()),
                f"Use SGLang {known_from} or newer.",
                (f"OK_FROM_{known_from}",),
            )
        return
    signs = [s for s in d.signs_of_eagle3 if s.field != "architectures"]
    right = "Eagle3DeepseekV2ForCausalLM" if is_latent(d) else "LlamaForCausalLMEagle3"
    fix = f'Set "architectures": ["{right}"] in a copy of the draft config (--fix-config writes one).'
    odd = re.search(r"eagle3|speculator|peagle|draft", name, re.IGNORECASE)
    if odd:
        loadable = not re.search(r"^p-?eagle|(?:^|[a-z0-9_])P-?E(?:agle|AGLE)", name)
        yield Finding(
            "ERR_DRAFT_ARCH_UNKNOWN",
            f"No SGLang release up to {facts.newest()} has a draft class {name}"
            + ("." if loadable else ": a parallel draft, which is of another structure than EAGLE-3's."),
            (d.draft.says("architectures"),),
            (fix if "transformer_layer_config" not in d.draft.config else f"Convert it from the speculators form. {fix}")
            if loadable
            else "Use a draft in EAGLE-3's form.",
            ("FIXABLE_BY_OVERRIDE",) if loadable else (),
            "likely" if _may_have_been_added(d) else "certain",
            {"architectures": [right]} if loadable else {},
        )
    elif signs:
        yield Finding(
            "ERR_ARCH_NOT_EAGLE3",
            f"The draft calls itself {name}, and its contents are EAGLE-3's. SGLang would build a whole {name} and fail on the "
            f"draft's "
            "tensors (KeyError: midlayer...), or serve a model that was never loaded.",
            (d.draft.says("architectures"), *signs[:3]),
            fix,
            ("FIXABLE_BY_OVERRIDE",),
            changes={"architectures": [right]},
        )


def check_depth(d: Deployment) -> Iterator[Finding]:
    """Find a depth in the draft config that is not the number of decoder layers in the file: often the target's."""
    if d.draft is None:
        return
    stated = d.draft.num_layers
    held = layers_in(d.draft.weights) if d.draft.weights and d.draft.weights.count else None
    one_only = facts.before(d.release, facts.SEVERAL_LAYERS_FROM) or is_latent(d)
    evidence = [d.draft.says("num_hidden_layers")]
    consequence = (
        "SGLang refuses it (EAGLE3 currently only supports 1 layer)."
        if one_only
        else "SGLang builds that many layers and leaves those that are not in the file uninitialised, without a message."
    )
    if held and stated is None:
        yield Finding(
            "INFO_DRAFT_DEPTH",
            f"The draft config does not say num_hidden_layers, and Transformers puts its model type's default there (32 for "
            f"llama); the "
            f"file holds {held}.",
            tuple(evidence),
            f"Set num_hidden_layers to {held} in a copy of the draft config (--fix-config writes one).",
            ("FIXABLE_BY_OVERRIDE",),
            "likely",
            {"num_hidden_layers": held},
        )
    elif held and stated != held:
        evidence.append(Evidence(str(d.draft.path or "weights"), "decoder layers", str(held)))
        yield Finding(
            "ERR_DRAFT_DEPTH",
            f"num_hidden_layers is {stated} in the draft config and the file holds {held} decoder "
            f"layer{'s' if held > 1 else ''}. {consequence}",
            tuple(evidence),
            f"Set num_hidden_layers to {held} in a copy of the draft config (--fix-config writes one).",
            ("FIXABLE_BY_OVERRIDE",),
            changes={"num_hidden_layers": held},
        )
    elif held is None and stated and stated > 1 and d.target and stated == d.target.num_layers:
        # Without the weights it is the copied depth of the target that gives it away; without a release nothing follows from it.
        yield Finding(
            "ERR_DRAFT_DEPTH" if facts.known(d.release) else "INFO_DRAFT_DEPTH",
            f"num_hidden_layers in the draft config is {stated}, the target's own depth; an EAGLE-3 draft has one. {consequence}",
            (*evidence, d.target.says("num_hidden_layers")),
            "Set num_hidden_layers to the number of layers in the file, 1 as a rule (--fix-config writes a copy).",
            ("FIXABLE_BY_OVERRIDE",),
            "likely",
            {"num_hidden_layers": 1},
        )
    elif stated and stated > 1 and one_only and (held is None or held == stated):
        yield Finding(
            "ERR_DRAFT_DEPTH",
            f"The draft has {stated} layers. {consequence}",
            (*evidence, d.of_release()),
            "Use a draft of one layer." if is_latent(d) else f"Use SGLang {facts.SEVERAL_LAYERS_FROM} or newer.",
            () if is_latent(d) else (f"OK_FROM_{facts.SEVERAL_LAYERS_FROM}",),
        )
