"""Train a tiny EAGLE-3 draft on an export of `hidden-states`: the smallest trainer. Run by `loop.py`, where torch is.

    python benchmarks/loop_draft.py EXPORT TARGET DRAFT [--seconds 200] [--steps 4]

EXPORT is in any format that `hidden-states export` writes; the boundaries and the draft's ``eagle_config`` are those beside it, in
``eagle3-dump.json``. What is trained is :class:`sglang_eagle3_plugin.hidden_states.draft_model.Draft`, which computes what SGLang
computes. As in EAGLE-3's training-time test, each step goes on from the draft's own state of the step before, so that it learns to
guess from what it will really be fed (https://arxiv.org/abs/2503.01840).
"""

import argparse
import json
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from sglang_eagle3_plugin.hidden_states import draft_model, training
from sglang_eagle3_plugin.hidden_states.export import PROVENANCE

HIDDEN, HEADS, INNER = 128, 4, 352
BATCH = 8


def config_of(target, slots, eagle):
    served = json.loads((target / "config.json").read_text())
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": HIDDEN // HEADS,
        "vocab_size": served["vocab_size"],
        "draft_vocab_size": served["vocab_size"],
        "max_position_embeddings": served["max_position_embeddings"],
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "num_aux_hidden_states": slots,
        "bos_token_id": 301,
        "eos_token_id": 302,
        "eagle_config": eagle,
    }


def fresh_weights(config, target, slots):
    """A new draft's weights, by the names of `Draft`; its head begins as the target's."""
    torch.manual_seed(0)
    dim = config["head_dim"] * HEADS

    def matrix(rows, columns):
        return torch.randn(rows, columns) * columns**-0.5

    weights = {name: torch.ones(HIDDEN) for name in ("norm.weight", *(f"layer.{norm}.weight" for norm in NORMS))}
    weights |= {f"layer.self_attn.{name}_proj.weight": matrix(dim, 2 * HIDDEN) for name in "qkv"}
    weights |= {f"layer.mlp.{name}_proj.weight": matrix(INNER, HIDDEN) for name in ("gate", "up")}
    weights["layer.self_attn.o_proj.weight"] = matrix(HIDDEN, dim)
    weights["layer.mlp.down_proj.weight"] = matrix(HIDDEN, INNER)
    weights["fc.weight"] = matrix(HIDDEN, slots * HIDDEN)
    weights["lm_head.weight"] = draft_model.load_head(target, "cpu").clone()
    return weights


NORMS = ("input_layernorm", "hidden_norm", "post_attention_layernorm")


def losses(draft, tokens, aux, wanted, mask, steps):
    """The loss of each unrolled step.

    Args:
        tokens: (S, N) ids.
        aux: (S, N, B, H) states.
        wanted: (S, N, V) log-probabilities of the target for the token after each.
        mask: (S, N), 1 where the token counts.
    """
    batch, length = tokens.shape
    anchors = length - 2

    def flat(x):
        return x.reshape(batch * anchors, *x.shape[2:])

    def heads(x):
        return x.view(batch, anchors, *x.shape[1:])

    hidden = draft.project(flat(aux[:, :-2]))
    positions = torch.arange(anchors)
    every = positions.repeat(batch)
    causal = positions[None, :] <= positions[:, None]
    query, keys, values = map(heads, draft.queries_keys_values(flat(tokens[:, 1:-1]), hidden, every))
    own = []
    for step in range(steps):
        inside = positions + step + 2 < length
        there = (positions + step + 1).clamp(max=length - 1)
        if step:
            query, key, value = map(heads, draft.queries_keys_values(flat(tokens[:, there]), hidden, every + step))
            own.append((key, value))
        scores = torch.einsum("bqhd,bkhd->bqhk", query, keys).masked_fill(~causal[None, :, None], float("-inf"))
        scores = torch.cat([scores, *((query * key).sum(-1, keepdim=True) for key, _ in own)], dim=-1)
        weights = (scores * draft.scale).softmax(-1)
        attended = torch.einsum("bqhk,bkhd->bqhd", weights[..., :anchors], values)
        for index, (_, value) in enumerate(own):
            attended = attended + weights[..., anchors + index, None] * value
        hidden, logits = draft.finish(hidden, flat(attended))
        counted = (inside & (mask[:, (positions + step + 2).clamp(max=length - 1)] > 0)).float()
        cross = -(wanted[:, there].exp() * heads(logits).log_softmax(-1)).sum(-1)
        yield (cross * counted).sum() / counted.sum()


def load_export(path, target):
    """All samples of an export, stacked: tokens, states, the target's log-probabilities, mask."""
    head = draft_model.load_head(target, "cpu")
    parts = []
    for states in training.read(path)[1]:
        final = torch.tensor(states.finals["final"])
        aux = torch.stack([torch.tensor(rows) for rows in states.slots.values()], dim=1)
        parts.append((torch.tensor(states.tokens), aux, (final @ head.T).log_softmax(-1), torch.tensor(states.loss_mask)))
    return [torch.stack(column) for column in zip(*parts, strict=True)]


def train(export, target, out, seconds, steps):
    noted = json.loads((export / PROVENANCE).read_text())
    tokens, aux, wanted, mask = load_export(export, target)
    config = config_of(target, aux.shape[2], noted["eagle_config"])
    weights = fresh_weights(config, target, aux.shape[2])
    embedding = next(t for n, t in draft_model._tensors(target, ("embed_tokens.weight",)).items())
    draft = draft_model.Draft(config, weights, embedding.float(), torch.arange(config["vocab_size"]))
    for tensor in weights.values():
        tensor.requires_grad_(True)
    optimizer = torch.optim.AdamW(weights.values(), lr=1e-3, betas=(0.9, 0.95))
    random = torch.Generator().manual_seed(0)
    started, done, means = time.monotonic(), 0, [0.0] * steps
    while (spent := time.monotonic() - started) < seconds:
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, (done + 1) / 50) * (1 - 0.9 * spent / seconds)
        rows = torch.randint(len(tokens), (BATCH,), generator=random)
        each = list(losses(draft, tokens[rows], aux[rows], wanted[rows], mask[rows], steps))
        optimizer.zero_grad()
        sum(0.8**step * loss for step, loss in enumerate(each)).backward()
        torch.nn.utils.clip_grad_norm_(weights.values(), 1.0)
        optimizer.step()
        done += 1
        keep = 0.98 if done > 1 else 0.0
        means = [keep * mean + (1 - keep) * loss.item() for mean, loss in zip(means, each, strict=True)]
    out.mkdir(parents=True, exist_ok=True)
    named = {name.replace("layer.", "midlayer.", 1): tensor.detach().contiguous() for name, tensor in weights.items()}
    named |= {
        "d2t": torch.zeros(config["vocab_size"], dtype=torch.int64),
        "t2d": torch.ones(config["vocab_size"], dtype=torch.bool),
    }
    save_file(named, out / "model.safetensors")
    (out / "config.json").write_text(json.dumps(config, indent=1))
    epochs = round(done * BATCH / len(tokens), 1)
    print(json.dumps({"samples": len(tokens), "steps": done, "epochs": epochs, "loss": [round(m, 3) for m in means]}))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("export", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("draft", type=Path)
    parser.add_argument("--seconds", type=float, default=200)
    parser.add_argument("--steps", type=int, default=4, help="Unrolled steps.")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    train(options.export, options.target, options.draft, options.seconds, options.steps)


if __name__ == "__main__":
    main()
