"""How a decoder layer carries the residual stream, read from the source of its ``forward``. Pure: `ast` alone.

SGLang's decoder layers come in three shapes. Some take and return the whole stream in ``hidden_states``. Some take
``(hidden_states, residual)``, where the stream is the sum of the two, which the first norm of the layer adds up. From 0.5.23 many
take only a handle, and the stream is kept on the batch (sglang/srt/layers/layer_boundary). A fourth looks like the second and is
not: Cohere's and MiniCPM's layers take a ``residual`` that they overwrite unread, so the stream is ``hidden_states`` alone; adding
the two would capture twice the stream. Whatever fits none of these is refused by name, not guessed.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from dataclasses import dataclass
from enum import Enum
from typing import Any


class Stream(str, Enum):
    """Where the residual stream entering a layer is found."""

    HIDDEN = "hidden_states"
    """``hidden_states`` alone."""
    SUM = "hidden_states + residual"
    """The sum of the two; ``hidden_states`` alone while ``residual`` is None."""
    BATCH = "forward_batch.residual_stream"
    """The batch's residual stream; ``hidden_states`` is a handle (0.5.23's layer boundaries)."""


@dataclass(frozen=True)
class Refusal:
    """Why a structure cannot be served: ``what`` names the part, ``reason`` is a clause."""

    what: str
    reason: str

    def __str__(self) -> str:
        return f"{self.what}: {self.reason}"


HARMLESS = frozenset(
    {
        "self",
        "positions",
        "position_ids",
        "hidden_states",
        "residual",
        "forward_batch",
        "zero_allocator",
        "gemm_output_zero_allocator",
        "layer_id",
        "kv_states",
        "position_embeddings_global",
        "position_embeddings_local",
        "position_embeddings",
        "llama_4_scaling",
        "prev_topk_indices",
        "captured_last_layer_outputs",
        "capture_output",
        "capture_gathered",
        "post_residual_addition",
        "visual_token_mask",
        "input_ids",
        "meta_mlp",
        "next_full_attention_layer_id",
        "per_layer_input",
        "input_deepstack_embeds",
        "tp_rank",
        "layer_idx",
        "mrope_positions",
        "cos",
        "sin",
        "use_full_attn",
        "attn_metadata",
        "kwargs",
        "input_ids_global",
        "ssmax_scale",
        "token_type_ids",
        "alt_stream",
    }
)
"""Parameters of a layer's ``forward`` that change nothing about where the stream is."""

UNSERVABLE = {
    "deferred_norm": "the sum of hidden_states and residual is only taken after a norm that the next layer applies",
    "loop_idx": "the stack runs its layers several times, so a layer number names no single place in the stream",
    "current_step": "the stack runs its layers several times, so a layer number names no single place in the stream",
    "attn_input": "the layers carry a second tensor beside the stream",
    "encoder_hidden_states": "it is the decoder half of an encoder-decoder",
    "prev_router_hidden_states": "the layers scale the stream as they add to it, so a sum of its parts is not what enters a layer",
    "log_scaling_tau": "a convolution over the layer's output is still due when the next layer is entered",
    "cross_attention_states": "the layers that attend to an image run only when there is one, so their boundaries come and go",
}
"""Parameters that tell of a stream which boundaries do not describe, with the reason."""

SEVERAL_STREAMS = ("altup", "hc_attn", "hc_ffn", "mhc", "hyper_connection", "attn_bank", "num_residual_streams")
"""Words in a layer's code that tell of several parallel streams."""


def source_of_forward(cls: Any) -> str:
    """Source text of a class's ``forward``; empty where it cannot be had."""
    try:
        return inspect.getsource(inspect.unwrap(cls.forward))
    except (OSError, TypeError, AttributeError):
        return ""


def stream_of_class(cls: Any) -> Stream | Refusal:
    """Read where the stream entering a layer of this class is found."""
    return stream_of_layer(cls.__name__, source_of_forward(cls), _source_of_class(cls))


def _source_of_class(cls: Any) -> str:
    """The class that a layer's ``forward`` is written in, without comments; empty where it cannot be had."""
    owner = next((c for c in cls.__mro__ if "forward" in vars(c)), cls)
    try:
        return ast.unparse(ast.parse(textwrap.dedent(inspect.getsource(owner))))
    except (OSError, TypeError, SyntaxError, ValueError):
        return ""


