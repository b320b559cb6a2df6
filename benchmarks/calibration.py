"""Whether `paceline bench` keeps its word on recorded noise: equal arms are not told apart, and slower ones are found.

    python benchmarks/calibration.py RUN [--num-simulations 100] [--slowdown 0.1]

RUN is the folder of a run with the A/A control, so that the baseline was measured twice in every block. A simulated run
takes the recorded blocks in any order: each once, and again where it is longer than the recorded one. In each, the
first passes of baseline and control form a pair, and so do the second ones; a coin for each pair decides which of the
two is called the baseline. Such arms are equal, with the noise of the machine that measured them. Each simulated run
goes through summary and decision. Then one of the two is made slower, and the same is asked. Nothing is timed here.

Intervals at 95 % hold the truth in 95 of 100 runs on average; over the coins of one recorded run the share is a few
points above or below, and with few blocks there are few different coins.

A coin hides a control that is always slower, so the recorded comparison itself stands beside the simulated ones.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import random
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.bench.arms.base import Fingerprint, Load
from paceline.bench.exactness.statistics import binomial_bounds
from paceline.bench.numbers.metrics import summarise
from paceline.bench.numbers.summary import Interval
from paceline.bench.numbers.table import tabulate
from paceline.bench.runs.plan import ArmSpec, Plan
from paceline.bench.runs.records import read_run
from paceline.bench.runs.rows import PassRecord, Place, Row, Run
from paceline.bench.verdicts.comparisons import compare
from paceline.bench.verdicts.decision import decide
from paceline.engine.runtime import machine

TWIN = "twin"
SIZES = (2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48)

Ratios = dict[str, Interval]
"""By load and temperature, the whole traffic's ratio at the plan's confidence."""

Block = tuple[list[Row], list[PassRecord]]


def recorded_blocks(run: Run) -> list[Block]:
    """Returns rows and passes of the baseline and its control, block by block. Pure."""
    plan = Plan.from_dict(run.plan)
    both = (plan.baseline, plan.control)
    blocks: dict[int, Block] = defaultdict(lambda: ([], []))
    for row in run.rows:
        if row.place.arm in both:
            blocks[row.place.block][0].append(row)
    for record in run.passes:
        if record.place.arm in both:
            blocks[record.place.block][1].append(record)
    whole = [block for _, block in sorted(blocks.items()) if _is_whole(block, plan)]
    if len(whole) < 2:
        raise SystemExit(f"expected two blocks or more with {both[0]!r} and {both[1]!r}, got {len(whole)}")
    return whole


def _is_whole(block: Block, plan: Plan) -> bool:
    """Whether every pass of the baseline has its pass of the control."""
    counts = Counter((r.place.temperature, r.place.load, r.place.arm) for r in block[1])
    return all(
        counts[temperature, load, plan.baseline] == counts[temperature, load, plan.control] > 0
        for temperature, load, _ in counts
    )


def simulate(run: Run, blocks: Sequence[Block], num_blocks: int, slowdown: float, seed: object) -> Run:
    """Returns a run of the baseline and a twin made of its own recorded passes. Pure.

    Args:
        run: the recorded one.
        blocks: its blocks; see `recorded_blocks`.
        num_blocks: to draw.
        slowdown: share of its speed that the twin loses.
        seed: of the draws.
    """
    plan = Plan.from_dict(run.plan)
    rng = random.Random(repr(seed))
    rows: list[Row] = []
    passes: list[PassRecord] = []
    drawn = [
        i for _ in range(-(-num_blocks // len(blocks))) for i in rng.sample(range(len(blocks)), len(blocks))
    ]
    for number, (drawn_rows, drawn_passes) in enumerate(blocks[i] for i in drawn[:num_blocks]):
        called = _coins(plan, [record.place for record in drawn_passes], number, rng)
        for row in drawn_rows:
            place = called[row.place]
            factor = 1.0 / (1.0 - slowdown) if place.arm == TWIN else 1.0
            rows.append(_slower(dataclasses.replace(row, place=place), factor))
        passes += [dataclasses.replace(record, place=called[record.place]) for record in drawn_passes]
    arms = (plan.arms[0], ArmSpec(TWIN, plan.arms[0].kind))
    simulated = dataclasses.replace(plan, arms=arms, num_blocks=num_blocks, num_starts=1, has_control=False)
    known = run.arms.get(plan.baseline, Fingerprint({}))
    return dataclasses.replace(
        run,
        plan=simulated.to_dict(),
        arms={plan.baseline: known, TWIN: known},
        rows=tuple(rows),
        passes=tuple(passes),
    )


def _coins(plan: Plan, places: Sequence[Place], block: int, rng: random.Random) -> dict[Place, Place]:
    """Returns where each recorded pass stands in a simulated block: pairs change names, or keep them, by a coin."""
    cells: dict[tuple[float, Load, str], list[Place]] = defaultdict(list)
    for place in sorted(places, key=lambda place: place.order):
        cells[place.temperature, place.load, place.arm].append(place)
    called = {}
    for (temperature, load, arm), ours in cells.items():
        if arm == plan.baseline:
            for pair in zip(ours, cells[temperature, load, plan.control], strict=True):
                names = rng.sample((plan.baseline, TWIN), 2)
                for place, name in zip(pair, names, strict=True):
                    called[place] = dataclasses.replace(place, block=block, arm=name)
    return called


def _slower(row: Row, factor: float) -> Row:
    times = {name: getattr(row.outcome, name) for name in ("ttft_s", "e2e_s", "max_gap_s")}
    slower = {name: value * factor for name, value in times.items() if value is not None}
    return dataclasses.replace(row, outcome=dataclasses.replace(row.outcome, **slower))


def whole_ratios(run: Run, arm: str) -> Ratios:
    """Returns the ratio of the whole traffic at each load and temperature. Pure."""
    plan = Plan.from_dict(run.plan)
    table = tabulate(run, plan.rules.latency)
    return {
        f"{load.label}, temperature {temperature:g}": comparisons[0].interval(
            (1.0 - plan.rules.confidence) / 2.0
        )
        for temperature in plan.temperatures
        for load, comparisons in compare(table, plan.baseline, arm, temperature).items()
        if comparisons
    }


def no_difference(run: Run, blocks: Sequence[Block], num_blocks: int, num_simulations: int) -> dict[str, Any]:
    """Returns how many comparisons of equal arms say "no difference", by load, and what was decided about the twin."""
    held: Counter[str] = Counter()
    verdicts: Counter[str] = Counter()
    for i in range(num_simulations):
        simulated = simulate(run, blocks, num_blocks, 0.0, ("equal", i))
        rules = Plan.from_dict(simulated.plan).rules
        summary = summarise(simulated, rules)
        for cell in summary.cells:
            if cell.arm == TWIN and cell.kind is None and cell.ratio is not None:
                place = f"{cell.load.label}, temperature {cell.temperature:g}"
                held[place] += cell.ratio.low <= 1.0 <= cell.ratio.high
        (decision,) = decide(simulated, summary, rules)
        verdicts[decision.verdict] += 1
    shares = {place: binomial_bounds(count, num_simulations) for place, count in held.items()}
    return {
        "num_blocks": num_blocks,
        "holds_1": dict(held),
        "share_holding_1_95": {place: [round(end, 4) for end in ends] for place, ends in shares.items()},
        "verdicts": dict(verdicts),
    }


def found_slower(
    run: Run, blocks: Sequence[Block], sizes: Sequence[int], slowdown: float, num_simulations: int
) -> dict[str, dict[int, int]]:
    """Returns how often the slower twin is found so, its interval below 1, by load and number of blocks."""
    found: dict[str, dict[int, int]] = defaultdict(lambda: dict.fromkeys(sizes, 0))
    for size in sizes:
        for i in range(num_simulations):
            simulated = simulate(run, blocks, size, slowdown, ("slower", size, i))
            for place, ratio in whole_ratios(simulated, TWIN).items():
                found[place][size] += ratio.high < 1.0
    return {place: dict(counts) for place, counts in found.items()}


def always_from(counts: Mapping[int, int], num_simulations: int) -> int | None:
    """Returns the number of blocks from which on the slower twin is found every time. Pure."""
    misses = [size for size, count in counts.items() if count < num_simulations]
    return next((size for size in sorted(counts) if size > max(misses, default=0)), None)


def main() -> None:
    """Runs the benchmark and stores its result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("--num-simulations", type=int, default=100)
    parser.add_argument("--slowdown", type=float, default=0.1)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/calibration.json"))
    arguments = parser.parse_args()
    run, count = read_run(arguments.run), arguments.num_simulations
    plan, blocks = Plan.from_dict(run.plan), recorded_blocks(run)
    sizes = sorted({*SIZES, len(blocks)})
    equal = no_difference(run, blocks, len(blocks), count)
    print(json.dumps(equal), flush=True)
    slower = found_slower(run, blocks, sizes, arguments.slowdown, count)
    result = {
        "command": " ".join(["python", *sys.argv]),
        "date": time.strftime("%Y-%m-%d"),
        "environment": machine(),
        "run": {
            "folder": arguments.run.as_posix(),
            "started": run.started,
            "environment": run.environment,
            "num_blocks": len(blocks),
            "confidence": plan.rules.confidence,
        },
        "num_simulations": count,
        "recorded": {place: _plain(ratio) for place, ratio in whole_ratios(run, plan.control).items()},
        "equal": equal,
        "slower": {
            place: {
                "slowdown": arguments.slowdown,
                "found_at_this_size": counts[len(blocks)],
                "always_found_from_blocks": always_from(counts, count),
                "found_by_blocks": counts,
            }
            for place, counts in slower.items()
        },
    }
    print(json.dumps(result["slower"]), flush=True)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _plain(interval: Interval) -> list[float | None]:
    """Returns estimate and ends, null for an infinite one."""
    ends = (interval.estimate, interval.low, interval.high)
    return [round(value, 4) if math.isfinite(value) else None for value in ends]


if __name__ == "__main__":
    main()
