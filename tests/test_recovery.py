"""After an end, a cancellation or an error nothing is left behind, and what no target can embed is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from paceline.core.errors import IncompatiblePairError
from paceline.core.types import Proposal
from paceline.drafter.dflash import DFlash
from paceline.engine.engine import Engine
from paceline.target.native import NativeTarget
from paceline.testing import (
    OracleDrafter,
    ScriptedDrafter,
    assert_lossless,
    plain_texts,
    run_checked,
    tiny_drafter,
    tiny_target,
    whole,
)
from watching import (
    BLOCK,
    Counting,
    Drafts,
    Watched,
    all_slots_are_free,
    prepared,
    request,
    tokens,
)

# After an end, a cancellation, an error ------------------------------------------------------------------------------


FIRST, SECOND = request("first", tokens(9, seed=1), 14), request("second", tokens(5, seed=2), 14)


def fresh(target: NativeTarget, drafter: DFlash) -> tuple[tuple[int, ...], Drafts]:
    """The second request's text and drafts on an engine and a target that have seen nothing else."""
    watched = Watched(drafter)
    text = run_checked(Engine(target, watched), [SECOND])["second"].token_ids
    return text, watched.drafts[0]


@pytest.mark.parametrize("cancelled_at", [0, 1, 2, 5, None])
def test_nothing_is_left_of_a_request_that_ended(cancelled_at: int | None) -> None:
    expected = fresh(tiny_target(), prepared(tiny_target()))
    target = tiny_target()
    watched = Watched(prepared(target))
    engine = Engine(target, watched, max_sequences=1)
    engine.add(FIRST)
    for number in range(20):
        if number == cancelled_at:
            assert engine.cancel("first")
        engine.step()
    assert not engine.has_work and (not watched.contexts or all_slots_are_free(target))
    text = run_checked(engine, [SECOND])["second"].token_ids
    assert (text, watched.drafts[-1]) == expected
    assert all_slots_are_free(target)


class Stumbling(Watched):
    """Raises in the n-th call of one of its methods, before or after it did what was asked."""

    def __init__(self, drafter: DFlash, where: str, when: int) -> None:
        super().__init__(drafter)
        self._where, self._when = where, when

    def inject(
        self, contexts: Sequence[Any], hidden: Sequence[torch.Tensor], tokens: Sequence[Sequence[int]]
    ) -> None:
        self._stumble("inject")
        super().inject(contexts, hidden, tokens)

    def draft(self, *asked: Any) -> list[Proposal]:
        self._stumble("draft")
        return super().draft(*asked)

    def _stumble(self, where: str) -> None:
        self._when -= where == self._where
        if where == self._where and self._when == 0:
            raise RuntimeError(f"stumbled in {where}")


def stumbling_engine(
    target: NativeTarget, where: str, when: int, patch: pytest.MonkeyPatch
) -> tuple[Engine, Watched]:
    watched = Stumbling(prepared(target), where, when)
    if where == "verify":
        Counting(target, patch, raising=[when])
    return Engine(target, watched, max_sequences=2), watched


STUMBLES = [("draft", 1), ("draft", 3), ("inject", 3), ("inject", 5), ("verify", 3), ("verify", 6)]


