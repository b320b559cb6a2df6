"""The curve of a run as CSV and PNG, written anew at each evaluation."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Sequence
from pathlib import Path

from paceline.train.trainer import CurveRow


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


def write_png(rows: Sequence[CurveRow], path: Path) -> bool:
    """Draws acceptance length, slot accuracy and loss over blocks; returns False where matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    length, accuracy, loss = figure.subplots(1, 3)
    blocks = [row.num_blocks / 1000 for row in rows]
    length.plot(blocks, [row.acceptance_length for row in rows], color="#0b6e4f")
    length.set_title("acceptance length on held-out blocks")
    for slot in range(len(rows[0].slot_accuracy)):
        accuracy.plot(blocks, [row.slot_accuracy[slot] for row in rows], label=f"slot {slot + 1}")
    accuracy.set_title("right tokens per slot")
    accuracy.legend(fontsize=7)
    loss.plot(blocks, [row.held_out_loss for row in rows], label="held out", color="#8a1c7c")
    loss.plot(blocks[1:], [row.train_loss for row in rows[1:]], label="training", color="#b8b8b8")
    loss.set_title("weighted cross-entropy")
    loss.legend(fontsize=7)
    for axes in (length, accuracy, loss):
        axes.set_xlabel("thousand blocks")
        axes.grid(alpha=0.3)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    _replace(path, buffer.getvalue())
    return True


def _replace(path: Path, data: bytes) -> None:
    partial = path.with_suffix(path.suffix + ".partial")
    try:
        partial.write_bytes(data)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
