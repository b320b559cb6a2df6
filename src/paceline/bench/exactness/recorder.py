"""A drafter that remembers what it drafted, and what its favourite was for each token of the text that came of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from paceline.core.sampling import Law
from paceline.core.types import Completion, Proposal
from paceline.drafter.base import Context, Drafter


@dataclass(frozen=True, slots=True)
class Block:
    """A proposal and the position of the first token it guesses."""

    position: int
    proposal: Proposal


@dataclass(slots=True, eq=False)
class RecordedContext:
    """The inner drafter's context with the blocks that were drafted from it."""

    inner: Context
    blocks: list[Block] = field(default_factory=list)

    @property
    def length(self) -> int:
        """See `Context`."""
        return self.inner.length


class RecordingDrafter:
    """Drafts what another drafter drafts, and remembers it.

    Args:
        inner: who drafts.
    """

    def __init__(self, inner: Drafter) -> None:
        self._inner = inner
        self.texts: list[list[Block]] = []  # in the order in which an engine admits its requests

    @property
    def block_size(self) -> int:
        """See `Drafter`."""
        return self._inner.block_size

    @property
    def target_layer_ids(self) -> tuple[int, ...]:
        """See `Drafter`."""
        return self._inner.target_layer_ids

    def open(self, capacity: int) -> RecordedContext:
        """Returns the inner drafter's context, numbered by admission."""
        context = RecordedContext(self._inner.open(capacity))
        self.texts.append(context.blocks)
        return context

    def inject(
        self, contexts: Sequence[Any], hidden: Sequence[torch.Tensor], tokens: Sequence[Sequence[int]]
    ) -> None:
        """See `Drafter`."""
        self._inner.inject([context.inner for context in contexts], hidden, tokens)

    def draft(
        self,
        anchors: Sequence[int],
        contexts: Sequence[Any],
        num_draft_tokens: int,
        laws: Sequence[Law] | None = None,
    ) -> list[Proposal]:
        """Returns the inner drafter's proposals. Mutates: the record."""
        proposals = self._inner.draft(anchors, [c.inner for c in contexts], num_draft_tokens, laws)
        for context, proposal in zip(contexts, proposals, strict=True):
            context.blocks.append(Block(context.length + 1, proposal))
        return proposals


def favourites(completion: Completion, blocks: Sequence[Block]) -> list[int | None]:
    """Returns the draft's favourite for each new token, `None` where none was drafted behind the text so far.

    A block is followed from its anchor along the tokens that were emitted, up to where the next block begins. At each
    node on the way the first child is the favourite; without a child the rest of the block says nothing. So whether a
    position has a favourite, and which, depends on earlier tokens only, as long as the drafter did not see the draws
    (`keyed_drafts=False`). Pure.
    """
    tokens, start = completion.prompt_ids + completion.token_ids, len(completion.prompt_ids)
    found: list[int | None] = [None] * len(completion.token_ids)
    for i, block in enumerate(blocks):
        end = blocks[i + 1].position if i + 1 < len(blocks) else len(tokens)
        row: int | None = 0
        for position in range(block.position, min(end, len(tokens))):
            children = [node for node, parent in enumerate(block.proposal.parents) if parent == row]
            if row is None or not children:
                break
            found[position - start] = block.proposal.tokens[children[0]]
            emitted = tokens[position]
            row = next((node + 1 for node in children if block.proposal.tokens[node] == emitted), None)
    return found
