"""In an environment with torch: drafts whose worth is known beforehand are scored on Hugging Face's states."""

import sys
from pathlib import Path

import numpy as np
import torch
from hidden_states.making import dump, header, sample
from transformers import AutoModelForCausalLM

from sglang_eagle3_plugin.hidden_states import training
from sglang_eagle3_plugin.hidden_states.score import score
from sglang_eagle3_plugin.rig import models

work = Path(sys.argv[1])
target = models.target(work / "target")
model = AutoModelForCausalLM.from_pretrained(target.path, dtype=torch.float32, attn_implementation="eager").eval()


def capture(name, boundaries):
    head = header(boundaries=boundaries, hidden_size=target.hidden_size, dtype="F32")
    samples = []
    for prompt in ((17, 34, 51, 68, 85), (200, 3, 77)):
        ids = [*prompt, *models.continuation(prompt, 60)]
        with torch.no_grad():
            states = model.model(torch.tensor([ids]), output_hidden_states=True).hidden_states
        aux = np.stack([states[b][0].numpy() for b in boundaries], axis=1)
        samples.append(sample(ids, head, aux=aux, final=states[-1][0].numpy(), prompt_tokens=len(prompt)))
    dump(work / name, samples, head)
    return work / name


def scored(draft, data, **options):
    return score(draft, training.read(data)[1], target.path, **options)


right, late = capture("right", (2, 4, 5)), capture("late", (3, 5, 6))
for mla in (False, True):
    draft = models.draft(work / f"draft-{mla}", target, (2, 4, 5), mla=mla)
    good = scored(draft, right)
    assert good.acceptance_length == 4.0, good
    assert good.top1 == (1.0, 1.0, 1.0), good
    assert good.greedy_share == 1.0, good
    assert good.sequences == 2, good
    bad = scored(draft, late)
    assert bad.acceptance_length == 1.0, bad
    assert bad.top1 == (0.0, 0.0, 0.0), bad
    assert scored(draft, right, steps=5).acceptance_length == 6.0

# The right token is this draft's second choice after every second token: top-1 falls, top-k does not.
unsure = scored(models.draft(work / "unsure", target, (2, 4, 5), kind="unsure"), right)
assert unsure.topk == (1.0, 1.0, 1.0), unsure
assert unsure.top1[0] < 0.9, unsure
assert 1.0 < unsure.acceptance_length < 4.0, unsure
print(unsure)
