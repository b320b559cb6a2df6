"""A run's rows as columns, with what follows from each row: speed, time a token, whether it was good."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from paceline.bench.arms.base import Load, Outcome
from paceline.bench.numbers.intervals import Clusters, Floats, Ints, cluster, sums
from paceline.bench.runs.plan import LatencyTarget
from paceline.bench.runs.rows import PassRecord, Row, Run

Key = tuple[str, float, Load]
"""An arm at a temperature and a load."""


@dataclass(frozen=True, slots=True)
class Table:
    """Columns over rows; what is not known is NaN here and becomes no number anywhere.

    Args:
        rows: as the run has them.
        blocks: (N,) block of each row.
        items: (N,) request of each row, equal for equal block and item; passes of any arm pair by it.
        kinds: (N,) kind of each row, as a place in `kind_names`.
        kind_names: in the order in which they appear.
        log_speed: natural logarithm of num_new_tokens / e2e_s.
        e2e_s, ttft_s, max_gap_s: see `Outcome`.
        tpot_s: (e2e_s − ttft_s) / (num_new_tokens − 1), of answers with two tokens or more that did not come at once.
        num_new_tokens: of answers.
        is_good: 1 where the latency target is met, 0 where it is missed or there is no answer, NaN where nobody knows;
            all NaN without a target.
        cells: rows of each arm, temperature and load.
        passes: likewise.
    """

    rows: tuple[Row, ...]
    blocks: Ints
    items: Ints
    kinds: Ints
    kind_names: tuple[str, ...]
    log_speed: Floats
    e2e_s: Floats
    ttft_s: Floats
    max_gap_s: Floats
    tpot_s: Floats
    num_new_tokens: Floats
    is_good: Floats
    cells: dict[Key, Ints]
    passes: dict[Key, tuple[PassRecord, ...]]

    @property
    def num_items(self) -> int:
        """Requests of the run."""
        return int(self.items.max(initial=-1)) + 1

    def clusters(self, at: Ints) -> Clusters:
        """Returns the clusters of some rows."""
        return cluster(self.blocks[at], self.items[at])

    def item_clusters(self, items: Ints) -> Clusters:
        """Returns the clusters of requests, one value each."""
        first = np.unique(self.items, return_index=True)[1]  # items are numbered without gaps
        return cluster(self.blocks[first[items]], items)

    def totals(self, at: Ints, *columns: Floats) -> Floats:
        """Returns sums by cluster of columns whose values belong to the rows `at`: (clusters, columns)."""
        clusters = self.clusters(at)
        return sums(clusters.ids, clusters.num, *columns)

    def pass_totals(self, at: Ints, column: Floats, passes: tuple[PassRecord, ...]) -> Floats:
        """Returns by block the sum of a column over the rows of passes, and the passes' wall time: (blocks, 2)."""
        blocks = sorted({record.place.block for record in passes})
        totals = np.zeros((len(blocks), 2))
        np.add.at(totals[:, 0], np.searchsorted(blocks, self.blocks[at]), np.nan_to_num(column[at]))
        for record in passes:
            totals[blocks.index(record.place.block), 1] += record.wall_s
        return totals

    def by_item(self, at: Ints, column: Floats) -> tuple[Ints, Floats]:
        """Returns the requests among some rows, ascending, and the mean of a column over each one's known values."""
        known = at[np.isfinite(column[at])]
        items, ids = np.unique(self.items[known], return_inverse=True)
        return items, np.bincount(ids, column[known], len(items)) / np.bincount(ids, minlength=len(items))

    def log_ratios(self, at: Ints, base: Ints) -> tuple[Ints, Floats]:
        """Returns the requests that both sets of rows answered, and the log of the first's speed over the second's."""
        items, speeds = self.by_item(at, self.log_speed)
        base_items, base_speeds = self.by_item(base, self.log_speed)
        shared, ours, theirs = np.intersect1d(items, base_items, assume_unique=True, return_indices=True)
        return shared, speeds[ours] - base_speeds[theirs]

    def first_by_item(self, at: Ints, column: Floats) -> Floats:
        """Returns a column's first known value of each request among some rows."""
        known = at[np.isfinite(column[at])]
        return column[known[np.unique(self.items[known], return_index=True)[1]]]


