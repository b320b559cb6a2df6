"""From rows to a summary: every number of a report, one definition each. Pure.

- **Request speed** is num_new_tokens / e2e_s. A **ratio** is the geometric mean, over requests that both arms answered,
  of an arm's speed over the baseline's for the same block, load, temperature and item; several passes of an arm are
  averaged in the log first.
- **TPOT** is (e2e_s − ttft_s) / (num_new_tokens − 1) of an answer of two tokens or more, and tokens per second per user
  its inverse. **Throughput** is all output tokens of passes over their wall time.
- **τ** and its relatives are those of `core.acceptance`, from the counts of all answers' steps together.
- A failure is no number. It counts as a failure, and as an answer that was not good enough.

Intervals are those of `intervals`; decisions are `decision`'s.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from scipy import stats

from paceline.bench.numbers import curves, drafts
from paceline.bench.numbers.intervals import (
    Floats,
    Ints,
    bootstrap_interval,
    percentile_interval,
    ratio_interval,
    share_interval,
)
from paceline.bench.numbers.profile import profile
from paceline.bench.numbers.summary import Cell, Interval, Percentiles, Summary
from paceline.bench.numbers.table import Key, Table, tabulate
from paceline.bench.runs.plan import Rules
from paceline.bench.runs.rows import PassRecord, Run


def summarise(run: Run, rules: Rules) -> Summary:
    """Returns everything that follows from a run but the decisions.

    Args:
        run: with at least one arm; its first is the baseline.
        rules: confidence of all intervals, latency target and price.
    """
    table = tabulate(run, rules.latency)
    baseline = next(iter(run.arms))
    control = f"{baseline} again"
    known = [
        _cell(table, key, kind, baseline, rules.confidence)
        for key in table.cells
        for kind in _kinds(table, key)
    ]
    cells = tuple(cell for cell in known if cell.arm != control)
    return Summary(
        baseline=baseline,
        cells=cells,
        break_even=curves.break_even(cells, baseline),
        frontiers=curves.frontiers(cells, baseline),
        capacities=curves.capacities(table, baseline, rules) if rules.latency.is_set else (),
        crossovers=curves.crossovers(table, baseline, rules.confidence),
        control=tuple(cell for cell in known if cell.arm == control and cell.kind is None),
        failures=_failures(run),
        costs=tuple(_costs(table, baseline, rules)),
        excluded=_excluded(run, cells, baseline),
        profile=profile(run),
    )


def summary_to_dict(summary: Summary) -> dict[str, Any]:
    """Returns a summary as JSON data; infinite ends of intervals are null."""
    data: dict[str, Any] = _plain(dataclasses.asdict(summary))
    return data


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# Cells ---------------------------------------------------------------------------------------------------------------


def _kinds(table: Table, key: Key) -> list[int | None]:
    """Returns what a cell is split into: all kinds together (`None`), then each kind by itself."""
    return [None, *(int(kind) for kind in np.unique(table.kinds[table.cells[key]]))]


def _cell(table: Table, key: Key, kind: int | None, baseline: str, confidence: float) -> Cell:
    """Returns what an arm did at a load and temperature with requests of one kind, or of all in the run's mixture."""
    arm, temperature, load = key
    at = _of_kind(table, table.cells[key], kind)
    passes = table.passes.get(key, ()) if kind is None else ()
    return Cell(
        arm=arm,
        load=load,
        temperature=temperature,
        kind=None if kind is None else table.kind_names[kind],
        num_requests=len(at),
        num_failures=sum(table.rows[i].outcome.failure is not None for i in at),
        tokens_per_s=_throughput(table, at, passes, confidence),
        tokens_per_s_per_user=_percentile(table, at, 1.0 / table.tpot_s, 0.5, confidence),
        ttft_s=_percentiles(table, at, table.ttft_s, confidence),
        tpot_s=_percentiles(table, at, table.tpot_s, confidence),
        e2e_s=_percentiles(table, at, table.e2e_s, confidence),
        max_gap_s=_percentiles(table, at, table.max_gap_s, confidence),
        good_share=_good_share(table, at, confidence),
        acceptance=drafts.acceptance(table, at, passes, confidence),
        steps=_steps(passes),
        **({} if arm == baseline else _compared(table, at, _base(table, key, kind, baseline), confidence)),
    )


def _of_kind(table: Table, at: Ints, kind: int | None) -> Ints:
    return at if kind is None else at[table.kinds[at] == kind]


def _base(table: Table, key: Key, kind: int | None, baseline: str) -> tuple[Ints, Ints]:
    """Returns the baseline's rows that a cell is held against: at its load, and at all loads of its temperature."""
    empty = np.empty(0, dtype=np.int64)
    same = table.cells.get((baseline, *key[1:]), empty)
    every = [
        at for (arm, temperature, _), at in table.cells.items() if (arm, temperature) == (baseline, key[1])
    ]
    return _of_kind(table, same, kind), _of_kind(table, np.concatenate([empty, *every]), kind)


def _compared(table: Table, at: Ints, base: tuple[Ints, Ints], confidence: float) -> dict[str, Any]:
    """Returns those fields of a cell that hold an arm against the baseline."""
    num_compared, num_identical = _identical(table, at, base[1])
    return {
        "ratio": _ratio(table, at, base[0], confidence),
        "num_compared": num_compared,
        "num_identical": num_identical,
        "length_p_value": _length_p_value(table, at, base[0]),
    }


