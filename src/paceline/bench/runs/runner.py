"""Runs a plan: opens and warms up the arms, runs pass after pass, keeps each, and stops when the decision is clear."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from statistics import fmean
from time import perf_counter

from paceline.bench.arms.base import Arm, ArmError, Load, Outcome
from paceline.bench.runs import records
from paceline.bench.runs.design import Design, PlannedPass, lay_out
from paceline.bench.runs.lineup import WARM_UP_TOKENS, Lineup, check_comparable
from paceline.bench.runs.plan import Plan
from paceline.bench.runs.rows import PassRecord, Row, Run
from paceline.bench.workloads.workload import Workload
from paceline.core.errors import ConfigError
from paceline.core.params import SamplingParams
from paceline.engine.runtime import machine

Progress = Callable[[str, int, int, float | None], None]
"""Told what is going on, the number of passes behind, of all passes, and estimated seconds left (`None`: unknown)."""

Decide = Callable[[Run], bool]
"""Looks at the run so far and says whether the decision is clear. Which look it is follows from plan and blocks."""

PassKind = tuple[str, Load, float]


def run(
    plan: Plan,
    workload: Workload,
    arms: Sequence[Arm],
    folder: Path,
    *,
    command: str = "",
    resume: bool = False,
    progress: Progress = lambda stage, num_done, num_passes, left_s: None,
    decide: Decide = lambda so_far: False,
) -> Run:
    """Returns what the passes of a plan measured; every whole pass is in the folder at once.

    Args:
        plan: what to do.
        workload: what to ask.
        arms: those of the plan, in its order. They are closed at the end, however it comes.
        folder: of the run; see `records`.
        command: what repeats the run, without secrets.
        resume: go on behind the last whole pass of the run in the folder; a complete run is returned as it is.
        progress: see `Progress`.
        decide: asked after each block from `min_blocks` on, where the plan may stop early.

    Raises:
        ConfigError: a folder that holds a run already, or none to resume, or one of another plan, workload or arm;
            arms that may not be compared; a plan that cannot be laid out.
        ArmError: an arm that cannot be opened at the beginning.
        KeyboardInterrupt: after Ctrl-C; whole passes are kept, and the run can be resumed.
    """
    design = lay_out(plan, workload, {arm.name: arm.max_concurrency for arm in arms})
    stored = _stored(plan, workload, folder, resume)
    if stored is not None and stored.is_complete:
        return stored
    with ExitStack() as stack:
        for arm in arms:
            stack.callback(arm.close)
        lineup = _opened(plan, arms, stored, progress)
        begun = stored or _begun(plan, workload, design, lineup, command)
        return _Runner(plan, design, lineup, begun, folder, progress).run(decide)


def _stored(plan: Plan, workload: Workload, folder: Path, resume: bool) -> Run | None:
    """Returns the run to go on with, if any."""
    if not resume:
        if records.holds_run(folder):
            raise ConfigError(
                f"{folder}: expected a folder without a run, got one with; hint: resume it, or use another"
            )
        return None
    stored = records.read_run(folder)
    now = {**records.plain(plan.to_dict()), "workload": workload.digest}
    before = {**stored.plan, "workload": stored.workload.get("digest")}
    changed = [
        f"{name} was {before.get(name)!r} and is {now.get(name)!r}"
        for name in {**before, **now}
        if before.get(name) != now.get(name)
    ]
    if changed:
        raise ConfigError(
            f"{folder}: expected the plan and the workload with which the run began, got others: {'; '.join(changed)}; "
            "hint: resume it with those, or begin a new run in another folder"
        )
    return stored


def _opened(plan: Plan, arms: Sequence[Arm], stored: Run | None, progress: Progress) -> Lineup:
    """Returns the arms, once each has been open and all may be compared."""
    num_openings: dict[str, int] = {}
    for record in stored.passes if stored else ():
        name = plan.baseline if record.place.arm == plan.control else record.place.arm
        num_openings[name] = max(num_openings.get(name, 0), record.place.start + 1)
    lineup = Lineup(arms, plan.is_exclusive, stored.arms if stored else {}, num_openings)
    for arm in reversed(arms):  # the baseline last: it comes first in the first block, and then it is open
        progress(f"opening {arm.name}", 0, 0, None)
        lineup.open(arm.name)
    check_comparable(lineup.fingerprints, plan.may_differ)
    return lineup


def _begun(plan: Plan, workload: Workload, design: Design, lineup: Lineup, command: str) -> Run:
    """Returns a run in which nothing has been measured yet."""
    arms = lineup.fingerprints
    if plan.has_control:
        arms[plan.control] = arms[plan.baseline]
    return Run(
        plan=records.plain(plan.to_dict()),
        workload={
            "name": workload.name,
            "digest": workload.digest,
            "kinds": workload.counts,
            "notes": [*workload.notes, *design.notes],
        },
        environment=machine(),
        command=command,
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        arms=arms,
        rows=(),
        passes=(),
        lost=design.lost,
        is_complete=False,
    )


class _Runner:
    """A run on its way.

    Invariant: `run.json` and `rows.jsonl` hold all that `_run`, `_rows` and `_passes` do, except during a pass.
    """

    def __init__(
        self, plan: Plan, design: Design, lineup: Lineup, begun: Run, folder: Path, progress: Progress
    ) -> None:
        self._plan, self._design, self._lineup, self._folder = plan, design, lineup, folder
        self._progress = progress
        self._run = begun
        self._rows, self._passes = list(begun.rows), list(begun.passes)
        self._died_in: dict[str, int] = {}  # the last block in which an arm died
        self._out: set[str] = set()
        # Seconds of the last pass of each kind.
        self._pace = {_kind(record): record.wall_s for record in begun.passes}
        self._ahead = [planned for block in design.blocks for planned in block]
        self._num_passes = len(self._ahead)

    def run(self, decide: Decide) -> Run:
        """Returns the finished run. Mutates: the folder."""
        records.write(self._run, self._folder)
        records.cut_tail(self._folder)
        last = max(
            ((at.block, at.order) for at in (record.place for record in self._passes)), default=(0, -1)
        )
        self._ahead = [p for p in self._ahead if (p.place.block, p.place.order) > last]
        start, num_planned = self._design.blocks[last[0]][0].place.start, 0
        for block, planned in enumerate(self._design.blocks):
            num_planned += len(planned)
            if block < last[0]:
                continue
            if planned[0].place.start != start:
                self._lineup.close()
                start = planned[0].place.start
            while self._ahead and self._ahead[0].place.block == block:
                self._try(self._ahead.pop(0))
            if self._is_pointless() or self._is_clear(block + 1, decide) or self._is_out_of_time(block + 1):
                break
        self._run = replace(self._run, is_complete=len(self._passes) == num_planned)
        records.write(self._run, self._folder)
        return self._so_far()

    def _so_far(self) -> Run:
        return replace(self._run, rows=tuple(self._rows), passes=tuple(self._passes))

    def _is_clear(self, num_blocks: int, decide: Decide) -> bool:
        """Returns whether the run may stop early; at its end nobody needs to ask."""
        plan = self._plan
        if not plan.stops_early or not plan.min_blocks <= num_blocks < plan.num_blocks:
            return False
        return decide(self._so_far())

    def _is_out_of_time(self, num_blocks: int) -> bool:
        """Returns whether another block would end after the plan's time, and says so."""
        plan, spent_s = self._plan, sum(record.wall_s for record in self._passes)
        if (
            plan.max_s is None
            or num_blocks == plan.num_blocks
            or spent_s * (1 + 1 / num_blocks) <= plan.max_s
        ):
            return False
        self._lose(
            f"stopped after {num_blocks} of {plan.num_blocks} blocks: one more would have ended after the "
            f"{plan.max_s:g} s of the plan"
        )
        return True

    # One pass --------------------------------------------------------------------------------------------------------

    def _try(self, planned: PlannedPass) -> None:
        """Runs a pass unless its arm is out; an arm that dies loses its further passes of the block."""
        name = self._owner(planned)
        if name in self._out or self._died_in.get(name) == planned.place.block:
            return
        try:
            self._measure(planned, name)
        except ArmError as error:
            self._bury(planned, name, error)

    def _measure(self, planned: PlannedPass, name: str) -> None:
        place = planned.place
        if not self._lineup.is_open(name):
            self._say(f"opening {name}", planned)
        arm = self._lineup.open(name)
        if not self._lineup.is_warm(name, place.load):
            self._say(f"warming up {name}, {place.load.label}", planned)
            self._warm_up(planned, name)
        passed = arm.run(planned.jobs, place.load, self._counting(planned))
        place = replace(place, start=self._lineup.start(name))
        by_id = {outcome.id: outcome for outcome in passed.outcomes}
        rows = [
            Row(place, kind, job.params.max_new_tokens, by_id[job.id])
            for job, kind in zip(planned.jobs, planned.kinds, strict=True)
        ]
        record = PassRecord(
            place,
            passed.wall_s,
            passed.step_times,
            passed.peak_memory_bytes,
            dict(passed.counters),
            passed.copy_bytes_per_s,
        )
        records.append_pass(record, rows, self._folder)
        self._rows += rows
        self._passes.append(record)
        self._pace[_kind(record)] = record.wall_s
        for note in passed.notes:
            self._lose(f"{name!r}, {place.load.label}: {note}")

    def _warm_up(self, planned: PlannedPass, name: str) -> None:
        params = SamplingParams(
            max_new_tokens=min(WARM_UP_TOKENS, self._plan.max_new_tokens),
            temperature=planned.place.temperature,
            top_p=self._plan.top_p,
            seed=self._plan.seed,
        )
        sentence = self._lineup.warm_up(name, planned.place.load, params)
        if sentence is not None:
            self._lose(sentence)

    def _owner(self, planned: PlannedPass) -> str:
        """Returns the name of the arm that runs the pass: the control is the baseline."""
        return self._plan.baseline if planned.place.arm == self._plan.control else planned.place.arm

    # Deaths ----------------------------------------------------------------------------------------------------------

    def _bury(self, planned: PlannedPass, name: str, error: ArmError) -> None:
        """Notes that an arm died; it is opened again for the next block, and is out when it dies there too."""
        place = planned.place
        if self._died_in.get(name) == place.block - 1:
            self._out.add(name)
        self._died_in[name] = place.block
        self._lineup.close(name)
        missing = "all its further passes" if name in self._out else "its further passes of this block"
        self._lose(
            f"{name!r} died in block {place.block + 1}, pass {place.order + 1} ({place.load.label}, temperature "
            f"{place.temperature:g}), and {missing} are missing: {error}"
        )

    def _is_pointless(self) -> bool:
        """Returns whether nothing is left to compare."""
        candidates = {arm.name for arm in self._plan.arms[1:]}
        return self._plan.baseline in self._out or (bool(candidates) and candidates <= self._out)

    def _lose(self, sentence: str) -> None:
        if sentence not in self._run.lost:
            self._run = replace(self._run, lost=(*self._run.lost, sentence))
            records.write(self._run, self._folder)

    # Progress --------------------------------------------------------------------------------------------------------

    def _counting(self, planned: PlannedPass) -> Callable[[Outcome], None]:
        """Returns what counts a pass's outcomes aloud."""
        place = planned.place
        where = f"block {place.block + 1}: {place.arm}, {place.load.label}, temperature {place.temperature:g}"
        began, counted = perf_counter(), count(1)
        self._say(where, planned)

        def done(outcome: Outcome) -> None:
            text = f"{where}, {next(counted)} of {len(planned.jobs)}"
            self._say(text, planned, perf_counter() - began)

        return done

    def _say(self, stage: str, planned: PlannedPass, elapsed_s: float = 0.0) -> None:
        num_done = self._num_passes - len(self._ahead) - 1
        left_s = None
        if self._pace:
            typical_s = fmean(self._pace.values())
            now_s = max(0.0, self._pace.get(_kind(planned), typical_s) - elapsed_s)
            left_s = now_s + sum(self._pace.get(_kind(p), typical_s) for p in self._still_ahead())
        self._progress(stage, num_done, self._num_passes, left_s)

    def _still_ahead(self) -> Iterator[PlannedPass]:
        return (p for p in self._ahead if self._owner(p) not in self._out)


def _kind(planned: PlannedPass | PassRecord) -> PassKind:
    place = planned.place
    return place.arm, place.load, place.temperature
