"""A tiny Llama that knows two modules of the standard library by heart; bytes are its tokens. Run by `loop.py`, where torch is.

    python benchmarks/loop_target.py train TARGET [--steps 700]
    python benchmarks/loop_target.py write TARGET OUT.jsonl --texts 240 --prompt 96 --new 40 [--held-out]

So small a model that learnt more, in minutes, says "the the the" when it is asked greedily, and any draft guesses that; one that
knows little by heart goes on with real text. `write` writes rows of ``input_ids`` and ``loss_mask``. For the draft's training: the
text itself, 1 everywhere, since the target says at every token what it would say there. Of held-out places: a prompt and what the
target goes on with greedily, 1 there, since a server's acceptance is that of what it generates. Held out is every tenth line: a
prompt that ends in one is never one of the draft's training.
"""

import argparse
import json
import sys
import sysconfig
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

MODULES = ("bisect.py", "fnmatch.py")
VOCABULARY = 320
"""Bytes 0 to 255; the rest is never said, and holds the special tokens."""
CONTEXT = 128
BATCH = 8


def text():
    """The two modules as one row of byte values."""
    root = Path(sysconfig.get_path("stdlib"))
    return torch.frombuffer(bytearray(b"".join((root / name).read_bytes() for name in MODULES)), dtype=torch.uint8)


def places(corpus, prompt, held_out):
    """Where prompts begin: those that end amid a word of a line that is held out, or of another line."""
    line = (corpus == ord("\n")).cumsum(0)
    ends = torch.arange(prompt, len(corpus))
    letter = (corpus[ends - 1] >= ord("a")) & (corpus[ends - 1] <= ord("z"))
    return ends[letter & ((line[ends - 1] % 10 == 9) == held_out)] - prompt


def train(directory, count):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=1024,
        bos_token_id=301,
        eos_token_id=302,
        pad_token_id=303,
        tie_word_embeddings=False,
        dtype="float32",
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    corpus = text()
    random = torch.Generator().manual_seed(0)
    started, mean = time.monotonic(), 0.0
    for step in range(count):
        for group in optimizer.param_groups:  # warm up, then cool down to a tenth
            group["lr"] = 3e-3 * min(1.0, (step + 1) / 50) * (1 - 0.9 * step / count)
        starts = torch.randint(len(corpus) - CONTEXT, (BATCH, 1), generator=random)
        rows = corpus[starts + torch.arange(CONTEXT)].long()
        loss = model(rows, labels=rows).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        mean = 0.95 * mean + 0.05 * loss.item() if step else loss.item()
        if step % 100 == 99:
            print(f"step {step + 1}: {mean:.3f} nats a byte", file=sys.stderr, flush=True)
    model.save_pretrained(directory)
    facts = {"text_bytes": len(corpus), "steps": count, "tokens": count * BATCH * CONTEXT, "loss_nats_a_byte": round(mean, 3)}
    print(json.dumps(facts | {"seconds": round(time.monotonic() - started)}))


@torch.inference_mode()
def write(directory, out, texts, prompt, new, held_out):
    corpus = text()
    begins = places(corpus, prompt, held_out)
    begins = begins[begins < len(corpus) - prompt - new]
    begins = begins[torch.randperm(len(begins), generator=torch.Generator().manual_seed(1))[:texts]]
    rows = corpus[begins[:, None] + torch.arange(prompt + (0 if held_out else new))].long()
    if held_out:
        model = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        how = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 303}
        rows = model.generate(rows, attention_mask=torch.ones_like(rows), **how)
    mask = [int(not held_out)] * prompt + [1] * new
    out.write_text("".join(json.dumps({"input_ids": row, "loss_mask": mask}) + "\n" for row in rows.tolist()))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=2)
    commands = parser.add_subparsers(dest="what", required=True)
    one = commands.add_parser("train")
    one.add_argument("target", type=Path)
    one.add_argument("--steps", type=int, default=700)
    two = commands.add_parser("write")
    two.add_argument("target", type=Path)
    two.add_argument("out", type=Path)
    two.add_argument("--texts", type=int, default=240)
    two.add_argument("--prompt", type=int, default=96)
    two.add_argument("--new", type=int, default=40)
    two.add_argument("--held-out", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.what == "train":
        train(options.target, options.steps)
    else:
        write(options.target, options.out, options.texts, options.prompt, options.new, options.held_out)


if __name__ == "__main__":
    main()
