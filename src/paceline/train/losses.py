"""Cross-entropy of drafted slots through the target's frozen head, in chunks, with position weights.

Shape suffixes: A anchors, K drafts, D hidden, V draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from paceline.train.batch import IGNORED

Weigh = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(log-probabilities of the labels (A, K), supervised (A, K)) → weights (A, K)."""


def exponential_weights(decay: float) -> Weigh:
    """Returns w_k = exp(-(k - 1) / decay) on supervised slots. Source: DFlash (arXiv 2602.06036) §4."""

    def weigh(log_probs_AK: torch.Tensor, supervised_AK: torch.Tensor) -> torch.Tensor:
        slots = torch.arange(log_probs_AK.shape[1], dtype=log_probs_AK.dtype, device=log_probs_AK.device)
        return torch.exp(-slots / decay) * supervised_AK

    return weigh


def dpace_weights(alpha: float) -> Weigh:
    """Returns weights by what a slot adds to the expected accepted length.

    With q_k the drafter's probability of label k, s_k = (1 - alpha) q_k + alpha and c_k = s_1 ⋯ s_k, slot k weighs
    c_k + … + c_K: how much of the accepted length hangs on it.

    Source: D-PACE (arXiv 2605.18810).
    """

    def weigh(log_probs_AK: torch.Tensor, supervised_AK: torch.Tensor) -> torch.Tensor:
        smoothed = ((1 - alpha) * log_probs_AK.exp() + alpha) * supervised_AK
        reach = smoothed.cumprod(dim=-1)
        return reach.flip(-1).cumsum(dim=-1).flip(-1) * supervised_AK

    return weigh


@dataclass(frozen=True, slots=True)
class BlockLoss:
    """What a batch of blocks came to.

    Args:
        total: Σ(w · ce), differentiable with respect to the hidden states.
        weight: Σw, without gradient; totals and weights add up over parts of a batch.
        correct: (A, K) whether the likeliest token is the label; False where not supervised.
        supervised: (A, K) bool.
    """

    total: torch.Tensor
    weight: torch.Tensor
    correct: torch.Tensor
    supervised: torch.Tensor

    @property
    def loss(self) -> torch.Tensor:
        """Σ(w · ce) / Σw."""
        return self.total / self.weight.clamp(min=1e-12)


def block_loss(
    hidden_AKD: torch.Tensor,
    head_VD: torch.Tensor,
    labels_AK: torch.Tensor,
    weigh: Weigh,
    *,
    chunk_blocks: int = 64,
) -> BlockLoss:
    """Returns the weighted cross-entropy of blocks; peak memory is one chunk's logits, twice.

    Args:
        hidden_AKD: drafter output at drafted slots, normed.
        head_VD: frozen head rows of the draft vocabulary.
        labels_AK: index among those rows, or `IGNORED`.
        weigh: position weights; they carry no gradient.
        chunk_blocks: blocks whose logits exist at once.
    """
    total, weight, correct = _HeadCrossEntropy.apply(hidden_AKD, head_VD, labels_AK, weigh, chunk_blocks)  # type: ignore
    return BlockLoss(total, weight, correct, labels_AK != IGNORED)


class _HeadCrossEntropy(torch.autograd.Function):
    """The head is frozen, so the gradient of each chunk is known as soon as its logits are; nothing is kept."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, head: torch.Tensor, labels: torch.Tensor, weigh: Weigh, chunk: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        total = hidden.new_zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32))
        weight_sum = torch.zeros_like(total)
        gradient, correct = torch.empty_like(hidden), torch.zeros_like(labels, dtype=torch.bool)
        for start in range(0, hidden.shape[0], chunk):
            part = slice(start, start + chunk)
            logits = (hidden[part].flatten(0, 1) @ head.T).to(total.dtype)
            gold = labels[part].clamp(min=0).flatten()[:, None]
            supervised = labels[part] != IGNORED
            correct[part] = (logits.argmax(dim=-1).view_as(supervised) == labels[part]) & supervised
            log_probs = logits.gather(1, gold) - torch.logsumexp(logits, dim=-1, keepdim=True)
            weights = weigh(log_probs.view_as(supervised), supervised)
            total -= (weights * log_probs.view_as(supervised)).sum()
            weight_sum += weights.sum()
            if ctx.needs_input_grad[0]:
                rows = weights.flatten()[:, None]
                slope = logits.softmax(dim=-1).mul_(rows).scatter_add_(1, gold, -rows)
                gradient[part] = (slope.to(head.dtype) @ head).view_as(hidden[part])
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(weight_sum, correct)
        return total, weight_sum, correct

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * grads[0].to(gradient.dtype), None, None, None, None
