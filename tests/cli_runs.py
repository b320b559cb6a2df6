"""What the tests of the command line share: runs in this process, a drafter that guesses at random, one target."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import paceline.llm
from paceline.checkpoint.store import DrafterCheckpoint
from paceline.cli.main import main
from paceline.drafter.config import DrafterConfig
from paceline.drafter.dflash import DFlash

SOURCE = Path(__file__).resolve().parent.parent / "src"
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SOURCE), *sys.path[1:]]), "NO_COLOR": "1"}


@dataclass(frozen=True)
class Run:
    """What a command left."""

    code: int
    out: str
    err: str


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> Run:
    """Runs a command in this process."""
    capsys.readouterr()
    code = main([str(argument) for argument in arguments])
    return Run(code, *capsys.readouterr())


def save_drafter(folder: Path, **changes: Any) -> Path:
    """Writes a one-layer drafter of random weights for the default target and returns its folder."""
    sizes: dict[str, Any] = {
        "block_size": 4,
        "hidden_size": 576,
        "num_layers": 1,
        "num_heads": 9,
        "num_kv_heads": 3,
        "head_dim": 64,
        "intermediate_size": 64,
        "vocab_size": 49152,
        "target_layer_ids": (15,),
        "num_target_layers": 30,
        "mask_token_id": 17,
    }
    torch.manual_seed(0)
    drafter = DFlash(DrafterConfig(**{**sizes, **changes}))
    DrafterCheckpoint.of(drafter, torch.float32, {"made_for": "tests"}).save(folder)
    return folder


@contextmanager
def one_target() -> Iterator[None]:
    """Lets all runs share one loaded target instead of reading it again for each."""
    load, loaded = paceline.llm.load_target, dict[tuple[str, ...], Any]()

    def load_once(folder: Path, codec: Any, **options: Any) -> Any:
        key = (str(folder), *(f"{name}={value}" for name, value in sorted(options.items())))
        if key not in loaded:
            loaded[key] = load(folder, codec, **options)
        return loaded[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paceline.llm, "load_target", load_once)
        yield
