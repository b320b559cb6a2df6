"""What lies between cells: break-even, throughput against interactivity, capacity, and where a gain ends. Pure.

Between two loads that were measured, lines are straight (on the log of the load where a load is the answer). Beyond
them nothing is said.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from paceline.bench.arms.base import Load
from paceline.bench.numbers.intervals import Crossing, Floats, Ints, crossing, sums
from paceline.bench.numbers.summary import BreakEven, Capacity, Cell, Frontier, Interval
from paceline.bench.numbers.table import Table, load_order
from paceline.bench.runs.plan import Rules

MIN_STEPS = 5
"""Fewer steps of a batch size than this are no mean time."""

# Break-even ----------------------------------------------------------------------------------------------------------


def break_even(cells: Sequence[Cell], baseline: str) -> tuple[BreakEven, ...]:
    """Returns the acceptance that each arm needs and has, for each batch size of which both made enough steps.

    Steps of all loads of a temperature are taken together. τ is the mean over loads, by their steps of that batch size.
    """
    found = []
    for arm, temperature in _arms(cells):
        plain, own = (_steps(cells, name, temperature) for name in (baseline, arm))
        for size in sorted(plain.keys() & own.keys()):
            length = _length(cells, arm, temperature, size)
            if arm != baseline and length is not None and min(plain[size][0], own[size][0]) >= MIN_STEPS:
                plain_ms, (total_ms, draft_ms, verify_ms) = float(plain[size][1]), map(float, own[size][1:])
                needed, parts = total_ms / plain_ms, (verify_ms + draft_ms) / plain_ms
                found.append(
                    BreakEven(
                        arm, temperature, size, plain_ms, draft_ms, verify_ms, total_ms, needed, parts, length
                    )
                )
    return tuple(found)


def _arms(cells: Sequence[Cell]) -> list[tuple[str, float]]:
    """Returns arms with their temperatures, in the order of the cells."""
    return list(dict.fromkeys((cell.arm, cell.temperature) for cell in cells))


def _steps(cells: Sequence[Cell], arm: str, temperature: float) -> dict[int, Floats]:
    """Returns number of steps, and mean whole, draft and verify milliseconds, by number of sequences."""
    sums: dict[int, Floats] = {}
    for cell in cells:
        if (cell.arm, cell.temperature, cell.kind) == (arm, temperature, None):
            for size, count, *times in cell.steps:
                sums[size] = sums.get(size, np.zeros(4)) + count * np.array([1.0, *times])
    return {size: np.array([known[0], *(known[1:] / known[0])]) for size, known in sums.items()}


def _length(cells: Sequence[Cell], arm: str, temperature: float, size: int) -> float | None:
    """Returns τ where steps of a batch size were made, `None` where it is not known."""
    pairs = [
        (cell.acceptance.length.estimate, count)
        for cell in cells
        if (cell.arm, cell.temperature, cell.kind) == (arm, temperature, None) and cell.acceptance is not None
        for at, count, *_ in cell.steps
        if at == size
    ]
    return (
        sum(length * count for length, count in pairs) / sum(count for _, count in pairs) if pairs else None
    )


# Throughput against interactivity ------------------------------------------------------------------------------------


def frontiers(cells: Sequence[Cell], baseline: str) -> tuple[Frontier, ...]:
    """Returns each arm's points over closed loads, and what it gains on the baseline at an equal value of either axis.

    Curves go through points that no other point of the arm beats on both axes.
    """
    known = {key: _points(cells, *key) for key in _arms(cells)}
    found = []
    for (arm, temperature), points in known.items():
        if not points:
            continue
        curve, base = _undominated(points), _undominated(known.get((baseline, temperature), ()))
        compared = arm != baseline and len(base) > 0
        found.append(
            Frontier(
                arm,
                temperature,
                points,
                at_equal_interactivity=_largest_gain(curve, base) if compared else None,
                at_equal_throughput=_largest_gain(curve[::-1, ::-1], base[::-1, ::-1]) if compared else None,
            )
        )
    return tuple(found)


def _points(cells: Sequence[Cell], arm: str, temperature: float) -> tuple[tuple[str, float, float], ...]:
    return tuple(
        (cell.load.label, cell.tokens_per_s_per_user.estimate, cell.tokens_per_s.estimate)
        for cell in cells
        if (cell.arm, cell.temperature, cell.kind) == (arm, temperature, None)
        and not cell.load.is_open
        and cell.tokens_per_s_per_user is not None
        and cell.tokens_per_s is not None
    )


def _undominated(points: Sequence[tuple[str, float, float]]) -> Floats:
    """Returns (points, 2), ascending in tok/s per user and descending in tok/s, without points that another beats."""
    kept: list[tuple[float, float]] = []
    for x, y in sorted(((x, y) for _, x, y in points), reverse=True):
        if not kept or y > kept[-1][1]:
            kept.append((x, y))
    return np.array(kept[::-1], dtype=np.float64).reshape(-1, 2)


def _largest_gain(curve: Floats, base: Floats) -> tuple[float, float] | None:
    """Returns the largest ratio of second coordinates at an equal first, and that first; `None` without a shared range.

    A ratio of two straight lines has no peak between their ends, so the points of both curves are enough.
    """
    low, high = max(curve[0, 0], base[0, 0]), min(curve[-1, 0], base[-1, 0])
    if low > high:
        return None
    places = np.unique([low, high, *curve[:, 0], *base[:, 0]])
    places = places[(places >= low) & (places <= high)]
    gains = np.interp(places, *curve.T) / np.interp(places, *base.T)
    best = int(gains.argmax())
    return float(gains[best]), float(places[best])


# Loads at which something ends ---------------------------------------------------------------------------------------


def capacities(table: Table, baseline: str, rules: Rules) -> tuple[Capacity, ...]:
    """Returns the highest load at which each arm meets the latency target, for closed loops and for rates.

    Attainment is made non-increasing over loads and is interpolated on the log of the load. A replay has a load of its
    own and no capacity.
    """
    found = []
    for temperature, is_open in sorted({(key[1], key[2].is_open) for key in table.cells}):
        arms = dict.fromkeys(key[0] for key in table.cells if key[0] != f"{baseline} again")
        loads = {arm: _loads(table, arm, temperature, is_open) for arm in arms}
        known = {
            arm: _attained(table, arm, temperature, loads[arm], rules.latency.attainment) for arm in arms
        }
        base = known.get(baseline)
        for arm, at in known.items():
            if at is not None:
                ratio = at.ratio(base, rules.confidence) if base is not None and arm != baseline else None
                load = at.interval(rules.confidence)
                speed = (
                    None if load is None else _good_speed(table, arm, temperature, loads[arm], load.estimate)
                )
                unit = "requests/s" if is_open else "at once"
                found.append(Capacity(arm, temperature, unit, load, at.is_censored, ratio, speed))
    return tuple(found)


def crossovers(table: Table, baseline: str, confidence: float) -> tuple[tuple[str, float, Interval], ...]:
    """Returns the closed load at which each arm's ratio to the baseline falls through 1, for those where it does."""
    return tuple(_crossovers(table, baseline, confidence))


