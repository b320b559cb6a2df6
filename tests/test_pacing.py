"""Who drafts: drafting where it pays, resting where it does not, and no text that changes.

Most of it is decided without a target: texts in which every token is a 1, drafters that draft 1 where they are right,
and handmade costs in units of a plain pass.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from paceline.core.types import Proposal
from paceline.core.verification import judge
from paceline.drafter.base import Forkable
from paceline.engine.budget import CostBudget
from paceline.engine.costs import PassCosts
from paceline.engine.pacing import (
    FIRST_REST,
    FIRST_TRIES,
    LONGEST_REST,
    MOST_WAITING_ROWS,
    TRY_SHARE,
    Pace,
    Paced,
    Pair,
    Yields,
)
from paceline.engine.tree import TreeDrafter
from paceline.testing import (
    Memory,
    ScriptedDrafter,
    tiny_drafter,
    tiny_target,
)

WIDTH = 7
Right = Callable[[int, int], bool]
"""Number of a text and position ↦ whether its token is drafted right."""


def costs(draft_s: float = 0.4, row_s: float = 0.03, **others: Any) -> PassCosts:
    """Costs in units of a plain pass; a batch of eight drafts for twice the price of one."""
    slots = ((2.0, draft_s), (float(WIDTH), draft_s))
    many = tuple((k, 2 * s) for k, s in slots)
    rows = ((1.0, 1.0), (64.0, 1.0 + 63 * row_s))
    return PassCosts(rows, ((1.0, slots), (8.0, many)) if draft_s else (), **others)


class Stating(ScriptedDrafter):
    """Drafts 1 where it is right and 0 elsewhere, and states one chance for all tokens; notes what it is shown."""

    def __init__(self, right: Right, chance: float = 0.9) -> None:
        super().__init__(WIDTH + 1)
        self.right, self.chance = right, chance
        self.widths: list[int] = []
        self.shown: list[list[int]] = []

    def inject(
        self, contexts: Sequence[Memory], hidden: Sequence[torch.Tensor], tokens: Sequence[Sequence[int]]
    ) -> None:
        super().inject(contexts, hidden, tokens)
        self.shown.append([len(ids) for ids in tokens])

    def draft(
        self, anchors: Sequence[int], contexts: Sequence[Any], num_draft_tokens: int, laws: Any = None
    ) -> list[Proposal]:
        self.widths.append(num_draft_tokens)
        return super().draft(anchors, contexts, num_draft_tokens, laws)

    def guess(self, memory: Memory, num_draft_tokens: int) -> Proposal:
        first = memory.length + 1
        tokens = tuple(int(self.right(memory.number, first + k)) for k in range(num_draft_tokens))
        chances = tuple(self.chance ** (k + 1) for k in range(num_draft_tokens))
        return Proposal(tokens, tuple(range(num_draft_tokens)), chances)


class Shallow(Stating):
    """Right in the first two of its tokens."""

    def guess(self, memory: Memory, num_draft_tokens: int) -> Proposal:
        draft = super().guess(memory, num_draft_tokens)
        return replace(draft, tokens=tuple(int(n < 2) for n in range(num_draft_tokens)))


class Failing(Stating):
    """Takes no rows while `fails`."""

    fails = True

    def inject(self, *given: Any) -> None:
        if self.fails:
            raise torch.OutOfMemoryError("no memory is left")
        super().inject(*given)


@dataclass
class Story:
    """What a simulation did: by step the drafted and the verified nodes of each text, tokens, and modelled seconds."""

    drafted: list[list[int]] = field(default_factory=list)
    verified: list[list[int]] = field(default_factory=list)
    num_tokens: int = 0
    plain_s: float = 0.0
    seconds: float = 0.0

    @property
    def slowdown(self) -> float:
        return self.seconds / self.plain_s

    @property
    def num_drafting(self) -> int:
        return sum(map(any, self.drafted))


def simulate(
    paced: Paced, paces: Sequence[Pace], num_steps: int, until: Callable[[Story], bool] = lambda _: False
) -> Story:
    """Steps texts of ones as an engine would, without a target."""
    budget, story, count = paced.budget, Story(), len(paces)
    for _ in range(num_steps):
        if until(story):
            break
        proposals = paced.draft([1] * count, paces, WIDTH)
        drafted = [len(p.tokens) for p in proposals]
        cut = budget.cut(proposals)
        verified = [len(p.tokens) for p in cut]
        verdicts = [judge(p, [1] * (len(p.tokens) + 1)) for p in cut]
        tokens = [list(v.tokens) for v in verdicts]
        paced.inject(paces, [torch.zeros(len(ids), 0) for ids in tokens], tokens)
        budget.learn(cut, verdicts)
        story.drafted.append(drafted)
        story.verified.append(verified)
        num_tokens = sum(map(len, tokens))
        story.num_tokens += num_tokens
        story.plain_s += num_tokens / count * budget.costs.verify_s(count, count)
        story.seconds += budget.costs.draft_s(sum(map(bool, drafted)), max(drafted))
        story.seconds += budget.costs.verify_s(count + sum(verified), count, width=1 + max(verified))
    return story


def opened(paced: Paced, count: int = 1) -> list[Pace]:
    """Returns paces of texts of two tokens, the second being the anchor."""
    paces = [paced.open(4000) for _ in range(count)]
    paced.inject(paces, [torch.zeros(1, 0)] * count, [[1]] * count)
    return paces


def never(text: int, position: int) -> bool:
    return False


def always(text: int, position: int) -> bool:
    return True


PRICES = {
    "cheap": costs(0.05, 0.01),
    "usual": costs(),
    "dear rows": costs(0.4, 0.3),
    "dear drafts": costs(1.5, 0.03),
    "padded": costs(padding=1.0),
}


# Never slower --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("price", PRICES)
@pytest.mark.parametrize("count", [1, 3, 8])
@pytest.mark.parametrize("chance", [0.95, 0.3])
def test_a_useless_drafter_costs_three_percent_at_most(price: str, count: int, chance: float) -> None:
    """Over 400 steps, learning that it is useless included; whatever it states."""
    paced = Paced(Stating(never, chance), CostBudget(PRICES[price]))
    story = simulate(paced, opened(paced, count), 400)
    assert story.num_tokens == 400 * count
    assert story.slowdown <= 1.03
    assert all(sum(map(bool, text)) <= 30 for text in zip(*story.drafted, strict=True))


@pytest.mark.parametrize("price", PRICES)
def test_short_texts_do_not_begin_anew(price: str) -> None:
    """What was learnt of a pair holds for its next texts; tries are paid from one purse."""
    paced = Paced(Stating(never), CostBudget(PRICES[price]))
    simulate(paced, opened(paced), 100)
    stories = [simulate(paced, opened(paced), 40) for _ in range(10)]
    assert sum(s.seconds for s in stories) <= 1.03 * sum(s.plain_s for s in stories)


@pytest.mark.parametrize("price", PRICES)
@pytest.mark.parametrize("share", [0.3, 0.6, 0.8])
def test_a_middling_drafter_is_no_loss(price: str, share: float) -> None:
    """Right by chance: it is used where it pays and left alone where it does not."""
    rng = random.Random(5)
    table = [rng.random() < share for _ in range(5000)]
    paced = Paced(Stating(lambda _, position: table[position], share), CostBudget(PRICES[price]))
    story = simulate(paced, opened(paced), 400)
    assert story.slowdown <= 1.03
    if share == 0.8 and price in ("cheap", "usual"):
        assert story.slowdown < 0.7


def test_one_good_text_among_bad_ones_is_drafted_for_only_where_the_batch_gains() -> None:
    only_first = lambda text, _: text == 0  # noqa: E731
    for price, drafts in (("usual", True), ("dear drafts", False), ("padded", False)):
        paced = Paced(Stating(only_first), CostBudget(PRICES[price]))
        story = simulate(paced, opened(paced, 8), 300)
        assert story.slowdown <= 1.03, price
        late = story.verified[200:]
        assert (sum(row[0] for row in late) > 3 * len(late)) is drafts, price
        assert sum(sum(row[1:]) for row in late) < len(late), price


# As fast as can be ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 8])
@pytest.mark.parametrize("price", ["cheap", "usual", "padded"])
def test_a_perfect_drafter_gets_its_full_width(price: str, count: int) -> None:
    paced = Paced(Stating(always), CostBudget(PRICES[price]))
    story = simulate(paced, opened(paced, count), 60)
    assert story.verified[10:] == [[WIDTH] * count] * 50
    assert all(map(all, story.drafted[1:])), "it never rests"


def test_a_text_that_turns_predictable_is_noticed() -> None:
    paced = Paced(Stating(lambda _, position: position > 300), CostBudget(PRICES["usual"]))
    (pace,) = opened(paced)
    before = simulate(paced, [pace], 400, until=lambda story: story.num_tokens >= 300)
    assert before.slowdown <= 1.03
    after = simulate(paced, [pace], 120)
    assert [WIDTH] in after.verified[: LONGEST_REST + 2]
    assert after.verified[-20:] == [[WIDTH]] * 20


def test_a_text_that_turns_unpredictable_is_left_alone() -> None:
    paced = Paced(Stating(lambda _, position: position < 600), CostBudget(PRICES["usual"]))
    (pace,) = opened(paced)
    simulate(paced, [pace], 400, until=lambda story: story.num_tokens >= 600)
    after = simulate(paced, [pace], 400)
    assert after.slowdown <= 1.05 and after.num_drafting <= 45


def test_where_rows_are_dear_in_a_crowd_a_lone_text_is_tried_again() -> None:
    steep = PassCosts(
        rows=((1, 1.0), (8, 1.0), (9, 1.9), (64, 12.0)), drafts=((1, ((2, 0.3), (WIDTH, 0.3))),)
    )
    paced = Paced(Stating(always), CostBudget(steep))
    paces = opened(paced, 8)
    crowd = simulate(paced, paces, 300, until=lambda _: paces[0].rest > 40)
    assert crowd.slowdown <= 1.03 and paces[0].rest > 40
    lone = simulate(paced, paces[:1], 20)
    assert lone.verified[3:] == [[WIDTH]] * 17


def test_drafts_as_dear_by_width_are_no_wider_than_pays() -> None:
    """Token by token: of each draft only the first two stand."""
    by_slot = tuple((float(k), 0.2 * k) for k in (2, 4, WIDTH))
    dear = PassCosts(rows=((1, 1.0), (64, 1.6)), drafts=((1.0, by_slot),))
    drafter = Shallow(always)
    paced = Paced(drafter, CostBudget(dear))
    simulate(paced, opened(paced), 100)
    assert set(drafter.widths[50:]) == {2}


# Rests and tries -----------------------------------------------------------------------------------------------------


def test_rests_double_and_a_gain_resets_them() -> None:
    paced = Paced(Stating(never), CostBudget(PRICES["cheap"]))
    (pace,) = opened(paced)
    rests = []
    for _ in range(700):
        before = pace.rest
        simulate(paced, [pace], 1)
        if pace.rest > before:
            rests.append(pace.rest)
    assert rests[:6] == [FIRST_REST, 16, 32, LONGEST_REST, LONGEST_REST, LONGEST_REST]
    pace.settle([True], 1.0)
    assert pace.next_rest == FIRST_REST and pace.has_gained


def test_a_draft_that_saved_time_is_followed_by_another() -> None:
    """Though by all that is known of the pair and the text it does not pay."""
    drafter = Stating(never)
    paced = Paced(drafter, CostBudget(PRICES["dear drafts"]))
    (pace,) = opened(paced)
    for _ in range(300):
        pace.pair.yields.learn([0.0] * WIDTH)
    simulate(paced, [pace], 20)
    drafter.right = always
    simulate(paced, [pace], 200, until=lambda story: story.verified[-1:] == [[WIDTH]])
    assert simulate(paced, [pace], 20).verified == [[WIDTH]] * 20


def test_of_nodes_cut_away_the_chance_is_learnt() -> None:
    pace = Pace(Memory(0), Pair(), leash_s=1.0)
    pace.expect([0.9, 0.5, 0.25])
    pace.settle([True], -0.1)
    unknown = [0.5] * 3
    for yields in (pace.yields, pace.pair.yields):
        assert yields.expected(unknown) == pytest.approx([0.6, 0.5, 0.45])


def test_what_is_known_of_a_text_fades_while_it_rests() -> None:
    pace = Pace(Memory(0), Pair(), next_rest=LONGEST_REST)
    for _ in range(20):
        pace.yields.learn([0.0])
    assert pace.yields.expected([0.8])[0] < 0.2
    pace.begin_rest(1)
    assert pace.yields.expected([0.8])[0] > 0.5


def test_tries_wait_until_what_they_lost_is_earned() -> None:
    """A try that costs four passes is worth many steps of a small share each."""
    paced = Paced(Stating(never), CostBudget(costs(4.0, 0.0)))
    story = simulate(paced, opened(paced), 600)
    tries = [n for n, row in enumerate(story.drafted) if any(row)]
    gaps = [b - a for a, b in itertools.pairwise([0, *tries])]
    assert len(gaps) > 1 and min(gaps) >= (4.0 - FIRST_TRIES) / TRY_SHARE - 1
    assert sum(gaps[1:]) / len(gaps[1:]) >= 4.0 / TRY_SHARE - 1


def test_yields_are_means_that_fade() -> None:
    yields, prior = Yields(16), [0.6, 0.36, 0.2]
    assert yields.expected(prior) == prior
    for _ in range(200):
        yields.learn([1.0, 0.0])
    first, second, third = yields.expected(prior)
    assert first > 0.93 and second < 0.07 and third <= second
    yields.fade(160)
    assert yields.expected(prior) == pytest.approx([*prior[:2], 0.2], abs=0.02)


# Rows that wait ------------------------------------------------------------------------------------------------------


def rows(first: int, count: int) -> tuple[torch.Tensor, list[int]]:
    """Returns hidden rows that tell which they are, and tokens."""
    return torch.arange(first, first + count)[:, None].double(), list(range(first, first + count))


def test_rows_wait_until_their_text_is_drafted_for_and_come_together() -> None:
    drafter = Stating(always)
    paced = Paced(drafter, CostBudget(PRICES["usual"]))
    paces = [paced.open(99), paced.open(99)]
    for first in (0, 3):
        hidden, tokens = rows(first, 3)
        paced.inject(paces, [hidden, hidden], [tokens, tokens])
        hidden.zero_()  # the pass's tensors may be written again
    assert drafter.shown == [] and [pace.length for pace in paces] == [6, 6]
    paced.draft([6], paces[:1], WIDTH)
    assert drafter.shown == [[6]] and drafter.memories[0].hidden.flatten().tolist() == list(range(6))
    paced.inject(paces, [torch.zeros(1, 1)] * 2, [[6]] * 2)
    paced.draft([7, 7], paces, WIDTH)
    assert drafter.shown[1:] == [[1, 7]] and [pace.length for pace in paces] == [7, 7]


def test_not_too_many_rows_wait() -> None:
    drafter = Stating(never)
    paced = Paced(drafter, CostBudget(PRICES["dear drafts"]))
    (pace,) = opened(paced)
    for number in range(3 * MOST_WAITING_ROWS):
        paced.inject([pace], [torch.zeros(1, 0)], [[1]])
        assert len(pace.tokens) <= MOST_WAITING_ROWS and pace.length == number + 2
    assert len(drafter.shown) == 3


def test_what_fails_can_be_repeated() -> None:
    """Rows that the drafter could not take still wait, and none waits twice."""
    drafter = Failing(always)
    paced = Paced(drafter, CostBudget(PRICES["usual"]))
    (pace,) = opened(paced)
    hidden, tokens = rows(1, MOST_WAITING_ROWS)
    for act in (lambda: paced.inject([pace], [hidden], [tokens]), lambda: paced.draft([1], [pace], WIDTH)):
        with pytest.raises(torch.OutOfMemoryError):
            act()
        assert pace.length == 1 and pace.tokens == [1]
    drafter.fails = False
    paced.inject([pace], [hidden], [tokens])
    assert pace.length == 1 + MOST_WAITING_ROWS and len(drafter.shown) == 1


@pytest.mark.parametrize("length", [2, 5, 8])
def test_a_fork_knows_what_its_first_tokens_were(length: int) -> None:
    """Rows of it may have been shown to the drafter or not."""
    target = tiny_target()
    inner = tiny_drafter(target, 4)
    paced = Paced(TreeDrafter(inner, 5), CostBudget(PRICES["usual"]))
    assert isinstance(paced, Forkable)
    hidden = torch.randn(8, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    pace, known = paced.open(30), inner.open(30)
    paced.inject([pace], [hidden[:4]], [[1, 2, 3, 4]])
    paced.draft([5], [pace], 5)
    paced.inject([pace], [hidden[4:]], [[5, 6, 7, 8]])
    inner.inject([known], [hidden[:length]])
    fork = paced.fork(pace, length, 20)
    assert isinstance(fork, Pace) and fork.length == length and pace.length == 8
    assert fork.yields is not pace.yields and fork.pair is pace.pair
    (got,), (expected,) = paced.draft([9], [fork], 5), inner.draft_trees([9], [known], 5)
    assert got.tokens == expected.tokens and got.chances == pytest.approx(expected.chances)
    assert Paced(Stating(always), CostBudget(PRICES["usual"])).fork(pace, 1, 1) is None
