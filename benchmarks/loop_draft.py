"""Train a tiny EAGLE-3 draft with SpecForge 0.2 on an export of `hidden-states`, on the CPU. Run by `loop.py`, where both are.

    python benchmarks/loop_draft.py EXPORT TARGET DRAFT [--steps 300] [--length 4]

Reader, normalizer, collator, draft and training-time test are SpecForge's own; two things are not: its loss kernel is Triton for
CUDA, so its own reference of it is called, uncompiled, and its loop over a cluster is one of Adam here. The boundaries and the
draft's ``eagle_config`` are those that stand beside the export, in ``eagle3-dump.json``.
"""

import argparse
import json
import os
import time
from pathlib import Path

os.environ["TORCHDYNAMO_DISABLE"] = "1"

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from specforge.algorithms.eagle3 import model as eagle3
from specforge.algorithms.eagle3.data import build_offline_collator, build_offline_normalizer, build_offline_reader
from specforge.core import loss as losses
from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3
from specforge.runtime.data_plane.feature_store import load_feature_file
from specforge.utils import padding
from transformers import LlamaConfig

BATCH = 8
MAX_LENGTH = 512


class Loss:
    """SpecForge's loss without its kernel."""

    apply = staticmethod(losses._compute_loss)


def config_of(target, eagle):
    served = json.loads((target / "config.json").read_text())
    same = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
    return {name: served[name] for name in (*same, "max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")} | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": served["vocab_size"],
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "eagle_config": eagle,
    }


def tensor_of(target, name):
    with safe_open(target / "model.safetensors", framework="pt") as file:
        return file.get_tensor(name).float()


def train(export, target, out, steps, length):
    torch.manual_seed(0)
    config = config_of(target, json.loads((export / "eagle3-dump.json").read_text())["eagle_config"])
    draft = LlamaForCausalLMEagle3(LlamaConfig(**config), attention_backend="sdpa")
    draft.load_embedding(str(target))
    draft.freeze_embedding()
    head = tensor_of(target, "lm_head.weight")
    draft.lm_head.weight.data.copy_(head)
    eagle3.LogSoftmaxLoss = Loss
    trained = eagle3.OnlineEagle3Model(draft, length=length, attention_backend="sdpa")

    reader = build_offline_reader(str(export), run_id="loop", ttt_length=length, max_len=MAX_LENGTH)
    normal, collate = build_offline_normalizer(MAX_LENGTH), build_offline_collator()
    samples = [normal(load_feature_file(ref.feature_store_uri.removeprefix("file://"))) for ref in reader]
    weights = [weight for weight in draft.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=2e-3, betas=(0.9, 0.95))
    random = torch.Generator().manual_seed(0)
    started, means, right = time.monotonic(), [0.0] * length, [0.0] * length
    for done in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, (done + 1) / 30) * (1 - 0.9 * done / steps)
        batch = collate([samples[i] for i in torch.randint(len(samples), (BATCH,), generator=random)])
        # As SpecForge's TargetHead.preprocess: the token, and what the target says, after each one.
        each, _, accuracy, *_ = trained(
            input_ids=padding(batch["input_ids"], left=False),
            attention_mask=batch["attention_mask"],
            target=padding(batch["target"].float() @ head.T, left=False),
            loss_mask=batch["loss_mask"][..., None],
            hidden_states=batch["hidden_state"].float(),
        )
        optimizer.zero_grad()
        sum(0.8**step * loss for step, loss in enumerate(each)).backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        keep = 0.95 if done else 0.0
        means = [keep * mean + (1 - keep) * loss.item() for mean, loss in zip(means, each, strict=True)]
        right = [keep * mean + (1 - keep) * float(share) for mean, share in zip(right, accuracy, strict=True)]
    out.mkdir(parents=True, exist_ok=True)
    save_file({name: value.contiguous() for name, value in draft.state_dict().items()}, out / "model.safetensors")
    (out / "config.json").write_text(json.dumps(config, indent=1))
    facts = {"samples": len(samples), "steps": steps, "seconds": round(time.monotonic() - started)}
    print(json.dumps(facts | {"loss": [round(m, 3) for m in means], "accuracy": [round(r, 3) for r in right]}), flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("export", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("draft", type=Path)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--length", type=int, default=4, help="Unrolled steps.")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    train(options.export, options.target, options.draft, options.steps, options.length)
    os._exit(0)  # the workers that importing flex attention starts would keep the interpreter for a minute


if __name__ == "__main__":
    main()
