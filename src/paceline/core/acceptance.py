"""Acceptance length and its relatives, one definition each, computed from step records or from training blocks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.core.types import StepRecord


def acceptance_length(steps: Sequence[StepRecord]) -> float | None:
    """Returns τ = mean(num_accepted + 1) over verify steps, pooled, before any cut by end or length.

    Plain decoding gives 1. `None` where there are no steps. Pure.
    """
    if not steps:
        return None
    return sum(step.num_accepted + 1 for step in steps) / len(steps)


def acceptance_rate(steps: Sequence[StepRecord]) -> list[float]:
    """Returns P(draft i accepted | drafts before i accepted) for each slot that was ever tried. Pure."""
    width = max((step.num_drafted for step in steps), default=0)
    rates = []
    for i in range(width):
        tried = [step for step in steps if step.num_drafted > i and step.num_accepted >= i]
        if not tried:
            break
        rates.append(sum(step.num_accepted > i for step in tried) / len(tried))
    return rates


def survival(steps: Sequence[StepRecord]) -> list[float]:
    """Returns P(draft i accepted) among steps that drafted it, unconditionally. Pure."""
    width = max((step.num_drafted for step in steps), default=0)
    drafted = [[step for step in steps if step.num_drafted > i] for i in range(width)]
    return [sum(step.num_accepted > i for step in group) / len(group) for i, group in enumerate(drafted)]


def accepted_prefix(correct: torch.Tensor) -> torch.Tensor:
    """Returns how many leading slots of each block are right: correct (B, K) bool → (B,) int64. Pure.

    Averaged and plus one this is the acceptance length a greedy chain would have had on those blocks.
    """
    return correct.long().cumprod(dim=-1).sum(dim=-1)
