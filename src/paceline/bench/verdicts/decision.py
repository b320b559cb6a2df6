"""Whether to use an arm instead of the baseline, by the rules of the plan, with an honest "cannot tell".

`findings` holds the rules of speed and how often they err, `cases` what rules an arm out whatever its speed:

- its text is not the target's own (`paceline verify`); it answered nothing; it holds more memory than is allowed;
- it fails more often than the baseline (exact sign test over requests that only one of both failed);
- it misses the latency target where the baseline meets it. Failures and latency count at the load where they are seen,
  so an arm may still be on below it. Open loops speak of latency and failures; of speed too where no closed loop ran.

Every temperature must agree; else the worst verdict holds, at the loads and for the kinds of all.

A plan that may stop early looks after every block. Each look has a level of its own (`sequential`), so the intervals
here are wider than those of the cells, which stand at the plain confidence.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from paceline.bench.arms.base import Load
from paceline.bench.numbers.summary import Cell, Decision, Summary
from paceline.bench.pages import amounts
from paceline.bench.runs.plan import Plan, Rules
from paceline.bench.runs.rows import Run
from paceline.bench.verdicts.cases import Case, candidates
from paceline.bench.verdicts.comparisons import Comparison
from paceline.bench.verdicts.findings import (
    CANNOT_TELL,
    OFF,
    ON,
    ON_BELOW,
    ON_FOR,
    VERDICTS,
    Blocker,
    Evidence,
)
from paceline.bench.verdicts.onepage import one_page


def decide(
    run: Run,
    summary: Summary,
    rules: Rules,
    *,
    verified: Mapping[str, Mapping[str, Any]] | None = None,
) -> tuple[Decision, ...]:
    """Returns a decision for every arm but the baseline and its control, best first. Pure.

    Args:
        run: at any look; its plan says how many there are.
        summary: of the run, without decisions.
        rules: those of the plan, or others.
        verified: reports of `paceline verify --json` by arm; an arm without one counts as not verified, which is said.
    """
    cases = sorted(candidates(run, rules, verified), key=_rank, reverse=True)
    return tuple(_decision(case, summary) for case in cases)


def is_clear(run: Run) -> bool:
    """Returns whether further blocks would not change what is said of any arm, at this look. Pure.

    For the runner, which asks after each block. What is not in the run, such as a report on exactness, does not count.
    """
    cases = candidates(run, Plan.from_dict(run.plan).rules)
    return bool(cases) and all(case.is_settled for case in cases)


def headline(decisions: Sequence[Decision]) -> str:
    """Returns the verdict in a sentence: that of the best arm."""
    return decisions[0].sentence if decisions else "Nothing to decide: the baseline ran alone."


def _rank(case: Case) -> tuple[int, float]:
    """Returns what sorts cases: verdict, then the speed of the whole traffic where it gains least."""
    least = _least(case)
    return VERDICTS.index(case.finding.verdict), least.estimate if least else 0.0


def _decision(case: Case, summary: Summary) -> Decision:
    finding = case.finding
    more = case.blockers[0][1] if finding.verdict == CANNOT_TELL and case.blockers else None
    return Decision(
        arm=case.arm,
        verdict=finding.verdict,
        sentence=_sentence(case, summary),
        below=_size(finding.loads[-1]) if finding.loads and finding.loads != case.deciding else None,
        kinds=finding.kinds,
        reasons=tuple(_reasons(case, summary)),
        table=one_page(case, summary),
        more_blocks=more,
        more_s=None if more is None else more * _pace_s(case.run),
    )


def _size(load: Load) -> float:
    return float(load.concurrency or load.rate_per_s or load.speed or 0.0)


def _pace_s(run: Run) -> float:
    """Returns the seconds that a block takes."""
    return sum(record.wall_s for record in run.passes) / len({record.place.block for record in run.passes})


# The sentence --------------------------------------------------------------------------------------------------------


def _sentence(case: Case, summary: Summary) -> str:
    if case.vetoes:
        return f"Leave {case.arm} off: {case.vetoes[0]}."
    says = {ON: _on, ON_BELOW: _on_below, ON_FOR: _on_for, OFF: _off, CANNOT_TELL: _cannot_tell}
    ends = _crossover(case, summary) if case.finding.verdict == ON_BELOW else ""
    return says[case.finding.verdict](case) + ends + _disagreement(case)


def _on(case: Case) -> str:
    least = _least(case)
    says = f"Turn {case.arm} on: {_times(case, least)}" if least else f"Turn {case.arm} on"
    return (
        says
        + (" where it gains least" if len(case.deciding) > 1 else "")
        + (f", and no kind of work falls below {amounts.ratio(case.rules.worst_kind)}.")
    )


def _on_below(case: Case) -> str:
    finding = case.finding
    last, first = finding.loads[-1], finding.failing[0]
    at = [c for c in (_least(case, [load]) for load in (last, first)) if c]
    says = f"Turn {case.arm} on up to {last.label} and off from {first.label}: " + "; ".join(
        _times(case, comparison) for comparison in at
    )
    between = [load.label for load in case.deciding if last != load != first and load not in finding.loads]
    unclear = [label for label in between if label not in {load.label for load in finding.failing}]
    return says + (f"; in between ({', '.join(unclear)}) it is unclear." if unclear else ".")


def _crossover(case: Case, summary: Summary) -> str:
    known = [at for arm, _, at in summary.crossovers if arm == case.arm]
    at = min(known, key=lambda interval: interval.estimate, default=None)
    return f" It is as fast as {case.baseline} at {amounts.span(at)} at once." if at else ""


def _on_for(case: Case) -> str:
    finding = case.finding
    others = sorted({kind for evidence in case.evidence for kind in evidence.kinds} - set(finding.kinds))
    upto = f" up to {finding.loads[-1].label}" if finding.loads != case.deciding else ""
    slowest = [_slowest(case, kind) for kind in finding.kinds]
    return (
        f"Turn {case.arm} on for {', '.join(finding.kinds)}{upto}, and leave it off for {', '.join(others)}: "
        + "; ".join(_times(case, c) for c in (*slowest, *(_slowest(case, kind) for kind in others)) if c)
        + "."
    )


def _off(case: Case) -> str:
    most = max(_compared(case, None), key=_ratio, default=None)
    served = [sentence for *_, sentence in case.worse_service]
    if most is not None and most.estimate < case.rules.min_speedup:
        wanted = amounts.ratio(case.rules.min_speedup)
        return f"Leave {case.arm} off: {_times(case, most)} at best, where {wanted} is asked for."
    if served:
        return f"Leave {case.arm} off: {served[0]}."
    return f"Leave {case.arm} off: no kind of work is faster at every load and temperature."


def _cannot_tell(case: Case) -> str:
    return f"Cannot tell whether {case.arm} pays: {_what_is_missing(case)}"


def _what_is_missing(case: Case) -> str:
    if not case.loads:
        lost = [f"{sentence}." for sentence in case.run.lost if repr(case.arm) in sentence]
        return " ".join(["it was not run at a load that counts.", *lost])
    if case.blockers:
        blocker, more = case.blockers[0]
        others = len(case.blockers) - 1
        also = f", and {others} more comparison{'s' if others > 1 else ''} like it" if others else ""
        return f"{_within(case, blocker)}{also}. {_more(case, blocker, more)}"
    if case.worse_service:
        return f"{case.worse_service[0][-1]}."
    silent = [load.label for e in case.evidence for load in case.deciding if not e.compared.get(load)]
    if silent:
        return f"no request was answered by both it and {case.baseline} at {silent[0]}."
    return "what it gains does not fall as the load grows, so no rule fits."


def _within(case: Case, blocker: Blocker) -> str:
    if math.isinf(blocker.interval.high):
        return f"{blocker.comparison.what} was not measured often enough to say anything"
    ratio = amounts.span(blocker.interval, decimals=2)
    times = f"{ratio} times as fast as {case.baseline}"
    return f"{blocker.comparison.what} is {times}, and {blocker.boundary:g} lies within"


def _more(case: Case, blocker: Blocker, more: int | None) -> str:
    if more is None:
        return "At this scatter the difference is about the boundary itself: no reasonable number of blocks would tell."
    about = "At least" if math.isinf(blocker.interval.high) else "About"
    time = amounts.seconds(more * _pace_s(case.run))
    return f"{about} {more} more block{'s' if more > 1 else ''} ({time}) would tell."


def _disagreement(case: Case) -> str:
    """Returns what other temperatures would say."""
    worst = case.finding.verdict
    if case.vetoes or len({f.verdict for f in case.findings}) < 2:
        return ""
    found = zip(case.evidence, case.findings, strict=True)
    others = [f"{f.verdict!r} at temperature {e.temperature:g}" for e, f in found if f.verdict != worst]
    return f" Temperatures do not agree, and this is the worst of them: it would be {', '.join(others)}."


# Comparisons in words ------------------------------------------------------------------------------------------------


def _compared(case: Case, kind: str | None, loads: Sequence[Load] | None = None) -> list[Comparison]:
    """Returns comparisons of a kind at all temperatures, and at some loads or all that decide."""
    pairs = [(evidence, load) for evidence in case.evidence for load in evidence.compared]
    return [
        c for evidence, load in pairs if load in (loads or case.deciding) and (c := evidence.at(load, kind))
    ]


def _least(case: Case, loads: Sequence[Load] | None = None) -> Comparison | None:
    """Returns the whole traffic where it gains least."""
    return min(_compared(case, None, loads), key=_ratio, default=None)


def _slowest(case: Case, kind: str) -> Comparison | None:
    return min(_compared(case, kind), key=_ratio, default=None)


def _ratio(comparison: Comparison) -> float:
    return comparison.estimate


def _times(case: Case, comparison: Comparison) -> str:
    """Returns such as "chat at 4 at once is 1.32 [1.25, 1.40] times as fast as plain"."""
    num_claims = 1 if comparison.kind is None else max(len(e.kinds) for e in case.evidence)
    interval = comparison.interval(case.sureness.level(num_claims))
    return f"{comparison.what} is {amounts.span(interval, decimals=2)} times as fast as {case.baseline}"


# Reasons -------------------------------------------------------------------------------------------------------------


def _reasons(case: Case, summary: Summary) -> Iterator[str]:
    """Yields what the verdict rests on."""
    yield from (f"Ruled out: {sentence}." for sentence in case.vetoes)
    yield _how_sure(case)
    for evidence in case.evidence:
        yield from (_load_reason(evidence, load) for load in evidence.compared)
        if any(evidence.fails(load) for load in evidence.compared):
            yield from (_kind_reason(evidence, kind) for kind in evidence.kinds)
    yield from (f"Service: {sentence}." for *_, sentence in case.worse_service)
    yield from _left_out(case)
    yield _exactness(case)
    yield from _identity(case, summary)
    yield from _control(case, summary)


def _how_sure(case: Case) -> str:
    plan, sureness = case.plan, case.sureness
    num_claims = max(1, len(plan.arms) - 1) * len(plan.temperatures)
    parts = [f"{sureness.num_blocks} of {plan.num_blocks} blocks"]
    if plan.stops_early and plan.min_blocks < plan.num_blocks:
        parts.append(f"looked at after each from block {plan.min_blocks} on")
    if num_claims > 1:
        parts.append(f"{num_claims} pairs of arm and temperature")
    shown = amounts.percent(1.0 - 2.0 * sureness.level())
    return (
        f"Intervals of the decision hold at {shown}, so that all of it is right at "
        f"{amounts.percent(case.rules.confidence)}: {', '.join(parts)}; kinds that are picked are held to more."
    )


def _load_reason(evidence: Evidence, load: Load) -> str:
    state = "pays" if evidence.pays(load) else "fails" if evidence.fails(load) else "is unclear"
    rules, sure = evidence.rules, evidence.sureness.level()
    whole = evidence.at(load, None)
    where = f"{load.label}, temperature {evidence.temperature:g}"
    if whole is None:
        return f"{where}: nothing to compare, no request was answered by both."
    words = {"above": "faster than", "below": "slower than", "unclear": "not clear of"}
    says = (
        f"{where} {state}: the whole traffic is {amounts.span(whole.interval(sure), decimals=3)} times as fast, "
        f"{words[evidence.whole(load)]} {rules.min_speedup:g}"
    )
    kinds = [c for kind in evidence.kinds if (c := evidence.at(load, kind))]
    slowest = min(kinds, key=_ratio, default=None)
    if slowest is None:
        return says + "."
    side = {"above": "above", "below": "below", "unclear": "not clear of"}[
        slowest.side(rules.worst_kind, sure)
    ]
    span = amounts.span(slowest.interval(sure), decimals=3)
    return says + f"; the slowest kind, {slowest.kind}, is {span}, {side} {rules.worst_kind:g}."


def _kind_reason(evidence: Evidence, kind: str) -> str:
    sure = evidence.sureness.level(len(evidence.kinds))
    spans = [
        f"{amounts.span(c.interval(sure), decimals=3)} at {load.label}"
        for load in evidence.compared
        if (c := evidence.at(load, kind))
    ]
    state = "faster" if evidence.is_faster(kind) else "not faster" if evidence.is_out(kind) else "unclear"
    return f"{kind}, temperature {evidence.temperature:g}, is {state} for itself: {', '.join(spans)}."


def _left_out(case: Case) -> Iterator[str]:
    run = {key[2] for key in case.table.cells if key[0] == case.baseline}
    missing = [load.label for load in case.plan.loads if load in run and load not in case.loads]
    if missing:
        peak = case.rules.max_concurrency
        beyond = f" or lies above the peak of {peak} at once" if peak is not None else ""
        yield f"Not counted: {', '.join(missing)}, where {case.arm} was not run{beyond}."
    open_loops = [load.label for load in case.loads if load not in case.deciding]
    if open_loops:
        yield f"{', '.join(open_loops)} count for latency and failures only: waiting hides the speed of an open loop."


def _exactness(case: Case) -> str:
    if case.verified is None:
        return "Exactness was not verified: run `paceline verify --json` on this arm before it is turned on."
    flagged = case.verified.get("flagged") or []
    return (
        f"Exactness: paceline verify flagged {', '.join(flagged)}."
        if flagged
        else "Exactness: paceline verify found nothing."
    )


def _identity(case: Case, summary: Summary) -> Iterator[str]:
    cells = [c for c in (*summary.cells, *summary.control) if c.kind is None and c.temperature == 0.0]
    compared, same = _texts([cell for cell in cells if cell.arm == case.arm])
    control_compared, control_same = _texts([cell for cell in cells if cell.arm == case.plan.control])
    if compared:
        floor = f" ({control_same} of {control_compared} in the A/A control)" if control_compared else ""
        differ = "" if same == compared else "; `paceline verify` tells near-ties from errors"
        yield f"At temperature 0, {same} of {compared} answers are the baseline's own{floor}{differ}."


def _texts(cells: Sequence[Cell]) -> tuple[int, int]:
    return sum(cell.num_compared for cell in cells), sum(cell.num_identical for cell in cells)


def _control(case: Case, summary: Summary) -> Iterator[str]:
    for cell in summary.control:
        if cell.ratio is not None and not cell.ratio.low <= 1.0 <= cell.ratio.high:
            yield (
                f"The A/A control is off at {cell.load.label}, temperature {cell.temperature:g}: the baseline is "
                f"{amounts.span(cell.ratio, decimals=3)} times as fast as itself; by chance this comes in "
                f"{amounts.percent(1.0 - case.rules.confidence)} of comparisons, else something drifts."
            )
