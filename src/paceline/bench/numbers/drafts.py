"""How drafts fared, from counts of verify steps; the definitions are those of `core.acceptance`. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import numpy as np

from paceline.bench.numbers.intervals import Floats, Ints, bootstrap_interval, sums
from paceline.bench.numbers.summary import Acceptance, Interval
from paceline.bench.numbers.table import Table
from paceline.bench.runs.rows import PassRecord


def acceptance(
    table: Table, at: Ints, passes: tuple[PassRecord, ...], confidence: float
) -> Acceptance | None:
    """Returns how drafts fared in the answers of some rows, pooled over their steps; else in passes, by their counters.

    `None` where neither says, or where nothing was drafted.

    Args:
        table, at: rows.
        passes: to which all of the rows belong; empty for rows of one kind, which counters cannot tell apart.
        confidence: of τ's interval.
    """
    triples = [(i, *triple) for i in at for triple in table.rows[i].outcome.acceptance or ()]
    if triples:
        rows, num_drafted, num_accepted, num_steps = np.array(triples, dtype=np.int64).T
        if not (num_drafted * num_steps).any():
            return None
        counts = np.zeros((num_drafted.max() + 1, num_drafted.max() + 1), dtype=np.int64)
        np.add.at(counts, (num_drafted, num_accepted), num_steps)
        totals = table.totals(
            rows, (num_accepted * num_steps).astype(np.float64), num_steps.astype(np.float64)
        )
        return _from_counts(counts, _length(totals, confidence))
    counted = [
        record for record in passes if record.counters.get("num_steps") and record.counters.get("num_drafted")
    ]
    return _from_counters(counted, confidence) if counted else None


def _from_counts(counts: Ints, length: Interval) -> Acceptance:
    """Returns acceptance from numbers of steps by (drafted, accepted)."""
    slots = range(counts.shape[0] - 1)
    drafted = [int(counts[i + 1 :].sum()) for i in slots]
    accepted = [int(counts[i + 1 :, i + 1 :].sum()) for i in slots]
    tried = [int(counts[i + 1 :, i:].sum()) for i in slots]
    return Acceptance(
        length=length,
        rate=_shares(accepted, tried),
        survival=tuple(a / n for a, n in zip(accepted, drafted, strict=True)),
        histogram=tuple(int(n) for n in counts.sum(axis=0)),
        source="requests",
    )


def _from_counters(passes: list[PassRecord], confidence: float) -> Acceptance:
    """Returns acceptance from what a server counted; it is taken to draft every slot in every step.

    Rates, survival and histogram are empty where it does not count by slot.
    """
    blocks, ids = np.unique([record.place.block for record in passes], return_inverse=True)
    columns = [_counted(passes, name) for name in ("num_accepted", "num_steps")]
    totals = sums(ids, len(blocks), *columns)
    num_steps = int(columns[1].sum())
    accepted: list[int] = []
    while all(f"accepted_{len(accepted)}" in record.counters for record in passes):
        accepted.append(int(_counted(passes, f"accepted_{len(accepted)}").sum()))
    reached = [num_steps, *accepted, 0]
    return Acceptance(
        length=_length(totals, confidence),
        rate=_shares(accepted, reached[: len(accepted)]),
        survival=tuple(n / num_steps for n in accepted),
        histogram=tuple(here - above for here, above in pairwise(reached)) if accepted else (),
        source="counters",
    )


def _counted(passes: list[PassRecord], name: str) -> Floats:
    counters: list[Mapping[str, float]] = [record.counters for record in passes]
    return np.array([known.get(name, 0.0) for known in counters], dtype=np.float64)


def _length(totals: Floats, confidence: float) -> Interval:
    """Returns τ = 1 + accepted / steps from both by cluster."""
    return bootstrap_interval(lambda sums: 1.0 + sums[..., 0] / sums[..., 1], totals, confidence)


def _shares(accepted: list[int], tried: list[int]) -> tuple[float, ...]:
    """Returns accepted / tried by slot, up to the first slot that was never tried."""
    num = next((i for i, n in enumerate(tried) if n == 0), len(tried))
    return tuple(a / n for a, n in zip(accepted[:num], tried[:num], strict=True))
