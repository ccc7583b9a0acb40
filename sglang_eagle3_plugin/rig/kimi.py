"""Sizes and config of the rig's Kimi-K2.5 targets: a tiny one, and one of the real shapes.

Field names and the real sizes are those of the published config.json (``KimiK25ForConditionalGeneration`` over DeepSeek-V3).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sglang_eagle3_plugin.rig.attention import Mla


@dataclass(frozen=True)
class Sizes:
    """Of the text model; the vision tower is tiny always.

    Attributes:
        hidden: width of the residual stream.
        dense: inner width of layer 0's feed-forward.
        expert: inner width of an expert, and of the shared one.
        experts: experts a layer.
        chosen: experts a token.
        attention: its shape.
        noise: factor on random weights: wide layers sum more of them, and the stream's noise must stay small beside its digits.
        dtype: of the stored weights, NumPy's name.
    """

    hidden: int = 512
    dense: int = 128
    expert: int = 64
    experts: int = 4
    chosen: int = 2
    attention: Mla = field(default_factory=Mla)
    noise: float = 1.0
    dtype: str = "float32"


KINDS = {
    "kimi-k25": Sizes(),
    # Of 384 experts it has 16, and the rig's vocabulary; widths, heads and ranks are the real ones. 0.8e9 parameters a layer.
    "kimi-k25-full": Sizes(7168, 18432, 2048, 16, 8, Mla(heads=64, q_rank=1536, nope=128, value=128), noise=0.1, dtype="float16"),
}


def deepseek(sizes: Sizes = KINDS["kimi-k25"]) -> dict[str, Any]:
    """What makes a config DeepSeek-V3's, attention included."""
    return {
        "model_type": "deepseek_v3",
        "intermediate_size": sizes.dense,
        "moe_intermediate_size": sizes.expert,
        "n_routed_experts": sizes.experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": sizes.chosen,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "num_nextn_predict_layers": 0,
        **sizes.attention.config(),
    }


def config(sizes: Sizes, common: dict[str, Any]) -> dict[str, Any]:
    """A whole config; ``common`` holds what every text model of the rig says of itself."""
    outside = ("bos_token_id", "eos_token_id", "pad_token_id", "torch_dtype", "tie_word_embeddings")
    return {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "text_config": {**common, **deepseek(sizes), "architectures": ["DeepseekV3ForCausalLM"]},
        "vision_config": {
            "patch_size": 14,
            "init_pos_emb_height": 8,
            "init_pos_emb_width": 8,
            "init_pos_emb_time": 4,
            "pos_emb_type": "divided_fixed",
            "num_attention_heads": 4,
            "num_hidden_layers": 1,
            "hidden_size": 256,
            "intermediate_size": 256,
            "vt_hidden_size": 256,
            "vt_num_attention_heads": 4,
            "vt_num_hidden_layers": 1,
            "vt_intermediate_size": 256,
            "merge_kernel_size": [2, 2],
            "video_attn_type": "spatial_temporal",
            "merge_type": "sd2_tpool",
            "mm_projector_type": "patchmerger",
            "mm_hidden_size": 256,
            "projector_hidden_act": "gelu",
            "projector_ln_eps": 1e-5,
            "text_hidden_size": sizes.hidden,
        },
        "media_placeholder_token_id": 304,
        **{key: common[key] for key in outside},
    }
