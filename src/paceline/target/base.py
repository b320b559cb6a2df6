"""The protocol every target obeys: open a session, verify rows, keep some of them.

A session holds the K/V of `length` committed tokens. `verify` runs rows behind them and leaves their K/V tentative;
`keep` makes a root-to-node path of those rows permanent and forgets the rest, which is the whole of rollback.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from paceline.core.types import Proposal


@dataclass(frozen=True, slots=True)
class TargetSpec:
    """What a drafter and an engine must know about a target.

    Args:
        name: how the user called it.
        architecture: the config's architecture class, such as `LlamaForCausalLM`.
        hidden_size, num_layers, vocab_size: sizes; vocab_size is the number of embedding rows.
        max_positions: longest context in tokens.
        eos_token_ids: ids that end a text.
        tokenizer_digest: sha256 of the tokenizer's vocabulary and merges, or "" where unknown.
    """

    name: str
    architecture: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    max_positions: int
    eos_token_ids: tuple[int, ...]
    tokenizer_digest: str = ""


@dataclass(frozen=True, slots=True)
class TargetHeads:
    """The target's frozen embedding and head, borrowed by a drafter and never registered as its parameters.

    Args:
        embed: token ids (…) → embeddings (…, D).
        lm_head: hidden states after the drafter's final norm (…, D) → logits (…, V), float32.
        embed_weight, head_weight: the raw matrices (V, D), for training and for reduced heads.
    """

    embed: Callable[[torch.Tensor], torch.Tensor]
    lm_head: Callable[[torch.Tensor], torch.Tensor]
    embed_weight: torch.Tensor
    head_weight: torch.Tensor


@dataclass(frozen=True, slots=True)
class VerifyRows:
    """One sequence's part of a verify pass: the anchor (or prompt tokens) and the drafts behind it.

    Row 0 is the first of `tokens`; with a proposal the rows are the anchor, then its nodes in order. `anchor_tokens`
    are a chain (one token in a step, many in prefill), `proposal` hangs on the last of them.
    """

    session: TargetSession
    anchor_tokens: Sequence[int]
    proposal: Proposal
    last_row_only: bool = False

    @property
    def num_rows(self) -> int:
        """Rows this part adds to the pass."""
        return len(self.anchor_tokens) + len(self.proposal.tokens)


@dataclass(frozen=True, slots=True)
class TargetOutput:
    """What a pass says about one sequence's rows.

    Args:
        logits: (rows, V) float32, or (1, V) for the last row when only that was asked for.
        hidden: (rows, taps · D) tapped hidden states in layer order, before any final norm; (rows, 0) without taps.
    """

    logits: torch.Tensor
    hidden: torch.Tensor


@runtime_checkable
class TargetSession(Protocol):
    """The target's K/V for one sequence."""

    @property
    def length(self) -> int:
        """Committed tokens whose K/V are held."""

    @property
    def capacity(self) -> int:
        """Most rows, committed and tentative, that fit."""

    def keep(self, rows: Sequence[int]) -> None:
        """Commits the K/V of `rows` (indices of the last pass, ascending, a path from row 0); drops the others."""

    def close(self) -> None:
        """Gives the K/V memory back; harmless when repeated."""


class Target(Protocol):
    """A frozen causal language model that answers for many tokens at once."""

    @property
    def spec(self) -> TargetSpec:
        """Sizes and names."""

    @property
    def heads(self) -> TargetHeads:
        """Embedding and head for a drafter."""

    @property
    def dtype(self) -> torch.dtype:
        """Arithmetic of weights and activations."""

    @property
    def device(self) -> torch.device:
        """Where weights and K/V live."""

    @property
    def max_part_rows(self) -> int | None:
        """Most rows of one sequence in a pass whose bits do not depend on how its tokens are cut; `None`: any."""

    def tap(self, layer_ids: Sequence[int]) -> None:
        """Asks for the outputs of these decoder layers (0-based) in every later `TargetOutput.hidden`."""

    def open(self, capacity: int) -> TargetSession:
        """Returns an empty session with room for `capacity` tokens.

        Raises:
            CapacityError: `capacity` above the target's `max_positions`, or no memory left.
        """

    def fork(self, session: Any, length: int, capacity: int) -> TargetSession | None:
        """Returns a new session that holds copies of the K/V of another's first `length` committed tokens.

        Args:
            session: of this target, open; left as it is.
            length: at most the session's own.
            capacity: of the new one.

        Returns:
            The session, or `None` where K/V of so few tokens cannot be told from those behind them.

        Raises:
            CapacityError: as for `open`.
        """

    def verify(self, batch: Sequence[VerifyRows]) -> list[TargetOutput]:
        """Runs one pass over all parts and returns their outputs in order.

        Each part's rows see its session's committed tokens and their own ancestors only. Mutates: the sessions'
        tentative K/V; an unkept earlier pass is overwritten.
        """
