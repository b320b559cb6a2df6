"""What a step may be made of: parts, lower precision, soft labels, other drafters; and when to stop early."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paceline.core.acceptance import accepted_prefix
from paceline.core.errors import ConfigError
from paceline.drafter.base import NeuralDrafter
from paceline.drafter.eagle3 import Eagle3
from paceline.train.config import OptimConfig, ShapeConfig, TrainConfig
from paceline.train.data.batch import DraftVocabulary, draw_anchors, generator
from paceline.train.data.features import Document
from paceline.train.trainer import Trainer
from tiny_trainer import (
    SETTINGS,
    VOCAB,
    WIDTH,
    assert_same,
    make_dflash2,
    make_documents,
    make_drafter,
    make_eagle3,
    make_trainer,
    outcome,
    stopping_at,
    with_distributions,
)

EXACT = replace(SETTINGS, dtype="float64", clip_norm=100.0)  # a clipped gradient would hide its size


DRAFTERS: dict[str, Callable[[], NeuralDrafter]] = {
    "dflash": make_drafter,
    "dflash2": make_dflash2,
    "eagle3": make_eagle3,
}


def assert_close(left: Trainer, right: Trainer, tolerance: float = 1e-9) -> None:
    """Compares losses, curves and weights of two runs."""
    assert left.losses == pytest.approx(right.losses, rel=tolerance)
    for a, b in zip(left.curve, right.curve, strict=True):
        assert (a.step, a.num_blocks, a.acceptance_length) == (b.step, b.num_blocks, b.acceptance_length)
        assert a.slot_accuracy == pytest.approx(b.slot_accuracy, rel=tolerance)
        assert a.held_out_loss == pytest.approx(b.held_out_loss, rel=tolerance)
    weights = right.drafter.state_dict()
    for name, tensor in left.drafter.state_dict().items():
        torch.testing.assert_close(tensor, weights[name], rtol=0, atol=tolerance, msg=name)


# Parts ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("accumulation_steps", [2, 3])
def test_a_step_in_parts_is_the_same_step(tmp_path: Path, kind: str, accumulation_steps: int) -> None:
    documents = with_distributions(make_documents(9))
    whole_settings = replace(EXACT, labels="distribution")
    whole = make_trainer(tmp_path / "whole", whole_settings, documents, drafter=DRAFTERS[kind]())
    whole.run()
    settings = replace(whole_settings, accumulation_steps=accumulation_steps)
    parts = make_trainer(tmp_path / "parts", settings, documents, drafter=DRAFTERS[kind]())
    parts.run()
    assert_close(parts, whole)


def test_no_more_parts_than_documents() -> None:
    replace(SETTINGS, accumulation_steps=3)
    with pytest.raises(ConfigError, match=r"accumulation_steps: expected at most 3, the documents of a step"):
        replace(SETTINGS, accumulation_steps=4)


# Precision -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", DRAFTERS)
def test_bfloat16_products_keep_float32_weights(tmp_path: Path, kind: str) -> None:
    exact = make_trainer(tmp_path / "exact", drafter=DRAFTERS[kind]())
    exact.run()
    low = make_trainer(
        tmp_path / "low", replace(SETTINGS, compute_dtype="bfloat16"), drafter=DRAFTERS[kind]()
    )
    products = set()
    fc = low.drafter.get_submodule("fc")
    fc.register_forward_hook(lambda module, args, output: products.add(output.dtype))
    low.run()
    assert products == {torch.bfloat16}
    assert {p.dtype for p in low.drafter.parameters()} == {torch.float32}
    state = outcome(tmp_path / "low")["optimizers"]
    moments = [v for o in state for s in o["state"].values() for v in s.values()]
    assert {v.dtype for v in moments if isinstance(v, torch.Tensor)} == {torch.float32}
    assert low.losses != exact.losses, "products are rounded"
    assert low.losses == pytest.approx(exact.losses, rel=0.02)
    assert any(loss != float(torch.tensor(loss).bfloat16()) for loss in low.losses), "losses are not"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"compute_dtype": "float16"}, r"compute_dtype: expected one of \('', 'bfloat16'\), got 'float16'"),
        (
            {"compute_dtype": "bfloat16", "dtype": "float64"},
            "'bfloat16' needs dtype 'float32', got 'float64'",
        ),
        ({"labels": "soft"}, "labels: expected one of"),
        ({"loss": "linear"}, "loss: expected one of .*'uniform'"),
        ({"selector_weight": -1.0}, "selector_weight: expected at least 0"),
        ({"selector_weight": math.inf}, "selector_weight: expected at least 0"),
        ({"patience": 0}, "patience: expected at least 1, got 0"),
        ({"accumulation_steps": 0}, "accumulation_steps: expected at least 1, got 0"),
    ],
)
def test_settings_are_checked(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OptimConfig(**changes)  # type: ignore[arg-type]


# Labels --------------------------------------------------------------------------------------------------------------


def test_distributions_train_otherwise_than_tokens(tmp_path: Path) -> None:
    documents = with_distributions(make_documents(9))
    tokens = make_trainer(tmp_path / "tokens", documents=documents)
    tokens.run()
    plain = make_trainer(tmp_path / "plain")
    plain.run()
    assert tokens.losses == plain.losses, "what is not asked for changes nothing"
    soft = make_trainer(tmp_path / "soft", replace(SETTINGS, labels="distribution"), documents)
    soft.run()
    assert soft.losses != tokens.losses
    assert soft.curve[0].acceptance_length == tokens.curve[0].acceptance_length


def test_distributions_that_are_not_there_are_missed(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, replace(SETTINGS, labels="distribution"))
    with pytest.raises(ConfigError, match=r"'distribution' needs .*hint: regenerate.top_log_probs"):
        trainer.run()


# Other drafters ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", DRAFTERS)
def test_every_part_of_a_drafter_learns_and_resumes(tmp_path: Path, kind: str) -> None:
    whole = make_trainer(tmp_path / "whole", drafter=DRAFTERS[kind]())
    begin = {name: p.detach().clone() for name, p in whole.drafter.named_parameters()}
    whole.run()
    assert [name for name, p in whole.drafter.named_parameters() if torch.equal(p, begin[name])] == []
    make_trainer(tmp_path / "parts", drafter=DRAFTERS[kind]()).run(*stopping_at(3))
    second = make_trainer(tmp_path / "parts", drafter=DRAFTERS[kind]())
    assert second.resume()
    second.run()
    assert_same(outcome(tmp_path / "parts"), outcome(tmp_path / "whole"))


def test_a_head_of_its_own_begins_as_the_targets(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, drafter=make_eagle3())
    assert isinstance(trainer.drafter, Eagle3)
    assert trainer.token_ids is not None
    assert torch.equal(trainer.drafter.token_ids, trainer.token_ids)
    head = torch.randn(2, VOCAB, WIDTH, generator=torch.Generator().manual_seed(1))[1]
    assert torch.equal(trainer.drafter.lm_head.weight, head[trainer.token_ids])


class Heads:
    """The embedding and head that `make_trainer` trains with."""

    def __init__(self) -> None:
        rng = torch.Generator().manual_seed(1)
        self.embed_weight, self.head_weight = torch.randn(2, VOCAB, WIDTH, generator=rng).double()

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = self.embed_weight[ids]
        return rows

    def lm_head(self, states: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = states @ self.head_weight.T
        return logits


def drafted_length(drafter: NeuralDrafter, documents: list[Document], token_ids: torch.Tensor) -> float:
    """Returns mean accepted tokens plus one, by drafting behind the anchors that an evaluation draws."""
    drafter.bind(Heads(), token_ids)
    rng, runs = generator(EXACT.seed, 2), []
    for document in documents:
        ids = document.token_ids.tolist()
        for anchor in draw_anchors(document, EXACT.anchors_per_document, rng).tolist():
            context = drafter.open(len(ids))
            drafter.inject([context], [document.hidden[:anchor].double()], [ids[:anchor]])
            (proposal,) = drafter.draft([ids[anchor]], [context], drafter.config.num_draft_tokens)
            truth = ids[anchor + 1 : anchor + 1 + len(proposal.tokens)]
            right = [a == b for a, b in zip(proposal.tokens, truth, strict=False)]
            runs.append(int(accepted_prefix(torch.tensor([right]))[0]))
    return 1 + sum(runs) / len(runs)


@pytest.mark.parametrize("kind", DRAFTERS)
def test_an_evaluation_says_what_drafting_would(tmp_path: Path, kind: str) -> None:
    """By heart as far as it goes, so that there is something to accept."""
    documents = make_documents(4)
    settings = replace(
        EXACT, max_steps=30, slots=(), lr=1e-2, held_out_documents=4, eval_every=30, save_every=30
    )
    trainer = make_trainer(tmp_path, settings, [*documents, *documents], drafter=DRAFTERS[kind]())
    trainer.run()
    vocabulary = DraftVocabulary.covering(documents, VOCAB, settings.draft_vocab_size)
    length = drafted_length(trainer.drafter, documents, vocabulary.token_ids)
    assert length > 1.3
    assert trainer.curve[-1].acceptance_length == pytest.approx(length, rel=1e-9)


def test_the_selector_makes_a_difference(tmp_path: Path) -> None:
    losses = []
    for weight in (0.0, 1.0):
        settings = replace(SETTINGS, selector_weight=weight)
        trainer = make_trainer(tmp_path / str(weight), settings, drafter=make_dflash2())
        trainer.run()
        losses.append(trainer.losses)
        codebook = trainer.drafter.get_parameter("candidate_selector.successor_codebook")
        assert bool(codebook.any()) == (weight > 0)
    assert losses[1][0] > losses[0][0]


def test_a_selector_may_be_trained_alone(tmp_path: Path) -> None:
    drafter = make_dflash2()
    before = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    trainer = make_trainer(tmp_path, replace(SETTINGS, parts="selector"), drafter=drafter)
    trainer.run()
    changed = {name for name, tensor in drafter.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == {name for name in before if name.startswith("candidate_selector.")}
    with pytest.raises(ConfigError, match=r"train\.parts: expected 'all' with algorithm 'dflash'"):
        TrainConfig(ShapeConfig(mask_token_id=0), train=OptimConfig(parts="selector"))
    with pytest.raises(ConfigError, match=r"train\.parts: expected one of"):
        OptimConfig(parts="block")


# Stopping early ------------------------------------------------------------------------------------------------------


def scripted(trainer: Trainer, lengths: list[float]) -> None:
    """Lets the trainer's evaluations find these acceptance lengths. Mutates: the trainer."""
    measure = trainer._measure

    def say() -> tuple[float, float, tuple[float, ...]]:
        loss, _, accuracy = measure()
        return loss, lengths[trainer.step], accuracy

    trainer._measure = say  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("patience", "lengths", "last", "best"),
    [
        (2, [1.0, 1.2, 1.1, 1.2, 1.3, 1.4, 1.5], 3, 1),  # as good is not better
        (3, [1.0, 1.2, 1.1, 1.2, 1.3, 1.2, 1.1], 6, 4),
        (1, [1.5, 1.2, 1.6, 1.7, 1.8, 1.9, 2.0], 1, 0),  # the drafter as it came is one of those
        (None, [1.0, 1.2, 1.1, 1.1, 1.1, 1.1, 1.1], 6, 1),
    ],
)
def test_patience_ends_a_run_and_the_best_weights_are_kept(
    tmp_path: Path, patience: int | None, lengths: list[float], last: int, best: int
) -> None:
    settings = replace(SETTINGS, eval_every=1, patience=patience)
    weights = {}

    def remember(trainer: Trainer) -> None:
        weights[trainer.step] = {k: v.clone() for k, v in trainer.drafter.state_dict().items()}

    trainer = make_trainer(tmp_path, settings)
    scripted(trainer, lengths)
    remember(trainer)
    trainer.run(lambda _: remember(trainer))
    assert trainer.step == last
    assert trainer.is_exhausted == (last < 6)
    assert trainer.best is not None
    assert (trainer.best.row.step, trainer.best.row.acceptance_length) == (best, lengths[best])
    assert_same(trainer.best.weights, dict(weights[best]))
    again = make_trainer(tmp_path, settings)
    assert again.resume()
    assert again.best is not None
    assert again.best.row == trainer.best.row
    assert_same(dict(again.best.weights), dict(weights[best]))
    again.run()
    assert again.step == last, "exhausted is exhausted"


def test_more_patience_goes_on_as_if_it_had_been_there(tmp_path: Path) -> None:
    lengths = [1.0, 1.2, 1.1, 1.1, 1.3, 1.1, 1.1]
    runs = []
    for name in ("short", "long"):
        trainer = make_trainer(
            tmp_path / name, replace(SETTINGS, eval_every=1, patience=2 if name == "short" else 4)
        )
        scripted(trainer, lengths)
        trainer.run()
        runs.append(trainer.step)
    assert runs == [3, 6]
    resumed = make_trainer(tmp_path / "short", replace(SETTINGS, eval_every=1, patience=4))
    assert resumed.resume()
    scripted(resumed, lengths)
    resumed.run()
    assert_same(outcome(tmp_path / "short"), outcome(tmp_path / "long"))
