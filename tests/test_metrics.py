"""Summaries of runs whose numbers are known by hand, or whose truth is."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest
from scipy import stats

from paceline.bench.arms.base import Fingerprint, Load, Outcome, StepTime
from paceline.bench.numbers.metrics import summarise, summary_to_dict
from paceline.bench.numbers.summary import Cell, Interval, Summary
from paceline.bench.runs.plan import LatencyTarget, Rules
from paceline.bench.runs.rows import PassRecord, Place, Row, Run
from paceline.core.acceptance import acceptance_length, acceptance_rate, survival
from paceline.core.types import StepRecord
from synthetic_runs import Scenario, make_run

ONE = Load(1)


def place(arm: str, block: int = 0, order: int = 0, temperature: float = 0.0) -> Place:
    return Place(block, order, arm, ONE, temperature)


def answer(
    item: str,
    e2e_s: float,
    num_new_tokens: int = 10,
    *,
    ttft_s: float | None = None,
    acceptance: tuple[tuple[int, int, int], ...] | None = None,
    text: str | None = None,
) -> Outcome:
    return Outcome(
        item, e2e_s=e2e_s, ttft_s=ttft_s, num_new_tokens=num_new_tokens, acceptance=acceptance, text=text
    )


def failed(item: str, reason: str = "timed out") -> Outcome:
    return Outcome(item, failure=f"request {item!r}: {reason}")


def make(*passes: tuple[Place, list[Outcome]], wall_s: float = 1.0, **record: object) -> Run:
    """Returns a run of those passes; kinds are the items' first letters."""
    arms = dict.fromkeys(where.arm for where, _ in passes)
    return Run(
        plan={},
        workload={},
        environment={},
        command="",
        started="",
        arms={arm: Fingerprint({}) for arm in arms},
        rows=tuple(Row(where, outcome.id[0], 64, outcome) for where, found in passes for outcome in found),
        passes=tuple(PassRecord(where, wall_s, **record) for where, _ in passes),  # type: ignore[arg-type]
    )


def cell(summary: Summary, arm: str, kind: str | None = None, temperature: float = 0.0) -> Cell:
    (found,) = [
        c
        for c in (*summary.cells, *summary.control)
        if (c.arm, c.kind, c.temperature) == (arm, kind, temperature) and c.load == summary.cells[0].load
    ]
    return found


def known(interval: Interval | None) -> Interval:
    assert interval is not None
    return interval


# By hand -------------------------------------------------------------------------------------------------------------


def test_ratio_pairs_requests_and_averages_passes_in_the_log() -> None:
    run = make(
        (place("plain", 0, 0), [answer("a1", 1.0), answer("b1", 4.0)]),
        (place("fast", 0, 1), [answer("a1", 0.5), answer("b1", 4.0)]),
        (place("fast", 0, 2), [answer("a1", 0.125), answer("b1", 4.0)]),
        (place("plain", 1, 0), [answer("a2", 2.0, 10)]),
        (place("fast", 1, 1), [answer("a2", 2.0, 20)]),
    )
    found = summarise(run, Rules())
    logs = np.log([4.0, 1.0, 2.0])  # a1: √(2 × 8)
    assert known(cell(found, "fast").ratio).estimate == pytest.approx(math.exp(logs.mean()))
    assert known(cell(found, "fast", "a").ratio).estimate == pytest.approx(math.sqrt(8.0))
    assert cell(found, "fast", "b").ratio == Interval(1.0, 0.0, math.inf)  # one request
    assert cell(found, "plain").ratio is None


def test_same_item_in_another_block_is_another_request() -> None:
    run = make(
        (place("plain", 0), [answer("a", 1.0)]),
        (place("fast", 0), [answer("a", 0.5)]),
        (place("plain", 1), [answer("a", 8.0)]),
        (place("fast", 2), [answer("a", 8.0)]),
    )
    assert known(cell(summarise(run, Rules()), "fast").ratio).estimate == pytest.approx(2.0)


def test_one_block_takes_the_t_interval_of_its_requests() -> None:
    speeds = [1.1, 1.5, 2.0]
    run = make(
        (place("plain"), [answer(f"a{i}", 1.0) for i in range(3)]),
        (place("fast"), [answer(f"a{i}", 1.0 / speed) for i, speed in enumerate(speeds)]),
    )
    ratio, logs = known(cell(summarise(run, Rules()), "fast").ratio), np.log(speeds)
    low, high = stats.t.interval(0.95, 2, loc=logs.mean(), scale=logs.std(ddof=1) / math.sqrt(3.0))
    assert (ratio.low, ratio.high) == pytest.approx((math.exp(low), math.exp(high)))


