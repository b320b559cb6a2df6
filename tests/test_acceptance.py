"""Acceptance length, rate and survival, by hand and against each other."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.acceptance import acceptance_length, acceptance_rate, accepted_prefix, survival
from paceline.core.types import StepRecord


def records(*pairs: tuple[int, int]) -> list[StepRecord]:
    """Steps of (drafted, accepted)."""
    step = StepRecord(
        position=0, num_drafted=0, num_accepted=0, num_emitted=1, draft_s=0.0, verify_s=0.0, num_sequences=1
    )
    return [replace(step, num_drafted=drafted, num_accepted=accepted) for drafted, accepted in pairs]


def test_acceptance_by_hand() -> None:
    steps = records((3, 3), (3, 0), (3, 1), (2, 2), (0, 0))
    assert acceptance_length(steps) == (4 + 1 + 2 + 3 + 1) / 5
    assert acceptance_rate(steps) == [3 / 4, 2 / 3, 1 / 1]  # of those that got so far
    assert survival(steps) == [3 / 4, 2 / 4, 1 / 3]  # of those that drafted so far


def test_acceptance_of_nothing() -> None:
    assert acceptance_length([]) is None
    assert acceptance_length(records((0, 0), (0, 0))) == 1.0
    assert acceptance_rate([]) == survival([]) == []
    assert acceptance_rate(records((3, 0), (3, 0))) == [0.0]
    assert survival(records((3, 0))) == [0.0, 0.0, 0.0]


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=20))
def test_the_metrics_agree(accepted: list[int]) -> None:
    """τ = 1 + Σ survival, and survival = Π rate, when every step drafts as many."""
    steps = records(*((5, a) for a in accepted))
    tau, alive = acceptance_length(steps), 1.0
    assert tau == pytest.approx(1 + sum(survival(steps)))
    for rate, survived in zip(acceptance_rate(steps), survival(steps), strict=False):
        alive *= rate
        assert alive == pytest.approx(survived)
    correct = torch.arange(5) < torch.tensor(accepted)[:, None]
    assert accepted_prefix(correct).tolist() == accepted


def test_accepted_prefix_stops_at_the_first_fault() -> None:
    correct = torch.tensor([[1, 1, 0, 1], [0, 1, 1, 1], [1, 1, 1, 1]], dtype=torch.bool)
    assert accepted_prefix(correct).tolist() == [2, 0, 4]
