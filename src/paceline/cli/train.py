"""`paceline train`: a recipe becomes a drafter; interrupted runs go on where they stopped."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from paceline.cli import options
from paceline.cli.decoding import Interrupt
from paceline.cli.output import INTERRUPTED, fields, note, say_error, words, write_json

if TYPE_CHECKING:
    from paceline.train.run import Observe, TrainEvent, TrainResult

app = typer.Typer()


@app.command()
def train(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE.toml", help="The recipe.")],
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where features, checkpoints and curves go.")
    ] = None,
    data: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE.jsonl", help="Prompt file in place of the recipe's; repeat for more."),
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Change a value, such as train.max_steps=200; repeatable."
        ),
    ] = None,
    resume: Annotated[bool, typer.Option(help="Go on with a run found in the folder, or refuse it.")] = True,
    offline: options.Offline = False,
    as_json: options.AsJson = False,
) -> None:
    """Train a drafter by a recipe.

    The target answers the prompts, and the drafter learns its answers.

    Ctrl-C finishes the step and saves; the same command goes on from there. A second Ctrl-C stops at once.
    """
    from paceline.train.config import TrainConfig

    config = TrainConfig.from_toml(recipe, changes or ())
    config = config if out is None else replace(config, out=str(out))
    config = config.with_data(data) if data else config
    note(f"training a drafter for {config.target} in {config.out}")
    with Interrupt() as interrupt, watching() as observe:
        from paceline.train.run import train as run

        try:
            result = run(
                config,
                observe=observe,
                should_stop=lambda: interrupt.requested,
                resume=resume,
                offline=offline,
            )
        except KeyboardInterrupt:
            result = None
    if result is not None:
        _report(result, config.to_dict(), as_json)
    if result is None or not result.finished:
        say_error(f"interrupted; the same command goes on from what {config.out} holds")
        raise typer.Exit(INTERRUPTED)


def _report(result: TrainResult, recipe: dict[str, Any], as_json: bool) -> None:
    row = asdict(result.row)
    found = {"folder": str(result.folder), "finished": result.finished, **row}
    if as_json:
        write_json({**found, "recipe": recipe})
    else:
        fields({**found, "slot_accuracy": ", ".join(f"{value:.3f}" for value in result.row.slot_accuracy)})


@contextmanager
def watching() -> Iterator[Observe]:
    """Gives an observer: bars on a terminal, else a line for each finished shard and each evaluation."""
    console = words()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[words]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        tasks = {
            "regenerate": bar.add_task("answers of the target (shards)", total=None, visible=False, words=""),
            "train": bar.add_task("training steps", total=None, visible=False, words=""),
        }
        num_tokens = 0

        def observe(event: TrainEvent) -> None:
            nonlocal num_tokens
            num_tokens += event.detail if isinstance(event.detail, int) else 0
            said = describe(event, num_tokens)
            task = tasks[event.stage]
            bar.update(task, completed=event.done, total=event.total, visible=True, words=said)
            if not console.is_terminal and is_milestone(event):
                note(f"{event.stage} {event.done}/{event.total} {said}")

        yield observe


def is_milestone(event: TrainEvent) -> bool:
    """Whether the event deserves a line of its own: a finished shard, an evaluation."""
    return event.detail is None or (not isinstance(event.detail, int) and event.detail.row is not None)


def describe(event: TrainEvent, num_tokens: int) -> str:
    """Returns the event's numbers in words; τ where the step was evaluated.

    Args:
        num_tokens: tokens the target has said so far.
    """
    step = event.detail
    if step is None or isinstance(step, int):
        return f"{num_tokens:,} tokens" if num_tokens else "found"
    said = f"loss {step.loss:.3f} · {step.blocks_per_s:.1f} blocks/s"
    return said if step.row is None else f"{said} · τ {step.row.acceptance_length:.3f}"
