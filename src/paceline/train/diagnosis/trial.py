"""What an experiment works on, what it gives back, and when a change counts as better."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from paceline.drafter.base import NeuralDrafter
from paceline.train.diagnosis.replay import Parity
from paceline.train.diagnosis.scores import Answer, Change, Estimate, Scorer, Scores, estimate

CONFIDENCE = 0.99
"""Of the intervals that decide; a dozen experiments are tried."""
CLEAR_GAIN = 0.02
"""Least gain in τ that counts, as a share of τ; tap ids off by one cost 3 to 5 %."""

Evidence = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Experiment:
    """One fault that was looked for.

    Args:
        name: its name in JSON.
        matched: whether the measurement fits the fault; `None` where it was left out.
        evidence: the numbers.
        says: the cause in plain words; empty unless it matched.
        hint: what to do about it; empty unless it matched.
        gain: what the best change adds to τ, where something was changed.
        left_out: why it was not tried.
    """

    name: str
    matched: bool | None
    evidence: Evidence = field(default_factory=dict)
    says: str = ""
    hint: str = ""
    gain: float | None = None
    left_out: str | None = None


@dataclass(frozen=True)
class Trial:
    """What experiments work on.

    Args:
        drafter, scorer: who drafts, and who runs its blocks.
        num_target_layers: of the target.
        answers: of the target, each with at least one block.
        full: their blocks at every anchor.
        anchors: those that experiments use.
        parity: what the replay found.
        renderings: answers to the same prompts, rendered in other ways.
        mask_candidates, rope_thetas: values to try.
    """

    drafter: NeuralDrafter
    scorer: Scorer
    num_target_layers: int
    answers: Sequence[Answer]
    full: Sequence[Scores]
    anchors: Sequence[torch.Tensor]
    parity: Parity
    renderings: dict[str, Sequence[Answer]] = field(default_factory=dict)
    mask_candidates: Sequence[int] = ()
    rope_thetas: Sequence[float] = ()

    @cached_property
    def base(self) -> list[torch.Tensor]:
        """Accepted drafts at the experiments' anchors, by answer."""
        return [s.at(a).accepted for s, a in zip(self.full, self.anchors, strict=True)]

    @property
    def acceptance_length(self) -> float:
        """τ at the experiments' anchors."""
        return 1 + float(torch.cat(self.base).double().mean())

    def gain(
        self,
        drafter: NeuralDrafter | None = None,
        *,
        layers: Sequence[int] | None = None,
        change: Change = lambda hidden: hidden,
        every: int = 1,
    ) -> Estimate:
        """Returns what a change adds to τ, block by block on the same anchors.

        Args:
            drafter: in place of the drafter.
            layers, change: see `Scorer.accepted`.
            every: use only so many-th anchors.
        """
        pairs = []
        for answer, anchors, base in zip(self.answers, self.anchors, self.base, strict=True):
            accepted = self.scorer.accepted(
                drafter or self.drafter, answer, anchors[::every], layers=layers, change=change
            )
            pairs.append(accepted - base[::every])
        found = estimate(pairs, CONFIDENCE)
        assert found is not None  # every answer has a block
        return found

    def is_better(self, gain: Estimate) -> bool:
        """Whether a gain is clear."""
        clear = CLEAR_GAIN * self.acceptance_length
        return gain.low is not None and gain.low > 0 and gain.value >= clear


def variant(drafter: NeuralDrafter, **changes: Any) -> NeuralDrafter:
    """Returns the same weights under a changed config. Pure."""
    changed = copy.copy(drafter)
    changed.config = replace(drafter.config, **changes)
    return changed


def repetition(answers: Sequence[Answer]) -> float:
    """Returns the share of answer tokens that last followed the same two tokens: what copying alone would guess."""
    num = hits = 0
    for answer in answers:
        tokens, last = answer.token_ids.tolist(), dict[tuple[int, int], int]()
        for i in range(2, len(tokens)):
            pair = (tokens[i - 2], tokens[i - 1])
            if i >= answer.num_prompt_tokens:
                num, hits = num + 1, hits + (last.get(pair) == tokens[i])
            last[pair] = tokens[i]
    return hits / max(1, num)


def left_out(name: str, reason: str) -> Experiment:
    """Returns an experiment that was not tried. Pure."""
    return Experiment(name, None, left_out=reason)


def verdict(
    name: str, matched: bool, evidence: Evidence, says: str, hint: str, gain: float | None = None
) -> Experiment:
    return Experiment(name, matched, evidence, says if matched else "", hint if matched else "", gain)


def judged(trial: Trial, name: str, evidence: Evidence, gain: Estimate, says: str, hint: str) -> Experiment:
    return verdict(name, trial.is_better(gain), evidence, says, hint, gain.value)
