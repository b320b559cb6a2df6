"""Training and serving side by side: they agree for every kind of drafter, and what is planted between them is seen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from paceline.drafter.base import NeuralDrafter
from paceline.drafter.config import SLIDING
from paceline.drafter.dflash import DFlash
from paceline.target.base import TargetOutput, VerifyRows
from paceline.target.native import NativeTarget
from paceline.testing import tiny_drafter, tiny_eagle3, tiny_shape, tiny_target, tiny_tensors
from paceline.train.diagnosis.questions import Question, write_answers
from paceline.train.diagnosis.replay import Parity, replay
from paceline.train.diagnosis.scores import Scorer

TARGET = tiny_target(num_layers=3)
QUESTIONS = [Question(str(i), "", None, (5 + i, 9, 30 - i, 17)) for i in range(3)]


def replayed(drafter: NeuralDrafter, target: NativeTarget = TARGET) -> Parity:
    answers = write_answers(target, QUESTIONS, (0, 1, 2), 24)
    ids = getattr(drafter, "token_ids", None)
    scorer = Scorer(target.heads.embed_weight, target.heads.head_weight, ids)
    return replay(target, drafter, scorer, answers)


def made(kind: str) -> NeuralDrafter:
    if kind == "eagle3":
        return tiny_eagle3(TARGET, draft_vocab_size=40)
    if kind == "sliding":
        return tiny_drafter(TARGET, layer_types=(SLIDING, SLIDING), sliding_window=6)
    return tiny_drafter(TARGET, variant="dflash2" if kind == "dflash2" else "dflash")


@pytest.mark.parametrize("kind", ["full", "sliding", "dflash2", "eagle3"])
def test_training_and_serving_agree(kind: str) -> None:
    found = replayed(made(kind))
    assert found.agrees and found.num_different == found.num_ties == 0
    assert found.served_difference < 1e-12 and found.prefill_difference < 1e-12
    assert found.num_answers == found.num_same_text == 3
    assert found.target_agreement == 1.0
    assert found.num_rejections > 0 and found.num_drafts > 20 and found.num_injections > 20


class ForgetfulDrafter(DFlash):
    """Places injected rows one position too far, but only where it drafts."""

    def inject(
        self, contexts: Sequence[Any], hidden: Sequence[torch.Tensor], tokens: Sequence[Sequence[int]] = ()
    ) -> None:
        """Injects each row's neighbour."""
        super().inject(contexts, [rows.roll(1, 0) * 1.5 for rows in hidden], tokens)


def test_a_drafter_that_injects_otherwise_is_seen() -> None:
    healthy = tiny_drafter(TARGET)
    drafter = ForgetfulDrafter(healthy.config).double()
    drafter.load_state_dict(healthy.state_dict())
    found = replayed(drafter.bind(TARGET.heads))
    assert not found.agrees and found.num_different > 0
    assert found.served_difference < 1e-12
    first = found.differences[0]
    assert first.served != first.replayed and first.margin > 0 and 1 <= first.slot <= 3
    assert found.num_same_text == 3  # the text is the target's all the same


class CrookedTarget(NativeTarget):
    """Doubles the hidden rows of some passes: of speculation, or of whole texts."""

    in_speculation = True

    def verify(self, batch: Sequence[VerifyRows]) -> list[TargetOutput]:
        """Verifies, and doubles."""
        return [
            TargetOutput(o.logits, o.hidden * 2) if self._is_crooked(part) else o
            for part, o in zip(batch, super().verify(batch), strict=True)
        ]

    def _is_crooked(self, part: VerifyRows) -> bool:
        if self.in_speculation:
            return bool(part.proposal.tokens)
        return len(part.anchor_tokens) > 1 and not part.last_row_only


@pytest.mark.parametrize("in_speculation", [True, False])
def test_a_target_that_gives_other_features_is_seen(in_speculation: bool) -> None:
    shape = tiny_shape(num_layers=3)
    target = CrookedTarget(shape, tiny_tensors(shape), name="crooked", dtype=torch.float64)
    target.in_speculation = in_speculation
    found = replayed(tiny_drafter(target), target)
    assert not found.agrees
    differences = (found.served_difference, found.prefill_difference)
    assert differences == pytest.approx((1.0, 0.0) if in_speculation else (0.0, 1.0))
