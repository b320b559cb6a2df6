"""Break-even, frontiers, capacities and crossovers of curves that are known."""

from __future__ import annotations

import dataclasses
import math

import pytest

from paceline.bench.arms.base import Load
from paceline.bench.numbers.curves import break_even, capacities, crossovers, frontiers
from paceline.bench.numbers.metrics import summarise
from paceline.bench.numbers.summary import Acceptance, Capacity, Cell, Interval
from paceline.bench.numbers.table import Table, tabulate
from paceline.bench.runs.plan import LatencyTarget, Rules
from synthetic_runs import Scenario, make_run

CLOSED = tuple(Load(n) for n in (1, 2, 4, 8, 16))
QUIET = Scenario(block_noise=1e-3, request_noise=1e-3, pass_noise=1e-3, spread=1e-3, items_per_kind=4)


def exact(value: float) -> Interval:
    return Interval(value, value, value)


def cell(
    arm: str,
    size: int,
    *,
    user: float | None = None,
    whole: float | None = None,
    steps: tuple[tuple[int, int, float, float, float], ...] = (),
    length: float | None = None,
) -> Cell:
    return Cell(
        arm,
        Load(size),
        0.0,
        None,
        10,
        0,
        tokens_per_s=None if whole is None else exact(whole),
        tokens_per_s_per_user=None if user is None else exact(user),
        acceptance=None if length is None else Acceptance(exact(length), (), (), (), "requests"),
        steps=steps,
    )


def table(scenario: Scenario, latency: LatencyTarget | None = None) -> Table:
    return tabulate(make_run(scenario), latency or LatencyTarget())


# Break-even ----------------------------------------------------------------------------------------------------------


def test_break_even_by_hand() -> None:
    cells = (
        cell("plain", 1, steps=((1, 10, 20.0, 0.0, 19.0),)),
        cell("plain", 2, steps=((1, 30, 24.0, 0.0, 23.0), (2, 40, 25.0, 0.0, 24.0))),
        cell("fast", 1, steps=((1, 10, 40.0, 8.0, 30.0),), length=3.0),
        cell(
            "fast",
            2,
            steps=((1, 30, 44.0, 8.0, 34.0), (2, 4, 60.0, 10.0, 45.0), (3, 50, 9.0, 1.0, 8.0)),
            length=2.0,
        ),
    )
    (found,) = break_even(cells, "plain")  # 2: the arm made four steps only; 3: the baseline none
    assert (found.arm, found.num_sequences) == ("fast", 1)
    assert found.plain_ms == pytest.approx(23.0)
    assert (found.total_ms, found.draft_ms, found.verify_ms) == pytest.approx((43.0, 8.0, 33.0))
    assert (found.needed, found.needed_parts) == pytest.approx((43.0 / 23.0, 41.0 / 23.0))
    assert found.acceptance_length == pytest.approx(2.25)


def test_break_even_needs_to_know_the_acceptance() -> None:
    steps = ((1, 10, 20.0, 0.0, 19.0),)
    assert break_even((cell("plain", 1, steps=steps), cell("fast", 1, steps=steps)), "plain") == ()


def test_break_even_agrees_with_the_measured_ratio() -> None:
    """Time a token is step time over τ, so τ / needed is the speed-up where nothing else costs time."""
    summary = summarise(make_run(dataclasses.replace(QUIET, ratios={"plain": 1.0, "dflash": 1.5})), Rules())
    (found,) = summary.break_even
    assert found.acceptance_length / found.needed == pytest.approx(
        1.5, rel=0.05
    )  # the last step of an answer is cut


# Frontiers -----------------------------------------------------------------------------------------------------------


