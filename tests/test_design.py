"""What a run is made of: every arm the same jobs, there and back, items by kind, arrivals by seed."""

from __future__ import annotations

import math
from collections import Counter
from itertools import groupby, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.bench.arms.base import Load
from paceline.bench.runs.design import Design, PlannedPass, lay_out
from paceline.bench.runs.plan import Plan
from paceline.bench.workloads.workload import Workload
from paceline.core.errors import ConfigError
from scripted_arms import make_plan, make_workload

Limits = dict[str, int | None]
CLOSED, POISSON, REPLAY = (Load(1), Load(4)), Load(rate_per_s=2.0), Load(speed=2.0)


@st.composite
def tasks(draw: st.DrawFn) -> tuple[Plan, Workload, Limits]:
    names = ("plain", "dflash", "lookup")[: draw(st.integers(1, 3))]
    plan = make_plan(
        names,
        loads=tuple(draw(st.lists(st.sampled_from([*CLOSED, POISSON, REPLAY]), min_size=1, unique=True))),
        temperatures=tuple(draw(st.lists(st.sampled_from([0.0, 0.7]), min_size=1, unique=True))),
        items_per_kind=draw(st.integers(1, 4)),
        num_blocks=draw(st.integers(1, 5)),
        has_control=draw(st.booleans()),
        seed=draw(st.integers(0, 9)),
    )
    sizes = draw(st.dictionaries(st.sampled_from(["code", "chat", "maths"]), st.integers(1, 9), min_size=1))
    limits = {name: draw(st.sampled_from([None, 1, 4])) if i else None for i, name in enumerate(names)}
    return plan, make_workload(sizes, has_arrivals=True), limits


def groups(design: Design) -> list[list[PlannedPass]]:
    """Returns the passes of one block, temperature and load, group by group."""
    every = [planned for block in design.blocks for planned in block]
    return [
        list(group)
        for _, group in groupby(every, lambda p: (p.place.block, p.place.temperature, p.place.load))
    ]


@given(tasks())
@settings(max_examples=150, deadline=None)
def test_every_arm_does_the_same_twice_there_and_back(task: tuple[Plan, Workload, Limits]) -> None:
    plan, workload, limits = task
    design = lay_out(plan, workload, limits)
    assert len(groups(design)) == plan.num_blocks * len(plan.loads) * len(plan.temperatures)
    for group in groups(design):
        names = [planned.place.arm for planned in group]
        assert names == names[::-1]
        takes = [
            n for n, limit in limits.items() if not limit or (group[0].place.load.concurrency or 0) <= limit
        ]
        assert Counter(names) == dict.fromkeys([*takes, *([plan.control] if plan.has_control else [])], 2)
        assert all(planned.jobs == group[0].jobs for planned in group)
        ids = [job.id for job in group[0].jobs]
        assert len(set(ids)) == len(ids)
    for block, passes in enumerate(design.blocks):
        assert [planned.place.order for planned in passes] == list(range(len(passes)))
        assert {planned.place.block for planned in passes} == {block}


@given(tasks())
@settings(max_examples=100, deadline=None)
def test_items_are_stratified_by_kind_and_drawn_without_replacement(
    task: tuple[Plan, Workload, Limits],
) -> None:
    plan, workload, limits = task
    kinds = {item.id: item.kind for item in workload.items}
    used: Counter[str] = Counter()
    for group in groups(lay_out(plan, workload, limits)):
        if group[0].place.load.speed is not None:
            continue
        assert list(group[0].kinds) == [kinds[job.id] for job in group[0].jobs]
        shares = {kind: min(plan.items_per_kind, num) for kind, num in workload.counts.items()}
        assert Counter(group[0].kinds) == shares
        if group[0].place.temperature == plan.temperatures[0]:
            used.update(job.id for job in group[0].jobs)
    for kind in workload.kinds:
        times = [used[item.id] for item in workload.items if item.kind == kind]
        num_loads = sum(load.speed is None for load in plan.loads)
        assert max(times) - min(times) <= num_loads, "an item came again before all had been there"


@given(tasks())
@settings(max_examples=50, deadline=None)
def test_a_design_depends_on_its_seed_alone(task: tuple[Plan, Workload, Limits]) -> None:
    assert lay_out(*task) == lay_out(*task)


def test_arms_stand_at_another_place_in_each_block() -> None:
    plan = make_plan(("a", "b", "c"), num_blocks=4, has_control=False)
    firsts = [
        group[0].place.arm for group in groups(lay_out(plan, make_workload({"x": 9}), dict.fromkeys("abc")))
    ]
    assert firsts == ["a", "b", "c", "a"]


