"""Run by an SGLang environment's Python (for its torch): LayerStack on stand-in stacks of the shapes that releases have.

usage: python capture_driver.py      prints one JSON object: case -> the labels of the slots that reach the logits processor

The stand-ins label their boundaries: layer i adds 1 to a residual stream that starts at 0, so boundary k reads k. Real stacks are
tested by the engine runs; this covers shapes that no run on this machine reaches: decode buffers, idle ranks, marks left over.
"""

import json

import torch
from torch import nn

from sglang_eagle3_plugin.runtime.capture import CaptureError, LayerStack
from sglang_eagle3_plugin.runtime.layer_tap import LayerTap
from sglang_eagle3_plugin.runtime.target import find_decoder

L, H, T = 6, 2, 3


class Layer(nn.Module):
    def forward(self, positions, hidden_states, forward_batch, residual, captured=None):
        residual = hidden_states if residual is None else hidden_states + residual
        if captured is not None:
            captured.append(residual.clone())
        return torch.ones_like(residual), residual


class Norm(nn.Module):
    def forward(self, x, residual=None):
        total = x if residual is None else x + residual
        return total * 100, total


class ListStack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(L))
        self.norm = Norm()
        self.layers_to_capture = []

    def forward(self, input_ids, positions, forward_batch):
        hidden, residual, aux = torch.zeros(len(input_ids), H), None, []
        for i in range(L):
            if i in self.layers_to_capture:
                aux.append(hidden + residual)
            hidden, residual = self.layers[i](positions, hidden, forward_batch, residual)
        if not getattr(forward_batch, "idle", False):
            hidden, _ = self.norm(hidden, residual)
        return (hidden, aux) if aux else hidden


class MarkStack(ListStack):
    def forward(self, input_ids, positions, forward_batch):
        hidden, residual, aux = torch.zeros(len(input_ids), H), None, []
        for layer in self.layers:
            captured = aux if getattr(layer, "_is_layer_to_capture", False) else None
            hidden, residual = layer(positions, hidden, forward_batch, residual, captured)
        hidden, _ = self.norm(hidden, residual)
        return (hidden, aux) if aux else hidden


class PackedStack(ListStack):
    """As from 0.5.23: one packed tensor, written into the decode graph's buffer where the batch carries one."""

    def forward(self, input_ids, positions, forward_batch):
        out = super().forward(input_ids, positions, forward_batch)
        if not isinstance(out, tuple):
            return out
        packed = torch.cat(out[1], dim=-1)
        buffer = forward_batch.aux_hidden_states_buffer
        if buffer is not None:
            if buffer.shape != packed.shape:
                raise ValueError("aux hidden output buffer does not fit")
            packed = buffer.copy_(packed)
        return out[0], packed


class ForwardBatch:
    aux_hidden_states_buffer = None
    idle = False


def labels(output):
    if not isinstance(output, tuple):
        return None
    aux = output[1]
    slots = list(aux.split(H, dim=-1)) if isinstance(aux, torch.Tensor) else aux
    assert all((slot == slot.flatten()[0]).all() for slot in slots if slot.numel())
    return [int(slot.flatten()[0]) if slot.numel() else f"{slot.shape[0]} rows" for slot in slots]


def run(kind, boundaries, buffer=False, idle=False, tokens=T, before=None):
    model = nn.Module()
    model.model = kind()
    batch = ForwardBatch()
    batch.idle = idle
    if before:
        before(model.model)
    stack = LayerStack.find(model, L)
    for wanted in boundaries if isinstance(boundaries[0], list) else [boundaries]:
        stack.capture(wanted)
    if buffer:
        batch.aux_hidden_states_buffer = torch.zeros(tokens, H * len(boundaries))
    kept = batch.aux_hidden_states_buffer
    output = model.model(torch.zeros(tokens), None, batch)
    found = labels(output)
    if buffer:
        assert output[1] is kept
        assert batch.aux_hidden_states_buffer is kept
    return found


def replayed(boundaries):
    """As SGLang's prefill graphs do: what the bare forward returned while it was captured stands in for it later."""
    model = nn.Module()
    model.model = stack = ListStack()
    wired = LayerStack.find(model, L)
    wired.capture(boundaries)
    own = stack.forward
    stored = own(torch.zeros(T), None, ForwardBatch())
    stack.forward = lambda *args: stored
    found = labels(stack(torch.zeros(T), None, ForwardBatch()))
    stack.forward = own
    wired.capture([])
    assert "forward" not in vars(stack)
    return found


