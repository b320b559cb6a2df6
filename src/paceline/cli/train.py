"""`paceline train`: a recipe becomes a drafter; interrupted runs go on where they stopped."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli import options
from paceline.cli.decoding import Interrupt
from paceline.cli.output import INTERRUPTED, fields, note, say_error, stage_bars, write_json
from paceline.core.errors import ConfigError

if TYPE_CHECKING:
    from paceline.train.config import TrainConfig
    from paceline.train.estimate import Estimate
    from paceline.train.run import Observe, TrainEvent, TrainResult

app = typer.Typer()

STAGES = {"regenerate": "answers of the target (shards)", "train": "training steps"}


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
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Measure for a minute and say what the run would take; nothing is written."
        ),
    ] = False,
    offline: options.Offline = False,
    as_json: options.AsJson = False,
) -> None:
    """Train a drafter by a recipe.

    The target answers the prompts, and the drafter learns its answers. Several processes that torchrun starts train
    together.

    Ctrl-C finishes the step and saves; the same command goes on from there. A second Ctrl-C stops at once.
    """
    from paceline.train.config import TrainConfig

    config = TrainConfig.from_toml(recipe, changes or ())
    config = config if out is None else replace(config, out=str(out))
    config = config.with_data(data) if data else config
    if dry_run:
        _say_what_it_takes(config, offline, as_json)
        return
    note(f"training a drafter for {config.target} in {config.out}")
    with Interrupt() as interrupt:
        result, is_first = _run(config, interrupt, resume=resume, offline=offline)
    if result is not None and is_first:
        _report(result, config, as_json)
    if result is None or not result.finished:
        if is_first:
            say_error(f"interrupted; the same command goes on from what {config.out} holds")
        raise typer.Exit(INTERRUPTED)


def _run(
    config: TrainConfig, interrupt: Interrupt, *, resume: bool, offline: bool
) -> tuple[TrainResult | None, bool]:
    """Returns what the run came to (`None`: interrupted), and whether this is the process that writes."""
    from paceline.train.parallel import Ranks
    from paceline.train.run import train as run

    ranks = Ranks.join()
    with watching() if ranks.is_first else nullcontext(ignore) as observe:
        try:
            result = run(
                config,
                observe=observe,
                should_stop=lambda: interrupt.requested,
                resume=resume,
                offline=offline,
                ranks=ranks,
            )
        except KeyboardInterrupt:
            return None, ranks.is_first
    return result, ranks.is_first


def ignore(event: TrainEvent) -> None:
    """Shows nothing: one of several processes speaks."""


def _report(result: TrainResult, config: TrainConfig, as_json: bool) -> None:
    row, best = asdict(result.row), asdict(result.best)
    found = {
        "folder": str(result.folder),
        "finished": result.finished,
        "stopped_early": result.stopped_early,
        **row,
    }
    if as_json:
        write_json({**found, "best": best, "recipe": config.to_dict()})
        return
    if result.stopped_early:
        note(
            f"stopped early: no better τ in {config.train.patience} evaluations (train.patience) since step "
            f"{result.best.step}"
        )
    fields(
        {
            **found,
            "slot_accuracy": ", ".join(f"{value:.3f}" for value in result.row.slot_accuracy),
            "kept": f"step {result.best.step}, τ {result.best.acceptance_length:.3f}",
        }
    )


def _say_what_it_takes(config: TrainConfig, offline: bool, as_json: bool) -> None:
    """Prints an estimate; exit code 1 where something would not suffice."""
    note(f"measuring what a drafter for {config.target} takes …")
    from paceline.train.estimate import estimate
    from paceline.train.parallel import Ranks
    from paceline.train.run import Setup

    if (count := Ranks.join().world_size) > 1:
        raise ConfigError(f"--dry-run: expected one process, got {count}; hint: leave torchrun out")
    found = estimate(Setup.open(config, offline=offline))
    if as_json:
        write_json({**asdict(found), "shortages": found.shortages, "recipe": config.to_dict()})
    else:
        fields(in_words(found, config))
        note(basis(found))
    for shortage in found.shortages:
        say_error(shortage)
    if found.shortages:
        raise typer.Exit(1)


def in_words(found: Estimate, config: TrainConfig) -> dict[str, str]:
    """Returns the lines of an estimate."""
    memory, limit = found.memory_bytes, found.memory_limit_bytes
    known = memory is not None and limit is not None
    return {
        "prompts": f"{found.num_prompts:,} ({found.num_prompt_tokens:,} tokens)",
        "answers": f"about {found.num_answer_tokens:,} tokens, in about {_span(found.answers_s)}",
        "training": f"{config.train.max_steps:,} steps, in about {_span(found.training_s)}",
        "memory": f"about {_size(memory or 0)} of {_size(limit or 0)}" if known else "not known here",
        "disk": f"at most {_size(found.features_bytes)} of features, {_size(found.checkpoints_bytes)} of checkpoints; "
        f"{_size(found.free_disk_bytes)} free",
    }


def basis(found: Estimate) -> str:
    """Returns from which measurement an estimate follows."""
    answers, steps = found.answers, found.steps
    written = (
        f"{answers.num_tokens:,} tokens written together at {answers.write_tokens_per_s:,.0f} tokens/s, "
        f"{answers.num_ended} ended; "
        if answers.write_tokens_per_s
        else ""
    )
    return (
        f"an estimate, multiplied up from {answers.num_sequences} texts ({written}read at "
        f"{answers.read_tokens_per_s:,.0f} tokens/s) and {steps.num_steps} steps on made-up documents "
        f"({steps.step_s:.2f} s each, an evaluation {steps.evaluation_s:.2f} s); nothing was written"
    )


def _span(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e7 else f"{num_bytes / 1e6:.2f} MB"


@contextmanager
def watching() -> Iterator[Observe]:
    """Gives an observer: bars on a terminal, else a line for each finished shard and each evaluation."""
    num_tokens = 0
    with stage_bars(STAGES) as tell:

        def observe(event: TrainEvent) -> None:
            nonlocal num_tokens
            num_tokens += event.detail if isinstance(event.detail, int) else 0
            tell(event.stage, event.done, event.total, describe(event, num_tokens), is_milestone(event))

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
