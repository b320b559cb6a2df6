"""What a report draws, as data: every figure once, for the page and for the PNGs; `plots` draws."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from paceline.bench.arms.base import Load
from paceline.bench.numbers.summary import BreakEven, Cell, Interval, Summary
from paceline.bench.pages import amounts
from paceline.bench.pages.panels import (
    BARS,
    CURVE,
    Axis,
    Figure,
    Guide,
    Panel,
    Point,
    Series,
    forest,
    load_axis,
    words,
    y_axis,
)
from paceline.bench.runs.plan import Rules


def figures(summary: Summary, rules: Rules) -> tuple[Figure, ...]:
    """Returns every figure for which the summary has data, in the order in which they are read. Pure."""
    made = (
        _speed_by_kind(summary, rules),
        _speed_by_load(summary, rules),
        _frontier(summary),
        _break_even(summary),
        _good_share(summary, rules),
        _latency(summary),
        _acceptance(summary),
        _histogram(summary),
        _control(summary),
    )
    return tuple(figure for figure in made if figure.panels)


def _speed_by_kind(summary: Summary, rules: Rules) -> Figure:
    panels = []
    for load, temperature in dict.fromkeys((cell.load, cell.temperature) for cell in summary.cells):
        cells = [c for c in summary.cells if (c.load, c.temperature) == (load, temperature)]
        rows = {
            kind or "all kinds": _pairs([c for c in cells if c.kind == kind], lambda c: c.ratio)
            for kind in dict.fromkeys(cell.kind for cell in cells)
        }
        title = f"{load.label}, {_temperature(temperature)}"
        panels += forest(title, "output speed / baseline's", rows, _boundaries(rules, True))
    return Figure(
        "speed_by_kind",
        "Speed ratio by kind of work",
        f"Geometric mean of paired ratios of output speed to {summary.baseline}, with intervals. Right of 1 is "
        "faster. A bar that runs off the panel has no bound on that side.",
        tuple(panels),
    )


def _control(summary: Summary) -> Figure:
    rows = {
        f"{c.load.label}, {_temperature(c.temperature)}": _pairs([c], lambda c: c.ratio)
        for c in summary.control
    }
    guides = (Guide(1.0, "no difference", True),)
    return Figure(
        "control",
        "A/A control: the baseline against itself",
        f"{summary.baseline} measured twice as if it were two arms. Intervals that hold 1 say that the run sees no "
        "difference where there is none.",
        tuple(forest("baseline again / baseline", "ratio of output speed", rows, guides)),
    )


def _latency(summary: Summary) -> Figure:
    names = {
        "ttft_s": "time to first token",
        "tpot_s": "time per output token",
        "e2e_s": "time to last token",
        "max_gap_s": "longest gap between pieces",
    }
    panels = []
    for temperature in _temperatures(summary.cells):
        cells = [c for c in _whole(summary) if c.temperature == temperature]
        for quantity, title in names.items():
            rows = {
                f"{load.label}, {p}": _pairs(
                    [c for c in cells if c.load == load], _percentile_of(quantity, p)
                )
                for load in dict.fromkeys(cell.load for cell in cells)
                for p in ("p50", "p90", "p99")
            }
            panels += forest(f"{title}, {_temperature(temperature)}", "", rows, (), is_time=True)
    return Figure(
        "latency",
        "Latency percentiles",
        "Over requests, on a logarithmic scale, with intervals. Left is faster. A bar that runs off the panel has no "
        "bound on that side: too few requests for that percentile.",
        tuple(panels),
    )


def _percentile_of(quantity: str, p: str) -> Callable[[Cell], Interval | None]:
    return lambda cell: getattr(getattr(cell, quantity), p, None)


def _pairs(cells: Sequence[Cell], value: Callable[[Cell], Interval | None]) -> dict[str, Interval]:
    """Returns the value of each arm for which it is a number."""
    known = {cell.arm: value(cell) for cell in cells if value(cell) is not None}
    return {arm: v for arm, v in known.items() if v is not None and math.isfinite(v.estimate)}


def _speed_by_load(summary: Summary, rules: Rules) -> Figure:
    crossings = [
        (temperature, Guide(at.estimate, f"crosses 1 at {amounts.span(at)}", True, arm))
        for arm, temperature, at in summary.crossovers
    ]
    panels = _over_loads(summary, "output speed / baseline's", lambda cell: cell.ratio)
    return Figure(
        "speed_by_load",
        "Speed ratio by load",
        f"Ratio to {summary.baseline} over all kinds, with intervals. A vertical line marks the load at which an "
        "arm falls through 1.",
        tuple(
            _with_guides(
                panel,
                (
                    *_boundaries(rules, False),
                    *(g for t, g in crossings if t == temperature and is_closed),
                ),
            )
            for temperature, is_closed, panel in panels
        ),
    )


def _good_share(summary: Summary, rules: Rules) -> Figure:
    limit = Guide(rules.latency.attainment, f"target {amounts.percent(rules.latency.attainment)}", False)
    panels = []
    for temperature, is_closed, panel in _over_loads(
        summary, "share of good answers", lambda cell: cell.good_share
    ):
        unit = "at once" if is_closed else "requests/s"
        capacities = [
            Guide(
                c.load.estimate,
                ("at least " if c.is_censored else "") + amounts.number(c.load.estimate),
                True,
                c.arm,
            )
            for c in summary.capacities
            if (c.temperature, c.unit) == (temperature, unit) and c.load and math.isfinite(c.load.estimate)
        ]
        panels.append(_with_guides(panel, (limit, *capacities)))
    return Figure(
        "good_share",
        "Answers that meet the latency target, by load",
        "Share of requests within all limits, failures counting as not. A vertical line marks an arm's capacity: "
        "the highest load at which the share still reaches the target.",
        tuple(panels),
    )


def _with_guides(panel: Panel, guides: tuple[Guide, ...]) -> Panel:
    """Returns the panel with lines, and with a y axis that shows those that lie across it."""
    y = y_axis(panel.y.title, panel.series, [guide.at for guide in guides if not guide.is_vertical])
    return Panel(panel.title, panel.shape, panel.x, y, panel.series, guides)


def _over_loads(
    summary: Summary, y_title: str, value: Callable[[Cell], Interval | None]
) -> Iterator[tuple[float, bool, Panel]]:
    """Yields temperature, whether the loads are closed, and the panel, wherever there are two loads or more."""
    for temperature in _temperatures(summary.cells):
        for is_closed, x_title in ((True, "requests in flight"), (False, "requests per second")):
            cells = [
                cell
                for cell in _whole(summary)
                if cell.temperature == temperature
                and (cell.load.concurrency if is_closed else cell.load.rate_per_s) is not None
                and _pairs([cell], value)
            ]
            loads = sorted({_size(cell.load) for cell in cells})
            if len(loads) < 2:
                continue
            series = tuple(
                Series(arm, arm, tuple(_load_points([c for c in cells if c.arm == arm], value)))
                for arm in dict.fromkeys(cell.arm for cell in cells)
            )
            x, y = load_axis(x_title, loads), y_axis(y_title, series)
            yield temperature, is_closed, Panel(_temperature(temperature), CURVE, x, y, series)


def _load_points(cells: list[Cell], value: Callable[[Cell], Interval | None]) -> Iterator[Point]:
    for cell in sorted(cells, key=lambda cell: _size(cell.load)):
        for interval in _pairs([cell], value).values():
            says = f"{cell.load.label}: {words(interval, False)}"
            yield Point(_size(cell.load), interval.estimate, interval.low, interval.high, says)


def _frontier(summary: Summary) -> Figure:
    panels = []
    for temperature in dict.fromkeys(f.temperature for f in summary.frontiers):
        series = [
            Series(
                f.arm,
                f.arm,
                tuple(
                    Point(
                        x,
                        y,
                        says=f"{label}: {x:,.1f} tok/s per user, {y:,.1f} in all",
                        label=label.split()[0],
                    )
                    for label, x, y in f.points
                    if math.isfinite(x) and math.isfinite(y)
                ),
            )
            for f in summary.frontiers
            if f.temperature == temperature
        ]
        points = [p for s in series for p in s.points]
        if not points:
            continue
        x = Axis("tok/s per user", 0.0, 1.12 * max(p.x for p in points))
        y = Axis("tok/s of all users", 0.0, 1.15 * max(p.y for p in points))
        panels.append(Panel(_temperature(temperature), CURVE, x, y, tuple(s for s in series if s.points)))
    return Figure(
        "frontier",
        "Throughput against interactivity",
        "Each point is a closed load, with its number of requests in flight. Further right is faster for each user, "
        "further up is more work from the machine; an arm above and right of another is better at both.",
        tuple(panels),
    )


def _break_even(summary: Summary) -> Figure:
    panels = []
    for arm, temperature in dict.fromkeys((b.arm, b.temperature) for b in summary.break_even):
        rows = sorted(
            (b for b in summary.break_even if (b.arm, b.temperature) == (arm, temperature)),
            key=lambda b: b.num_sequences,
        )
        series = tuple(
            Series(arm, name, points, is_dashed)
            for name, points, is_dashed in (
                ("needed", _break_even_points(rows, lambda b: b.needed), True),
                ("had", _break_even_points(rows, lambda b: b.acceptance_length), False),
            )
            if points
        )
        if series:
            x = load_axis("sequences in a step", [float(b.num_sequences) for b in rows])
            y = y_axis("tokens per step (τ)", series, [1.0])
            panels.append(Panel(f"{arm}, {_temperature(temperature)}", CURVE, x, y, series))
    return Figure(
        "break_even",
        "Break-even: tokens per step needed and had",
        "Drafting pays where the tokens that a step yields (had) exceed what the step costs in plain steps (needed), "
        "both measured at that batch size.",
        tuple(panels),
    )


def _break_even_points(rows: Sequence[BreakEven], value: Callable[[BreakEven], float]) -> tuple[Point, ...]:
    return tuple(
        Point(float(b.num_sequences), value(b), says=f"{b.num_sequences} sequences {value(b):.2f}")
        for b in rows
        if math.isfinite(value(b))
    )


def _acceptance(summary: Summary) -> Figure:
    names = {"rate": "accepted, given all before", "survival": "accepted"}
    panels = []
    for load, temperature, cells in _drafting(summary):
        for quantity, title in names.items():
            shares = {c.arm: getattr(c.acceptance, quantity) for c in cells}
            series = tuple(Series(arm, arm, _slot_points(s, 1)) for arm, s in shares.items() if s)
            if series:
                last = max(p.x for s in series for p in s.points)
                x = Axis("slot of the draft", 0.5, last + 0.5, ticks=_count_ticks(1, int(last)))
                panel = f"{title}, {load.label}, {_temperature(temperature)}"
                panels.append(Panel(panel, CURVE, x, Axis("share of drafts", 0.0, 1.05), series))
    return Figure(
        "acceptance",
        "Acceptance by slot",
        "How often a draft stands at each place of a block, over all kinds; the lowest load that was run.",
        tuple(panels),
    )


def _histogram(summary: Summary) -> Figure:
    panels = []
    for load, temperature, cells in _drafting(summary):
        counts = {
            c.arm: c.acceptance.histogram for c in cells if c.acceptance and sum(c.acceptance.histogram)
        }
        if not counts:
            continue
        series = tuple(
            Series(arm, arm, _slot_points([count / sum(steps) for count in steps], 0))
            for arm, steps in counts.items()
        )
        last, top = max(p.x for s in series for p in s.points), max(p.y for s in series for p in s.points)
        x = Axis("accepted drafts of a step", -0.6, last + 0.6, ticks=_count_ticks(0, int(last)))
        panel = f"{load.label}, {_temperature(temperature)}"
        panels.append(Panel(panel, BARS, x, Axis("share of steps", 0.0, 1.1 * top), series))
    return Figure(
        "steps",
        "Verify steps by accepted drafts",
        "A step yields one token more than drafts accepted. Two humps, at none and at all, mean that some text is "
        "easy to draft and some is not.",
        tuple(panels),
    )


def _drafting(summary: Summary) -> Iterator[tuple[Load, float, list[Cell]]]:
    """Yields for each temperature the lowest load with acceptance, and its cells; it hardly depends on the load."""
    for temperature in _temperatures(summary.cells):
        cells = [c for c in _whole(summary) if c.temperature == temperature and c.acceptance]
        if cells:
            load = min((cell.load for cell in cells), key=_size)
            yield load, temperature, [cell for cell in cells if cell.load == load]


def _slot_points(shares: Sequence[float], first: int) -> tuple[Point, ...]:
    return tuple(
        Point(float(first + i), share, says=f"{first + i}: {amounts.percent(share)}")
        for i, share in enumerate(shares)
        if math.isfinite(share)
    )


def _count_ticks(first: int, last: int) -> tuple[tuple[float, str], ...]:
    step = max(1, math.ceil((last - first) / 8))
    return tuple((float(i), str(i)) for i in range(first, last + 1, step))


def _boundaries(rules: Rules, is_vertical: bool) -> tuple[Guide, ...]:
    marks = (
        Guide(1.0, "equal", is_vertical),
        Guide(rules.min_speedup, f"rule {rules.min_speedup:g}", is_vertical),
    )
    return marks[: 1 if rules.min_speedup == 1.0 else 2]


def _whole(summary: Summary) -> list[Cell]:
    return [cell for cell in summary.cells if cell.kind is None]


def _temperatures(cells: Sequence[Cell]) -> list[float]:
    return list(dict.fromkeys(cell.temperature for cell in cells))


def _temperature(temperature: float) -> str:
    return f"temperature {temperature:g}"


def _size(load: Load) -> float:
    return float(load.concurrency or load.rate_per_s or load.speed or 0.0)
