"""Draft trees, in plain Python: what SGLang's two tree kernels compute. No torch, so it can be tested anywhere.

A draft step offers the ``topk`` best continuations of each of ``topk`` beams; the ``num_draft_tokens - 1`` best of all offers make
the tree, in the order in which they were offered. Node 0 is the token that the target has already said.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

NONE = -1


def parents(parent_list: Sequence[int], selected: Sequence[int], topk: int) -> list[int]:
    """Find each node's parent.

    Args:
        parent_list: offer that each beam continues, as `select_top_k_tokens` lists them: entry 0 is the root (-1), and the beams
            of step s take the next ``topk`` entries.
        selected: the offers in the tree, ascending; offer o continues beam ``o // topk``. Node i is ``selected[i - 1]``.
        topk: beams a step.

    Returns:
        The parent of nodes 1, 2, ... as node numbers; a parent precedes its children.

    Raises:
        ValueError: a node's parent is not in the tree. Scores fall along a path, so the best offers always bring their parents.
    """
    node_of_offer = {offer: node for node, offer in enumerate(selected, start=1)}
    found = []
    for offer in selected:
        beam = offer // topk
        parent = 0 if beam == 0 else node_of_offer.get(parent_list[beam], NONE)
        if parent == NONE:
            raise ValueError(f"offer {offer} continues offer {parent_list[beam]}, which is not in the tree {list(selected)}")
        found.append(parent)
    return found


def ancestors(parent: Sequence[int]) -> list[list[int]]:
    """Return for each node (0 included) the nodes on its path, itself last; its depth is the length less one.

    Args:
        parent: as :func:`parents` returns it.
    """
    paths = [[0]]
    for node, up in enumerate(parent, start=1):
        paths.append([*paths[up], node])
    return paths


def links(parent: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return for each node its first child and its next sibling, -1 where there is none; siblings keep the order of the nodes."""
    first_child = [NONE] * (len(parent) + 1)
    sibling = [NONE] * (len(parent) + 1)
    for node in range(len(parent), 0, -1):
        up = parent[node - 1]
        sibling[node] = first_child[up]
        first_child[up] = node
    return first_child, sibling


def accepted_path(
    candidates: Sequence[int],
    first_child: Sequence[int],
    sibling: Sequence[int],
    says: Callable[[int], int],
    longest: int,
) -> list[int]:
    """Follow the target's greedy tokens down the tree.

    Args:
        candidates: the token of each node.
        first_child: as :func:`links` returns it.
        sibling: likewise.
        says: the target's greedy token after a node.
        longest: most nodes that may be accepted, the root included.

    Returns:
        The accepted nodes, the root first.
    """
    path = [0]
    while len(path) < longest:
        wanted = says(path[-1])
        node = first_child[path[-1]]
        while node != NONE and candidates[node] != wanted:
            node = sibling[node]
        if node == NONE:
            break
        path.append(node)
    return path
