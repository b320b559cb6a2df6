"""Documents → blocks: which anchors, in what order, with which labels.

Everything is a function of (seed, epoch) or (seed, step), so a resumed run draws what an uninterrupted one would.

Shape suffixes: A anchors, K drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from paceline.core.errors import ConfigError
from paceline.drafter.base import Blocks
from paceline.train.features import Document

IGNORED = -1
"""Label of a slot that is not supervised."""


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
        cls, documents: Sequence[Document], vocab_size: int, max_tokens: int | None
    ) -> DraftVocabulary:
        """Returns the `max_tokens` commonest response tokens (all of the vocabulary for `None`). Pure."""
        kept = torch.arange(vocab_size)
        if max_tokens is not None and max_tokens < vocab_size:
            counts = torch.zeros(vocab_size, dtype=torch.long)
            for document in documents:
                response = document.token_ids[document.num_prompt_tokens :]
                counts += torch.bincount(response, minlength=vocab_size)
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
        labels: (A, K) draft-vocabulary index of the token at each drafted slot, `IGNORED` beyond the document's end
            or outside the vocabulary.
    """

    documents: list[Blocks]
    labels: torch.Tensor

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
        """Returns the batch of given anchors."""
        blocks, labels = [], []
        for document, anchors in chosen:
            last = int(anchors.max())
            positions = anchors[:, None] + torch.arange(num_drafts + 1)
            inside = positions < len(document.token_ids)
            ids = document.token_ids[positions.clamp(max=len(document.token_ids) - 1)]
            blocks.append(
                Blocks(
                    hidden=document.hidden[:last].to(self._device, self._dtype),
                    token_ids=document.token_ids[:last].to(self._device),
                    anchors=anchors.to(self._device),
                    block_ids=ids.to(self._device),
                )
            )
            labels.append(torch.where(inside, self._vocabulary.index[ids], IGNORED)[:, 1:])
        return TrainBatch(blocks, torch.cat(labels).to(self._device))

    def _shuffled(self, epoch: int) -> list[int]:
        if self._order[0] != epoch:
            order = torch.randperm(len(self.documents), generator=generator(self._seed, -epoch - 2)).tolist()
            self._order = (epoch, order)
        return self._order[1]


def num_anchors(document: Document) -> int:
    """Returns how many response tokens can be anchors: all that another token follows. Pure."""
    return max(0, len(document.token_ids) - 1 - document.num_prompt_tokens)


def draw_anchors(document: Document, count: int, rng: torch.Generator) -> torch.Tensor:
    """Returns up to `count` distinct anchor positions of a document, ascending. Mutates: the generator."""
    positions = torch.randperm(num_anchors(document), generator=rng)[:count]
    return positions.sort().values + document.num_prompt_tokens
