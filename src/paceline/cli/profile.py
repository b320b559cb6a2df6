"""Where the time of a benchmark's steps went, on a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from paceline.bench.numbers.summary import Profile
    from paceline.bench.pages import sections


def show(profile: Profile | None) -> None:
    """Prints a profile on stdout, or why there is none."""
    from paceline.bench.pages import profile as pages

    console = Console(highlight=False)
    if profile is None:
        console.print(
            "no profile: this process's engine made no step of this run in which no prompt was read",
            soft_wrap=True,
        )
        return
    for table in (pages.steps(profile), pages.passes(profile)):
        console.print(_as_rich(table))
    for line in (*pages.shares(profile), *pages.sentences(profile)):
        console.print(Text(line), soft_wrap=True)


def _as_rich(table: sections.Table) -> Table:
    """Returns the table for a terminal, as narrow as it can be: headers may wrap, cells may not."""
    shown = Table(box=SIMPLE_HEAD, padding=0, caption=table.caption)
    for i, column in enumerate(table.columns):
        narrowest = max(map(len, (*column.split(), *(row[i] for row in table.rows))))
        shown.add_column(column, justify="left" if i == 0 else "right", width=narrowest)
    for row in table.rows:
        shown.add_row(*(Text(cell) for cell in row))
    return shown
