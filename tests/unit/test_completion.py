"""Cases W*: what a loaded target's class lacks is supplied, by structure; what it has is kept; what can't be is refused by name."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from sglang_eagle3_plugin.patches.completion import complete, plan
from sglang_eagle3_plugin.patching import Incompatible, Ledger, State
from sglang_eagle3_plugin.settings import Settings

SETTER, ACCESSOR = "set_eagle3_layers_to_capture", "get_embed_and_head"
H, L = 8, 6


class Module:
    def __init__(self, **children):
        self.__dict__.update(children)

    def named_children(self):
        return [(name, child) for name, child in vars(self).items() if isinstance(child, Module)]

    def children(self):
        return [child for _, child in self.named_children()]

    def modules(self):
        yield self
        for child in self.children():
            yield from child.modules()


class ModuleList(Module):
    def __init__(self, items):
        super().__init__(**{str(i): item for i, item in enumerate(items)})

    def __len__(self):
        return len(self.children())

    def __iter__(self):
        return iter(self.children())

    def __getitem__(self, i):
        return self.children()[i]


class LogitsProcessor(Module):
    def forward(self, input_ids, hidden_states, lm_head, logits_metadata, aux_hidden_states=None): ...


class Weight:
    def __init__(self, *shape):
        self.shape = shape

    def dim(self):
        return len(self.shape)


class VocabParallelEmbedding(Module):
    def __init__(self, width=H):
        super().__init__()
        self.weight = Weight(32, width)


class ParallelLMHead(VocabParallelEmbedding):
    pass


class Layer(Module):
    def forward(self, positions, hidden_states, forward_batch):
        residual = hidden_states
        return residual + self.mlp(hidden_states)


class OddLayer(Module):
    def forward(self, positions, hidden_states, forward_batch, loop_idx): ...


class StageLayer(Module):
    """As from 0.5.23: the stream is on the batch, and each stage says how its output is added."""

    plain = True

    def __init__(self):
        super().__init__()
        update = SimpleNamespace(is_plain_add=self.plain, applied_at_exit=False)
        self.ffn_boundary = SimpleNamespace(declaration=SimpleNamespace(update=update))

    def forward(self, positions, hidden_states, forward_batch):
        hidden_states = self.ffn_boundary.prepare(hidden_states, forward_batch)
        return self.ffn_boundary.finish(hidden_states, forward_batch)


class GatedLayer(StageLayer):
    plain = False


class Stack(Module):
    def forward(self, input_ids):
        for layer in self.layers:
            input_ids = layer(input_ids)


def stack(layer=Layer, native=False, width=H):
    made = Stack(embed_tokens=VocabParallelEmbedding(width), layers=ModuleList([layer() for _ in range(L)]))
    if native:
        made.layers_to_capture = []
    return made


def language_model(hooks=(), **of_stack):
    class Language(Module):
        def forward(self, input_ids):
            return self.logits_processor(input_ids, self.model(input_ids), self.lm_head, None)

    for name in hooks:
        setattr(Language, name, lambda self, *args: ("inner", *args))
    return Language(model=stack(**of_stack), lm_head=ParallelLMHead(), logits_processor=LogitsProcessor())


def wrapper(inner, forward=None, attribute="language_model", **others):
    class Wrapper(Module):
        def forward(self, input_ids):
            return general_mm_embed_routine(language_model=self.language_model)  # noqa: F821

    if forward:
        Wrapper.forward = forward
    return Wrapper(**{attribute: inner}, **others)


def runner(model):
    return SimpleNamespace(model=model, model_config=SimpleNamespace(num_hidden_layers=L, hidden_size=H))


def completed(model):
    """Complete a model's class and return how each method was supplied."""
    ledger, seen = Ledger(Settings()), []
    complete(runner(model), lambda patch, module: seen.append(ledger.apply(patch, sys.modules[__name__])))
    assert all(outcome.state is State.APPLIED for outcome in seen), seen
    return seen[0].reason if seen else ""