def test_jobs_have_the_smaller_limit_and_seeds_of_their_own() -> None:
    plan = make_plan(items_per_kind=3, max_new_tokens=7, temperatures=(0.5,), top_p=0.9)
    design = lay_out(plan, make_workload({"x": 3}), {"plain": None, "dflash": None})
    first, second = (block[0].jobs for block in design.blocks)
    limits = {job.id: job.params.max_new_tokens for job in first}
    assert limits == {"x-0": 5, "x-1": 7, "x-2": 7}
    assert {(job.params.temperature, job.params.top_p) for job in first} == {(0.5, 0.9)}
    seeds = [job.params.seed for job in (*first, *second)]
    assert len(set(seeds)) == 6, "an item's answer in the next block is another draw"
    other = lay_out(
        make_plan(items_per_kind=3, seed=1), make_workload({"x": 3}), {"plain": None, "dflash": None}
    )
    assert not {job.params.seed for job in other.blocks[0][0].jobs} & set(seeds)


def test_items_that_come_again_are_noted() -> None:
    plan = make_plan(items_per_kind=2, num_blocks=3)
    notes = lay_out(
        plan, make_workload({"big": 6, "small": 5, "tiny": 1}), {"plain": None, "dflash": None}
    ).notes
    assert len(notes) == 2
    assert "'small' has 5 items" in notes[0] and "6" in notes[0] and "each block has" not in notes[0]
    assert "'tiny' has 1 items" in notes[1] and "each block has 1" in notes[1]


def test_poisson_arrivals_have_their_mean_and_scale_with_the_rate() -> None:
    plan = make_plan(loads=(Load(rate_per_s=5.0), Load(rate_per_s=50.0)), items_per_kind=4000, num_blocks=1)
    slow, *_, fast = lay_out(plan, make_workload({"x": 4000}), {"plain": None, "dflash": None}).blocks[0]
    due_s = [job.due_s for job in slow.jobs]
    gaps = [after - before for before, after in pairwise(due_s)]
    assert due_s[0] == 0.0 and min(gaps) > 0.0
    assert sum(gaps) / len(gaps) == pytest.approx(0.2, rel=0.06)  # four standard errors
    assert sum(gap > 0.2 for gap in gaps) / len(gaps) == pytest.approx(math.exp(-1.0), abs=0.03)
    assert [10.0 * job.due_s for job in fast.jobs] == pytest.approx(due_s)


def test_a_closed_loop_has_no_due_times() -> None:
    design = lay_out(make_plan(), make_workload({"x": 4}), {"plain": None, "dflash": None})
    assert {job.due_s for block in design.blocks for planned in block for job in planned.jobs} == {0.0}


def test_a_replay_takes_consecutive_requests_at_their_own_pace() -> None:
    plan = make_plan(loads=(REPLAY,), items_per_kind=2, num_blocks=3)
    workload = make_workload({"x": 6, "y": 6}, has_arrivals=True)
    order = [item.id for item in workload.items]
    firsts = set()
    for block in lay_out(plan, workload, {"plain": None, "dflash": None}).blocks:
        ids = [job.id for job in block[0].jobs]
        first = order.index(ids[0])
        firsts.add(first)
        assert ids == order[first : first + 4]
        assert [job.due_s for job in block[0].jobs] == [0.0, 0.5, 1.0, 1.5]
    assert firsts == {0, 4, 8}


def test_a_replay_of_a_short_log_is_noted() -> None:
    plan = make_plan(loads=(REPLAY,), items_per_kind=2, num_blocks=3)
    notes = lay_out(plan, make_workload({"x": 5}, has_arrivals=True), {"plain": None, "dflash": None}).notes
    assert any("2 stretches of 2 requests for 3 blocks" in note for note in notes)


def test_a_replay_without_arrivals_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"4 of 4 in 'scripted' have none, such as 'x-0'"):
        lay_out(make_plan(loads=(REPLAY,)), make_workload({"x": 4}), {"plain": None, "dflash": None})


def test_an_arm_that_cannot_take_a_load_is_left_out_with_a_sentence() -> None:
    plan = make_plan(loads=(Load(1), Load(4), Load(8)))
    design = lay_out(plan, make_workload({"x": 4}), {"plain": None, "dflash": 4})
    assert design.lost == ("'dflash' was not run with 8 at once: it takes at most 4 at once",)


def test_a_load_beyond_the_baseline_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"baseline 'plain' takes, at most 2 at once; got 4 at once"):
        lay_out(make_plan(loads=(Load(4),)), make_workload({"x": 4}), {"plain": 2, "dflash": None})


def test_blocks_are_dealt_among_the_starts() -> None:
    plan = make_plan(num_blocks=5, num_starts=2)
    design = lay_out(plan, make_workload({"x": 5}), {"plain": None, "dflash": None})
    assert [block[0].place.start for block in design.blocks] == [0, 0, 0, 1, 1]
