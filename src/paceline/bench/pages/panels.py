"""The shapes of figures: points with intervals, axes, panels; and how a forest plot and an axis are laid out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.bench.numbers.summary import Interval
from paceline.bench.pages import amounts

FOREST, CURVE, BARS = "forest", "curve", "bars"


@dataclass(frozen=True, slots=True)
class Point:
    """A point with its interval, which lies along x in a forest plot and along y elsewhere.

    Args:
        low, high: ends of the interval, infinite where the data leave them open; `None` without an interval.
        says: what it shows, in words.
        label: written beside it.
    """

    x: float
    y: float
    low: float | None = None
    high: float | None = None
    says: str = ""
    label: str = ""


@dataclass(frozen=True, slots=True)
class Series:
    """Points of one arm; the arm decides colour and symbol."""

    arm: str
    name: str
    points: tuple[Point, ...]
    is_dashed: bool = False


@dataclass(frozen=True, slots=True)
class Guide:
    """A straight line at a value, with what it means; `arm` gives it that arm's colour."""

    at: float
    text: str
    is_vertical: bool
    arm: str | None = None


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis with its range, of which nothing is drawn outside.

    Args:
        ticks: (value, text) of each; empty leaves them to whoever draws.
    """

    title: str
    low: float
    high: float
    is_log: bool = False
    ticks: tuple[tuple[float, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Panel:
    """One pair of axes; `shape` is `FOREST`, `CURVE` or `BARS`."""

    title: str
    shape: str
    x: Axis
    y: Axis
    series: tuple[Series, ...]
    guides: tuple[Guide, ...] = ()


@dataclass(frozen=True, slots=True)
class Figure:
    """Panels that answer one question.

    Args:
        name: stem of its file.
        title: the question, or what is shown.
        caption: how to read it.
        panels: at least one.
    """

    name: str
    title: str
    caption: str
    panels: tuple[Panel, ...]

    @property
    def description(self) -> str:
        """The figure in words, for those who do not see it."""
        series = [
            f"{panel.title}: {series.name}, " + "; ".join(p.says for p in series.points)
            for panel in self.panels
            for series in panel.series
        ]
        return f"{self.title}. " + " | ".join(series)


def forest(
    title: str,
    x_title: str,
    rows: dict[str, dict[str, Interval]],
    guides: tuple[Guide, ...],
    *,
    is_time: bool = False,
) -> list[Panel]:
    """Returns a panel with a row for each name and in it a point for each arm, or none where nothing is known."""
    rows = {name: row for name, row in rows.items() if row}
    arms = list(dict.fromkeys(arm for row in rows.values() for arm in row))
    if not arms:
        return []
    series = []
    for j, arm in enumerate(arms):
        offset = 0.6 * ((j + 0.5) / len(arms) - 0.5)  # arms of a row stand around its middle
        points = [
            Point(value.estimate, -i - offset, value.low, value.high, f"{name}: {words(value, is_time)}")
            for i, (name, row) in enumerate(rows.items())
            if (value := row.get(arm))
        ]
        series.append(Series(arm, arm, tuple(points)))
    values = [value for row in rows.values() for value in row.values()]
    low, high = _range(values, [guide.at for guide in guides], is_log=is_time)
    x = Axis(x_title, low, high, is_log=is_time, ticks=_time_ticks(low, high) if is_time else ())
    y = Axis("", 0.5 - len(rows), 0.5, ticks=tuple((-float(i), name) for i, name in enumerate(rows)))
    return [Panel(title, FOREST, x, y, tuple(series), guides)]


def words(interval: Interval, is_time: bool) -> str:
    """Returns an interval as a reader sees it beside a point."""
    return f"{amounts.span(interval, 1000)} ms" if is_time else amounts.span(interval, decimals=2)


def load_axis(title: str, loads: Sequence[float]) -> Axis:
    """Returns a logarithmic axis with a tick at each load."""
    low, high = min(loads), max(loads)
    factor = max((high / low) ** 0.06, 1.05)
    return Axis(title, low / factor, high * factor, is_log=True, ticks=tuple((v, f"{v:g}") for v in loads))


def y_axis(title: str, series: Sequence[Series], also: Sequence[float] = ()) -> Axis:
    """Returns an axis that shows the series with their intervals, and the values `also`."""
    values = [
        Interval(p.y, p.y if p.low is None else p.low, p.y if p.high is None else p.high)
        for one in series
        for p in one.points
    ]
    return Axis(title, *_range(values, also))


def _range(values: Sequence[Interval], also: Sequence[float], *, is_log: bool = False) -> tuple[float, float]:
    """Returns ends of an axis that hold all estimates and lines, and of intervals what is not too far from them."""
    to, back = (math.log, math.exp) if is_log else (float, float)
    shown = [to(value) for value in (*(v.estimate for v in values), *also) if value > 0 or not is_log]
    low, high = min(shown, default=0.0), max(shown, default=1.0)
    reach = max(1.5 * (high - low), 1.0 if is_log else 0.2 * abs(high))
    ends = [
        to(end) for v in values for end in (v.low, v.high) if math.isfinite(end) and (end > 0 or not is_log)
    ]
    low = max(low - reach, min([low, *ends]))
    high = min(high + reach, max([high, *ends]))
    pad = 0.06 * (high - low) or 0.05 * abs(high) or 0.05
    return back(low - pad), back(high + pad)


def _time_ticks(low_s: float, high_s: float) -> tuple[tuple[float, str], ...]:
    """Returns round times between two, as many as stand beside each other."""
    decades = range(math.floor(math.log10(low_s)), math.ceil(math.log10(high_s)) + 1)
    for digits in ((1, 2, 5), (1, 3), (1,)):
        ticks = [d * 10.0**k for k in decades for d in digits if low_s <= d * 10.0**k <= high_s]
        if len(ticks) <= 6:
            break
    return tuple((tick, f"{tick:g} s" if tick >= 1 else f"{1000 * tick:g} ms") for tick in ticks)
