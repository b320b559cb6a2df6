"""A block's per-slot distributions → a draft tree under a node budget.

A block drafter says for each slot which tokens are likely, but commits to one path only if asked to. The likeliest
paths under those (independent) distributions form a tree, and the target judges a tree in one pass as cheaply as a
chain of as many nodes.

Source: best-first growth as in DDTree (arXiv 2604.12989).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from paceline.core.types import Proposal


def grow(log_probs: Sequence[Sequence[float]], tokens: Sequence[Sequence[int]], num_nodes: int) -> Proposal:
    """Returns the tree of the `num_nodes` likeliest paths.

    Args:
        log_probs: by slot, descending within a slot.
        tokens: the tokens they belong to.
        num_nodes: nodes of the tree; fewer where the candidates run out.

    Nodes come in order of their path's probability, so parents precede children and any front part is the best
    smaller tree. Pure.
    """
    nodes: list[int] = []
    parents: list[int] = []
    frontier = [(-log_probs[0][0], 0, 0, 0)] if log_probs else []  # (cost of the path, parent, slot, rank)
    while frontier and len(nodes) < num_nodes:
        cost, parent, slot, rank = heapq.heappop(frontier)
        nodes.append(tokens[slot][rank])
        parents.append(parent)
        if rank + 1 < len(tokens[slot]):
            sibling = cost + log_probs[slot][rank] - log_probs[slot][rank + 1]
            heapq.heappush(frontier, (sibling, parent, slot, rank + 1))
        if slot + 1 < len(tokens):
            heapq.heappush(frontier, (cost - log_probs[slot + 1][0], len(nodes), slot + 1, 0))
    return Proposal(tuple(nodes), tuple(parents))
