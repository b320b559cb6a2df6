"""What a drafter says at many anchors of finished answers, and what that comes to.

`score` runs blocks as training does, one forward pass for many anchors. What the blocks of a real decoding would have
been follows from that: a block that accepts n drafts is followed by the block n + 1 tokens further (`walk`).

Shape suffixes: A anchors, K drafts, D hidden, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from paceline.core.acceptance import accepted_prefix
from paceline.drafter.base import Blocks, NeuralDrafter
from paceline.drafter.config import Eagle3Config
from paceline.drafter.dflash2 import DFlash2

CHUNK_BLOCKS = 64
OUTSIDE = 2**31
"""Rank of a token that the drafter cannot draft."""

Change = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Answer:
    """A prompt with the target's own greedy answer and everything that was tapped on the way.

    Args:
        id, kind: of the prompt.
        token_ids: (T,) prompt and answer.
        num_prompt_tokens: tokens before the answer.
        layers: decoder layers that were tapped.
        hidden: (T - 1, layers · D) their outputs; the last token was never run.
    """

    id: str
    kind: str
    token_ids: torch.Tensor
    num_prompt_tokens: int
    layers: tuple[int, ...]
    hidden: torch.Tensor

    def taps(self, layers: Sequence[int]) -> torch.Tensor:
        """Returns the outputs of some of the tapped layers (T - 1, taps · D), in the order asked for. Pure."""
        by_layer = self.hidden.view(len(self.hidden), len(self.layers), -1)
        return by_layer[:, [self.layers.index(i) for i in layers]].flatten(1)

    def anchors(self, num_drafts: int) -> torch.Tensor:
        """Returns every position whose whole block lies inside the answer. Pure."""
        return torch.arange(
            self.num_prompt_tokens, max(self.num_prompt_tokens, len(self.token_ids) - num_drafts)
        )


@dataclass(frozen=True, slots=True)
class Scores:
    """One answer's blocks.

    Args:
        anchors: (A,) positions.
        labels: (A, K) the target's tokens.
        chosen: (A, K) what the drafter drafts.
        unary: (A, K) its likeliest token slot by slot; `chosen` differs only where a selector decides.
        rank: (A, K) tokens likelier than the label slot by slot, `OUTSIDE` where the label cannot be drafted.
        probability: (A, K) given to the label, 0 where it cannot be drafted.
        confidence: (A, K) of the likeliest token.
        margin: (A, K) by how much the choice beats the next one, in logits.
    """

    anchors: torch.Tensor
    labels: torch.Tensor
    chosen: torch.Tensor
    unary: torch.Tensor
    rank: torch.Tensor
    probability: torch.Tensor
    confidence: torch.Tensor
    margin: torch.Tensor

    @property
    def accepted(self) -> torch.Tensor:
        """(A,) leading drafts that are right."""
        return accepted_prefix(self.chosen == self.labels)

    def at(self, anchors: torch.Tensor) -> Scores:
        """Returns the blocks of some of the anchors. Pure."""
        rows = torch.searchsorted(self.anchors, anchors)
        return Scores(*(getattr(self, name)[rows] for name in self.__dataclass_fields__))


@dataclass(frozen=True, slots=True)
class _Pass:
    """One forward pass over blocks: their tokens (A, S), states (A, K, D) and logits (A, K, V')."""

    drafter: NeuralDrafter
    block_ids: torch.Tensor
    states: torch.Tensor
    logits: torch.Tensor


class Scorer:
    """Runs blocks of drafters that share one target.

    Args:
        embed_VD, head_VD: the target's embedding and head.
        token_ids: (V',) the only tokens that are drafted; `None` for all that the drafter knows.
    """

    def __init__(
        self, embed_VD: torch.Tensor, head_VD: torch.Tensor, token_ids: torch.Tensor | None = None
    ) -> None:
        vocab_size = head_VD.shape[0]
        self._embed, self._head = embed_VD, head_VD
        self.token_ids = torch.arange(vocab_size) if token_ids is None else token_ids.cpu()
        self._ids = self.token_ids.to(head_VD.device)
        self._index = torch.full((vocab_size,), -1, device=head_VD.device)
        self._index[self._ids] = torch.arange(len(self._ids), device=head_VD.device)

    @torch.inference_mode()
    def score(self, drafter: NeuralDrafter, answer: Answer, anchors: torch.Tensor) -> Scores:
        """Returns what the drafter says behind the anchors (A,) of an answer. Pure.

        Args:
            anchors: ascending, each with its whole block inside the answer.
        """
        hidden = answer.taps(drafter.target_layer_ids)
        parts = [
            self._judged(self._run(drafter, answer, hidden, part)) for part in anchors.split(CHUNK_BLOCKS)
        ]
        return Scores(anchors, *(torch.cat(column) for column in zip(*parts, strict=True)))

    @torch.inference_mode()
    def accepted(
        self,
        drafter: NeuralDrafter,
        answer: Answer,
        anchors: torch.Tensor,
        *,
        layers: Sequence[int] | None = None,
        change: Change = lambda hidden: hidden,
    ) -> torch.Tensor:
        """Returns how many leading drafts are right behind each anchor (A,), and nothing else. Pure.

        Args:
            layers: taps to feed in place of the drafter's own.
            change: what to do to the tapped rows first.
        """
        hidden = change(answer.taps(drafter.target_layer_ids if layers is None else layers))
        parts = [self._run(drafter, answer, hidden, part) for part in anchors.split(CHUNK_BLOCKS)]
        return torch.cat([accepted_prefix(self._drafted(p)[0] == p.block_ids[:, 1:]) for p in parts]).cpu()

    def _run(
        self, drafter: NeuralDrafter, answer: Answer, hidden: torch.Tensor, anchors: torch.Tensor
    ) -> _Pass:
        device, last = self._embed.device, int(anchors.max())
        block_ids = answer.token_ids[anchors[:, None] + torch.arange(drafter.block_size)]
        blocks = Blocks(
            hidden=hidden[:last].to(device, self._embed.dtype),
            token_ids=answer.token_ids[:last].to(device),
            anchors=anchors.to(device),
            block_ids=block_ids.to(device),
        )
        states = drafter.forward_blocks([blocks], self._embed)
        logits = states @ drafter.head(self._head, self._ids).to(states.dtype).T
        return _Pass(
            drafter, blocks.block_ids, states, logits.to(torch.promote_types(logits.dtype, torch.float32))
        )

    def _drafted(self, p: _Pass) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns what would be drafted (A, K), and by how much it beats the next."""
        if isinstance(p.drafter, DFlash2):
            return _selected(p.drafter, p.states, p.logits, self._ids, p.block_ids[:, 0])
        best = p.logits.topk(min(2, p.logits.shape[-1]), dim=-1)
        return self._ids[best.indices[..., 0]], best.values[..., 0] - best.values[..., -1]

    def _judged(self, p: _Pass) -> tuple[torch.Tensor, ...]:
        """Returns the columns of `Scores` behind the anchors."""
        labels = p.block_ids[:, 1:]
        gold = self._index[labels]
        known, column = gold >= 0, gold.clamp(min=0)[..., None]
        best, norm = p.logits.max(dim=-1), p.logits.logsumexp(dim=-1)
        label_logits = p.logits.gather(-1, column)
        chosen, margin = self._drafted(p)
        columns = (
            labels,
            chosen,
            self._ids[best.indices],
            torch.where(known, (p.logits > label_logits).sum(dim=-1), OUTSIDE),
            torch.where(known, (label_logits[..., 0] - norm).exp(), 0.0),
            (best.values - norm).exp(),
            margin,
        )
        return tuple(c.cpu() for c in columns)


def _selected(
    drafter: DFlash2,
    states_AKD: torch.Tensor,
    logits_AKV: torch.Tensor,
    token_ids: torch.Tensor,
    previous_A: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the selector's walk (A, K) from the anchors, and by how much each choice beats the next."""
    width = min(drafter.config.selector_top_k, logits_AKV.shape[-1])
    unary_AKC, rows = logits_AKV.topk(width, dim=-1)
    ids_AKC, chosen, margins = token_ids[rows], list[torch.Tensor](), list[torch.Tensor]()
    for k in range(states_AKD.shape[1]):
        slot = slice(k, k + 1)
        scores = drafter.rescore(
            states_AKD[:, slot], ids_AKC[:, slot], unary_AKC[:, slot], previous_A[:, None]
        )
        best = scores[:, 0].topk(min(2, width), dim=-1)
        previous_A = ids_AKC[:, k].gather(1, best.indices[:, :1])[:, 0]
        chosen.append(previous_A)
        margins.append(best.values[:, 0] - best.values[:, -1])
    return torch.stack(chosen, dim=1), torch.stack(margins, dim=1)


def is_teacher_forced(drafter: NeuralDrafter) -> bool:
    """Whether a slot of `forward_blocks` was told the right tokens of the slots before it."""
    return isinstance(drafter.config, Eagle3Config)


def walk(accepted: torch.Tensor) -> torch.Tensor:
    """Returns which of consecutive anchors a decoding visits that begins at the first: bool (A,). Pure.

    Args:
        accepted: (A,) leading right drafts of the block at each anchor.
    """
    visited = torch.zeros(len(accepted), dtype=torch.bool)
    steps, row = accepted.tolist(), 0
    while row < len(steps):
        visited[row] = True
        row += steps[row] + 1
    return visited


# Numbers with intervals ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over blocks, with a t interval over answers; blocks of one answer resemble each other.

    Args:
        value: the mean.
        low, high: ends of the interval; `None` with fewer than two answers.
        num_blocks, num_answers: it rests on.
    """

    value: float
    low: float | None
    high: float | None
    num_blocks: int
    num_answers: int


def estimate(values: Sequence[torch.Tensor], confidence: float = 0.95) -> Estimate | None:
    """Returns the pooled mean of each answer's values, `None` where there are none. Pure.

    The interval is that of a ratio of two sums over answers (linearised), with Student's t.
    """
    groups = [v.double() for v in values if len(v)]
    if not groups:
        return None
    count, num = sum(len(v) for v in groups), len(groups)
    mean = float(torch.cat(groups).mean())
    if num < 2:
        return Estimate(mean, None, None, count, num)
    residuals = torch.stack([(v - mean).sum() for v in groups])
    error = math.sqrt(num / (num - 1) * float(residuals.square().sum())) / count
    half = student_t((1 + confidence) / 2, num - 1) * error
    return Estimate(mean, mean - half, mean + half, count, num)


def student_t(probability: float, degrees: int) -> float:
    """Returns the quantile of Student's t for a probability above one half. Pure.

    With t = √df · tan θ the density in θ is that of cos^(df - 1), which is smooth and bounded.
    """
    theta = torch.linspace(0, math.pi / 2, 100_001, dtype=torch.float64)
    mass = torch.cumulative_trapezoid(theta.cos() ** (degrees - 1), theta)
    row = int(torch.searchsorted(mass / mass[-1], 2 * probability - 1))
    return math.sqrt(degrees) * math.tan(float(theta[row + 1]))


def calibration_error(confidence: torch.Tensor, correct: torch.Tensor, num_bins: int = 10) -> float:
    """Returns Σ over equal bins of confidence of |mean confidence − share right| · share of blocks (ECE). Pure."""
    bins = (confidence * num_bins).long().clamp(max=num_bins - 1)
    gap = torch.zeros(num_bins, dtype=torch.float64)
    gap.index_add_(0, bins, confidence.double() - correct.double())
    return float(gap.abs().sum() / max(1, len(confidence)))
