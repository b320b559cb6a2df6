"""Intervals hold their level from three blocks on, and say nothing where there is nothing to say."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np
import pytest
from scipy import stats

from paceline.bench.numbers.intervals import (
    Clusters,
    Floats,
    Ints,
    bootstrap_interval,
    cluster,
    crossing,
    falling,
    mean_interval,
    percentile_interval,
    ratio_interval,
    share_interval,
    sums,
)
from paceline.bench.numbers.summary import Interval

NUM_RUNS = 1500
BLOCKS = (3, 6, 12)
LOADS = np.array([1.0, 2.0, 4.0, 8.0, 16.0])


def of_blocks(*sizes: int) -> Clusters:
    """Returns the clusters of blocks of those sizes, each request measured once."""
    blocks = np.repeat(np.arange(len(sizes)), sizes)
    return cluster(blocks, np.arange(len(blocks)))


def mean_plus_one_ratio(totals: Floats) -> Floats:
    ratio: Floats = 1.0 + totals[..., 0] / totals[..., 1]
    return ratio


def coverage(
    truth: float, measure: Callable[[np.random.Generator], Interval], num_runs: int = NUM_RUNS
) -> float:
    """Returns how often an interval holds the truth."""
    rng = np.random.default_rng(7)
    found = [measure(rng) for _ in range(num_runs)]
    assert all(interval.low <= interval.estimate <= interval.high for interval in found)
    return float(np.mean([interval.low <= truth <= interval.high for interval in found]))


def scattered(rng: np.random.Generator, clusters: Clusters, block_sd: float, request_sd: float) -> Floats:
    """Returns normal values of mean 0 with an effect of each block."""
    effects: Floats = block_sd * rng.normal(size=clusters.num)[clusters.ids]
    return effects + request_sd * rng.normal(size=len(clusters.ids))


# Coverage ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_blocks", BLOCKS)
@pytest.mark.parametrize(("block_sd", "request_sd"), [(0.05, 0.05), (0.0, 0.1)])
def test_mean_ratio_covers(num_blocks: int, block_sd: float, request_sd: float) -> None:
    def measure(rng: np.random.Generator) -> Interval:
        clusters = of_blocks(*rng.integers(4, 9, num_blocks))  # failures leave blocks unequal
        return ratio_interval(math.log(1.5) + scattered(rng, clusters, block_sd, request_sd), clusters, 0.95)

    assert 0.93 <= coverage(1.5, measure) <= 0.98


@pytest.mark.parametrize("num_blocks", BLOCKS)
def test_pooled_ratio_covers(num_blocks: int) -> None:
    """As τ: skewed requests of unequal numbers of steps, with an effect of each block."""

    def measure(rng: np.random.Generator) -> Interval:
        clusters = of_blocks(*[6] * num_blocks)
        num_steps = rng.integers(5, 60, len(clusters.ids)).astype(np.float64)
        accepted = 2.0 * num_steps * np.exp(scattered(rng, clusters, 0.1, 0.3) - (0.1**2 + 0.3**2) / 2.0)
        return bootstrap_interval(
            mean_plus_one_ratio, sums(clusters.ids, clusters.num, accepted, num_steps), 0.95
        )

    assert 0.93 <= coverage(3.0, measure) <= 0.98


@pytest.mark.parametrize("num_blocks", BLOCKS)
@pytest.mark.parametrize("share", [0.5, 0.9])
def test_percentile_and_share_cover_at_least(num_blocks: int, share: float) -> None:
    """Order statistics and exact bounds of few requests are wider than they need be; never narrower."""
    clusters = of_blocks(*[12] * num_blocks)
    truth = float(stats.norm.ppf(share, scale=math.hypot(0.1, 0.3)))

    def percentile(rng: np.random.Generator) -> Interval:
        return percentile_interval(scattered(rng, clusters, 0.1, 0.3), share, clusters, 0.95)

    def below(rng: np.random.Generator) -> Interval:
        values = (scattered(rng, clusters, 0.1, 0.3) <= truth).astype(np.float64)
        return share_interval(values, clusters, 0.95)

    assert coverage(truth, percentile, 400) >= 0.93
    assert coverage(share, below, 400) >= 0.93


def test_percentile_knows_that_repeated_passes_are_no_new_requests() -> None:
    """Each request is measured three times: requests alone would give a far too narrow interval."""
    requests = np.repeat(np.arange(90), 3)
    clusters = cluster(requests // 9, requests)

    def measure(rng: np.random.Generator) -> Interval:
        values: Floats = rng.normal(size=90)[requests] + 0.01 * rng.normal(size=270)
        return percentile_interval(values, 0.5, clusters, 0.95)

    assert clusters.num_requests == 90
    assert coverage(0.0, measure, 400) >= 0.93


def test_measuring_requests_again_narrows_nothing() -> None:
    """Blocks are nearly equal, so the scatter between them does not tell that half of the values are copies."""
    requests = np.arange(90)
    values = (requests % 9 * 10 + requests // 9).astype(np.float64)
    once = percentile_interval(values, 0.5, cluster(requests // 9, requests), 0.95)
    twice = np.repeat(requests, 2)
    assert percentile_interval(values[twice], 0.5, cluster(twice // 9, twice), 0.95) == once


@pytest.mark.parametrize("num_blocks", BLOCKS)
def test_crossing_and_its_paired_ratio_cover(num_blocks: int) -> None:
    """Shares over loads of two arms with the same block effects; the truth is the crossing of the mean curves."""
    levels = [np.array([0.99, 0.97, 0.88, 0.62, 0.3]), np.array([0.98, 0.9, 0.7, 0.4, 0.15])]
    size, ones = 24, np.ones((1, 5))
    truths = [math.exp(crossing(level[None], ones, LOADS, 0.8).estimate or 0.0) for level in levels]
    loads, ratios = [], []
    rng = np.random.default_rng(3)
    for _ in range(150):
        effects = 0.3 * (
            rng.integers(0, 2, (num_blocks, 1)) * 2.0 - 1.0
        )  # two-valued: the mean curve stays known
        found = []
        for level in levels:
            shares = np.clip(level * (1.0 - level), 0.0, 0.08) * effects + level
            met = rng.binomial(size, shares).astype(np.float64)
            found.append(crossing(met, np.full_like(met, size), LOADS, 0.8))
        loads.append(found[0].interval(0.95))
        ratios.append(found[1].ratio(found[0], 0.95))
    for intervals, truth in ((loads, truths[0]), (ratios, truths[1] / truths[0])):
        known = [interval for interval in intervals if interval is not None]
        assert len(known) > 145
        assert np.mean([interval.low <= truth <= interval.high for interval in known]) >= 0.92


def test_blocks_matter() -> None:
    """With effects of blocks, an interval that took requests for clusters would miss far too often."""

    def measure(rng: np.random.Generator) -> Interval:
        clusters = of_blocks(*[12] * 6)
        alone = Clusters(np.arange(72), 72, 72)
        return mean_interval(scattered(rng, clusters, 0.1, 0.1), alone, 0.95)

    assert coverage(0.0, measure, 300) < 0.7


# Known numbers -------------------------------------------------------------------------------------------------------


def test_mean_of_equal_blocks_is_the_t_interval_of_block_means() -> None:
    values = np.array([1.0, 3.0, 4.0, 6.0, 10.0, 12.0])
    found = mean_interval(values, of_blocks(2, 2, 2), 0.9)
    low, high = stats.t.interval(0.9, 2, loc=6.0, scale=np.std([2.0, 5.0, 11.0], ddof=1) / math.sqrt(3.0))
    assert (found.estimate, found.low, found.high) == pytest.approx((6.0, low, high))


def test_requests_weigh_the_same_whatever_their_block() -> None:
    assert mean_interval(np.array([1.0, 4.0, 4.0, 4.0]), of_blocks(1, 3), 0.95).estimate == pytest.approx(
        3.25
    )


def test_one_block_takes_its_requests_for_clusters() -> None:
    values = np.array([1.0, 2.0, 4.0])
    found = mean_interval(values, of_blocks(3), 0.95)
    low, high = stats.t.interval(0.95, 2, loc=7.0 / 3.0, scale=values.std(ddof=1) / math.sqrt(3.0))
    assert (found.low, found.high) == pytest.approx((low, high))
    again = cluster(np.zeros(6, dtype=np.int64), np.array([0, 0, 1, 1, 2, 2]))
    assert (again.num, again.num_requests) == (3, 3)


def test_one_request_says_nothing() -> None:
    clusters = of_blocks(1)
    assert ratio_interval(np.array([0.0]), clusters, 0.95) == Interval(1.0, 0.0, math.inf)
    assert mean_interval(np.array([2.0]), clusters, 0.95) == Interval(2.0, -math.inf, math.inf)
    assert percentile_interval(np.array([2.0]), 0.5, clusters, 0.95) == Interval(2.0, -math.inf, math.inf)
    assert bootstrap_interval(mean_plus_one_ratio, np.array([[2.0, 1.0]]), 0.95) == Interval(
        3.0, 0.0, math.inf
    )
    share = share_interval(np.array([1.0]), clusters, 0.95)
    assert share.low < 0.03 and share.high == 1.0


def test_bootstrap_is_deterministic_and_close_to_its_closed_form() -> None:
    rng = np.random.default_rng(0)
    totals = rng.uniform(1.0, 1.2, (8, 2))
    found = bootstrap_interval(lambda sums: sums[..., 0] / sums[..., 1], totals, 0.95)
    assert found == bootstrap_interval(lambda sums: sums[..., 0] / sums[..., 1], totals, 0.95)
    ratio = totals[:, 0].sum() / totals[:, 1].sum()
    residuals = (totals[:, 0] - ratio * totals[:, 1]) / totals[:, 1].mean() / ratio
    reach = stats.t.ppf(0.975, 7) * residuals.std(ddof=1) / math.sqrt(8.0)
    assert math.log(found.high / found.estimate) == pytest.approx(reach, rel=0.06)


def test_bootstrap_of_draws_without_a_value_has_no_ends() -> None:
    totals = np.array([[1.0, 1.0], [0.0, 1.0], [0.0, 1.0]])  # nothing in two of three blocks
    found = bootstrap_interval(lambda sums: sums[..., 0] / sums[..., 1], totals, 0.95)
    assert found == Interval(1.0 / 3.0, 0.0, math.inf)


def test_share_of_one_is_not_certain() -> None:
    clusters = of_blocks(*[10] * 12)
    found = share_interval(np.ones(120), clusters, 0.95)
    size = 120 * (stats.t.ppf(0.975, 119) / stats.t.ppf(0.975, 11)) ** 2
    assert (found.estimate, found.high) == (1.0, 1.0)
    assert found.low == pytest.approx(0.025 ** (1.0 / size))
    assert share_interval(np.zeros(120), clusters, 0.95).low == 0.0


def test_percentile_of_independent_values_lies_between_exact_ranks() -> None:
    """A hundred requests, a cluster each: the classic ranks 40 and 61 of the median."""
    order: Ints = np.random.default_rng(0).permutation(100)
    clusters = Clusters(np.arange(100), 100, 100)
    found = percentile_interval(order.astype(np.float64) + 1.0, 0.5, clusters, 0.95)
    assert (found.low, found.high) == (40.0, 61.0)


def test_p99_of_few_requests_has_no_upper_end() -> None:
    for size, is_open in ((300, True), (400, False)):
        clusters = Clusters(np.arange(size), size, size)
        found = percentile_interval(np.arange(size, dtype=np.float64), 0.99, clusters, 0.95)
        assert math.isinf(found.high) == is_open
        assert math.isfinite(found.low)


# Crossings -----------------------------------------------------------------------------------------------------------


def test_falling_is_isotonic_regression() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        counts = rng.integers(1, 9, 6).astype(np.float64)
        means = rng.uniform(0.0, 1.0, 6)
        (curve,) = falling((means * counts)[None], counts[None])
        assert (np.diff(curve) <= 1e-12).all()
        assert curve == pytest.approx(pool_adjacent(means, counts))


def pool_adjacent(means: Floats, weights: Floats) -> list[float]:
    """Returns the non-increasing fit by pooling neighbours, one after the other."""
    pools: list[tuple[float, float, int]] = []
    for mean, weight in zip(means, weights, strict=True):
        pool = (float(mean), float(weight), 1)
        while pools and pools[-1][0] < pool[0]:
            other, heavy, size = pools.pop()
            total = heavy + pool[1]
            pool = ((other * heavy + pool[0] * pool[1]) / total, total, size + pool[2])
        pools.append(pool)
    return [mean for mean, _, size in pools for _ in range(size)]


def test_crossing_is_straight_on_the_log_of_the_load() -> None:
    totals = np.array([[1.0, 1.0, 0.9, 0.7, 0.1]])
    at = crossing(totals, np.ones((1, 5)), LOADS, 0.8)
    assert at.estimate == pytest.approx(math.log(4.0 * math.sqrt(2.0)))
    assert not at.is_censored
    assert at.interval(0.95) == Interval(math.exp(at.estimate or 0.0), 0.0, math.inf)  # one cluster


def test_crossing_outside_the_loads_is_censored() -> None:
    ones = np.ones((3, 5))
    above = crossing(0.9 * ones, ones, LOADS, 0.8)
    assert above.is_censored
    found = above.interval(0.95)
    assert found is not None and dataclasses.astuple(found) == pytest.approx((16.0, 16.0, math.inf))
    below = crossing(0.7 * ones, ones, LOADS, 0.8)
    assert (below.estimate, below.interval(0.95), below.is_censored) == (None, None, False)
    assert above.ratio(below, 0.95) is None
    assert below.ratio(above, 0.95) is None


def test_crossing_near_the_last_load_has_no_upper_end() -> None:
    totals = np.array([[1.0, 1.0, 1.0, 0.9, 0.7], [1.0, 1.0, 1.0, 0.9, 0.9], [1.0, 1.0, 1.0, 0.9, 0.75]])
    found = crossing(totals, np.ones((3, 5)), LOADS, 0.8).interval(0.95)
    assert found is not None
    assert 8.0 < found.estimate < 16.0
    assert math.isinf(found.high)


def test_clusters_without_values_do_not_count() -> None:
    rng = np.random.default_rng(0)
    totals = np.clip(np.array([1.0, 0.95, 0.9, 0.7, 0.1]) + 0.02 * rng.normal(size=(4, 5)), 0.0, 1.0)
    alone = crossing(totals, np.ones((4, 5)), LOADS, 0.8)
    padded = crossing(np.pad(totals, ((0, 4), (0, 0))), np.pad(np.ones((4, 5)), ((0, 4), (0, 0))), LOADS, 0.8)
    assert padded.estimate == pytest.approx(alone.estimate or 0.0)
    assert padded.num_clusters == alone.num_clusters == 4
