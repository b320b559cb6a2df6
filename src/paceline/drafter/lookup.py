"""Prompt lookup: drafts what followed when the text last said the same, with no weights at all.

    … the quick brown fox …  the quick | brown fox …
      ‾‾‾‾‾‾‾‾‾                ‾‾‾‾‾‾‾‾‾   ‾‾‾‾‾‾‾‾‾
      found here               the end     what is drafted

The longest end of the text that stands in it once more wins, and of its places the latest. What followed there is
copied; a copy that arrives at the end of the text goes on reading what it has just drafted, as LZ77 does, so that a
loop is drafted as a loop.

Source: A. Saxena, Prompt Lookup Decoding (2023), github.com/apoorvumang/prompt-lookup-decoding; `ngram` in vLLM,
`prompt_lookup_num_tokens` in transformers. Deviations: those take the earliest place, scan the text for it at each
step, and stop copying at the end of the text.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.core.errors import ConfigError
from paceline.core.sampling import Law
from paceline.core.types import EMPTY_PROPOSAL, Proposal


class Places:
    """The tokens of a text and where each of its n-grams was last followed by something.

    Args:
        max_ngram, min_ngram: lengths of the n-grams.
    """

    def __init__(self, max_ngram: int, min_ngram: int) -> None:
        self._max, self._min = max_ngram, min_ngram
        self._tokens: list[int] = []
        self._next: dict[tuple[int, ...], int] = {}  # n-gram → position behind its latest place

    @property
    def length(self) -> int:
        """See `Context`."""
        return len(self._tokens)

    def first(self, count: int) -> list[int]:
        """Returns the first tokens."""
        return self._tokens[:count]

    def append(self, tokens: Sequence[int]) -> None:
        """Adds tokens, each in a time that does not grow with the text. Mutates: self."""
        for token in tokens:
            self._tokens.append(token)
            for size in range(self._min, min(self._max, self.length) + 1):
                self._next[tuple(self._tokens[-size:])] = self.length

    def follow(self, anchor: int, num_tokens: int) -> list[int]:
        """Returns `num_tokens` tokens to draft behind the anchor, which follows the text; none without a match."""
        end = [*self._tokens[-self._max :], anchor]
        for size in range(min(self._max, len(end)), self._min - 1, -1):
            start = self._next.get(tuple(end[-size:]))
            if start is not None:
                known = [*self._tokens[start : start + num_tokens], anchor]
                period = self.length + 1 - start
                return [known[i % period] for i in range(num_tokens)]
        return []


class PromptLookup:
    """A drafter that copies from the text itself; it taps no layer and has no weights.

    Args:
        block_size: slots of a block, anchor included, at least 2.
        max_ngram, min_ngram: lengths of the ends that are looked up, longest first.

    Raises:
        ConfigError: a block without room for a draft, or lengths that are none.
    """

    target_layer_ids: tuple[int, ...] = ()

    def __init__(self, block_size: int = 8, max_ngram: int = 3, min_ngram: int = 1) -> None:
        if block_size < 2:
            raise ConfigError(f"block_size: expected at least 2 (an anchor and a draft), got {block_size}")
        if not 1 <= min_ngram <= max_ngram:
            raise ConfigError(
                f"min_ngram, max_ngram: expected 1 ≤ min ≤ max, got {min_ngram} and {max_ngram}"
            )
        self.block_size, self.max_ngram, self.min_ngram = block_size, max_ngram, min_ngram

    def open(self, capacity: int) -> Places:
        """Returns an empty text; it grows as it must, whatever the capacity."""
        return Places(self.max_ngram, self.min_ngram)

    def fork(self, context: Places, length: int, capacity: int) -> Places:
        """Returns a text that begins with the first `length` tokens of another; their places are found anew."""
        forked = self.open(capacity)
        forked.append(context.first(length))
        return forked

    def inject(
        self, contexts: Sequence[Places], hidden: Sequence[torch.Tensor], tokens: Sequence[Sequence[int]]
    ) -> None:
        """Extends each text by its tokens. Mutates: the contexts."""
        for context, ids in zip(contexts, tokens, strict=True):
            context.append(ids)

    def draft(
        self,
        anchors: Sequence[int],
        contexts: Sequence[Places],
        num_draft_tokens: int,
        laws: Sequence[Law] | None = None,
    ) -> list[Proposal]:
        """Returns a chain of `num_draft_tokens` copied tokens behind each anchor, or nothing where nothing matches.

        Args:
            laws: not looked at; a copy is no draw.
        """
        drafted = [c.follow(anchor, num_draft_tokens) for anchor, c in zip(anchors, contexts, strict=True)]
        return [Proposal.chain(tokens) if tokens else EMPTY_PROPOSAL for tokens in drafted]
