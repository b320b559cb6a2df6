"""The training loop: resuming changes nothing, saving never spoils what is there, and the drafter learns."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.core.errors import CheckpointError, ConfigError, PacelineError
from paceline.drafter.config import FULL, SLIDING, DrafterConfig
from paceline.drafter.dflash import DFlash
from paceline.train.config import OptimConfig
from paceline.train.curves import write_csv, write_png
from paceline.train.features import Document
from paceline.train.trainer import STATE, CurveRow, Progress, Trainer

VOCAB, WIDTH = 40, 32
SETTINGS = OptimConfig(
    max_steps=6,
    blocks_per_step=15,
    anchors_per_document=6,
    slots=(2, 3, 4),
    lr=3e-3,
    warmup_steps=2,
    decay_steps=2,
    muon_block_rows=16,
    draft_vocab_size=30,
    chunk_blocks=7,
    held_out_documents=2,
    eval_every=2,
    save_every=3,
)


def make_documents(count: int, seed: int = 0) -> list[Document]:
    rng = torch.Generator().manual_seed(seed)
    made = []
    for i in range(count):
        ids = torch.randint(0, VOCAB - 1, (14 + 3 * i % 7,), generator=rng)
        hidden = torch.randn(len(ids), 2 * WIDTH, generator=rng).bfloat16()
        made.append(Document(ids, 3 + i % 2, hidden))
    return made


def make_drafter(kind: str = SLIDING) -> DFlash:
    torch.manual_seed(0)
    return DFlash(
        DrafterConfig(
            block_size=4,
            hidden_size=WIDTH,
            num_layers=2,
            num_heads=4,
            num_kv_heads=2,
            head_dim=8,
            intermediate_size=48,
            vocab_size=VOCAB,
            target_layer_ids=(0, 2),
            num_target_layers=3,
            mask_token_id=VOCAB - 1,
            layer_types=(kind, kind),
            sliding_window=64 if kind == SLIDING else None,
        )
    )


def make_trainer(
    folder: Path,
    settings: OptimConfig = SETTINGS,
    documents: Sequence[Document] | None = None,
    *,
    kind: str = SLIDING,
    contract: str = "one recipe",
) -> Trainer:
    rng = torch.Generator().manual_seed(1)
    embed, head = torch.randn(2, VOCAB, WIDTH, generator=rng)
    chosen = make_documents(9) if documents is None else documents
    return Trainer(make_drafter(kind), embed, head, chosen, settings, folder, contract)


def stopping_at(step: int) -> tuple[Callable[[Progress], None], Callable[[], bool]]:
    """Returns an observer and a question that together end a run behind its `step`-th step."""
    seen = [0]

    def observe(progress: Progress) -> None:
        seen[0] = progress.step

    return observe, lambda: seen[0] >= step


def outcome(folder: Path) -> dict[str, Any]:
    """Returns everything of a saved state but the times."""
    state: dict[str, Any] = torch.load(folder / STATE, weights_only=True)
    del state["seconds"]
    for row in state["curve"]:
        del row["seconds"]
    return state


def assert_same(left: Any, right: Any, where: str = "state") -> None:
    """Compares nested states bit by bit."""
    assert type(left) is type(right), where
    if isinstance(left, torch.Tensor):
        assert torch.equal(left, right), where
    elif isinstance(left, dict):
        assert left.keys() == right.keys(), where
        for key in left:
            assert_same(left[key], right[key], f"{where}.{key}")
    elif isinstance(left, list):
        assert len(left) == len(right), where
        for i, pair in enumerate(zip(left, right, strict=True)):
            assert_same(*pair, f"{where}[{i}]")
    else:
        assert left == right, where


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
    second.run()
    assert_same(outcome(tmp_path), uninterrupted)


def test_a_killed_run_goes_on_from_its_last_checkpoint(tmp_path: Path, uninterrupted: dict[str, Any]) -> None:
    def kill(progress: Progress) -> None:
        if progress.step == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_trainer(tmp_path).run(kill)
    second = make_trainer(tmp_path)
    assert second.resume()
    assert second.step == SETTINGS.save_every
    second.run()
    assert_same(outcome(tmp_path), uninterrupted)


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
    make_trainer(tmp_path, documents=documents[:9]).run(*stopping_at(3))
    with pytest.raises(ConfigError, match=r"trained on 7 documents, given 5; hint: .*max_prompts"):
        make_trainer(tmp_path, documents=documents[:7]).resume()
    more = make_trainer(tmp_path, documents=documents)
    assert more.resume()
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


@pytest.mark.parametrize(
    "failure",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        RuntimeError("PytorchStreamWriter failed writing file: No space left"),  # PyTorch's way of saying it
    ],
)
def test_a_full_disk_leaves_the_state_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    trainer = make_trainer(tmp_path)
    trainer.run(*stopping_at(2))
    before = (tmp_path / STATE).read_bytes()

    def fill_the_disk(state: object, path: Path) -> None:
        Path(path).write_bytes(b"half a state")
        raise failure

    monkeypatch.setattr(torch, "save", fill_the_disk)
    with pytest.raises(OSError, match="No space left"):
        trainer.run()
    assert (tmp_path / STATE).read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == [STATE]


def test_a_gradient_that_is_not_finite_stops_before_the_weights_change(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    trainer.run(*stopping_at(2))
    before, weights = (tmp_path / STATE).read_bytes(), trainer.drafter.state_dict()
    documents = [replace(d, hidden=torch.full_like(d.hidden, torch.inf)) for d in make_documents(9)]
    poisoned = make_trainer(tmp_path, documents=documents)
    assert poisoned.resume()
    with pytest.raises(PacelineError, match=r"gradient of step 2 is not finite; .*hint: lower train.lr"):
        poisoned.run()
    assert (tmp_path / STATE).read_bytes() == before
    assert_same(dict(poisoned.drafter.state_dict()), dict(weights))


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
        make_trainer(tmp_path, replace(SETTINGS, slots=slots), kind=kind)


def test_whole_blocks_train_bidirectional_layers(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, replace(SETTINGS, slots=(4,), max_steps=2), kind=FULL)
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
    accuracies = []
    for blocks_per_step in (6, 13, 500):
        trainer = make_trainer(
            tmp_path / str(blocks_per_step), replace(SETTINGS, blocks_per_step=blocks_per_step)
        )
        trainer.run(*stopping_at(0))
        accuracies.append((trainer.curve[0].acceptance_length, trainer.curve[0].slot_accuracy))
    assert accuracies[0] == accuracies[1] == accuracies[2]


def test_the_curve_tells_when_and_how_fast(tmp_path: Path) -> None:
    told: list[Progress] = []
    trainer = make_trainer(tmp_path, replace(SETTINGS, max_steps=5))
    trainer.run(told.append)
    assert [p.step for p in told] == [1, 2, 3, 4, 5]
    assert [p.row.step for p in told if p.row is not None] == [2, 4, 5]
    assert [row.step for row in trainer.curve] == [0, 2, 4, 5]
    assert all(p.blocks_per_s > 0 for p in told)
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


def test_a_curve_as_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert write_png(ROWS, tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