def stream_of_layer(class_name: str, source: str, whole: str = "") -> Stream | Refusal:
    """Read where the stream entering a decoder layer is found.

    Args:
        class_name: for the refusal.
        source: source text of its ``forward``, indented or not.
        whole: source text of its class, which may tell of several streams where its ``forward`` doesn't.
    """
    try:
        tree = ast.parse(textwrap.dedent(source))
    except (SyntaxError, ValueError) as error:
        return Refusal(class_name, f"the source of its forward cannot be read ({error})")
    function = next((n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)), None)
    if function is None:
        return Refusal(class_name, "it has no forward that can be read")
    return stream_of_forward(class_name, function, whole)


def stream_of_forward(class_name: str, function: ast.FunctionDef | ast.AsyncFunctionDef, whole: str = "") -> Stream | Refusal:
    """As :func:`stream_of_layer`, for a ``forward`` that has been parsed."""
    arguments = function.args
    names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    for name in names:
        if name in UNSERVABLE:
            return Refusal(class_name, UNSERVABLE[name])
    if "hidden_states" not in names:
        return Refusal(class_name, f"its forward takes no hidden_states but ({', '.join(names[1:])})")
    if "forward_batch" not in names and arguments.kwarg is None:
        return Refusal(class_name, "its forward takes no forward_batch, so it is no decoder layer of SGLang's engine")
    text = ast.unparse(function)
    several = next((word for word in SEVERAL_STREAMS if word in text or word in whole), None)
    if several:
        return Refusal(class_name, f"its layers carry several streams ({several}), and a boundary is one")
    strange = [name for name in names if name not in HARMLESS]
    if strange:
        return Refusal(class_name, f"its forward takes {', '.join(strange)}, which is not one of SGLang's usual shapes")
    if "boundary.prepare(" in text or "residual_stream" in text:
        return Stream.BATCH
    if "residual" not in names:
        return Stream.HIDDEN
    use = _first_use(function.body)
    if use in ("stored", "unused"):
        return Stream.HIDDEN
    if use == "added":
        return Stream.SUM
    return Refusal(class_name, "it reads residual, but not to add it to hidden_states in its first norm")


def _first_use(body: list[ast.stmt]) -> str:
    """What a forward does first with its parameter ``residual``: ``added``, ``stored`` over, ``unused``, or ``other``."""
    for statement in body:
        if isinstance(statement, ast.If):
            given = _given_branch(statement)
            if given is not None:
                use = _first_use(given)
            else:
                uses = {_first_use(statement.body), _first_use(statement.orelse)} - {"unused"}
                use = uses.pop() if len(uses) == 1 else ("other" if uses else "unused")
        elif isinstance(statement, ast.With):
            use = _first_use(statement.body)
        else:
            use = _use_in(statement)
        if use != "unused":
            return use
    return "unused"


def _given_branch(statement: ast.If) -> list[ast.stmt] | None:
    """For ``if residual is None`` and its kin, the branch taken when there is a residual."""
    test = statement.test
    if not (isinstance(test, ast.Compare) and isinstance(test.left, ast.Name) and test.left.id == "residual"):
        return None
    if isinstance(test.ops[0], ast.Is):
        return statement.orelse
    return statement.body if isinstance(test.ops[0], ast.IsNot) else None


def _use_in(statement: ast.stmt) -> str:
    loads = [n for n in ast.walk(statement) if isinstance(n, ast.Name) and n.id == "residual" and isinstance(n.ctx, ast.Load)]
    stores = [n for n in ast.walk(statement) if isinstance(n, ast.Name) and n.id == "residual" and isinstance(n.ctx, ast.Store)]
    if loads:
        for node in ast.walk(statement):
            parts: list[ast.expr] = []
            if isinstance(node, ast.Call):
                parts = [*node.args, *(k.value for k in node.keywords)]
            elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
                parts = [node.left, node.right]
            if {"hidden_states", "residual"} <= {p.id for p in parts if isinstance(p, ast.Name)}:
                return "added"
        return "other"
    return "stored" if stores else "unused"


def skips_layers(source: str) -> bool:
    """Whether a stack's ``forward`` passes layers over: a ``continue`` in a loop that calls a layer. Unreadable source does not."""
    try:
        tree = ast.parse(textwrap.dedent(source))
    except (SyntaxError, ValueError):
        return False
    for loop in (n for n in ast.walk(tree) if isinstance(n, ast.For)):
        calls = any(isinstance(n, ast.Call) and "layer" in ast.unparse(n.func) for n in ast.walk(loop))
        if calls and any(isinstance(n, ast.Continue) for n in ast.walk(loop)):
            return True
    return False
