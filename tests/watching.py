"""Support of tests that watch a drafter and a target at work: what was drafted, by whom, and when to fail."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from paceline.core.params import SamplingParams
from paceline.core.types import Proposal, Request
from paceline.drafter.base import Drafter
from paceline.drafter.config import FULL, SLIDING
from paceline.drafter.dflash import DFlash
from paceline.target.base import TargetOutput, VerifyRows
from paceline.target.native import NativeTarget
from paceline.testing import tiny_drafter

BLOCK = 6
TAPS = (0, 1)
Drafts = dict[int, tuple[tuple[int, ...], tuple[int, ...]]]
"""Drafted tokens and their parents by the anchor's position."""


def request(name: str, prompt: Sequence[int], max_new_tokens: int = 12, **options: Any) -> Request:
    params = SamplingParams(max_new_tokens, ignore_eos=True, **options)
    return Request(name, tuple(prompt), params)


def tokens(length: int, seed: int = 0, vocab_size: int = 61) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(vocab_size) for _ in range(length))


class Watched:
    """Notes what another drafter drafts, by sequence in the order of admission."""

    def __init__(self, drafter: Drafter) -> None:
        self.inner = drafter
        self.block_size, self.target_layer_ids = drafter.block_size, drafter.target_layer_ids
        self.contexts: list[Any] = []
        self.drafts: list[Drafts] = []

    def open(self, capacity: int) -> Any:
        self.contexts.append(self.inner.open(capacity))
        self.drafts.append({})
        return self.contexts[-1]

    def inject(
        self, contexts: Sequence[Any], hidden: Sequence[torch.Tensor], tokens: Sequence[Sequence[int]]
    ) -> None:
        self.inner.inject(contexts, hidden, tokens)

    def draft(
        self, anchors: Sequence[int], contexts: Sequence[Any], num_draft_tokens: int, *law: Any
    ) -> list[Proposal]:
        proposals = self.inner.draft(anchors, contexts, num_draft_tokens, *law)
        for context, proposal in zip(contexts, proposals, strict=True):
            number = next(n for n, known in enumerate(self.contexts) if known is context)
            self.drafts[number][context.length] = (proposal.tokens, proposal.parents)
        return proposals


WINDOWS: dict[str, dict[str, Any]] = {
    "full": {},
    "window 1": {"layer_types": (FULL, SLIDING), "sliding_window": 1, "is_causal": False},
    "window of a block": {"layer_types": (SLIDING, FULL), "sliding_window": BLOCK},
    "window 30": {"layer_types": (SLIDING, SLIDING), "sliding_window": 30},
    "window 514": {"layer_types": (SLIDING, SLIDING), "sliding_window": 514},
    "window 700, not causal": {"layer_types": (SLIDING, FULL), "sliding_window": 700, "is_causal": False},
}


def prepared(target: NativeTarget, windows: str = "full", **options: Any) -> DFlash:
    """A drafter that was trained for no more than 16 positions, if its config were to be believed."""
    drafter = tiny_drafter(target, **{"block_size": BLOCK} | WINDOWS[windows] | options)
    drafter.config = replace(drafter.config, max_positions=16)
    return drafter


class Counting:
    """Counts a target's passes; raises in those it is told to."""

    def __init__(self, target: NativeTarget, patch: pytest.MonkeyPatch, raising: Sequence[int] = ()) -> None:
        self.num_passes, self._verify, self._raising = 0, target.verify, raising
        patch.setattr(target, "verify", self._count)

    def _count(self, batch: Sequence[VerifyRows]) -> list[TargetOutput]:
        self.num_passes += 1
        if self.num_passes in self._raising:
            raise RuntimeError("the target stumbled")
        return self._verify(batch)


def all_slots_are_free(target: NativeTarget) -> bool:
    return sorted(target._free) == list(range(target._cache[0][0].shape[0]))
