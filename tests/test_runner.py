"""Runs of scripted arms: what is kept, interrupted and resumed, refused, lost, and when a run stops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.bench.arms.base import ArmError, Load
from paceline.bench.runs import records, runner
from paceline.bench.runs.plan import Plan
from paceline.bench.runs.rows import Place, Row, Run
from paceline.core.errors import ConfigError
from scripted_arms import BASIS, ScriptedArm, make_plan, make_workload, plan_of, three_arms

WORKLOAD = make_workload({"code": 6, "chat": 6})
LOADS = (Load(1), Load(2))


def unstarted(rows: Sequence[Row]) -> list[Row]:
    """Returns rows without what differs between one start and several."""
    return [replace(row, place=replace(row.place, start=0)) for row in rows]


def places(run: Run) -> list[Place]:
    return [record.place for record in run.passes]


def seen(run: Run, arm: str) -> list[tuple[int, int]]:
    """Returns block and start of an arm's passes."""
    return [(place.block, place.start) for place in places(run) if place.arm == arm]


# What is kept --------------------------------------------------------------------------------------------------------


def test_a_run_keeps_every_request_of_every_pass(tmp_path: Path) -> None:
    scripted = three_arms()
    plan = plan_of(scripted, loads=LOADS, temperatures=(0.0, 0.7))
    run = runner.run(plan, WORKLOAD, scripted, tmp_path / "run", command="paceline bench")
    assert run.is_complete and run.lost == ()
    assert len(run.passes) == 2 * 2 * 2 * 8  # blocks, temperatures, loads, four in the line there and back
    assert len(run.rows) == 2 * len(run.passes)  # one item of each of two kinds
    assert list(run.arms) == ["plain", "dflash", "lookup", "plain again"]
    assert run.arms["plain again"] == run.arms["plain"]
    assert run.command == "paceline bench" and run.started and run.environment
    assert run.workload == {
        "name": "scripted",
        "digest": WORKLOAD.digest,
        "kinds": {"chat": 6, "code": 6},
        "notes": [],
    }
    row = run.rows[0]
    assert (row.outcome.id.split("-")[0], row.outcome.acceptance) == (row.kind, ((7, 2, 4), (7, 0, 1)))
    assert row.outcome.num_new_tokens == row.max_new_tokens
    assert not any(arm.is_open for arm in scripted)
    assert records.read_run(tmp_path / "run") == run
    assert Plan.from_dict(run.plan) == plan


def test_failed_requests_and_replays_are_read_back_as_they_were(tmp_path: Path) -> None:
    workload = make_workload({"x": 4}, has_arrivals=True)
    scripted = [ScriptedArm("plain"), ScriptedArm("dflash", failing=["x-1"])]
    plan = plan_of(scripted, items_per_kind=2, loads=(Load(speed=2.0), Load(rate_per_s=0.5)))
    run = runner.run(plan, workload, scripted, tmp_path)
    assert any(row.outcome.failure == "x-1: no answer" for row in run.rows)
    assert records.read_run(tmp_path) == run


def test_a_pass_is_on_disk_before_the_next_begins(tmp_path: Path) -> None:
    found: list[int] = []

    class Looking(ScriptedArm):
        def run(self, jobs: Any, load: Any, done: Any) -> Any:
            if not jobs[0].id.startswith("warm-up"):
                found.append(len(records.read_run(tmp_path).passes))
            return super().run(jobs, load, done)

    scripted = [Looking("plain"), Looking("dflash")]
    runner.run(plan_of(scripted), WORKLOAD, scripted, tmp_path)
    assert found == list(range(12))


