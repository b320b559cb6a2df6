"""Which passes a run is made of: items, answers' seeds, arrivals and order, all from the plan's seed. Pure.

Inside a block, at each temperature and load, arms go there and back (A B C C B A), so that what drifts slowly hits all
of them alike; the block's number turns the line, so that none always stands at the same place. Every arm gets the same
jobs, seeds and arrivals. The baseline stands in the line a second time, under the control's name.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from paceline.bench.arms.base import Job, Load
from paceline.bench.runs.plan import Plan
from paceline.bench.runs.rows import Place
from paceline.bench.workloads.workload import Item, Workload
from paceline.core.errors import ConfigError
from paceline.core.params import SamplingParams

SEED_BITS = 31  # what every server takes


@dataclass(frozen=True, slots=True)
class PlannedPass:
    """One arm, one load, one temperature, the items of a block.

    Args:
        place: where it stands; its `start` is the one that the block is dealt to.
        jobs: what the arm gets.
        kinds: of each job.
    """

    place: Place
    jobs: tuple[Job, ...]
    kinds: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Design:
    """All passes of a run.

    Args:
        blocks: passes in the order in which they are run.
        lost: sentences about what was not planned, and why.
        notes: what a reader must know of the items.
    """

    blocks: tuple[tuple[PlannedPass, ...], ...]
    lost: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def lay_out(plan: Plan, workload: Workload, max_concurrency: Mapping[str, int | None]) -> Design:
    """Returns the passes of a plan. Pure.

    Args:
        plan: what was asked for.
        workload: where items come from.
        max_concurrency: of each arm by its name; `None` is no limit. An open loop queues, so it has no such limit.

    Raises:
        ConfigError: a load that the baseline cannot take, or a replay of items without arrivals.
    """
    line = _line(plan, max_concurrency)
    stratified, notes = _stratified(plan, workload)
    windows: list[tuple[Item, ...]] = []
    if any(load.speed is not None for load in plan.loads):
        windows, more = _windows(plan, workload)
        notes += more
    blocks = []
    for block in range(plan.num_blocks):
        items = {load: (windows if load.speed is not None else stratified)[block] for load in plan.loads}
        blocks.append(tuple(_passes(plan, block, line, items)))
    return Design(tuple(blocks), tuple(_left_out(plan, line, max_concurrency)), notes)


def _line(plan: Plan, max_concurrency: Mapping[str, int | None]) -> dict[Load, tuple[str, ...]]:
    """Returns who runs at each load, in the plan's order with the control at the end."""
    limits = {arm.name: max_concurrency[arm.name] for arm in plan.arms}
    for load in plan.loads:
        if not _takes(limits[plan.baseline], load):
            raise ConfigError(
                f"loads: expected what the baseline {plan.baseline!r} takes, at most {limits[plan.baseline]} at once; "
                f"got {load.label}; hint: leave that load out, or choose another baseline"
            )
    if plan.has_control:
        limits[plan.control] = limits[plan.baseline]
    return {load: tuple(name for name, limit in limits.items() if _takes(limit, load)) for load in plan.loads}


def _takes(limit: int | None, load: Load) -> bool:
    return limit is None or load.concurrency is None or load.concurrency <= limit


def _left_out(
    plan: Plan, line: Mapping[Load, Sequence[str]], max_concurrency: Mapping[str, int | None]
) -> Iterator[str]:
    for arm in plan.arms:
        loads = [load.label for load in plan.loads if arm.name not in line[load]]
        if loads:
            limit = max_concurrency[arm.name]
            yield f"{arm.name!r} was not run with {', '.join(loads)}: it takes at most {limit} at once"


# Items ---------------------------------------------------------------------------------------------------------------


def _stratified(plan: Plan, workload: Workload) -> tuple[list[tuple[Item, ...]], tuple[str, ...]]:
    """Returns each block's items, equally many of every kind, and notes on kinds that are too small for that."""
    kinds: dict[str, list[Item]] = {}
    for item in workload.items:
        kinds.setdefault(item.kind, []).append(item)
    notes = []
    for kind, items in kinds.items():
        _random(plan, "items", kind).shuffle(items)
        if len(items) < plan.items_per_kind * plan.num_blocks:
            notes.append(
                f"kind {kind!r} has {len(items)} items, {plan.num_blocks} blocks of {plan.items_per_kind} need "
                f"{plan.items_per_kind * plan.num_blocks}: items come again in later blocks"
                + (f", and each block has {len(items)}" if len(items) < plan.items_per_kind else "")
            )
    blocks = []
    for block in range(plan.num_blocks):
        drawn = [item for items in kinds.values() for item in _dealt(items, plan.items_per_kind, block)]
        _random(plan, "order", block).shuffle(drawn)
        blocks.append(tuple(drawn))
    return blocks, tuple(notes)


