"""What a batch costs a drafter: one forward pass, its cross-entropy, and the selector's where it has one."""

from __future__ import annotations

import torch

from paceline.core.errors import ConfigError
from paceline.drafter.base import NeuralDrafter
from paceline.drafter.config import DrafterConfig
from paceline.train.config import OptimConfig
from paceline.train.data.batch import TrainBatch
from paceline.train.losses import (
    BlockLoss,
    Selector,
    SoftLabels,
    block_loss,
    candidates_with,
    position_weights,
    selector_scores,
    with_selector,
)


class Objective:
    """The loss of batches, a function of the drafter's weights.

    Args:
        drafter: whose loss it is.
        embed_weight, head_weight: (V, D) the target's frozen embedding and head.
        token_ids: (V',) the tokens that are scored; labels of batches are places among them.
        settings: see `OptimConfig`.
    """

    def __init__(
        self,
        drafter: NeuralDrafter,
        embed_weight: torch.Tensor,
        head_weight: torch.Tensor,
        token_ids: torch.Tensor,
        settings: OptimConfig,
    ) -> None:
        self._drafter, self._embed_weight, self._head_weight = drafter, embed_weight, head_weight
        self._token_ids, self._settings = token_ids.to(head_weight.device), settings
        self._low = torch.bfloat16 if settings.compute_dtype == "bfloat16" else None
        self._weigh = position_weights(settings.loss, alpha=settings.dpace_alpha, decay=settings.decay)
        self._selector, self._top_k = None, 0
        if isinstance(drafter, Selector) and isinstance(drafter.config, DrafterConfig):
            self._selector, self._top_k = drafter, drafter.config.selector_top_k

    def __call__(self, batch: TrainBatch) -> BlockLoss:
        """Returns the batch's loss; where the drafter has a selector, `correct` speaks of its choices."""
        settings, embed, labels = self._settings, self._embed_weight, batch.labels
        with torch.autocast(embed.device.type, self._low, enabled=self._low is not None):
            hidden = self._drafter.forward_blocks(batch.documents, embed, labels.shape[1] + 1)
        hidden = hidden.to(embed.dtype)
        head = self._drafter.head(self._head_weight, self._token_ids).to(self._low or embed.dtype)
        loss = block_loss(
            hidden,
            head,
            labels,
            self._weigh,
            chunk_blocks=settings.chunk_blocks,
            soft=self._soft_labels(batch),
            top_k=self._top_k,
        )
        if self._selector is None or loss.top is None:
            return loss
        candidates = candidates_with(loss.top, labels)
        before = torch.cat([d.block_ids for d in batch.documents])[:, :-1]
        scores = selector_scores(
            self._selector, hidden, head, candidates, self._token_ids, before, settings.chunk_blocks
        )
        return with_selector(loss, scores, candidates, labels, settings.selector_weight)

    def _soft_labels(self, batch: TrainBatch) -> SoftLabels | None:
        if self._settings.labels == "tokens":
            return None
        if batch.soft is None:
            raise ConfigError(
                "train.labels: 'distribution' needs what else the target might have said, which these documents do not "
                "hold; hint: regenerate.top_log_probs = 16, in another `out`"
            )
        return batch.soft
