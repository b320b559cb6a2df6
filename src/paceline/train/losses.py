"""Losses of drafted slots: cross-entropy through a head, in chunks, with position weights; and a selector's choice.

Shape suffixes: A anchors, K drafts, D hidden, V draft vocabulary (the head's rows), C candidates of a slot.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch.utils.checkpoint import checkpoint

IGNORED = -1
"""Label of a slot that is not supervised."""

# Position weights ----------------------------------------------------------------------------------------------------

Weigh = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(log-probabilities of the labels (A, K), supervised (A, K)) → weights (A, K)."""


def uniform_weights(log_probs_AK: torch.Tensor, supervised_AK: torch.Tensor) -> torch.Tensor:
    """Returns 1 on supervised slots."""
    return supervised_AK.to(log_probs_AK.dtype)


def exponential_weights(decay: float) -> Weigh:
    """Returns w_k = exp(-(k - 1) / decay) on supervised slots. Source: DFlash (arXiv 2602.06036) §4."""

    def weigh(log_probs_AK: torch.Tensor, supervised_AK: torch.Tensor) -> torch.Tensor:
        slots = torch.arange(log_probs_AK.shape[1], dtype=log_probs_AK.dtype, device=log_probs_AK.device)
        return torch.exp(-slots / decay) * supervised_AK

    return weigh


def dpace_weights(alpha: float) -> Weigh:
    """Returns weights by what a slot adds to the expected accepted length.

    With q_k the drafter's probability of label k, s_k = (1 - alpha) q_k + alpha and c_k = s_1 ⋯ s_k, slot k weighs
    c_k + … + c_K: how much of the accepted length hangs on it. The label is the target's own token, which is what a
    draft must equal to stand; so it is with soft labels too.

    Source: D-PACE (arXiv 2605.18810).
    """

    def weigh(log_probs_AK: torch.Tensor, supervised_AK: torch.Tensor) -> torch.Tensor:
        smoothed = ((1 - alpha) * log_probs_AK.exp() + alpha) * supervised_AK
        reach = smoothed.cumprod(dim=-1)
        return reach.flip(-1).cumsum(dim=-1).flip(-1) * supervised_AK

    return weigh


def position_weights(name: str, *, alpha: float, decay: float) -> Weigh:
    """Returns the weights called "dpace" (with `alpha`), "exponential" (with `decay`) or "uniform"."""
    return {
        "dpace": dpace_weights(alpha),
        "exponential": exponential_weights(decay),
        "uniform": uniform_weights,
    }[name]


# Cross-entropy -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SoftLabels:
    """What the target itself said of the drafted slots: its likeliest tokens.

    The cross-entropy is against their distribution cut to the draft vocabulary and renormalised; where nothing of it
    is left, against the hard label.

    Args:
        ids: (A, K, C) index among the head's rows, distinct within a slot, or `IGNORED`.
        log_probs: (A, K, C) the target's log-probabilities, of any float dtype.
    """

    ids: torch.Tensor
    log_probs: torch.Tensor

    def part(self, blocks: slice) -> SoftLabels:
        """Returns those of some blocks."""
        return SoftLabels(self.ids[blocks], self.log_probs[blocks])