def _dealt(items: Sequence[Item], num_items: int, block: int) -> list[Item]:
    """Returns a block's share of a shuffled kind: the next ones, from the front again behind the last."""
    num_items = min(num_items, len(items))  # no item twice in a block
    return [items[(block * num_items + i) % len(items)] for i in range(num_items)]


def _windows(plan: Plan, workload: Workload) -> tuple[list[tuple[Item, ...]], tuple[str, ...]]:
    """Returns each block's stretch of a log, in order of arrival; stretches are drawn from all over the log."""
    missing = [item.id for item in workload.items if item.arrival_s is None]
    if missing:
        raise ConfigError(
            f"loads: a replay needs the arrival of every request; {len(missing)} of {len(workload.items)} in "
            f"{workload.name!r} have none, such as {missing[0]!r}; hint: use a log with time stamps, or a rate"
        )
    items = sorted(workload.items, key=lambda item: item.arrival_s or 0.0)
    size = min(plan.items_per_kind * len({item.kind for item in items}), len(items))
    starts = list(range(0, len(items) - size + 1, size))
    _random(plan, "stretches").shuffle(starts)
    notes: tuple[str, ...] = ()
    if len(starts) < plan.num_blocks:
        notes = (
            f"replay: the log has {len(starts)} stretches of {size} requests for {plan.num_blocks} blocks: "
            "stretches come again in later blocks",
        )
    chosen = [starts[block % len(starts)] for block in range(plan.num_blocks)]
    return [tuple(items[start : start + size]) for start in chosen], notes


# Passes --------------------------------------------------------------------------------------------------------------


def _passes(
    plan: Plan, block: int, line: Mapping[Load, Sequence[str]], items: Mapping[Load, tuple[Item, ...]]
) -> Iterator[PlannedPass]:
    start, order = block * plan.num_starts // plan.num_blocks, 0
    for temperature in plan.temperatures:
        for load in plan.loads:
            jobs = _jobs(plan, block, load, temperature, items[load])
            kinds = tuple(item.kind for item in items[load])
            turn = block % len(line[load])
            there = (*line[load][turn:], *line[load][:turn])
            for name in (*there, *reversed(there)):
                yield PlannedPass(Place(block, order, name, load, temperature, start), jobs, kinds)
                order += 1


def _jobs(plan: Plan, block: int, load: Load, temperature: float, items: Sequence[Item]) -> tuple[Job, ...]:
    due_s = _due_s(plan, block, load, items)
    return tuple(
        Job(
            item.id,
            item.messages,
            SamplingParams(
                max_new_tokens=min(item.max_new_tokens or plan.max_new_tokens, plan.max_new_tokens),
                temperature=temperature,
                top_p=plan.top_p,
                seed=_number(plan, "answer", item.id, block),
            ),
            due,
        )
        for item, due in zip(items, due_s, strict=True)
    )


def _due_s(plan: Plan, block: int, load: Load, items: Sequence[Item]) -> list[float]:
    """Returns when each job is due; the first at once. All rates draw the same gaps, on their own scale."""
    if load.rate_per_s is not None:
        rng = _random(plan, "arrivals", block)
        gaps = [rng.expovariate(1.0) / load.rate_per_s for _ in items[1:]]
        return [0.0, *accumulate(gaps)]
    if load.speed is not None:
        first = items[0].arrival_s or 0.0
        return [((item.arrival_s or 0.0) - first) / load.speed for item in items]
    return [0.0] * len(items)


def _random(plan: Plan, *what: object) -> random.Random:
    return random.Random(_number(plan, *what))


def _number(plan: Plan, *what: object) -> int:
    """Returns a number that depends on the plan's seed and on what it is for, and on nothing else."""
    digest = hashlib.sha256(repr((plan.seed, *what)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> (64 - SEED_BITS)
