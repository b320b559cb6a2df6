"""What a drafter does on answers that its target writes itself: where drafts fall, and why as far as it can be told.

    answers      the target answers a few prompts greedily, every layer of interest tapped (`write_answers`)
    blocks       the drafter drafts at every anchor of them (`scores`)
    replay       the same prompts are served, and both ways compared (`replay`)
    experiments  known faults are tried one by one (`causes`)

Acceptance lengths are those of greedy chains. docs/diagnosing.md says how to read each number.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.core.acceptance import accepted_prefix
from paceline.core.errors import ConfigError
from paceline.drafter.base import NeuralDrafter
from paceline.drafter.dflash2 import DFlash2
from paceline.target.base import Target
from paceline.target.folder import read_json
from paceline.target.text import TextCodec
from paceline.train.diagnosis.causes import examine
from paceline.train.diagnosis.questions import (
    DiagnoseSettings,
    Question,
    Tell,
    choose,
    mask_candidates,
    rerender,
    tapped_layers,
    write_answers,
)
from paceline.train.diagnosis.replay import Parity, replay
from paceline.train.diagnosis.scores import (
    Answer,
    Estimate,
    Scorer,
    Scores,
    calibration_error,
    estimate,
    is_teacher_forced,
    walk,
)
from paceline.train.diagnosis.trial import Experiment, Trial

BUCKET = 32
"""Tokens of an answer that one row of positions covers."""
WIDTHS = (1, 4, 16)
COMMON_THETAS = (10_000.0, 1_000_000.0)
"""What readers fall back to, and what many targets have."""


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Acceptance lengths of greedy chains.

    Args:
        decoding: over the blocks that decoding visits.
        every_anchor: over blocks at every token.
        unary: as `decoding` where each slot's likeliest token is taken; `None` without a selector.
        oracle: by width, as `decoding` with the right token taken wherever it is among so many likeliest.
    """

    decoding: Estimate
    every_anchor: Estimate
    unary: Estimate | None
    oracle: dict[str, Estimate]


@dataclass(frozen=True, slots=True)
class Slot:
    """One drafted slot, over blocks at every anchor.

    Args:
        slot: counted from 1.
        num_blocks: of which all slots before were right.
        recall: by width, share with the right token among so many likeliest, where that held of the slots before.
        accuracy: share of right drafts over all blocks.
        probability: mean probability given to the right token.
        calibration_error: mean gap between the likeliest token's probability and how often it is right.
    """

    slot: int
    num_blocks: int
    recall: dict[str, float | None]
    accuracy: float
    probability: float
    calibration_error: float


