"""The program `paceline`: its commands, and what its exit codes say.

0 done, 1 an error of ours or of the system (one line on stderr), 2 wrong usage, 130 ended by Ctrl-C.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from io import TextIOWrapper
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from paceline.cli import adapt, bench, chat, demo, doctor, generate, inspect, report, train, verify
from paceline.cli.output import INTERRUPTED, arguments_given, in_words, say_error
from paceline.core.errors import PacelineError


class Commands(TyperGroup):
    """The group of all commands; turns what they raise into one line and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        """Runs the command and delivers its output.

        Raises:
            typer.Exit: with code 1 or 130, after the reason was said.
        """
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()  # a full disk is an error here, not a warning of the interpreter at its end
        except KeyboardInterrupt:
            say_error("interrupted")
            raise typer.Exit(INTERRUPTED) from None
        except PacelineError as error:
            say_error(str(error))
            raise typer.Exit(1) from error
        except OSError as error:
            if not isinstance(error, BrokenPipeError):  # else the reader has what it wanted
                say_error(in_words(error))
            _drop_undeliverable_output()
            raise typer.Exit(1) from error
        return result


def _drop_undeliverable_output() -> None:
    """Replaces stdout where it takes nothing any more, so that the interpreter's last flush cannot fail again."""
    try:
        sys.stdout.flush()
    except OSError:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115


app = typer.Typer(
    name="paceline",
    cls=Commands,
    help="Speculative decoding with block-diffusion drafters: several tokens a step, not one of them changed.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
for command in (demo, generate, chat, verify, bench, report, train, adapt, inspect, doctor):
    app.add_typer(command.app)


def _print_version(wanted: bool) -> None:
    if wanted:
        from paceline import __version__

        typer.echo(f"paceline {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Speculative decoding with block-diffusion drafters: several tokens a step, not one of them changed."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code.

    Args:
        arguments: the words after the program's name; `None` takes those of the process.
    """
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(
            errors="backslashreplace"
        )  # a terminal without a character still shows the text
    given = list(sys.argv[1:] if arguments is None else arguments)
    arguments_given.set(tuple(given))
    try:
        app(given, prog_name="paceline")
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 0
    return 0
