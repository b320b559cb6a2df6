"""Recorded drafts are those of unrecorded passes, and contexts keep what they hold wherever they lie."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from paceline.core.types import Proposal
from paceline.drafter.config import FULL, SLIDING
from paceline.drafter.context import ContextKV
from paceline.drafter.dflash import DFlash
from paceline.drafter.slots import SlotContext
from paceline.engine.graphs import Eager, Graphs
from paceline.target.native import NativeTarget
from paceline.testing import tiny_drafter, tiny_target

DRAFTERS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"is_causal": True},
    "sliding": {"layer_types": (SLIDING, FULL), "sliding_window": 7},
    "dflash2": {"variant": "dflash2"},
}


def drafters(target: NativeTarget, kind: str) -> tuple[DFlash, DFlash, Graphs]:
    """Returns a drafter and its recorded twin."""
    one, other = (tiny_drafter(target, 6, **DRAFTERS[kind]) for _ in range(2))
    other.record(graphs := Graphs(Eager(torch.device("cpu"))))
    return one, other, graphs


def slot_of(context: ContextKV) -> int:
    assert isinstance(context, SlotContext)
    return context.slot


def spelled(proposals: Sequence[Proposal]) -> list[tuple[int, ...]]:
    return [proposal.tokens for proposal in proposals]


@pytest.mark.parametrize("kind", DRAFTERS)
def test_recorded_drafts(kind: str) -> None:
    """Blocks behind contexts of several lengths, in any order, some slots empty: the states, and what is drafted."""
    target = tiny_target()
    plain, recorded, graphs = drafters(target, kind)
    rng = torch.Generator().manual_seed(0)
    pairs = []
    for length in (3, 20, 41, 0, 11):
        pairs.append((plain.open(60), recorded.open(60)))
        hidden = torch.randn(length, 64, generator=rng, dtype=torch.float64)
        for drafter, context in zip((plain, recorded), pairs[-1], strict=True):
            if length:
                drafter.inject([context], [hidden])
    for there in ([0], [1, 0], [4, 2], [3], [4, 3, 2, 1, 0]):
        ones, others = [pairs[n][0] for n in there], [pairs[n][1] for n in there]
        anchors = [5 + n for n in there]
        for width in (5, 3):
            expected = plain.draft_logits(anchors, ones, width)
            got = recorded.draft_logits(anchors, others, width)
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)
        assert spelled(plain.draft(anchors, ones, 5)) == spelled(recorded.draft(anchors, others, 5))
    for one, other in pairs:
        assert other.length == one.length
        for mine, theirs in zip(one.view(0, None)[:2], other.view(0, None)[:2], strict=True):
            assert torch.equal(mine, theirs)
    assert graphs.num_recorded < graphs.num_replayed


def test_contexts_move_and_go() -> None:
    """Growing keeps what contexts hold, a fork is a copy, and a slot is free when nobody holds its context."""
    target = tiny_target()
    plain, recorded, graphs = drafters(target, "full")
    hidden = torch.randn(9, 64, dtype=torch.float64)
    expected = plain.open(20)
    plain.inject([expected], [hidden])
    first = recorded.open(20)
    recorded.inject([first], [hidden])
    recorded.draft([1], [first], 5)
    assert len(graphs) == 1
    others = [recorded.open(20), recorded.open(70)]
    assert len(graphs) == 0
    forked = recorded.fork(first, 4, 30)
    assert torch.equal(first.view(1, None)[0], expected.view(1, None)[0])
    assert torch.equal(forked.view(1, None)[0], expected.view(1, None)[0][:, :4])
    recorded.inject([forked], [hidden[4:]])
    for drafter, context in ((plain, expected), (recorded, first), (recorded, forked)):
        drafter.inject([context], [hidden[:2]])  # what comes after growing counts too
    assert spelled(recorded.draft([1], [first], 5)) == spelled(plain.draft([1], [expected], 5))
    assert spelled(recorded.draft([1], [forked], 5)) == spelled(plain.draft([1], [expected], 5))
    assert sorted(slot_of(context) for context in (first, *others, forked)) == [0, 1, 2, 3]
    del first, others
    gc.collect()
    assert slot_of(recorded.open(20)) == 0


def test_contexts_of_before_still_serve() -> None:
    """Recording may begin, begin anew and end while contexts are open: theirs are then drafts as ever."""
    target = tiny_target()
    plain, recorded, graphs = drafters(target, "full")
    expected, plain_one, old = plain.open(20), plain.open(20), recorded.open(20)
    hidden = torch.randn(9, 64, dtype=torch.float64)
    for drafter, context in ((plain, expected), (plain, plain_one), (recorded, old)):
        drafter.inject([context], [hidden])
    said = spelled(plain.draft([1], [expected], 5))
    recorded.record(other := Graphs(Eager(torch.device("cpu"))))
    new = recorded.open(20)
    recorded.inject([new], [hidden])
    assert spelled(recorded.draft([1, 1], [old, new], 5)) == said * 2
    assert spelled(recorded.draft([1, 1], [new, plain_one], 5)) == said * 2
    assert graphs.num_replayed == other.num_replayed == 0
    assert spelled(recorded.draft([1], [new], 5)) == said and other.num_replayed == 1
    recorded.record(None)
    assert spelled(recorded.draft([1, 1], [old, new], 5)) == said * 2
