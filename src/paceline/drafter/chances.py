"""How likely a chain is to stand, as far as its drafter can tell: log-probabilities by slot → chances of paths.

A drafter copies its tokens to the host anyway; their log-probabilities travel in the same copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.core.tree import grow
from paceline.core.types import Proposal


def chosen_log_probs(log_probs: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Returns the log-probabilities (…) of the chosen columns of (…, V), in float64. Pure."""
    return log_probs.gather(-1, chosen[..., None]).squeeze(-1).double()


def likely_chain(log_probs: Sequence[float], tokens: Sequence[float]) -> Proposal:
    """Returns the chain of tokens with its chances: the tree of slots that have one candidate each. Pure.

    Args:
        log_probs: of each token behind the ones before it.
        tokens: whole numbers, a slot each.
    """
    return grow([[value] for value in log_probs], [[int(token)] for token in tokens], len(tokens))
