"""What one temperature says of an arm: where it pays, where it does not, and what is still unclear. Pure.

A load **pays** when the whole traffic is faster than `min_speedup`, every kind is above `worst_kind`, and the service
is no worse. It **fails** when the whole traffic is below `min_speedup`, a kind is below `worst_kind`, or the service is
worse. Else it is unclear. From this, in order:

- **on**: every load pays.
- **on below**: the lowest loads pay and the highest fail; on up to the highest of those that pay. Loads between may be
  unclear, as a curve that falls through a boundary is near it somewhere.
- **off**: the whole traffic is below `min_speedup` at every load, and no kind is faster than that, nor could be shown
  to be with a reasonable number of blocks.
- **on for**: a load fails, and every kind is either faster than `min_speedup` at all loads, or below it at one of
  them; on for the former. Where there are none and the lowest load fails, off.
- **cannot tell**: otherwise.

How often that errs, for an arm at a temperature, with α the error that one side may have, (1 − confidence) / 2 shared
out among arms and temperatures:

- "on" claims several things at once and is wrong only where one of them is. Each is tested at α, so all of them
  together are too (intersection–union test; Berger, Technometrics 24, 1982). Kinds and loads need no correction there.
- "on below" goes through the loads from the lowest upwards and stops at the first that does not pay, so the error of
  all its steps is α (tests in a fixed order; Maurer, Hothorn and Lehmacher, 1995). "Fails" goes from the highest down.
- "off" claims that every load is below: α again.
- Naming kinds picks among them. So a kind is called faster at α / kinds, harmed at α / kinds, and slower at some load
  at α / (kinds × loads) (Bonferroni).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from paceline.bench.arms.base import Load
from paceline.bench.numbers.summary import Interval
from paceline.bench.runs.plan import Plan, Rules
from paceline.bench.verdicts.comparisons import ABOVE, BELOW, UNCLEAR, Comparison
from paceline.bench.verdicts.sequential import level

ON, ON_BELOW, ON_FOR, CANNOT_TELL, OFF = "on", "on below", "on for", "cannot tell", "off"
VERDICTS = (OFF, CANNOT_TELL, ON_FOR, ON_BELOW, ON)
"""From the worst to the best."""


@dataclass(frozen=True, slots=True)
class Sureness:
    """How sure a claim must be.

    Args:
        plan: says how often is looked.
        num_blocks: of this look.
        alpha: one-sided error of an arm at a temperature.
    """

    plan: Plan
    num_blocks: int
    alpha: float

    def level(self, num_claims: int = 1) -> float:
        """Returns the one-sided level at this look of each of several claims of which none may be wrong."""
        return level(self.plan, self.num_blocks, self.alpha / max(1, num_claims))


@dataclass(frozen=True, slots=True)
class Blocker:
    """A comparison that is unclear.

    Args:
        comparison: which.
        boundary: on one side of which it should be.
        sureness, num_claims: with which.
    """

    comparison: Comparison
    boundary: float
    sureness: Sureness
    num_claims: int = 1

    @property
    def is_one(self) -> bool:
        """Whether it is unclear at all."""
        return self.comparison.side(self.boundary, self.sureness.level(self.num_claims)) == UNCLEAR

    @property
    def interval(self) -> Interval:
        """The ratio with the interval in which the boundary lies."""
        return self.comparison.interval(self.sureness.level(self.num_claims))

    @property
    def more_blocks(self) -> int | None:
        """How many further blocks it needs, at the level of a last look; `None` where no reasonable number would do."""
        return self.comparison.more_blocks(self.boundary, self.sureness.alpha / self.num_claims)


@dataclass(frozen=True, slots=True)
class Finding:
    """The verdict of one temperature.

    Args:
        verdict: see above.
        loads: at which it is on; all that were looked at where it is on for some kinds.
        failing: the loads above those of "on below".
        kinds: for which it is on, where not for all.
        blockers: what keeps the verdict from being clear, or from being finer.
    """

    verdict: str
    loads: tuple[Load, ...] = ()
    failing: tuple[Load, ...] = ()
    kinds: tuple[str, ...] = ()
    blockers: tuple[Blocker, ...] = ()


@dataclass(frozen=True)
class Evidence:
    """What is known of an arm at one temperature.

    Args:
        temperature: which.
        compared: by load, ascending, the whole traffic and each kind; see `compare`.
        service: by load, `BELOW` where its service is worse than the baseline's and not good enough, `UNCLEAR` where it
            may be; other loads are fine.
        rules, sureness: see there.
    """

    temperature: float
    compared: Mapping[Load, tuple[Comparison, ...]]
    service: Mapping[Load, str]
    rules: Rules
    sureness: Sureness

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """Kinds that were compared at any load."""
        known = {c.kind for comparisons in self.compared.values() for c in comparisons}
        return tuple(sorted(kind for kind in known if kind is not None))

    def at(self, load: Load, kind: str | None) -> Comparison | None:
        """Returns a comparison, `None` where no request was answered by both."""
        return next((c for c in self.compared[load] if c.kind == kind), None)

    def whole(self, load: Load) -> str:
        """Returns on which side of `min_speedup` the whole traffic is."""
        return self._side(load, None, self.rules.min_speedup, 1)

    def pays(self, load: Load) -> bool:
        """Whether the arm may be used for all traffic at a load."""
        harmless = all(self._side(load, kind, self.rules.worst_kind, 1) == ABOVE for kind in self.kinds)
        return self.whole(load) == ABOVE and harmless and load not in self.service

    def fails(self, load: Load) -> bool:
        """Whether it may not."""
        return self.whole(load) == BELOW or bool(self.harmed(load)) or self.service.get(load) == BELOW

    def harmed(self, load: Load) -> list[str]:
        """Returns the kinds that are below `worst_kind` at a load."""
        num = len(self.kinds)
        return [kind for kind in self.kinds if self._side(load, kind, self.rules.worst_kind, num) == BELOW]

    def is_faster(self, kind: str) -> bool:
        """Whether a kind is above `min_speedup` at every load, with a service that is no worse."""
        sides = {self._side(load, kind, self.rules.min_speedup, len(self.kinds)) for load in self.compared}
        return sides == {ABOVE} and not self.service

    def is_out(self, kind: str) -> bool:
        """Whether a kind is below `min_speedup` at some load, or its service is worse there."""
        num = len(self.kinds) * len(self.compared)
        sides = {self._side(load, kind, self.rules.min_speedup, num) for load in self.compared}
        return BELOW in sides or BELOW in self.service.values()

    def hinders(self, load: Load) -> list[Blocker]:
        """Returns what keeps a load from being clear."""
        if self.pays(load) or self.fails(load):
            return []
        asked = [(None, self.rules.min_speedup), *((kind, self.rules.worst_kind) for kind in self.kinds)]
        found = [Blocker(c, b, self.sureness) for kind, b in asked if (c := self.at(load, kind))]
        return [blocker for blocker in found if blocker.is_one]

    def undecided(self, kind: str) -> list[Blocker]:
        """Returns what keeps a kind from being faster at every load or below at one."""
        if self.is_faster(kind) or self.is_out(kind):
            return []
        known = [c for load in self.compared if (c := self.at(load, kind))]
        found = [Blocker(c, self.rules.min_speedup, self.sureness, len(self.kinds)) for c in known]
        return [blocker for blocker in found if blocker.is_one]

    def is_hopeful(self, kind: str) -> bool:
        """Whether more blocks could show that an undecided kind is faster at every load."""
        found = [c for load in self.compared if (c := self.at(load, kind))]
        above = all(c.estimate > self.rules.min_speedup for c in found)
        return above and all(blocker.more_blocks is not None for blocker in self.undecided(kind))

    def _side(self, load: Load, kind: str | None, boundary: float, num_claims: int) -> str:
        comparison = self.at(load, kind)
        return comparison.side(boundary, self.sureness.level(num_claims)) if comparison else UNCLEAR


def judge(evidence: Evidence) -> Finding:
    """Returns the verdict of one temperature. Pure."""
    loads = tuple(evidence.compared)
    if not loads:
        return Finding(CANNOT_TELL)
    paying = _leading([evidence.pays(load) for load in loads])
    failing = _leading([evidence.fails(load) for load in reversed(loads)])
    hindered = tuple(blocker for load in loads for blocker in evidence.hinders(load))
    if paying == len(loads):
        return Finding(ON, loads)
    if paying and failing:
        return Finding(ON_BELOW, loads[:paying], loads[-failing:], blockers=hindered)
    if not any(evidence.fails(load) for load in loads):
        return Finding(CANNOT_TELL, blockers=hindered)
    return _judge_kinds(evidence, loads)


def _judge_kinds(evidence: Evidence, loads: tuple[Load, ...]) -> Finding:
    """Returns the verdict where the arm cannot be on for everything."""
    faster = tuple(kind for kind in evidence.kinds if evidence.is_faster(kind))
    left = [kind for kind in evidence.kinds if not evidence.is_faster(kind) and not evidence.is_out(kind)]
    if not faster and all(evidence.whole(load) == BELOW for load in loads):
        left = [kind for kind in left if evidence.is_hopeful(kind)]
    if left:
        return Finding(CANNOT_TELL, blockers=tuple(b for kind in left for b in evidence.undecided(kind)))
    if faster:
        return Finding(ON_FOR, loads, kinds=faster)
    if not evidence.fails(loads[0]):  # it may still be on below some load
        return Finding(CANNOT_TELL, blockers=tuple(b for load in loads for b in evidence.hinders(load)))
    return Finding(OFF)


def _leading(flags: list[bool]) -> int:
    """Returns how many are true before the first that is not."""
    return next((i for i, flag in enumerate(flags) if not flag), len(flags))
