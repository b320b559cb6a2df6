"""What a block drafter says of its slots → a draft tree under a node budget.

A block drafter says for each slot which tokens are likely, but commits to one path only if asked to. The likeliest
paths under those distributions form a tree, and the target judges a tree in one pass as cheaply as a chain of as many
nodes. Slots may be independent of each other, or each look at the token before it: a lattice of candidates.

Source: best-first growth as in DDTree (arXiv 2604.12989).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

from paceline.core.types import Proposal


def grow(log_probs: Sequence[Sequence[float]], tokens: Sequence[Sequence[int]], num_nodes: int) -> Proposal:
    """Returns the tree of the `num_nodes` likeliest paths through independent slots.

    Args:
        log_probs: by slot, descending within a slot.
        tokens: the tokens they belong to.
        num_nodes: as for `grow_lattice`, and so is the order of nodes. Pure.
    """
    return grow_lattice(
        [[row] for row in log_probs], [[range(len(row))] for row in tokens], tokens, num_nodes
    )


def grow_lattice(
    log_probs: Sequence[Sequence[Sequence[float]]],
    candidates: Sequence[Sequence[Sequence[int]]],
    tokens: Sequence[Sequence[int]],
    num_nodes: int,
) -> Proposal:
    """Returns the tree of the `num_nodes` likeliest paths through a lattice.

    Args:
        log_probs: by slot and predecessor, descending within that row. A predecessor is a candidate of the slot before;
            a single row holds behind all of them. The first slot's first row is behind the anchor.
        candidates: which of the slot's candidates they belong to.
        tokens: by slot, of its candidates.
        num_nodes: nodes of the tree; fewer where the candidates run out.

    Nodes come in order of their path's probability, so parents precede children and any front part is the best
    smaller tree. Pure.
    """
    nodes: list[int] = []
    parents: list[int] = []
    chances: list[float] = []
    frontier = (
        [(-log_probs[0][0][0], 0, 0, 0, 0)] if log_probs else []
    )  # cost of the path, parent, slot, row, rank
    while frontier and len(nodes) < num_nodes:
        cost, parent, slot, row, rank = heapq.heappop(frontier)
        costs, candidate = log_probs[slot][row], candidates[slot][row][rank]
        nodes.append(tokens[slot][candidate])
        parents.append(parent)
        chances.append(math.exp(-cost))
        if rank + 1 < len(costs):
            sibling = cost + costs[rank] - costs[rank + 1]
            heapq.heappush(frontier, (sibling, parent, slot, row, rank + 1))
        if slot + 1 < len(tokens):
            below = log_probs[slot + 1]
            row = candidate if len(below) > 1 else 0
            heapq.heappush(frontier, (cost - below[row][0], len(nodes), slot + 1, row, 0))
    return Proposal(tuple(nodes), tuple(parents), tuple(chances))