# Interrupted and resumed ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_torn", [False, True])
@pytest.mark.parametrize("is_exclusive", [False, True])
def test_an_interrupted_run_resumes_to_the_same_rows(
    tmp_path: Path, is_exclusive: bool, is_torn: bool
) -> None:
    scripted = three_arms()
    plan = plan_of(scripted, loads=LOADS, is_exclusive=is_exclusive, num_starts=2)
    expected = runner.run(plan, WORKLOAD, scripted, tmp_path / "whole")
    for number in range(0, 8, 3):  # a pass of dflash
        folder = tmp_path / f"cut-{number}"
        interrupted = three_arms(dflash={number: KeyboardInterrupt()})
        with pytest.raises(KeyboardInterrupt):
            runner.run(plan, WORKLOAD, interrupted, folder)
        assert not any(arm.is_open for arm in interrupted)
        kept = records.read_run(folder)
        assert not kept.is_complete
        assert sum(place.arm == "dflash" for place in places(kept)) == number
        assert unstarted(kept.rows) == unstarted(expected.rows)[: len(kept.rows)]
        if is_torn:
            with (folder / "rows.jsonl").open("ab") as file:
                file.write((tmp_path / "whole" / "rows.jsonl").read_bytes()[:500])
        resumed = runner.run(plan, WORKLOAD, three_arms(), folder, resume=True)
        assert resumed.is_complete
        assert unstarted(resumed.rows) == unstarted(expected.rows)
        assert resumed.started == kept.started
        assert records.read_run(folder) == resumed


def test_starts_are_counted_on_behind_those_of_an_interrupted_run(tmp_path: Path) -> None:
    plan = plan_of(three_arms())
    with pytest.raises(KeyboardInterrupt):
        runner.run(plan, WORKLOAD, three_arms(dflash={1: KeyboardInterrupt()}), tmp_path)
    resumed = runner.run(plan, WORKLOAD, three_arms(), tmp_path, resume=True)
    assert [start for _, start in seen(resumed, "dflash")] == [0, 1, 1, 1]


def test_a_start_of_the_control_is_a_start_of_the_baseline(tmp_path: Path) -> None:
    plan = plan_of(three_arms(), is_exclusive=True)
    with pytest.raises(KeyboardInterrupt):  # in the second pass of "plain again"
        runner.run(plan, WORKLOAD, three_arms(plain={2: KeyboardInterrupt()}), tmp_path)
    before = places(records.read_run(tmp_path))
    resumed = places(runner.run(plan, WORKLOAD, three_arms(), tmp_path, resume=True))
    starts = [
        {p.start for p in part if p.arm.startswith("plain")} for part in (before, resumed[len(before) :])
    ]
    assert starts[0] == {0, 1} and min(starts[1]) == 2


def test_a_complete_run_is_not_run_again(tmp_path: Path) -> None:
    scripted = three_arms()
    plan = plan_of(scripted)
    run = runner.run(plan, WORKLOAD, scripted, tmp_path)
    again = three_arms()
    assert runner.run(plan, WORKLOAD, again, tmp_path, resume=True) == run
    assert again[0].log == []


def test_a_run_is_not_written_over(tmp_path: Path) -> None:
    runner.run(plan_of(three_arms()), WORKLOAD, three_arms(), tmp_path)
    with pytest.raises(ConfigError, match="expected a folder without a run"):
        runner.run(plan_of(three_arms()), WORKLOAD, three_arms(), tmp_path)


def test_resuming_something_else_is_refused(tmp_path: Path) -> None:
    plan = plan_of(three_arms())
    with pytest.raises(KeyboardInterrupt):
        runner.run(plan, WORKLOAD, three_arms(plain={2: KeyboardInterrupt()}), tmp_path)
    with pytest.raises(ConfigError, match=r"others: seed was 0 and is 5;"):
        runner.run(replace(plan, seed=5), WORKLOAD, three_arms(), tmp_path, resume=True)
    with pytest.raises(ConfigError, match="workload was"):
        runner.run(plan, make_workload({"code": 7, "chat": 6}), three_arms(), tmp_path, resume=True)
    changed = three_arms()
    changed[1].basis["dtype"] = "bfloat16"
    with pytest.raises(ConfigError, match=r"'dflash': .*dtype was 'float32' and is 'bfloat16'"):
        runner.run(plan, WORKLOAD, changed, tmp_path, resume=True)
    with pytest.raises(ConfigError, match="expected the folder of a run"):
        runner.run(plan, WORKLOAD, three_arms(), tmp_path / "none", resume=True)


# Refusal to compare --------------------------------------------------------------------------------------------------


