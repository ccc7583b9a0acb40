"""A deployment that is only described: what an issue thread tells, with no files at hand.

The form is a JSON object with any of ``sglang_version``, ``target_arch``, ``num_hidden_layers``, ``hidden_size``, ``draft_config``,
``server_flags`` (a list of strings), ``observed``, ``kind``, ``engine``, ``environ``, ``collect_tokens``. A draft config may hold,
beside real fields, ``tensors`` (names, with ``midlayer.*`` for a whole layer) and ``d2t`` (``arange`` or ``all zeros``).
"""

from __future__ import annotations

import array
import re
import shlex
from collections.abc import Mapping
from typing import Any

from sglang_eagle3_plugin.checkpoints import Checkpoint, Tensor
from sglang_eagle3_plugin.doctor.deployment import Deployment, Model, mapping, whole
from sglang_eagle3_plugin.doctor.flags import parse
from sglang_eagle3_plugin.errors import UserError

LAYER_PARTS = (
    "input_layernorm", "hidden_norm", "post_attention_layernorm",
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
)  # fmt: skip
"""What a Llama-style EAGLE-3 decoder layer holds."""
_LATENT = ("self_attn.q_a_proj", "self_attn.q_b_proj", "self_attn.kv_a_proj_with_mqa", "self_attn.kv_b_proj", "self_attn.o_proj")
_SOME_VOCABULARY = 128256
_SOME_DRAFT_VOCABULARY = 32000


def deployment(report: Mapping[str, Any]) -> Deployment:
    """Make a deployment of a description.

    Raises:
        UserError: a field is of the wrong type.
    """
    flags = report.get("server_flags") or []
    if isinstance(flags, str):
        flags = [flags]
    if not isinstance(flags, list) or not all(isinstance(f, str) for f in flags):
        raise UserError("server_flags of the description is no list of strings")
    try:
        words = [word for line in flags for word in shlex.split(line)]
    except ValueError:
        raise UserError("server_flags of the description has an unclosed quote") from None
    drafted = report.get("draft_config")
    if drafted is not None and not isinstance(drafted, dict):
        raise UserError("draft_config of the description is no object")
    target, draft = _target(report), _draft(drafted, report) if drafted is not None else None
    if draft and draft.weights and target:
        _embeddings(target, draft.weights)
    tokens = whole(report.get("collect_tokens"))
    kind = str(report.get("kind") or "")
    environ = {str(k): str(v) for k, v in mapping(report.get("environ")).items()}
    if kind == "debug_cuda_graph":
        environ.setdefault("EAGLE3_DEBUG", "1")
    return Deployment(
        target=target,
        draft=draft,
        flags=parse(words),
        release=str(report["sglang_version"]) if report.get("sglang_version") else None,
        environ=environ,
        observed=str(report.get("observed") or ""),
        engine=str(report.get("engine") or "sglang"),
        collect_tokens=tokens if tokens is not None else 0 if kind.startswith("dump_") else None,
    )


def _target(report: Mapping[str, Any]) -> Model | None:
    config: dict[str, Any] = {k: report[k] for k in ("num_hidden_layers", "hidden_size") if report.get(k) is not None}
    if report.get("target_arch"):
        config["architectures"] = [report["target_arch"]]
    config.update(mapping(report.get("target_config")))
    return Model(config, "the target as described", _weights(config)) if config or report.get("draft_config") else None


def _draft(given: Mapping[str, Any], report: Mapping[str, Any]) -> Model:
    config = {key: value for key, value in given.items() if value is not None and key not in ("tensors", "d2t")}
    if "<" in str(config.get("draft_vocab_size", "")):
        config["draft_vocab_size"], config["vocab_size"] = _SOME_DRAFT_VOCABULARY, _SOME_VOCABULARY
    if more := re.fullmatch(r">\s*(\d{1,4})", str(config.get("num_aux_hidden_states", ""))):
        config["num_aux_hidden_states"] = int(more.group(1)) + 1
    hidden = whole(config.get("hidden_size")) or whole(report.get("hidden_size"))
    return Model(config, "the draft as described", _weights(given, hidden))


def _weights(given: Mapping[str, Any], hidden: int | None = None) -> Checkpoint | None:
    listed = given.get("tensors")
    names = [str(name) for name in listed] if isinstance(listed, list) else []
    tensors: dict[str, Tensor] = {}
    for entry in names:
        name, _, remark = entry.partition(" ")
        if name.endswith(".*"):
            latent = "Deepseek" in str(given.get("architectures"))
            parts = (*(p for p in LAYER_PARTS if not latent or "attn." not in p), *(_LATENT if latent else ()))
            tensors.update({f"{name[:-1]}{part}.weight": Tensor("BF16", ()) for part in parts})
            tensors.update({part: Tensor("BF16", ()) for part in ("fc.weight", "norm.weight", "lm_head.weight")})
        elif name == "fc.weight" and hidden:
            tensors[name] = Tensor("BF16", (hidden, 3 * hidden))
        elif "random" in remark:
            tensors[name] = Tensor("BF16", (1, 1), data=b"\1\0")
        elif name == "d2t":
            tensors[name] = Tensor("I64", (whole(given.get("draft_vocab_size")) or _SOME_DRAFT_VOCABULARY,))
        else:
            tensors[name] = Tensor("BF16", ())
    if isinstance(given.get("d2t"), str):
        count = whole(given.get("draft_vocab_size")) or _SOME_DRAFT_VOCABULARY
        values = range(count) if given["d2t"] == "arange" else [0] * count
        tensors["d2t"] = Tensor("I64", (count,), data=array.array("q", values).tobytes())
    if not tensors:
        return None
    # A description lists what is remarkable: what it leaves out is known to be absent only where it lists whole layers.
    whole_list = any(entry.endswith(".*") for entry in names)
    return Checkpoint(tensors, len(tensors) if whole_list else 0, 1)


def _embeddings(target: Model, draft: Checkpoint) -> None:
    """Give a target embeddings that differ from a draft's random ones."""
    own = draft.tensors.get("embed_tokens.weight")
    if own and own.data and target.weights is None:
        target.weights = Checkpoint({"model.embed_tokens.weight": Tensor(own.dtype, own.shape, data=bytes(len(own.data)))}, 0, 1)
