"""The draft's tensor names against what the draft class loads: missing ones keep random values, others are dropped silently."""

from __future__ import annotations

import re
from collections.abc import Iterator

from sglang_eagle3_plugin.doctor import facts
from sglang_eagle3_plugin.doctor.checks.draft_class import LAYER, is_latent
from sglang_eagle3_plugin.doctor.deployment import Deployment
from sglang_eagle3_plugin.doctor.findings import Evidence, Finding

_ATTENTION = {
    False: ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    True: ("self_attn.q_a_proj", "self_attn.q_b_proj", "self_attn.kv_a_proj_with_mqa", "self_attn.kv_b_proj", "self_attn.o_proj"),
}
_LAYER = ("input_layernorm", "hidden_norm", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
_DROPPED = re.compile(r"(?:self_attn\.[qk]_norm\.weight|self_attn\.[qkv]_proj\.bias|self_attn\.sinks)$")


def check(d: Deployment) -> Iterator[Finding]:
    """Find parameters that no tensor of the file fills, and tensors that change the result and are dropped."""
    if d.draft is None or d.draft.weights is None or not d.draft.weights.count:
        return
    names = set(d.draft.weights.tensors)
    if not any(name.endswith(("fc.weight", "hidden_norm.weight")) for name in names):
        return  # no EAGLE-3 draft, which `algorithm` and `draft_class` speak of
    latent = is_latent(d)
    missing = [f"{part}.weight" for part in ("fc", "norm") if d.draft.lacks(f"{part}.weight")]
    fused = {
        "q_proj": "qkv_proj",
        "k_proj": "qkv_proj",
        "v_proj": "qkv_proj",
        "gate_proj": "gate_up_proj",
        "up_proj": "gate_up_proj",
    }
    for part in (*_ATTENTION[latent], *_LAYER):
        head, _, last = part.rpartition(".")
        other = f"{head}.{fused[last]}" if last in fused else part
        if not any(
            LAYER.search(n) and re.search(rf"\.(?:{re.escape(part)}|{re.escape(other)})\.(?:weight|qweight)", n) for n in names
        ):
            missing.append(f"{part}.weight")
    by_number = sorted(n for n in names if re.match(r"(?:model\.)?layers\.\d", n))
    old = facts.before(d.release, facts.SEVERAL_LAYERS_FROM)
    if by_number and old and not any("midlayer." in n for n in names):
        yield Finding(
            "ERR_TENSOR_MISSING",
            f"The file calls its decoder layer layers.0, and SGLang {d.release} knows it as midlayer only: {len(by_number)} "
            f"tensors are "
            "dropped without a message and the whole layer keeps random values.",
            (Evidence(str(d.draft.path or "weights"), "tensors", ", ".join(by_number[:3]) + ", ..."), d.of_release()),
            f"Use SGLang {facts.SEVERAL_LAYERS_FROM} or newer, or rename layers.0 to midlayer in the file.",
            (f"OK_FROM_{facts.SEVERAL_LAYERS_FROM}",),
        )
    prefixed = [n for n in names if n.startswith("model.") and LAYER.search(n)]
    if latent and prefixed:
        yield Finding(
            "ERR_TENSOR_MISSING",
            f"The MLA draft class puts model. before every name itself, so {len(prefixed)} tensors that have it already are "
            f"skipped.",
            (Evidence(str(d.draft.path or "weights"), "tensors", prefixed[0]),),
            "Rename the tensors without the leading model.",
        )
    if missing:
        yield Finding(
            "ERR_TENSOR_MISSING",
            f"The file lacks {len(missing)} tensor{'s' if len(missing) > 1 else ''} that the draft class loads: "
            f"{', '.join(missing[:4])}"
            + (", ..." if len(missing) > 4 else "")
            + ". They keep random values; the loader says nothing.",
            tuple(d.draft.has_not(name) for name in missing[:4]),
            "Export the draft again, with all its tensors.",
        )
    dropped = sorted(name for name in names if _DROPPED.search(name))
    if dropped and not latent:
        yield Finding(
            "WARN_TENSOR_DROPPED",
            f"SGLang's draft class has no place for {', '.join(dropped[:3])}{', ...' if len(dropped) > 3 else ''}: dropped "
            f"silently, "
            "and the draft was trained with them.",
            (Evidence(str(d.draft.path or "weights"), "tensors", ", ".join(dropped[:3])),),
            "Train the draft in the Llama form (no biases, no norms of query and key).",
        )


def check_files(d: Deployment) -> Iterator[Finding]:
    """Find shards that the index lists and that are missing or incomplete."""
    for model, role in ((d.target, "target"), (d.draft, "draft")):
        problems = model.weights.problems if model and model.weights else []
        if problems:
            yield Finding(
                "ERR_SHARD_MISSING",
                f"The {role} is incomplete: {problems[0]}" + (f", and {len(problems) - 1} more." if len(problems) > 1 else "."),
                tuple(Evidence(str(model.path if model else role), "index", problem) for problem in problems[:5]),
                f"Download the {role} again.",
            )
