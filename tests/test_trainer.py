"""The training loop: resuming changes nothing, saving never spoils what is there, and the drafter learns."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.core.errors import CheckpointError, ConfigError, PacelineError
from paceline.drafter.config import FULL, SLIDING
from paceline.train.curves import write_csv
from paceline.train.data.features import Document
from paceline.train.trainer import STATE, CurveRow, Progress
from tiny_trainer import (
    SETTINGS,
    assert_same,
    long_trainer,
    make_documents,
    make_drafter,
    make_trainer,
    outcome,
    stopping_at,
)

PROGRAM = Path(__file__).with_name("tiny_trainer.py")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("uninterrupted")
    make_trainer(folder).run()
    return outcome(folder)


# Resuming ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", range(7))
def test_a_run_stopped_and_resumed_is_the_run_that_was_not(
    tmp_path: Path, uninterrupted: dict[str, Any], step: int
) -> None:
    first = make_trainer(tmp_path)
    first.run(*stopping_at(step))
    assert first.step == step
    second = make_trainer(tmp_path)
    assert second.resume()
    assert second.step == step
    assert second.losses == uninterrupted["losses"][:step]
    second.run()
    assert_same(outcome(tmp_path), uninterrupted)


@pytest.mark.parametrize("accumulation_steps", [1, 2])
def test_a_process_killed_at_any_moment_goes_on_as_if_it_had_lived(
    tmp_path: Path, accumulation_steps: int
) -> None:
    whole = long_trainer(tmp_path / "whole", accumulation_steps)
    whole.run()
    folder, last_step = tmp_path / "killed", random.randrange(4, 22)
    command = [
        sys.executable,
        str(PROGRAM),
        str(folder),
        str(accumulation_steps),
        str(torch.get_num_threads()),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if int(line) == last_step:
                process.kill()
                break
    assert process.returncode == -9
    second = long_trainer(folder, accumulation_steps)
    assert second.resume()
    assert last_step - 3 <= second.step < 24
    second.run()
    assert len(second.losses) == 24
    assert second.losses == whole.losses
    assert_same(outcome(folder), outcome(tmp_path / "whole"))


def test_training_reaches_the_weights(uninterrupted: dict[str, Any]) -> None:
    fresh = make_drafter().state_dict()
    assert all(not torch.equal(fresh[name], tensor) for name, tensor in uninterrupted["drafter"].items())


def test_without_a_state_there_is_nothing_to_resume(tmp_path: Path) -> None:
    assert not make_trainer(tmp_path).resume()


def test_a_finished_run_can_be_made_longer(tmp_path: Path) -> None:
    make_trainer(tmp_path).run()
    longer = make_trainer(tmp_path, replace(SETTINGS, max_steps=8))
    assert longer.resume()
    longer.run()
    assert [row.step for row in longer.curve] == [0, 2, 4, 6, 8]
    assert longer.curve[-1].num_blocks == 8 * SETTINGS.blocks_per_step


def test_a_resumed_run_may_be_given_more_documents_but_not_fewer(tmp_path: Path) -> None:
    documents = make_documents(12)
    first = make_trainer(tmp_path, documents=documents[:9])
    first.run(*stopping_at(3))
    with pytest.raises(ConfigError, match=r"trained on 7 documents, given 5; hint: .*max_prompts"):
        make_trainer(tmp_path, documents=documents[:7]).resume()
    more = make_trainer(tmp_path, documents=documents)
    assert first.token_ids is not None
    assert more.token_ids is not None
    assert not torch.equal(more.token_ids, first.token_ids), "more documents have other common tokens"
    assert more.resume()
    assert torch.equal(more.token_ids, first.token_ids), "but labels keep their meaning"
    more.run()
    assert more.step == SETTINGS.max_steps


def test_the_state_of_another_recipe_is_refused(tmp_path: Path) -> None:
    make_trainer(tmp_path).run(*stopping_at(1))
    with pytest.raises(ConfigError, match="belongs to another recipe; hint"):
        make_trainer(tmp_path, contract="another recipe").resume()


@pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
def test_a_truncated_state_is_refused(tmp_path: Path, share: float) -> None:
    make_trainer(tmp_path).run(*stopping_at(1))
    whole = (tmp_path / STATE).read_bytes()
    (tmp_path / STATE).write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(CheckpointError, match=r"not a whole training state .*hint: delete it to begin anew"):
        make_trainer(tmp_path).resume()


# Failing -------------------------------------------------------------------------------------------------------------


def test_a_full_disk_leaves_the_state_before(tmp_path: Path, uninterrupted: dict[str, Any]) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no device that is always full")
    trainer = make_trainer(tmp_path)
    trainer.run(*stopping_at(2))
    before = (tmp_path / STATE).read_bytes()
    (tmp_path / STATE).with_suffix(".partial").symlink_to(full)
    with pytest.raises(
        OSError, match=r"state\.pt: could not be written .*saved before it is whole; hint: free"
    ):
        trainer.run()
    assert (tmp_path / STATE).read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == [STATE]
    again = make_trainer(tmp_path)
    assert again.resume()
    again.run()
    assert_same(outcome(tmp_path), uninterrupted)


def poisoned(value: float) -> list[Document]:
    """Documents of which the fourth that is trained on has one broken hidden state."""
    documents = make_documents(9)
    documents[5].hidden[0, 0] = value
    return documents


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_stops_before_the_weights_change(tmp_path: Path, value: float) -> None:
    weights = dict[int, dict[str, torch.Tensor]]()
    trainer = make_trainer(tmp_path, replace(SETTINGS, max_steps=40, save_every=1), poisoned(value))

    def remember(progress: Progress) -> None:
        weights[progress.step] = {k: v.clone() for k, v in trainer.drafter.state_dict().items()}

    with pytest.raises(PacelineError) as caught:
        trainer.run(remember)
    pattern = (
        r"loss of step (\d+) is not finite \(epoch (\d), documents \[(.*)\] of those trained on, .*hint: look"
    )
    found = re.match(pattern, str(caught.value))
    assert found is not None
    assert (int(found[1]), int(found[2])) == (trainer.step, 0)
    assert 3 in [int(number) for number in found[3].split(",")]
    state = outcome(tmp_path)
    assert state["step"] == trainer.step > 0
    assert_same(dict(trainer.drafter.state_dict()), weights[trainer.step])
    assert_same(dict(state["drafter"]), weights[trainer.step])


def test_a_gradient_that_is_not_finite_stops_too(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    trainer.run(*stopping_at(2))
    before = (tmp_path / STATE).read_bytes()
    norm = trainer.drafter.get_parameter("norm.weight")
    norm.register_hook(lambda gradient: gradient * torch.inf)
    with pytest.raises(PacelineError, match="gradient of step 2 is not finite"):
        trainer.run()
    assert (tmp_path / STATE).read_bytes() == before


def test_a_held_out_loss_that_is_not_finite_stops(tmp_path: Path) -> None:
    documents = make_documents(9)
    documents[0].hidden[0, 0] = float("nan")
    with pytest.raises(PacelineError, match="held-out loss at step 0 is not finite"):
        make_trainer(tmp_path, documents=documents).run()
    assert not (tmp_path / STATE).exists()


def test_weights_that_are_not_finite_are_not_saved(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    trainer.run(*stopping_at(2))
    before = (tmp_path / STATE).read_bytes()
    trainer.drafter.get_parameter("fc.weight").data[0, 0] = torch.nan
    with pytest.raises(PacelineError, match="weights at step 2 are not finite"):
        trainer.save()
    assert (tmp_path / STATE).read_bytes() == before


@pytest.mark.parametrize(
    ("kind", "slots", "message"),
    [
        (FULL, (2, 4), r"expected \[4\] .*every layer is causal"),
        (SLIDING, (4, 5), r"expected 2…4 \(the block size\), got \[4, 5\]"),
        (SLIDING, (1,), r"expected 2…4"),
    ],
)
def test_slots_that_train_another_function_are_refused(
    tmp_path: Path, kind: str, slots: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_trainer(tmp_path, replace(SETTINGS, slots=slots), drafter=make_drafter(kind))


def test_whole_blocks_train_bidirectional_layers(tmp_path: Path) -> None:
    settings = replace(SETTINGS, slots=(4,), max_steps=2)
    trainer = make_trainer(tmp_path, settings, drafter=make_drafter(FULL))
    trainer.run()
    assert trainer.step == 2


def test_documents_must_be_left_to_train_on(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="2 documents leave none to train on after 2 held out; hint"):
        make_trainer(tmp_path, documents=make_documents(2))


# Evaluating ----------------------------------------------------------------------------------------------------------


def test_held_out_documents_are_never_trained_on(tmp_path: Path, uninterrupted: dict[str, Any]) -> None:
    documents = make_documents(9)
    kept_out = SETTINGS.held_out_documents
    others = make_documents(kept_out, seed=5)
    make_trainer(tmp_path, documents=[*others, *documents[kept_out:]]).run()
    found = outcome(tmp_path)
    assert_same(found["drafter"], uninterrupted["drafter"])
    assert [r["held_out_loss"] for r in found["curve"]] != [
        r["held_out_loss"] for r in uninterrupted["curve"]
    ]


def test_an_evaluation_sees_every_held_out_document_once(tmp_path: Path) -> None:
    rows = []
    for blocks_per_step in (6, 13, 500):
        settings = replace(SETTINGS, blocks_per_step=blocks_per_step)
        trainer = make_trainer(tmp_path / str(blocks_per_step), settings)
        trainer.run(*stopping_at(0))
        rows.append(trainer.curve[0])
    assert len({(row.acceptance_length, row.slot_accuracy) for row in rows}) == 1
    assert [row.held_out_loss for row in rows] == pytest.approx([rows[0].held_out_loss] * 3, rel=1e-6)


def test_the_curve_tells_when_and_how_fast(tmp_path: Path) -> None:
    told: list[Progress] = []
    trainer = make_trainer(tmp_path, replace(SETTINGS, max_steps=5))
    trainer.run(told.append)
    assert [p.step for p in told] == [1, 2, 3, 4, 5]
    assert [p.row.step for p in told if p.row is not None] == [2, 4, 5]
    assert [row.step for row in trainer.curve] == [0, 2, 4, 5]
    assert all(p.blocks_per_s > 0 for p in told)
    assert trainer.losses == [p.loss for p in told]
    second = [p.loss for p in told[2:4]]
    assert trainer.curve[2].train_loss == pytest.approx(sum(second) / 2)


def test_four_documents_are_learnt_by_heart(tmp_path: Path) -> None:
    documents = make_documents(4)
    settings = replace(
        SETTINGS,
        max_steps=60,
        blocks_per_step=24,
        anchors_per_document=16,
        slots=(),
        lr=1e-2,
        decay_steps=20,
        draft_vocab_size=None,
        held_out_documents=4,  # the same four again: what is held out is held in
        eval_every=60,
        save_every=60,
    )
    trainer = make_trainer(tmp_path, settings, [*documents, *documents])
    trainer.run()
    first, last = trainer.curve[0], trainer.curve[-1]
    assert first.acceptance_length < 1.2
    assert last.held_out_loss < first.held_out_loss / 2
    assert min(last.slot_accuracy) > 0.9
    assert last.acceptance_length > 3.3  # a block of 4 has 3 drafts


# Curves --------------------------------------------------------------------------------------------------------------

ROWS = [
    CurveRow(0, 0, 0.0, 0.0, 4.5, 1.25, (0.25, 0.125), 0.0),
    CurveRow(2, 30, 1.5, 4.25, 4.0, 1.5, (0.5, 0.25), 1e-3),
]


def test_a_curve_as_csv(tmp_path: Path) -> None:
    write_csv(ROWS, tmp_path / "curve.csv")
    header, *lines = (tmp_path / "curve.csv").read_text().splitlines()
    assert header.split(",") == [
        *(name for name in asdict(ROWS[0]) if name not in ("slot_accuracy", "lr")),
        "lr",
        "accuracy_1",
        "accuracy_2",
    ]
    assert lines[1] == "2,30,1.5,4.25,4.0,1.5,0.001,0.5,0.25"
    assert [path.name for path in tmp_path.iterdir()] == ["curve.csv"]