def _crossovers(table: Table, baseline: str, confidence: float) -> Iterator[tuple[str, float, Interval]]:
    skipped = {baseline, f"{baseline} again"}
    for arm, temperature in dict.fromkeys(key[:2] for key in table.cells if key[0] not in skipped):
        pairs = []
        for load in _loads(table, arm, temperature, is_open=False):
            ours, theirs = (table.cells.get((name, temperature, load)) for name in (arm, baseline))
            if ours is not None and theirs is not None:
                items, log_ratios = table.log_ratios(ours, theirs)
                if len(items):
                    pairs.append((_size(load), items, log_ratios))
        at = _falls(table, pairs, 0.0)
        found = at.interval(confidence) if at is not None and not at.is_censored else None
        if found is not None:
            yield arm, temperature, found


def _loads(table: Table, arm: str, temperature: float, is_open: bool) -> list[Load]:
    """Returns the loads at which an arm was run, ascending, without replays."""
    loads = [key[2] for key in table.cells if key[:2] == (arm, temperature)]
    return sorted((load for load in loads if load.is_open == is_open and load.speed is None), key=load_order)


def _size(load: Load) -> float:
    return float(load.concurrency or load.rate_per_s or 0.0)


def _attained(
    table: Table, arm: str, temperature: float, loads: Sequence[Load], share: float
) -> Crossing | None:
    """Returns where the share of good answers falls below what is asked; `None` where no answer can be judged."""
    judged = [
        (_size(load), *table.by_item(table.cells[arm, temperature, load], table.is_good)) for load in loads
    ]
    return _falls(table, [found for found in judged if len(found[1])], share)


def _falls(table: Table, measured: Sequence[tuple[float, Ints, Floats]], level: float) -> Crossing | None:
    """Returns where values of requests, given as (load, requests, values), fall through a level; `None` without any.

    Clusters are those of the whole run, so that draws of two arms are paired.
    """
    if not measured:
        return None
    clusters = table.item_clusters(np.arange(table.num_items))
    totals = np.zeros((clusters.num, len(measured)))
    counts = np.zeros_like(totals)
    for j, (_, items, values) in enumerate(measured):
        totals[:, j], counts[:, j] = sums(clusters.ids[items], clusters.num, values, np.ones(len(items))).T
    return crossing(totals, counts, np.array([load for load, _, _ in measured]), level)


def _good_speed(table: Table, arm: str, temperature: float, loads: Sequence[Load], at: float) -> float | None:
    """Returns tokens per second of good answers at a load, from those of the loads around it."""
    speeds = []
    for load in loads:
        key = (arm, temperature, load)
        good = np.where(table.is_good == 1.0, table.num_new_tokens, 0.0)
        tokens, wall_s = table.pass_totals(table.cells[key], good, table.passes.get(key, ())).sum(axis=0)
        if wall_s <= 0.0:
            return None
        speeds.append(tokens / wall_s)
    return float(np.interp(np.log(at), np.log([_size(load) for load in loads]), speeds))
