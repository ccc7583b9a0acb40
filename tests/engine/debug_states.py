"""Run with an environment's own Python: a target's boundaries by transformers, independent of SGLang and of this plugin.

usage: debug_states.py TARGET SEQUENCES.json OUT.json. Out: for each sequence, for each boundary 0..L-1, for each position, norm,
mean and the first five values.
"""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

target, sequences, out = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(target, torch_dtype=torch.float32).eval()
said = []
for sequence in json.loads(Path(sequences).read_text()):
    with torch.no_grad():
        states = model(torch.tensor([sequence]), output_hidden_states=True).hidden_states
    # hidden_states[k] is what enters layer k; the last one is past the final norm, and no boundary.
    boundaries = [state[0].double() for state in states[:-1]]
    said.append([[[float(row.norm()), float(row.mean()), row[:5].tolist()] for row in rows] for rows in boundaries])
Path(out).write_text(json.dumps(said))
