"""Two drafters in one: what the text has said before is copied, and a drafter with weights guesses the rest.

Copies cost nothing and are nearly always right where a passage is said again (edited code, quotes, tables); where
nothing is said again there is no copy, and the other drafts as if it were alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.core.sampling import Law
from paceline.core.types import Proposal
from paceline.drafter.base import Context, Drafter, Forkable
from paceline.drafter.lookup import Places, PromptLookup


@dataclass(frozen=True, slots=True)
class Both:
    """What both drafters remember of one sequence.

    Args:
        places: of the lookup.
        context: of the other drafter.
    """

    places: Places
    context: Context

    @property
    def length(self) -> int:
        """See `Context`."""
        return self.places.length


class Combined:
    """Drafts by lookup behind each text whose end was said before, with another drafter behind the others.

    Args:
        lookup: how long an end must be is its `min_ngram`.
        drafter: any; it is asked only for the sequences that lookup has nothing for.
    """

    def __init__(self, lookup: PromptLookup, drafter: Drafter) -> None:
        self.lookup, self.drafter = lookup, drafter

    @property
    def block_size(self) -> int:
        """Rows of a step, anchor included: the larger of the two."""
        return max(self.lookup.block_size, self.drafter.block_size)

    @property
    def target_layer_ids(self) -> tuple[int, ...]:
        """The other drafter's; a lookup taps none."""
        return self.drafter.target_layer_ids

    def open(self, capacity: int) -> Both:
        """Returns empty contexts of both."""
        return Both(self.lookup.open(capacity), self.drafter.open(capacity))

    def fork(self, context: Both, length: int, capacity: int) -> Both | None:
        """Returns copies of both contexts, `None` where the other drafter can make none (see `Forkable`)."""
        if not isinstance(self.drafter, Forkable):
            return None
        forked = self.drafter.fork(context.context, length, capacity)
        return None if forked is None else Both(self.lookup.fork(context.places, length, capacity), forked)

    def inject(
        self, contexts: Sequence[Both], hidden: Sequence[torch.Tensor], tokens: Sequence[Sequence[int]]
    ) -> None:
        """Extends the contexts of both, whoever drafts next. Mutates: the contexts.

        What may fail comes first, so that they stay equally long.
        """
        self.drafter.inject([both.context for both in contexts], hidden, tokens)
        self.lookup.inject([both.places for both in contexts], hidden, tokens)

    def draft(
        self,
        anchors: Sequence[int],
        contexts: Sequence[Both],
        num_draft_tokens: int,
        laws: Sequence[Law] | None = None,
    ) -> list[Proposal]:
        """Returns a copy behind each anchor that ends what was said before, the other's proposal behind the rest.

        Each is asked for `num_draft_tokens`, or for as many as its own blocks have.
        """
        places = [both.places for both in contexts]
        proposals = self.lookup.draft(anchors, places, _within(self.lookup, num_draft_tokens))
        rest = [i for i, copy in enumerate(proposals) if not copy.tokens]
        if rest:
            guesses = self.drafter.draft(
                [anchors[i] for i in rest],
                [contexts[i].context for i in rest],
                _within(self.drafter, num_draft_tokens),
                None if laws is None else [laws[i] for i in rest],
            )
            for i, guess in zip(rest, guesses, strict=True):
                proposals[i] = guess
        return proposals


def sure_lookup(max_ngram: int = 5, min_ngram: int = 3, block_size: int = 8) -> PromptLookup:
    """Returns a lookup that speaks only where it is likely to be right, since it takes the other drafter's turn.

    Behind ends of three tokens about three copied tokens stand in edited code and two in chat, behind two about two and
    one, which a good drafter guesses by itself.
    """
    return PromptLookup(block_size, max_ngram, min_ngram)


def _within(drafter: Drafter, num_draft_tokens: int) -> int:
    return min(num_draft_tokens, drafter.block_size - 1)