@dataclass(frozen=True, slots=True)
class BlockLoss:
    """What a batch of blocks came to.

    Args:
        total: Σ(w · ce), differentiable with respect to the hidden states, and to the head where it is trained.
        weights: (A, K) w, without gradient.
        correct: (A, K) whether the likeliest token is the label; False where not supervised.
        supervised: (A, K) bool.
        top: (A, K, C) the likeliest rows of the head, falling; `None` where none were asked for.
    """

    total: torch.Tensor
    weights: torch.Tensor
    correct: torch.Tensor
    supervised: torch.Tensor
    top: torch.Tensor | None = None

    @property
    def weight(self) -> torch.Tensor:
        """Σw; totals and weights add up over parts of a batch."""
        return self.weights.sum()

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
    soft: SoftLabels | None = None,
    top_k: int = 0,
) -> BlockLoss:
    """Returns the weighted cross-entropy of blocks; peak memory is one chunk's logits, twice.

    Args:
        hidden_AKD: drafter output at drafted slots, normed.
        head_VD: head rows of the draft vocabulary; logits are computed in its dtype, the loss in float32 or wider.
        labels_AK: index among those rows, or `IGNORED`.
        weigh: position weights; they carry no gradient.
        chunk_blocks: blocks whose logits exist at once.
        soft: the target's own distributions, in place of one-hot labels; `labels_AK` say what is supervised all the
            same.
        top_k: how many of each slot's likeliest rows to return.
    """
    if not torch.is_grad_enabled():
        hidden_AKD, head_VD = hidden_AKD.detach(), head_VD.detach()
    total, weights, correct, top = _HeadCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden_AKD,
        head_VD,
        labels_AK,
        _distributions(labels_AK, soft),
        weigh,
        chunk_blocks,
        min(top_k, head_VD.shape[0]),
    )
    return BlockLoss(total, weights, correct, labels_AK != IGNORED, top if top_k else None)


def _distributions(labels_AK: torch.Tensor, soft: SoftLabels | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns row ids and probabilities (A, K, C) of what each slot shall say; C is 1 for hard labels. Pure."""
    gold = labels_AK.clamp(min=0)[..., None]
    if soft is None:
        return gold, torch.ones_like(gold, dtype=torch.float64)
    known = (soft.ids != IGNORED) & (soft.log_probs > -torch.inf)
    log_probs = soft.log_probs.double().masked_fill(~known, -torch.inf)
    probs = log_probs.softmax(dim=-1).nan_to_num(0.0)  # NaN where no candidate is known
    nothing = ~known.any(dim=-1)
    ids = soft.ids.long().clamp(min=0)
    ids[..., 0] = torch.where(nothing, gold[..., 0], ids[..., 0])
    probs[..., 0] = torch.where(nothing, 1.0, probs[..., 0])
    return ids, probs


class _HeadCrossEntropy(torch.autograd.Function):
    """The gradients of each chunk are known as soon as its logits are; no logits are kept."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        head: torch.Tensor,
        labels: torch.Tensor,
        distributions: tuple[torch.Tensor, torch.Tensor],
        weigh: Weigh,
        chunk: int,
        top_k: int,
    ) -> tuple[torch.Tensor, ...]:
        total = hidden.new_zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32))
        weights = torch.zeros_like(labels, dtype=total.dtype)
        correct, top = torch.zeros_like(labels, dtype=torch.bool), labels.new_zeros(*labels.shape, top_k)
        ids, probs = distributions
        to_hidden, to_head = ctx.needs_input_grad[:2]
        hidden_slope = torch.zeros_like(hidden) if to_hidden else None
        head_slope = torch.zeros_like(head, dtype=total.dtype) if to_head else None
        for start in range(0, hidden.shape[0], chunk):
            part = slice(start, start + chunk)
            states = hidden[part].flatten(0, 1).to(head.dtype)
            logits = (states @ head.T).to(total.dtype)
            supervised = labels[part] != IGNORED
            correct[part] = (logits.argmax(dim=-1).view_as(supervised) == labels[part]) & supervised
            if top_k:
                top[part] = logits.topk(top_k, dim=-1).indices.view(*supervised.shape, top_k)
            log_norm = torch.logsumexp(logits, dim=-1, keepdim=True)
            gold = logits.gather(1, labels[part].clamp(min=0).flatten()[:, None]) - log_norm
            weights[part] = weigh(gold.view_as(supervised), supervised)
            w = weights[part].flatten()[:, None]
            rows, p = ids[part].flatten(0, 1), probs[part].flatten(0, 1).to(total.dtype)
            total -= (w * p * (logits.gather(1, rows) - log_norm)).sum()
            if not (to_hidden or to_head):
                continue
            slope = (logits - log_norm).exp_().mul_(w).scatter_add_(1, rows, -w * p).to(head.dtype)
            if hidden_slope is not None:
                hidden_slope[part] = (slope @ head).view_as(hidden[part])
            if head_slope is not None:
                head_slope += slope.T @ states
        ctx.save_for_backward(hidden_slope, head_slope)
        ctx.mark_non_differentiable(weights, correct, top)
        return total, weights, correct, top

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        slopes = (None if slope is None else slope * grads[0].to(slope.dtype) for slope in ctx.saved_tensors)
        return *slopes, None, None, None, None, None


