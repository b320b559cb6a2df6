"""The statistics of exactness: bounds on rates, three tests of a law, their power, and Holm's correction. Pure.

All tests are teacher-forced. Token x_t was emitted behind a known text, so its law p_t is known, and under exactness

- its surprise −log p_t(x_t) has the mean and variance of p_t: the sum over a text is a martingale (`surprise`);
- its randomised rank is uniform (`uniformity`);
- it equals v_t, a token that was chosen before x_t was drawn, with probability p_t(v_t) (`directed`).

The first two see a law that is too sharp or too flat. The third sees drafts that leak into the text, which moves each
p_t towards one token and hardly changes the shape of the whole.

Source: teacher-forced martingale tests, with the draft as the direction; Clopper and Pearson (1934); Holm (1979).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import optimize, signal, stats

Floats = npt.NDArray[np.float64]

MAX_SKEWNESS = 1.0
"""Above this a sum is too far from its limit law for three moments to describe it."""


# Rates ---------------------------------------------------------------------------------------------------------------


def rule_of_three(num_trials: int) -> float:
    """Returns the bound 3/N at 95 % on a rate that showed no case in N ≥ 0 trials."""
    return min(1.0, 3.0 / num_trials) if num_trials else 1.0


def upper_bound(num_cases: int, num_trials: int, confidence: float = 0.95) -> float:
    """Returns the exact one-sided upper bound on a rate; without cases it is a little below `rule_of_three`."""
    if num_cases >= num_trials:
        return 1.0
    return float(stats.beta.ppf(confidence, num_cases + 1, num_trials - num_cases))


def binomial_bounds(num_cases: int, num_trials: int, confidence: float = 0.95) -> tuple[float, float]:
    """Returns the exact two-sided (Clopper–Pearson) bounds on a rate."""
    if num_trials == 0:
        return 0.0, 1.0
    interval = stats.binomtest(num_cases, num_trials).proportion_ci(confidence, method="exact")
    return float(interval.low), float(interval.high)


# Tests of a law ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Moments:
    """Sums over positions of the first three central moments of the surprise, and the surprise that was seen."""

    num_positions: int
    observed: float
    expected: float
    variance: float
    third: float

    @property
    def z(self) -> float:
        """Deviation in standard deviations, 0 where nothing can deviate."""
        return (self.observed - self.expected) / math.sqrt(self.variance) if self.variance > 0 else 0.0

    @property
    def skewness(self) -> float:
        """Skewness of the sum."""
        return self.third / self.variance**1.5 if self.variance > 0 else math.inf


def surprise(moments: Moments) -> float | None:
    """Returns the two-sided p-value of the surprise z, `None` where the sum is too skewed to say.

    The tail is that of the gamma family with the sum's own skewness (Pearson III), since rare tokens make sums of
    surprises lean to the right long after their variance looks normal.
    """
    if moments.skewness > MAX_SKEWNESS:
        return None
    law = stats.pearson3(moments.skewness)
    return min(1.0, 2.0 * float(min(law.cdf(moments.z), law.sf(moments.z))))


def uniformity(transforms: Floats) -> tuple[float, float]:
    """Returns the Kolmogorov–Smirnov statistic and p-value of numbers that should be uniform on (0, 1)."""
    found = stats.kstest(transforms, "uniform")
    return float(found.statistic), float(found.pvalue)


def difference(z: float, control_z: float) -> float:
    """Returns the two-sided p-value of the difference of two independent z of the same bias."""
    return float(2.0 * stats.norm.sf(abs(z - control_z) / math.sqrt(2.0)))


@dataclass(frozen=True, slots=True)
class Directed:
    """How often the text is the draft's favourite.

    Args:
        num_positions, num_hits, num_expected: positions with a favourite; where it came; where it should have come.
        z: the excess in standard deviations.
        p_value: two-sided, from the exact law of the number of hits (mid-p).
    """

    num_positions: int
    num_hits: int
    num_expected: float
    z: float
    p_value: float


def directed(hits: npt.NDArray[np.bool_], probs: Floats) -> Directed:
    """Returns the directed score.

    Args:
        hits: whether the token was the favourite, by position.
        probs: the probability of the favourite under the target's law.
    """
    num_hits, law = int(hits.sum()), hit_law(probs)
    variance = float((probs * (1.0 - probs)).sum())
    excess = num_hits - float(probs.sum())
    below, above = float(law[:num_hits].sum()), float(law[num_hits + 1 :].sum())
    p_value = min(1.0, 2.0 * min(below, above) + float(law[num_hits]))
    z = excess / math.sqrt(variance) if variance > 0 else 0.0
    return Directed(len(probs), num_hits, float(probs.sum()), z, p_value)


def hit_law(probs: Floats) -> Floats:
    """Returns the probabilities of 0…N hits in N trials of their own probabilities (Poisson binomial).

    A product of polynomials, pair by pair; `scipy.stats.poisson_binom` takes quadratic time.
    """
    laws = np.stack([1.0 - probs, probs], axis=1) if len(probs) else np.ones((1, 1))
    while len(laws) > 1:
        if len(laws) % 2:
            never = np.zeros((1, laws.shape[1]))
            never[0, 0] = 1.0
            laws = np.concatenate([laws, never])
        laws = signal.fftconvolve(laws[0::2], laws[1::2], axes=1)
    law: Floats = np.clip(laws[0, : len(probs) + 1], 0.0, None)
    return law


# Power of the directed score -----------------------------------------------------------------------------------------


def smallest_relaxation(probs: Floats, alpha: float, power: float = 0.8) -> float | None:
    """Returns the smallest relaxation that `directed` would find at this sample, `None` where it finds none.

    A relaxation r is the share of refused drafts that are accepted anyway: the favourite comes with p + r (1 − p).
    The count that is significant is exact; the law of the count under r is taken as normal.

    Args:
        probs: as for `directed`.
        alpha: two-sided level.
        power: with which it would be found.
    """
    law = hit_law(probs)
    tail = np.cumsum(law[::-1])[::-1] - law / 2.0  # mid-p of each count, upper side
    significant = np.flatnonzero(tail <= alpha / 2.0)
    if not len(significant):
        return None
    count = float(significant[0])
    refused = float((1.0 - probs).sum())

    def margin(r: float) -> float:
        spread = math.sqrt(max(0.0, _variance(probs, r)))
        return float(probs.sum() + r * refused - (count - 0.5) - stats.norm.ppf(power) * spread)

    return float(optimize.brentq(margin, 0.0, 1.0)) if margin(0.0) < 0.0 else 0.0


def positions_needed(probs: Floats, relaxation: float, alpha: float, power: float = 0.8) -> int | None:
    """Returns how many positions such as these `directed` needs to find a relaxation; `None` where none would do.

    Args:
        probs: favourites' probabilities of a sample of positions.
        relaxation, alpha, power: see `smallest_relaxation`.
    """
    shift = relaxation * float((1.0 - probs).mean())
    if shift <= 0.0:
        return None
    level = float(stats.norm.isf(alpha / 2.0))
    spread = level * math.sqrt(_variance(probs, 0.0) / len(probs))
    spread += float(stats.norm.ppf(power)) * math.sqrt(_variance(probs, relaxation) / len(probs))
    whole = 0.5 + (level**2 - 1.0) / 6.0  # counts are whole numbers, and rare ones lean to the right
    return math.ceil(((spread + math.sqrt(spread**2 + 4.0 * shift * whole)) / (2.0 * shift)) ** 2)


def _variance(probs: Floats, relaxation: float) -> float:
    """Returns the variance of the number of hits under a relaxation."""
    relaxed = probs + relaxation * (1.0 - probs)
    return float((relaxed * (1.0 - relaxed)).sum())


# Several tests -------------------------------------------------------------------------------------------------------


def holm(p_values: Sequence[float]) -> list[float]:
    """Returns p-values corrected for their number, in the given order: reject where one is at most alpha."""
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = largest
    return adjusted
