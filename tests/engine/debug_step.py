"""Run with an environment's own Python, for its torch: passes on the CPU through the tap, and what debug reports of them."""

import json
from enum import Enum
from types import SimpleNamespace

import torch

from sglang_eagle3_plugin.runtime import tap
from sglang_eagle3_plugin.runtime.debug.read import reports
from sglang_eagle3_plugin.runtime.debug.report import Labels
from sglang_eagle3_plugin.runtime.debug.sampling import Debug
from sglang_eagle3_plugin.runtime.debug.spec import parse

HIDDEN = 8


class Mode(Enum):
    EXTEND = 1
    TARGET_VERIFY = 2
    DRAFT_EXTEND = 3

    def is_idle(self):
        return False

    def is_decode(self):
        return False


def run(runner, mode, ids, lengths, fed=None, gave=None, **spec_info):
    batch = SimpleNamespace(
        forward_mode=mode,
        input_ids=torch.tensor(ids),
        rids=["a", "b"],
        extend_seq_lens_cpu=lengths,
        spec_info=SimpleNamespace(hidden_states=fed, **spec_info),
    )
    tap.deliver(runner, batch, SimpleNamespace(logits_output=SimpleNamespace(hidden_states=gave), can_run_graph=False))


torch.manual_seed(0)
table = torch.randn(50, HIDDEN)
model = SimpleNamespace(get_embed_and_head=lambda: (table, None))
target = SimpleNamespace(is_draft_worker=False, forward_pass_id=1, model=model)
draft = SimpleNamespace(is_draft_worker=True)
for spec, first_of_b in (("steps=9,ids=1,rate=0", 7), ("steps=9,rate=0,requests=b", 7), ("steps=9,rate=0", 8)):
    debug = Debug(parse(spec), Labels((0, 4, 5), (0, 4, 5), HIDDEN), whole_vocabulary=True)
    tap.add(debug)
    ids = [3, 4, 5, 6, 7]
    gave = torch.cat([table[ids], torch.randn(5, 2 * HIDDEN)], 1)
    run(target, Mode.EXTEND, ids, [3, 2], gave=gave)
    run(draft, Mode.EXTEND, [4, 5, 9, first_of_b, 9], [3, 2], fed=gave)
    target.forward_pass_id += 1
    verify = torch.randn(8, 3 * HIDDEN)
    run(target, Mode.TARGET_VERIFY, list(range(8)), None, gave=verify)
    run(draft, Mode.DRAFT_EXTEND, [1, 2, 3], [1, 2], fed=verify[[0, 4, 5]], accept_length=torch.tensor([1, 2]))
    debug.collect(unfinished=True)
    tap.remove(debug)
    while debug.arrived:
        for said in reports(debug.arrived.popleft(), debug.labels):
            said["due"] = {"norm": gave[:, -HIDDEN:].norm(dim=-1).mean().item(), "b": gave[3:, -HIDDEN:].norm(dim=-1).mean().item()}
            print(json.dumps(said))
# A step whose buffers grow on the way, of passes too large to be put aside together; seen inside inference mode, sent outside.
debug = Debug(parse("steps=9,rate=0"), Labels((0, 4, 5), (0, 4, 5), HIDDEN), whole_vocabulary=False)
tap.add(debug)
with torch.inference_mode():
    gave = torch.randn(2500, 3 * HIDDEN).bfloat16()
    run(target, Mode.EXTEND, [0] * 2500, [1500, 1000], gave=gave)
    run(draft, Mode.EXTEND, [0] * 2500, [1500, 1000], fed=gave)
    target.forward_pass_id += 1
    run(target, Mode.TARGET_VERIFY, list(range(8)), None, gave=gave[:8])
debug.collect(unfinished=True)
tap.remove(debug)
while debug.arrived:
    for said in reports(debug.arrived.popleft(), debug.labels):
        said["due"] = gave[: said["tokens"], -HIDDEN:].float().norm(dim=-1).mean().item()
        print(json.dumps(said))
assert tap.failures == {}
