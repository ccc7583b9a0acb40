"""The embedding and the head that a target shares with its draft, for a class without ``get_embed_and_head``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_eagle3_plugin.runtime.target import ACCESSOR, Decoder, StructureError, is_a

HEADS = ("lm_head", "embed_out", "output_layer", "output", "head")
"""What models call the head, the usual name first."""


def make_accessor(decoder: Decoder, hidden_size: int) -> Callable[[Any], tuple[Any, Any]]:
    """The method ``get_embed_and_head(self)`` of a loaded model: its two weights, [vocabulary, H] each, found by structure.

    Args:
        decoder: the model's.
        hidden_size: H of the decoder.

    Raises:
        StructureError: one is not found, or is packed by a quantisation, so that a draft cannot share it.
    """
    embed = _embedding_path(decoder, hidden_size)
    head = _head_path(decoder, hidden_size) or embed

    def get_embed_and_head(self: Any) -> tuple[Any, Any]:
        """Weights of the embedding and the head, for the draft to share (sglang-eagle3-plugin)."""
        return resolve(self, embed).weight, resolve(self, head).weight

    get_embed_and_head.__name__ = ACCESSOR
    return get_embed_and_head


def resolve(model: Any, path: str) -> Any:
    """Follow a dotted path of attributes; an empty path is the model itself."""
    for name in filter(None, path.split(".")):
        model = getattr(model, name)
    return model


def _embedding_path(decoder: Decoder, hidden_size: int) -> str:
    packed = elsewhere = ""
    for link in reversed(decoder.chain):
        for name, child in link.module.named_children():
            if is_a(child, "PPMissingLayer") and "emb" in name:
                elsewhere = f": {name} lies on the first pipeline stage, and the draft that is to share it on the last"
            if not (is_a(child, "VocabParallelEmbedding") or is_a(child, "Embedding")) or is_a(child, "ParallelLMHead"):
                continue
            # Learned positions are an embedding too, and come after the tokens' in every model; `wpe` is GPT-2's name for them.
            if "pos" in name or name == "wpe":
                continue
            weight: Any = getattr(child, "weight", None)
            width = 0 if weight is None else weight.shape[-1]
            if width == hidden_size:
                return _join(decoder.path_to(link.module), name)
            packed = packed or f"; {name}.weight is {width} wide where {hidden_size} was due, so it is packed by a quantisation"
    raise StructureError(f"no token embedding was found on the way to {type(decoder.stack).__name__}{packed or elsewhere}")


def _head_path(decoder: Decoder, hidden_size: int) -> str | None:
    """Where the head is; None where the model has none of its own, which means that it is tied to the embedding."""
    for name in HEADS:
        for link in decoder.chain:
            child = dict(link.module.named_children()).get(name)
            weight = getattr(child, "weight", None)
            if weight is None or weight.dim() != 2:
                continue
            if weight.shape[-1] != hidden_size:
                raise StructureError(
                    f"{name}.weight is {weight.shape[-1]} wide where {hidden_size} was due, so it is packed by a quantisation"
                )
            return _join(decoder.path_to(link.module), name)
    return None


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
