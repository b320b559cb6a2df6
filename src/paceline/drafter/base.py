"""The protocol of a drafter: open a context, inject what the target saw, draft behind an anchor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from paceline.core.sampling import Law
from paceline.core.types import Proposal


class Context(Protocol):
    """What a drafter remembers of one sequence."""

    @property
    def length(self) -> int:
        """Committed tokens that were injected."""


class Drafter(Protocol):
    """Guesses tokens behind an anchor; its guesses can change only the speed.

    `inject` and `draft` are given contexts that the same drafter opened, hence their open type.
    """

    @property
    def block_size(self) -> int:
        """Slots of a block, anchor included."""

    @property
    def target_layer_ids(self) -> tuple[int, ...]:
        """Decoder layers (0-based) whose outputs `inject` wants, in order."""

    def open(self, capacity: int) -> Context:
        """Returns an empty context with room for `capacity` tokens."""

    def inject(
        self, contexts: Sequence[Any], hidden: Sequence[torch.Tensor], tokens: Sequence[Sequence[int]]
    ) -> None:
        """Extends each context by committed rows. Mutates: the contexts.

        Args:
            contexts: to extend.
            hidden: for each its rows of tapped hidden states (rows, taps · D); (rows, 0) without taps.
            tokens: for each the ids of the tokens at these rows, as many as rows.
        """

    def draft(
        self,
        anchors: Sequence[int],
        contexts: Sequence[Any],
        num_draft_tokens: int,
        laws: Sequence[Law] | None = None,
    ) -> list[Proposal]:
        """Returns one proposal of at most `num_draft_tokens` tokens behind each anchor. Leaves contexts as they are.

        Args:
            laws: how each sequence's tokens are drawn; a drafter may use their noise to guess the drawn token
                (`Law.perturb`). `None` asks for the likeliest tokens.
        """
