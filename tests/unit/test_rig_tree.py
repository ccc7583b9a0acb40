"""The tree kernels' stand-ins, against a plain walk over sets of paths."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_eagle3_plugin.rig.site.eagle3_rig import tree


def grow(topk: int, steps: int, size: int, scores: list[float]) -> tuple[list[int], list[int], list[tuple[int, ...]]]:
    """Grow a tree as EAGLE-2 does; returns parent_list, selected, and each node's path of offers (a definition by paths)."""
    fresh = iter(scores)
    offers: list[tuple[float, tuple[int, ...]]] = []  # (score, path of offer numbers)
    beams: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    parent_list: list[int] = [-1]
    for step in range(steps):
        new = []
        for score, path in beams:
            for _ in range(topk):
                number = len(offers)
                offers.append((score + next(fresh), (*path, number)))
                new.append(offers[-1])
        beams = sorted(new, reverse=True)[:topk]
        if step < steps - 1:
            parent_list += [path[-1] for _, path in beams]
    # SGLang numbers an offer of step s > 0 topk + (s - 1) * topk^2 + ..., which is the order of creation here.
    best = sorted(range(len(offers)), key=lambda i: (-offers[i][0], i))[: size - 1]
    selected = sorted(best)
    return parent_list, selected, [offers[i][1] for i in selected]


@st.composite
def trees(draw: st.DrawFn) -> tuple[int, list[int], list[int], list[tuple[int, ...]]]:
    topk = draw(st.integers(1, 4))
    steps = draw(st.integers(1, 4))
    offers = topk + (steps - 1) * topk * topk
    size = draw(st.integers(2, min(offers, 12) + 1))
    scores = draw(st.lists(st.floats(-5, -0.01), min_size=offers, max_size=offers, unique=True))
    parent_list, selected, paths = grow(topk, steps, size, scores)
    return topk, parent_list, selected, paths


@given(trees())
def test_masks_and_links_agree_with_the_paths(grown: tuple[int, list[int], list[int], list[tuple[int, ...]]]) -> None:
    topk, parent_list, selected, paths = grown
    parent = tree.parents(parent_list, selected, topk)
    seen = tree.ancestors(parent)
    for node, path in enumerate(paths, start=1):
        assert [selected[n - 1] for n in seen[node][1:]] == list(path)
    first_child, sibling = tree.links(parent)
    for node in range(len(parent) + 1):
        children = []
        child = first_child[node]
        while child != tree.NONE:
            children.append(child)
            child = sibling[child]
        assert children == [n for n in range(1, len(parent) + 1) if parent[n - 1] == node]


@given(trees(), st.data())
def test_the_accepted_path_is_the_longest_that_the_target_says(
    grown: tuple[int, list[int], list[int], list[tuple[int, ...]]], data: st.DataObject
) -> None:
    topk, parent_list, selected, _ = grown
    parent = tree.parents(parent_list, selected, topk)
    count = len(parent) + 1
    # Siblings hold different tokens, as the best k of one distribution do.
    candidates = [0] + [7 * parent[n - 1] + n for n in range(1, count)]
    wish = data.draw(st.lists(st.sampled_from(candidates), min_size=count, max_size=count))
    first_child, sibling = tree.links(parent)
    path = tree.accepted_path(candidates, first_child, sibling, wish.__getitem__, longest=99)
    good = [p for p in tree.ancestors(parent) if all(candidates[child] == wish[up] for up, child in itertools.pairwise(p))]
    assert path == max(good, key=len)
    assert tree.accepted_path(candidates, first_child, sibling, wish.__getitem__, longest=1) == [0]


def test_a_node_without_its_parent_is_refused() -> None:
    with pytest.raises(ValueError, match="not in the tree"):
        tree.parents([-1, 0, 1], [1, 2], topk=2)  # offer 2 continues beam 1, which is offer 0


def test_a_chain_is_a_tree() -> None:
    parent = tree.parents([-1, 0, 1], [0, 1, 2], topk=1)
    assert parent == [0, 1, 2]
    assert tree.links(parent) == ([1, 2, 3, -1], [-1, -1, -1, -1])
    assert tree.ancestors(parent)[-1] == [0, 1, 2, 3]
