"""What a drafter is to an engine, and what one with weights is to a trainer.

Shape suffixes: A anchors, S slots, K drafts, T context tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self, runtime_checkable

import torch
from torch import nn

from paceline.core.sampling import Law
from paceline.core.types import Proposal
from paceline.drafter.config import NeuralConfig


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


@runtime_checkable
class Forkable(Protocol):
    """A drafter that can copy a context, so that what two prompts have in common is read once.

    Where it may be none, a prompt is read whole.
    """

    def fork(self, context: Any, length: int, capacity: int) -> Context | None:
        """Returns a new context that knows the first `length` tokens of another; leaves that one as it is.

        Args:
            context: of this drafter.
            length: at least 1, at most the context's own.
            capacity: of the new one.

        Returns:
            The context; `None` where what drafting behind those tokens takes is gone.
        """


class Heads(Protocol):
    """The target's embedding and head, borrowed."""

    @property
    def embed(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """Token ids (…) → embeddings (…, D)."""

    @property
    def lm_head(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """Normed hidden states (…, D) → logits (…, V)."""

    @property
    def embed_weight(self) -> torch.Tensor:
        """The embedding's matrix (V, D)."""

    @property
    def head_weight(self) -> torch.Tensor:
        """The head's matrix (V, D)."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """Anchors of one document, for training.

    Args:
        hidden: (T, taps · D) tapped hidden states of the document's first T tokens; T is the last anchor's position.
        token_ids: (T,) those tokens.
        anchors: (A,) positions of anchors, ascending, each at most T.
        block_ids: (A, S) true tokens of the blocks' slots, the anchor's first; any token beyond the document's end.
    """

    hidden: torch.Tensor
    token_ids: torch.Tensor
    anchors: torch.Tensor
    block_ids: torch.Tensor


class NeuralDrafter(nn.Module, ABC):
    """A drafter with weights: bound to a target it is a `Drafter`; a trainer runs it over blocks of documents.

    Drafting and `forward_blocks` are one function of the same weights: what a slot says behind an anchor is the same
    by either way (tests/test_drafter.py).
    """

    config: NeuralConfig
    _learned_ids: torch.Tensor | None = None

    @property
    def block_size(self) -> int:
        """Slots of a block, anchor included."""
        return self.config.block_size

    @property
    def target_layer_ids(self) -> tuple[int, ...]:
        """Tapped decoder layers of the target (0-based outputs)."""
        return self.config.target_layer_ids

    @property
    @abstractmethod
    def is_causal(self) -> bool:
        """Whether a slot sees only slots before it, so that a shorter block says the same about its slots."""

    @abstractmethod
    def bind(self, heads: Heads, token_ids: torch.Tensor | None = None) -> Self:
        """Borrows what it needs of the target and prepacks the weights for inference. Mutates: self.

        Args:
            token_ids: (V',) the only tokens to draft; `None` drafts any token that the drafter knows.

        Raises:
            IncompatiblePairError: the target is of another size.
        """

    @abstractmethod
    def open(self, capacity: int) -> Any:
        """Returns an empty context with room for `capacity` tokens."""

    @abstractmethod
    def inject(
        self, contexts: Sequence[Any], hidden: Sequence[torch.Tensor], tokens: Sequence[Sequence[int]]
    ) -> None:
        """See `Drafter.inject`."""

    @abstractmethod
    def draft(
        self,
        anchors: Sequence[int],
        contexts: Sequence[Any],
        num_draft_tokens: int,
        laws: Sequence[Law] | None = None,
    ) -> list[Proposal]:
        """Returns a chain of `num_draft_tokens` best guesses behind each anchor. Leaves contexts as they are."""

    @abstractmethod
    def draft_trees(
        self,
        anchors: Sequence[int],
        contexts: Sequence[Any],
        num_nodes: int,
        laws: Sequence[Law] | None = None,
    ) -> list[Proposal]:
        """Returns a tree of the `num_nodes` likeliest paths behind each anchor. Leaves contexts as they are."""

    @property
    def learned_ids(self) -> torch.Tensor | None:
        """The tokens that it has learned to draft, (V',) ascending; `None` where nothing limits it."""
        return self._learned_ids

    def recall(self, token_ids: torch.Tensor | None) -> None:
        """Notes which tokens it has learned to draft, where its weights do not say. Mutates: self."""
        self._learned_ids = token_ids

    def start(self, head_VD: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Tells a drafter, once before training, which tokens it shall learn. Mutates: what it owns of them.

        Nothing here: the target's head, borrowed, can score any.

        Args:
            head_VD: the target's head.
            token_ids: (V',) ascending.

        Raises:
            ConfigError: a drafter with a head of its own has learned others.
        """
        return

    @abstractmethod
    def forward_blocks(
        self, documents: Sequence[Blocks], embed_VD: torch.Tensor, num_slots: int | None = None
    ) -> torch.Tensor:
        """Returns states (A, K, D) at drafted slots of all blocks, ready for the head. Differentiable.

        Args:
            documents: blocks by document; blocks see their own document's context strictly before their anchor.
            embed_VD: the target's embedding.
            num_slots: slots per block, at most `block_size`; shorter blocks are the same function only where
                `is_causal`.
        """

    @abstractmethod
    def head(self, head_VD: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """Returns the rows (V', D) that score `token_ids` (V',): of the target's frozen head, or of the drafter's own.

        Args:
            head_VD: the target's head.
            token_ids: ascending.
        """
