"""A block's per-slot distributions → a draft tree under a node budget.

A block drafter says for each slot which tokens are likely, but commits to one path only if asked to. The likeliest
paths under those (independent) distributions form a tree, and the target judges a tree in one pass as cheaply as a
chain of as many nodes. The text cannot change: whatever was drafted, the token said at each node is the target's.

Source: best-first growth as in DDTree (arXiv 2604.12989).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from paceline.core.errors import ConfigError
from paceline.core.sampling import Law
from paceline.core.types import Proposal
from paceline.drafter.base import Context, Drafter


class BlockDrafter(Drafter, Protocol):
    """A drafter that can say which tokens are likely at each slot."""

    @property
    def is_causal(self) -> bool:
        """Whether a slot sees only slots before it, so that a shorter block says the same about its slots."""

    def candidates(
        self,
        anchors: Sequence[int],
        contexts: Sequence[Any],
        num_draft_tokens: int,
        width: int,
        laws: Sequence[Law] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns log-probabilities and ids of each slot's `width` best guesses, both (N, K, width)."""


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


class TreeDrafter:
    """Drafts trees from a block drafter's distributions.

    Args:
        drafter: who says what is likely.
        num_nodes: nodes of a tree, at least 1; a step then verifies `num_nodes` + 1 rows.
    """

    def __init__(self, drafter: BlockDrafter, num_nodes: int) -> None:
        if not 1 <= num_nodes <= 1024:
            raise ConfigError(f"num_nodes: expected 1…1024, got {num_nodes}")
        self._drafter, self._num_nodes = drafter, num_nodes

    @property
    def block_size(self) -> int:
        """Rows of a step, anchor included."""
        return self._num_nodes + 1

    @property
    def target_layer_ids(self) -> tuple[int, ...]:
        """The inner drafter's."""
        return self._drafter.target_layer_ids

    def open(self, capacity: int) -> Context:
        """Returns the inner drafter's context."""
        return self._drafter.open(capacity)

    def inject(
        self, contexts: Sequence[Any], hidden: Sequence[torch.Tensor], tokens: Sequence[Sequence[int]]
    ) -> None:
        """Extends each context. Mutates: the contexts."""
        self._drafter.inject(contexts, hidden, tokens)

    def draft(
        self,
        anchors: Sequence[int],
        contexts: Sequence[Any],
        num_draft_tokens: int,
        laws: Sequence[Law] | None = None,
    ) -> list[Proposal]:
        """Returns a tree of at most `num_draft_tokens` nodes behind each anchor."""
        depth = self._drafter.block_size - 1
        if self._drafter.is_causal:
            depth = min(depth, num_draft_tokens)  # no tree is deeper than it has nodes
        width = min(16, num_draft_tokens)
        log_probs, tokens = self._drafter.candidates(anchors, contexts, depth, width, laws)
        packed = torch.stack([log_probs.double(), tokens.double()]).tolist()  # one copy to the host for both
        return [
            grow(costs, [[int(t) for t in slot] for slot in ids], num_draft_tokens)
            for costs, ids in zip(*packed, strict=True)
        ]
