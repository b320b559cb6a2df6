"""How sure a look must be, so that looking after every block errs no more often than one look at the end. Pure.

Who looks at a 95 % interval after each of many blocks and stops when it is clear is wrong far more often than in 5 % of
runs. So each look gets a level of its own: by the time a share t of the planned blocks is in, an error of
2 − 2 Φ(z(α/2) / √t) may have been spent. Early looks spend next to nothing, the last one keeps nearly all. That is
exact where the scatter of blocks is known. Here it is estimated, and levels are used with Student's t; that adds up to
a seventh to the error, so an eighth of it is not spent (`tests/test_decision.py` counts what comes of it).

Source: Lan and DeMets, Biometrika 70 (1983), the spending function that resembles O'Brien and Fleming's boundary; the
recursion of Armitage, McPherson and Rowe (JRSS A 132, 1969); levels in place of boundaries for t: Jennison and
Turnbull, Group Sequential Methods (1999), §4.4.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from scipy import optimize, special

from paceline.bench.numbers.intervals import Floats
from paceline.bench.runs.plan import Plan

SPENT_WITH_T = 7 / 8
"""Share of the error that looks with Student's t may spend, so that with what t adds it is all of it."""

NUM_POINTS = 601
"""Of the grid on which the law of the sum is followed from look to look."""


def level(plan: Plan, num_blocks: int, alpha: float) -> float:
    """Returns the one-sided level of a look at so many blocks, `alpha` itself where the plan looks once only.

    Args:
        plan: its `num_blocks`, `min_blocks` and `stops_early` say which looks there are.
        num_blocks: that the run has, at least one.
        alpha: one-sided error of all looks together.
    """
    if not plan.stops_early or plan.min_blocks >= plan.num_blocks:
        return alpha
    num_blocks = min(num_blocks, plan.num_blocks)
    first = min(plan.min_blocks, num_blocks)
    return levels(plan.num_blocks, first, SPENT_WITH_T * alpha)[num_blocks - first]


@lru_cache(maxsize=256)
def levels(num_blocks: int, first: int, alpha: float) -> tuple[float, ...]:
    """Returns the one-sided level of each look, after blocks `first` … `num_blocks`; the last ones spend all."""
    times = [n / num_blocks for n in range(first, num_blocks + 1)]
    found: list[float] = []
    before, spent_before = 0.0, 0.0
    points, weights = np.zeros(1), np.ones(1)  # the sum of no block is 0
    for time in times:
        step = math.sqrt(time - before)
        to_spend = spent(time, alpha) - spent_before
        bound = _bound(points, weights, step, to_spend)
        found.append(float(special.ndtr(-bound / math.sqrt(time))))
        grid = np.linspace(min(-8.0 * math.sqrt(time), bound - step), bound, NUM_POINTS)
        density = (
            np.exp(-0.5 * ((grid[:, None] - points) / step) ** 2)
            @ weights
            / (step * math.sqrt(2.0 * math.pi))
        )
        density *= grid[1] - grid[0]
        density[[0, -1]] *= 0.5
        points, weights, before, spent_before = grid, density, time, spent_before + to_spend
    return tuple(found)


def spent(time: float, alpha: float) -> float:
    """Returns the one-sided error that may be spent up to a share of the blocks, 0 < time ≤ 1."""
    return float(2.0 * special.ndtr(special.ndtri(alpha / 2.0) / math.sqrt(time)))


def _bound(points: Floats, weights: Floats, step: float, to_spend: float) -> float:
    """Returns the bound that the next sum exceeds with the probability that is to be spent."""

    def excess(bound: float) -> float:
        return float(weights @ special.ndtr((points - bound) / step)) - to_spend

    high = float(points[-1]) + 1.0
    while excess(high) > 0.0:
        high += 1.0
    return float(optimize.brentq(excess, -10.0, high, xtol=1e-10))