def test_times_by_hand() -> None:
    outcomes = [
        answer("a1", 1.1, 11, ttft_s=0.1),  # TPOT 0.1
        answer("a2", 2.2, 11, ttft_s=0.2),  # 0.2
        answer("a3", 0.3, 1, ttft_s=0.3),  # a single token has none
        answer("a4", 4.4, 11),  # the time of the first token is not known
        answer("a5", 4.4, 11, ttft_s=4.4),  # all at once
    ]
    found = cell(summarise(make((place("plain"), outcomes), wall_s=9.0), Rules()), "plain")
    assert known(found.tokens_per_s_per_user).estimate == pytest.approx((10.0 + 5.0) / 2.0)
    assert found.tpot_s is not None and found.ttft_s is not None and found.e2e_s is not None
    assert found.tpot_s.p50.estimate == pytest.approx(0.15)
    assert found.ttft_s.p50.estimate == pytest.approx(0.25)
    assert found.e2e_s.p90.estimate == pytest.approx(np.quantile([1.1, 2.2, 0.3, 4.4, 4.4], 0.9))
    assert found.max_gap_s is None
    assert found.tokens_per_s == Interval(5.0, 0.0, math.inf)  # one block


def test_throughput_is_tokens_over_wall_time_of_all_passes() -> None:
    run = make(
        (place("plain", 0, 0), [answer("a1", 1.0, 10)]),
        (place("plain", 0, 1), [answer("a1", 1.0, 20)]),
        (place("plain", 1, 0), [answer("a2", 1.0, 60), failed("a3")]),
        wall_s=2.0,
    )
    found = summarise(run, Rules(price_per_hour=3.6))
    assert known(cell(found, "plain").tokens_per_s).estimate == pytest.approx(90.0 / 6.0)
    assert cell(found, "plain", "a").tokens_per_s is None
    ((*where, cost),) = found.costs
    assert where == ["plain", "1 at once", 0.0]
    assert cost.estimate == pytest.approx(1e6 * 0.001 / 15.0)
    assert cost.low < cost.estimate < cost.high


def test_failures_are_counted_and_never_become_numbers() -> None:
    cut = dataclasses.replace(
        failed("a2"), ttft_s=0.1, e2e_s=0.2, num_new_tokens=3
    )  # what came before it broke
    run = make(
        (place("plain", 0), [answer("a1", 1.0), answer("a2", 1.0)]),
        (place("fast", 0), [answer("a1", 0.5), cut]),
        (place("plain", 1), [answer("a3", 1.0), answer("a4", 1.0)]),
        (place("fast", 1), [failed("a3"), failed("a4", "no memory")]),
    )
    found = summarise(run, Rules(latency=LatencyTarget(e2e_s=0.7)))
    fast = cell(found, "fast")
    assert (fast.num_requests, fast.num_failures) == (4, 3)
    assert known(fast.ratio).estimate == pytest.approx(2.0)
    assert known(fast.good_share).estimate == 0.25
    assert fast.ttft_s is None
    assert known(cell(found, "plain").good_share).estimate == 0.0
    assert found.failures == (
        ("fast", "1 at once", "request '…': timed out", 2, "a2"),
        ("fast", "1 at once", "request '…': no memory", 1, "a4"),
    )


def test_an_arm_without_answers_has_no_numbers() -> None:
    run = make(
        (place("plain", 0), [answer("a1", 1.0, ttft_s=0.1)]),
        (place("dead", 0), [failed("a1")]),
        (place("plain", 1), [answer("a2", 1.0, ttft_s=0.1)]),
        (place("dead", 1), [failed("a2")]),
    )
    found = summarise(run, Rules(latency=LatencyTarget(ttft_s=1.0), price_per_hour=1.0))
    dead = cell(found, "dead")
    assert (dead.num_requests, dead.num_failures) == (2, 2)
    rest = dataclasses.replace(dead, num_requests=0, num_failures=0)
    assert rest == Cell("dead", ONE, 0.0, None, 0, 0)
    assert found.excluded == (("dead", "no request was answered both by it and by plain"),)
    assert [cost[0] for cost in found.costs] == ["plain"]


def test_nothing_measured_is_an_empty_summary() -> None:
    run = dataclasses.replace(make((place("plain"), [])), passes=())
    found = summarise(run, Rules(latency=LatencyTarget(ttft_s=1.0), price_per_hour=1.0))
    assert found == Summary("plain", ())


