"""An EAGLE-3 draft in plain torch: what SGLang computes with it, for whole sequences at once.

The architectures and the config flags are SGLang's (sglang/srt/models/llama_eagle3.py, kimi_k25_eagle3.py of 0.5.23): one layer,
whose attention reads the normed embedding of the next token beside the normed, projected auxiliary states of this one.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_eagle3_plugin import checkpoints
from sglang_eagle3_plugin.errors import UserError
from sglang_eagle3_plugin.hidden_states import rotary, torch_io

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3DeepseekV2ForCausalLM")


@dataclass
class Draft:
    """A loaded draft.

    Attributes:
        config: its config.json.
        weights: name -> float32 tensor, without a leading ``model.``; the layer's names begin with ``layer.``.
        embedding: (V, E) float32, the target's where one was given: SGLang puts it in place of the draft's.
        to_target: (draft vocabulary,) target id of each draft id.
    """

    config: dict[str, Any]
    weights: dict[str, Any]
    embedding: Any
    to_target: Any

    def __post_init__(self) -> None:
        self.mla = self.config["architectures"][0] == "Eagle3DeepseekV2ForCausalLM"
        self.hidden_size = int(self.config["hidden_size"])
        self.epsilon = float(self.config.get("rms_norm_eps", 1e-6))
        dim = int(self.config["qk_rope_head_dim"]) if self.mla else self._head_dim()
        self.rotary = rotary.from_config(self.config, dim, interleaved=self.mla)
        self.scale = self.rotary.score_factor * (dim + (int(self.config["qk_nope_head_dim"]) if self.mla else 0)) ** -0.5

    def project(self, aux: Any) -> Any:
        """Auxiliary states (N, B, H) to what the layer takes, (N, hidden).

        Raises:
            UserError: the draft was built for another width.
        """
        import torch

        flat = aux.flatten(1)
        if flat.shape[-1] == self.hidden_size:  # SGLang does not call fc then
            return flat
        expected = self.weights["fc.weight"].shape[1]
        if flat.shape[-1] != expected:
            raise UserError(
                f"the draft's fc takes {expected} values a token, and the data has {aux.shape[1]} slots of {aux.shape[2]}; "
                "score it on a dump of the boundaries that it was made for"
            )
        nested = self.config.get("eagle_config") or {}
        if nested.get("norm_before_fc", self.config.get("norm_before_fc", False)):
            flat = self.norm(flat, "input_norm.weight")
        if self.config.get("fc_norm") or self.config.get("use_aux_norm"):
            flat = torch.cat([self.norm(aux[:, i], f"fc_norm.{i}.weight") for i in range(aux.shape[1])], dim=-1)
        return torch.nn.functional.linear(flat, self.weights["fc.weight"], self.weights.get("fc.bias"))

    def queries_keys_values(self, tokens: Any, hidden: Any, positions: Any) -> tuple[Any, Any, Any]:
        """What the attention works on, each (N, heads, dim).

        Args:
            tokens: (N,) the token after the one whose state ``hidden`` is.
            hidden: (N, hidden).
            positions: (N,).
        """
        import torch

        embeds = self.norm(self.embedding[tokens], "layer.input_layernorm.weight")
        x = torch.cat([embeds, self.norm(hidden, "layer.hidden_norm.weight")], dim=-1)
        return self._mla(x, positions) if self.mla else self._gqa(x, positions)

    def finish(self, hidden: Any, attended: Any) -> tuple[Any, Any]:
        """From the attention's result (N, heads, dim) to (state for the next step, draft logits)."""
        functional = torch_io.import_torch("score").nn.functional
        residual = hidden + functional.linear(attended.flatten(1), self.weights["layer.self_attn.o_proj.weight"])
        x = self.norm(residual, "layer.post_attention_layernorm.weight")
        gate = functional.linear(x, self.weights["layer.mlp.gate_proj.weight"])
        up = functional.linear(x, self.weights["layer.mlp.up_proj.weight"])
        residual = residual + functional.linear(functional.silu(gate) * up, self.weights["layer.mlp.down_proj.weight"])
        normed = self.norm(residual, "norm.weight")
        state = normed if self.config.get("norm_output", False) else residual
        return state, functional.linear(normed, self.weights["lm_head.weight"])

    def norm(self, x: Any, name: str) -> Any:
        """RMSNorm with the named weight."""
        return x * (x.square().mean(-1, keepdim=True) + self.epsilon).rsqrt() * self.weights[name]

    def _head_dim(self) -> int:
        return int(self.config.get("head_dim") or self.config["hidden_size"] // self.config["num_attention_heads"])

    def _linear(self, x: Any, name: str) -> Any:
        functional = torch_io.import_torch("score").nn.functional
        return functional.linear(
            x, self.weights[f"layer.self_attn.{name}.weight"], self.weights.get(f"layer.self_attn.{name}.bias")
        )

    def _gqa(self, x: Any, positions: Any) -> tuple[Any, Any, Any]:
        q, k, v = (self._linear(x, f"{name}_proj").unflatten(-1, (-1, self._head_dim())) for name in "qkv")
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        return self.rotary(q, positions), self.rotary(k, positions), v

    def _mla(self, x: Any, positions: Any) -> tuple[Any, Any, Any]:
        import torch

        heads, rank = int(self.config["num_attention_heads"]), int(self.config["kv_lora_rank"])
        nope, rope = int(self.config["qk_nope_head_dim"]), int(self.config["qk_rope_head_dim"])
        latent = self.norm(self._linear(x, "q_a_proj"), "layer.self_attn.q_a_layernorm.weight")
        q = self._linear(latent, "q_b_proj").unflatten(-1, (heads, nope + rope))
        compressed, k_rope = self._linear(x, "kv_a_proj_with_mqa").split([rank, rope], dim=-1)
        compressed = self.norm(compressed, "layer.self_attn.kv_a_layernorm.weight")
        k_nope, v = (
            self._linear(compressed, "kv_b_proj").unflatten(-1, (heads, -1)).split([nope, int(self.config["v_head_dim"])], dim=-1)
        )
        k_rope = self.rotary(k_rope[:, None], positions).expand(-1, heads, -1)
        q = torch.cat([q[..., :nope], self.rotary(q[..., nope:], positions)], dim=-1)
        return q, torch.cat([k_nope, k_rope], dim=-1), v


def load(directory: Path, target: Path | None, device: str = "cpu") -> Draft:
    """Load a draft, and what SGLang lends it from the target.

    Raises:
        UserError: the architecture is none of `ARCHITECTURES`, or a weight is missing.
    """
    torch = torch_io.import_torch("score")
    config = _config(directory)
    architecture = (config.get("architectures") or ["?"])[0]
    if architecture not in ARCHITECTURES:
        raise UserError(f"{directory} is a {architecture}; score knows {' and '.join(ARCHITECTURES)}")
    if int(config.get("num_hidden_layers", 1)) != 1:
        raise UserError(f"{directory} has {config['num_hidden_layers']} layers; an EAGLE-3 draft that score knows has one")
    weights = {}
    for name, tensor in _tensors(directory).items():
        short = name.removeprefix("model.")
        for prefix in ("midlayer.", "layers.0."):
            short = f"layer.{short.removeprefix(prefix)}" if short.startswith(prefix) else short
        weights[short] = tensor.to(device)
    lent = _tensors(target, ("embed_tokens.weight", "lm_head.weight")) if target else {}
    own = weights.pop("embed_tokens.weight", None)
    embedding = next((t.to(device) for n, t in lent.items() if n.endswith("embed_tokens.weight")), own)
    if embedding is None:
        raise UserError(f"{directory} has no embed_tokens and takes the target's; give --target")
    vocabulary = int(config.get("draft_vocab_size") or config["vocab_size"])
    if "lm_head.weight" not in weights:
        head = (
            embedding
            if config.get("tie_word_embeddings")
            else next((t for n, t in lent.items() if n.endswith("lm_head.weight")), None)
        )
        if head is None:
            raise UserError(f"{directory} has no lm_head; SGLang would serve it with a random one, unless --target lends its own")
        weights["lm_head.weight"] = head.to(device)
    offsets = weights.pop("d2t", None)
    weights = {name: tensor.float() for name, tensor in weights.items() if name != "t2d"}
    to_target = torch.arange(vocabulary, device=device) + (0 if offsets is None else offsets.long())
    for name in ("norm.weight", "layer.hidden_norm.weight", "layer.input_layernorm.weight", "layer.self_attn.o_proj.weight"):
        if name not in weights:
            raise UserError(f"{directory} lacks the weight {name.replace('layer.', 'midlayer.')}")
    return Draft(config, weights, embedding.float(), to_target)


def load_head(target: Path, device: str) -> Any:
    """The target's ``lm_head`` (V, H) float32, or its embedding where they are tied.

    Raises:
        UserError: neither is there.
    """
    found = _tensors(target, ("lm_head.weight", "embed_tokens.weight"))
    for ending in ("lm_head.weight", "embed_tokens.weight"):
        for name, tensor in found.items():
            if name.endswith(ending):
                return tensor.float().to(device)
    raise UserError(f"{target} has neither lm_head nor embed_tokens in its safetensors files")


def _config(directory: Path) -> dict[str, Any]:
    return checkpoints.read_json(directory / "config.json")


def _tensors(directory: Path, endings: tuple[str, ...] = ("",)) -> dict[str, Any]:
    """The tensors of a checkpoint whose names end so; shards are opened only for what is wanted of them."""
    from safetensors import SafetensorError, safe_open

    found = {}
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise UserError(f"{directory} has no .safetensors file")
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                found.update({name: file.get_tensor(name) for name in file.keys() if name.endswith(endings)})  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path} cannot be read ({error})") from error
    return found