def test_arms_that_differ_in_more_than_speculation_are_refused(tmp_path: Path) -> None:
    scripted = three_arms()
    scripted[1].basis |= {"dtype": "bfloat16", "prefix_cache": "on"}
    del scripted[2].basis["engine"]
    with pytest.raises(ConfigError) as caught:
        runner.run(plan_of(scripted), WORKLOAD, scripted, tmp_path / "run")
    for said in (
        "dtype is 'float32' in 'plain' and 'bfloat16' in 'dflash'",
        "prefix_cache is not there in 'plain' and 'on' in 'dflash'",
        "engine is 'scripted 1' in 'plain' and not there in 'lookup'",
        "may_differ",
    ):
        assert said in str(caught.value)
    assert not (tmp_path / "run").exists()
    assert not any(arm.is_open for arm in scripted)
    allowed = plan_of(scripted, may_differ=("dtype", "prefix_cache", "engine"))
    assert runner.run(allowed, WORKLOAD, scripted, tmp_path / "run").is_complete


def test_an_allowance_that_names_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected some of dtype, engine; got dtypes"):
        runner.run(plan_of(three_arms(), may_differ=("dtypes",)), WORKLOAD, three_arms(), tmp_path)


def test_an_arm_that_changes_between_its_starts_is_refused(tmp_path: Path) -> None:
    class Changing(ScriptedArm):
        def close(self) -> None:
            self.basis = {**BASIS, "dtype": "bfloat16"}
            super().close()

    scripted = [ScriptedArm("plain"), Changing("dflash")]
    with pytest.raises(ConfigError, match="expected what it was when the run began"):
        runner.run(plan_of(scripted, num_starts=2), WORKLOAD, scripted, tmp_path)
    assert {place.block for place in places(records.read_run(tmp_path))} == {0}


# Deaths --------------------------------------------------------------------------------------------------------------


def test_an_arm_that_dies_comes_back_in_the_next_block(tmp_path: Path) -> None:
    scripted = three_arms(dflash={1: ArmError("out of memory")})
    run = runner.run(plan_of(scripted, num_blocks=3), WORKLOAD, scripted, tmp_path)
    assert seen(run, "dflash") == [(0, 0), (1, 1), (1, 1), (2, 1), (2, 1)]
    assert [len(seen(run, name)) for name in ("plain", "plain again", "lookup")] == [6, 6, 6]
    assert not run.is_complete
    (sentence,) = run.lost
    assert "'dflash' died in block 1, pass 7 (1 at once, temperature 0)" in sentence
    assert "of this block are missing: out of memory" in sentence
    assert records.read_run(tmp_path) == run


def test_an_arm_that_dies_in_two_blocks_in_a_row_is_out(tmp_path: Path) -> None:
    scripted = three_arms(dflash={0: ArmError("first"), 1: ArmError("second")})
    run = runner.run(plan_of(scripted, num_blocks=4), WORKLOAD, scripted, tmp_path)
    assert seen(run, "dflash") == []
    assert len(seen(run, "lookup")) == 8
    assert "all its further passes are missing: second" in run.lost[1]
    assert len(run.lost) == 2
    assert scripted[0].log.count(("open", "dflash")) == 2


def test_an_arm_that_does_not_come_back_is_out(tmp_path: Path) -> None:
    scripted = three_arms(dflash={0: ArmError("died")})
    scripted[1].fails_to_open = {1}
    run = runner.run(plan_of(scripted, num_blocks=4), WORKLOAD, scripted, tmp_path)
    assert [sentence.rpartition(": ")[2] for sentence in run.lost] == ["died", "dflash does not start"]
    assert scripted[0].log.count(("open", "dflash")) == 2


def test_an_arm_that_dies_now_and_then_stays(tmp_path: Path) -> None:
    scripted = three_arms(dflash={0: ArmError("a"), 3: ArmError("b")})
    run = runner.run(plan_of(scripted, num_blocks=4), WORKLOAD, scripted, tmp_path)
    assert [block for block, _ in seen(run, "dflash")] == [1, 1, 3, 3]


@pytest.mark.parametrize("name", ["plain", "dflash"])
def test_a_run_stops_when_nothing_is_left_to_compare(tmp_path: Path, name: str) -> None:
    scripted = three_arms(**{name: {0: ArmError("a"), 1: ArmError("b")}})[:2]
    run = runner.run(plan_of(scripted, num_blocks=5), WORKLOAD, scripted, tmp_path)
    assert {place.block for place in places(run)} <= {0, 1}
    assert not run.is_complete
    resumed = runner.run(plan_of(scripted, num_blocks=5), WORKLOAD, three_arms()[:2], tmp_path, resume=True)
    assert {place.block for place in places(resumed)} == {0, 1, 2, 3, 4}
    assert not resumed.is_complete, "what was lost stays lost"
    assert resumed.lost == run.lost


