"""The calibration of decisions on runs made up: equal arms stay equal, and a planted slowdown is found."""

from __future__ import annotations

import pytest

from calibration import (
    TWIN,
    always_from,
    found_slower,
    no_difference,
    recorded_blocks,
    simulate,
    whole_ratios,
)
from paceline.bench.arms.base import Load
from synthetic_runs import Scenario, make_run

PLACES = ["1 at once, temperature 0", "4 at once, temperature 0"]
RUN = make_run(
    Scenario(loads=(Load(1), Load(4)), num_blocks=8, pass_noise=0.05, has_records=False, has_steps=False)
)
BLOCKS = recorded_blocks(RUN)


def test_a_twin_is_the_baseline_under_another_name() -> None:
    run = simulate(RUN, BLOCKS, 5, 0.0, 0)
    assert list(run.arms) == ["plain", TWIN]
    assert len(run.rows) == 5 * len(BLOCKS[0][0])
    assert {row.place.arm for row in run.rows} == {"plain", TWIN}
    assert {row.place.block for row in run.rows} == set(range(5))
    recorded = {row.outcome for rows, _ in BLOCKS for row in rows}
    assert all(row.outcome in recorded for row in run.rows)
    assert run == simulate(RUN, BLOCKS, 5, 0.0, 0) != simulate(RUN, BLOCKS, 5, 0.0, 1)


def test_a_slowdown_is_exact() -> None:
    equal, slower = (whole_ratios(simulate(RUN, BLOCKS, 6, lost, 3), TWIN) for lost in (0.0, 0.1))
    assert list(equal) == PLACES
    for place in PLACES:
        assert slower[place].estimate == pytest.approx(0.9 * equal[place].estimate)


def test_equal_arms_are_told_apart_as_rarely_as_promised() -> None:
    found = no_difference(RUN, BLOCKS, len(BLOCKS), 40)
    assert all(found["holds_1"][place] >= 34 for place in PLACES)  # 38 expected
    assert sum(found["verdicts"].values()) == 40
    assert not any(verdict.startswith("on") for verdict in found["verdicts"])


def test_slower_arms_are_found() -> None:
    found = found_slower(RUN, BLOCKS, [2, 8], 0.1, 10)
    assert all(found[place][8] == 10 and found[place][2] < 10 for place in PLACES)
    assert found_slower(RUN, BLOCKS, [8], 0.0, 10)[PLACES[0]][8] <= 3


def test_always_is_from_where_no_larger_run_misses() -> None:
    assert always_from({2: 3, 4: 10, 8: 9, 16: 10, 32: 10}, 10) == 16
    assert always_from({2: 10, 4: 10}, 10) == 2
    assert always_from({2: 3, 4: 9}, 10) is None


def test_a_run_without_a_control_is_refused() -> None:
    with pytest.raises(SystemExit, match="plain again"):
        recorded_blocks(make_run(Scenario(has_control=False)))
