"""What a benchmark came to, on a terminal: the verdict, what decided, and a line for each arm and load."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from paceline.bench.numbers.summary import Cell, Decision, Summary

_STYLES = {"on": "bold green", "off": "bold red", "cannot tell": "bold yellow"}


def show(summary: Summary) -> None:
    """Prints a summary on stdout."""
    console = Console(highlight=False)
    console.print(_loads(summary))
    if kinds := _kinds(summary):
        console.print(kinds)
    for decision in summary.decisions:
        for line in _lines(decision):
            console.print(line, soft_wrap=True)
    for arm, load, reason, count, example in summary.failures:
        console.print(
            Text(f"{arm}, {load}: {count} failed, such as {example}: {reason}", style="red"), soft_wrap=True
        )


def _lines(decision: Decision) -> Iterator[Text]:
    yield Text.assemble((decision.sentence, _STYLES.get(decision.verdict, "bold cyan")))
    for reason in decision.reasons:
        yield Text(f"  {reason}", style="dim")


def _loads(summary: Summary) -> Table:
    """Returns a line for each arm, load and temperature over all kinds."""
    table = Table(
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        caption="ratio: output speed of a request over the baseline's, paired, with its interval",
    )
    has_failures = any(cell.num_failures for cell in summary.cells)
    names = ["arm", "load", "T", "ratio", "tok/s", "a user", "TTFT", "τ", "same", *["failed"] * has_failures]
    for name in names:
        is_text = name in ("arm", "load")
        table.add_column(
            name, justify="left" if is_text else "right", no_wrap=name != "arm", min_width=9 * is_text
        )
    for cell in summary.cells:
        if cell.kind is None:
            table.add_row(*_row(cell)[: len(names)])
    return table


def _row(cell: Cell) -> tuple[str, ...]:
    from paceline.bench.pages.amounts import number, seconds, span

    tau = None if cell.acceptance is None else cell.acceptance.length.estimate
    return (
        cell.arm,
        cell.load.label,
        f"{cell.temperature:g}",
        "" if cell.ratio is None else span(cell.ratio, decimals=2),
        "" if cell.tokens_per_s is None else number(cell.tokens_per_s.estimate),
        "" if cell.tokens_per_s_per_user is None else number(cell.tokens_per_s_per_user.estimate),
        "" if cell.ttft_s is None else seconds(cell.ttft_s.p50.estimate),
        "" if tau is None else f"{tau:.2f}",
        f"{cell.num_identical}/{cell.num_compared}" if cell.num_compared else "",
        str(cell.num_failures or ""),
    )


def _kinds(summary: Summary) -> Table | None:
    """Returns ratios by kind at the lowest load, a column for each arm; `None` with a single kind."""
    cells = [cell for cell in summary.cells if cell.kind is not None and cell.ratio is not None]
    kinds = list(dict.fromkeys(cell.kind for cell in cells))
    if len(kinds) < 2:
        return None
    first = cells[0]
    at = [cell for cell in cells if (cell.load, cell.temperature) == (first.load, first.temperature)]
    arms = list(dict.fromkeys(cell.arm for cell in at))
    table = Table(
        box=SIMPLE_HEAD, caption=f"ratio by kind, {first.load.label}, temperature {first.temperature:g}"
    )
    table.add_column("kind")
    for arm in arms:
        table.add_column(arm, justify="right")
    for kind in kinds:
        found = {cell.arm: cell.ratio for cell in at if cell.kind == kind}
        table.add_row(
            str(kind),
            *(f"{ratio.estimate:.2f}" if (ratio := found.get(arm)) is not None else "" for arm in arms),
        )
    return table
