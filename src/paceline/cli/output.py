"""What the terminal shows: text as it arrives, words on stderr, one JSON document on stdout."""

from __future__ import annotations

import errno
import json
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

if TYPE_CHECKING:
    from paceline.core.types import Completion, TokenDelta
    from paceline.target.text import TextCodec

INTERRUPTED = 130
"""Exit code after Ctrl-C: 128 + SIGINT, as shells have it."""

arguments_given: ContextVar[tuple[str, ...]] = ContextVar("arguments_given", default=())
"""Words of the command line behind the program's name, as `main` got them."""

_STAGES = {
    "download": "fetching the target",
    "convert": "converting the target",
    "measure": "measuring what passes cost here (once)",
}


def command_line() -> str:
    """Returns the command line that runs, quoted for a shell."""
    return shlex.join(["paceline", *arguments_given.get()])


def words() -> Console:
    """Returns the console for everything that is not the result; NO_COLOR is respected."""
    return Console(stderr=True, highlight=False)


def note(message: str) -> None:
    """Prints a line of words on stderr."""
    words().print(Text(message, style="dim"), soft_wrap=True)


def say_error(message: str) -> None:
    """Prints `error: message` on stderr, on one line."""
    words().print(Text.assemble(("error: ", "bold red"), " ".join(message.split())), soft_wrap=True)


def say_warning(message: str) -> None:
    """Prints `warning: message` on stderr, on one line."""
    words().print(Text.assemble(("warning: ", "bold yellow"), " ".join(message.split())), soft_wrap=True)


def in_words(error: OSError) -> str:
    """Returns what the system complains about, the file first, and what to do about a full disk."""
    reason = error.strerror or str(error)
    hint = "; hint: make room, then run again" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
    return f"{error.filename}: {reason}{hint}" if error.filename else f"{reason}{hint}"


def write_json(document: object, *, indent: int | None = 1) -> None:
    """Prints a JSON document on stdout; characters beyond ASCII are escaped, so any terminal and pipe will do."""
    sys.stdout.write(json.dumps(document, indent=indent) + "\n")
    sys.stdout.flush()


def is_terminal() -> bool:
    """Whether a person reads stdout."""
    return sys.stdout.isatty()


def has_colour() -> bool:
    """Whether stdout shows ANSI colours and the user wants them."""
    console = Console()
    return console.is_terminal and not console.no_color and console.color_system not in (None, "windows")


class Transcript:
    """One answer on stdout: exactly its text, drafts that stood in green where stdout shows colours.

    Args:
        codec: the target's tokenizer.
    """

    def __init__(self, codec: TextCodec) -> None:
        from paceline.target.text import IncrementalDecoder

        self._decoder = IncrementalDecoder(codec) if has_colour() else None
        self._num_written = 0
        self._ends_line = True

    def show(self, delta: TokenDelta) -> None:
        """Prints one piece. A character that a draft began and the target's own token completed counts as its own."""
        num_green = 0
        if self._decoder is not None:
            num_green = len(self._decoder.push(delta.token_ids[: delta.num_drafted_tokens]))
            self._decoder.push(delta.token_ids[delta.num_drafted_tokens :])
        self._write(delta.text, num_green)

    def finish(self, text: str) -> None:
        """Prints what of the whole text was not shown yet; on a terminal, ends the line."""
        self._write(text[self._num_written :], 0)
        if is_terminal() and not self._ends_line:
            sys.stdout.write("\n")
        sys.stdout.flush()

    def _write(self, text: str, num_green: int) -> None:
        green, own = text[:num_green], text[num_green:]
        sys.stdout.write((typer.style(green, fg="green") if green else "") + own)
        sys.stdout.flush()
        self._num_written += len(text)
        self._ends_line = text.endswith("\n") if text else self._ends_line


def summary(completion: Completion) -> str:
    """Returns the closing line of an answer."""
    parts = [f"{len(completion.token_ids)} tokens ({completion.finish_reason})"]
    if completion.acceptance_length is not None:
        parts.append(f"τ {completion.acceptance_length:.2f}")
    if completion.tokens_per_s is not None:
        parts.append(f"{completion.tokens_per_s:.1f} tok/s")
    parts.append(f"first token after {completion.prefill_s:.2f} s")
    return " · ".join(parts)


@contextmanager
def loading_bar() -> Iterator[Callable[[str, int, int | None], None]]:
    """Gives a callback for `LLM(progress=...)`: a bar on a terminal, else one line a stage."""
    console, told = words(), set[str]()
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("loading", total=None)

        def report(stage: str, done: int, total: int | None) -> None:
            description = _STAGES.get(stage, stage)
            bar.update(task, description=description, completed=done, total=total)
            if not console.is_terminal and stage not in told:
                note(f"{description} …")
            told.add(stage)

        yield report


Tell = Callable[[str, int, int | None, str, bool], None]
"""(stage, done, in all if known, in words, whether that deserves a line of its own)."""


@contextmanager
def stage_bars(stages: Mapping[str, str]) -> Iterator[Tell]:
    """Gives what shows how far each stage is: a bar for each on a terminal, else a line where one is deserved.

    Args:
        stages: their descriptions.
    """
    console, told = words(), set[tuple[str, int]]()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[words]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        tasks = {
            stage: bar.add_task(name, total=None, visible=False, words="") for stage, name in stages.items()
        }

        def tell(stage: str, done: int, total: int | None, said: str, is_milestone: bool) -> None:
            bar.update(tasks[stage], completed=done, total=total, visible=True, words=said)
            if not console.is_terminal and is_milestone and (stage, done) not in told:
                told.add((stage, done))
                note(f"{stage} {done}/{total or '?'} {said}".rstrip())

        yield tell


def fields(rows: dict[str, Any]) -> None:
    """Prints names and values in two columns on stdout."""
    width = max(map(len, rows), default=0)
    for name, value in rows.items():
        typer.echo(f"{name:<{width}}  {value}")
