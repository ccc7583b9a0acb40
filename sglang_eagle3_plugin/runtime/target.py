"""Find the decoder in a loaded target, by structure: whatever wraps it, whatever the attributes are called.

The decoder is the one module that keeps a list of as many layers as the target has, whose layers take a ``forward_batch``. A
vision or audio tower's blocks don't take one, a draft isn't there yet.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

SETTER = "set_eagle3_layers_to_capture"
ACCESSOR = "get_embed_and_head"


class StructureError(RuntimeError):
    """The target is built in a way that cannot be served; the message says what was found."""


def serves_eagle3(runner: Any) -> bool:
    """Whether a ModelRunner holds the target of an EAGLE-3 draft; False for the draft's own runner."""
    return not runner.is_draft_worker and bool(runner.spec_algorithm.is_eagle3())


@dataclass(frozen=True)
class Link:
    """One step of the way from the model that SGLang loaded down to its decoder."""

    name: str
    """Attribute of the module above; empty for the model itself."""
    module: Any


@dataclass(frozen=True)
class Decoder:
    """A loaded target's decoder.

    Attributes:
        chain: the modules from the loaded model down to the stack, both included.
        stack: the ``nn.Module`` that runs the layers.
        layers: its ``nn.ModuleList`` of decoder layers.
    """

    chain: tuple[Link, ...]
    stack: Any
    layers: Any

    @property
    def num_layers(self) -> int:
        """L."""
        return len(self.layers)

    def path_to(self, module: Any) -> str:
        """Dotted attribute path from the loaded model to a module of the chain; empty for the model itself."""
        names: list[str] = []
        for link in self.chain:
            names.append(link.name)
            if link.module is module:
                return ".".join(filter(None, names))
        raise StructureError(f"{type(module).__name__} is not on the way to the decoder")


def find_decoder(model: Any, num_layers: int) -> Decoder:
    """Find the decoder of ``num_layers`` layers below a loaded model.

    Raises:
        StructureError: there is none, or more than one.
    """
    found = [d for d in _decoders((Link("", model),), set(), depth=6) if d.num_layers == num_layers]
    if len(found) != 1:
        names = ", ".join(f"{type(d.stack).__name__} at {d.path_to(d.stack) or 'the top'}" for d in found) or "none"
        raise StructureError(f"expected one module with a list of {num_layers} decoder layers, found {names}")
    return found[0]


def logits_processors(model: Any) -> list[Any]:
    """Every ``LogitsProcessor`` of a loaded model (sglang/srt/layers/logits_processor.py), whoever owns it."""
    return [m for m in model.modules() if is_a(m, "LogitsProcessor")]


def is_a(module: Any, class_name: str) -> bool:
    """Whether a class of that name is among the module's classes; by name, so that no SGLang module need be imported."""
    return any(cls.__name__ == class_name for cls in type(module).__mro__)


def signature_of(layer: Any) -> list[str]:
    """Parameter names of a layer's ``forward``, without ``self``."""
    return [name for name in inspect.signature(type(layer).forward).parameters if name != "self"]


def _decoders(chain: tuple[Link, ...], seen: set[int], depth: int) -> Iterator[Decoder]:
    module = chain[-1].module
    if id(module) in seen or depth == 0:
        return
    seen.add(id(module))
    for name, child in module.named_children():
        layers = list(child.children()) if is_a(child, "ModuleList") else []
        # Linear-attention layers of hybrid stacks take it among **kwargs, so one class that names it will do.
        classes = {type(layer): layer for layer in layers if not is_a(layer, "PPMissingLayer")}
        if any("forward_batch" in signature_of(layer) for layer in classes.values()):
            yield Decoder(chain, module, child)
        elif not is_a(child, "ModuleList"):
            yield from _decoders((*chain, Link(name, child)), seen, depth - 1)
