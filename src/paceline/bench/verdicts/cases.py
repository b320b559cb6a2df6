"""Candidate arms of a run with all that speaks for and against them: speed, service, memory and exactness. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from scipy import special

from paceline.bench.arms.base import Load
from paceline.bench.numbers.intervals import Ints, share_interval
from paceline.bench.numbers.summary import Interval
from paceline.bench.numbers.table import Table, load_order, tabulate
from paceline.bench.pages import amounts
from paceline.bench.runs.plan import Plan, Rules
from paceline.bench.runs.rows import Run
from paceline.bench.verdicts.comparisons import BELOW, UNCLEAR, compare
from paceline.bench.verdicts.findings import (
    CANNOT_TELL,
    OFF,
    ON_FOR,
    VERDICTS,
    Blocker,
    Evidence,
    Finding,
    Sureness,
    judge,
)


@dataclass(frozen=True)
class Case:
    """A candidate.

    Args:
        run, table, plan, rules: see there.
        arm: its name.
        sureness: that each claim needs.
        verified: report of `paceline verify --json` about this arm, `None` where nobody verified it.
    """

    run: Run
    table: Table
    plan: Plan
    rules: Rules
    arm: str
    sureness: Sureness
    verified: Mapping[str, Any] | None = None

    @property
    def baseline(self) -> str:
        """Name of what it is compared with."""
        return self.plan.baseline

    @cached_property
    def loads(self) -> tuple[Load, ...]:
        """Loads at which both were run and that count, ascending."""
        both = [{key[2] for key in self.table.cells if key[0] == name} for name in (self.arm, self.baseline)]
        return tuple(load for load in sorted(both[0] & both[1], key=load_order) if self._counts(load))

    @cached_property
    def deciding(self) -> tuple[Load, ...]:
        """Those of them that decide on speed: closed loops, or else open ones (whose waiting hides the speed)."""
        return tuple(load for load in self.loads if not load.is_open) or self.loads

    @cached_property
    def evidence(self) -> tuple[Evidence, ...]:
        """What is known at each temperature that was run."""
        temperatures = sorted({key[1] for key in self.table.cells if key[0] == self.arm})
        return tuple(self._evidence(temperature) for temperature in temperatures)

    @cached_property
    def findings(self) -> tuple[Finding, ...]:
        """The verdict of each temperature."""
        return tuple(judge(evidence) for evidence in self.evidence)

    @cached_property
    def finding(self) -> Finding:
        """The verdict: off under a veto, else what holds at every temperature."""
        return Finding(OFF) if self.vetoes else agree(self.findings)

    @cached_property
    def blockers(self) -> tuple[tuple[Blocker, int | None], ...]:
        """What keeps the answer from being clear, with the further blocks that each needs, the dearest first."""
        found = [
            (blocker, blocker.more_blocks)
            for finding in self.findings
            if finding.verdict != OFF
            for blocker in finding.blockers
        ]
        return tuple(sorted(found, key=lambda known: -(known[1] or np.inf)))

    @property
    def is_settled(self) -> bool:
        """Whether further blocks are not worth their time: the verdict is clear and will not become finer."""
        verdict = self.finding.verdict
        return verdict == OFF or (verdict != CANNOT_TELL and all(more is None for _, more in self.blockers))

    @cached_property
    def vetoes(self) -> tuple[str, ...]:
        """What rules it out whatever its speed, in sentences."""
        found = (self._unanswered(), self._flagged(), self._too_large(), self._failing())
        return tuple(sentence for sentence in found if sentence)

    @cached_property
    def worse_service(self) -> tuple[tuple[float, Load, str, str], ...]:
        """Temperature, load, `BELOW` or `UNCLEAR`, and a sentence, wherever it may serve worse than the baseline."""
        keys = [key for key in self.table.cells if key[0] == self.arm and key[2] in self.loads]
        return tuple(
            found for _, temperature, load in keys for found in self._worse_service(temperature, load)
        )

    def rows(self, arm: str, loads: Sequence[Load], temperature: float | None = None) -> Ints:
        """Returns an arm's rows at some loads, at one temperature or at all."""
        return np.concatenate(
            [np.empty(0, dtype=np.int64)]
            + [
                at
                for (name, its_temperature, load), at in self.table.cells.items()
                if name == arm and load in loads and temperature in (None, its_temperature)
            ]
        )

    def num_answered(self, arm: str) -> int:
        """Returns how many of an arm's requests have an answer."""
        return sum(self.table.rows[i].outcome.failure is None for i in self.rows(arm, self.loads))

    def peak_memory_bytes(self, arm: str) -> int | None:
        """Returns the most that an arm held in a pass at a load that counts."""
        known = [
            r.peak_memory_bytes for r in self.run.passes if r.place.arm == arm and self._counts(r.place.load)
        ]
        return max((size for size in known if size is not None), default=None)

    def failed(self, loads: Sequence[Load], temperature: float | None = None) -> tuple[int, int]:
        """Returns how many requests failed in the arm alone, and how many in the baseline alone."""
        ours, theirs = (
            self._failed(self.rows(name, loads, temperature)) for name in (self.arm, self.baseline)
        )
        return len(ours - theirs), len(theirs - ours)

    def _counts(self, load: Load) -> bool:
        peak = self.rules.max_concurrency
        return peak is None or load.concurrency is None or load.concurrency <= peak

    def _evidence(self, temperature: float) -> Evidence:
        compared = compare(self.table, self.baseline, self.arm, temperature)
        service: dict[Load, str] = {}
        for its_temperature, load, side, _ in self.worse_service:
            if its_temperature == temperature:
                # An open loop speaks of the whole arm.
                struck = (load,) if load in self.deciding else self.deciding
                for each in struck:
                    service[each] = BELOW if BELOW in (side, service.get(each)) else UNCLEAR
        known = {load: compared[load] for load in self.deciding if load in compared}
        return Evidence(temperature, known, service, self.rules, self.sureness)

    # Against it ------------------------------------------------------------------------------------------------------

    def _unanswered(self) -> str | None:
        ours, theirs = (self.num_answered(name) for name in (self.arm, self.baseline))
        return (
            f"it answered none of {len(self.rows(self.arm, self.loads))} requests"
            if theirs and not ours
            else None
        )

    def _flagged(self) -> str | None:
        flagged = (self.verified or {}).get("flagged")
        return (
            f"its text is not the target's own: paceline verify flagged {', '.join(flagged)}"
            if flagged
            else None
        )

    def _too_large(self) -> str | None:
        size, limit = self.peak_memory_bytes(self.arm), self.rules.max_memory_bytes
        if size is None or limit is None or size <= limit:
            return None
        return f"it held {amounts.size(size)} of memory, and {amounts.size(limit)} are allowed"

    def _failing(self) -> str | None:
        """Returns what is wrong with failures over all loads together that no load shows for itself."""
        struck = {load for _, load, side, _ in self.worse_service if side == BELOW}
        ours, theirs = self.failed([load for load in self.loads if load not in struck])
        p_value = more_often(ours, theirs)
        if p_value > self.sureness.level():
            return None
        return f"it fails more often than {self.baseline}: {_alone(ours, theirs, p_value)}"

    def _worse_service(self, temperature: float, load: Load) -> Iterator[tuple[float, Load, str, str]]:
        where = f"at {load.label}, temperature {temperature:g}"
        ours, theirs = self.failed([load], temperature)
        p_value = more_often(ours, theirs)
        if p_value <= self.sureness.level():
            alone = _alone(ours, theirs, p_value)
            yield temperature, load, BELOW, f"it fails more often than {self.baseline} {where}: {alone}"
        wanted = self.rules.latency.attainment
        base, own = (self._good_share(name, temperature, load) for name in (self.baseline, self.arm))
        if base is not None and own is not None and own.estimate < wanted <= base.estimate:
            side = BELOW if own.high < wanted else UNCLEAR
            verb = "misses" if side == BELOW else "may miss"
            shares = f"{amounts.span(own, 100, decimals=0)} % of its requests are good enough"
            beside = (
                f"{amounts.percent(base.estimate)} of {self.baseline}'s and {amounts.percent(wanted)} by rule"
            )
            yield temperature, load, side, f"it {verb} the latency target {where}: {shares}, {beside}"

    def _good_share(self, arm: str, temperature: float, load: Load) -> Interval | None:
        at = self.rows(arm, [load], temperature)
        items, shares = self.table.by_item(at, self.table.is_good)
        if not len(items):
            return None
        return share_interval(shares, self.table.item_clusters(items), 1.0 - 2.0 * self.sureness.level())

    def _failed(self, at: Ints) -> set[int]:
        """Returns the requests that failed in any pass."""
        return {int(self.table.items[i]) for i in at if self.table.rows[i].outcome.failure is not None}


