"""What a report says in tables and sentences, as text; numbers with unit and interval, a dash for what is not known."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.bench.numbers.summary import Cell, Summary
from paceline.bench.pages import amounts
from paceline.bench.runs.plan import LatencyTarget, Rules
from paceline.bench.runs.rows import Run

_QUANTITIES = {"ttft_s": "TTFT", "tpot_s": "TPOT", "e2e_s": "E2E", "max_gap_s": "longest gap"}
_PERCENTILES = ("p50", "p90", "p99")

GLOSSARY = (
    (
        "ratio",
        "Output speed of a request is its new tokens over its time to the last token. The ratio is the geometric mean, "
        "over requests answered by both arms at the same load and temperature, of an arm's speed over the baseline's.",
    ),
    ("tok/s", "All output tokens of an arm's passes over their wall time."),
    ("tok/s per user", "Median over requests of 1 / TPOT."),
    ("TTFT", "Time to the first token or, of a server, to the first piece that holds text."),
    ("TPOT", "Time per output token after the first: (E2E − TTFT) / (new tokens − 1)."),
    ("E2E", "Time to the last token, counted from when a request was sent or, in an open loop, due."),
    (
        "longest gap",
        "Longest wait between two pieces of an answer. Speculation sends several tokens in one piece, so this says how "
        "smooth an answer is and not how fast.",
    ),
    (
        "τ",
        "Acceptance length: 1 + accepted drafts / verify steps, pooled over answers, before any cut by end or length.",
    ),
    ("same text", "Answers equal to one that the baseline gave to the same request."),
    (
        "lengths, p",
        "Two-sample test that answers are as long as the baseline's. A small value says that the arms did not do the "
        "same work.",
    ),
    ("good", "Share of requests that meet the latency target; failures do not."),
    ("capacity", "Highest load at which the share of good answers still reaches the target."),
    (
        "A/A control",
        "The baseline run a second time as if it were another arm. It shows what the run sees where there is nothing.",
    ),
    (
        "interval",
        "In brackets behind an estimate. A dash as an end says that the data give no bound on that side, such as for "
        "the 99th percentile of few requests. Two intervals that overlap do not mean that there is no difference; the "
        "ratio, which is paired, is what counts.",
    ),
)


@dataclass(frozen=True, slots=True)
class Table:
    """A table as text.

    Args:
        caption: what it shows.
        columns: headers.
        rows: as long as the headers.
        num_heads: cells at the start of a row that name it.
    """

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    num_heads: int = 1

    def shown(self) -> Table:
        """Returns the table without columns in which nothing is known. Pure."""
        known = [
            i
            for i in range(len(self.columns))
            if i < self.num_heads or any(row[i] not in ("", amounts.UNKNOWN) for row in self.rows)
        ]
        rows = tuple(tuple(row[i] for i in known) for row in self.rows)
        return Table(self.caption, tuple(self.columns[i] for i in known), rows, self.num_heads)


def facts(run: Run) -> tuple[tuple[str, str], ...]:
    """Returns who, what and when, as names and values."""
    workload = run.workload
    counts = workload.get("kinds")
    kinds = counts if isinstance(counts, Mapping) else {}
    temperatures = run.plan.get("temperatures")
    blocks = {record.place.block for record in run.passes}
    known = {
        "started": run.started,
        "command": run.command,
        "arms": ", ".join(run.arms),
        "loads": ", ".join(dict.fromkeys(record.place.load.label for record in run.passes)),
        "temperatures": ", ".join(f"{t:g}" for t in temperatures)
        if isinstance(temperatures, Sequence)
        else "",
        "measured": f"{len(run.rows):,} requests in {len(run.passes):,} passes of {len(blocks)} blocks",
        "workload": _text(workload.get("name")),
        "workload digest": _text(workload.get("digest")),
        "items by kind": ", ".join(f"{kind} {count}" for kind, count in kinds.items()),
        **{name.replace("_", " "): _text(value) for name, value in run.environment.items()},
    }
    return tuple((name, value) for name, value in known.items() if value)


def traffic_notes(run: Run) -> tuple[str, ...]:
    """Returns what a reader must know of the traffic."""
    notes = run.workload.get("notes")
    return tuple(_text(note) for note in notes) if isinstance(notes, Sequence) else ()


def speed(cells: Sequence[Cell], caption: str) -> Table:
    """Returns speed, acceptance, identity and failures of cells."""
    columns: dict[str, Callable[[Cell], str]] = {
        "requests": lambda c: f"{c.num_requests:,}",
        "failed": lambda c: f"{c.num_failures:,}",
        "ratio": lambda c: amounts.span(c.ratio, decimals=2),
        "tok/s": lambda c: amounts.span(c.tokens_per_s),
        "tok/s per user": lambda c: amounts.span(c.tokens_per_s_per_user),
        "τ": lambda c: amounts.span(c.acceptance.length if c.acceptance else None, decimals=2),
        "same text": lambda c: (
            f"{c.num_identical:,} of {c.num_compared:,}" if c.num_compared else amounts.UNKNOWN
        ),
        "lengths, p": lambda c: amounts.number(c.length_p_value, 2),
        "good, %": lambda c: amounts.span(c.good_share, 100.0, decimals=1),
    }
    return _of_cells(cells, caption, columns)


def latency(cells: Sequence[Cell], caption: str) -> Table:
    """Returns percentiles of latencies in milliseconds."""
    columns = {
        f"{name} {p}, ms": _in_ms(quantity, p) for quantity, name in _QUANTITIES.items() for p in _PERCENTILES
    }
    return _of_cells(cells, caption, columns)


def _in_ms(quantity: str, p: str) -> Callable[[Cell], str]:
    return lambda cell: amounts.span(getattr(getattr(cell, quantity), p, None), 1000.0)


def _of_cells(cells: Sequence[Cell], caption: str, columns: Mapping[str, Callable[[Cell], str]]) -> Table:
    of_kinds = any(cell.kind is not None for cell in cells)
    heads = ("arm", "kind", "load", "temperature") if of_kinds else ("arm", "load", "temperature")
    rows = [
        (
            cell.arm,
            *((cell.kind or "all kinds",) if of_kinds else ()),
            cell.load.label,
            f"{cell.temperature:g}",
            *(text(cell) for text in columns.values()),
        )
        for cell in cells
    ]
    return Table(caption, (*heads, *columns), tuple(rows), len(heads)).shown()


def load_sentences(summary: Summary) -> Iterator[str]:
    """Yields where arms stop to gain, and what they gain at best."""
    for arm, temperature, at in summary.crossovers:
        yield f"{arm}, temperature {temperature:g}: its ratio falls through 1 at {amounts.span(at)} requests in flight."
    for frontier in summary.frontiers:
        where = f"{frontier.arm}, temperature {frontier.temperature:g}"
        if frontier.at_equal_interactivity and frontier.arm != summary.baseline:
            gain, at_speed = frontier.at_equal_interactivity
            yield (
                f"{where}: at most {amounts.ratio(gain)} the throughput of {summary.baseline} at an equal speed for "
                f"each user, at {amounts.number(at_speed)} tok/s per user."
            )
        if frontier.at_equal_throughput and frontier.arm != summary.baseline:
            gain, at_speed = frontier.at_equal_throughput
            yield (
                f"{where}: at most {amounts.ratio(gain)} the speed for each user at an equal throughput, at "
                f"{amounts.number(at_speed)} tok/s."
            )


def capacities(summary: Summary) -> Table:
    """Returns capacities at the latency target."""
    rows = [
        (
            c.arm,
            f"{c.temperature:g}",
            ("at least " if c.is_censored else "") + f"{amounts.span(c.load)} {c.unit}"
            if c.load
            else "below the lowest load that was run",
            amounts.span(c.ratio, decimals=2),
            amounts.number(c.good_tokens_per_s),
        )
        for c in summary.capacities
    ]
    columns = ("arm", "temperature", "capacity", "ratio to the baseline's", "good tok/s there")
    return Table(
        "Capacity: the highest load at which the latency target is met", columns, tuple(rows)
    ).shown()


def costs(summary: Summary) -> Table:
    """Returns prices per million good tokens."""
    rows = [(arm, load, f"{t:g}", amounts.span(cost)) for arm, load, t, cost in summary.costs]
    columns = ("arm", "load", "temperature", "price")
    return Table(
        "Price per million good tokens, in the currency of the machine's price", columns, tuple(rows), 3
    )


def break_even(summary: Summary) -> Table:
    """Returns step times, and acceptance needed and had."""
    rows = [
        (
            b.arm,
            str(b.num_sequences),
            f"{b.temperature:g}",
            *(amounts.number(ms) for ms in (b.plain_ms, b.draft_ms, b.verify_ms, b.total_ms)),
            *(amounts.number(tau) for tau in (b.needed_parts, b.needed, b.acceptance_length)),
        )
        for b in summary.break_even
    ]
    columns = (
        *(
            "arm",
            "sequences in a step",
            "temperature",
            "plain step, ms",
            "draft, ms",
            "verify, ms",
            "whole step, ms",
        ),
        *("τ needed for draft and verify", "τ needed for the whole step", "τ had"),
    )
    return Table("Mean step times, and the acceptance at which drafting breaks even", columns, tuple(rows), 3)


def control_sentences(summary: Summary, rules: Rules) -> Iterator[str]:
    """Yields what the A/A control says, for each load and temperature."""
    for cell in summary.control:
        where = f"{cell.load.label}, temperature {cell.temperature:g}"
        if cell.ratio is None:
            yield f"{where}: no request was answered in both runs of {summary.baseline}, so there is no control."
            continue
        found = f"{where}: {summary.baseline} against itself is {amounts.span(cell.ratio, decimals=3)}."
        if cell.ratio.low <= 1.0 <= cell.ratio.high:
            yield f"{found} The interval holds 1: no difference is seen where there is none."
        else:
            yield (
                f"{found} The interval does not hold 1. By chance alone that happens in "
                f"{amounts.percent(1.0 - rules.confidence)} of cases; else something drifts, and differences of this "
                "size mean nothing here."
            )


def losses(run: Run, summary: Summary) -> Iterator[str]:
    """Yields what was lost, left out or never finished."""
    if not run.is_complete:
        yield "Not everything that was planned is in this report."
    yield from run.lost
    for arm, reason in summary.excluded:
        yield f"{arm} was not compared: {reason}."


def failures(summary: Summary) -> Table:
    """Returns failures with their reasons."""
    rows = [
        (arm, load, f"{count:,}", reason, example) for arm, load, reason, count, example in summary.failures
    ]
    return Table(
        "Requests without an answer", ("arm", "load", "how many", "reason", "such as request"), tuple(rows), 2
    )


def fingerprints(run: Run) -> Table:
    """Returns what is known of the arms, a column each, and what differs."""
    rows = []
    for part in ("basis", "speculation"):
        known = {arm: getattr(fingerprint, part) for arm, fingerprint in run.arms.items()}
        for name in dict.fromkeys(name for values in known.values() for name in values):
            values = [str(known[arm].get(name, amounts.UNKNOWN)) for arm in run.arms]
            rows.append(
                (name.replace("_", " "), part, "differs" if len(set(values)) > 1 else "same", *values)
            )
    columns = ("what", "part of", "among arms", *run.arms)
    return Table("Fingerprints: the basis must not differ, speculation may", columns, tuple(rows))


def memory(run: Run) -> Table:
    """Returns memory by arm: what the arms know of themselves, and the most that a process held."""
    names = list(dict.fromkeys(name for f in run.arms.values() for name in f.memory))
    rows = []
    for arm, fingerprint in run.arms.items():
        peaks = [
            r.peak_memory_bytes for r in run.passes if r.place.arm == arm and r.peak_memory_bytes is not None
        ]
        known = [
            amounts.size(fingerprint.memory[n]) if n in fingerprint.memory else amounts.UNKNOWN for n in names
        ]
        rows.append((arm, *known, amounts.size(max(peaks)) if peaks else amounts.UNKNOWN))
    columns = ("arm", *(name.replace("_", " ") for name in names), "most held in a pass")
    return Table("Memory", columns, tuple(rows)).shown()


def exactness(verified: Mapping[str, Mapping[str, Any]]) -> Table:
    """Returns the checks of reports of `paceline verify`, by arm."""
    rows = [
        (arm, *(_text(check.get(key)) for key in ("name", "status", "summary")), _bound(check.get("bound")))
        for arm, report in verified.items()
        for check in report.get("checks", ())
    ]
    columns = ("arm", "check", "status", "what was seen", "rate below, 95 %")
    return Table("Is the speculative text the target's own?", columns, tuple(rows), 2)


def _bound(bound: object) -> str:
    return f"{bound:.2g}" if isinstance(bound, float | int) else amounts.UNKNOWN


def rules_in_words(rules: Rules) -> tuple[tuple[str, str], ...]:
    """Returns the rules by which was decided."""
    unset = "no limit"
    return (
        ("whole traffic", f"its ratio must exceed {rules.min_speedup:g}"),
        ("each kind", f"its ratio must not fall below {rules.worst_kind:g}"),
        ("confidence", f"{amounts.percent(rules.confidence)} for every interval and for the decision"),
        ("latency", _latency_in_words(rules.latency)),
        (
            "memory",
            unset if rules.max_memory_bytes is None else f"at most {amounts.size(rules.max_memory_bytes)}",
        ),
        (
            "price of the machine",
            "not given" if rules.price_per_hour is None else f"{rules.price_per_hour:g} an hour",
        ),
        (
            "peak of the real load",
            "not given; every load counts"
            if rules.max_concurrency is None
            else f"{rules.max_concurrency} at once; loads above it do not count",
        ),
    )


def _latency_in_words(target: LatencyTarget) -> str:
    limits = {"TTFT": target.ttft_s, "TPOT": target.tpot_s, "E2E": target.e2e_s}
    asked = [f"{name} within {amounts.seconds(limit)}" for name, limit in limits.items() if limit is not None]
    return (
        f"{', '.join(asked)} for {amounts.percent(target.attainment)} of requests" if asked else "no target"
    )


def _text(value: object) -> str:
    """Returns a value of JSON data as text, "" where there is none."""
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
