"""`paceline adapt`: the drafter in use, fine-tuned on your own traffic, and kept only where that helps."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli import options
from paceline.cli.decoding import Interrupt
from paceline.cli.output import INTERRUPTED, fields, note, say_error, stage_bars, write_json
from paceline.target.pull import DEFAULT_TARGET

if TYPE_CHECKING:
    from paceline.bench.workloads.workload import Workload
    from paceline.train.adaptation.adapt import Observe
    from paceline.train.adaptation.records import Adaptation, AdaptConfig, AdaptEvent

app = typer.Typer()

ROW_KEYS = ("turns", "conversations", "prompt_ids")
"""Keys that only rows of prompt files have; any other line is read as a log's."""

STAGES = {
    "judging": "answers to judge by (shards)",
    "answers": "answers of the target (shards)",
    "steps": "training steps",
    "foretelling": "τ foretold (prompts)",
    "measuring": "measuring (prompts)",
}


@dataclass(frozen=True, slots=True)
class Learning:
    """What is learnt, and how."""

    max_prompts: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Most prompts to learn from; what the time allows.")
    ] = None
    held_out: Annotated[
        float, typer.Option(metavar="SHARE", help="Share of the traffic that is kept to judge by.")
    ] = 0.2
    general: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.jsonl",
            help="Prompts of general use: one half is rehearsed, the other judges. The package's own if not given.",
        ),
    ] = None
    rehearsal: Annotated[
        float, typer.Option(metavar="SHARE", help="Share of general prompts among those learnt from.")
    ] = 0.25
    temperatures: Annotated[
        str,
        typer.Option(
            metavar="X,X", help="Temperatures of your traffic: of answers, in turn, and of measurements."
        ),
    ] = "0"
    max_new_tokens: Annotated[int, typer.Option(metavar="N", min=2, help="Most tokens of an answer.")] = 160
    max_prompt_tokens: Annotated[
        int, typer.Option(metavar="N", min=1, help="Longer prompts are left out.")
    ] = 2048
    lr: Annotated[float, typer.Option(metavar="X", help="Peak learning rate.")] = 6e-4
    seed: Annotated[int, typer.Option(metavar="N", help="Key of the split and of all draws.")] = 0


@options.command(app)
def adapt(
    learning: Learning,
    data: Annotated[
        list[Path],
        typer.Option(metavar="FILE.jsonl", help="Prompts, conversations or a server's log; repeat for more."),
    ],
    out: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Where everything goes; the drafter in FOLDER/drafter.")
    ],
    target: options.Target = DEFAULT_TARGET,
    drafter: Annotated[
        str,
        typer.Option(
            metavar="WHICH", help="Drafter to begin with: a folder, or 'auto' for the one that ships."
        ),
    ] = "auto",
    minutes: Annotated[
        float, typer.Option(metavar="M", help="All of it ends within so many minutes.")
    ] = 60.0,
    resume: Annotated[bool, typer.Option(help="Go on with a run found in the folder, or refuse it.")] = True,
    offline: options.Offline = False,
    as_json: options.AsJson = False,
) -> None:
    """Adapt a drafter to your traffic.

    The target answers part of your prompts, the drafter learns its answers, and both drafters decode the rest. The new
    one is kept only where it is better there and about as good on general prompts; the text is the target's with
    either. Ctrl-C keeps what is done, and the same command goes on.
    """
    from paceline.train.adaptation.records import AdaptConfig

    config = AdaptConfig(
        out=str(out),
        target=target,
        drafter=drafter,
        minutes=minutes,
        max_prompts=learning.max_prompts,
        held_out=learning.held_out,
        rehearsal=learning.rehearsal,
        temperatures=_temperatures(learning.temperatures),
        max_new_tokens=learning.max_new_tokens,
        max_prompt_tokens=learning.max_prompt_tokens,
        lr=learning.lr,
        seed=learning.seed,
    )
    rows = [row for path in data for row in read_traffic(path)]
    result = _run(config, rows, read_general(learning.general), resume=resume, offline=offline)
    if as_json:
        write_json(result.report)
    else:
        _show(result)


