"""Intervals of what a run measures. Pure; every draw comes from a generator with a fixed seed.

Requests of a block share drift, heat and one start of a server, and an item is measured more than once. So the unit of
chance is the **cluster**: a block, or the request where a run has one block only. Everything here estimates variance
between clusters and takes Student's t with clusters − 1 degrees of freedom, since a run has few of them. Requests are
not resampled within a block: their scatter is in the block's own total, and drawing them again would count it twice.

Source: linearised variance of ultimate clusters (Cochran, Sampling Techniques, 1977, §11); the cluster bootstrap that
resamples clusters only (Davison and Hinkley, Bootstrap Methods and their Application, 1997, §3.8); its small-sample
factor √(B/(B−1)) with t (Hesterberg, The American Statistician 69, 2015); exact bounds on the effective sample size
(Korn and Graubard, Survey Methodology 24, 1998); their inversion for percentiles (Woodruff, JASA 47, 1952).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from scipy import special

from paceline.bench.numbers.summary import Interval

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

NUM_DRAWS = 2000


@dataclass(frozen=True, slots=True)
class Clusters:
    """Which values belong together.

    Args:
        ids: (N,) cluster of each value, 0 … num − 1.
        num: clusters.
        num_requests: distinct requests behind the N values; fewer than N where requests were measured again.
    """

    ids: Ints
    num: int
    num_requests: int


def cluster(blocks: Ints, requests: Ints) -> Clusters:
    """Returns the clusters of values: their blocks, or their requests where there is a single block.

    Args:
        blocks, requests: (N,) of each value; a request belongs to one block.
    """
    num_requests = len(np.unique(requests))
    found, ids = np.unique(blocks, return_inverse=True)
    if len(found) <= 1:
        found, ids = np.unique(requests, return_inverse=True)
    return Clusters(ids, len(found), num_requests)


def sums(ids: Ints, num: int, *columns: Floats) -> Floats:
    """Returns the sum of each column by cluster: (num, columns), for values whose clusters are `ids`."""
    return np.stack([np.bincount(ids, column, num) for column in columns], axis=1).astype(np.float64)


def critical(num_clusters: int, confidence: float) -> float:
    """Returns Student's t for a two-sided interval from so many clusters, infinite for one."""
    return (
        float(special.stdtrit(num_clusters - 1, (1.0 + confidence) / 2.0)) if num_clusters > 1 else math.inf
    )


# Means and ratios ----------------------------------------------------------------------------------------------------


def mean_interval(values: Floats, clusters: Clusters, confidence: float) -> Interval:
    """Returns the mean over requests, each of equal weight, with Student's interval between clusters.

    With blocks of equal size it is the t-interval of the block means: exact for normal blocks, three of them included.
    Infinite ends with one cluster. At least one value.
    """
    mean = float(values.mean())
    reach = (
        critical(clusters.num, confidence) * _standard_error(values, clusters)
        if clusters.num > 1
        else math.inf
    )
    return Interval(mean, mean - reach, mean + reach)


def ratio_interval(log_ratios: Floats, clusters: Clusters, confidence: float) -> Interval:
    """Returns the geometric mean of paired ratios with its interval, from 0 to infinity with one cluster."""
    found = mean_interval(log_ratios, clusters, confidence)
    with np.errstate(over="ignore"):
        estimate, low, high = np.exp([found.estimate, found.low, found.high])
    return Interval(float(estimate), float(low), float(high))


def _standard_error(values: Floats, clusters: Clusters) -> float:
    """Returns the standard error of a mean from the totals of residuals by cluster; two clusters or more."""
    totals = sums(clusters.ids, clusters.num, values - values.mean())
    return math.sqrt(clusters.num / (clusters.num - 1) * float((totals**2).sum())) / len(values)


# Pooled statistics ---------------------------------------------------------------------------------------------------


@lru_cache(maxsize=16)
def _weights(num_clusters: int, seed: int) -> Floats:
    """Returns how often each cluster is in each draw: (draws, clusters)."""
    rng = np.random.default_rng(seed)
    return rng.multinomial(num_clusters, [1.0 / num_clusters] * num_clusters, size=NUM_DRAWS).astype(
        np.float64
    )


