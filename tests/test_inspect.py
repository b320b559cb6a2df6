"""`paceline inspect` knows every kind of drafter folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from cli_runs import run
from paceline.checkpoint.store import DrafterCheckpoint
from paceline.drafter.base import NeuralDrafter
from paceline.testing import tiny_drafter, tiny_eagle3, tiny_target

TARGET = tiny_target()


@pytest.mark.parametrize(
    ("drafter", "token_ids", "num_draftable"),
    [
        (tiny_drafter(TARGET), None, 61),
        (tiny_drafter(TARGET, variant="dflash2"), torch.arange(7), 7),
        (tiny_eagle3(TARGET, draft_vocab_size=20), None, 20),
    ],
    ids=["dflash", "dflash2", "eagle3"],
)
def test_a_drafter_is_told_from_a_target(
    drafter: NeuralDrafter,
    token_ids: torch.Tensor | None,
    num_draftable: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    DrafterCheckpoint.of(drafter, torch.float32, {}, token_ids).save(tmp_path / "made")
    document = json.loads(run(capsys, "inspect", tmp_path / "made", "--json").out)
    assert document["kind"] == "drafter"
    assert document["num_draftable_tokens"] == num_draftable
    assert document["config"]["block_size"] == 4