# The selector --------------------------------------------------------------------------------------------------------


@runtime_checkable
class Selector(Protocol):
    """A drafter that chooses among each slot's likeliest tokens, knowing the token before."""

    def rescore(
        self,
        states_AKD: torch.Tensor,
        candidate_ids_AKC: torch.Tensor,
        unary_AKC: torch.Tensor,
        predecessor_ids_AK: torch.Tensor,
    ) -> torch.Tensor:
        """Returns scores (A, K, C) of candidates from their logits and the tokens before. Differentiable."""


def with_selector(
    loss: BlockLoss, scores_AKC: torch.Tensor, rows_AKC: torch.Tensor, labels_AK: torch.Tensor, scale: float
) -> BlockLoss:
    """Returns the loss plus `scale` times the cross-entropy among candidates; `correct` is the selector's. Pure.

    A slot weighs in the second what it weighs in the first, so that one sum of weights serves both.

    Args:
        scores_AKC: of the candidates.
        rows_AKC: the candidates, as from `candidates_with`.
        labels_AK: as in `block_loss`.
    """
    assert loss.top is not None
    gold = labels_AK.clamp(min=0)[..., None]
    place = (rows_AKC == gold).int().argmax(dim=-1, keepdim=True)
    log_probs = scores_AKC.to(loss.total.dtype).log_softmax(dim=-1).gather(-1, place)[..., 0]
    # a label that was not among the candidates cannot be chosen when drafting, however well it scores here
    is_candidate = (loss.top == gold).any(dim=-1)
    correct = (scores_AKC.argmax(dim=-1) == place[..., 0]) & is_candidate & loss.supervised
    return replace(loss, total=loss.total - scale * (loss.weights * log_probs).sum(), correct=correct)


def candidates_with(top_AKC: torch.Tensor, labels_AK: torch.Tensor) -> torch.Tensor:
    """Returns the candidates (rows of the head) with the label in the last place where it is missing. Pure.

    Source: speculators 0.9.0 does the same; leaving such slots out would teach the selector nothing of hard slots.
    """
    missing = ~(top_AKC == labels_AK[..., None]).any(dim=-1) & (labels_AK != IGNORED)
    rows = top_AKC.clone()
    rows[..., -1] = torch.where(missing, labels_AK, rows[..., -1])
    return rows


def selector_scores(
    selector: Selector,
    hidden_AKD: torch.Tensor,
    head_VD: torch.Tensor,
    rows_AKC: torch.Tensor,
    token_ids_V: torch.Tensor,
    predecessor_ids_AK: torch.Tensor,
    chunk_blocks: int = 64,
) -> torch.Tensor:
    """Returns the selector's scores (A, K, C) of candidates. Differentiable; head rows of one chunk exist at a time.

    Args:
        rows_AKC: candidates as rows of the head.
        token_ids_V: the head's rows' token ids.
        predecessor_ids_AK: the true token before each slot: where the block up to it was accepted, drafting has chosen
            the same.
    """

    def score(states: torch.Tensor, rows: torch.Tensor, predecessors: torch.Tensor) -> torch.Tensor:
        unary = torch.einsum("akd,akcd->akc", states, head_VD[rows].to(states.dtype))
        return selector.rescore(states, token_ids_V[rows], unary, predecessors)

    chunks = zip(*(t.split(chunk_blocks) for t in (hidden_AKD, rows_AKC, predecessor_ids_AK)), strict=True)
    return torch.cat([checkpoint(score, *c, use_reentrant=False, preserve_rng_state=False) for c in chunks])
