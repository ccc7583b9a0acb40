"""Runs in 0.5.23's environment: the plain torch stand-ins against SGLang's own Triton kernels, on random draft trees."""

import random
import sys

import torch

sys.path.insert(0, sys.argv[1])  # the rig's site directory
from eagle3_rig import replacements
from sglang.kernels.ops.speculative import spec_tree


def grow(topk, steps, nodes):
    """parent_list and selected offers of one random tree, as EAGLE-2's scoring makes them."""
    scores, beams, parent_list = [], [(0.0, None)], [-1]
    for step in range(steps):
        new = []
        for score, _ in beams:
            for _ in range(topk):
                new.append((score - random.random(), len(scores)))
                scores.append(new[-1][0])
        beams = sorted(new, reverse=True)[:topk]
        if step < steps - 1:
            parent_list += [offer for _, offer in beams]
    best = sorted(range(len(scores)), key=lambda i: (-scores[i], i))[: nodes - 1]
    return parent_list, sorted(best)


def buffers(batch, nodes, seq_lens, mode):
    prefix = [0 if mode else n for n in seq_lens.tolist()]
    return {
        "tree_mask": torch.ones(sum(nodes * (p + nodes) for p in prefix), dtype=torch.bool),
        "positions": torch.full((batch * nodes,), -9),
        "retrieve_index": torch.full((batch, nodes), -1),
        "retrieve_next_token": torch.full((batch, nodes), -1),
        "retrieve_next_sibling": torch.full((batch, nodes), -1),
    }


def check(topk, steps, nodes, mode):
    batch = 3
    trees = [grow(topk, steps, nodes) for _ in range(batch)]
    parent_list = torch.tensor([tree[0] for tree in trees])
    selected = torch.tensor([tree[1] for tree in trees])
    seq_lens = torch.tensor([5, 1, 9])
    theirs, ours = buffers(batch, nodes, seq_lens, mode), buffers(batch, nodes, seq_lens, mode)
    rest = {"topk": topk, "depth": steps, "draft_token_num": nodes, "tree_mask_mode": mode}
    spec_tree.sgl_build_tree_kernel_triton(parent_list, selected, seq_lens, **theirs, **rest)
    replacements.build_tree(parent_list, selected, seq_lens, **ours, **rest)
    for name, expected in theirs.items():
        assert torch.equal(ours[name], expected), (name, topk, steps, nodes, mode)

    # Few different tokens, so that paths are accepted; siblings may be equal, the first of them counts.
    candidates = torch.randint(0, 3, (batch, nodes))
    target_predict = torch.randint(0, 3, (batch, nodes))
    links = {name: theirs[name] for name in ("retrieve_index", "retrieve_next_token", "retrieve_next_sibling")}
    verdicts = []
    for verify in (spec_tree.verify_tree_greedy_triton, replacements.verify_tree_greedy):
        predicts = torch.full((batch * nodes,), -1, dtype=torch.int32)
        accept_index = torch.full((batch, steps + 1), -1, dtype=torch.int32)
        accepted = torch.full((batch,), -1, dtype=torch.int32)
        verify(predicts, accept_index, accepted, candidates, target_predict=target_predict, **links)
        verdicts.append((predicts, accept_index, accepted))
    for expected, found in zip(*verdicts, strict=True):
        assert torch.equal(found, expected), (topk, steps, nodes, mode)
    return int(verdicts[0][2].sum())


random.seed(0)
torch.manual_seed(0)
accepted = [
    check(topk, steps, nodes, mode)
    for topk, steps, nodes in [(1, 1, 2), (1, 3, 4), (2, 3, 8), (4, 3, 8), (4, 5, 16), (3, 2, 4)]
    for mode in (0, 1)
    for _ in range(4)
]
assert sum(accepted) > len(accepted), "hardly a path was accepted: this compares nothing"
print("same", len(accepted))
