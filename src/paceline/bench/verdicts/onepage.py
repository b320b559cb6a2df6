"""The one-page verdict on an arm: item, number, interval, rule, and whether it passes. Nothing is made up. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from paceline.bench.arms.base import Load
from paceline.bench.exactness.checks import FLAGGED, NOT_RUN
from paceline.bench.numbers.intervals import bootstrap_interval
from paceline.bench.numbers.summary import Cell, Interval, Percentiles, Summary
from paceline.bench.pages import amounts
from paceline.bench.verdicts.cases import Case, more_often

Line = tuple[str, str, str, str, str]
"""Item, number, interval, rule, "pass", "fail" or "unknown"."""

PASS, FAIL, UNKNOWN = "pass", "fail", "unknown"
NOT_MEASURED, NO_RULE = "not measured", "—"


def one_page(case: Case, summary: Summary) -> tuple[Line, ...]:
    """Returns the lines in the order in which they are read. Intervals of ratios are those of the decision."""
    return (
        _speed(case, "Output speed where it gains least", case.rules.min_speedup, of_kinds=False),
        _speed(case, "Worst kind of work", case.rules.worst_kind, of_kinds=True),
        *_capacity(case, summary),
        _crossover(case, summary),
        _tail(case, summary, "Time to first token, p99", lambda cell: cell.ttft_s, case.rules.latency.ttft_s),
        _tail(case, summary, "Longest gap, p99", lambda cell: cell.max_gap_s, None),
        _memory(case),
        _cache(case),
        _failures(case),
        _flagged_positions(case),
        _directed(case),
        _cost(case, summary),
    )


def _line(item: str, number: str, interval: str, rule: str, passes: bool | None) -> Line:
    return item, number, interval, rule, UNKNOWN if passes is None else PASS if passes else FAIL


def _ends(interval: Interval, decimals: int | None = None) -> str:
    """Returns the interval of an estimate that stands beside it."""
    return "[" + amounts.span(interval, decimals=decimals).partition(" [")[2]


def _side(interval: Interval, boundary: float) -> bool | None:
    """Returns whether an interval is above a boundary, `None` where it holds it."""
    return None if interval.low <= boundary <= interval.high else interval.low > boundary


# Speed ---------------------------------------------------------------------------------------------------------------


def _speed(case: Case, item: str, boundary: float, *, of_kinds: bool) -> Line:
    rule = f"lower end > {boundary:g}"
    known = [
        c
        for evidence in case.evidence
        for comparisons in evidence.compared.values()
        for c in comparisons
        if (c.kind is not None) == of_kinds
    ]
    if not known:
        return _line(item, NOT_MEASURED, NO_RULE, rule, None)
    worst = min(known, key=lambda comparison: comparison.estimate)
    interval = worst.interval(case.sureness.level())
    number = f"{amounts.ratio(interval.estimate)}: {worst.what.rstrip(',')}"
    return _line(item, number, _ends(interval, 2), rule, _side(interval, boundary))


def _capacity(case: Case, summary: Summary) -> Iterator[Line]:
    item = "Capacity at the latency target, on / off"
    rule = f"lower end > {case.rules.min_speedup:g}"
    known = [c for c in summary.capacities if c.arm in (case.arm, case.baseline)]
    places = sorted({(c.temperature, c.unit) for c in known if c.arm == case.arm})
    if not places:
        yield _line(item, NOT_MEASURED, NO_RULE, rule, None)
    for temperature, unit in places:
        at = {c.arm: c for c in known if (c.temperature, c.unit) == (temperature, unit)}
        loads = [
            "less than was run"
            if c is None or c.load is None
            else ("at least " if c.is_censored else "") + amounts.number(c.load.estimate)
            for c in (at.get(case.arm), at.get(case.baseline))
        ]
        ratio = at[case.arm].ratio
        number = f"{' / '.join(loads)} {unit}, temperature {temperature:g}"
        if ratio is None:
            yield _line(item, number, NO_RULE, rule, None)
        else:
            yield _line(
                item,
                f"{amounts.ratio(ratio.estimate)}: {number}",
                _ends(ratio, 2),
                rule,
                _side(ratio, case.rules.min_speedup),
            )


def _crossover(case: Case, summary: Summary) -> Line:
    item, peak = "Load at which the gain ends", case.rules.max_concurrency
    rule = NO_RULE if peak is None else f"above {peak} at once"
    closed = [load for load in case.deciding if not load.is_open]
    known = [(temperature, at) for arm, temperature, at in summary.crossovers if arm == case.arm]
    if known:
        temperature, at = min(known, key=lambda pair: pair[1].estimate)
        number = f"{amounts.number(at.estimate)} at once, temperature {temperature:g}"
        return _line(item, number, _ends(at), rule, None if peak is None else _side(at, peak))
    least = [c for e in case.evidence for load in closed for c in e.compared.get(load, ()) if c.kind is None]
    if not least or any(c.estimate <= 1.0 for c in least):
        return _line(
            item,
            NOT_MEASURED if not least else "there is no gain",
            NO_RULE,
            rule,
            None if not least else False,
        )
    reached = peak is not None and (closed[-1].concurrency or 0) >= peak
    return _line(item, f"not up to {closed[-1].label}", NO_RULE, rule, True if reached else None)


# Service -------------------------------------------------------------------------------------------------------------


def _tail(
    case: Case,
    summary: Summary,
    item: str,
    quantity: Callable[[Cell], Percentiles | None],
    limit_s: float | None,
) -> Line:
    """Returns the slower of an arm's tails over loads and temperatures, beside the baseline's at the same place."""
    rule = NO_RULE if limit_s is None else f"within {amounts.seconds(limit_s)}"
    cells = [c for c in summary.cells if c.kind is None and c.load in case.loads]
    known = [(found.p99, c) for c in cells if c.arm == case.arm and (found := quantity(c)) is not None]
    if not known:
        return _line(item, NOT_MEASURED, NO_RULE, rule, None)
    own, at = max(known, key=lambda pair: pair[0].estimate)
    beside = [
        found.p99 for c in cells if _is_beside(c, at, case.baseline) and (found := quantity(c)) is not None
    ]
    base = amounts.seconds(beside[0].estimate) if beside else NOT_MEASURED
    number = f"{amounts.seconds(own.estimate)} / {base}: {at.load.label}, temperature {at.temperature:g}"
    ends = f"[{amounts.seconds(own.low)}, {amounts.seconds(own.high)}]"
    passes = None if limit_s is None or own.low <= limit_s <= own.high else own.high < limit_s
    return _line(item, number, ends, rule, passes)


def _is_beside(cell: Cell, other: Cell, arm: str) -> bool:
    return cell.arm == arm and (cell.load, cell.temperature) == (other.load, other.temperature)


def _memory(case: Case) -> Line:
    limit = case.rules.max_memory_bytes
    rule = NO_RULE if limit is None else f"at most {amounts.size(limit)}"
    own, base = (case.peak_memory_bytes(arm) for arm in (case.arm, case.baseline))
    if own is None:
        return _line("Peak memory", NOT_MEASURED, NO_RULE, rule, None)
    beside = NOT_MEASURED if base is None else amounts.size(base)
    passes = None if limit is None else own <= limit
    return _line("Peak memory", f"{amounts.size(own)} / {beside}", "exact", rule, passes)


def _cache(case: Case) -> Line:
    """Returns what the arm holds beside what the baseline holds, as its engine says it."""
    item = "Memory of drafting"
    own, base = (
        case.run.arms[arm].memory if arm in case.run.arms else {} for arm in (case.arm, case.baseline)
    )
    extra = {name: size - base.get(name, 0) for name, size in own.items() if size != base.get(name, 0)}
    if not own:
        return _line(item, NOT_MEASURED, NO_RULE, NO_RULE, None)
    number = ", ".join(f"{name.replace('_', ' ')} {_signed(size)}" for name, size in sorted(extra.items()))
    return _line(item, number or "none", "exact", NO_RULE, None)


def _signed(num_bytes: int) -> str:
    return ("+" if num_bytes > 0 else "−") + amounts.size(abs(num_bytes))


def _failures(case: Case) -> Line:
    item, rule = "Failed requests, on / off", "not more often"
    if not case.loads:
        return _line(item, NOT_MEASURED, NO_RULE, rule, None)
    counts = [
        f"{len(at) - case.num_answered(arm)} of {len(at)}"
        for arm in (case.arm, case.baseline)
        for at in [case.rows(arm, case.loads)]
    ]
    tried = [case.loads, *([load] for load in case.loads)]
    worse = any(more_often(*case.failed(loads)) <= case.sureness.level() for loads in tried)
    return _line(item, " / ".join(counts), "sign test", rule, not worse)


def _cost(case: Case, summary: Summary) -> Line:
    item, rule = "Price per million good tokens, on / off", "upper end < 1"
    known = {(arm, label, temperature): cost for arm, label, temperature, cost in summary.costs}
    pairs = [
        (known[case.arm, load.label, e.temperature], known[case.baseline, load.label, e.temperature], e, load)
        for e in case.evidence
        for load in case.loads
        if {(name, load.label, e.temperature) for name in (case.arm, case.baseline)} <= known.keys()
    ]
    if not pairs:
        return _line(item, NOT_MEASURED, NO_RULE, rule, None)
    own, base, evidence, load = max(pairs, key=lambda pair: pair[0].estimate / pair[1].estimate)
    where = f"{load.label}, temperature {evidence.temperature:g}"
    number = f"{amounts.number(own.estimate)} / {amounts.number(base.estimate)}, {where}"
    ratio = _cost_ratio(case, evidence.temperature, load)
    if ratio is None:
        return _line(item, number, NO_RULE, rule, None)
    dearer = _side(ratio, 1.0)
    passes = None if dearer is None else not dearer
    return _line(item, f"{amounts.ratio(ratio.estimate)}: {number}", _ends(ratio, 2), rule, passes)


def _cost_ratio(case: Case, temperature: float, load: Load) -> Interval | None:
    """Returns seconds a good token over the baseline's, blocks paired; `None` where one of them lacks blocks."""
    table = case.table
    good = np.where(table.is_good == 1.0, 1.0, 0.0) if case.rules.latency.is_set else np.ones(len(table.rows))
    sides = [
        table.pass_totals(table.cells[key], table.num_new_tokens * good, table.passes.get(key, ()))
        for key in ((arm, temperature, load) for arm in (case.arm, case.baseline))
    ]
    if len(sides[0]) != len(sides[1]):
        return None
    return bootstrap_interval(
        lambda sums: sums[..., 1] / sums[..., 0] * sums[..., 2] / sums[..., 3],
        np.concatenate(sides, axis=1),
        1.0 - 2.0 * case.sureness.level(),
    )