@dataclass(frozen=True, slots=True)
class Part:
    """τ of a part of the blocks that decoding visits: a kind of prompt, or a stretch of the answer."""

    name: str
    acceptance_length: Estimate


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Everything that was found.

    Args:
        target: its name.
        drafter: class of the drafter.
        block_size: of its blocks.
        settings: as asked for.
        num_answers, num_answer_tokens: measured; answers shorter than a block are not.
        left_out: prompts left out, by reason.
        teacher_forced: whether accuracies are those of a drafter that was told the right tokens before.
        acceptance, slots, kinds, positions: see their types.
        parity: training and serving compared.
        experiments: every known fault that was looked for, matches first.
    """

    target: str
    drafter: str
    block_size: int
    settings: DiagnoseSettings
    num_answers: int
    num_answer_tokens: int
    left_out: dict[str, int]
    teacher_forced: bool
    acceptance: Acceptance
    slots: tuple[Slot, ...]
    kinds: tuple[Part, ...]
    positions: tuple[Part, ...]
    parity: Parity
    experiments: tuple[Experiment, ...]

    @property
    def causes(self) -> tuple[Experiment, ...]:
        """The experiments that matched."""
        return tuple(e for e in self.experiments if e.matched)

    def to_dict(self) -> dict[str, Any]:
        """Returns it as JSON, names of the causes included."""
        return {**asdict(self), "causes": [e.name for e in self.causes]}


def diagnose(
    target: Target,
    drafter: NeuralDrafter,
    codec: TextCodec,
    questions: Sequence[Question],
    *,
    token_ids: torch.Tensor | None = None,
    rope_theta: float | None = None,
    settings: DiagnoseSettings | None = None,
    tell: Tell = lambda stage, done, total: None,
) -> Diagnosis:
    """Returns what can be told about a drafter from a few answers of its target.

    Args:
        drafter: bound to the target.
        codec: the target's tokenizer.
        questions: see `read_questions`.
        token_ids: (V',) the tokens that it drafts; `None` for all.
        rope_theta: the target's own, as far as known.
        settings: how much is measured.
        tell: told how far it is.

    Raises:
        ConfigError: fewer than two prompts that fit, or answers shorter than a block.
    """
    settings = settings or DiagnoseSettings()
    chosen, left_out = choose(questions, settings, target.spec.max_positions)
    layers = tapped_layers(drafter, target.spec.num_layers)
    written = write_answers(target, chosen, layers, settings.max_new_tokens, tell)
    drafts = drafter.block_size - 1
    answers = [a for a in written if len(a.anchors(drafts))]
    if len(answers) < len(written):
        left_out = {**left_out, "answer shorter than a block": len(written) - len(answers)}
    if len(answers) < 2:
        raise ConfigError(
            f"diagnose: expected at least two answers of more than {drafter.block_size} tokens, got {len(answers)}; "
            "hint: more prompts, or a larger max_new_tokens"
        )
    scorer = Scorer(target.heads.embed_weight, target.heads.head_weight, token_ids)
    scores = []
    for i, answer in enumerate(answers):
        scores.append(scorer.score(drafter, answer, answer.anchors(drafts)))
        tell("blocks", i + 1, len(answers))
    tell("replay", 0, 1)
    parity = replay(target, drafter, scorer, answers[: settings.num_replayed])
    tell("replay", 1, 1)
    trial = Trial(
        drafter=drafter,
        scorer=scorer,
        num_target_layers=target.spec.num_layers,
        answers=answers,
        full=scores,
        anchors=[_spread(s.anchors, settings.anchors_per_answer) for s in scores],
        parity=parity,
        renderings=rerender(target, drafter, codec, chosen, settings),
        mask_candidates=mask_candidates(codec, target.spec.vocab_size),
        rope_thetas=(*((rope_theta,) if rope_theta else ()), *COMMON_THETAS),
    )
    return Diagnosis(
        target=target.spec.name,
        drafter=type(drafter).__name__,
        block_size=drafter.block_size,
        settings=settings,
        num_answers=len(answers),
        num_answer_tokens=sum(len(a.token_ids) - a.num_prompt_tokens for a in answers),
        left_out=left_out,
        teacher_forced=is_teacher_forced(drafter),
        acceptance=_acceptance(drafter, scores),
        slots=_slots(scores),
        kinds=_kinds(answers, scores),
        positions=_positions(answers, scores),
        parity=parity,
        experiments=tuple(examine(trial, lambda done, total: tell("experiments", done, total))),
    )


def rope_theta_of(folder: Path) -> float | None:
    """Returns the base of the rotary embedding that a target's config names, in either spelling."""
    config = read_json(folder / "config.json")
    theta = (config.get("rope_parameters") or {}).get("rope_theta") or config.get("rope_theta")
    return None if theta is None else float(theta)


def _spread(anchors: torch.Tensor, count: int) -> torch.Tensor:
    """Returns at most `count` of the anchors, evenly spaced."""
    rows = torch.linspace(0, len(anchors) - 1, min(count, len(anchors))).round().long()
    return anchors[rows]


# Numbers -------------------------------------------------------------------------------------------------------------


def _pooled(values: Iterable[torch.Tensor]) -> Estimate:
    found = estimate(list(values))
    assert found is not None  # every answer has a block
    return found


def _visited(accepted: torch.Tensor) -> torch.Tensor:
    """Returns tokens per block over the blocks that decoding visits."""
    return (accepted + 1)[walk(accepted)]


def _acceptance(drafter: NeuralDrafter, scores: Sequence[Scores]) -> Acceptance:
    has_selector = isinstance(drafter, DFlash2)
    return Acceptance(
        decoding=_pooled(_visited(s.accepted) for s in scores),
        every_anchor=_pooled(s.accepted + 1 for s in scores),
        unary=_pooled(_visited(accepted_prefix(s.unary == s.labels)) for s in scores)
        if has_selector
        else None,
        oracle={str(w): _pooled(_visited(accepted_prefix(s.rank < w)) for s in scores) for w in WIDTHS[1:]},
    )


def _slots(scores: Sequence[Scores]) -> tuple[Slot, ...]:
    correct = torch.cat([s.chosen == s.labels for s in scores])
    rank, likely = torch.cat([s.rank for s in scores]), torch.cat([s.unary == s.labels for s in scores])
    probability = torch.cat([s.probability for s in scores]).double()
    confidence = torch.cat([s.confidence for s in scores])
    hits = {w: correct if w == 1 else rank < w for w in WIDTHS}
    slots = []
    for k in range(correct.shape[1]):
        before = {w: hit[:, :k].all(dim=1) for w, hit in hits.items()}
        recall = {
            str(w): float(hit[before[w], k].double().mean()) if before[w].any() else None
            for w, hit in hits.items()
        }
        slots.append(
            Slot(
                slot=k + 1,
                num_blocks=int(before[1].sum()),
                recall=recall,
                accuracy=float(correct[:, k].double().mean()),
                probability=float(probability[:, k].mean()),
                calibration_error=calibration_error(confidence[:, k], likely[:, k]),
            )
        )
    return tuple(slots)


def _kinds(answers: Sequence[Answer], scores: Sequence[Scores]) -> tuple[Part, ...]:
    groups: dict[str, list[torch.Tensor]] = {}
    for answer, score in zip(answers, scores, strict=True):
        groups.setdefault(answer.kind or "(none)", []).append(_visited(score.accepted))
    return tuple(Part(name, _pooled(values)) for name, values in groups.items())


def _positions(answers: Sequence[Answer], scores: Sequence[Scores]) -> tuple[Part, ...]:
    groups: dict[int, list[torch.Tensor]] = {}
    for answer, score in zip(answers, scores, strict=True):
        visited = walk(score.accepted)
        bucket = ((score.anchors - answer.num_prompt_tokens) // BUCKET)[visited]
        tokens = (score.accepted + 1)[visited]
        for i in bucket.unique().tolist():
            groups.setdefault(i, []).append(tokens[bucket == i])
    return tuple(Part(f"{i * BUCKET}–{(i + 1) * BUCKET - 1}", _pooled(groups[i])) for i in sorted(groups))
