"""Every kernel that the rig replaces, with its reason: the one list of them.

All are kernels that SGLang ships only as CUDA code; none of SGLang's logic is among them. Each is put in place right after the
module that holds its name was executed, before anything can import the name from there. Which releases need it was found by
leaving it out; what decides is the module's own shape, so that a release between two of those works too.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from . import tree


@dataclass(frozen=True)
class Replacement:
    """One kernel: where its name lives, why it is replaced, where that was seen to be needed, and what does it."""

    names: str
    module: str
    reason: str
    releases: str
    install: Callable[[ModuleType], None]


@dataclass(frozen=True)
class Stub:
    """Modules replaced by ones whose names can be imported and raise when called; ``name.*`` is every submodule of ``name``."""

    modules: tuple[str, ...]
    reason: str
    releases: str
    needed: Callable[[tuple[int, ...]], bool]
    """From the installed SGLang's release."""
    lends: Mapping[str, str] = field(default_factory=dict)
    """Of these: module -> module of SGLang whose own names it gives back."""


def sglang_release() -> tuple[int, ...]:
    """The release of the installed SGLang as numbers, (0, 5, 9); empty when there is none."""
    try:
        found = re.match(r"(\d+)\.(\d+)\.(\d+)", importlib.metadata.version("sglang"))
    except importlib.metadata.PackageNotFoundError:
        return ()
    return tuple(int(part) for part in found.groups()) if found else ()


def _cuda_calls(module: ModuleType) -> None:
    # CPU work is finished when the call returns: waiting for a device that isn't there has nothing to wait for.
    if not module.is_available():
        module.synchronize = module.empty_cache = lambda *args, **kwargs: None  # type: ignore[attr-defined]


def _tree_kernels(module: ModuleType) -> None:
    if not hasattr(module, "verify_tree_greedy_func"):
        return
    own_build = getattr(module, "sgl_build_tree_kernel_triton", None)
    own_verify = getattr(module, "verify_tree_greedy_triton", None)
    module.sgl_build_tree_kernel_efficient = own_build or build_tree  # type: ignore[attr-defined]
    module.verify_tree_greedy_func = _returning(own_verify) if own_verify else verify_tree_greedy  # type: ignore[attr-defined]


def _returning(kernel: Callable[..., None]) -> Callable[..., Any]:
    def verify_tree_greedy_func(predicts: Any, accept_index: Any, accept_token_num: Any, *rest: Any, **named: Any) -> Any:
        named.pop("topk", None)
        kernel(predicts, accept_index, accept_token_num, *rest[:5], **named)
        return predicts, accept_index, accept_token_num

    return verify_tree_greedy_func


def _cache_locations(module: ModuleType) -> None:
    module.assign_extend_cache_locs_func = extend_cache_locations  # type: ignore[attr-defined]


def _text_only(module: ModuleType) -> None:
    server_args = module.ServerArgs
    add_cli_args = server_args.add_cli_args

    def add_cli_args_text_only(parser: Any) -> None:
        add_cli_args(parser)
        parser.set_defaults(enable_multimodal=False)

    server_args.add_cli_args = staticmethod(add_cli_args_text_only)


def _always(release: tuple[int, ...]) -> bool:
    return True


def _before_0_5_8(release: tuple[int, ...]) -> bool:
    return release < (0, 5, 8)


def _before_0_5_13(release: tuple[int, ...]) -> bool:
    return release < (0, 5, 13)


REPLACEMENTS = (
    Replacement(
        "synchronize, empty_cache",
        "torch.cuda",
        "no-ops: SGLang waits for the device in places, and torch raises 'Found no NVIDIA driver'",
        "0.5.9 to 0.5.13; 0.5.18 and 0.5.23 with an MLA draft",
        _cuda_calls,
    ),
    Replacement(
        "sgl_build_tree_kernel_efficient, verify_tree_greedy_func",
        "sglang.srt.speculative.eagle_utils",
        "draft trees, chains included: unset and a no-op; plain torch up to 0.5.13, SGLang's own Triton versions in 0.5.18",
        "0.5.9 to 0.5.18",
        _tree_kernels,
    ),
    Replacement(
        "sgl_build_tree_kernel_efficient, verify_tree_greedy_func",
        "sglang.kernels.ops.speculative.spec_tree",
        "the same two, moved: SGLang's own Triton versions",
        "0.5.23",
        _tree_kernels,
    ),
    Replacement(
        "assign_extend_cache_locs_func",
        "sglang.srt.speculative.triton_ops.cache_locs",
        "KV slots of the tokens to verify: returns None for an unknown device, and KV would go to kv_buffer[None]",
        "0.5.13",
        _cache_locations,
    ),
    Replacement(
        "assign_extend_cache_locs_func",
        "sglang.kernels.ops.speculative.cache_locs",
        "the same, moved; its uniform twin calls it",
        "0.5.18",
        _cache_locations,
    ),
    Replacement(
        "ServerArgs.add_cli_args",
        "sglang.srt.server_args",
        "no kernel but a default: --enable-multimodal has no flag that says no, and the tiny targets have no processor files",
        "all",
        _text_only,
    ),
)

_LENT = {f"vllm.model_executor.layers.{name}": f"sglang.srt.layers.{name}" for name in ("layernorm", "activation")}

STUBS = (
    Stub(
        ("vllm", "vllm._custom_ops"),
        "for an unknown device SGLang imports rotary_embedding and rms_norm from vllm._custom_ops, and calls neither",
        "all",
        _always,
    ),
    Stub(
        ("vllm.model_executor", "vllm.model_executor.layers", *_LENT),
        "for an unknown device its norms and activations are replaced by vLLM's of the same names; here they stay SGLang's own",
        "0.5.6",
        _before_0_5_8,
        _LENT,
    ),
    Stub(
        ("sgl_kernel", "sgl_kernel.*"),
        "its shared object wants libcuda.so.1 when imported; nothing of it is called",
        "0.5.9 to 0.5.11",
        _before_0_5_13,
    ),
)


