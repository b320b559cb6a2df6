"""How much of drafts is verified: the best front by the costs, with chances corrected by what came of earlier ones."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.errors import RequestError
from paceline.core.params import SamplingParams
from paceline.core.sampling import Law
from paceline.core.tree import grow
from paceline.core.types import EMPTY_PROPOSAL, Proposal, Verdict
from paceline.core.verification import judge
from paceline.drafter.dflash import DFlash
from paceline.engine.budget import COPY_CHANCE, Calibration, CostBudget, Signed, best_fronts
from paceline.engine.costs import PassCosts, num_branches
from paceline.engine.grammar import walk
from paceline.engine.proposals import fitted
from paceline.testing import tiny_drafter, tiny_target

FREE = PassCosts(rows=((1, 1.0), (64, 1.0)))
DEAR = PassCosts(rows=((1, 1.0), (64, 64.0)))
TREE = grow([[-0.2, -2.0], [-0.5, -1.0], [-0.1, -3.0]], [[1, 2], [3, 4], [5, 6]], 9)


def chain(*chances: float) -> Proposal:
    """Returns a chain of ones with these chances."""
    return Proposal((1,) * len(chances), tuple(range(len(chances))), chances)


# The cut -------------------------------------------------------------------------------------------------------------


def random_costs(rng: random.Random, *, has_runs: bool = False) -> PassCosts:
    """Costs of rows that rise by leaps and not at all, of contexts and of padding."""
    seconds = itertools.accumulate(rng.choice((0.0, 0.02, 0.3, 1.0)) for _ in range(16))
    return PassCosts(
        rows=tuple((float(1 + 2 * i), 1.0 + s) for i, s in enumerate(seconds)),
        drafts=((1.0, ((2.0, rng.random()),)),),
        sequence_s=rng.choice((0.0, 0.05)),
        context_row_s=rng.choice((0.0, 0.01)),
        run_s=rng.choice((0.05, 1.0)) if has_runs else 0.0,
        padding=rng.choice((0.0, rng.random(), 1.0)),
    )


def random_proposal(rng: random.Random) -> Proposal:
    """Nothing, a chain, or a tree."""
    kind = rng.randrange(3)
    if kind == 0:
        return EMPTY_PROPOSAL
    width = 1 if kind == 1 else 3
    slots = [sorted((-2.0 * rng.random() for _ in range(width)), reverse=True) for _ in range(4)]
    return grow(slots, [[10 * s + r for r in range(width)] for s in range(4)], rng.randint(1, 6))


@settings(deadline=None, max_examples=150)
@given(seed=st.integers(0, 1 << 20), count=st.integers(1, 4))
def test_the_cut_is_the_best_of_all_fronts(seed: int, count: int) -> None:
    rng = random.Random(seed)
    costs, proposals = random_costs(rng), [random_proposal(rng) for _ in range(count)]
    chances = [p.chances for p in proposals]

    def step_s(num_nodes: int, width: int, num_runs: int) -> float:
        return 0.4 + costs.verify_s(count + num_nodes, count, 20 * count, num_runs, width)

    def rate(fronts: Sequence[int]) -> float:
        tokens = count + sum(sum(row[:n]) for row, n in zip(chances, fronts, strict=True))
        return tokens / step_s(sum(fronts), 1 + max(fronts), 0)

    cut = best_fronts(proposals, chances, step_s, costs.padding)
    best = max(map(rate, itertools.product(*(range(len(row) + 1) for row in chances))))
    assert rate(cut) == pytest.approx(best, rel=1e-12)


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 1 << 20))
def test_branches_that_cost_much_are_left_out(seed: int) -> None:
    """With runs that cost more than they bring a tree is cut where it first branches."""
    rng = random.Random(seed)
    costs = random_costs(rng, has_runs=True)
    proposals = [random_proposal(rng) for _ in range(3)]

    def step_s(num_nodes: int, width: int, num_runs: int) -> float:
        return costs.verify_s(3 + num_nodes, 3, 0, 10 * num_runs, width)

    cut = best_fronts(proposals, [p.chances for p in proposals], step_s, costs.padding)
    fronts = [p.front(n) for p, n in zip(proposals, cut, strict=True)]
    if costs.run_s == 1.0:
        assert not any(map(num_branches, fronts))
    tokens = 3 + sum(sum(f.chances) for f in fronts)
    seconds = step_s(sum(cut), 1 + max(cut), sum(map(num_branches, fronts)))
    assert tokens / seconds >= 3 / step_s(0, 1, 0) * (1 - 1e-12)


@pytest.mark.parametrize("count", [1, 3])
def test_free_rows_are_all_verified_and_dear_ones_are_not(count: int) -> None:
    proposals = [chain(0.9, 0.5, 0.01), TREE, EMPTY_PROPOSAL][:count]
    assert CostBudget(FREE).cut(proposals) == proposals
    assert [len(p.tokens) for p in CostBudget(DEAR).cut(proposals)] == [0] * count
    assert CostBudget(FREE).cut([]) == []


def test_likely_nodes_of_one_text_come_before_unlikely_ones_of_another() -> None:
    costs = PassCosts(rows=((1, 1.0), (4, 1.0), (5, 9.0)))
    cut = CostBudget(costs).cut([chain(0.3, 0.2, 0.1), chain(0.9, 0.8, 0.7)])
    assert [len(p.tokens) for p in cut] == [0, 2]


def test_where_passes_are_padded_all_are_cut_at_one_width() -> None:
    steep = PassCosts(rows=((1, 1.0), (64, 12.0)), padding=1.0)
    cut = CostBudget(steep).cut([chain(0.9, 0.9, 0.9), chain(0.2, 0.1, 0.05)])
    assert [len(p.tokens) for p in cut] == [3, 3]
    alone = CostBudget(steep).cut([chain(0.9, 0.9, 0.9), *[EMPTY_PROPOSAL] * 7])
    assert [len(p.tokens) for p in alone] == [0] * 8, "seven others would be padded for the sake of one"


def test_what_was_paid_for_the_draft_makes_more_rows_worth_it() -> None:
    rows = ((1.0, 1.0), (2.0, 1.5), (3.0, 2.0))
    cheap, dear = (CostBudget(PassCosts(rows, ((1.0, ((2.0, s),)),))) for s in (0.01, 2.0))
    assert [len(b.cut([chain(0.45, 0.45)])[0].tokens) for b in (cheap, dear)] == [0, 2]
    (copy,) = dear.cut([Proposal.chain([1, 1])])
    assert len(copy.tokens) == 1, (
        "a copy costs nothing, so its second node, at 0.49, is not worth half a pass"
    )


# Whose it is ---------------------------------------------------------------------------------------------------------


@dataclass
class Author:
    """Notes what it is told."""

    length: int = 30
    is_probe: bool = False
    expected: list[float] = field(default_factory=list)
    settled: list[tuple[list[bool], float]] = field(default_factory=list)

    def expect(self, chances: Sequence[float]) -> None:
        self.expected = list(chances)

    def settle(self, stood: Sequence[bool], gain_s: float) -> None:
        self.settled.append((list(stood), gain_s))


def signed(proposal: Proposal, author: Author) -> Signed:
    return Signed(proposal.tokens, proposal.parents, proposal.chances, author=author)


class Evens:
    """A language of even tokens."""

    has_ended = False

    def mask(self) -> torch.Tensor:
        return torch.arange(8) % 2 == 0

    def advance(self, tokens: Sequence[int]) -> None:
        if any(token % 2 for token in tokens):
            raise RequestError("odd")

    def retreat(self, num_tokens: int) -> None:
        pass


def test_whatever_is_left_of_a_draft_says_whose_it_is() -> None:
    author = Author()
    draft = signed(Proposal((2, 3, 4, 6), (0, 0, 1, 2), (0.5, 0.4, 0.3, 0.2)), author)
    legal, _ = walk(Evens(), draft)
    assert legal == Signed((2, 4), (0, 1), (0.5, 0.3), author=author)
    assert fitted(draft, 3, 8) == Signed((2, 3, 4), (0, 0, 1), (0.5, 0.4, 0.3), author=author)
    assert walk(Evens(), Proposal((3, 2), (0, 0)))[0] == Proposal((2,), (0,)), "no chances, none made up"
    (nothing,) = CostBudget(DEAR).cut([draft])
    assert isinstance(nothing, Signed) and nothing.author is author and not nothing.tokens


def test_authors_are_told_what_came_of_their_drafts() -> None:
    """Seconds are split: the draft by heads, rows by rows; each token that stood is worth one of a plain step."""
    costs = PassCosts(rows=((1, 1.0), (9, 1.8)), drafts=((1.0, ((3.0, 0.2),)), (2.0, ((3.0, 0.3),))))
    budget, authors = CostBudget(costs), [Author(), Author()]
    good, bad = signed(chain(0.9, 0.9, 0.9), authors[0]), signed(chain(0.9, 0.01), authors[1])
    cut = budget.cut([good, EMPTY_PROPOSAL, bad])
    assert [len(p.tokens) for p in cut] == [3, 0, 1]
    assert authors[0].expected == pytest.approx([0.9] * 3) and len(authors[1].expected) == 2
    verdicts = [judge(p, said) for p, said in zip(cut, ([1, 1, 0, 0], [5], [7, 7]), strict=True)]
    budget.learn(cut, verdicts)
    ((stood, gain_s),), ((fell, loss_s),) = authors[0].settled, authors[1].settled
    assert (stood, fell) == ([True, True, False], [False])
    token_s = costs.verify_s(3, 3) / 3
    assert gain_s == pytest.approx(2 * token_s - 0.15 - 0.3) and loss_s == pytest.approx(-0.15 - 0.1)


def test_a_probe_is_taken_at_its_word() -> None:
    costs = PassCosts(rows=((1, 1.0), (64, 10.0)))
    budget, author = CostBudget(costs), Author()
    for _ in range(200):
        budget.learn([chain(0.9, 0.9)], [Verdict((0,), (0,))])
    draft = signed(chain(0.9, 0.9), author)
    assert not budget.cut([draft])[0].tokens
    author.is_probe = True
    assert len(budget.cut([draft])[0].tokens) == 2
    assert author.expected[0] < 0.15, "its author is told what is thought of it all the same"
    copies = signed(Proposal.chain([1, 1]), author)
    for _ in range(200):
        budget.learn([Proposal.chain([1, 1])], [Verdict((0,), (0,))])
    assert len(budget.cut([copies])[0].tokens) == 2


# Calibration ---------------------------------------------------------------------------------------------------------


def observe(calibration: Calibration, proposal: Proposal, standing: float, count: int, seed: int = 0) -> None:
    """Lets each node of a chain stand behind its parent with one chance."""
    rng = random.Random(seed)
    for _ in range(count):
        stood = [0]
        while len(stood) <= len(proposal.tokens) and rng.random() < standing:
            stood.append(len(stood))
        calibration.learn(proposal, stood)


def test_nothing_seen_is_what_was_stated() -> None:
    calibration = Calibration()
    assert calibration.chances(TREE) == pytest.approx(TREE.chances)
    assert calibration.chances(Proposal.chain([1, 2])) == pytest.approx([COPY_CHANCE, COPY_CHANCE**2])
    assert calibration.chances(EMPTY_PROPOSAL) == []
    odd = calibration.chances(chain(float("nan"), 0.5, 0.6, 0.0))
    assert odd == sorted(odd, reverse=True) and all(0 <= x <= 1 for x in odd)


@pytest.mark.parametrize(("stated", "true"), [(0.95, 0.4), (0.1, 0.8), (0.5, 0.5), (1.0, 0.0)])
def test_a_badly_stated_chance_is_corrected(stated: float, true: float) -> None:
    draft = chain(*(stated**depth for depth in (1, 2, 3)))
    calibration = Calibration()
    observe(calibration, draft, true, 3000)
    assert calibration.chances(draft)[0] == pytest.approx(true, abs=0.04)
    assert calibration.chances(draft)[2] == pytest.approx(true**3, abs=0.08)
    other = chain((stated + 0.5) % 1.0)
    assert calibration.chances(other) == pytest.approx(other.chances), "what else was stated is as it was"


def test_copies_are_counted_by_depth() -> None:
    calibration, copies = Calibration(), Proposal.chain([1, 1, 1])
    for _ in range(500):
        calibration.learn(copies, [0, 1])
    first, second, _ = calibration.chances(copies)
    assert first > 0.95 and second < 0.1


def test_what_was_seen_long_ago_is_forgotten() -> None:
    calibration, draft = Calibration(), chain(0.5)
    observe(calibration, draft, 0.0, 20_000)
    observe(calibration, draft, 1.0, 20_000)
    assert calibration.chances(draft)[0] > 0.9
    assert sum(tried for _, tried in calibration._cells.values()) < 6000


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 1 << 20))
def test_chances_never_rise(seed: int) -> None:
    rng, calibration = random.Random(seed), Calibration()
    for _ in range(30):
        proposal = random_proposal(rng)
        said = [rng.choice((*proposal.tokens, 99)) for _ in range(len(proposal.tokens) + 1)]
        calibration.learn(proposal, judge(proposal, said).path)
    chances = calibration.chances(random_proposal(rng))
    assert chances == sorted(chances, reverse=True) and all(0 <= x <= 1 for x in chances)


# What drafters state -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_chain_states_the_products_of_its_tokens_chances(temperature: float) -> None:
    """Of being drawn, the law's noise known."""
    target = tiny_target()
    drafter: DFlash = tiny_drafter(target, 5)
    hidden = torch.randn(9, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    context = drafter.open(16)
    drafter.inject([context], [hidden])
    law = Law(SamplingParams(temperature=temperature, seed=4), 61, seed=4)
    for laws in (None, [law]):
        (draft,) = drafter.draft([3], [context], 4, laws)
        logits = drafter.draft_logits([3], [context], 4)[0]
        probs = (law.perturb(logits, 10) if laws else logits).softmax(dim=-1)
        chosen = probs.gather(1, torch.tensor(draft.tokens)[:, None])[:, 0]
        assert draft.is_chain and torch.equal(chosen, probs.amax(dim=-1))
        assert draft.chances == pytest.approx(chosen.cumprod(0).tolist())
        short = drafter.draft([3], [context], 2, laws)[0]
        assert short.tokens == draft.tokens[:2] and short.chances == pytest.approx(draft.chances[:2])