def test_good_answers_meet_every_limit_and_the_unknown_is_neither() -> None:
    limits = LatencyTarget(ttft_s=0.5, tpot_s=0.2)
    outcomes = [
        answer("a1", 1.5, 11, ttft_s=0.5),  # good: 0.1 a token
        answer("a2", 3.5, 11, ttft_s=0.5),  # 0.3 a token
        answer("a3", 0.4, 1, ttft_s=0.4),  # good: one token in time
        answer("a4", 9.0, 11),  # not known
    ]
    found = cell(summarise(make((place("plain"), outcomes)), Rules(latency=limits)), "plain")
    assert known(found.good_share).estimate == pytest.approx(2.0 / 3.0)
    blind = make((place("plain"), [answer("a1", 1.0)]))
    assert cell(summarise(blind, Rules(latency=limits)), "plain").good_share is None
    late = summarise(
        blind, Rules(latency=LatencyTarget(ttft_s=0.5, e2e_s=0.9))
    )  # a miss whatever the first token did
    assert known(cell(late, "plain").good_share).estimate == 0.0
    assert cell(summarise(blind, Rules()), "plain").good_share is None


def test_identical_answers_are_those_that_the_baseline_gives_in_any_pass_and_at_any_load() -> None:
    elsewhere = dataclasses.replace(place("plain"), load=Load(4))
    run = make(
        (place("plain", 0, 0), [answer("a1", 1.0, text="x"), answer("a2", 1.0, text="x"), answer("a3", 1.0)]),
        (place("plain", 0, 1), [answer("a1", 1.0, text="y"), answer("a2", 1.0, text="x"), answer("a3", 1.0)]),
        (elsewhere, [answer("a4", 1.0, text="z")]),
        (
            place("fast", 0, 2),
            [answer(f"a{i}", 1.0, text=text) for i, text in ((1, "x"), (2, "y"), (3, "x"), (4, "z"))],
        ),
        (place("fast", 1), [answer("a1", 1.0, text="x")]),  # another block: the baseline gave none
    )
    fast = cell(summarise(run, Rules()), "fast")
    assert (fast.num_compared, fast.num_identical) == (3, 2)


def test_lengths_are_tested_once_an_item() -> None:
    ours, theirs = [10, 20, 30, 40, 50, 60], [11, 21, 31, 70, 80, 90]

    def outcomes(lengths: list[int]) -> list[Outcome]:
        return [answer(f"a{i}", 1.0, length) for i, length in enumerate(lengths)]

    run = make(*((place(arm), outcomes(n)) for arm, n in (("plain", theirs), ("fast", ours), ("fast", ours))))
    found = summarise(run, Rules())
    assert cell(found, "fast").length_p_value == pytest.approx(stats.ks_2samp(ours, theirs).pvalue)
    assert cell(found, "plain").length_p_value is None


def test_steps_are_means_by_number_of_sequences() -> None:
    times = (StepTime(1, 10, 0.1, 0.02, 0.07), StepTime(4, 0, 0.0, 0.0, 0.0), StepTime(2, 4, 0.1, 0.04, 0.04))
    run = make(
        (place("plain", 0), [answer("a", 1.0)]), (place("plain", 1), [answer("a", 1.0)]), step_times=times
    )
    steps = cell(summarise(run, Rules()), "plain").steps
    assert [step[:2] for step in steps] == [(1, 20), (2, 8)]
    assert [step[2:] for step in steps] == [
        pytest.approx((10.0, 2.0, 7.0)),
        pytest.approx((25.0, 10.0, 10.0)),
    ]
    assert cell(summarise(run, Rules()), "plain", "a").steps == ()


# Acceptance ----------------------------------------------------------------------------------------------------------

TRIPLES = (((3, 0, 2), (3, 2, 1)), ((3, 3, 1), (2, 2, 1), (0, 0, 3)), ((5, 1, 4), (2, 0, 1)))


def test_acceptance_is_the_cores() -> None:
    run = make(
        (place("fast"), [answer(f"a{i}", 1.0, acceptance=triples) for i, triples in enumerate(TRIPLES)])
    )
    found = cell(summarise(run, Rules()), "fast").acceptance
    steps = [
        StepRecord(0, d, a, a + 1) for triples in TRIPLES for d, a, count in triples for _ in range(count)
    ]
    assert found is not None
    assert found.length.estimate == pytest.approx(acceptance_length(steps))
    assert found.length.low < found.length.estimate < found.length.high
    assert found.rate == pytest.approx(acceptance_rate(steps))
    assert found.survival == pytest.approx(survival(steps))
    assert found.histogram == (6, 4, 2, 1, 0, 0)
    assert found.source == "requests"


def test_acceptance_of_a_kind_is_its_own() -> None:
    outcomes = [answer("a1", 1.0, acceptance=((3, 3, 5),)), answer("b1", 1.0, acceptance=((3, 0, 5),))]
    found = summarise(make((place("fast"), outcomes)), Rules())
    for kind, length in ((None, 2.5), ("a", 4.0), ("b", 1.0)):
        acceptance = cell(found, "fast", kind).acceptance
        assert acceptance is not None and acceptance.length.estimate == length


