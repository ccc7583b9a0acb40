"""Run by an SGLang environment's Python: build targets in the release's own ModelRunner, prefill one prompt, print what came out.

usage: python prefill_driver.py REQUEST.json      (a list of {name, arguments, label, labels, compare})

One JSON line a target, after ``RESULT ``: ``seen`` (boundaries read off the tensor that the draft would be fed), ``constants``,
``next`` (the token that follows), ``completion`` (what the plugin did), ``equal`` (with ``compare``: the generic tap's tensors are
those of SGLang's own capture, bit for bit) or ``error``. It is SGLang's own offline benchmark without its tokenizer: no scheduler
and no draft, so a target takes seconds.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

PROMPT = [17, 34, 51]


def main(path: str) -> None:
    import torch

    from sglang_eagle3_plugin.rig import one_batch

    last = {}

    def observe(forward):
        def looked_at(self, *args, **kwargs):
            output = forward(self, *args, **kwargs)
            last["states"] = getattr(output.logits_output, "hidden_states", None)
            return output

        return looked_at

    bench = one_batch.prepare(observe)
    for one in json.loads(Path(path).read_text()):
        os.environ["EAGLE3_RIG_LABEL"] = one["label"]
        last.clear()
        try:
            with torch.no_grad():
                found = prefill(bench, one, last)
        except (Exception, SystemExit) as error:
            found = {"error": f"{type(error).__name__}: {error}"[:400]}
        print("RESULT " + json.dumps({"name": one["name"], **found, "completion": completion()}), flush=True)
        forget()


def prefill(bench, one, last):
    import torch
    from eagle3_rig.observer import look

    from sglang_eagle3_plugin.rig import one_batch

    runner = one_batch.load(bench, one["arguments"])

    def extend():
        requests = bench.prepare_synthetic_inputs_for_latency_test(1, len(PROMPT), [PROMPT])
        return one_batch.extend(bench, runner, requests)[0].flatten().tolist()

    following = extend()
    states = last["states"]
    slots = states.reshape(len(states), -1, one["labels"]["hidden_size"])
    found = {
        "next": following,
        "seen": look(states, "extend", **one["labels"])["boundaries"],
        "constants": [round(float(x), 4) for x in slots[0, :, 0]],
    }
    if one.get("compare"):
        use_the_tap(getattr(runner, "torch_runner", runner), one["boundaries"])
        extend()
        found["equal"] = bool(torch.equal(states, last["states"]))
    return found


def use_the_tap(runner, boundaries):
    """Turn SGLang's own capture off and the generic tap on, in a target that has its own."""
    from sglang_eagle3_plugin.runtime.layer_tap import LayerTap
    from sglang_eagle3_plugin.runtime.target import find_decoder

    model = runner.model
    decoder = find_decoder(model, int(runner.model_config.num_hidden_layers))
    model.capture_aux_hidden_states = False
    decoder.stack.layers_to_capture = []
    LayerTap(model, decoder).capture(boundaries)


def completion():
    from sglang_eagle3_plugin import activation

    return [f"{o.state.value}: {o.reason}" for o in activation.outcomes() if o.patch.id == "completion"]


def forget():
    """Let the next target be loaded as if it were the first of its process."""
    from sglang.srt.distributed import parallel_state

    from sglang_eagle3_plugin import activation

    if activation._ledger is not None:
        activation._ledger._done.pop("completion", None)
        activation._ledger._outcomes.pop("completion", None)
    for name, value in list(vars(parallel_state).items()):
        if type(value).__name__ == "GroupCoordinator":
            setattr(parallel_state, name, None)


if __name__ == "__main__":
    main(sys.argv[1])
