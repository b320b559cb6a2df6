"""`paceline inspect --diagnose`: the measurement under a bar, and its report in words."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from paceline.cli import options
from paceline.cli.decoding import describe, open_pair
from paceline.cli.output import note, words, write_json
from paceline.core.errors import ConfigError
from paceline.target.pull import DEFAULT_TARGET

if TYPE_CHECKING:
    from paceline.train.diagnosis.diagnose import Acceptance, Diagnosis, Part, Slot
    from paceline.train.diagnosis.replay import Parity
    from paceline.train.diagnosis.scores import Estimate
    from paceline.train.diagnosis.trial import Experiment

_STAGES = {
    "answers": "answers of the target",
    "blocks": "blocks of the drafter",
    "replay": "serving and training side by side",
    "experiments": "known faults",
}


def run(
    name: str,
    pair: str | None,
    data: Path | None,
    amounts: dict[str, int],
    *,
    offline: bool,
    as_json: bool,
) -> None:
    """Diagnoses a pair and prints the report.

    Args:
        name: a drafter folder, or "auto".
        data: prompts; `None` takes those that ship.
        amounts: fields of `DiagnoseSettings` that were given.

    Raises:
        ConfigError: no target named, or a name that is no drafter with weights.
    """
    if pair is None and name != "auto":
        raise ConfigError(
            "--diagnose: expected --pair TARGET, whose answers the drafter shall draft; got none"
        )
    llm = open_pair(options.Pair(pair or DEFAULT_TARGET, name, tree_nodes=0, offline=offline))
    if llm.neural is None or llm.checkpoint is None:
        raise ConfigError(f"--diagnose: expected a drafter with weights, got {name!r}; hint: name its folder")
    from paceline.drafter.eagle3 import Eagle3
    from paceline.train.diagnosis.diagnose import diagnose, rope_theta_of
    from paceline.train.diagnosis.questions import DiagnoseSettings, read_questions

    own = llm.neural.token_ids if isinstance(llm.neural, Eagle3) else llm.checkpoint.token_ids
    with _watching() as tell:
        found = diagnose(
            llm.target,
            llm.neural,
            llm.codec,
            read_questions(data, llm.codec),
            token_ids=own,
            rope_theta=rope_theta_of(llm.folder),
            settings=DiagnoseSettings(**amounts),
            tell=tell,
        )
    if as_json:
        write_json({"kind": "diagnosis", "pair": describe(llm, name), **found.to_dict()})
    else:
        typer.echo("\n".join(report(found)))


@contextmanager
def _watching() -> Iterator[Callable[[str, int, int], None]]:
    """Gives a callback: a bar for each stage on a terminal, else a line for each."""
    console, told = words(), set[str]()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        tasks = {stage: bar.add_task(said, total=None, visible=False) for stage, said in _STAGES.items()}

        def tell(stage: str, done: int, total: int) -> None:
            bar.update(tasks[stage], completed=done, total=total, visible=True)
            if not console.is_terminal and stage not in told:
                note(f"{_STAGES[stage]} …")
            told.add(stage)

        yield tell


# The report ----------------------------------------------------------------------------------------------------------


def report(found: Diagnosis) -> list[str]:
    """Returns the lines of a diagnosis. Pure."""
    head = (
        f"{found.drafter} in blocks of {found.block_size} for {found.target}: {found.num_answers} answers, "
        f"{found.num_answer_tokens:,} tokens"
    )
    left_out = [f"left out: {count} × {reason}" for reason, count in found.left_out.items()]
    return [
        head,
        *left_out,
        *_titled(
            "acceptance length of greedy chains, with 95 % intervals over answers",
            _acceptance(found.acceptance),
        ),
        *_titled(_slots_title(found), _slots(found.slots)),
        *_titled("acceptance length by kind of prompt", _parts(found.kinds)),
        *_titled("acceptance length by token of the answer", _parts(found.positions)),
        *_titled("training and serving", _parity(found.parity)),
        *_titled("causes", _causes(found.experiments)),
    ]


def _titled(title: str, lines: Sequence[str]) -> list[str]:
    return ["", title, *(f"  {line}" for line in lines)]


def _acceptance(found: Acceptance) -> list[str]:
    rows = {"as decoding goes": found.decoding, "from every token": found.every_anchor}
    if found.unary is not None:
        rows["without the selector"] = found.unary
    rows |= {f"if the right one of the {width} likeliest were taken": e for width, e in found.oracle.items()}
    return _columns([[name, *_interval(e)] for name, e in rows.items()])


def _slots_title(found: Diagnosis) -> str:
    teacher = "; every step was told the right tokens before it" if found.teacher_forced else ""
    return f"by slot; right, in 4 and in 16 where the same held of every slot before{teacher}"


def _slots(slots: Sequence[Slot]) -> list[str]:
    header = ["slot", "blocks", "right", "in 4", "in 16", "right of all", "probability", "calibration error"]
    rows = [
        [
            str(s.slot),
            str(s.num_blocks),
            *(_share(value) for value in s.recall.values()),
            _share(s.accuracy),
            _share(s.probability),
            _share(s.calibration_error),
        ]
        for s in slots
    ]
    return _columns([header, *rows])


def _parts(parts: Sequence[Part]) -> list[str]:
    return _columns([[part.name, *_interval(part.acceptance_length)] for part in parts])


def _parity(p: Parity) -> list[str]:
    verdict = "they agree" if p.agrees else "THEY DIFFER"
    lines = [
        f"{verdict}: {p.num_answers} answers served in {p.num_steps} steps, a draft fell in {p.num_rejections}",
        f"features: relative difference {p.served_difference:.1e} at most (allowed {p.tolerance:.0e}); "
        f"one pass over the text: {p.prefill_difference:.1e}",
        f"drafts: {p.num_different} of {p.num_drafts} differ, {p.num_ties} at ties; "
        f"the target says {p.target_agreement:.1%} of its answers again",
    ]
    return lines + [
        f"  {d.answer}, anchor at {d.position}, slot {d.slot}: serving drafts {d.served}, training {d.replayed} "
        f"(by {d.margin:.3g} logits)"
        for d in p.differences
    ]


def _causes(experiments: Sequence[Experiment]) -> list[str]:
    tried = [e for e in experiments if e.matched is not None]
    lines = []
    for cause in (e for e in tried if e.matched):
        lines += [cause.says, f"  evidence: {_evidence(cause.evidence)}", f"  hint: {cause.hint}"]
    if not lines:
        lines = [f"none of the {len(tried)} known faults that were tried matched"]
    return lines + [f"not tried: {e.name} ({e.left_out})" for e in experiments if e.left_out is not None]


def _evidence(evidence: dict[str, Any]) -> str:
    from paceline.train.diagnosis.scores import Estimate

    said = []
    for name, value in evidence.items():
        shown = (
            _said(value)
            if isinstance(value, Estimate)
            else f"{value:.3g}"
            if isinstance(value, float)
            else value
        )
        said.append(f"{name.replace('_', ' ')} {shown}")
    return ", ".join(said)


def _said(value: Estimate) -> str:
    return " ".join(_interval(value))


def _interval(e: Estimate) -> list[str]:
    ends = "" if e.low is None or e.high is None else f"({e.low:.2f} … {e.high:.2f})"
    return [f"{e.value:.2f}", ends, f"{e.num_blocks} blocks, {e.num_answers} answers"]


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns rows as lines, each column as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]
