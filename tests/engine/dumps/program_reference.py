"""In an environment with torch and transformers: what Hugging Face says the states of some sequences are, as one .npz."""

import json
import sys

import numpy as np
import torch
from transformers import AutoModelForCausalLM

target, sequences, out = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32, attn_implementation="eager").eval()
before_norm = []
model.model.norm.register_forward_pre_hook(lambda norm, args: before_norm.append(args[0]))
arrays = {}
for index, ids in enumerate(json.loads(sequences)):
    with torch.no_grad():
        states = model.model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    # The last entry of the tuple is after the norm; boundary L is what the norm was given.
    arrays[f"boundaries_{index}"] = np.stack([s[0].numpy() for s in (*states[:-1], before_norm[-1])], axis=1)
    arrays[f"final_{index}"] = states[-1][0].numpy()
np.savez(out, **arrays)
