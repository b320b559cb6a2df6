"""Draws figures: as data for plotly in a page, and as PNG. Same colours, symbols and words in both.

Names come from outside; plotly reads a little HTML in texts and matplotlib a little TeX, so both are escaped.
"""

from __future__ import annotations

import html
import io
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from paceline.bench.pages.looks import COLOURS, GRID, INK, PAPER, SOFT, Style
from paceline.bench.pages.panels import BARS, CURVE, FOREST, Figure, Guide, Panel, Point, Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MARKERS = {
    "circle": "o",
    "square": "s",
    "triangle-up": "^",
    "diamond": "D",
    "triangle-down": "v",
    "x": "X",
    "star": "*",
    "pentagon": "p",
}
_LINES: dict[str, Any] = {
    "solid": "-",
    "dash": "--",
    "dashdot": "-.",
    "longdash": (0, (9, 3)),
    "longdashdot": (0, (9, 3, 2, 3)),
    "dot": ":",
}
_MAX_NAME = 24
_WIDTH, _DPI = 5.6, 140  # inches of a panel in a PNG


# For the page --------------------------------------------------------------------------------------------------------


def to_plotly(panel: Panel, looks: Mapping[str, Style]) -> dict[str, Any]:
    """Returns data and layout of a panel as plotly.js takes them. Pure."""
    trace = _bar_trace if panel.shape == BARS else _point_trace
    names = [len(_short(series.name)) for series in panel.series]
    return {
        "data": [trace(series, panel, looks[series.arm]) for series in panel.series],
        "layout": {
            "height": _height(panel),
            "margin": {"l": 58, "r": 20 + 7 * max(names) if _has_end_labels(panel) else 16, "t": 34, "b": 46},
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "font": {"family": "system-ui, sans-serif", "size": 12, "color": INK},
            "hoverlabel": {"bgcolor": PAPER, "bordercolor": SOFT, "font": {"color": INK}, "align": "left"},
            "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": SOFT, "activecolor": INK},
            "showlegend": _has_legend(panel),
            "legend": {"orientation": "h", "x": 0, "y": -0.02, "yref": "container", "yanchor": "bottom"},
            "barmode": "group",
            "xaxis": _plotly_axis(panel, "x"),
            "yaxis": _plotly_axis(panel, "y"),
            "shapes": [_plotly_guide(guide, looks) for guide in panel.guides],
            "annotations": [*_plotly_guide_texts(panel, looks), *_plotly_end_texts(panel, looks)],
        },
    }


def _height(panel: Panel) -> int:
    if panel.shape != FOREST:
        return 320 + 30 * _has_legend(panel)
    rows = len(panel.y.ticks) * (14 + 14 * len(panel.series))
    return 90 + rows + (36 if len(panel.series) > 1 else 0)


def _plotly_axis(panel: Panel, which: str) -> dict[str, Any]:
    axis = panel.x if which == "x" else panel.y
    low, high = (math.log10(axis.low), math.log10(axis.high)) if axis.is_log else (axis.low, axis.high)
    drawn: dict[str, Any] = {
        "title": {"text": _no_html(axis.title), "standoff": 8},
        "type": "log" if axis.is_log else "linear",
        "range": [low, high],
        "gridcolor": GRID,
        "linecolor": SOFT,
        "zeroline": False,
        "automargin": True,
        "fixedrange": False,
    }
    if axis.ticks:
        drawn |= {"tickvals": [at for at, _ in axis.ticks], "ticktext": [_no_html(t) for _, t in axis.ticks]}
    return drawn