def _ratio(table: Table, at: Ints, base: Ints, confidence: float) -> Interval | None:
    items, log_ratios = table.log_ratios(at, base)
    return ratio_interval(log_ratios, table.item_clusters(items), confidence) if len(items) else None


def _identical(table: Table, at: Ints, base: Ints) -> tuple[int, int]:
    """Returns how many answers the baseline gave too, at any load and pass, and how many of them are one of its own."""
    given: dict[int, set[str]] = {}
    for i in base:
        if (text := table.rows[i].outcome.text) is not None:
            given.setdefault(int(table.items[i]), set()).add(text)
    texts = [(int(table.items[i]), table.rows[i].outcome.text) for i in at]
    compared = [(item, text) for item, text in texts if text is not None and item in given]
    return len(compared), sum(text in given[item] for item, text in compared)


def _length_p_value(table: Table, at: Ints, base: Ints) -> float | None:
    """Returns the p-value of a two-sample Kolmogorov–Smirnov test of answers' lengths; `None` where one has no answers.

    One answer an item, since further passes of the same item say nothing new.
    """
    ours, theirs = (table.first_by_item(rows, table.num_new_tokens) for rows in (at, base))
    return float(stats.ks_2samp(ours, theirs).pvalue) if len(ours) and len(theirs) else None


def _percentiles(table: Table, at: Ints, column: Floats, confidence: float) -> Percentiles | None:
    p50, p90, p99 = (_percentile(table, at, column, share, confidence) for share in (0.5, 0.9, 0.99))
    return Percentiles(p50, p90, p99) if p50 and p90 and p99 else None


def _percentile(table: Table, at: Ints, column: Floats, share: float, confidence: float) -> Interval | None:
    """Returns a percentile over the answers in which a quantity is known; `None` where it is in none."""
    known = at[np.isfinite(column[at])]
    return (
        percentile_interval(column[known], share, table.clusters(known), confidence) if len(known) else None
    )


def _good_share(table: Table, at: Ints, confidence: float) -> Interval | None:
    """Returns the share of requests, each over its passes, that were good; `None` where no answer can be judged."""
    judged = np.isfinite(table.is_good[at])
    if not (judged & np.isfinite(table.num_new_tokens[at])).any():
        return None
    items, shares = table.by_item(at, table.is_good)
    return share_interval(shares, table.item_clusters(items), confidence)


# Passes --------------------------------------------------------------------------------------------------------------


def _throughput(table: Table, at: Ints, passes: tuple[PassRecord, ...], confidence: float) -> Interval | None:
    if not passes:
        return None
    totals = table.pass_totals(at, table.num_new_tokens, passes)
    if not totals[:, 0].any() or not totals[:, 1].any():
        return None
    return bootstrap_interval(lambda sums: sums[..., 0] / sums[..., 1], totals, confidence)


def _steps(passes: tuple[PassRecord, ...]) -> tuple[tuple[int, int, float, float, float], ...]:
    """Returns mean milliseconds of whole steps, drafting and verifying by number of sequences; see `Cell.steps`."""
    sums: dict[int, list[float]] = {}
    for step in (step for record in passes for step in record.step_times):
        known = sums.setdefault(step.num_sequences, [0.0] * 4)
        for i, value in enumerate((step.num_steps, step.total_s, step.draft_s, step.verify_s)):
            known[i] += value
    return tuple(
        (size, int(count), 1e3 * total / count, 1e3 * draft / count, 1e3 * verify / count)
        for size, (count, total, draft, verify) in sorted(sums.items())
        if count
    )


def _costs(table: Table, baseline: str, rules: Rules) -> Iterator[tuple[str, str, float, Interval]]:
    """Yields the price of a million good tokens; of all tokens without a latency target. None good, no price."""
    if rules.price_per_hour is None:
        return
    good = np.ones(len(table.rows)) if not rules.latency.is_set else np.where(table.is_good == 1.0, 1.0, 0.0)
    price_per_s = 1e6 * rules.price_per_hour / 3600.0
    for (arm, temperature, load), at in table.cells.items():
        totals = table.pass_totals(
            at, table.num_new_tokens * good, table.passes.get((arm, temperature, load), ())
        )
        if arm != f"{baseline} again" and totals[:, 0].any() and totals[:, 1].any():
            cost = bootstrap_interval(
                lambda sums: price_per_s * sums[..., 1] / sums[..., 0], totals, rules.confidence
            )
            yield arm, load.label, temperature, cost


# What is missing -----------------------------------------------------------------------------------------------------


def _failures(run: Run) -> tuple[tuple[str, str, str, int, str], ...]:
    """Returns how often each arm failed at each load for each reason, the most frequent first, with one request."""
    found: dict[tuple[str, str, str], tuple[int, str]] = {}
    for row in run.rows:
        if row.outcome.failure is not None:
            reason = row.outcome.failure.replace(row.outcome.id, "…")  # the reason names its request
            key = (row.place.arm, row.place.load.label, reason)
            count, example = found.get(key, (0, row.outcome.id))
            found[key] = (count + 1, example)
    return tuple(sorted(((*key, *known) for key, known in found.items()), key=lambda failure: -failure[3]))


def _excluded(run: Run, cells: tuple[Cell, ...], baseline: str) -> tuple[tuple[str, str], ...]:
    """Returns arms without a single pair; those whose fingerprints differ are refused before a run."""
    compared = {cell.arm for cell in cells if cell.ratio is not None}
    reason = f"no request was answered both by it and by {baseline}"
    return tuple((arm, reason) for arm in run.arms if arm not in {*compared, baseline, f"{baseline} again"})