def test_w10_both_hooks_are_handed_on_to_the_inner_model():
    model = wrapper(language_model((SETTER, ACCESSOR), native=True))
    assert "delegated to language_model" in completed(model)
    assert model.set_eagle3_layers_to_capture([1]) == ("inner", [1])
    assert model.get_embed_and_head() == ("inner",)


def test_w06_only_the_missing_half_is_supplied():
    model = wrapper(language_model((SETTER, ACCESSOR), native=True))
    theirs = type(model).get_embed_and_head = lambda self: "theirs"
    assert ACCESSOR not in completed(model)
    assert type(model).get_embed_and_head is theirs


def test_a_class_that_has_everything_is_not_touched():
    model = language_model((SETTER, ACCESSOR), native=True)
    before = dict(vars(type(model)))
    assert completed(model) == ""
    assert dict(vars(type(model))) == before
    assert vars(model).keys() == {"model", "lm_head", "logits_processor"}


def test_a_wrapper_with_a_logits_processor_of_its_own_gets_captures_delivered():
    class Own(Module):
        def forward(self, input_ids):
            return self.logits_processor(input_ids, self.model(input_ids), self.lm_head, None)

    model = Own(model=stack(native=True), lm_head=ParallelLMHead(), logits_processor=LogitsProcessor())
    assert "native capture of Stack, delivered" in completed(model)
    embed, head = model.get_embed_and_head()
    assert (embed, head) == (model.model.embed_tokens.weight, model.lm_head.weight)


def test_a_wrapper_that_reaches_past_its_inner_model_is_not_delegated():
    def forward(self, input_ids):
        return self.language_model.model(input_ids)

    model = wrapper(language_model((SETTER, ACCESSOR), native=True), forward)
    assert "delivered" in completed(model)


def test_layers_that_keep_the_stream_on_the_batch_and_add_plainly_are_tapped():
    assert "generic tap of Stack" in completed(language_model(layer=StageLayer))


def test_w05_an_inherited_setter_over_a_stack_that_captures_nothing_is_replaced():
    model = language_model((SETTER, ACCESSOR))
    assert "generic tap of Stack" in completed(model)
    assert model.set_eagle3_layers_to_capture.__doc__.endswith("(sglang-eagle3-plugin).")


def test_a_tied_head_is_the_embedding():
    model = language_model()
    del model.lm_head
    completed(model)
    embed, head = model.get_embed_and_head()
    assert embed is head is model.model.embed_tokens.weight


def refused(model):
    found = plan(runner(model))
    assert isinstance(found, Incompatible)
    assert type(model).__name__ in found.remedy
    return found.reason


def test_w08_a_packed_embedding_is_refused_with_both_widths():
    reason = refused(language_model(width=H // 2))
    assert f"{H // 2} wide where {H} was due" in reason


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (language_model(layer=OddLayer), "OddLayer: the stack runs its layers several times"),
        (language_model(layer=GatedLayer), "GatedLayer: it adds to the stream otherwise than plainly"),
        (Module(model=stack()), "no LogitsProcessor"),
        (Module(logits_processor=LogitsProcessor()), "found none"),
        (Module(model=stack(), logits_processor=LogitsProcessor(return_full_logits=True)), "block diffusion"),
        (Module(a=stack(), b=stack(), logits_processor=LogitsProcessor()), "Stack at a, Stack at b"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(model, why):
    assert why in refused(model)


def test_a_second_object_of_a_completed_class_gets_a_stack_of_its_own():
    first = language_model()
    completed(first)
    second = type(first)(model=stack(), lm_head=ParallelLMHead(), logits_processor=LogitsProcessor())
    complete(runner(second), lambda patch, module: pytest.fail("its class is complete"))
    assert vars(second)["_eagle3_stack"] is not vars(first)["_eagle3_stack"]
