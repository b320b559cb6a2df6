"""Drafters without weights that draft by rule: right, wrong, random, in trees."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from paceline.core.sampling import Law
from paceline.core.types import EMPTY_PROPOSAL, Proposal
from paceline.target.base import Target, VerifyRows


@dataclass(slots=True)
class Memory:
    """The context of a scripted drafter: which sequence it is, and every row it was shown."""

    number: int
    rows: list[torch.Tensor] = field(default_factory=list)
    length: int = 0

    @property
    def hidden(self) -> torch.Tensor:
        """All injected rows (length, taps · D)."""
        return torch.cat(self.rows)


class ScriptedDrafter:
    """A drafter without weights; `guess` says what it drafts.

    Args:
        block_size: slots of a block, anchor included.
        target_layer_ids: layers to tap; their rows are remembered in `memories`, in admission order.
    """

    def __init__(self, block_size: int, target_layer_ids: tuple[int, ...] = ()) -> None:
        self.block_size, self.target_layer_ids = block_size, target_layer_ids
        self.memories: list[Memory] = []

    def open(self, capacity: int) -> Memory:
        """Returns an empty memory, numbered by admission."""
        self.memories.append(Memory(len(self.memories)))
        return self.memories[-1]

    def inject(
        self, contexts: Sequence[Memory], hidden: Sequence[torch.Tensor], tokens: Sequence[Sequence[int]]
    ) -> None:
        """Remembers rows."""
        for memory, rows in zip(contexts, hidden, strict=True):
            memory.rows.append(rows.clone())
            memory.length += rows.shape[0]

    def draft(
        self,
        anchors: Sequence[int],
        contexts: Sequence[Memory],
        num_draft_tokens: int,
        laws: Sequence[Law] | None = None,
    ) -> list[Proposal]:
        """Returns one guess for each sequence."""
        return [self.guess(memory, num_draft_tokens) for memory in contexts]

    def guess(self, memory: Memory, num_draft_tokens: int) -> Proposal:
        """Returns a proposal behind the anchor, which sits at position `memory.length`."""
        raise NotImplementedError


class RandomDrafter(ScriptedDrafter):
    """Drafts chains of random tokens and random length, none included."""

    def __init__(self, block_size: int, vocab_size: int, seed: int = 0) -> None:
        super().__init__(block_size)
        self._vocab_size, self._rng = vocab_size, random.Random(seed)

    def guess(self, memory: Memory, num_draft_tokens: int) -> Proposal:
        """Returns random tokens."""
        length = self._rng.randint(0, num_draft_tokens)
        return Proposal.chain([self._rng.randrange(self._vocab_size) for _ in range(length)])


class ConstantDrafter(ScriptedDrafter):
    """Drafts one token over and over: the end of text, or the mask."""

    def __init__(self, block_size: int, token: int) -> None:
        super().__init__(block_size)
        self._token = token

    def guess(self, memory: Memory, num_draft_tokens: int) -> Proposal:
        """Returns the token `num_draft_tokens` times."""
        return Proposal.chain([self._token] * num_draft_tokens)


class OracleDrafter(ScriptedDrafter):
    """Drafts the known text, as far as it is known.

    Args:
        texts: whole texts in admission order, prompts included.
    """

    def __init__(
        self, block_size: int, texts: Sequence[Sequence[int]], target_layer_ids: tuple[int, ...] = ()
    ) -> None:
        super().__init__(block_size, target_layer_ids)
        self._texts = texts

    def guess(self, memory: Memory, num_draft_tokens: int) -> Proposal:
        """Returns what follows the anchor."""
        return Proposal.chain(tuple(self._following(memory)[:num_draft_tokens]))

    def _following(self, memory: Memory) -> Sequence[int]:
        return self._texts[memory.number][memory.length + 1 :] if memory.number < len(self._texts) else ()


class AlwaysWrongDrafter(OracleDrafter):
    """Drafts full blocks in which no token is the known one."""

    def __init__(self, block_size: int, texts: Sequence[Sequence[int]], vocab_size: int) -> None:
        super().__init__(block_size, texts)
        self._vocab_size = vocab_size

    def guess(self, memory: Memory, num_draft_tokens: int) -> Proposal:
        """Returns the neighbours of the known tokens."""
        known = [*self._following(memory)[:num_draft_tokens], *[0] * num_draft_tokens][:num_draft_tokens]
        return Proposal.chain([(token + 1) % self._vocab_size for token in known])


class TreeDrafter(OracleDrafter):
    """Drafts random trees, twins included, in which the known text is hidden more often than not."""

    def __init__(
        self,
        block_size: int,
        texts: Sequence[Sequence[int]],
        vocab_size: int,
        *,
        target_layer_ids: tuple[int, ...] = (),
        seed: int = 0,
    ) -> None:
        super().__init__(block_size, texts, target_layer_ids)
        self._vocab_size, self._rng = vocab_size, random.Random(seed)

    def guess(self, memory: Memory, num_draft_tokens: int) -> Proposal:
        """Returns a tree of at most `num_draft_tokens` nodes."""
        known, rng = self._following(memory), self._rng
        tokens: list[int] = []
        parents: list[int] = []
        right = {0: 0}  # row → depth, where the path to the row is the known text
        for row in range(1, rng.randint(0, num_draft_tokens) + 1):
            parent = max(right) if rng.random() < 0.6 else rng.randrange(row)
            depth = right.get(parent)
            if depth is not None and depth < len(known) and rng.random() < 0.7:
                tokens.append(known[depth])
                right[row] = depth + 1
            else:
                tokens.append(rng.randrange(self._vocab_size))
            parents.append(parent)
        return Proposal(tuple(tokens), tuple(parents))


class BigramDrafter(ScriptedDrafter):
    """Drafts what the target says most often behind a token alone: right often enough to be accepted now and then.

    Args:
        target: who is asked for the table.
        block_size: slots, anchor included.
        is_tree: draft two children of the anchor, the second with a child of its own.
    """

    def __init__(self, target: Target, block_size: int = 4, *, is_tree: bool = False) -> None:
        super().__init__(block_size)
        self.table, self.is_tree = (
            [_likeliest(target, token) for token in range(target.spec.vocab_size)],
            is_tree,
        )

    def draft(
        self,
        anchors: Sequence[int],
        contexts: Sequence[Memory],
        num_draft_tokens: int,
        laws: Sequence[Law] | None = None,
    ) -> list[Proposal]:
        """Returns the table's path from each anchor."""
        return [self._path(anchor, num_draft_tokens) for anchor in anchors]

    def _path(self, anchor: int, length: int) -> Proposal:
        path = [self.table[anchor][0]]
        while len(path) < length:
            path.append(self.table[path[-1]][0])
        if not self.is_tree or length < 3:
            return Proposal.chain(path)
        second = self.table[anchor][1]
        return Proposal((path[0], second, self.table[second][0]), (0, 0, 2))


def _likeliest(target: Target, token: int) -> list[int]:
    session = target.open(1)
    (output,) = target.verify([VerifyRows(session, [token], EMPTY_PROPOSAL)])
    session.close()
    best: list[int] = output.logits[0].topk(2).indices.tolist()
    return best
