"""Statistics of exactness: against other computations, at their nominal level, and with the power they claim."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

from paceline.bench.exactness import statistics
from paceline.bench.exactness.checks import Check, Report, judge
from paceline.bench.exactness.forcing import ROUNDING_STEPS, step_at
from paceline.bench.exactness.statistics import Floats, Moments

NUM_RUNS, NUM_POSITIONS = 400, 300


def nominal(p_values: list[float], alpha: float = 0.05) -> None:
    """Fails where p-values are not uniform, or the share at most alpha is not alpha."""
    assert stats.kstest(p_values, "uniform").pvalue > 0.01
    alarms = sum(p <= alpha for p in p_values)
    assert stats.binomtest(alarms, len(p_values), alpha).pvalue > 0.01, alarms


# Rates


def test_rule_of_three_bounds_the_exact_bound() -> None:
    assert statistics.rule_of_three(100_000) == 3e-5
    assert statistics.rule_of_three(0) == statistics.rule_of_three(2) == 1.0
    for num in (10, 1000, 100_000):
        exact = statistics.upper_bound(0, num)
        assert math.isclose(exact, 1 - 0.05 ** (1 / num), rel_tol=1e-9)
        assert 0.85 * statistics.rule_of_three(num) < exact < statistics.rule_of_three(num)


def test_exact_bounds_are_where_the_tails_are() -> None:
    low, high = statistics.binomial_bounds(3, 50)
    assert math.isclose(stats.binom.sf(2, 50, low), 0.025, rel_tol=1e-6)
    assert math.isclose(stats.binom.cdf(3, 50, high), 0.025, rel_tol=1e-6)
    assert math.isclose(stats.binom.cdf(3, 50, statistics.upper_bound(3, 50)), 0.05, rel_tol=1e-6)
    assert statistics.upper_bound(5, 5) == 1.0
    assert statistics.binomial_bounds(0, 0) == (0.0, 1.0)


def test_holm_by_hand() -> None:
    adjusted = statistics.holm([0.04, 0.001, 0.03, 0.2])
    assert adjusted == pytest.approx([0.09, 0.004, 0.09, 0.2])
    assert statistics.holm([0.9, 0.8]) == [1.0, 1.0]
    assert statistics.holm([]) == []


# The law of the number of hits


def test_hit_law_is_the_poisson_binomial() -> None:
    for num in (0, 1, 2, 7, 33):
        probs = np.random.default_rng(num).random(num)
        law = statistics.hit_law(probs)
        assert len(law) == num + 1
        if num:
            assert np.allclose(law, stats.poisson_binom.pmf(np.arange(num + 1), probs[:, None].T), atol=1e-12)


def test_directed_p_value_counts_both_tails() -> None:
    probs = np.full(20, 0.3)
    for num_hits in (0, 6, 12):
        hits = np.arange(20) < num_hits
        below, above = stats.binom.cdf(num_hits - 1, 20, 0.3), stats.binom.sf(num_hits, 20, 0.3)
        expected = min(1.0, 2 * min(below, above) + stats.binom.pmf(num_hits, 20, 0.3))
        found = statistics.directed(hits, probs)
        assert math.isclose(found.p_value, expected, rel_tol=1e-6)
        assert math.isclose(found.z, (num_hits - 6) / math.sqrt(4.2), rel_tol=1e-9, abs_tol=1e-9)


# Level


def moments_of(laws: Floats, tokens: np.typing.NDArray[np.int64]) -> Moments:
    surprise = -np.log(laws)
    entropy = (laws * surprise).sum(axis=1, keepdims=True)
    centred = surprise - entropy
    return Moments(
        len(tokens),
        float(surprise[np.arange(len(tokens)), tokens].sum()),
        float(entropy.sum()),
        float((laws * centred**2).sum()),
        float((laws * centred**3).sum()),
    )


def drawn_runs(peak: float) -> list[tuple[Floats, np.typing.NDArray[np.int64]]]:
    """Returns laws over 20 tokens and draws from them; a higher peak makes likely tokens likelier."""
    rng, runs = np.random.default_rng(3), []
    for _ in range(NUM_RUNS):
        laws = np.exp(peak * rng.standard_normal((NUM_POSITIONS, 20)))
        laws /= laws.sum(axis=1, keepdims=True)
        uniform = rng.random((NUM_POSITIONS, 1))
        runs.append((laws, (laws.cumsum(axis=1) < uniform).sum(axis=1).clip(max=19)))
    return runs


@pytest.mark.parametrize("peak", [1.0, 5.0])
def test_surprise_and_directed_hold_their_level(peak: float) -> None:
    runs = drawn_runs(peak)
    found = [statistics.surprise(moments_of(*run)) for run in runs]
    nominal([p for p in found if p is not None])
    assert sum(p is None for p in found) < NUM_RUNS / 10
    nominal(
        [statistics.directed(tokens == 0, laws[:, 0].copy()).p_value for laws, tokens in runs]
        if peak == 1.0
        else [
            statistics.directed(tokens == laws.argmax(1), laws.max(axis=1)).p_value for laws, tokens in runs
        ]
    )


def test_surprise_sees_a_flatter_law_and_says_when_it_cannot_see() -> None:
    laws, _ = drawn_runs(1.0)[0]
    rng = np.random.default_rng(0)
    p_value = statistics.surprise(moments_of(laws, rng.integers(0, 20, NUM_POSITIONS)))
    assert p_value is not None and p_value < 1e-6
    assert statistics.surprise(Moments(10, 0.0, 0.1, 0.01, 0.02)) is None
    assert statistics.surprise(Moments(10, 0.0, 0.0, 0.0, 0.0)) is None


def test_uniformity_and_difference_hold_their_level() -> None:
    rng = np.random.default_rng(1)
    nominal([statistics.uniformity(rng.random(200))[1] for _ in range(NUM_RUNS)])
    nominal([statistics.difference(*rng.standard_normal(2)) for _ in range(NUM_RUNS)])
    assert statistics.uniformity(rng.random(2000) ** 1.2)[1] < 1e-3


# Power


@pytest.mark.parametrize(("low", "high"), [(0.2, 0.9), (0.0, 0.02)])
def test_the_smallest_relaxation_is_found_four_times_out_of_five(low: float, high: float) -> None:
    rng = np.random.default_rng(2)
    probs = rng.uniform(low, high, 500)
    relaxation = statistics.smallest_relaxation(probs, 0.01)
    assert relaxation is not None and 0.0 < relaxation < 0.2
    relaxed = probs + relaxation * (1 - probs)
    found = sum(statistics.directed(rng.random(500) < relaxed, probs).p_value <= 0.01 for _ in range(300))
    assert 0.72 < found / 300 < 0.88
    needed = statistics.positions_needed(probs, relaxation, 0.01)
    assert needed is not None and 400 < needed < 650


def test_power_grows_with_positions_and_has_an_end() -> None:
    few, many = np.full(100, 0.5), np.full(10_000, 0.5)
    found = [statistics.smallest_relaxation(probs, 0.01) for probs in (few, many)]
    assert found[0] and found[1] and found[0] / found[1] == pytest.approx(10, rel=0.15)
    assert statistics.smallest_relaxation(np.full(3, 0.9), 0.01) is None
    assert statistics.positions_needed(np.ones(5), 0.1, 0.01) is None


# Tolerances


def test_tolerance_is_the_step_of_the_dtype() -> None:
    def tolerance(magnitude: float, dtype: torch.dtype) -> float:
        return float(ROUNDING_STEPS[dtype] * step_at(torch.tensor(magnitude), dtype))

    assert [tolerance(x, torch.bfloat16) for x in (16.0, 23.5, 31.9, 32.0, -40.0)] == [0.125] * 3 + [0.25] * 2
    assert tolerance(20.0, torch.float32) == 64 * 2.0**-19
    assert tolerance(20.0, torch.float64) == 64 * 2.0**-48
    step = float(step_at(torch.tensor(20.0), torch.float32))
    assert float(torch.nextafter(torch.tensor(20.0), torch.tensor(99.0))) == 20.0 + step
    assert float(step_at(torch.tensor(0.0), torch.float32)) > 0.0


# The document


def test_a_report_judges_all_tests_together_and_is_json() -> None:
    checks = [
        Check("a", "ok", "", p_value=0.006),
        Check("b", "ok", "", p_value=0.009),
        Check("c", "flagged", "", details={"gaps": [math.inf]}),
        Check.not_run("d", "why"),
    ]
    judged = judge(checks, 0.01)
    assert [check.status for check in judged] == ["ok", "ok", "flagged", "not run"]
    assert judge(checks, 0.02)[0].p_adjusted == pytest.approx(0.012)
    report = Report(judge(checks, 0.02), {}, {}, {"alpha": 0.02})
    assert report.flagged == ["a", "b", "c"]
    document = report.to_dict()
    assert document["schema_version"] == 1
    assert document["checks"][2]["details"] == {"gaps": [None]}
