"""The curve of a run as CSV, PNG and a page that needs no network, written anew at each evaluation."""

from __future__ import annotations

import csv
import html
import io
import itertools
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.train.trainer import CurveRow

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GREEN, PURPLE, GREY = "#0b6e4f", "#8a1c7c", "#9a9a9a"
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 1100px; margin: 2em auto; padding: 0 1em }}
svg {{ width: 100%; height: auto }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums }}
th, td {{ text-align: right; padding: .1em .8em .1em 0; font-weight: normal }}
th {{ color: #777 }}
pre {{ background: #f6f6f4; padding: 1em; overflow-x: auto; font-size: 13px }}
</style></head><body>
<h1>{title}</h1>
<p>{summary}</p>
{figure}
<table><tr>{names}</tr>
{rows}
</table>
<h2>Recipe</h2>
<pre>{recipe}</pre>
</body></html>
"""


def write_csv(rows: Sequence[CurveRow], path: Path) -> None:
    """Writes one line per evaluation, atomically."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    num_slots = len(rows[0].slot_accuracy) if rows else 0
    names = ["step", "num_blocks", "seconds", "train_loss", "held_out_loss", "acceptance_length", "lr"]
    writer.writerow([*names, *(f"accuracy_{i + 1}" for i in range(num_slots))])
    for row in rows:
        writer.writerow([*(getattr(row, name) for name in names), *row.slot_accuracy])
    _replace(path, buffer.getvalue().encode())


def write_pictures(rows: Sequence[CurveRow], best: CurveRow, recipe: Mapping[str, Any], folder: Path) -> bool:
    """Writes `curve.png` and `curve.html`, atomically; returns False where matplotlib is not installed.

    Args:
        best: the evaluation whose weights are kept.
        recipe: JSON data, shown as it is.
    """
    try:
        from matplotlib import rc_context
    except ImportError:
        return False
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "curve"}):
        figure = _draw(rows, best)
        image, drawing = io.BytesIO(), io.StringIO()
        figure.savefig(image, format="png", dpi=110)
        figure.set_layout_engine("none")  # it is laid out now
        figure.savefig(drawing, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    svg = drawing.getvalue()
    _replace(folder / "curve.png", image.getvalue())
    _replace(folder / "curve.html", _page(rows, best, recipe, svg[svg.index("<svg") :]).encode())
    return True


def _draw(rows: Sequence[CurveRow], best: CurveRow) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 6), layout="constrained")
    FigureCanvasAgg(figure)
    length, accuracy, loss, lr, speed, clock = figure.subplots(2, 3).flat
    steps = [row.step for row in rows]
    lengths = [row.acceptance_length for row in rows]
    length.plot(steps, lengths, color=GREEN)
    length.plot(
        best.step, best.acceptance_length, "o", color=GREEN, label=f"best: {best.acceptance_length:.3f}"
    )
    length.set_title("acceptance length τ on held-out blocks")
    for slot in range(len(rows[0].slot_accuracy)):
        accuracy.plot(steps, [row.slot_accuracy[slot] for row in rows], label=f"slot {slot + 1}")
    accuracy.set_title("right tokens per slot")
    loss.plot(steps, [row.held_out_loss for row in rows], label="held out", color=PURPLE)
    loss.plot(steps[1:], [row.train_loss for row in rows[1:]], label="training", color=GREY)
    loss.set_title("loss")
    lr.plot(steps, [row.lr for row in rows], color=GREY)
    lr.set_title("learning rate")
    speed.plot(steps[1:], _blocks_per_s(rows), color=GREY)
    speed.set_title("blocks per second")
    speed.set_ylim(bottom=0)
    clock.plot([row.seconds / 60 for row in rows], lengths, color=GREEN)
    clock.set_title("τ over minutes of training")
    for axes in (length, accuracy, loss, lr, speed, clock):
        axes.set_xlabel("minutes" if axes is clock else _step_label(rows[-1]))
        axes.grid(alpha=0.3)
    for axes in (length, accuracy, loss):
        axes.legend(fontsize=7)
    return figure


def _step_label(last: CurveRow) -> str:
    return f"step of {last.num_blocks / last.step:,.0f} blocks" if last.step else "step"


def _blocks_per_s(rows: Sequence[CurveRow]) -> list[float]:
    """Returns the speed between each evaluation and the one before. Pure."""
    pairs = itertools.pairwise(rows)
    return [(b.num_blocks - a.num_blocks) / max(b.seconds - a.seconds, 1e-9) for a, b in pairs]


def _page(rows: Sequence[CurveRow], best: CurveRow, recipe: Mapping[str, Any], svg: str) -> str:
    last = rows[-1]
    columns = {
        "step": [f"{row.step}" for row in rows],
        "blocks": [f"{row.num_blocks:,}" for row in rows],
        "minutes": [f"{row.seconds / 60:.1f}" for row in rows],
        "τ": [f"{row.acceptance_length:.3f}" for row in rows],
        "held-out loss": [f"{row.held_out_loss:.3f}" for row in rows],
        "training loss": [f"{row.train_loss:.3f}" for row in rows],
        "learning rate": [f"{row.lr:.2e}" for row in rows],
        "blocks/s": ["", *(f"{speed:.1f}" for speed in _blocks_per_s(rows))],
    }
    return PAGE.format(
        title=html.escape(f"A drafter for {recipe.get('target', '?')}"),
        summary=f"Step {last.step}: τ {last.acceptance_length:.3f}. Best so far, and kept: step {best.step}, "
        f"τ {best.acceptance_length:.3f}.",
        figure=svg,
        names="".join(f"<th>{name}</th>" for name in columns),
        rows="\n".join(
            "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"
            for cells in zip(*columns.values(), strict=True)
        ),
        recipe=html.escape(json.dumps(recipe, indent=1, ensure_ascii=False)),
    )


def _replace(path: Path, data: bytes) -> None:
    partial = path.with_suffix(path.suffix + ".partial")
    try:
        partial.write_bytes(data)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