def candidates(
    run: Run, rules: Rules, verified: Mapping[str, Mapping[str, Any]] | None = None
) -> tuple[Case, ...]:
    """Returns the case of every arm of the plan but the baseline.

    The error that one side may have is shared out among arms and temperatures (Bonferroni), as any of them may win.
    """
    plan = Plan.from_dict(run.plan)
    table = tabulate(run, rules.latency)
    arms = [arm.name for arm in plan.arms[1:]]
    num_blocks = len({record.place.block for record in run.passes})
    alpha = (1.0 - rules.confidence) / 2.0 / max(1, len(arms) * len(plan.temperatures))
    sureness = Sureness(plan, max(1, num_blocks), alpha)
    return tuple(Case(run, table, plan, rules, arm, sureness, (verified or {}).get(arm)) for arm in arms)


def agree(findings: Sequence[Finding]) -> Finding:
    """Returns what holds at every temperature: the worst verdict, at the loads and for the kinds of all. Pure."""
    worst = min((f.verdict for f in findings), key=VERDICTS.index, default=CANNOT_TELL)
    if worst in (OFF, CANNOT_TELL):
        return Finding(worst)
    loads = tuple(load for load in findings[0].loads if all(load in f.loads for f in findings))
    named = [f.kinds for f in findings if f.verdict == ON_FOR]
    kinds = tuple(kind for kind in named[0] if all(kind in its for its in named)) if named else ()
    if not loads or (named and not kinds):
        return Finding(OFF)
    failing = sorted({load for f in findings for load in f.failing}, key=load_order)
    return Finding(worst, loads, tuple(failing), kinds)


def more_often(ours: int, theirs: int) -> float:
    """Returns the one-sided p-value of the sign test that requests fail more often here than there (exact McNemar)."""
    return float(special.bdtrc(ours - 1, ours + theirs, 0.5)) if ours else 1.0


def _alone(ours: int, theirs: int, p_value: float) -> str:
    return f"{ours} requests failed here only and {theirs} there only (sign test, p = {p_value:.2g})"