def test_frontier_interpolates_between_points() -> None:
    cells = (
        cell("plain", 1, user=50.0, whole=50.0),
        cell("plain", 8, user=30.0, whole=250.0),
        cell("fast", 1, user=80.0, whole=80.0),
        cell("fast", 8, user=40.0, whole=300.0),
        cell("fast", 16, user=20.0, whole=320.0),
    )
    base, found = frontiers(cells, "plain")
    assert (base.at_equal_interactivity, base.at_equal_throughput) == (None, None)
    assert found.points == (
        ("1 at once", 80.0, 80.0),
        ("8 at once", 40.0, 300.0),
        ("16 at once", 20.0, 320.0),
    )
    gain, at = found.at_equal_interactivity or (0.0, 0.0)
    assert (gain, at) == pytest.approx(((300.0 - 10.0 * 220.0 / 40.0) / 50.0, 50.0))
    gain, at = found.at_equal_throughput or (0.0, 0.0)
    shared = {80.0: 80.0 / 47.0, 250.0: (40.0 + 40.0 * 50.0 / 220.0) / 30.0}
    assert at == max(shared, key=lambda x: shared[x])
    assert gain == pytest.approx(shared[at])


def test_frontiers_without_a_shared_range_are_not_compared() -> None:
    cells = (
        cell("plain", 1, user=50.0, whole=50.0),
        cell("plain", 8, user=30.0, whole=200.0),
        cell("fast", 1, user=100.0, whole=300.0),
        cell("fast", 8, user=60.0, whole=500.0),
    )
    found = frontiers(cells, "plain")[1]
    assert (found.at_equal_interactivity, found.at_equal_throughput) == (None, None)


def test_frontier_passes_over_points_that_another_beats() -> None:
    beaten = cell("fast", 4, user=39.0, whole=90.0)
    cells = (
        cell("plain", 1, user=50.0, whole=50.0),
        cell("plain", 8, user=30.0, whole=200.0),
        cell("fast", 1, user=50.0, whole=100.0),
        cell("fast", 8, user=40.0, whole=200.0),
    )
    without, having = frontiers(cells, "plain")[1], frontiers((*cells, beaten), "plain")[1]
    assert having.at_equal_interactivity == without.at_equal_interactivity
    assert having.at_equal_throughput == without.at_equal_throughput
    assert len(having.points) == 3


def test_points_that_are_not_known_are_left_out() -> None:
    assert frontiers((cell("plain", 1, user=50.0),), "plain") == ()


# Capacities ----------------------------------------------------------------------------------------------------------


def capacity(found: tuple[Capacity, ...], arm: str) -> Capacity:
    (one,) = [c for c in found if c.arm == arm]
    return one


def test_capacity_of_quiet_arms_lies_where_the_latency_is_missed() -> None:
    """All or nothing at each load: the share falls from 1 to 0 between two loads, straight on the log."""
    latency = LatencyTarget(tpot_s=1.0 / 40.0)  # far from the speeds at all loads, 38.6 and 42.1 the closest
    scenario = dataclasses.replace(QUIET, ratios={"plain": 1.0, "dflash": 1.2}, loads=CLOSED)
    found = capacities(table(scenario, latency), "plain", Rules(latency=latency))
    for arm, last in (("plain", 4.0), ("dflash", 8.0)):
        one = capacity(found, arm)
        assert one.load is not None and not one.is_censored and one.unit == "at once"
        assert one.load.estimate == pytest.approx(last * 2.0**0.05)  # of the way to the next, 5 % miss
    ratio = capacity(found, "dflash").ratio
    assert ratio is not None and ratio.estimate == pytest.approx(2.0)
    assert capacity(found, "plain").ratio is None


def test_good_tokens_are_those_at_the_capacity() -> None:
    latency = LatencyTarget(tpot_s=1.0 / 40.0)
    run = make_run(dataclasses.replace(QUIET, loads=CLOSED))
    summary = summarise(run, Rules(latency=latency))
    speeds = {
        c.load.concurrency: c.tokens_per_s.estimate
        for c in summary.cells
        if (c.arm, c.kind) == ("plain", None) and c.tokens_per_s is not None
    }
    assert capacity(summary.capacities, "plain").good_tokens_per_s == pytest.approx(
        0.95 * speeds[4]
    )  # 8: none good


