"""Arms that follow a script: their speed, what fails, when they die; no time passes. And plans and items for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.bench.arms.base import ArmError, Done, Fingerprint, Job, Load, Outcome, Passed
from paceline.bench.runs.plan import ArmSpec, Plan
from paceline.bench.workloads.workload import Item, Workload

BASIS = {"engine": "scripted 1", "dtype": "float32"}


class ScriptedArm:
    """An arm on a clock of its own.

    Args:
        name: the plan's.
        s_per_token: of a request on its own.
        max_concurrency, basis, speculation: see `Arm` and `Fingerprint`.
        ends: number of a measured pass (its tries counted from 0, over all starts) → what is raised in it.
        fails_to_open: numbers of openings (counted from 0) that fail.
        warm_up_s: seconds per token of the warm-up rounds, the last one again when they are used up.
        failing: ids of jobs that fail.
        log: what happens, as words; arms may share one.
    """

    def __init__(
        self,
        name: str,
        s_per_token: float = 0.01,
        *,
        max_concurrency: int | None = None,
        basis: Mapping[str, str] = BASIS,
        ends: Mapping[int, BaseException] | None = None,
        warm_up_s: Sequence[float] = (0.01,),
        failing: Sequence[str] = (),
        log: list[tuple[str, str]] | None = None,
    ) -> None:
        self.name, self.max_concurrency = name, max_concurrency
        self.basis, self.ends = dict(basis), dict(ends or {})
        self.fails_to_open: set[int] = set()
        self.log = [] if log is None else log
        self.warm_ups: list[tuple[Load, tuple[Job, ...]]] = []
        self.runs: list[tuple[Load, tuple[Job, ...]]] = []
        self.is_open = False
        self._s_per_token, self._warm_up_s, self._failing = s_per_token, list(warm_up_s), set(failing)
        self._num_openings = 0

    def open(self) -> Fingerprint:
        if not self.is_open:
            self._num_openings += 1
            self.log.append(("open", self.name))
            if self._num_openings - 1 in self.fails_to_open:
                raise ArmError(f"{self.name} does not start")
        self.is_open = True
        return Fingerprint(self.basis, {"drafter": self.name}, {"weights": 1000})

    def run(self, jobs: Sequence[Job], load: Load, done: Done) -> Passed:
        assert self.is_open, f"{self.name} runs but is closed"
        if jobs[0].id.startswith("warm-up"):
            self.warm_ups.append((load, tuple(jobs)))
            pace = self._warm_up_s.pop(0) if len(self._warm_up_s) > 1 else self._warm_up_s[0]
        else:
            self.runs.append((load, tuple(jobs)))
            self.log.append(("run", self.name))
            pace = self._s_per_token
        outcomes = []
        for job in jobs:
            if job.id == jobs[-1].id and self.runs and not job.id.startswith("warm-up"):
                end = self.ends.get(len(self.runs) - 1)  # behind its other jobs: the pass is not whole
                if end is not None:
                    raise end
            outcomes.append(self._outcome(job, pace))
            done(outcomes[-1])
        wall_s = pace * sum(outcome.num_new_tokens or 0 for outcome in outcomes)
        return Passed(tuple(reversed(outcomes)), wall_s, counters={"num_steps": 3.0})

    def close(self) -> None:
        if self.is_open:
            self.log.append(("close", self.name))
        self.is_open = False

    def _outcome(self, job: Job, pace: float) -> Outcome:
        if job.id in self._failing:
            return Outcome(job.id, f"{job.id}: no answer", job.due_s)
        num_new_tokens = job.params.max_new_tokens
        e2e_s = pace * num_new_tokens
        acceptance = ((7, 2, 4), (7, 0, 1))
        return Outcome(
            job.id, None, job.due_s, pace, e2e_s, pace, 3, 5, num_new_tokens, "length", acceptance, "0a"
        )


def make_workload(sizes: Mapping[str, int], *, has_arrivals: bool = False) -> Workload:
    """Returns so many items of each kind, the kinds mixed, one a second where they have arrivals."""
    order = sorted((i / size, kind, i) for kind, size in sizes.items() for i in range(size))
    items = [
        Item(
            f"{kind}-{i}",
            kind,
            [{"role": "user", "content": f"{kind} {i}"}],
            max_new_tokens=None if i % 2 else 5 + i,
            arrival_s=float(second) if has_arrivals else None,
        )
        for second, (_, kind, i) in enumerate(order)
    ]
    return Workload("scripted", tuple(items))


def make_plan(names: Sequence[str] = ("plain", "dflash"), **options: Any) -> Plan:
    """Returns a small plan of scripted arms."""
    given = {"items_per_kind": 1, "num_blocks": 2, "min_blocks": 1, "max_new_tokens": 8, **options}
    return Plan(tuple(ArmSpec(name, "scripted") for name in names), **given)


def three_arms(**ends: Mapping[int, BaseException]) -> list[ScriptedArm]:
    """Returns a baseline and two faster arms with one log; `ends` by name, see `ScriptedArm`."""
    log: list[tuple[str, str]] = []
    return [
        ScriptedArm("plain", log=log, ends=ends.get("plain")),
        ScriptedArm("dflash", 0.005, log=log, ends=ends.get("dflash")),
        ScriptedArm("lookup", 0.008, log=log, ends=ends.get("lookup")),
    ]


def plan_of(scripted: Sequence[ScriptedArm], **options: Any) -> Plan:
    """Returns a small plan of these arms."""
    return make_plan([arm.name for arm in scripted], **options)