def _point_trace(series: Series, panel: Panel, look: Style) -> dict[str, Any]:
    points = [p for p in series.points if not (panel.x.is_log and p.x <= 0)]
    along = "x" if panel.shape == FOREST else "y"
    ends = [_ends(p, panel) for p in points]
    middles = [p.x if along == "x" else p.y for p in points]
    trace: dict[str, Any] = {
        "type": "scatter",
        "mode": "markers" if panel.shape == FOREST else "lines+markers+text",
        "name": _no_html(_short(series.name)),
        "x": [p.x for p in points],
        "y": [p.y for p in points],
        "text": [_no_html(p.label) for p in points],
        "textposition": "top center",
        "customdata": [_no_html(f"{series.name}, {p.says}") for p in points],
        "hovertemplate": "%{customdata}<extra></extra>",
        "marker": {"color": look.colour, "size": 9, "symbol": look.symbol + "-open" * series.is_dashed},
        "line": {"color": look.colour, "width": 2, "dash": "dot" if series.is_dashed else look.dash},
        "cliponaxis": False,
    }
    if any(low < high for low, high in ends):
        trace[f"error_{along}"] = {
            "type": "data",
            "symmetric": False,
            "array": [high - middle for (_, high), middle in zip(ends, middles, strict=True)],
            "arrayminus": [middle - low for (low, _), middle in zip(ends, middles, strict=True)],
            "color": look.colour,
            "thickness": 1.6,
            "width": 4,
        }
    return trace


def _bar_trace(series: Series, panel: Panel, look: Style) -> dict[str, Any]:
    return {
        "type": "bar",
        "name": _no_html(_short(series.name)),
        "x": [p.x for p in series.points],
        "y": [p.y for p in series.points],
        "customdata": [_no_html(f"{series.name}, {p.says}") for p in series.points],
        "hovertemplate": "%{customdata}<extra></extra>",
        "marker": {
            "color": look.colour,
            "line": {"color": look.colour, "width": 1},
            "pattern": {"shape": look.hatch, "fillmode": "replace", "fgcolor": look.colour, "size": 6},
        },
    }


def _ends(point: Point, panel: Panel) -> tuple[float, float]:
    """Returns the ends of the interval as they are drawn: one that is open, or far away, leaves the panel."""
    axis, middle = (panel.x, point.x) if panel.shape == FOREST else (panel.y, point.y)
    if point.low is None or point.high is None:
        return middle, middle
    beyond = axis.high - axis.low
    floor = axis.low / 2 if axis.is_log else axis.low - beyond
    return max(point.low, floor), min(point.high, axis.high + beyond)


def _plotly_guide(guide: Guide, looks: Mapping[str, Style]) -> dict[str, Any]:
    along, across = ("x", "y") if guide.is_vertical else ("y", "x")
    return {
        "type": "line",
        f"{along}0": guide.at,
        f"{along}1": guide.at,
        f"{across}ref": "paper",
        f"{across}0": 0,
        f"{across}1": 1,
        "layer": "above",
        "line": {"color": _guide_colour(guide, looks), "width": 1.2, "dash": "dot" if guide.arm else "dash"},
    }


def _plotly_guide_texts(panel: Panel, looks: Mapping[str, Style]) -> Iterator[dict[str, Any]]:
    for guide, is_later, depth in _placed(panel.guides):
        text = {
            "text": _no_html(guide.text),
            "showarrow": False,
            "font": {"size": 11, "color": _guide_colour(guide, looks)},
        }
        if guide.is_vertical:
            at = math.log10(guide.at) if panel.x.is_log else guide.at
            yield text | {
                "x": at,
                "yref": "paper",
                "y": 1,
                "yanchor": "bottom",
                "yshift": -14 * depth,
                "xanchor": "left" if is_later else "right",
            }
        else:
            yield text | {
                "xref": "paper",
                "x": 0.01,
                "y": guide.at,
                "xanchor": "left",
                "yanchor": "bottom" if is_later else "top",
            }


def _plotly_end_texts(panel: Panel, looks: Mapping[str, Style]) -> Iterator[dict[str, Any]]:
    for series, x, y in _end_labels(panel):
        yield {
            "text": _no_html(_short(series.name)),
            "x": math.log10(x) if panel.x.is_log else x,
            "y": y,
            "xanchor": "left",
            "xshift": 9,
            "showarrow": False,
            "font": {"size": 12, "color": looks[series.arm].colour},
        }


