"""Drafting trees: a drafter's likeliest paths instead of one chain.

The text cannot change: whatever was drafted, the token said at each node is the target's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from paceline.core.errors import ConfigError
from paceline.core.sampling import Law
from paceline.core.types import Proposal
from paceline.drafter.base import Context, Forkable, NeuralDrafter


class TreeDrafter:
    """Drafts trees with a drafter that can.

    Args:
        drafter: who says what is likely.
        num_nodes: nodes of a tree, at least 1; a step then verifies `num_nodes` + 1 rows.
    """

    def __init__(self, drafter: NeuralDrafter, num_nodes: int) -> None:
        if not 1 <= num_nodes <= 1024:
            raise ConfigError(f"num_nodes: expected 1…1024, got {num_nodes}")
        self.drafter, self.num_nodes = drafter, num_nodes

    @property
    def block_size(self) -> int:
        """Rows of a step, anchor included."""
        return self.num_nodes + 1

    @property
    def target_layer_ids(self) -> tuple[int, ...]:
        """The inner drafter's."""
        return self.drafter.target_layer_ids

    def open(self, capacity: int) -> Context:
        """Returns the inner drafter's context."""
        context: Context = self.drafter.open(capacity)
        return context

    def fork(self, context: Any, length: int, capacity: int) -> Context | None:
        """Returns a copy of the inner drafter's context, if it can make one (see `Forkable`)."""
        return self.drafter.fork(context, length, capacity) if isinstance(self.drafter, Forkable) else None

    def inject(
        self, contexts: Sequence[Any], hidden: Sequence[torch.Tensor], tokens: Sequence[Sequence[int]]
    ) -> None:
        """Extends each context. Mutates: the contexts."""
        self.drafter.inject(contexts, hidden, tokens)

    def draft(
        self,
        anchors: Sequence[int],
        contexts: Sequence[Any],
        num_draft_tokens: int,
        laws: Sequence[Law] | None = None,
    ) -> list[Proposal]:
        """Returns a tree of at most `num_draft_tokens` nodes behind each anchor."""
        return self.drafter.draft_trees(anchors, contexts, num_draft_tokens, laws)
