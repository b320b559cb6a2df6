"""Trees from marginals: the likeliest paths, in order, and nothing that changes a text."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.errors import ConfigError
from paceline.core.params import SamplingParams
from paceline.core.tree import grow, grow_lattice
from paceline.core.types import Request
from paceline.engine.engine import Engine
from paceline.engine.tree import TreeDrafter
from paceline.testing import tiny_drafter, tiny_target


def path_of(node: int, parents: tuple[int, ...]) -> list[int]:
    """Returns the nodes from the root to `node`."""
    path = [node]
    while (parent := parents[path[0]]) != 0:
        path.insert(0, parent - 1)
    return path


@settings(deadline=None, max_examples=60)
@given(
    slots=st.integers(1, 4),
    width=st.integers(1, 4),
    num_nodes=st.integers(1, 40),
    seed=st.integers(0, 10_000),
)
def test_the_tree_holds_exactly_the_likeliest_paths(
    slots: int, width: int, num_nodes: int, seed: int
) -> None:
    raw = torch.rand(slots, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    log_probs = (raw / raw.sum(dim=1, keepdim=True) * 0.9).log().sort(dim=1, descending=True).values.tolist()
    tokens = [[10 * slot + rank for rank in range(width)] for slot in range(slots)]
    tree = grow(log_probs, tokens, num_nodes)
    every = [
        ranks for depth in range(1, slots + 1) for ranks in itertools.product(range(width), repeat=depth)
    ]
    best = sorted(every, key=lambda ranks: -sum(log_probs[slot][rank] for slot, rank in enumerate(ranks)))
    expected = {tuple(tokens[slot][rank] for slot, rank in enumerate(ranks)) for ranks in best[:num_nodes]}
    found = [tuple(tree.tokens[n] for n in path_of(node, tree.parents)) for node in range(len(tree.tokens))]
    assert set(found) == expected and len(found) == len(expected)
    assert all(parent <= node for node, parent in enumerate(tree.parents))


@settings(deadline=None, max_examples=60)
@given(
    slots=st.integers(1, 4),
    width=st.integers(1, 4),
    num_nodes=st.integers(1, 60),
    looks_back=st.lists(st.booleans(), min_size=4, max_size=4),
    seed=st.integers(0, 10_000),
)
def test_the_tree_of_a_lattice_holds_exactly_the_likeliest_paths(
    slots: int, width: int, num_nodes: int, looks_back: list[bool], seed: int
) -> None:
    """Slots that look at the token before them and slots that do not, in any order."""
    rng = torch.Generator().manual_seed(seed)
    tables = [
        torch.randn(width if slot and looks_back[slot] else 1, width, generator=rng)
        .double()
        .log_softmax(dim=1)
        for slot in range(slots)
    ]
    tokens = [[10 * slot + candidate for candidate in range(width)] for slot in range(slots)]
    ranked = [table.sort(dim=1, descending=True) for table in tables]
    tree = grow_lattice(
        [r.values.tolist() for r in ranked], [r.indices.tolist() for r in ranked], tokens, num_nodes
    )

    def log_prob(path: tuple[int, ...]) -> float:
        rows = [0, *path]
        steps = [
            table[rows[k] if len(table) > 1 else 0, rows[k + 1]]
            for k, table in enumerate(tables[: len(path)])
        ]
        return float(sum(steps))

    every = [path for depth in range(1, slots + 1) for path in itertools.product(range(width), repeat=depth)]
    best = sorted(every, key=log_prob, reverse=True)[:num_nodes]
    found = [tuple(tree.tokens[n] for n in path_of(node, tree.parents)) for node in range(len(tree.tokens))]
    assert found == [tuple(10 * slot + candidate for slot, candidate in enumerate(path)) for path in best]


def test_a_front_part_of_a_tree_is_the_smaller_tree() -> None:
    log_probs, tokens = [[-0.2, -2.0], [-0.5, -1.0], [-0.1, -3.0]], [[1, 2], [3, 4], [5, 6]]
    large, small = grow(log_probs, tokens, 9), grow(log_probs, tokens, 4)
    assert (large.tokens[:4], large.parents[:4]) == (small.tokens, small.parents)
    assert grow([], [], 4).tokens == ()


@pytest.mark.parametrize("num_nodes", [1, 5, 16])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_trees_change_no_text(num_nodes: int, temperature: float) -> None:
    target = tiny_target(seed=3)
    drafter = tiny_drafter(target, 4)
    texts = []
    for chosen in (None, TreeDrafter(drafter, num_nodes)):
        engine = Engine(target, chosen, max_sequences=2)
        for i in range(4):
            params = SamplingParams(max_new_tokens=12 + i, temperature=temperature, seed=i, ignore_eos=True)
            engine.add(Request(str(i), tuple(range(1, 4 + i)), params))
        while engine.has_work:
            engine.step()
            for sequence in engine.scheduler.running:
                sequence.check()
        texts.append([engine.take_completion(str(i)).token_ids for i in range(4)])
    assert texts[0] == texts[1]


def test_a_tree_without_nodes_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_nodes: expected 1…1024, got 0"):
        TreeDrafter(tiny_drafter(tiny_target(), 4), 0)