def test_an_arm_that_cannot_be_opened_at_the_beginning_ends_the_run(tmp_path: Path) -> None:
    scripted = three_arms()
    scripted[1].fails_to_open = {0}
    with pytest.raises(ArmError, match="does not start"):
        runner.run(plan_of(scripted), WORKLOAD, scripted, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert not any(arm.is_open for arm in scripted)


def test_arms_are_closed_behind_a_bug(tmp_path: Path) -> None:
    scripted = three_arms(dflash={1: ZeroDivisionError()})
    with pytest.raises(ZeroDivisionError):
        runner.run(plan_of(scripted), WORKLOAD, scripted, tmp_path)
    assert not any(arm.is_open for arm in scripted)


# Stopping early ------------------------------------------------------------------------------------------------------


def test_a_clear_decision_stops_the_run_and_it_is_complete(tmp_path: Path) -> None:
    asked: list[int] = []

    def decide(so_far: Run) -> bool:
        asked.append(len({place.block for place in places(so_far)}))
        return len(asked) == 2

    plan = plan_of(three_arms(), num_blocks=6, min_blocks=3)
    run = runner.run(plan, WORKLOAD, three_arms(), tmp_path, decide=decide)
    assert asked == [3, 4]
    assert {place.block for place in places(run)} == {0, 1, 2, 3}
    assert run.is_complete
    assert runner.run(plan, WORKLOAD, three_arms(), tmp_path, resume=True) == run


@pytest.mark.parametrize("stops_early", [True, False])
def test_nobody_is_asked_at_the_end_or_where_the_plan_forbids_it(tmp_path: Path, stops_early: bool) -> None:
    asked: list[Run] = []

    def decide(so_far: Run) -> bool:
        asked.append(so_far)
        return False

    plan = plan_of(three_arms(), num_blocks=3, min_blocks=1, stops_early=stops_early)
    assert runner.run(plan, WORKLOAD, three_arms(), tmp_path, decide=decide).is_complete
    assert len(asked) == (2 if stops_early else 0)


def test_a_run_that_was_killed_before_its_look_is_looked_at_first(tmp_path: Path) -> None:
    def killed(so_far: Run) -> bool:
        raise KeyboardInterrupt

    plan = plan_of(three_arms(), num_blocks=4)
    with pytest.raises(KeyboardInterrupt):
        runner.run(plan, WORKLOAD, three_arms(), tmp_path, decide=killed)
    resumed = runner.run(plan, WORKLOAD, three_arms(), tmp_path, resume=True, decide=lambda so_far: True)
    assert {place.block for place in places(resumed)} == {0}
    assert resumed.is_complete


# Openings and warm-up ------------------------------------------------------------------------------------------------


def test_exclusive_arms_are_never_open_together(tmp_path: Path) -> None:
    scripted = three_arms()
    run = runner.run(plan_of(scripted, is_exclusive=True), WORKLOAD, scripted, tmp_path)
    open_now: set[str] = set()
    for event, name in scripted[0].log:
        if event != "run":
            open_now = open_now | {name} if event == "open" else open_now - {name}
        assert len(open_now) <= 1
    order = [place.arm for place in places(run) if place.block == 0]
    assert order == ["plain", "dflash", "lookup", "plain again", "plain again", "lookup", "dflash", "plain"]
    opened = [name for event, name in scripted[0].log if event == "open"]
    assert opened[:9] == [
        "lookup",
        "dflash",
        "plain",
        "dflash",
        "lookup",
        "plain",
        "lookup",
        "dflash",
        "plain",
    ]
    assert [start for block, start in seen(run, "plain") if block == 0] == [0, 2]
    assert [start for block, start in seen(run, "plain again") if block == 0] == [1, 1]


def test_arms_are_opened_anew_for_each_start(tmp_path: Path) -> None:
    scripted = three_arms()
    run = runner.run(plan_of(scripted, num_blocks=4, num_starts=2), WORKLOAD, scripted, tmp_path)
    for name in ("plain", "dflash", "lookup", "plain again"):
        assert seen(run, name) == [(block, block // 2) for block in range(4) for _ in range(2)]


def test_each_start_and_load_is_warmed_up_until_it_is_steady(tmp_path: Path) -> None:
    scripted = [ScriptedArm("plain", warm_up_s=[0.9, 0.5, 0.3, 0.29]), ScriptedArm("dflash")]
    loads = (Load(1), Load(3), Load(rate_per_s=9.0))
    runner.run(plan_of(scripted, loads=loads, num_starts=2), WORKLOAD, scripted, tmp_path)
    warm_ups = [load for load, _ in scripted[0].warm_ups]
    steady = [Load(1), Load(1), Load(3), Load(3), loads[2], loads[2]]
    assert warm_ups == [Load(1), Load(1), *steady, *steady], "four rounds to settle, then two each"
    assert [load for load, _ in scripted[1].warm_ups] == [*steady, *steady]
    for load, jobs in scripted[0].warm_ups:
        assert len(jobs) == (load.concurrency or 8)
        assert {job.due_s for job in jobs} == {0.0}


def test_a_warm_up_that_never_settles_ends(tmp_path: Path) -> None:
    scripted = [ScriptedArm("plain", warm_up_s=[float(i) for i in range(9, 0, -1)]), ScriptedArm("dflash")]
    runner.run(plan_of(scripted), WORKLOAD, scripted, tmp_path)
    assert len(scripted[0].warm_ups) == 5


def test_failures_of_warm_up_are_said(tmp_path: Path) -> None:
    scripted = [ScriptedArm("plain"), ScriptedArm("dflash", failing=["warm-up-1"])]
    run = runner.run(plan_of(scripted, loads=(Load(3),)), WORKLOAD, scripted, tmp_path)
    assert run.lost == (
        "'dflash', 3 at once: 2 of 6 warm-up requests failed; the first: warm-up-1: no answer",
    )
    assert run.is_complete


# Progress ------------------------------------------------------------------------------------------------------------


def test_progress_says_where_it_is_and_what_is_left(tmp_path: Path) -> None:
    told: list[tuple[str, int, int, float | None]] = []
    runner.run(
        plan_of(three_arms()), WORKLOAD, three_arms(), tmp_path, progress=lambda *what: told.append(what)
    )
    stages = [stage for stage, *_ in told]
    assert "opening dflash" in stages and "warming up dflash, 1 at once" in stages
    assert "block 2: plain again, 1 at once, temperature 0, 2 of 2" in stages
    measuring = [
        (num_done, num_passes) for stage, num_done, num_passes, _ in told if stage.startswith("block")
    ]
    assert measuring == [
        (i, 16) for i in range(16) for _ in range(3)
    ]  # at its beginning and behind each of two
    first = stages.index("block 1: plain, 1 at once, temperature 0")
    assert told[first][3] is None, "nothing is known before the first pass"
    assert told[-1][3] is not None


def test_the_estimate_is_the_pace_of_the_same_kind_of_pass(tmp_path: Path) -> None:
    """An interrupted run leaves what it measured, so that the estimate of a resumed one is known beforehand."""
    slow_s, fast_s = 0.01 * (5 + 8), 0.005 * (5 + 8)
    workload = make_workload({"x": 2})
    plan = make_plan(items_per_kind=2, has_control=False)
    with pytest.raises(KeyboardInterrupt):
        runner.run(plan, workload, three_arms(dflash={2: KeyboardInterrupt()})[:2], tmp_path)
    left: list[float | None] = []

    def progress(stage: str, num_done: int, num_passes: int, left_s: float | None) -> None:
        if num_passes:
            left.append(left_s)

    runner.run(plan, workload, three_arms()[:2], tmp_path, resume=True, progress=progress)
    assert left[0] == pytest.approx(2 * slow_s + 2 * fast_s)


def test_the_estimate_leaves_out_what_an_arm_that_is_out_would_take(tmp_path: Path) -> None:
    scripted = three_arms(dflash={0: ArmError("a"), 1: ArmError("b")})
    left: dict[str, float | None] = {}

    def progress(stage: str, num_done: int, num_passes: int, left_s: float | None) -> None:
        left.setdefault(stage, left_s)

    plan = plan_of(scripted, num_blocks=4, has_control=False, max_new_tokens=5)
    runner.run(plan, make_workload({"x": 4}), scripted, tmp_path, progress=progress)
    plain_s, lookup_s = 5 * 0.01, 5 * 0.008
    assert left["block 4: plain, 1 at once, temperature 0"] == pytest.approx(2 * plain_s + 2 * lookup_s)