def bootstrap_interval(
    statistic: Callable[[Floats], Floats], totals: Floats, confidence: float, seed: int = 0
) -> Interval:
    """Returns a positive statistic of totals with an interval on its log scale: t × bootstrap standard error.

    From 0 to infinity with one cluster, or where many draws have no value.

    Percentile and BCa intervals were left: with three clusters no draw lies beyond the extreme clusters, so they
    cover about 75 % at best. This one keeps its level in simulation (`tests/test_intervals.py`).

    Args:
        statistic: (…, K) sums → (…); such as 1 + accepted / steps.
        totals: (clusters, K) sums of each cluster.
        confidence: of the interval.
        seed: of the draws; one seed pairs the draws of two statistics of the same clusters.
    """
    num = len(totals)
    estimate = float(statistic(totals.sum(axis=0)))
    if num < 2:
        return Interval(estimate, 0.0, math.inf)
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log(statistic(_weights(num, seed) @ totals))
    known = logs[np.isfinite(logs)]
    if 1.0 - len(known) / NUM_DRAWS > (1.0 - confidence) / 2.0:
        return Interval(estimate, 0.0, math.inf)
    reach = critical(num, confidence) * _spread(known, num)
    return Interval(estimate, estimate * math.exp(-reach), estimate * math.exp(min(reach, 700.0)))


def _spread(draws: Floats, num_clusters: int) -> float:
    """Returns the standard error that draws of clusters show, without the bias that few clusters have."""
    return float(draws.std()) * math.sqrt(num_clusters / (num_clusters - 1))


# Shares and percentiles ----------------------------------------------------------------------------------------------


def share_interval(values: Floats, clusters: Clusters, confidence: float) -> Interval:
    """Returns the mean of numbers within 0 … 1 with exact (Clopper–Pearson) bounds on the effective sample size.

    So a share of 1 has a lower end below 1, unlike a t-interval.
    """
    share = float(values.mean())
    size, tail = _effective_size(values, clusters, confidence), (1.0 - confidence) / 2.0
    low = float(special.betaincinv(share * size, (1.0 - share) * size + 1.0, tail)) if share > 0.0 else 0.0
    high = (
        float(special.betaincinv(share * size + 1.0, (1.0 - share) * size, 1.0 - tail))
        if share < 1.0
        else 1.0
    )
    return Interval(share, min(low, share), max(high, share))


def percentile_interval(values: Floats, share: float, clusters: Clusters, confidence: float) -> Interval:
    """Returns a percentile with an interval between order statistics, on the effective sample size.

    An end is infinite where so few values bound nothing: the 99th percentile of fewer than 368 has no upper end.

    Args:
        values: (N,), at least one.
        share: 0.5 for the median.
        clusters, confidence: of the values and the interval.
    """
    estimate = float(np.quantile(values, share))
    below = (values <= estimate).astype(np.float64)
    size = math.floor(_effective_size(below, clusters, confidence) + 1e-9)
    tail = (1.0 - confidence) / 2.0
    cumulative = (
        special.bdtr(np.arange(size), size, share) if size else np.empty(0)
    )  # P(at most k of size are below)
    lowest = int((cumulative <= tail).sum())  # rank of the lower end, 0 for none
    highest = int((cumulative < 1.0 - tail).sum()) + 1  # of the upper end, beyond size for none
    ordered = np.sort(values)
    low = ordered[math.ceil(lowest * len(values) / size) - 1] if lowest else -math.inf
    high = ordered[math.ceil(highest * len(values) / size) - 1] if size and highest <= size else math.inf
    return Interval(estimate, min(float(low), estimate), max(float(high), estimate))


def _effective_size(values: Floats, clusters: Clusters, confidence: float) -> float:
    """Returns how many independent values would know the mean of these 0 … 1 as well, at most the requests.

    The factor of the two t makes up for the design effect itself being known from few clusters only.
    """
    if clusters.num < 2:
        return 1.0
    share, size = float(values.mean()), float(clusters.num_requests)
    variance = share * (1.0 - share) / (len(values) - 1)  # of the mean, were all values independent
    if variance > 0.0:
        size = min(size, len(values) / max(1.0, _standard_error(values, clusters) ** 2 / variance))
    return size * (critical(clusters.num_requests, confidence) / critical(clusters.num, confidence)) ** 2


# Where a falling curve crosses a level -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Crossing:
    """The load at which a curve falls through a level, as natural logarithms, with its bootstrap draws.

    Args:
        estimate: log of the load; `None` where the curve is below the level at the lowest load.
        is_censored: whether it is still at or above the level at the highest; then `estimate` is that load.
        lowest, highest: loads that were run.
        draws: (draws,) clipped to the loads that were run; paired with those of other curves of the same clusters.
        share_below, share_above: of draws that were clipped.
        num_clusters: that have values.
    """

    estimate: float | None
    is_censored: bool
    lowest: float
    highest: float
    draws: Floats
    share_below: float
    share_above: float
    num_clusters: int

    def interval(self, confidence: float) -> Interval | None:
        """Returns the load with its interval; an end beyond the loads that were run is 0 or infinite."""
        if self.estimate is None:
            return None
        low, high = _ends(self.estimate, self.draws, self.num_clusters, confidence)
        tail = (1.0 - confidence) / 2.0
        low = -math.inf if low < math.log(self.lowest) or self.share_below > tail else low
        is_open = self.is_censored or self.share_above > tail or high > math.log(self.highest)
        estimate = self.highest if self.is_censored else math.exp(self.estimate)
        return Interval(estimate, min(math.exp(low), estimate), math.inf if is_open else math.exp(high))

    def ratio(self, other: Crossing, confidence: float) -> Interval | None:
        """Returns this load over another curve's, paired draw by draw; `None` where either is unknown or censored."""
        if self.estimate is None or other.estimate is None or self.is_censored or other.is_censored:
            return None
        log = self.estimate - other.estimate
        num = min(self.num_clusters, other.num_clusters)
        low, high = _ends(log, self.draws - other.draws, num, confidence)
        tail = (1.0 - confidence) / 2.0
        low = -math.inf if max(self.share_below, other.share_above) > tail else low
        high = math.inf if max(self.share_above, other.share_below) > tail else high
        return Interval(math.exp(log), math.exp(low), math.exp(high))


