"""Numbers as people read them: sensible digits, a unit, an interval; what is not known is a dash."""

from __future__ import annotations

import math

from paceline.bench.numbers.summary import Interval

UNKNOWN = "—"
_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def number(value: float | None, digits: int = 3) -> str:
    """Returns a number with so many significant digits, never fewer than its whole part has; a dash for no number."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    if value == 0:
        return "0"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{min(decimals, 6)}f}"


def ratio(value: float | None) -> str:
    """Returns a ratio with two decimals, as in 1.32×."""
    return UNKNOWN if value is None or not math.isfinite(value) else f"{value:,.2f}×"


def seconds(value: float | None) -> str:
    """Returns a time in the unit in which it is read best."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    if abs(value) >= 120:
        return f"{number(value / 60)} min"
    return f"{number(value)} s" if abs(value) >= 1 else f"{number(1000 * value)} ms"


def size(num_bytes: int) -> str:
    """Returns a number of bytes in decimal units."""
    for factor, unit in _UNITS:
        if num_bytes >= factor:
            return f"{number(num_bytes / factor)} {unit}"
    return f"{num_bytes} B"


def percent(share: float | None) -> str:
    """Returns a share as a percentage with one decimal, without it where it is zero."""
    return (
        UNKNOWN
        if share is None or not math.isfinite(share)
        else f"{100 * share:.1f}".rstrip("0").rstrip(".") + " %"
    )


def span(interval: Interval | None, scale: float = 1.0, *, decimals: int | None = None) -> str:
    """Returns an estimate with its interval, as in `1.32 [1.25, 1.40]`; an end that the data leave open is a dash.

    Args:
        scale: factor from the interval's unit to the one that is shown.
        decimals: digits behind the point; `None` shows three significant ones.
    """
    if interval is None:
        return UNKNOWN
    middle, low, high = (
        _scaled(value, scale, decimals) for value in (interval.estimate, interval.low, interval.high)
    )
    return middle if middle == UNKNOWN else f"{middle} [{low}, {high}]"


def _scaled(value: float, scale: float, decimals: int | None) -> str:
    if decimals is None or not math.isfinite(value):
        return number(value * scale)
    return f"{value * scale:,.{decimals}f}"
