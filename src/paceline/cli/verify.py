"""`paceline verify`: is the speculative text the target's own, on this pair, these prompts, this machine?"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from rich.text import Text

from paceline.cli import options
from paceline.cli.decoding import describe, open_pair
from paceline.cli.output import command_line, note, say_error, words, write_json
from paceline.cli.sampling import named_as_options
from paceline.core.errors import ConfigError
from paceline.core.params import SamplingParams

if TYPE_CHECKING:
    from paceline.bench.exactness.checks import Check, Report
    from paceline.bench.exactness.losslessness import Settings
    from paceline.bench.workloads.prompts import Prompt
    from paceline.llm import LLM

app = typer.Typer()

_COLOURS = {"ok": "green", "flagged": "bold red", "not run": "dim"}
_OWN = ("max_new_tokens", "temperature", "seed")


@dataclass(frozen=True, slots=True)
class Servers:
    """Examine two OpenAI-style servers instead; the target is then the local copy that reads their texts."""

    plain_url: Annotated[
        str | None, typer.Option(metavar="URL", help="A server of the target without speculation.")
    ] = None
    speculative_url: Annotated[str | None, typer.Option(metavar="URL", help="The server in question.")] = None
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="The model as both call it; their first if not given.")
    ] = None
    api_key_env: Annotated[
        str | None, typer.Option(metavar="NAME", help="Environment variable that holds the key for both.")
    ] = None
    timeout_s: Annotated[float, typer.Option(metavar="S", min=0.1, help="Longest wait for one answer.")] = (
        300.0
    )


@options.command(app)
def verify(
    pair: options.Pair,
    servers: Servers,
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Your prompts: JSON lines with turns, messages, prompt or prompt_ids."
        ),
    ] = None,
    num_prompts: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Only the first N prompts.")
    ] = None,
    max_new_tokens: options.MaxNewTokens = 64,
    temperature: Annotated[
        float, typer.Option(metavar="X", help="Of the sampled part; 0 leaves it out.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(metavar="N", help="Of the sampled part.")] = 0,
    params: Annotated[
        str | None,
        typer.Option(
            metavar="JSON", help="Other sampling parameters of all texts: '{\"repetition_penalty\": 1.1}'."
        ),
    ] = None,
    block_sizes: Annotated[
        str | None,
        typer.Option(metavar="N,N", help="Chains that must give the same texts; some if not given."),
    ] = None,
    batch_sizes: Annotated[
        str, typer.Option(metavar="N,N", help="Batch sizes that must; the first is that of all else.")
    ] = "8,1",
    rounding_steps: Annotated[
        float | None,
        typer.Option(metavar="X", help="What counts as a near-tie, in steps of the dtype at that logit."),
    ] = None,
    alpha: Annotated[
        float, typer.Option(metavar="X", help="Chance of a false alarm of all tests together.")
    ] = 0.01,
    as_json: options.AsJson = False,
) -> None:
    """Check that speculative text is the target's own.

    At temperature 0 every token must be the target's choice, near-ties allowed. Above it so must every draw, and three
    tests compare the texts with the target's distribution. Exit code 1 says that a check was flagged.
    """
    chosen = _params(params, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed)
    sizes = _sizes("--batch-sizes", batch_sizes)
    blocks = None if block_sizes is None else _sizes("--block-sizes", block_sizes)
    is_remote = _is_remote(servers)
    if is_remote and block_sizes is not None:
        raise typer.BadParameter("a server chooses its own", param_hint="--block-sizes")
    if not is_remote and pair.drafter == "none":
        raise typer.BadParameter("there is nothing to verify without a drafter", param_hint="--drafter")
    _require_scipy()
    from paceline.bench.exactness.losslessness import Settings

    with named_as_options():
        settings = Settings(
            chosen,
            alpha=alpha,
            batch_size=sizes[0],
            batch_sizes=() if is_remote else sizes[1:],
            block_sizes=blocks or (),
            rounding_steps=rounding_steps,
        )
    source = prompts or Path(str(resources.files("paceline"))) / "data" / "demo_prompts.jsonl"
    report = examine(pair, servers, settings, (source, num_prompts), choose_blocks=blocks is None)
    if as_json:
        write_json(report.to_dict())
    else:
        _print_report(report)
    if report.flagged:
        say_error(f"flagged: {', '.join(report.flagged)}")
        raise typer.Exit(1)


def examine(
    pair: options.Pair,
    servers: Servers,
    settings: Settings,
    prompts: tuple[Path, int | None],
    *,
    choose_blocks: bool,
) -> Report:
    """Returns the report of a pair, or of two servers where their addresses are given.

    Args:
        prompts: a file, and how many of it.
        choose_blocks: take chains of 2 and of the drafter's own length into the invariance check.
    """
    from dataclasses import asdict, replace

    from paceline.bench.exactness.checks import Report
    from paceline.bench.workloads.prompts import load_prompts
    from paceline.engine.runtime import machine

    with_drafter = pair if not _is_remote(servers) else replace(pair, drafter="none")
    llm = open_pair(with_drafter)
    loaded = load_prompts(prompts[0], llm.codec.render_chat, prompts[1])
    described = describe(llm, with_drafter.drafter)
    if _is_remote(servers):
        checks, addresses = _examine_servers(llm, servers, loaded, settings)
        described = {**described, **addresses}
    else:
        if choose_blocks:
            settings = replace(settings, block_sizes=_usual_block_sizes(llm))
        checks = _examine_pair(llm, loaded, settings)
    used = {**asdict(settings), "prompts": prompts[0].name, "num_prompts": len(loaded)}
    return Report(checks, machine(), described, used, command_line())


def _examine_pair(llm: LLM, prompts: list[Prompt], settings: Settings) -> tuple[Check, ...]:
    from paceline.bench.exactness.losslessness import verify_pair

    if llm.drafter is None:
        raise ConfigError(
            f"drafter: none ships for target {llm.target.spec.name!r}; hint: name one with --drafter FOLDER"
        )
    with _watching() as progress:
        return verify_pair(llm, prompts, settings, progress)


def _examine_servers(
    llm: LLM, servers: Servers, prompts: list[Prompt], settings: Settings
) -> tuple[tuple[Check, ...], dict[str, object]]:
    from paceline.bench.exactness.client import Server
    from paceline.bench.exactness.remote import verify_servers

    plain, speculative = (
        Server(
            str(url),
            llm.codec,
            model=servers.model,
            api_key=_api_key(servers.api_key_env),
            timeout_s=servers.timeout_s,
        )
        for url in (servers.plain_url, servers.speculative_url)
    )
    with _watching() as progress:
        checks = verify_servers(llm.target, plain, speculative, prompts, settings, progress)
    named = {"plain": plain, "speculative": speculative}
    return checks, {
        f"{name}_server": {"url": server.url, "model": server.model, "prompts_sent_as": server.dialect}
        for name, server in named.items()
    }


def _usual_block_sizes(llm: LLM) -> tuple[int, ...]:
    largest = llm.new_engine(tree_nodes=None).block_size
    return tuple(sorted({min(2, largest), largest}))


def _is_remote(servers: Servers) -> bool:
    """Whether servers are examined; both addresses or none."""
    urls = {"--plain-url": servers.plain_url, "--speculative-url": servers.speculative_url}
    missing = [flag for flag, url in urls.items() if url is None]
    if len(missing) == 1:
        raise typer.BadParameter(
            "needs the other server too: the plain one is the control", param_hint=missing[0]
        )
    alone = {"--model": servers.model, "--api-key-env": servers.api_key_env}
    lonely = [flag for flag, value in alone.items() if value is not None]
    if missing and lonely:
        raise typer.BadParameter("needs --plain-url and --speculative-url", param_hint=lonely[0])
    return not missing


def _api_key(name: str | None) -> str | None:
    if name is None:
        return None
    key = os.environ.get(name)
    if not key:
        raise ConfigError(f"--api-key-env: the environment variable {name} is not set; hint: export {name}=…")
    return key


def _params(text: str | None, **own: Any) -> SamplingParams:
    try:
        others = json.loads(text) if text is not None else {}
    except ValueError as error:
        raise typer.BadParameter(f"not JSON ({error})", param_hint="--params") from error
    if not isinstance(others, dict) or others.keys() & set(_OWN):
        raise typer.BadParameter(
            f"expected a JSON object without {', '.join(_OWN)}, which have options of their own",
            param_hint="--params",
        )
    with named_as_options():
        given = SamplingParams(**own)
    try:
        return SamplingParams.from_dict({**others, **{name: getattr(given, name) for name in _OWN}})
    except (ConfigError, TypeError) as error:
        raise typer.BadParameter(str(error), param_hint="--params") from error


def _sizes(flag: str, text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise typer.BadParameter(f"expected numbers such as 2,8, got {text!r}", param_hint=flag)
    return tuple(dict.fromkeys(int(part) for part in parts))


def _require_scipy() -> None:
    if importlib.util.find_spec("scipy") is None:
        raise ConfigError("verify needs scipy; hint: pip install 'paceline[bench]'")


@contextmanager
def _watching() -> Iterator[Callable[[str, int, int], None]]:
    """Gives a callback that shows the stage and how far it is: a bar on a terminal, else one line a stage."""
    console, told = words(), set[str]()
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)

        def report(stage: str, done: int, total: int) -> None:
            bar.update(task, description=stage, completed=done, total=total)
            if not console.is_terminal and stage not in told:
                note(f"{stage} …")
            told.add(stage)

        yield report


def _print_report(report: Report) -> None:
    pair = report.pair
    caption = f"{pair['target']}, {pair['dtype']} on {pair['device']}; p corrected for the number of tests"
    table = Table(caption=caption)
    table.add_column("check")
    table.add_column("status")
    table.add_column("p", justify="right")
    table.add_column("rate below, 95 %", justify="right")
    table.add_column("what was seen")
    for check in report.checks:
        table.add_row(
            check.name,
            Text(check.status, style=_COLOURS[check.status]),
            "" if check.p_adjusted is None else f"{check.p_adjusted:.2g}",
            "" if check.bound is None else f"{check.bound:.2g}",
            Text(check.summary),
        )
    Console(highlight=False).print(table)
