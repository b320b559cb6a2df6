"""One arm against the baseline: on which side of a boundary, how sure, and what a surer answer would cost. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from paceline.bench.arms.base import Load
from paceline.bench.numbers.intervals import Clusters, Floats, Ints, critical, ratio_interval
from paceline.bench.numbers.summary import Interval
from paceline.bench.numbers.table import Table

ABOVE, BELOW, UNCLEAR = "above", "below", "unclear"

MAX_REACH = 1000.0

MAX_GROWTH = 20
"""An answer that needs more than so many times the blocks of the run is not promised."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Paired log ratios of an arm's output speed to the baseline's, at one load and temperature.

    Args:
        load, temperature: which.
        kind: `None` is the whole traffic, in the run's own mixture.
        log_ratios: one of each request that both answered; see `metrics`.
        clusters: which of them belong together.
        num_blocks: that they come from.
    """

    load: Load
    temperature: float
    kind: str | None
    log_ratios: Floats
    clusters: Clusters
    num_blocks: int

    @property
    def what(self) -> str:
        """What is compared, in words."""
        return f"{self.kind or 'the whole traffic'} at {self.load.label}, temperature {self.temperature:g},"

    @property
    def estimate(self) -> float:
        """The ratio."""
        return math.exp(float(self.log_ratios.mean()))

    def interval(self, level: float) -> Interval:
        """Returns the ratio with the interval of which each end is wrong with this probability.

        One that reaches beyond a factor of `MAX_REACH` is given as what it is worth: from 0 to infinity.
        """
        found = ratio_interval(self.log_ratios, self.clusters, 1.0 - 2.0 * level)
        return found if found.high <= MAX_REACH * found.estimate else Interval(found.estimate, 0.0, math.inf)

    def side(self, boundary: float, level: float) -> str:
        """Returns on which side of a boundary the ratio is, at a one-sided level."""
        interval = self.interval(level)
        if interval.low > boundary:
            return ABOVE
        return BELOW if interval.high < boundary else UNCLEAR

    def more_blocks(self, boundary: float, level: float) -> int | None:
        """Returns how many further blocks would put the ratio on one side, if all stays as these blocks have it.

        `None` where no reasonable number would, as the difference is about the boundary itself. Otherwise at least one.
        """
        now = self.clusters.num
        if now < 2:
            return 1
        error = math.log(self.interval(0.25).high / self.estimate) / critical(now, 0.5)
        distance = abs(math.log(self.estimate / boundary))
        for blocks in range(self.num_blocks + 1, MAX_GROWTH * self.num_blocks + 1):
            reach = critical(now * blocks // self.num_blocks, 1.0 - 2.0 * level)
            if reach * error * math.sqrt(self.num_blocks / blocks) < distance:
                return blocks - self.num_blocks
        return None


def compare(table: Table, baseline: str, arm: str, temperature: float) -> dict[Load, tuple[Comparison, ...]]:
    """Returns by load, ascending, the comparison of the whole traffic and then that of each kind.

    A load at which the arm or the baseline was not run is not listed; where no request was answered by both, nothing is
    compared.
    """
    found = {}
    for name, its_temperature, load in table.cells:
        base = table.cells.get((baseline, temperature, load))
        if (name, its_temperature) == (arm, temperature) and base is not None:
            at = table.cells[name, temperature, load]
            kinds = sorted({int(kind) for kind in table.kinds[at]}, key=lambda kind: table.kind_names[kind])
            pairs: list[tuple[str | None, Ints, Ints]] = [(None, at, base)]
            pairs += [
                (table.kind_names[k], at[table.kinds[at] == k], base[table.kinds[base] == k]) for k in kinds
            ]
            found[load] = tuple(_comparisons(table, load, temperature, pairs))
    return found


def _comparisons(
    table: Table, load: Load, temperature: float, pairs: Iterable[tuple[str | None, Ints, Ints]]
) -> Iterable[Comparison]:
    for kind, ours, theirs in pairs:
        items, log_ratios = table.log_ratios(ours, theirs)
        if len(items):
            num_blocks = len(np.unique(table.blocks[np.isin(table.items, items)]))
            yield Comparison(load, temperature, kind, log_ratios, table.item_clusters(items), num_blocks)
