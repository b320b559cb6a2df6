"""`paceline bench`: is speculation worth it, for this traffic, at this latency target?"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn

from paceline.cli import options
from paceline.cli import profile as terminal
from paceline.cli.decoding import open_pair
from paceline.cli.output import INTERRUPTED, command_line, note, say_error, words, write_json
from paceline.cli.report import Verify, judge, read_verified, require_libraries
from paceline.cli.verdict import show
from paceline.core.errors import ConfigError

if TYPE_CHECKING:
    from paceline.bench.runs.plan import ArmSpec, Plan
    from paceline.bench.runs.rows import Run
    from paceline.bench.workloads.workload import Workload

app = typer.Typer()

QUICK: dict[str, Any] = {
    "arms": ("plain", "dflash"),
    "kinds": "code,math,support,chat",
    "concurrency": "1,4",
    "max_new_tokens": 48,
    "items_per_kind": 1,
    "blocks": 5,
    "minutes": 4.5,
}
"""What --quick asks for where no option says otherwise: a first answer in five minutes on two cores."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """What is asked. Without any of these the built-in set: eight kinds of work."""

    prompts: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE", help="Prompts: JSON lines with turns, messages or prompt; repeat for more."
        ),
    ] = None
    log: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Your own traffic: a log of OpenAI-style requests, JSON lines."),
    ] = None
    kinds: Annotated[str | None, typer.Option(metavar="A,B", help="Only these kinds of work.")] = None
    kind_field: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="Where a line of the log names its kind: metadata.task."),
    ] = None
    kind_rule: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KIND=REGEX",
            help="Kind of a log's line by its last user message; the first that is found counts. Repeatable.",
        ),
    ] = None
    mask: Annotated[bool, typer.Option("--mask", help="Replace personal data of the log first.")] = False
    limit: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Only N prompts of each kind, or the first N requests of a log."
        ),
    ] = None


@dataclass(frozen=True, slots=True)
class Design:
    """How it is measured. A plan file can say all of this, and options change what it says."""

    concurrency: Annotated[
        str | None, typer.Option(metavar="N,N", help="Closed loop: so many requests at once.")
    ] = None
    rate: Annotated[
        str | None, typer.Option(metavar="X,X", help="Open loop: requests a second, at random (Poisson).")
    ] = None
    replay: Annotated[
        str | None, typer.Option(metavar="X,X", help="Open loop: the log's own arrivals, hastened X times.")
    ] = None
    temperature: Annotated[str | None, typer.Option(metavar="X,X", help="Temperatures of the answers.")] = (
        None
    )
    top_p: Annotated[float | None, typer.Option(metavar="X", help="Of sampled answers.")] = None
    max_new_tokens: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Most tokens of an answer.")
    ] = None
    items_per_kind: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Requests of each kind in a block.")
    ] = None
    blocks: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Most blocks; fewer if the answer is clear earlier."),
    ] = None
    minutes: Annotated[
        float | None,
        typer.Option(metavar="X", min=0.1, help="Begin no block that would end later than this."),
    ] = None
    all_blocks: Annotated[
        bool, typer.Option("--all-blocks", help="Do not stop when the answer is clear.")
    ] = False
    starts: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="How often servers are started afresh.")
    ] = None
    exclusive: Annotated[
        bool, typer.Option("--exclusive", help="Only one server at a time: they share an accelerator.")
    ] = False
    control: Annotated[
        bool | None,
        typer.Option("--control/--no-control", help="The baseline against itself, too.", show_default=False),
    ] = None
    may_differ: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="In what arms may differ beside speculation, such as engine,dtype."),
    ] = None
    seed: Annotated[int | None, typer.Option(metavar="N", help="Of items, arrivals and answers.")] = None


@dataclass(frozen=True, slots=True)
class Decide:
    """When speculation counts as worth it."""

    min_speedup: Annotated[
        float | None,
        typer.Option(metavar="X", help="Ratio that the whole traffic must exceed; 1.05 if not given."),
    ] = None
    worst_kind: Annotated[
        float | None, typer.Option(metavar="X", help="Ratio that no kind may fall below; 0.95 if not given.")
    ] = None
    confidence: Annotated[
        float | None, typer.Option(metavar="X", help="Of intervals and verdict; 0.95 if not given.")
    ] = None
    ttft_s: Annotated[float | None, typer.Option(metavar="S", help="Latency target: to the first token.")] = (
        None
    )
    tpot_s: Annotated[float | None, typer.Option(metavar="S", help="Latency target: a token after it.")] = (
        None
    )
    e2e_s: Annotated[float | None, typer.Option(metavar="S", help="Latency target: the whole answer.")] = None
    attainment: Annotated[
        float | None,
        typer.Option(metavar="X", help="Share of requests that must meet it; 0.95 if not given."),
    ] = None
    max_memory_gb: Annotated[float | None, typer.Option(metavar="X", help="Most memory of an arm.")] = None
    price_per_hour: Annotated[
        float | None, typer.Option(metavar="X", help="Of the machine; gives costs per million good tokens.")
    ] = None
    peak: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Most requests at once in reality; no higher load decides."),
    ] = None


@options.command(app)
def bench(
    pair: options.Pair,
    traffic: Traffic,
    design: Design,
    decide: Decide,
    plan: Annotated[Path | None, typer.Option(metavar="PLAN.toml", help="A plan; options change it.")] = None,
    arm: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KIND,KEY=VALUE",
            help="What is compared, the baseline first: plain, dflash, drafter, lookup, combined, transformers, "
            "transformers-lookup, transformers-dflash, zlab, url or server; repeatable. "
            "'dflash,block_size=4,name=short'.",
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A first answer in about five minutes.")] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Folder of the run; runs/bench-DATE if not given.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")] = False,
    verify: Verify = None,
    profile: Annotated[
        bool,
        typer.Option(
            "--profile",
            help="Show where a step's time goes, and how near passes are to the machine's copy rate.",
        ),
    ] = False,
    as_json: options.AsJson = False,
) -> None:
    """Measure whether speculation is worth it: on, off, on below a load, on for some kinds of work, or not yet clear.

    All arms answer the same requests in turns, in blocks A B … B A. The folder keeps every row and a report; Ctrl-C
    keeps what was measured, and --resume goes on.
    """
    require_libraries()
    from paceline.bench.pages.page import document, write_report

    if quick:
        design, traffic, arm = _quick(design, traffic, arm, plan)
    asked = _plan(plan, arm, design, decide)
    workload = _workload(traffic)
    folder = _folder(out, resume)
    run = _measure(pair, asked, workload, folder, resume=resume, profile=profile)
    verified = read_verified(run, verify or ())
    summary = judge(run, verified)
    paths = write_report(run, summary, folder, verified=verified)
    if as_json:
        write_json(document(run, summary, verified=verified))
    else:
        show(summary)
        if profile:
            terminal.show(summary.profile)
    note(f"report: {paths[0]}")
    if not run.is_complete:
        say_error(f"not everything was measured; see {folder}")
        raise typer.Exit(1)


def _quick(
    design: Design, traffic: Traffic, arms: list[str] | None, plan: Path | None
) -> tuple[Design, Traffic, list[str]]:
    """Returns the options with what --quick asks for in place of those that were not given."""
    if plan is not None:
        raise typer.BadParameter("is a plan of its own; hint: leave --plan out", param_hint="--quick")
    is_open = design.rate is not None or design.replay is not None
    ours = {name: QUICK[name] for name in ("max_new_tokens", "items_per_kind", "blocks", "minutes")}
    ours["concurrency"] = None if is_open else QUICK["concurrency"]
    missing = {name: value for name, value in ours.items() if getattr(design, name) is None}
    if design.control is None:
        missing["control"] = False
    if traffic == Traffic():
        traffic = replace(traffic, kinds=QUICK["kinds"])
    return replace(design, **missing), traffic, arms or list(QUICK["arms"])


def _plan(path: Path | None, arms: list[str] | None, design: Design, decide: Decide) -> Plan:
    """Returns the plan of a file or the usual one, with everything that the options say."""
    from paceline.bench.arms.base import Load
    from paceline.bench.runs.plan import ArmSpec, LatencyTarget, Plan, Rules

    specs = tuple(ArmSpec.parse(text) for text in arms or ())
    if path is not None:
        base = Plan.from_toml(path)
    else:
        usual = tuple(ArmSpec.parse(kind) for kind in QUICK["arms"])
        base = Plan(specs or usual, loads=tuple(Load(n) for n in (1, 2, 4, 8)))
    loads = (
        *(
            Load(concurrency=_whole("--concurrency", n))
            for n in _numbers("--concurrency", design.concurrency)
        ),
        *(Load(rate_per_s=x) for x in _numbers("--rate", design.rate)),
        *(Load(speed=x) for x in _numbers("--replay", design.replay)),
    )
    latency = _changed(
        base.rules.latency,
        LatencyTarget,
        {name: getattr(decide, name) for name in ("ttft_s", "tpot_s", "e2e_s", "attainment")},
    )
    memory = None if decide.max_memory_gb is None else int(decide.max_memory_gb * 1e9)
    rules = _changed(
        base.rules,
        Rules,
        {
            "min_speedup": decide.min_speedup,
            "worst_kind": decide.worst_kind,
            "confidence": decide.confidence,
            "latency": latency,
            "max_memory_bytes": memory,
            "price_per_hour": decide.price_per_hour,
            "max_concurrency": decide.peak,
        },
    )
    num_blocks = design.blocks or base.num_blocks
    asked = {
        "arms": specs or None,
        "loads": loads or None,
        "temperatures": _numbers("--temperature", design.temperature) or None,
        "top_p": design.top_p,
        "max_new_tokens": design.max_new_tokens,
        "items_per_kind": design.items_per_kind,
        "num_blocks": num_blocks,
        "min_blocks": min(base.min_blocks, num_blocks),
        "max_s": None if design.minutes is None else 60.0 * design.minutes,
        "stops_early": False if design.all_blocks else None,
        "has_control": design.control,
        "num_starts": design.starts,
        "is_exclusive": True if design.exclusive else None,
        "may_differ": tuple(_words(design.may_differ)) or None,
        "seed": design.seed,
        "rules": rules,
    }
    return _with_keys(_changed(base, Plan, asked))


def _changed(base: Any, kind: type[Any], values: dict[str, Any]) -> Any:
    """Returns `base` with the values that are given."""
    changed = replace(base, **{name: value for name, value in values.items() if value is not None})
    assert isinstance(changed, kind)
    return changed


def _with_keys(plan: Plan) -> Plan:
    """Returns the plan with the API keys that its arms name by environment variable."""
    return replace(plan, arms=tuple(_with_key(spec) for spec in plan.arms))


def _with_key(spec: ArmSpec) -> ArmSpec:
    rest = dict(spec.options)
    if "api_key" in rest:  # it would stand in the stored command, and in the shell's history
        raise ConfigError(f"arm {spec.name!r}: api_key: keys are not written here; hint: api_key_env=NAME")
    name = rest.pop("api_key_env", None)
    if name is None:
        return spec
    key = os.environ.get(str(name))
    if not key:
        raise ConfigError(
            f"arm {spec.name!r}: the environment variable {name} is not set; hint: export {name}=…"
        )
    return replace(spec, options={**rest, "api_key": key})


def _workload(traffic: Traffic) -> Workload:
    """Returns the built-in set, the prompts of files, or a log's requests."""
    from paceline.bench.workloads.traffic import load_log
    from paceline.bench.workloads.workload import builtin, from_prompt_files

    of_logs = {"--kind-field": traffic.kind_field, "--kind-rule": traffic.kind_rule, "--mask": traffic.mask}
    if traffic.log is None and any(of_logs.values()):
        raise typer.BadParameter("needs --log", param_hint=next(flag for flag in of_logs if of_logs[flag]))
    if traffic.log is not None and traffic.prompts:
        raise typer.BadParameter("one of --log and --prompts", param_hint="--prompts")
    if traffic.log is not None:
        workload = load_log(
            traffic.log,
            kind_field=traffic.kind_field,
            rules=[_rule(text) for text in traffic.kind_rule or ()],
            mask=traffic.mask,
            limit=traffic.limit,
        )
    elif traffic.prompts:
        workload = from_prompt_files(traffic.prompts, limit_per_kind=traffic.limit)
    elif traffic.limit is not None:
        raise typer.BadParameter("needs --prompts or --log", param_hint="--limit")
    else:
        workload = builtin()
    for sentence in workload.notes:
        note(sentence)
    return workload if traffic.kinds is None else workload.only(_words(traffic.kinds))