def _run(
    config: AdaptConfig,
    rows: list[dict[str, Any]],
    general: list[dict[str, Any]],
    *,
    resume: bool,
    offline: bool,
) -> Adaptation:
    note(f"adapting a drafter for {config.target} in {config.out}, {config.minutes:g} minutes at most")
    with Interrupt() as interrupt, _watching() as observe:
        from paceline.train.adaptation.adapt import adapt as run

        try:
            return run(
                config,
                rows,
                general,
                observe=observe,
                should_stop=lambda: interrupt.requested,
                resume=resume,
                offline=offline,
            )
        except KeyboardInterrupt:
            say_error(f"interrupted; the same command goes on from what {config.out} holds")
            raise typer.Exit(INTERRUPTED) from None


def read_traffic(path: Path) -> list[dict[str, Any]]:
    """Returns the rows of a prompt file, or of a log, whose unusable lines are named on stderr.

    Raises:
        ConfigError: nothing in it that can be asked.
        OSError: a file that cannot be read.
    """
    from paceline.bench.workloads.traffic import load_log
    from paceline.bench.workloads.workload import read_lines, stem_of
    from paceline.core.prompts import parse_rows

    first = _keys_of(next((line for line in read_lines(path) if line.strip()), ""))
    if first & set(ROW_KEYS):
        return list(parse_rows("".join(read_lines(path)), stem_of(path), str(path)))
    return _rows_of(load_log(path, kind_field="category" if "category" in first else None))


def read_general(path: Path | None) -> list[dict[str, Any]]:
    """Returns the rows of a file, or of the set that ships with the package."""
    from paceline.bench.workloads.workload import builtin

    return _rows_of(builtin()) if path is None else read_traffic(path)


def _rows_of(workload: Workload) -> list[dict[str, Any]]:
    for sentence in workload.notes:
        note(f"{workload.name}: {sentence}")
    return [{"id": item.id, "category": item.kind, "messages": item.messages} for item in workload.items]


def _keys_of(line: str) -> set[str]:
    try:
        row = json.loads(line)
    except ValueError:
        return set()
    return set(row) if isinstance(row, dict) else set()


def _temperatures(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(word) for word in text.split(","))
    except ValueError as error:
        raise typer.BadParameter(
            f"expected numbers such as 0,0.8, got {text!r}", param_hint="--temperatures"
        ) from error


def _show(result: Adaptation) -> None:
    said: dict[str, Any] = {}
    for name, row in result.report["foretold"].items():
        said[f"τ foretold, {name.replace('_', '-')}"] = (
            _change(row, "acceptance_length", 3) + f"   of {row['num_prompts']} prompts"
        )
    for row in result.report["measured"]:
        name = f"{row['set'].replace('_', '-')}, T={row['temperature']:g}, {row['drafts']}"
        said[name] = (
            f"τ {_change(row, 'acceptance_length', 3)}   tok/s {_change(row, 'tokens_per_s', 1)}   "
            f"same text {row['num_identical']} of {row['num_prompts']}"
        )
    fields(said)
    typer.echo("kept the new drafter" if result.adopted else "kept the old drafter", nl=False)
    typer.echo(f": {result.report['reason']}")
    if result.folder is not None:
        typer.echo(f"use it with --drafter {result.folder}")


def _change(row: dict[str, Any], key: str, digits: int) -> str:
    ratio = row[f"{key}_ratio"]
    return (
        f"{row['before'][key]:.{digits}f} → {row['after'][key]:.{digits}f} "
        f"(× {ratio['value']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}])"
    )


@contextmanager
def _watching() -> Iterator[Observe]:
    """Gives an observer that shows each finished shard, evaluation and judged prompt."""
    with stage_bars(STAGES) as tell:

        def observe(event: AdaptEvent) -> None:
            is_milestone = event.progress.row is not None if event.progress else event.done > 0
            tell(event.stage, event.done, event.total or None, _describe(event), is_milestone)

        yield observe


def _describe(event: AdaptEvent) -> str:
    step = event.progress
    if step is None:
        return ""
    said = f"loss {step.loss:.3f} · {step.blocks_per_s:.1f} blocks/s"
    return said if step.row is None else f"{said} · τ {step.row.acceptance_length:.3f}"
