"""A Llama of 7.5e9 parameters and three EAGLE-3 drafts for it, random but for what is said next: the same token always.

    python benchmarks/big_models.py DIR [--layers 8] [--hidden 8192] [--vocab 32768]

Needs torch, and a CUDA device to be quick. One channel of the residual stream carries a constant, which only the head's row of
one token reads. The target so always says that token; so do the drafts ``good`` and ``edges``, and ``random`` never does. What they
cost is what real ones of the same shape cost. ``edges`` lists no layers; it is served with the boundaries that the caller says.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

SAID = 7
CONSTANT = 4.0
HEAD_DIM = 128


def config(asked: argparse.Namespace, **over: Any) -> dict[str, Any]:
    heads = asked.hidden // HEAD_DIM
    common = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": asked.vocab,
        "hidden_size": asked.hidden,
        "intermediate_size": asked.hidden * 7 // 2,
        "num_hidden_layers": asked.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": max(heads // 4, 1),
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "rope_theta": 10000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": "bfloat16",
    }
    return common | over


def random(hidden: int, *shape: int) -> torch.Tensor:
    """Sums over ``hidden`` channels come out alike whatever the width, so that the constant stays as loud among them."""
    return torch.randn(*shape, dtype=torch.bfloat16) * (0.02 * (4096 / hidden) ** 0.5)


def ones(size: int) -> torch.Tensor:
    return torch.ones(size, dtype=torch.bfloat16)


def layer(prefix: str, about: dict[str, Any], width: int) -> dict[str, torch.Tensor]:
    """The weights of a decoder layer whose attention reads states of ``width``."""
    hidden, inner = about["hidden_size"], about["intermediate_size"]
    q, kv = about["num_attention_heads"] * HEAD_DIM, about["num_key_value_heads"] * HEAD_DIM
    return {
        f"{prefix}input_layernorm.weight": ones(hidden),
        f"{prefix}post_attention_layernorm.weight": ones(hidden),
        f"{prefix}self_attn.q_proj.weight": random(hidden, q, width),
        f"{prefix}self_attn.k_proj.weight": random(hidden, kv, width),
        f"{prefix}self_attn.v_proj.weight": random(hidden, kv, width),
        f"{prefix}self_attn.o_proj.weight": random(hidden, hidden, q),
        f"{prefix}mlp.gate_proj.weight": random(hidden, inner, hidden),
        f"{prefix}mlp.up_proj.weight": random(hidden, inner, hidden),
        f"{prefix}mlp.down_proj.weight": random(hidden, hidden, inner),
    }


def keep_the_constant(weights: dict[str, torch.Tensor]) -> None:
    """Nothing but its source writes channel 0, and only the head's row of one token reads it."""
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight", "fc.weight")):
            weight[0, :] = 0
    weights["lm_head.weight"][:, 0] = 0
    weights["lm_head.weight"][SAID, 0] = 50.0


def save(directory: Path, about: dict[str, Any], weights: dict[str, torch.Tensor]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    save_file({name: weight.contiguous().cpu() for name, weight in weights.items()}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(about, indent=1))


def target(directory: Path, asked: argparse.Namespace) -> int:
    """Write it; return how many parameters it has."""
    about = config(asked)
    weights = {
        "model.embed_tokens.weight": random(asked.hidden, asked.vocab, asked.hidden),
        "lm_head.weight": random(asked.hidden, asked.vocab, asked.hidden),
        "model.norm.weight": ones(asked.hidden),
    }
    for index in range(asked.layers):
        weights |= layer(f"model.layers.{index}.", about, asked.hidden)
    keep_the_constant(weights)
    weights["model.embed_tokens.weight"][:, 0] = CONSTANT
    save(directory, about, weights)
    return sum(weight.numel() for weight in weights.values())


def draft(directory: Path, asked: argparse.Namespace, ids: list[int] | None, good: bool) -> None:
    named = {} if ids is None else {"eagle_aux_hidden_state_layer_ids": ids}
    eagle = {"use_aux_hidden_state": True, **named}
    over = {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": asked.vocab}
    about = config(asked, **over, eagle_config=eagle)
    weights = {
        "fc.weight": random(asked.hidden, asked.hidden, 3 * asked.hidden),
        "lm_head.weight": random(asked.hidden, asked.vocab, asked.hidden),
        "norm.weight": ones(asked.hidden),
        "midlayer.hidden_norm.weight": ones(asked.hidden),
        **layer("midlayer.", about, 2 * asked.hidden),
    }
    if good:
        keep_the_constant(weights)
        weights["fc.weight"][0, 0] = 1.0
    save(directory, about, weights)


def make(root: Path, asked: argparse.Namespace) -> None:
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        print(f"target: {target(root / 'target', asked):.3g} parameters", flush=True)
        third = max(asked.layers // 3, 1)
        draft(root / "good", asked, [1, third + 1, 2 * third], good=True)
        draft(root / "edges", asked, None, good=True)
        draft(root / "random", asked, [1, third + 1, 2 * third], good=False)


def at(root: Path, layers: int, hidden: int, vocab: int = 32768) -> Path:
    """Where they are, made first where they are lacking: in a process of its own, which gives the device's memory back."""
    if not (root / "random" / "config.json").exists():
        shape = {"--layers": layers, "--hidden": hidden, "--vocab": vocab}
        words = [str(word) for pair in shape.items() for word in pair]
        subprocess.run([sys.executable, __file__, str(root), *words], check=True)
    return root


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=8192)
    parser.add_argument("--vocab", type=int, default=32768)


if __name__ == "__main__":
    main = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    main.add_argument("directory", type=Path)
    options(main)
    given = main.parse_args()
    make(given.directory, given)
