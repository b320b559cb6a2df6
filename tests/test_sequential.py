"""The level of each look, against published bounds and against counted errors."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from scipy import special

from paceline.bench.runs.plan import ArmSpec, Plan
from paceline.bench.verdicts.sequential import level, levels, spent


def test_levels_are_the_published_ones() -> None:
    """Five equal looks at one-sided 0.025, O'Brien–Fleming-like spending; Jennison and Turnbull's tables and others."""
    bounds = [-special.ndtri(p) for p in levels(5, 1, 0.025)]
    assert bounds == pytest.approx([4.877, 3.357, 2.680, 2.290, 2.031], abs=0.001)
    assert levels(7, 7, 0.01) == pytest.approx([0.01], rel=1e-4)
    assert spent(1.0, 0.02) == pytest.approx(0.02)


def test_looking_again_does_not_add_up_errors() -> None:
    """Means of normal blocks on the boundary itself: how often a look calls them faster, with Student's t."""
    num_blocks, first, alpha = 12, 3, 0.025
    plan = Plan((ArmSpec("plain", "plain"),), num_blocks=num_blocks, min_blocks=first)
    values = np.random.default_rng(0).normal(size=(40_000, num_blocks))
    at_once, spending = np.zeros(len(values), bool), np.zeros(len(values), bool)
    for n in range(first, num_blocks + 1):
        seen = values[:, :n]
        t = seen.mean(axis=1) / seen.std(axis=1, ddof=1) * np.sqrt(n)
        at_once |= t > special.stdtrit(n - 1, 1.0 - alpha)
        spending |= t > special.stdtrit(n - 1, 1.0 - level(plan, n, alpha))
    assert at_once.mean() > 2.5 * alpha
    assert spending.mean() < 1.04 * alpha


def test_a_plan_that_does_not_stop_keeps_its_whole_level() -> None:
    plan = Plan((ArmSpec("plain", "plain"),), num_blocks=6, min_blocks=3)
    assert level(dataclasses.replace(plan, stops_early=False), 4, 0.02) == 0.02
    assert level(dataclasses.replace(plan, min_blocks=6), 6, 0.02) == 0.02
    looks = [level(plan, n, 0.02) for n in range(3, 7)]
    assert looks == sorted(looks)
    assert looks[-1] < 0.02
    assert level(plan, 2, 0.02) < looks[0]
