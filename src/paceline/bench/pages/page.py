"""Writes the report of a run: a page that needs no network, its numbers as JSON, its rows as CSV, figures as PNG."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2

from paceline.bench.numbers.metrics import summary_to_dict
from paceline.bench.numbers.summary import Summary
from paceline.bench.pages import amounts, profile, sections
from paceline.bench.pages.figures import figures
from paceline.bench.pages.looks import COLOURS, Style, styles
from paceline.bench.pages.panels import Figure
from paceline.bench.pages.plots import to_plotly, to_png
from paceline.bench.runs import records
from paceline.bench.runs.plan import Plan
from paceline.bench.runs.rows import Row, Run
from paceline.bench.verdicts.decision import headline

SCHEMA_VERSION = 1
Verified = Mapping[str, Mapping[str, Any]]
"""Reports of `paceline verify --json` by arm."""

_OUTCOME = (
    *(
        "failure",
        "sent_s",
        "ttft_s",
        "e2e_s",
        "max_gap_s",
        "num_chunks",
        "num_prompt_tokens",
        "num_new_tokens",
    ),
    *("finish_reason", "text"),
)


def write_report(
    run: Run, summary: Summary, folder: Path, *, verified: Verified | None = None
) -> tuple[Path, ...]:
    """Writes `report.html`, `report.json`, `rows.csv` and the PNGs into a folder, each atomically; returns their paths.

    Args:
        summary: of the run, with its decisions.
        folder: made where it is missing.
        verified: what `decide` was given.
    """
    rules = Plan.from_dict(run.plan, "plan of the run").rules
    looks = styles(tuple(run.arms), summary.baseline)
    drawn = figures(summary, rules)
    images = {figure.name: to_png(figure, looks) for figure in drawn}
    report, rows = document(run, summary, verified=verified), to_csv(run.rows)
    page = _page(run, summary, verified or {}, {"report": report, "rows": rows}, (drawn, looks, images))
    texts = {"report.html": page, "report.json": _json(report), "rows.csv": rows}
    contents = {name: text.encode() for name, text in texts.items()}
    contents |= {f"{name}.png": image for name, image in images.items()}
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        _replace(folder / name, content)
    return tuple(folder / name for name in contents)


def document(run: Run, summary: Summary, *, verified: Verified | None = None) -> dict[str, Any]:
    """Returns the report as JSON data, versioned by `schema_version`; ends that the data leave open are null. Pure."""
    known: dict[str, Any] = records.plain(
        {
            "schema_version": SCHEMA_VERSION,
            "verdict": headline(summary.decisions),
            "command": run.command,
            "started": run.started,
            "is_complete": run.is_complete,
            "lost": run.lost,
            "plan": run.plan,
            "workload": run.workload,
            "environment": run.environment,
            "arms": {name: asdict(fingerprint) for name, fingerprint in run.arms.items()},
            "summary": summary_to_dict(summary),
            "verified": dict(verified or {}),
        }
    )
    return known


def to_csv(rows: tuple[Row, ...]) -> str:
    """Returns a line for each request under a line of names; what is not known is empty. Pure."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    places = ("block", "order", "start", "arm", "load", "concurrency", "rate_per_s", "speed", "temperature")
    counts = ("num_steps", "num_drafted", "num_accepted")
    writer.writerow([*places, "kind", "id", "max_new_tokens", *_OUTCOME, *counts])
    for row in rows:
        place, load = row.place, row.place.load
        where = [place.block, place.order, place.start, place.arm, load.label]
        where += [load.concurrency, load.rate_per_s, load.speed, place.temperature]
        known = [getattr(row.outcome, name) for name in _OUTCOME]
        writer.writerow([*where, row.kind, row.outcome.id, row.max_new_tokens, *known, *_drafting(row)])
    return buffer.getvalue()


def _drafting(row: Row) -> tuple[int | None, ...]:
    """Returns verify steps, drafts and accepted drafts of an answer."""
    steps = row.outcome.acceptance
    if steps is None:
        return None, None, None
    return (
        sum(count for *_, count in steps),
        sum(drafted * count for drafted, _, count in steps),
        sum(accepted * count for _, accepted, count in steps),
    )


# The page ------------------------------------------------------------------------------------------------------------


def _page(
    run: Run,
    summary: Summary,
    verified: Verified,
    files: dict[str, Any],
    drawing: tuple[tuple[Figure, ...], dict[str, Style], dict[str, bytes]],
) -> str:
    from plotly.offline import get_plotlyjs

    drawn, looks, images = drawing
    rules = Plan.from_dict(run.plan, "plan of the run").rules
    scripts = [_data("report.js"), str(get_plotlyjs())]
    panels = {figure.name: [to_plotly(panel, looks) for panel in figure.panels] for figure in drawn}
    data = {"figures": panels, "colours": list(COLOURS), **files}
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(_data("report.html.j2")).render(
        run=run,
        summary=summary,
        headline=headline(summary.decisions),
        figures=[(figure, _data_uri(images[figure.name])) for figure in drawn],
        rules=sections.rules_in_words(rules),
        confidence=amounts.percent(rules.confidence),
        control=tuple(sections.control_sentences(summary, rules)),
        exactness=sections.exactness(verified),
        sections=sections,
        profile=profile,
        whole=[cell for cell in summary.cells if cell.kind is None],
        by_kind=[cell for cell in summary.cells if cell.kind is not None],
        style=_data("report.css"),
        script=scripts[0],
        plotly=scripts[1],
        hashes=[_hash(script) for script in scripts],
        data=_for_script(data),
    )


def _data(name: str) -> str:
    return resources.files("paceline").joinpath("data", name).read_text(encoding="utf-8")


def _data_uri(image: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(image).decode()}"


def _hash(script: str) -> str:
    """Returns what lets a page run this script and no other."""
    return f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}"


def _for_script(data: object) -> str:
    """Returns JSON without a character that could end the script element that holds it."""
    text = _json(data)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _json(data: object) -> str:
    return json.dumps(data, allow_nan=False, indent=1) + "\n"


def _replace(path: Path, content: bytes) -> None:
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_bytes(content)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