# As PNG --------------------------------------------------------------------------------------------------------------


def to_png(figure: Figure, looks: Mapping[str, Style]) -> bytes:
    """Returns the figure as a PNG on white, its panels side by side."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Sheet

    columns = min(2, len(figure.panels))
    rows = [figure.panels[i : i + columns] for i in range(0, len(figure.panels), columns)]
    heights = [max(_height(panel) for panel in row) / 100 for row in rows]
    sheet = Sheet(figsize=(_WIDTH * columns, sum(heights)), layout="constrained")
    canvas = FigureCanvasAgg(sheet)
    places = sheet.subplots(len(rows), columns, squeeze=False, height_ratios=heights)
    for place in places.flat[len(figure.panels) :]:
        place.set_axis_off()
    for panel, place in zip(figure.panels, places.flat, strict=False):
        _draw(panel, place, looks)
    known = {
        label: handle
        for panel, place in zip(figure.panels, places.flat, strict=False)
        if _has_legend(panel)
        for handle, label in zip(*place.get_legend_handles_labels(), strict=True)
    }
    if known:
        sheet.legend(
            known.values(), known.keys(), loc="outside lower left", ncols=4, fontsize=9, frameon=False
        )
    buffer = io.BytesIO()
    with warnings.catch_warnings():  # of characters that the font lacks; the page shows them
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        canvas.print_figure(buffer, format="png", dpi=_DPI, facecolor="white")
    return buffer.getvalue()


def _draw(panel: Panel, axes: Axes, looks: Mapping[str, Style]) -> None:
    for axis, which in ((panel.x, "x"), (panel.y, "y")):
        axes.set(**{f"{which}label": axis.title, f"{which}lim": (axis.low, axis.high)})
        if axis.is_log:
            axes.set(**{f"{which}scale": "log"})
            getattr(axes, f"{which}axis").set_minor_locator(_no_ticks())
        if axis.ticks:
            axes.set(**{f"{which}ticks": [at for at, _ in axis.ticks]})
            axes.set(**{f"{which}ticklabels": [_no_tex(text) for _, text in axis.ticks]})
    axes.set_xlim(panel.x.low, panel.x.high)  # ticks may have widened it
    axes.grid(visible=True, color=COLOURS[GRID], linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(_no_tex(panel.title), loc="left", fontsize=10, pad=18)
    _draw_guides(panel, axes, looks)
    for i, series in enumerate(panel.series):
        if panel.shape == BARS:
            _draw_bars(series, axes, looks[series.arm], (i, len(panel.series)))
        else:
            _draw_points(series, panel, axes, looks[series.arm])
    for series, x, y in _end_labels(panel):
        axes.annotate(
            _no_tex(_short(series.name)),
            (x, y),
            xytext=(8, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            color=COLOURS[looks[series.arm].colour],
            annotation_clip=False,
        )


def _no_ticks() -> Any:
    from matplotlib.ticker import NullLocator

    return NullLocator()


def _draw_points(series: Series, panel: Panel, axes: Axes, look: Style) -> None:
    points = [p for p in series.points if not (panel.x.is_log and p.x <= 0)]
    ends = [_ends(p, panel) for p in points]
    along = "x" if panel.shape == FOREST else "y"
    middles = [p.x if along == "x" else p.y for p in points]
    lengths = [
        [max(0.0, middle - low) for (low, _), middle in zip(ends, middles, strict=True)],
        [max(0.0, high - middle) for (_, high), middle in zip(ends, middles, strict=True)],
    ]
    colour = COLOURS[look.colour]
    errors: dict[str, Any] = {f"{along}err": lengths} if any(map(any, lengths)) else {}
    axes.errorbar(
        [p.x for p in points],
        [p.y for p in points],
        **errors,
        color=colour,
        marker=_MARKERS[look.symbol],
        markerfacecolor="white" if series.is_dashed else colour,
        linestyle="" if panel.shape == FOREST else _LINES["dot" if series.is_dashed else look.dash],
        linewidth=1.6,
        elinewidth=1.4,
        capsize=3,
        label=_no_tex(_short(series.name)),
    )
    for point in points:
        if point.label:
            axes.annotate(
                _no_tex(point.label),
                (point.x, point.y),
                xytext=(0, 6),
                textcoords="offset points",
                ha="center",
                fontsize=8,
                color=COLOURS[SOFT],
            )


def _draw_bars(series: Series, axes: Axes, look: Style, place: tuple[int, int]) -> None:
    index, count = place
    width = 0.8 / count
    colour = COLOURS[look.colour]
    axes.bar(
        [p.x + (index + 0.5) * width - 0.4 for p in series.points],
        [p.y for p in series.points],
        width,
        color="white" if look.hatch else colour,
        edgecolor=colour,
        hatch=look.hatch * 2,
        label=_no_tex(_short(series.name)),
    )


def _draw_guides(panel: Panel, axes: Axes, looks: Mapping[str, Style]) -> None:
    for guide, is_later, depth in _placed(panel.guides):
        colour = COLOURS[_guide_colour(guide, looks)]
        line = axes.axvline if guide.is_vertical else axes.axhline
        line(guide.at, color=colour, linewidth=1, linestyle=":" if guide.arm else "--", zorder=0.9)
        if guide.is_vertical:
            axes.annotate(
                _no_tex(guide.text),
                (guide.at, 1),
                xycoords=("data", "axes fraction"),
                xytext=(2 if is_later else -2, 3 - 11 * depth),
                textcoords="offset points",
                ha="left" if is_later else "right",
                fontsize=8,
                color=colour,
            )
        else:
            axes.annotate(
                _no_tex(guide.text),
                (0.01, guide.at),
                xycoords=("axes fraction", "data"),
                xytext=(0, 2 if is_later else -2),
                textcoords="offset points",
                va="bottom" if is_later else "top",
                fontsize=8,
                color=colour,
            )


# For both ------------------------------------------------------------------------------------------------------------


def _placed(guides: Sequence[Guide]) -> Iterator[tuple[Guide, bool, int]]:
    """Yields each line, whether its text stands behind it rather than before it, and how many lines deeper.

    Texts of neighbours point away from each other; from the third on they are stacked.
    """
    for is_vertical in (True, False):
        ordered = sorted((g for g in guides if g.is_vertical == is_vertical), key=lambda guide: guide.at)
        for i, guide in enumerate(ordered):
            is_later = i >= len(ordered) // 2
            depth = len(ordered) // 2 - 1 - i if not is_later else i - len(ordered) // 2
            yield guide, is_later, depth


def _has_end_labels(panel: Panel) -> bool:
    """Whether curves carry their names: where they end below each other."""
    return panel.shape == CURVE and len({max(p.x for p in series.points) for series in panel.series}) == 1


def _has_legend(panel: Panel) -> bool:
    return len(panel.series) > 1 and not _has_end_labels(panel)


def _end_labels(panel: Panel) -> Iterator[tuple[Series, float, float]]:
    """Yields series of a curve with the place of their name: the right end, moved apart where names would overlap."""
    if not _has_end_labels(panel):
        return
    ends = {series: max(series.points, key=lambda p: p.x) for series in panel.series if series.points}
    least = 0.07 * (panel.y.high - panel.y.low)
    taken = -math.inf
    for series, end in sorted(ends.items(), key=lambda item: item[1].y):
        taken = max(end.y, taken + least)
        yield series, end.x, taken


def _guide_colour(guide: Guide, looks: Mapping[str, Style]) -> str:
    return looks[guide.arm].colour if guide.arm else SOFT


def _short(name: str) -> str:
    return name if len(name) <= _MAX_NAME else f"{name[: _MAX_NAME - 1]}…"


def _no_html(text: str) -> str:
    return html.escape(text, quote=False)


def _no_tex(text: str) -> str:
    return text.replace("$", r"\$")
