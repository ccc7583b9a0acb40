"""Beside the rig's own, in every process of an engine under test: a witness of what the draft is fed, and sabotage on demand.

``EAGLE3_TEST_WITNESS`` names a file for JSON lines: norm, mean and first values of what reaches the draft *inside* its model, by
numpy in float64. ``EAGLE3_TEST_SABOTAGE`` names a file whose word is obeyed before each pass: zero, nan, shift, repeat, partial.
"""

import json
import os
import runpy
from pathlib import Path

import wrapt

RIG = os.environ["EAGLE3_TEST_RIG"]


def watch_draft(module):
    stock = module.LlamaForCausalLMEagle3.forward

    def forward(self, input_ids, positions, forward_batch, *args, **kwargs):
        states = forward_batch.spec_info.hidden_states.double().numpy()
        line = {
            "mode": forward_batch.forward_mode.name,
            "norm": float((states**2).sum(-1).__pow__(0.5).mean()),
            "mean": float(states.mean()),
            "first": states[0, :5].tolist(),
        }
        with Path(os.environ["EAGLE3_TEST_WITNESS"]).open("a") as file:
            file.write(json.dumps(line) + "\n")
        return stock(self, input_ids, positions, forward_batch, *args, **kwargs)

    module.LlamaForCausalLMEagle3.forward = forward


def sabotage(module):
    stock = module.ModelRunner._forward_raw
    file = Path(os.environ["EAGLE3_TEST_SABOTAGE"])

    def forward_raw(self, *args, **kwargs):
        word = file.read_text().strip() if file.exists() and not self.is_draft_worker else ""
        if not self.is_draft_worker:
            shift(self, word == "shift")
        output = stock(self, *args, **kwargs)
        states = getattr(output.logits_output, "hidden_states", None)
        if states is not None and word in ("zero", "nan", "repeat", "partial"):
            slot = states[:, 256:512]
            if word == "repeat":
                slot.copy_(states[:, :256])
            elif word == "partial":
                # What is left when an all-reduce is: each rank holds a share, and the shares make the sum.
                slot.mul_((1 + 2 * rank()) / 4)
            else:
                slot.fill_(0.0 if word == "zero" else float("nan"))
        return output

    module.ModelRunner._forward_raw = forward_raw


def rank():
    from sglang.srt.distributed.parallel_state import get_tensor_model_parallel_rank

    return get_tensor_model_parallel_rank()


def shift(runner, by_one):
    """Make the layer loop capture each boundary one layer late, behind the back of whoever wired it."""
    for module in runner.model.modules():
        if getattr(module, "layers_to_capture", None):
            right = vars(module).setdefault("_right_layers", list(module.layers_to_capture))
            module.layers_to_capture = [k + by_one for k in right]


if os.environ.get("EAGLE3_TEST_WITNESS"):
    wrapt.register_post_import_hook(watch_draft, "sglang.srt.models.llama_eagle3")
    wrapt.register_post_import_hook(sabotage, "sglang.srt.model_executor.model_runner")
runpy.run_path(f"{RIG}/sitecustomize.py")
