"""No text changes, whatever passes are said to cost, with any paced drafter, in any batch."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.params import SamplingParams
from paceline.core.types import Completion, Request
from paceline.drafter.base import Drafter
from paceline.drafter.combined import Combined
from paceline.drafter.lookup import PromptLookup
from paceline.engine.budget import CostBudget
from paceline.engine.costs import PassCosts
from paceline.engine.engine import Engine
from paceline.engine.pacing import Paced
from paceline.engine.tree import TreeDrafter
from paceline.target.native import NativeTarget
from paceline.testing import plain_texts, run_checked, tiny_drafter, tiny_eagle3, tiny_target

KINDS: dict[str, Callable[[NativeTarget], Drafter]] = {
    "chains": lambda target: tiny_drafter(target, 5),
    "trees": lambda target: TreeDrafter(tiny_drafter(target, 4), 7),
    "dflash2 chains": lambda target: tiny_drafter(target, 4, variant="dflash2"),
    "dflash2 trees": lambda target: TreeDrafter(tiny_drafter(target, 4, variant="dflash2"), 6),
    "eagle3 chains": lambda target: tiny_eagle3(target, 4),
    "eagle3 trees": lambda target: TreeDrafter(tiny_eagle3(target, 4), 6),
}


@cache
def model() -> NativeTarget:
    """Few words, so that drafts stand and texts repeat themselves now and then."""
    return tiny_target(1, vocab_size=9)


@cache
def made(kind: str) -> Drafter:
    return KINDS[kind](model())


def requests(count: int, temperature: float) -> list[Request]:
    """Requests of several lengths and block sizes, one of which decodes plainly."""
    prompts = [(3, 4, 5), (3,), (5, 6, 7, 8) * 5, (8, 7), (4, 4, 4, 4, 4)][:count]
    params = SamplingParams(max_new_tokens=24, ignore_eos=True, temperature=temperature, seed=4)
    sizes = [None, 3, None, 1, None]
    return [Request(str(i), p, params, block_size=sizes[i]) for i, p in enumerate(prompts)]


@cache
def plain(temperature: float) -> list[Completion]:
    return plain_texts(model(), requests(5, temperature))


def random_costs(seed: int) -> PassCosts:
    """From free to dear, of everything."""
    rng = random.Random(seed)
    leaps = itertools.accumulate(rng.choice((0.0, 0.05, 1.0)) for _ in range(9))
    slots = tuple((float(k), rng.random() * k) for k in (2, 4))
    drafts = ((1.0, tuple(sorted(zip((2.0, 4.0), sorted(s for _, s in slots), strict=True)))),)
    return PassCosts(
        rows=tuple((float(1 + 3 * i), 1 + s) for i, s in enumerate(leaps)),
        drafts=drafts,
        context_row_s=rng.choice((0.0, 0.01)),
        run_s=rng.choice((0.0, 0.1)),
        padding=rng.choice((0.0, 0.5, 1.0)),
    )


def run_paced(
    drafter: Drafter,
    budget: CostBudget,
    asked: Sequence[Request],
    max_sequences: int,
    cancelled: str | None = None,
) -> dict[str, Completion]:
    """Decodes requests with an engine whose steps take the budget; the invariant is checked after each.

    Args:
        cancelled: the request that is cancelled before the fifth step.
    """
    engine = Engine(model(), drafter, max_sequences=max_sequences)
    assert engine._budget is budget, "a paced drafter brings its budget"

    def before_step(number: int) -> None:
        if number == 4 and cancelled is not None:
            engine.cancel(cancelled)

    return run_checked(engine, asked, before_step)


@settings(deadline=None, max_examples=24)
@given(
    kind=st.sampled_from(sorted(KINDS)),
    seed=st.integers(0, 1 << 20),
    count=st.integers(1, 5),
    max_sequences=st.integers(1, 5),
    temperature=st.sampled_from((0.0, 0.8)),
    has_copies=st.booleans(),
)
def test_no_text_changes(
    kind: str, seed: int, count: int, max_sequences: int, temperature: float, has_copies: bool
) -> None:
    budget = CostBudget(random_costs(seed))
    drafter: Drafter = Paced(made(kind), budget)
    if has_copies:
        drafter = Combined(PromptLookup(6, 4, 2), drafter)
    texts = run_paced(drafter, budget, requests(count, temperature), max_sequences)
    for expected in plain(temperature)[:count]:
        assert texts[expected.request_id].token_ids == expected.token_ids


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("has_copies", [False, True])
def test_all_drafters_are_paced_in_batches_and_may_be_cancelled(kind: str, has_copies: bool) -> None:
    """Free rows, so that there are drafts; one text is cancelled on its way, the others are as they would be."""
    budget = CostBudget(PassCosts(rows=((1, 1.0), (64, 1.0)), drafts=((1, ((2, 1e-6),)),)))
    drafter: Drafter = Paced(made(kind), budget)
    if has_copies:
        drafter = Combined(PromptLookup(6, 4, 2), drafter)
    texts = run_paced(drafter, budget, requests(5, 0.8), 3, cancelled="0")
    assert texts["0"].finish_reason == "cancelled"
    for expected in plain(0.8)[1:]:
        assert texts[expected.request_id].token_ids == expected.token_ids
    steps = [s for text in texts.values() for s in text.steps]
    assert sum(s.num_accepted for s in steps) > 5 and not any(s.num_drafted for s in texts["3"].steps)
    assert budget.calibration._cells, "what stood was learnt"


def test_where_nothing_pays_nothing_is_drafted() -> None:
    budget = CostBudget(PassCosts(rows=((1, 1.0), (2, 11.0)), drafts=((1, ((2, 50.0),)),)))
    drafter = Paced(made("chains"), budget)
    texts = run_paced(drafter, budget, requests(5, 0.0), 5)
    assert sum(s.num_drafted for text in texts.values() for s in text.steps) == 0
