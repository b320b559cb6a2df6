"""Planted faults, one by one: each is named, and a healthy drafter matches none.

Texts are made by the drafter itself, so that it is right wherever its config and its features are those it was made
with; then one of them is altered. A share of wrong labels keeps it from being perfect.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from paceline.drafter.base import NeuralDrafter
from paceline.drafter.config import SLIDING
from paceline.drafter.dflash import DFlash
from paceline.drafter.dflash2 import DFlash2
from paceline.testing import tiny_drafter, tiny_eagle3, tiny_target
from paceline.train.diagnosis.causes import examine
from paceline.train.diagnosis.replay import Parity
from paceline.train.diagnosis.scores import Answer, Scorer, is_teacher_forced
from paceline.train.diagnosis.trial import Experiment, Trial, repetition, variant

LAYERS, TAPS, SLOTS, PROMPT, NUM_BLOCKS, NUM_ANSWERS = 6, (1, 3), 4, 5, 12, 6
TARGET = tiny_target(num_layers=LAYERS, dtype=torch.float32)
VOCAB = TARGET.spec.vocab_size
SCORER = Scorer(TARGET.heads.embed_weight, TARGET.heads.head_weight)
FINE = Parity(
    agrees=True,
    num_answers=1,
    num_same_text=1,
    num_steps=9,
    num_rejections=5,
    num_injections=9,
    served_acceptance_length=2.0,
    target_agreement=1.0,
    served_difference=0.0,
    prefill_difference=0.0,
    tolerance=1e-3,
    num_drafts=9,
    num_ties=0,
    num_different=0,
    differences=(),
)


def made_drafter(**options: Any) -> DFlash:
    return tiny_drafter(TARGET, SLOTS, target_layer_ids=TAPS, **options)


def made_answers(
    drafter: NeuralDrafter,
    *,
    noise: float = 0.25,
    shift: int = 0,
    wrong_slots: Sequence[int] = (),
    seed: int = 0,
) -> list[Answer]:
    """Returns texts in which the drafter's drafts come true, `shift` places from where it drafts them.

    Args:
        noise: share of tokens replaced at random.
        wrong_slots: slots whose tokens are always replaced.
    """
    rng = torch.Generator().manual_seed(seed)
    return [_made_answer(drafter, noise, shift, wrong_slots, str(i), rng) for i in range(NUM_ANSWERS)]


def _made_answer(
    drafter: NeuralDrafter,
    noise: float,
    shift: int,
    wrong_slots: Sequence[int],
    name: str,
    rng: torch.Generator,
) -> Answer:
    length = PROMPT + NUM_BLOCKS * (SLOTS + 1) + 2
    ids = torch.randint(VOCAB, (length,), generator=rng)
    hidden = torch.randn(length - 1, LAYERS * TARGET.spec.hidden_size, generator=rng)
    answer = Answer(name, "made", ids, PROMPT, tuple(range(LAYERS)), hidden)
    anchors = anchors_of(answer)
    places = anchors[:, None] + shift + torch.arange(1, SLOTS)
    wrong = torch.rand(places.shape, generator=rng) < noise
    wrong[:, [k - 1 for k in wrong_slots]] = True
    others = torch.randint(VOCAB, places.shape, generator=rng)
    steps = anchors.split(1) if is_teacher_forced(drafter) else [anchors]
    for step in steps:  # a drafter that is told the tokens before a slot wants them written first
        rows = torch.isin(anchors, step)
        for _ in range(SLOTS - 1 if is_teacher_forced(drafter) else 1):
            drafted = SCORER.score(drafter, answer, step).chosen
            ids[places[rows]] = torch.where(wrong[rows], others[rows], drafted)
    return answer


def anchors_of(answer: Answer) -> torch.Tensor:
    return torch.arange(PROMPT, len(answer.token_ids) - SLOTS - 1, SLOTS + 1)


def made_trial(drafter: NeuralDrafter, answers: Sequence[Answer], **changes: Any) -> Trial:
    scorer = changes.pop("scorer", SCORER)
    anchors = [anchors_of(answer) for answer in answers]
    trial = Trial(
        drafter=drafter,
        scorer=scorer,
        num_target_layers=LAYERS,
        answers=answers,
        full=[scorer.score(drafter, answer, a) for answer, a in zip(answers, anchors, strict=True)],
        anchors=anchors,
        parity=FINE,
        mask_candidates=(3, 7, VOCAB - 1),
        rope_thetas=(10_000.0, 3.0),
    )
    return replace(trial, **changes)


def matches(trial: Trial) -> dict[str, Experiment]:
    return {e.name: e for e in examine(trial) if e.matched}


# A healthy drafter ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["full", "sliding", "dflash2", "eagle3"])
def test_a_healthy_drafter_matches_nothing(kind: str) -> None:
    if kind == "eagle3":
        drafter: NeuralDrafter = tiny_eagle3(TARGET, SLOTS, target_layer_ids=TAPS)
    elif kind == "dflash2":
        drafter = selecting_drafter()
    else:
        sliding = kind == "sliding"
        drafter = made_drafter(
            layer_types=(SLIDING,) * 2 if sliding else ("full_attention",) * 2,
            sliding_window=64 if sliding else None,
        )
    told: list[tuple[int, int]] = []
    found = examine(made_trial(drafter, made_answers(drafter)), lambda *done: told.append(done))
    assert [e.name for e in found if e.matched] == []
    assert told == [(i, len(found)) for i in range(1, len(found) + 1)]
    left_out = {e.name for e in found if e.left_out}
    masks = {"mask_token", "causality"} if kind == "eagle3" else set()
    selector = set() if kind == "dflash2" else {"selector"}
    assert left_out == {"chat_template", "vocabulary"} | masks | selector


# One altered thing ---------------------------------------------------------------------------------------------------


def test_taps_one_too_high_and_one_too_low() -> None:
    drafter = made_drafter()
    answers = made_answers(drafter)
    for shift in (-1, 1):
        named = tuple(i + shift for i in TAPS)
        found = matches(made_trial(variant(drafter, target_layer_ids=named), answers))
        assert "layer_ids" in found
        assert f"reads layers {list(TAPS)} better than {list(named)}" in found["layer_ids"].says
        assert next(iter(found)) == "layer_ids"  # the greatest gain comes first


def test_taps_that_cannot_be_shifted_are_left_out() -> None:
    drafter = made_drafter()
    trial = made_trial(drafter, made_answers(drafter), num_target_layers=4)
    (layers,) = [e for e in examine(trial) if e.name == "layer_ids"]
    assert "shifted_by_-1" in layers.evidence and "shifted_by_+1" not in layers.evidence


def test_wrong_mask() -> None:
    drafter = made_drafter()
    right = drafter.config.mask_token_id
    found = matches(made_trial(variant(drafter, mask_token_id=7), made_answers(drafter)))
    assert found["mask_token"].evidence["best"] == right == VOCAB - 1
    assert f"token {right} in place of 7" in found["mask_token"].says


@pytest.mark.parametrize("causal", [False, True])
def test_wrong_causality(causal: bool) -> None:
    drafter = made_drafter(is_causal=causal)
    found = matches(made_trial(variant(drafter, is_causal=not causal), made_answers(drafter)))
    assert f"set is_causal to {str(causal).lower()}" in found["causality"].hint


def test_wrong_theta() -> None:
    drafter = made_drafter()
    found = matches(made_trial(variant(drafter, rope_theta=3.0), made_answers(drafter)))
    assert "10000 in place of 3" in found["rope_theta"].says


def test_context_that_is_not_used() -> None:
    blind = made_drafter()
    blind.fc.weight.data.zero_()
    blind.fc.freeze()
    assert set(matches(made_trial(blind, made_answers(blind)))) == {"context"}


def test_a_template_that_it_does_not_know() -> None:
    drafter = made_drafter()
    known, unknown = made_answers(drafter, noise=0.0), made_answers(drafter, noise=1.0)
    trial = made_trial(drafter, unknown)
    assert "chat_template" not in matches(replace(trial, renderings={"raw": unknown, "system": unknown}))
    found = matches(replace(trial, renderings={"raw": known}))
    assert "raw prompts" in found["chat_template"].says
    looping = [replace(a, token_ids=a.token_ids % 2) for a in known]
    assert repetition(looping) > 0.3 + repetition(unknown)


def selecting_drafter() -> DFlash2:
    drafter = made_drafter(variant="dflash2")
    assert isinstance(drafter, DFlash2)
    return drafter


def test_a_selector_that_harms_and_one_that_does_nothing() -> None:
    drafter = selecting_drafter()
    answers = made_answers(drafter)
    assert "selector" not in matches(made_trial(drafter, answers))
    codebook = drafter.candidate_selector.successor_codebook
    codebook.data.mul_(-5)
    assert "makes drafts worse" in matches(made_trial(drafter, made_plain(drafter)))["selector"].says
    codebook.data.zero_()
    assert "changes no draft" in matches(made_trial(drafter, made_plain(drafter)))["selector"].says


def made_plain(drafter: DFlash2) -> list[Answer]:
    """Returns texts of the drafter's likeliest tokens slot by slot."""
    codebook = drafter.candidate_selector.successor_codebook
    kept = codebook.data.clone()
    codebook.data.zero_()
    answers = made_answers(drafter)
    codebook.data.copy_(kept)
    return answers


