"""The tokens worth drafting, beside z-lab's layout: they travel with the drafter, and a wrong list is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from paceline.checkpoint import store
from paceline.checkpoint.store import DrafterCheckpoint
from paceline.core.errors import CheckpointError
from paceline.testing import tiny_drafter, tiny_target


def checkpoint() -> DrafterCheckpoint:
    return DrafterCheckpoint.of(tiny_drafter(tiny_target(), 4), torch.float32, {})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A saved drafter."""
    path = tmp_path / "drafter"
    checkpoint().save(path)
    return path


def test_a_built_drafter_knows_what_it_has_learned_to_draft() -> None:
    ids = torch.tensor([0, 3, 60])
    learned = replace(checkpoint(), token_ids=ids).build(torch.float64).learned_ids
    assert learned is not None and torch.equal(learned, ids)
    assert checkpoint().build(torch.float64).learned_ids is None


def test_token_ids_travel_with_the_drafter(folder: Path) -> None:
    replace(checkpoint(), token_ids=torch.tensor([0, 3, 60])).save(folder)
    token_ids = DrafterCheckpoint.load(folder).token_ids
    assert token_ids is not None
    assert token_ids.tolist() == [0, 3, 60]
    assert token_ids.dtype is torch.int64
    assert json.loads((folder / "draft_vocabulary.json").read_text(encoding="utf-8")) == {
        "token_ids": [0, 3, 60]
    }
    checkpoint().save(folder)
    assert DrafterCheckpoint.load(folder).token_ids is None


@pytest.mark.parametrize(
    "found",
    [
        {"token_ids": [0, 61]},
        {"token_ids": [-1, 5]},
        {"token_ids": [5, 3]},
        {"token_ids": [3, 3]},
        {"token_ids": []},
        {"token_ids": [[1, 2]]},
        {"token_ids": [1.0]},
        {"token_ids": [True]},
        {"token_ids": "12"},
        {"token_ids": None},
        {"ids": [1]},
        {"token_ids": [1], "more": [2]},
    ],
)
def test_what_is_no_list_of_tokens_is_refused(found: dict[str, Any], folder: Path) -> None:
    (folder / store.VOCABULARY).write_text(json.dumps(found), encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"expected .*token_ids.* ascending integers within 0…60, got"):
        DrafterCheckpoint.load(folder)


def test_a_vocabulary_that_engines_would_load_as_weights_is_refused(folder: Path) -> None:
    save_file({"token_ids": torch.tensor([1, 2])}, folder / "draft_vocabulary.safetensors")
    with pytest.raises(
        CheckpointError, match=r"expected draft_vocabulary\.json .* hint: write its token_ids"
    ):
        DrafterCheckpoint.load(folder)