def test_capacity_is_censored_on_either_side() -> None:
    latency = LatencyTarget(tpot_s=1.0 / 50.0)
    scenario = dataclasses.replace(
        QUIET,
        ratios={"plain": 1.0, "fast": 9.0, "slow": 0.1},
        loads=tuple(Load(rate_per_s=r) for r in (1.0, 2.0, 8.0)),
    )
    found = capacities(table(scenario, latency), "plain", Rules(latency=latency))
    fast, slow = capacity(found, "fast"), capacity(found, "slow")
    assert fast.is_censored and fast.load is not None
    assert (fast.load.estimate, fast.load.high, fast.unit) == (8.0, math.inf, "requests/s")
    assert (slow.load, slow.is_censored, slow.good_tokens_per_s) == (None, False, None)
    assert fast.ratio is None and slow.ratio is None
    assert {c.arm for c in found} == {"plain", "fast", "slow"}  # without the control


def test_capacity_with_scatter_holds_the_truth() -> None:
    """Latencies scatter by 30 %: half of the answers are good where the median answer is."""
    latency = LatencyTarget(tpot_s=1.0 / 50.0, attainment=0.5)
    scenario = Scenario({"plain": 1.0, "dflash": 1.5}, loads=CLOSED, num_blocks=8, items_per_kind=8)
    found = capacities(table(scenario, latency), "plain", Rules(latency=latency))
    for arm, ratio in (("plain", 1.0), ("dflash", 1.5)):
        truth = 1.0 + 16.0 * (ratio * 1.0 / 0.9 - 1.0)  # where the median request has 50 tokens per second
        load = capacity(found, arm).load
        assert load is not None
        assert load.low < truth < load.high
        assert load.high / load.low < 4.0


def test_failures_end_the_capacity_too() -> None:
    latency = LatencyTarget(e2e_s=1000.0, attainment=0.9)
    scenario = dataclasses.replace(QUIET, loads=CLOSED, failures={"dflash": 0.5})
    found = capacities(table(scenario, latency), "plain", Rules(latency=latency))
    assert capacity(found, "plain").is_censored
    assert capacity(found, "dflash").load is None


def test_without_a_target_there_is_no_capacity() -> None:
    assert summarise(make_run(dataclasses.replace(QUIET, loads=CLOSED)), Rules()).capacities == ()


# Crossovers ----------------------------------------------------------------------------------------------------------


def fading(kind: str, load: Load) -> float:
    """Returns a ratio that falls through 1 at 5.66 at once."""
    return math.exp(0.5 * math.log(4.0 * math.sqrt(2.0) / (load.concurrency or 1)))


def test_crossover_is_found_with_its_interval() -> None:
    scenario = Scenario({"plain": 1.0, "fading": fading, "better": 1.3, "worse": 0.8}, loads=CLOSED)
    ((arm, temperature, at),) = crossovers(table(scenario), "plain", 0.95)
    assert (arm, temperature) == ("fading", 0.0)
    assert at.estimate == pytest.approx(4.0 * math.sqrt(2.0), rel=0.1)
    assert at.low < 4.0 * math.sqrt(2.0) < at.high < 8.0


def test_crossover_needs_the_baseline_at_the_load() -> None:
    """The arm falls below 1 at loads that the baseline never ran: nothing is known of them."""
    run = make_run(Scenario({"plain": 1.0, "fading": fading}, loads=CLOSED))
    rows = tuple(
        row for row in run.rows if row.place.arm != "plain" or (row.place.load.concurrency or 0) <= 4
    )
    assert crossovers(tabulate(dataclasses.replace(run, rows=rows), LatencyTarget()), "plain", 0.95) == ()


def test_rates_and_replays_have_no_crossover() -> None:
    loads = (Load(rate_per_s=1.0), Load(rate_per_s=8.0))
    falling = Scenario(
        {"plain": 1.0, "fading": lambda _, load: 2.0 if load.rate_per_s == 1.0 else 0.5}, loads=loads
    )
    assert crossovers(table(falling), "plain", 0.95) == ()