def gone_around(boundaries):
    """A forward that runs the class's own in place of ours, as compiled prefill does: said, and not served."""
    model = nn.Module()
    model.model = stack = ListStack()
    LayerStack.find(model, L).capture(boundaries)
    stack.forward = lambda *args: ListStack.forward(stack, *args)
    try:
        return labels(stack(torch.zeros(T), None, ForwardBatch()))
    except CaptureError as error:
        return "not met" in str(error) and "turn prefill graphs off" in str(error)


def left_over_marks(stack):
    for i in (1, 4):
        stack.layers[i]._is_layer_to_capture = True


def untouched():
    stack = ListStack()
    before = (dict(stack._forward_pre_hooks), dict(stack._forward_hooks))
    plain = stack(torch.zeros(T), None, ForwardBatch())
    model = nn.Module()
    model.model = stack
    wired = LayerStack.find(model, L)
    wired.capture([0, 3, 6])
    wired.capture([])
    after = stack(torch.zeros(T), None, ForwardBatch())
    return torch.equal(plain, after) and before == (dict(stack._forward_pre_hooks), dict(stack._forward_hooks))


class TappedLayer(nn.Module):
    def forward(self, positions, hidden_states, forward_batch, residual):
        if residual is None:
            residual = hidden_states
        else:
            residual = hidden_states + residual
        return torch.ones_like(residual), residual


class LogitsProcessor(nn.Module):
    def forward(self, input_ids, hidden_states, lm_head, logits_metadata, aux_hidden_states=None):
        return (hidden_states, aux_hidden_states) if aux_hidden_states is not None else hidden_states


class Tapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = ListStack()
        self.model.layers = nn.ModuleList(TappedLayer() for _ in range(L))
        self.model.forward = self.layers_in_turn
        self.logits_processor = LogitsProcessor()

    def layers_in_turn(self, input_ids, positions, forward_batch):
        hidden, residual = torch.zeros(len(input_ids), H), None
        for layer in self.model.layers:
            hidden, residual = layer(positions, hidden, forward_batch, residual)
        return self.model.norm(hidden, residual)[0]

    def forward(self, input_ids, positions, forward_batch):
        return self.logits_processor(input_ids, self.model(input_ids, positions, forward_batch), None, None)


def tapped(boundaries):
    model = Tapped()
    LayerTap(model, find_decoder(model, L)).capture(boundaries)
    return labels(model(torch.zeros(T), None, ForwardBatch()))


def tap_untouched():
    """A model whose tap was never asked, and one whose tap was taken back, hold what a plain one does and say what it says."""
    plain = Tapped()
    expected = plain(torch.zeros(T), None, ForwardBatch())
    idle, used = Tapped(), Tapped()
    LayerTap(idle, find_decoder(idle, L))
    tap = LayerTap(used, find_decoder(used, L))
    tap.capture([0, 3, 6])
    used(torch.zeros(T), None, ForwardBatch())
    kept_by_the_tap = bool(tap._taken)
    tap.capture([])
    hooks = [len(m._forward_pre_hooks) + len(m._forward_hooks) for model in (idle, used) for m in model.modules()]
    same = [torch.equal(expected, model(torch.zeros(T), None, ForwardBatch())) for model in (idle, used)]
    return all(same) and not any(hooks) and not kept_by_the_tap


print(
    "\n"
    + json.dumps(
        {
            "inner": run(ListStack, [1, 3, 5]),
            "both edges": run(ListStack, [0, 3, 6]),
            "edges alone": run(ListStack, [0, 6]),
            "every boundary": run(ListStack, [0, 1, 2, 3, 4, 5, 6]),
            "marks": run(MarkStack, [1, 3, 6]),
            "marks, after another wiring": run(MarkStack, [[1, 4], [2, 3, 5]]),
            "marks left over by a setter": run(MarkStack, [2, 3], before=left_over_marks),
            "packed": run(PackedStack, [0, 3, 6]),
            "packed into a decode buffer": run(PackedStack, [0, 3, 6], buffer=True),
            "packed, inner alone, into a decode buffer": run(PackedStack, [1, 3, 5], buffer=True),
            "packed, edges alone": run(PackedStack, [0, 6]),
            "idle rank": run(ListStack, [0, 6], idle=True, tokens=0),
            "a prefill graph": replayed([0, 3, 6]),
            "a prefill graph, edges alone": replayed([0, 6]),
            "a forward that goes around": gone_around([0, 3, 6]),
            "taken back leaves nothing": untouched(),
            "generic tap": tapped([1, 3, 5]),
            "generic tap, both edges": tapped([0, 3, 6]),
            "generic tap, unused or taken back, leaves nothing": tap_untouched(),
        }
    )
)
