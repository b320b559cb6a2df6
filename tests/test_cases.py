"""What speaks against an arm whatever its speed, and the page on which all of it stands."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from paceline.bench.arms.base import Load, Outcome
from paceline.bench.numbers.metrics import summarise
from paceline.bench.numbers.summary import Decision
from paceline.bench.runs.plan import LatencyTarget, Rules
from paceline.bench.runs.rows import Row, Run
from paceline.bench.verdicts.decision import decide
from planted import KINDS, LOADS, changed, failed, falling, only, planted
from synthetic_runs import Scenario, make_run

# What rules an arm out -----------------------------------------------------------------------------------------------


def test_flagged_text_is_off_whatever_the_speed() -> None:
    run = planted(2.0, 0)
    report = {
        "flagged": ["ties"],
        "checks": [
            {
                "name": "ties",
                "status": "flagged",
                "bound": None,
                "details": {"num_positions": 9, "num_flagged": 2},
            }
        ],
    }
    decision = only(run, verified={"dflash": report})
    assert decision.verdict == "off"
    assert "flagged ties" in decision.sentence
    line = _line(decision, "Tokens at temperature 0")
    assert (line[1], line[4]) == ("2 of 9", "fail")
    assert only(run, verified={"another": report}).verdict == "on"


def test_verified_text_fills_the_table() -> None:
    checks = [
        {"name": "ties", "status": "ok", "bound": 0.004, "details": {"num_positions": 622, "num_flagged": 0}},
        {"name": "directed", "status": "ok", "statistic": 0.78, "p_adjusted": 0.57},
    ]
    decision = only(planted(2.0, 0), verified={"dflash": {"flagged": [], "checks": checks}})
    assert decision.verdict == "on"
    assert _line(decision, "Tokens at temperature 0")[1:] == ("0 of 622", "[0, 0.4 %]", "0", "pass")
    assert _line(decision, "Drafts that leak")[1:] == ("+0.78", "p = 0.57 (Holm)", "not flagged", "pass")
    assert any("found nothing" in reason for reason in decision.reasons)


def test_nothing_answered_is_never_a_number() -> None:
    run = changed(planted(1.5, 0), lambda row: failed(row) if row.place.arm == "dflash" else row.outcome)
    decision = decide(run, summarise(run, Rules()), Rules())[0]
    assert decision.verdict == "off"
    assert "answered none of" in decision.sentence
    assert _line(decision, "Output speed")[1:] == ("not measured", "—", "lower end > 1.05", "unknown")
    assert _line(decision, "Failed requests")[4] == "fail"


def test_nothing_answered_by_anyone_is_unclear() -> None:
    decision = only(changed(planted(1.5, 0), failed))
    assert decision.verdict == "cannot tell"
    assert "no request was answered by both" in decision.sentence


def test_an_arm_that_never_ran_is_unclear() -> None:
    run = planted(1.5, 0)
    rows = tuple(row for row in run.rows if row.place.arm != "dflash")
    passes = tuple(record for record in run.passes if record.place.arm != "dflash")
    gone = dataclasses.replace(run, rows=rows, passes=passes, lost=("'dflash' died: no memory",))
    decision = decide(gone, summarise(gone, Rules()), Rules())[0]
    assert decision.verdict == "cannot tell"
    assert "'dflash' died: no memory" in decision.sentence


def test_more_failures_than_the_baseline_are_off() -> None:
    run = planted(1.5, 0, failures={"dflash": 0.5})
    decision = only(run)
    assert decision.verdict == "off"
    assert "fails more often than plain" in decision.sentence
    assert only(planted(1.5, 0, failures={"dflash": 0.1, "plain": 0.1})).verdict == "on"
    assert only(planted(1.5, 0, failures={"plain": 0.5})).verdict == "on"


def test_failures_at_high_loads_leave_the_low_ones() -> None:
    def fails(row: Row) -> Outcome:
        return failed(row) if row.place.load == Load(16) and row.place.arm == "dflash" else row.outcome

    decision = only(changed(planted(1.5, 0, loads=LOADS), fails))
    assert (decision.verdict, decision.below) == ("on below", 4.0)


def test_rare_failures_add_up_over_loads() -> None:
    """Three failed requests at each of three loads are chance at each of them, and not together."""

    def fails(row: Row) -> Outcome:
        number = 3 * LOADS.index(row.place.load)
        hit = (
            row.place.arm == "dflash" and row.kind == "code" and row.place.block in range(number, number + 3)
        )
        return failed(row) if hit else row.outcome

    run = changed(planted(1.5, 0, loads=LOADS, num_blocks=9, items_per_kind=1), fails)
    assert "fails more often than plain: 9 requests" in only(run).sentence


def test_too_much_memory_is_off() -> None:
    run = planted(1.5, 0)
    assert only(run, Rules(max_memory_bytes=600_000_000)).verdict == "on"
    decision = only(run, Rules(max_memory_bytes=599_999_999))
    assert decision.verdict == "off"
    assert _line(decision, "Peak memory")[4] == "fail"


def _with_ttft(run: Run, slow: Callable[[Row], bool]) -> Run:
    return changed(run, lambda row: dataclasses.replace(row.outcome, ttft_s=2.0 if slow(row) else 0.1))


def test_a_missed_latency_target_is_off() -> None:
    rules = Rules(latency=LatencyTarget(ttft_s=1.0))
    run = planted(1.5, 0)
    assert only(_with_ttft(run, lambda row: False), rules).verdict == "on"
    decision = only(_with_ttft(run, lambda row: row.place.arm == "dflash"), rules)
    assert decision.verdict == "off"
    assert "misses the latency target at 1 at once" in decision.sentence
    assert only(_with_ttft(run, lambda row: True), rules).verdict == "on"  # the baseline misses it too


def test_a_target_that_may_be_missed_is_not_on() -> None:
    run = _with_ttft(
        planted(1.5, 0), lambda r: r.place.arm == "dflash" and r.kind == "code" and r.place.block < 2
    )
    decision = only(run, Rules(latency=LatencyTarget(ttft_s=1.0)))
    assert decision.verdict == "cannot tell"
    assert "may miss the latency target" in decision.sentence


def test_latency_of_open_loops_counts_for_all() -> None:
    run = make_run(Scenario(loads=(Load(1), Load(rate_per_s=1.0))))
    slow = _with_ttft(run, lambda row: row.place.load.is_open and row.place.arm == "dflash")
    decision = only(slow, Rules(latency=LatencyTarget(ttft_s=1.0)))
    assert decision.verdict == "off"
    assert "at 1/s" in decision.sentence


def test_latency_missed_at_a_high_load_is_on_below() -> None:
    run = planted(1.5, 0, loads=LOADS)
    slow = _with_ttft(run, lambda row: row.place.load == Load(16) and row.place.arm == "dflash")
    decision = only(slow, Rules(latency=LatencyTarget(ttft_s=1.0)))
    assert (decision.verdict, decision.below) == ("on below", 4.0)


# Page ----------------------------------------------------------------------------------------------------------------


def _line(decision: Decision, item: str) -> tuple[str, str, str, str, str]:
    return next(line for line in decision.table if line[0].startswith(item))


def test_the_page_says_what_was_measured_and_what_was_not() -> None:
    rules = Rules(latency=LatencyTarget(e2e_s=5.0), price_per_hour=2.0, max_concurrency=16)
    run = make_run(
        Scenario(ratios={"plain": 1.0, "dflash": falling}, kinds=KINDS, loads=LOADS, diverging=0.2)
    )
    decision = decide(run, summarise(run, rules), rules)[0]
    lines = {line[0]: line for line in decision.table}
    assert len(lines) == len(decision.table)
    assert {line[4] for line in decision.table} <= {"pass", "fail", "unknown"}
    assert all(line[4] == "unknown" for line in decision.table if line[1] == "not measured")
    assert lines["Load at which the gain ends"][4] == "fail"
    assert "temperature 0" in lines["Load at which the gain ends"][1]
    assert lines["Price per million good tokens, on / off"][4] in ("fail", "unknown")
    assert lines["Memory of drafting"][1] == "drafter weights +50.0 MB"
    assert lines["Time to first token, p99"][4] == "unknown"  # no limit was given
    assert lines["Tokens at temperature 0 that are not the target's"][1] == "not measured"
    assert any(
        "answers are the baseline's own" in reason and "near-ties" in reason for reason in decision.reasons
    )
    assert "It is as fast as plain at" in decision.sentence


def test_a_control_that_differs_from_its_arm_is_said() -> None:
    scenario = Scenario(block_noise=0.005)
    assert not any("A/A" in r and "is off" in r for r in _full(make_run(scenario)).reasons)
    run = changed(
        make_run(scenario),
        lambda row: dataclasses.replace(
            row.outcome, e2e_s=(row.outcome.e2e_s or 0.0) * (1.0 + 0.2 * ("again" in row.place.arm))
        ),
    )
    assert any("The A/A control is off at 1 at once" in reason for reason in _full(run).reasons)


def _full(run: Run) -> Decision:
    return decide(run, summarise(run, Rules()), Rules())[0]