def build_tree(
    parent_list: Any,
    selected_index: Any,
    verified_seq_len: Any,
    tree_mask: Any,
    positions: Any,
    retrieve_index: Any,
    retrieve_next_token: Any,
    retrieve_next_sibling: Any,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int = 0,
) -> None:
    """Lay out the draft trees of a batch: masks, positions and links, written in place.

    The signature of sgl_kernel's ``build_tree_kernel_efficient`` as `eagle_utils` calls it.

    Args:
        parent_list: (batch, 1 + topk * (depth - 1)) or (batch, 0) int64, see :func:`tree.parents`.
        selected_index: (batch, draft_token_num - 1) int64.
        verified_seq_len: (batch,) tokens already in each sequence.
        tree_mask: flat bool. Mode 0: row by row ``seq_len + draft_token_num`` wide; mode 1: ``draft_token_num`` wide.
        positions: (batch * draft_token_num,) int64.
        retrieve_index: (batch, draft_token_num) int64, each node's row in the flattened batch.
        retrieve_next_token: first child, likewise.
        retrieve_next_sibling: likewise.
        topk: beams a step.
        depth: draft steps.
        draft_token_num: nodes a tree, the root included.
        tree_mask_mode: 0 full, 1 draft tokens only.

    Raises:
        NotImplementedError: the bit-packed mask (mode 2), which the Triton attention backend doesn't use.
    """
    if int(tree_mask_mode) not in (0, 1):
        raise NotImplementedError(f"the rig has no tree mask of mode {int(tree_mask_mode)}")
    start = 0
    for row, seq_len in enumerate(verified_seq_len.tolist()):
        parent = tree.parents(parent_list[row].tolist(), selected_index[row].tolist(), topk)
        first_child, sibling = tree.links(parent)
        prefix = 0 if int(tree_mask_mode) == 1 else seq_len
        size = draft_token_num * (prefix + draft_token_num)
        mask = tree_mask[start : start + size].view(draft_token_num, prefix + draft_token_num)
        start += size
        mask[:, :prefix] = True
        mask[:, prefix:] = False
        for node, path in enumerate(tree.ancestors(parent)):
            mask[node, [prefix + seen for seen in path]] = True
            flat = row * draft_token_num + node
            positions[flat] = seq_len + len(path) - 1
            retrieve_index[row, node] = flat
            retrieve_next_token[row, node] = first_child[node]
            retrieve_next_sibling[row, node] = sibling[node]


def verify_tree_greedy(
    predicts: Any,
    accept_index: Any,
    accept_token_num: Any,
    candidates: Any,
    retrieve_index: Any = None,
    retrieve_next_token: Any = None,
    retrieve_next_sibling: Any = None,
    target_predict: Any = None,
    topk: int = -1,
    **older_spelling: Any,
) -> tuple[Any, Any, Any]:
    """Accept the longest path of each tree that agrees with the target's greedy tokens; written in place and returned.

    The signature of `eagle_utils.verify_tree_greedy_func`, whose ``retrieve_`` was spelt ``retrive_`` in older releases.

    Args:
        predicts: (batch * draft_token_num,) int32, receives the target's token after each accepted node.
        accept_index: (batch, steps + 1) int32, receives the rows of the accepted nodes.
        accept_token_num: (batch,) int32, receives how many draft tokens were accepted.
        candidates: (batch, draft_token_num) token of each node.
        retrieve_index: (batch, draft_token_num), see :func:`build_tree`.
        retrieve_next_token: likewise.
        retrieve_next_sibling: likewise.
        target_predict: the target's greedy token at each row of the flattened batch.
        topk: unused.
    """
    rows = older_spelling.get("retrive_index", retrieve_index).tolist()
    first_child = older_spelling.get("retrive_next_token", retrieve_next_token).tolist()
    sibling = older_spelling.get("retrive_next_sibling", retrieve_next_sibling).tolist()
    says = target_predict.flatten().tolist()
    for row, tokens in enumerate(candidates.tolist()):
        flat = rows[row]
        path = tree.accepted_path(tokens, first_child[row], sibling[row], _lookup(says, flat), accept_index.shape[1])
        for place, node in enumerate(path):
            accept_index[row, place] = flat[node]
            predicts[flat[node]] = says[flat[node]]
        accept_token_num[row] = len(path) - 1
    return predicts, accept_index, accept_token_num


def _lookup(says: list[int], rows: list[int]) -> Callable[[int], int]:
    return lambda node: says[rows[node]]


def extend_cache_locations(
    req_pool_indices: Any,
    req_to_token: Any,
    start_offset: Any,
    end_offset: Any,
    batch_size: int,
    draft_token_num: int,
    device: Any,
) -> Any:
    """Return the KV slots of positions ``start_offset`` to ``end_offset`` of each request, concatenated (int64).

    The signature of `cache_locs.assign_extend_cache_locs_func`.

    Args:
        req_pool_indices: (batch,) row of each request in the pool.
        req_to_token: (pool, positions) KV slot of each position.
        start_offset: (batch,) first position.
        end_offset: (batch,) position after the last.
        batch_size: requests.
        draft_token_num: positions a request.
        device: unused: where the pool is.
    """
    import torch

    spans = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    return torch.cat([req_to_token[request, start:end] for request, start, end in spans]).to(torch.int64)
