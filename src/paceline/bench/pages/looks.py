"""How arms look in figures: the same in all of them, and told apart with any colour vision, or none.

Colours are those of Okabe and Ito (2008); symbols, dashes and hatches say the same without them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

INK, SOFT, GRID, PAPER = "@ink", "@soft", "@grid", "@paper"
COLOURS = {
    INK: "#1b1f24",
    SOFT: "#5b6470",
    GRID: "#d9dde2",
    PAPER: "#ffffff",
    "@arm1": "#0072b2",
    "@arm2": "#d55e00",
    "@arm3": "#009e73",
    "@arm4": "#cc79a7",
    "@arm5": "#e69f00",
    "@arm6": "#56b4e9",
}
"""What stands for a colour in a plotly panel, with that colour on white; a page has its own for each."""
_OF_ARMS = tuple(mark for mark in COLOURS if mark.startswith("@arm"))
_SYMBOLS = ("square", "triangle-up", "diamond", "triangle-down", "x", "star", "pentagon")
_DASHES = ("solid", "dash", "dashdot", "longdash", "longdashdot")
_HATCHES = ("/", "\\", "x", "-", "+")


@dataclass(frozen=True, slots=True)
class Style:
    """How an arm looks in every figure, in plotly's words."""

    colour: str
    symbol: str
    dash: str
    hatch: str


def styles(arms: Sequence[str], baseline: str) -> dict[str, Style]:
    """Returns a style for each arm, distinct also in black and white; the baseline has the colour of text."""
    chosen = {baseline: Style(INK, "circle", "solid", "")}
    for i, arm in enumerate(arm for arm in arms if arm != baseline):
        chosen[arm] = Style(
            _OF_ARMS[i % len(_OF_ARMS)],
            _SYMBOLS[i % len(_SYMBOLS)],
            _DASHES[i % len(_DASHES)],
            _HATCHES[i % len(_HATCHES)],
        )
    return chosen