def _ends(estimate: float, draws: Floats, num_clusters: int, confidence: float) -> tuple[float, float]:
    """Returns estimate ∓ t × standard error, infinite with one cluster."""
    reach = (
        critical(num_clusters, confidence) * _spread(draws, num_clusters) if num_clusters > 1 else math.inf
    )
    return estimate - reach, estimate + reach


def crossing(totals: Floats, counts: Floats, loads: Floats, level: float, seed: int = 0) -> Crossing:
    """Returns where the mean, made non-increasing over loads, falls through a level; straight on the log of the load.

    The interval is that of the interpolated point; how the curve runs between two loads is not known.

    Args:
        totals, counts: (clusters, loads) sums and numbers of values; clusters without any keep draws paired.
        loads: (loads,) ascending, above 0.
        level: that is crossed; a mean at the level is not below it.
        seed: of the draws.
    """
    logs, num = np.log(loads), int((counts.sum(axis=1) > 0).sum())
    weights = _weights(len(totals), seed)
    weights = np.where(
        (weights @ counts).any(axis=1, keepdims=True), weights, 1.0
    )  # a draw without values is no draw
    curve = falling(totals.sum(axis=0)[None], counts.sum(axis=0)[None])
    curves = falling(weights @ totals, weights @ counts)
    (at,), (place,) = _crossed(curve, level), _interpolated(curve, logs, level)
    reached = _crossed(curves, level)
    return Crossing(
        estimate=float(place) if at else None,
        is_censored=bool(at == len(loads)),
        lowest=float(loads[0]),
        highest=float(loads[-1]),
        draws=_interpolated(curves, logs, level),
        share_below=float((reached == 0).mean()),
        share_above=float((reached == len(loads)).mean()),
        num_clusters=num,
    )


def falling(totals: Floats, counts: Floats) -> Floats:
    """Returns the non-increasing curves closest to means in weighted squares: (curves, loads).

    The min–max form of isotonic regression (Robertson, Wright and Dykstra, 1988, §1.4), all curves at once. Loads
    without values take part with no weight.
    """
    num = totals.shape[1]
    sums = np.cumsum(np.pad(totals, ((0, 0), (1, 0))), axis=1)
    sizes = np.cumsum(np.pad(counts, ((0, 0), (1, 0))), axis=1)
    size = sizes[:, None, 1:] - sizes[:, :num, None]  # (curves, from, to)
    with np.errstate(divide="ignore", invalid="ignore"):
        means = np.where(size > 0, (sums[:, None, 1:] - sums[:, :num, None]) / size, -np.inf)
    curves = np.full_like(totals, np.inf)
    for j in range(num):
        best = means[:, : j + 1, j:].max(axis=2)
        curves[:, j] = np.where(np.isfinite(best), best, np.inf).min(axis=1)
    return curves


def _crossed(curves: Floats, level: float) -> Ints:
    """Returns how many loads of each curve are at or above the level."""
    reached: Ints = (curves >= level - 1e-12).sum(axis=1)
    return reached


def _interpolated(curves: Floats, logs: Floats, level: float) -> Floats:
    """Returns the log load at which each curve is at the level, clipped to the loads that were run."""
    reached = _crossed(curves, level)
    left = np.clip(reached - 1, 0, max(0, len(logs) - 2))
    right = np.minimum(left + 1, len(logs) - 1)
    above, below = (np.take_along_axis(curves, at[:, None], axis=1)[:, 0] for at in (left, right))
    with np.errstate(divide="ignore", invalid="ignore"):
        share = np.clip((above - level) / (above - below), 0.0, 1.0)
    inside = logs[left] + share * (logs[right] - logs[left])
    return np.where(reached == 0, logs[0], np.where(reached == len(logs), logs[-1], inside))
