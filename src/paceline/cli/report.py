"""`paceline report`: writes the report of a run again, from what the run left in its folder."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli import options
from paceline.cli.output import note, write_json
from paceline.core.errors import ConfigError

if TYPE_CHECKING:
    from paceline.bench.numbers.summary import Summary
    from paceline.bench.runs.rows import Run

app = typer.Typer()

_NEEDED = ("scipy", "plotly", "matplotlib", "jinja2", "prometheus_client")

Verify = Annotated[
    list[str] | None,
    typer.Option(
        metavar="[ARM=]FILE", help="What `paceline verify --json` said of an arm; may be given several times."
    ),
]


@options.command(app)
def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run of `paceline bench`.")],
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where to; the run's own folder if not given.")
    ] = None,
    verify: Verify = None,
    as_json: options.AsJson = False,
) -> None:
    """Write the report of a run: a page, its numbers, its rows and its figures; and say the verdict.

    Works for runs that were interrupted, with what they have.
    """
    require_libraries()
    from paceline.bench.pages.page import document, write_report
    from paceline.bench.runs.records import read_run
    from paceline.bench.verdicts.decision import headline

    found = read_run(run)
    verified = read_verified(found, verify or ())
    summary = judge(found, verified)
    paths = write_report(found, summary, out or run, verified=verified)
    for path in paths:
        note(str(path))
    if as_json:
        write_json(document(found, summary, verified=verified))
    else:
        typer.echo(headline(summary.decisions))


def judge(run: Run, verified: dict[str, dict[str, Any]]) -> Summary:
    """Returns the summary of a run with its decisions, by the rules of its plan.

    Raises:
        ConfigError: a plan that this version does not understand.
    """
    from paceline.bench.numbers.metrics import summarise
    from paceline.bench.runs.plan import Plan
    from paceline.bench.verdicts.decision import decide

    rules = Plan.from_dict(run.plan, "plan of the run").rules
    summary = summarise(run, rules)
    return replace(summary, decisions=decide(run, summary, rules, verified=verified))


def read_verified(run: Run, sources: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Returns reports of `paceline verify --json` by arm.

    Args:
        sources: ARM=FILE each, or FILE alone where the run has one candidate.

    Raises:
        ConfigError: a file that is no such report, an arm that the run has not, or none named where it has several.
    """
    baseline = next(iter(run.arms), "")
    candidates = [arm for arm in run.arms if arm not in (baseline, f"{baseline} again")]
    verified = {}
    for source in sources:
        arm, equals, file = source.partition("=")
        if not equals or arm not in run.arms:
            if len(candidates) != 1:
                raise ConfigError(f"--verify {source}: expected ARM=FILE with an arm of {candidates}")
            arm, file = candidates[0], source
        verified[arm] = _read_checks(Path(file))
    return verified


def _read_checks(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"--verify {path}: not JSON ({error})") from error
    if not isinstance(found, dict) or not isinstance(found.get("checks"), list):
        raise ConfigError(f"--verify {path}: expected a report of `paceline verify --json`, with checks")
    return found


def require_libraries() -> None:
    """Checks that what reports are made with is installed.

    Raises:
        ConfigError: it is not, with how to install it.
    """
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"reports need {', '.join(missing)}; hint: pip install 'paceline[bench]'")
