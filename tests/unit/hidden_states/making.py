"""Small dumps for tests, made through the writer itself."""

import dataclasses

import numpy as np

from sglang_eagle3_plugin.hidden_states.layout import Header
from sglang_eagle3_plugin.hidden_states.writer import Sample, Writer

HEADER = Header(
    boundaries=(2, 3, 5),
    hidden_size=4,
    dtype="BF16",
    final="post_norm",
    num_layers=8,
    model="/models/täst",
    architecture="LlamaForCausalLM",
    config_sha256="",
    sglang="0.5.23",
    plugin="0.1.0",
    created="2026-11-29T00:00:00Z",
)


def header(**changes):
    return dataclasses.replace(HEADER, **changes)


def to_bf16(values):
    """float32 -> bf16 bit patterns, by truncation."""
    return (np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def sample(ids, head=HEADER, seed=0, request="r", prompt_tokens=None, aux=None, final=None):
    n, slots, width = len(ids), len(head.boundaries), head.hidden_size
    random = np.random.default_rng([seed, *ids])
    aux = random.normal(size=(n, slots, width)) if aux is None else aux
    final = random.normal(size=(n, width)) if final is None else final
    convert = {"BF16": to_bf16, "F32": lambda x: np.ascontiguousarray(x, np.float32)}[head.dtype]
    tensors = {
        "input_ids": ("I64", (n,), np.asarray(ids, np.int64)),
        "positions": ("I64", (n,), np.arange(n, dtype=np.int64)),
        "aux": (head.dtype, (n, slots, width), convert(aux)),
    }
    if head.final != "none":
        tensors["final"] = (head.dtype, (n, width), convert(final))
    return Sample(list(ids), tensors, request, n if prompt_tokens is None else prompt_tokens)


def dump(directory, samples, head=HEADER, **options):
    """Write a dump and let go of it."""
    writer = Writer(directory, head, min_free_bytes=0, **options)
    for each in samples:
        writer.add(each)
    writer.close()
    return writer
