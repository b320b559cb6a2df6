"""What each process of tests/test_parallel.py does; started by torchrun with a folder to write to."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from paceline.core.errors import PacelineError
from paceline.drafter.base import NeuralDrafter
from paceline.drafter.layers import Projection
from paceline.train.config import OptimConfig
from paceline.train.parallel import Ranks
from paceline.train.trainer import Trainer
from tiny_trainer import SETTINGS, make_dflash2, make_documents, make_drafter, make_trainer, stopping_at

EXACT = replace(SETTINGS, dtype="float64", clip_norm=100.0)  # a clipped gradient would hide its size


def make_spare() -> NeuralDrafter:
    """Returns a drafter with a matrix that no forward pass takes."""
    drafter = make_drafter()
    drafter.spare = Projection(16, 16)
    return drafter


RUNS: dict[str, tuple[OptimConfig, Callable[[], Any]]] = {
    "plain": (EXACT, make_drafter),
    "in parts": (replace(EXACT, accumulation_steps=2, eval_every=1, patience=2), make_dflash2),
    "one document a step": (replace(EXACT, blocks_per_step=6, held_out_documents=1), make_drafter),
    "a matrix that nobody uses": (replace(EXACT, weight_decay=0.5), make_spare),
}
"""Settings and drafters of runs that processes share. The third leaves one of two processes without documents."""


def start(name: str, folder: Path, ranks: Ranks) -> Trainer:
    """Returns the trainer of a run."""
    settings, make = RUNS[name]
    return make_trainer(folder / name, settings, drafter=make(), ranks=ranks)


def result(trainer: Trainer) -> dict[str, Any]:
    """Returns what a run came to."""
    assert trainer.best is not None
    return {
        "losses": trainer.losses,
        "rows": [(r.step, r.num_blocks, r.acceptance_length, r.held_out_loss) for r in trainer.curve],
        "accuracy": [r.slot_accuracy for r in trainer.curve],
        "weights": trainer.drafter.state_dict(),
        "best": trainer.best.row.step,
    }


def run_all(folder: Path, ranks: Ranks) -> dict[str, Any]:
    """Returns what every run came to in this process."""
    results = {}
    for name in RUNS:
        trainer = start(name, folder, ranks)
        trainer.run()
        results[name] = result(trainer)
    return results


def stop_and_resume(folder: Path, ranks: Ranks) -> dict[str, Any]:
    """Returns a run that its last process stopped at step 3, and all resumed."""
    name = "plain"
    first = start(name, folder, ranks)
    observe, should_stop = stopping_at(3)
    first.run(observe, should_stop if ranks.rank == ranks.world_size - 1 else lambda: False)
    assert first.step == 3
    second = start(name, folder, ranks)
    assert second.resume()
    second.run()
    return result(second)


def disagree(folder: Path, ranks: Ranks) -> str:
    """Returns what is said where processes were given different documents."""
    settings, make = RUNS["plain"]
    trainer = make_trainer(folder, settings, make_documents(9 + ranks.rank), drafter=make(), ranks=ranks)
    try:
        trainer.run()
    except PacelineError as error:
        return str(error)
    return "nothing"


if __name__ == "__main__":
    torch.set_num_threads(1)
    root, place = Path(sys.argv[1]), Ranks.join()
    found = {
        "place": (place.rank, place.world_size),
        "runs": run_all(root / "runs", place),
        "resumed": stop_and_resume(root / "stopped", place),
        "said": disagree(root / "other", place),
    }
    torch.save(found, root / f"{place.rank}.pt")