def test_drafting_nothing_is_no_acceptance() -> None:
    for acceptance in (None, (), ((0, 0, 9),)):
        run = make((place("plain"), [answer("a", 1.0, acceptance=acceptance)]))
        assert cell(summarise(run, Rules()), "plain").acceptance is None


def test_counters_of_a_server_say_the_same_as_records() -> None:
    scenario = Scenario(kinds=("code",), items_per_kind=4, num_blocks=8)
    with_records = cell(summarise(make_run(scenario), Rules()), "dflash").acceptance
    counted = summarise(make_run(dataclasses.replace(scenario, has_records=False)), Rules())
    found = cell(counted, "dflash").acceptance
    assert found is not None and with_records is not None
    assert found == dataclasses.replace(with_records, source="counters", length=found.length)
    assert dataclasses.astuple(found.length) == pytest.approx(dataclasses.astuple(with_records.length))
    assert cell(counted, "dflash", "code").acceptance is None  # counters know no kinds
    assert cell(counted, "plain").acceptance is None


def test_counters_without_slots_still_give_the_length() -> None:
    counters = {"num_steps": 100.0, "num_drafted": 700.0, "num_accepted": 150.0}
    run = make((place("fast"), [answer("a", 1.0)]), counters=counters)
    found = cell(summarise(run, Rules()), "fast").acceptance
    assert found is not None
    assert found.length == Interval(2.5, 0.0, math.inf)
    assert (found.rate, found.survival, found.histogram) == ((), (), ())


# Known truth ---------------------------------------------------------------------------------------------------------


def test_a_known_truth_is_found() -> None:
    truth = {"code": 2.0, "chat": 0.9}
    run = make_run(
        Scenario({"plain": 1.0, "dflash": truth}, num_blocks=12, temperatures=(0.0, 0.7), diverging=0.2)
    )
    found = summarise(run, Rules(confidence=0.99))
    for temperature in (0.0, 0.7):
        for kind, ratio in (*truth.items(), (None, math.sqrt(1.8))):
            interval = known(cell(found, "dflash", kind, temperature).ratio)
            assert interval.estimate == pytest.approx(ratio, rel=0.06)
            assert interval.low < ratio < interval.high
    whole = cell(found, "dflash")
    assert whole.num_compared == whole.num_requests == 96
    assert 0.65 < whole.num_identical / whole.num_compared < 0.95
    assert whole.acceptance is not None
    assert whole.acceptance.rate == pytest.approx([0.7] * 7, abs=0.04)


def test_the_control_stands_by_itself() -> None:
    found = summarise(make_run(Scenario(loads=(Load(1), Load(4)))), Rules())
    assert {c.arm for c in found.cells} == {"plain", "dflash"}
    assert [(c.arm, c.kind, c.load) for c in found.control] == [
        ("plain again", None, Load(n)) for n in (1, 4)
    ]
    for control in found.control:
        assert known(control.ratio).low < 1.0 < known(control.ratio).high
        assert control.num_identical == control.num_compared == control.num_requests
    assert found.excluded == () and found.decisions == ()


def test_cells_come_by_temperature_load_and_arm_with_all_kinds_first() -> None:
    loads = (Load(rate_per_s=2.0), Load(4), Load(1))
    cells = summarise(make_run(Scenario(loads=loads, num_blocks=2)), Rules()).cells
    assert [c.load.label for c in cells if (c.arm, c.kind) == ("plain", None)] == [
        "1 at once",
        "4 at once",
        "2/s",
    ]
    assert [(c.arm, c.kind) for c in cells[:6]] == [
        (arm, kind) for arm in ("plain", "dflash") for kind in (None, "code", "chat")
    ]


def test_confidence_widens_every_interval() -> None:
    run = make_run(Scenario(num_blocks=6, items_per_kind=6))
    rules = [Rules(confidence=confidence, latency=LatencyTarget(e2e_s=1.2)) for confidence in (0.8, 0.95)]
    narrow, wide = (cell(summarise(run, rule), "dflash") for rule in rules)
    for name in ("ratio", "tokens_per_s", "tokens_per_s_per_user", "good_share"):
        inner, outer = known(getattr(narrow, name)), known(getattr(wide, name))
        assert outer.low < inner.low < inner.estimate < inner.high < outer.high, name


# As data -------------------------------------------------------------------------------------------------------------


def test_a_summary_is_json_and_open_ends_are_null() -> None:
    summary = summarise(make_run(Scenario(num_blocks=1, loads=(Load(1), Load(4)))), Rules(price_per_hour=1.0))
    data = json.loads(json.dumps(summary_to_dict(summary), allow_nan=False))
    assert data["baseline"] == "plain"
    assert data["cells"][0]["tokens_per_s"]["high"] is None
    assert data["cells"][0]["tokens_per_s"]["estimate"] > 0.0
    assert set(data) == {field.name for field in dataclasses.fields(Summary)}
