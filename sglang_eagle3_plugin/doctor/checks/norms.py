"""The norm variants of EAGLE-3.1 and speculators: flags, the tensors that go with them, and the releases that honour them."""

from __future__ import annotations

from collections.abc import Iterator

from sglang_eagle3_plugin.doctor import facts
from sglang_eagle3_plugin.doctor.checks.draft_class import is_latent
from sglang_eagle3_plugin.doctor.deployment import Deployment, Model, mapping, switch
from sglang_eagle3_plugin.doctor.findings import Evidence, Finding

_TENSORS = {"norm_before_fc": ("input_norm.weight",), "fc_norm": ("fc_norm.0.weight", "aux_norm_low.weight")}
_WHAT = {
    "norm_before_fc": "one norm over the concatenated states before fc",
    "fc_norm": "a norm for each state before fc",
    "norm_output": "the normed output fed to the next draft step",
    "norm_before_residual": "the norm taken before the residual branches off",
}


def wanted(draft: Model) -> list[tuple[str, tuple[Evidence, ...]]]:
    """Return the norm variants that a draft asks for, by flag or by tensor, with what shows it."""
    found: list[tuple[str, tuple[Evidence, ...]]] = []
    nested = mapping(draft.config.get("eagle_config"))
    for name in _WHAT:
        names = (name, "use_aux_norm") if name == "fc_norm" else (name,)
        evidence = [draft.says(f"eagle_config.{n}") for n in names if switch(nested.get(n))]
        evidence += [draft.says(n) for n in names if switch(draft.config.get(n))]
        evidence += [draft.holds(tensor) for suffix in _TENSORS.get(name, ()) if (tensor := draft.tensor(suffix))]
        if evidence:
            found.append((name, tuple(evidence)))
    return found


def check(d: Deployment) -> Iterator[Finding]:
    """Find a norm that the draft was trained with and the release leaves out, without a message."""
    if d.draft is None:
        return
    latent = is_latent(d)
    for name, evidence in wanted(d.draft):
        start = _supported_from(name, latent)
        if start is not None and (not facts.known(d.release) or facts.since(d.release, start)):
            continue
        if start is None and name == "norm_before_residual" and not facts.known(d.release):
            continue
        yield Finding(
            "ERR_NORM_FLAG_IGNORED",
            f"The draft was trained with {name} ({_WHAT[name]}), and "
            + (f"SGLang {d.release}" if start else "no SGLang release up to " + facts.newest())
            + (" drops it silently" if start else f" knows it for {'MLA' if latent else 'Llama'} drafts; it is dropped silently")
            + ": it runs, with a shorter acceptance length.",
            (*evidence, d.of_release()),
            f"Use SGLang {start} or newer." if start else "Train without it, or serve with an engine that honours it.",
            (f"OK_FROM_{start}", "OK_FROM_SUPPORTED_RELEASE") if start else (),
        )


def _supported_from(name: str, latent: bool) -> str | None:
    """The first release that honours a norm variant, under its own or its older name."""
    draft_class = "Eagle3DeepseekV2ForCausalLM" if latent else "LlamaForCausalLMEagle3"
    return facts.norm_from(name, draft_class)


def check_tensor_without_flag(d: Deployment) -> Iterator[Finding]:
    """Find norm tensors in the file whose flag is not set: no release looks at them then."""
    if d.draft is None:
        return
    for name, evidence in wanted(d.draft):
        if all("." in e.field and e.field.endswith("weight") for e in evidence):
            yield Finding(
                "ERR_NORM_FLAG_IGNORED",
                f"The file holds a tensor of {name} ({_WHAT[name]}), and the draft config does not set {name}: SGLang drops it.",
                evidence,
                f"Set {name} to true in a copy of the draft config (--fix-config writes one).",
                ("FIXABLE_BY_OVERRIDE",),
                changes={f"eagle_config.{name}" if name == "norm_before_fc" else name: True},
            )