# Signs ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shift", "where"), [(1, "behind"), (-1, "before")])
def test_labels_shifted_by_one(shift: int, where: str) -> None:
    drafter = made_drafter()
    found = matches(made_trial(drafter, made_answers(drafter, shift=shift)))
    assert f"the slot {where} them" in found["shifted_labels"].says


def test_another_targets_drafter_is_at_chance() -> None:
    assert "at_chance" in matches(made_trial(made_drafter(seed=5), made_answers(made_drafter())))


def test_slots_that_collapse() -> None:
    drafter = made_drafter()
    found = matches(made_trial(drafter, made_answers(drafter, noise=0.1, wrong_slots=(2, 3))))
    assert set(found) == {"collapsed"}


def test_a_leak_is_too_good() -> None:
    drafter = made_drafter()
    assert "too_good" in matches(made_trial(drafter, made_answers(drafter, noise=0.0)))


def test_a_vocabulary_that_lacks_the_text() -> None:
    drafter = made_drafter()
    answers = made_answers(drafter, noise=0.05)
    half = Scorer(TARGET.heads.embed_weight, TARGET.heads.head_weight, torch.arange(0, VOCAB, 2))
    found = matches(made_trial(drafter, answers, scorer=half))
    assert "lacks what these answers say" in found["vocabulary"].says


def test_serving_that_differs_and_a_target_that_does_not_repeat_itself() -> None:
    drafter = made_drafter()
    answers = made_answers(drafter)
    apart = replace(FINE, agrees=False, served_difference=0.5, num_different=3, target_agreement=0.9)
    found = matches(made_trial(drafter, answers, parity=apart))
    assert set(found) == {"train_serve", "target_agreement"}
    assert "other hidden states" in found["train_serve"].says and "3 slots" in found["train_serve"].says


def test_a_match_explains_the_symptom() -> None:
    trial = made_trial(made_drafter(seed=5), made_answers(made_drafter()))
    found = {e.name: e for e in examine(replace(trial, parity=replace(FINE, agrees=False)))}
    assert found["at_chance"].matched is False
    assert found["at_chance"].evidence["explained_by"] == ["train_serve"]
