"""Documents → blocks: which anchors, in what order, with which labels.

Everything is a function of (seed, epoch) or (seed, step), so a resumed run draws what an uninterrupted one would.

Shape suffixes: A anchors, K drafts, C likeliest tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from paceline.core.errors import ConfigError
from paceline.drafter.base import Blocks
from paceline.train.data.features import ABSENT, Document
from paceline.train.data.prefill import hidden_of
from paceline.train.losses import IGNORED, SoftLabels


@dataclass(frozen=True, slots=True)
class DraftVocabulary:
    """The head's rows that training scores: the tokens responses really use.

    Args:
        token_ids: (V',) kept token ids, ascending.
        index: (V,) position of each token among them, `IGNORED` where it is not kept.
    """

    token_ids: torch.Tensor
    index: torch.Tensor

    @classmethod
    def covering(
        cls,
        documents: Sequence[Document],
        vocab_size: int,
        max_tokens: int | None,
        learned: torch.Tensor | None = None,
    ) -> DraftVocabulary:
        """Returns the `max_tokens` commonest response tokens (all of the vocabulary for `None`). Pure.

        Args:
            learned: tokens that come before all others: those that the drafter has learned to draft before.
        """
        kept = torch.arange(vocab_size)
        if max_tokens is not None and max_tokens < vocab_size:
            counts = torch.zeros(vocab_size, dtype=torch.long)
            for document in documents:
                answers = document.token_ids[document.supervised]
                counts += torch.bincount(answers, minlength=vocab_size)
            if learned is not None:
                counts[learned] += counts.sum() + 1
            kept = counts.argsort(descending=True, stable=True)[:max_tokens].sort().values
        index = torch.full((vocab_size,), IGNORED)
        index[kept] = torch.arange(len(kept))
        return cls(kept, index)


@dataclass(frozen=True, slots=True)
class Cursor:
    """Where in the stream of documents the next batch begins."""

    epoch: int = 0
    index: int = 0


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """Blocks of one step.

    Args:
        documents: input of `NeuralDrafter.forward_blocks`.
        labels: (A, K) draft-vocabulary index of the token at each drafted slot, `IGNORED` behind the end of the
            anchor's answer or outside the vocabulary.
        soft: what the target said of these slots, in draft-vocabulary indices, where the documents know it.
    """

    documents: list[Blocks]
    labels: torch.Tensor
    soft: SoftLabels | None = None

    @property
    def num_blocks(self) -> int:
        """Blocks in the batch."""
        return self.labels.shape[0]


def generator(*key: int) -> torch.Generator:
    """Returns a random generator keyed by integers. Pure."""
    state = 0
    for part in key:
        state = (state * 1_000_003 + part + 1) % (2**63 - 1)
    return torch.Generator().manual_seed(state)


class BlockSampler:
    """Draws batches of blocks from documents.

    Args:
        documents: where from; those without a supervised pair of tokens are left out.
        like: a tensor of the dtype and on the device that batches shall have.
        vocabulary: see `DraftVocabulary`.
        blocks_per_step: blocks of a batch.
        anchors_per_document: most anchors of one document in a batch.
        seed: key of all draws.
    """

    def __init__(
        self,
        documents: Sequence[Document],
        like: torch.Tensor,
        vocabulary: DraftVocabulary,
        *,
        blocks_per_step: int,
        anchors_per_document: int,
        seed: int,
    ) -> None:
        self.documents = [d for d in documents if num_anchors(d) > 0]
        if not self.documents:
            raise ConfigError(
                "training data: expected documents with responses of at least two tokens, got none"
            )
        kinds = {0 if d.top_ids is None else d.top_ids.shape[1] for d in self.documents}
        if len(kinds) > 1:
            raise ConfigError(
                f"training data: expected documents with equally many likeliest tokens, got {sorted(kinds)}; "
                "hint: one value of regenerate.top_log_probs"
            )
        self._device, self._dtype, self._vocabulary = like.device, like.dtype, vocabulary
        self._blocks_per_step, self._per_document, self._seed = blocks_per_step, anchors_per_document, seed
        self._order: tuple[int, list[int]] = (-1, [])

    def next(self, cursor: Cursor, step: int, num_drafts: int) -> tuple[TrainBatch, Cursor]:
        """Returns the batch of `step` and the cursor behind it. Pure but for a cached shuffle."""
        rng = generator(self._seed, step)
        chosen: list[tuple[Document, torch.Tensor]] = []
        missing = self._blocks_per_step
        while missing > 0:
            document = self.documents[self._shuffled(cursor.epoch)[cursor.index]]
            anchors = draw_anchors(document, min(missing, self._per_document), rng)
            chosen.append((document, anchors))
            missing -= len(anchors)
            cursor = replace(cursor, index=cursor.index + 1)
            if cursor.index == len(self.documents):
                cursor = Cursor(cursor.epoch + 1, 0)
        return self.assemble(chosen, num_drafts), cursor

    def assemble(self, chosen: Sequence[tuple[Document, torch.Tensor]], num_drafts: int) -> TrainBatch:
        """Returns the batch of given anchors; an empty one of none."""
        blocks, labels, soft = [], [torch.empty(0, num_drafts, dtype=torch.long)], list[SoftLabels]()
        hidden = hidden_of([document for document, _ in chosen], self.documents[0])
        for (document, anchors), rows in zip(chosen, hidden, strict=True):
            last = int(anchors.max())
            positions = anchors[:, None] + torch.arange(num_drafts + 1)
            inside = positions < len(document.token_ids)
            positions = positions.clamp(max=len(document.token_ids) - 1)
            ids = document.token_ids[positions]
            answered = (inside & document.supervised[positions]).cumprod(dim=1)[:, 1:] == 1
            blocks.append(
                Blocks(
                    hidden=rows[:last].to(self._device, self._dtype),
                    token_ids=document.token_ids[:last].to(self._device),
                    anchors=anchors.to(self._device),
                    block_ids=ids.to(self._device),
                )
            )
            labels.append(torch.where(answered, self._vocabulary.index[ids[:, 1:]], IGNORED))
            soft += self._soft(document, positions[:, 1:], answered)
        return TrainBatch(blocks, torch.cat(labels).to(self._device), self._joined(soft))

    def _soft(
        self, document: Document, positions_AK: torch.Tensor, answered_AK: torch.Tensor
    ) -> list[SoftLabels]:
        """Returns what the target said of slots, in a list; an empty one where the document does not know it."""
        if document.top_ids is None or document.top_log_probs is None:
            return []
        top_AKC = document.top_ids[positions_AK].long()
        said_AKC = answered_AK[..., None] & (top_AKC != ABSENT)
        ids_AKC = torch.where(said_AKC, self._vocabulary.index[top_AKC.clamp(min=0)], IGNORED)
        return [SoftLabels(ids_AKC, document.top_log_probs[positions_AK].to(self._dtype))]

    def _joined(self, soft: Sequence[SoftLabels]) -> SoftLabels | None:
        if not soft:
            return None
        ids, log_probs = torch.cat([s.ids for s in soft]), torch.cat([s.log_probs for s in soft])
        return SoftLabels(ids.to(self._device), log_probs.to(self._device))

    def _shuffled(self, epoch: int) -> list[int]:
        if self._order[0] != epoch:
            order = torch.randperm(len(self.documents), generator=generator(self._seed, -epoch - 2)).tolist()
            self._order = (epoch, order)
        return self._order[1]


def num_anchors(document: Document) -> int:
    """Returns how many tokens of answers can be anchors: all that another token of the same answer follows. Pure."""
    return len(_anchors(document))


def draw_anchors(document: Document, count: int, rng: torch.Generator) -> torch.Tensor:
    """Returns up to `count` distinct anchor positions of a document, ascending. Mutates: the generator."""
    positions = _anchors(document)
    return positions[torch.randperm(len(positions), generator=rng)[:count]].sort().values


def _anchors(document: Document) -> torch.Tensor:
    return (document.supervised[:-1] & document.supervised[1:]).nonzero().flatten()
