"""A tiny Llama that knows two modules of the standard library by heart; bytes are its tokens. Run by `loop.py`, where torch is.

    python benchmarks/loop_target.py train TARGET [--seconds 200]
    python benchmarks/loop_target.py write TARGET OUT.jsonl --texts 400 --prompt 96 --new 40 [--held-out]

So small a model that learnt more, in minutes, says "the the the" when it is asked greedily, and any draft guesses that; one that
knows little by heart goes on with real text. `write` has the target go on greedily from places in the text, and writes rows of
``input_ids`` and ``loss_mask``: of held-out places 1 where the target wrote, since a server's acceptance is that of what it
generates; of the others all 1, since the target says at every token what it would say there. Held out is every tenth line: a prompt
that ends in one is never a prompt of the draft's training.
"""

import argparse
import json
import sysconfig
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

MODULES = ("textwrap.py", "bisect.py")
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


def train(directory, seconds):
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
    started, steps, mean = time.monotonic(), 0, 0.0
    while (spent := time.monotonic() - started) < seconds:
        # Warm up, then cool down to a tenth: by the clock, since machines differ.
        share = spent / seconds
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, (steps + 1) / 50) * (1 - 0.9 * share)
        starts = torch.randint(len(corpus) - CONTEXT, (BATCH, 1), generator=random)
        rows = corpus[starts + torch.arange(CONTEXT)].long()
        loss = model(rows, labels=rows).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        steps += 1
        mean = loss.item() if steps == 1 else 0.98 * mean + 0.02 * loss.item()
    model.save_pretrained(directory)
    facts = {"steps": steps, "tokens": steps * BATCH * CONTEXT, "loss_nats_a_byte": round(mean, 3), "seconds": round(spent)}
    print(json.dumps(facts))


@torch.inference_mode()
def write(directory, out, texts, prompt, new, held_out):
    model = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    corpus = text()
    begins = places(corpus, prompt, held_out)
    random = torch.Generator().manual_seed(2 if held_out else 1)
    with out.open("w") as file:
        for first in range(0, texts, 64):
            chosen = begins[torch.randperm(len(begins), generator=random)[: min(64, texts - first)]]
            rows = corpus[chosen[:, None] + torch.arange(prompt)].long()
            said = model.generate(
                rows,
                attention_mask=torch.ones_like(rows),
                max_new_tokens=new,
                min_new_tokens=new,
                do_sample=False,
                pad_token_id=303,
            )
            for row in said.tolist():
                file.write(json.dumps({"input_ids": row, "loss_mask": [int(not held_out)] * prompt + [1] * new}) + "\n")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=2)
    commands = parser.add_subparsers(dest="what", required=True)
    one = commands.add_parser("train")
    one.add_argument("target", type=Path)
    one.add_argument("--seconds", type=float, default=200)
    two = commands.add_parser("write")
    two.add_argument("target", type=Path)
    two.add_argument("out", type=Path)
    two.add_argument("--texts", type=int, default=400)
    two.add_argument("--prompt", type=int, default=96)
    two.add_argument("--new", type=int, default=40)
    two.add_argument("--held-out", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.what == "train":
        train(options.target, options.seconds)
    else:
        write(options.target, options.out, options.texts, options.prompt, options.new, options.held_out)


if __name__ == "__main__":
    main()