def _rule(text: str) -> tuple[str, str]:
    kind, equals, pattern = text.partition("=")
    if not equals or not kind:
        raise typer.BadParameter(f"expected KIND=REGEX, got {text!r}", param_hint="--kind-rule")
    return kind, pattern


def _folder(out: Path | None, resume: bool) -> Path:
    if out is None and resume:
        raise typer.BadParameter("needs --out, the folder of the run", param_hint="--resume")
    return out or Path("runs") / f"bench-{datetime.now():%Y%m%d-%H%M%S}"


def _measure(
    pair: options.Pair, plan: Plan, workload: Workload, folder: Path, *, resume: bool, profile: bool
) -> Run:
    """Returns the run of the folder, after Ctrl-C with how to go on."""
    from paceline.bench.arms.assembly import assemble
    from paceline.bench.runs.runner import run
    from paceline.bench.verdicts.decision import is_clear

    arms = assemble(plan, lambda: open_pair(pair), measures_copies=profile)
    note(f"measuring into {folder}")
    try:
        with _watching() as progress:
            return run(
                plan,
                workload,
                arms,
                folder,
                command=command_line(),
                resume=resume,
                progress=progress,
                decide=is_clear,
            )
    except KeyboardInterrupt:
        say_error(
            f"interrupted; the same command with --out {folder} --resume goes on, and paceline report reads it"
        )
        raise typer.Exit(INTERRUPTED) from None


def _numbers(flag: str, text: str | None) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in _words(text))
    except ValueError as error:
        raise typer.BadParameter(f"expected numbers such as 1,4, got {text!r}", param_hint=flag) from error


def _whole(flag: str, number: float) -> int:
    if number != int(number):
        raise typer.BadParameter(f"expected whole numbers, got {number:g}", param_hint=flag)
    return int(number)


def _words(text: str | None) -> list[str]:
    return [word for part in (text or "").split(",") if (word := part.strip())]


@contextmanager
def _watching() -> Iterator[Callable[[str, int, int, float | None], None]]:
    """Gives a callback for `runner.run`: a bar with the time left on a terminal, else a line for each stage."""
    console, told = words(), set[str]()
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[left]}"),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None, left="")

        def report(stage: str, done: int, total: int, left_s: float | None) -> None:
            left = "" if left_s is None else f"about {max(1, round(left_s / 60))} min left at most"
            bar.update(task, description=stage, completed=done, total=total or None, left=left)
            where = stage.partition(":")[0]
            if not console.is_terminal and where not in told:
                note(f"{where} … {left}".rstrip())
            told.add(where)

        yield report