# Exactness -----------------------------------------------------------------------------------------------------------


def _flagged_positions(case: Case) -> Line:
    item, check = "Tokens at temperature 0 that are not the target's", _check(case, "ties")
    details = check.get("details") or {}
    positions, flagged = details.get("num_positions"), details.get("num_flagged")
    if check.get("status") in (None, NOT_RUN) or positions is None or flagged is None:
        return _line(item, NOT_MEASURED, NO_RULE, "0", None)
    bound = check.get("bound")
    ends = NO_RULE if bound is None else f"[0, {amounts.percent(bound)}]"
    return _line(item, f"{flagged} of {positions}", ends, "0", flagged == 0)


def _directed(case: Case) -> Line:
    item, check = "Drafts that leak into sampled text, z", _check(case, "directed")
    z, p_value = check.get("statistic"), check.get("p_adjusted")
    if check.get("status") in (None, NOT_RUN) or z is None or not math.isfinite(z):
        return _line(item, NOT_MEASURED, NO_RULE, "not flagged", None)
    ends = NO_RULE if p_value is None else f"p = {p_value:.2g} (Holm)"
    return _line(item, f"{z:+.2f}", ends, "not flagged", check["status"] != FLAGGED)


def _check(case: Case, name: str) -> dict[str, Any]:
    checks: Sequence[dict[str, Any]] = (case.verified or {}).get("checks", ())
    return next((check for check in checks if check.get("name") == name), {})