@pytest.mark.parametrize(("where", "when"), [*STUMBLES, ("inject", 1), ("verify", 1), ("verify", 2)])
def test_nothing_is_left_of_an_engine_that_raised(
    where: str, when: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = fresh(tiny_target(), prepared(tiny_target()))
    target = tiny_target()
    engine, watched = stumbling_engine(target, where, when, monkeypatch)
    engine.add(FIRST)
    engine.add(replace(FIRST, id="beside"))
    with pytest.raises(RuntimeError, match="stumbled"):
        while engine.has_work:
            engine.step()
    engine.close()
    assert all_slots_are_free(target) and not engine.has_work
    text = run_checked(engine, [SECOND])["second"].token_ids
    assert (text, watched.drafts[-1]) == expected
    assert all_slots_are_free(target)


@pytest.mark.parametrize(("where", "when"), STUMBLES)
def test_a_step_that_raised_anywhere_can_be_repeated(
    where: str, when: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is committed by halves: no token is lost and none is said twice."""
    target, made = tiny_target(), [FIRST, SECOND]
    plain = plain_texts(target, made)
    engine, _ = stumbling_engine(target, where, when, monkeypatch)
    for one in made:
        engine.add(one)
    delivered: dict[str, tuple[int, ...]] = {one.id: () for one in made}
    num_raised = 0
    while engine.has_work:
        try:
            for delta in engine.step():
                delivered[delta.request_id] += delta.token_ids
        except RuntimeError:
            num_raised += 1
        for sequence in engine.scheduler.running:
            sequence.check()
    assert num_raised == 1
    assert delivered == {text.request_id: text.token_ids for text in plain}
    assert [engine.take_completion(one.id).token_ids for one in made] == [text.token_ids for text in plain]


# Tokens that are none, and the mask ----------------------------------------------------------------------------------


class Faulty(ScriptedDrafter):
    """Drafts what no drafter should, in its second block."""

    def __init__(self, proposal: Proposal) -> None:
        super().__init__(6)
        self.proposal, self.num_drafts = proposal, 0

    def guess(self, memory: Any, num_draft_tokens: int) -> Proposal:
        self.num_drafts += 1
        return self.proposal if self.num_drafts == 2 else Proposal.chain([1])


@pytest.mark.parametrize(
    ("proposal", "message"),
    [
        (Proposal.chain([3, -1, 4]), r"drafted token -1, and the target knows 0…60; hint"),
        (Proposal.chain([61]), "drafted token 61"),
        (Proposal.chain([1, 2, 3, 4, 5, 6, 7, 2**40]), "drafted token 1099511627776"),
        (Proposal((1, 2), (0,)), r"2 tokens with parents \(0,\); expected one for each"),
        (Proposal((1, 2), (0, 2)), r"parents \(0, 2\)"),
        (Proposal((1, 2), (-1, 0)), r"parents \(-1, 0\)"),
    ],
)
def test_what_cannot_be_embedded_is_refused_before_it_is(
    proposal: Proposal, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny_target()
    (plain,) = plain_texts(target, [FIRST])
    passes, engine = Counting(target, monkeypatch), Engine(target, Faulty(proposal))
    engine.add(FIRST)
    engine.step()  # reads the prompt
    engine.step()
    before = passes.num_passes
    with pytest.raises(IncompatiblePairError, match=message):
        engine.step()
    assert passes.num_passes == before
    while engine.has_work:  # its next drafts are sound
        engine.step()
    assert engine.take_completion("first").token_ids == plain.token_ids


def test_the_mask_is_a_token_like_any_other() -> None:
    """Prompted, anchored, drafted, accepted and delivered; nothing is cut off or filtered by its value."""
    target = tiny_target(vocab_size=5, max_positions=64)
    mask = tiny_drafter(target, BLOCK).config.mask_token_id
    made = [request(str(i), (mask, i, mask), 30, temperature=20.0, seed=i) for i in range(4)]
    oracle = OracleDrafter(BLOCK, [whole(text) for text in plain_texts(target, made)])
    drafted = 0
    engine = Engine(target, oracle)
    for one in made:
        engine.add(one)
    while engine.has_work:
        for delta in engine.step():
            drafted += delta.token_ids[: delta.num_drafted_tokens].count(mask)
    assert drafted > 10
    for text in assert_lossless(target, tiny_drafter(target, BLOCK), made):
        assert len(text.token_ids) == 30 and mask in text.token_ids
        assert engine.take_completion(text.request_id).token_ids == text.token_ids


def test_a_mask_outside_the_targets_embedding_is_refused() -> None:
    drafter = prepared(tiny_target())
    assert drafter.config.mask_token_id == 60
    with pytest.raises(
        IncompatiblePairError, match=r"embedding of 61 × 32, the target's is 40 × 32.*mask 60"
    ):
        drafter.bind(tiny_target(vocab_size=40).heads)
    padded = tiny_target(vocab_size=64)  # more rows than the drafter knows: another target
    with pytest.raises(IncompatiblePairError, match="the target's is 64 × 32"):
        drafter.bind(padded.heads)