def tabulate(run: Run, latency: LatencyTarget) -> Table:
    """Returns a run's rows as columns. Pure."""
    outcomes = [row.outcome for row in run.rows]
    e2e_s, ttft_s, max_gap_s, tokens = (
        _column(outcomes, name) for name in ("e2e_s", "ttft_s", "max_gap_s", "num_new_tokens")
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        tpot_s = np.where((tokens >= 2) & (e2e_s > ttft_s), (e2e_s - ttft_s) / (tokens - 1), np.nan)
        log_speed = np.where((tokens > 0) & (e2e_s > 0), np.log(tokens / e2e_s), np.nan)
    kinds: dict[str, int] = {}
    items: dict[tuple[int, str], int] = {}
    cells: dict[Key, list[int]] = {}
    passes: dict[Key, list[PassRecord]] = {}
    for i, row in enumerate(run.rows):
        cells.setdefault((row.place.arm, row.place.temperature, row.place.load), []).append(i)
    for record in run.passes:
        passes.setdefault((record.place.arm, record.place.temperature, record.place.load), []).append(record)
    return Table(
        rows=run.rows,
        blocks=np.array([row.place.block for row in run.rows], dtype=np.int64),
        items=np.array(
            [items.setdefault((row.place.block, row.outcome.id), len(items)) for row in run.rows],
            dtype=np.int64,
        ),
        kinds=np.array([kinds.setdefault(row.kind, len(kinds)) for row in run.rows], dtype=np.int64),
        kind_names=tuple(kinds),
        log_speed=log_speed,
        e2e_s=e2e_s,
        ttft_s=ttft_s,
        max_gap_s=max_gap_s,
        tpot_s=tpot_s,
        num_new_tokens=tokens,
        is_good=_good(outcomes, (ttft_s, tpot_s, e2e_s, tokens), latency),
        cells={
            key: np.array(cells[key], dtype=np.int64) for key in sorted(cells, key=partial(key_order, run))
        },
        passes={key: tuple(found) for key, found in passes.items()},
    )


def _column(outcomes: list[Outcome], name: str) -> Floats:
    """Returns a number of each answer, NaN where there is none."""
    values = (getattr(outcome, name) if outcome.failure is None else None for outcome in outcomes)
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


def _good(
    outcomes: list[Outcome], times: tuple[Floats, Floats, Floats, Floats], latency: LatencyTarget
) -> Floats:
    """Returns which answers are good enough; see `Table.is_good`. One token has no time per token to miss."""
    ttft_s, tpot_s, e2e_s, tokens = times
    if not latency.is_set:
        return np.full(len(outcomes), np.nan)
    missed = np.array([outcome.failure is not None for outcome in outcomes], dtype=np.bool_)
    unknown = np.zeros_like(missed)
    single = np.where(tokens < 2, 0.0, tpot_s)
    for column, limit in ((ttft_s, latency.ttft_s), (single, latency.tpot_s), (e2e_s, latency.e2e_s)):
        if limit is not None:
            missed |= column > limit
            unknown |= np.isnan(column)
    return np.where(
        missed, 0.0, np.where(unknown, np.nan, 1.0)
    )  # one miss is enough, whatever else is not known


def load_order(load: Load) -> tuple[bool, bool, float]:
    """Returns what sorts loads: closed loops by concurrency, then rates, then replays."""
    return load.is_open, load.speed is not None, load.concurrency or load.rate_per_s or load.speed or 0.0


def key_order(run: Run, key: Key) -> tuple[float, tuple[bool, bool, float], int]:
    """Returns what sorts cells: temperature, load, and the arms' own order with the control at the end."""
    names = list(run.arms)
    return key[1], load_order(key[2]), names.index(key[0]) if key[0] in names else len(names)
