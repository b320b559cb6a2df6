"""What a run keeps: one row a request, one record a pass, on disk as they come; see `records` for the folder."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.bench.arms.base import Fingerprint, Load, Outcome, StepTime


@dataclass(frozen=True, slots=True)
class Place:
    """Where in the design a pass stands.

    Args:
        block: blocks follow each other; each holds its own items, and every arm sees all of them.
        order: place of the pass in its block; arms go there and back, A B … B A, so that drift hits all alike.
        arm: its name.
        load, temperature: of the pass.
        start: how often the arm had been opened before: 0, 1, …; passes of one start share what a start decides.
    """

    block: int
    order: int
    arm: str
    load: Load
    temperature: float
    start: int = 0


@dataclass(frozen=True, slots=True)
class Row:
    """One request of one pass: `Outcome` with its place, its kind and its limit."""

    place: Place
    kind: str
    max_new_tokens: int
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class PassRecord:
    """One pass: its place and what is known of all its requests together; see `Passed`."""

    place: Place
    wall_s: float
    step_times: tuple[StepTime, ...] = ()
    peak_memory_bytes: int | None = None
    counters: dict[str, float] = field(default_factory=dict)
    copy_bytes_per_s: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Run:
    """Everything that a run measured: all that summaries and reports are made of.

    Args:
        plan: what was asked for, as JSON data; see `Plan`.
        workload: name, digest, number of items by kind, notes.
        environment: of the machine that ran it; see `engine.runtime.machine`.
        command: what repeats it.
        started: ISO date and time.
        arms: fingerprint of each arm by name, in the plan's order; the first is the baseline.
        rows, passes: whole passes only.
        lost: sentences: arms that died, passes that were not planned or not finished, and why.
        is_complete: whether nothing that was planned is missing (stopping early by rule is complete).
    """

    plan: dict[str, object]
    workload: dict[str, object]
    environment: dict[str, object]
    command: str
    started: str
    arms: dict[str, Fingerprint]
    rows: tuple[Row, ...]
    passes: tuple[PassRecord, ...]
    lost: tuple[str, ...] = ()
    is_complete: bool = True
