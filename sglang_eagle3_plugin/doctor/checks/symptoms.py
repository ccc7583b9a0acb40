"""What was seen of a run (an error text, a pair of widths, an acceptance length) and the fault that it is the sign of."""

from __future__ import annotations

import re
from collections.abc import Iterator

from sglang_eagle3_plugin.doctor.checks.widths import factors
from sglang_eagle3_plugin.doctor.deployment import Deployment
from sglang_eagle3_plugin.doctor.findings import Evidence, Finding

_LONGEST = 100_000
_HOOK = re.compile(
    r"has no attribute '?(set_eagle3_layers_to_capture|get_embed_and_head)|(\w+) does not (?:support|implement|define)[^\n]{0,80}"
    r"(?:EAGLE-?3|set_eagle3_layers_to_capture)|ValueError[^\n]{0,120}(set_eagle3_layers_to_capture)",
    re.IGNORECASE,
)
_SHAPES = re.compile(r"\b(\d{1,8})\s?x\s?(\d{1,8})\b\D{1,20}\b(\d{1,8})\s?x\s?(\d{1,8})\b")
_PAIR = re.compile(r"\b(\d{2,8})\b (?:vs\.?|!=|but got|where) \b(\d{2,8})\b")
_LAST = re.compile(r"\b(\d{1,4}) captured, (\d{1,4}) (?:needed|expected)")
_ACCEPT = re.compile(
    r"(?:accept\w*(?: len\w*| length| rate)?[ :=]*)(\d+\.\d+)|\b(\d\.\d{1,3})\s?(?:-|to)\s?(\d\.\d{1,3})\b", re.IGNORECASE
)


def acceptance(text: str) -> float | None:
    """Return the acceptance length that a text speaks of (the upper end of a range), or None."""
    found = [float(m.group(3) or m.group(1)) for m in _ACCEPT.finditer(text[:_LONGEST])]
    found = [value for value in found if 1.0 <= value < 50]
    return max(found) if found else None


def check(d: Deployment) -> Iterator[Finding]:
    """Find the faults that an observation is the sign of."""
    text = d.observed[:_LONGEST]
    if not text:
        return
    seen = (Evidence("observed", "text", text.strip()[:120]),)
    if match := _HOOK.search(text):
        hook = match.group(1) or match.group(3) or "set_eagle3_layers_to_capture"
        yield Finding(
            "ERR_WRAPPER_NO_HOOKS" if hook.startswith("set_") else "ERR_WRAPPER_PARTIAL_HOOKS",
            f"The target's class lacks {hook}: up to 0.5.20 an AttributeError says so, later a ValueError that names the class.",
            seen,
            "Install sglang-eagle3-plugin beside this SGLang; it hands the hook on to the inner language model.",
            ("FIXABLE_BY_PLUGIN",),
        )
    if re.search(r"KeyError[^\n]{0,40}midlayer", text):
        yield Finding(
            "ERR_ARCH_NOT_EAGLE3",
            "SGLang built the target's class for the draft, by the architecture that the draft config names, and met the draft's "
            "tensors.",
            seen,
            'Set "architectures": ["LlamaForCausalLMEagle3"] in a copy of the draft config (--fix-config writes one).',
            ("FIXABLE_BY_OVERRIDE",),
        )
    yield from _widths(d, text, seen)
    if (match := _LAST.search(text)) and d.target and d.target.num_layers == int(match.group(2)):
        yield Finding(
            "ERR_LAYER_CONVENTION",
            f"State {match.group(1)} was taken for the last, and a target of {match.group(2)} layers has its last at boundary "
            f"{match.group(2)}: ids of layer outputs were read as boundaries.",
            seen,
            "Add one to every id where boundaries are meant.",
        )
    if re.search(r"\bnan\b|index out of bounds|device-side assert", text, re.IGNORECASE):
        yield Finding(
            "DEBUG_GRAPH_SAFE",
            "An index out of bounds under load is often a NaN of the draft, far from where it arose.",
            seen,
            "Set EAGLE3_DEBUG=1 (sglang-eagle3-plugin): it counts NaNs for each captured state, with CUDA graphs on.",
        )
    if re.search(r"fewer states than (?:\w+ )?tokens", text, re.IGNORECASE):
        under = d.flags.algorithm is not None or "completion" in text.lower()
        yield Finding(
            "ERR_DUMP_UNDER_SPECULATION" if under else "ERR_DUMP_INCOMPLETE",
            "Fewer states than tokens came back" + (": the server speculates." if under else ": the sample is incomplete."),
            seen,
            "Collect from the target alone, without --speculative-algorithm."
            if under
            else "Use the plugin's dump (EAGLE3_DUMP_DIR): a sample is listed only when it holds a state for every token.",
            ("FIXABLE_BY_PLUGIN",),
        )


def _widths(d: Deployment, text: str, seen: tuple[Evidence, ...]) -> Iterator[Finding]:
    hidden = (d.target.hidden_size if d.target else None) or (d.draft.hidden_size if d.draft else None)
    depth = d.target.num_layers if d.target else None
    if not hidden:
        return
    if match := _SHAPES.search(text):
        fed, takes = int(match.group(2)), int(match.group(3))
    elif match := _PAIR.search(text):
        takes, fed = int(match.group(1)), int(match.group(2))
    else:
        return
    if takes == hidden and fed * 2 == hidden:
        yield Finding(
            "ERR_EMBED_WIDTH",
            f"{fed} is half of the hidden size {hidden}: the target's embeddings are quantised two to a byte, and handed over "
            f"packed.",
            seen,
            "Use a target checkpoint whose embeddings are not quantised.",
            ("QUANT_DEPENDENT",),
        )
    elif fed != takes and (fed % hidden == 0 or takes % hidden == 0) and max(fed, takes) > hidden:
        yield Finding(
            "ERR_FC_WIDTH",
            f"Two widths met at fc: fed {factors(fed, hidden, depth)}, and it takes {factors(takes, hidden, depth)}.",
            seen,
            "Capture as many layers as fc takes: see the layer ids.",
        )
