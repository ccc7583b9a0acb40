"""The draft's quantisation: where none is given SGLang copies the target's flag (server_args, since 0.5.7 its own flag exists)."""

from __future__ import annotations

from collections.abc import Iterator

from sglang_eagle3_plugin.doctor import facts
from sglang_eagle3_plugin.doctor.deployment import Deployment, mapping
from sglang_eagle3_plugin.doctor.findings import Evidence, Finding

_OWN = "--speculative-draft-model-quantization"


def check(d: Deployment) -> Iterator[Finding]:
    """Find an unquantised draft that will be loaded by the target's quantisation method."""
    if d.draft is None or d.flags.has(_OWN):
        return
    asked = d.flags.text("--quantization")
    packed = any(
        name.endswith((".qweight", ".weight_packed", ".weight_scale"))
        for name in (d.draft.weights.tensors if d.draft.weights else ())
    )
    if d.draft.config.get("quantization_config") or packed:
        return
    dtype = d.draft.says("torch_dtype" if "torch_dtype" in d.draft.config else "dtype")
    if asked and asked.lower() not in ("none", "unquant", "auto"):
        fix = f"Add {_OWN} unquant."
        if facts.before(d.release, facts.DRAFT_QUANTISATION_FROM):
            fix = f"Use SGLang {facts.DRAFT_QUANTISATION_FROM} or newer and add {_OWN} unquant."
        yield Finding(
            "ERR_QUANT_INHERIT",
            f"--quantization {asked} is given and the draft's is not: SGLang gives the draft {asked} too, and the draft is not "
            f"quantised. "
            "It fails to load, or is loaded as garbage.",
            (d.of_flag("--quantization"), d.of_flag(_OWN), dtype),
            fix,
            ("FIXABLE_BY_FLAG",),
        )
    elif d.target is not None and (method := mapping(d.target.config.get("quantization_config")).get("quant_method")):
        yield Finding(
            "INFO_QUANTISED_TARGET",
            f"The target is quantised by its own config ({method}); SGLang reads the draft's method from the draft's config, "
            f"where there is "
            "none. On some hardware it fills in --quantization by itself, and the draft then inherits it.",
            (Evidence(d.target.file, "quantization_config.quant_method", str(method)[:80]), dtype),
            f"If the draft fails to load, add {_OWN} unquant.",
        )
