"""Runs with a planted truth, ways to spoil them, and the decision about their only candidate."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from paceline.bench.arms.base import Load, Outcome
from paceline.bench.numbers.summary import Decision, Summary
from paceline.bench.runs.plan import Rules
from paceline.bench.runs.rows import Row, Run
from paceline.bench.verdicts.decision import decide
from synthetic_runs import Scenario, make_run

KINDS = ("code", "chat", "maths")
LOADS = (Load(1), Load(4), Load(16))
SMALL: dict[str, Any] = {"has_control": False, "has_records": False, "has_steps": False}


def only(run: Run, rules: Rules | None = None, **more: Any) -> Decision:
    """Returns the decision about the only candidate, from the run alone."""
    (decision,) = decide(run, Summary("plain", ()), rules or Rules(), **more)
    return decision


def planted(ratio: Any, seed: int, **more: Any) -> Run:
    return make_run(Scenario(ratios={"plain": 1.0, "dflash": ratio}, kinds=KINDS, seed=seed, **more))


def until(run: Run, num_blocks: int) -> Run:
    """Returns a run as it was after so many blocks."""
    rows = tuple(row for row in run.rows if row.place.block < num_blocks)
    return dataclasses.replace(
        run, rows=rows, passes=tuple(p for p in run.passes if p.place.block < num_blocks)
    )


def changed(run: Run, change: Callable[[Row], Outcome]) -> Run:
    return dataclasses.replace(
        run, rows=tuple(dataclasses.replace(row, outcome=change(row)) for row in run.rows)
    )


def failed(row: Row) -> Outcome:
    return Outcome(row.outcome.id, f"{row.outcome.id}: connection reset")


def falling(kind: str, load: Load) -> float:
    return {1: 1.5, 4: 1.3, 16: 0.8}[load.concurrency or 0]
