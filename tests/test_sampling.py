"""The sampling law: keyed, uniform, the softmax's own distribution, and untouched by speculation.

Every chi-square test uses fixed seeds and fails a correct law once in a million draws of those seeds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2

from paceline.core import sampling
from paceline.core.sampling import choose_tokens, keyed_uniform
from paceline.core.types import EMPTY_PROPOSAL, Proposal, Request, SamplingParams
from paceline.engine.engine import Engine
from paceline.target.base import VerifyRows
from paceline.target.native import NativeTarget
from paceline.testing import (
    Memory,
    ScriptedDrafter,
    TreeDrafter,
    run_checked,
    tiny_target,
)

FALSE_ALARM = 1e-6
LOGITS = torch.tensor([1.0, -2.0, 0.5, 3.0, 2.9, -40.0], dtype=torch.float64)


def p_value(counts: Sequence[float], expected: Sequence[float]) -> float:
    """Returns the chance of a chi-square at least as large, after pooling the cells that expect fewer than 5."""
    pooled, rest = [], [0.0, 0.0]
    for count, expectation in zip(counts, expected, strict=True):
        if expectation >= 5:
            pooled.append((count, expectation))
        else:
            rest = [rest[0] + count, rest[1] + expectation]
    if rest[1] > 0:
        pooled.append((rest[0], max(rest[1], 1e-9)))
    statistic = sum((count - expectation) ** 2 / expectation for count, expectation in pooled)
    return float(chi2.sf(statistic, len(pooled) - 1))


def test_the_statistic_finds_a_wrong_distribution() -> None:
    fair, biased = [1000.0] * 4, [1100.0, 1100.0, 900.0, 900.0]
    assert p_value(fair, fair) == 1.0
    assert p_value(biased, fair) < FALSE_ALARM


# The draw ------------------------------------------------------------------------------------------------------------


def test_keyed_uniform_is_a_function_of_its_key() -> None:
    assert keyed_uniform(1, 2) == keyed_uniform(1, 2)
    keys = [*product(range(50), range(50)), (2**63 - 1, 10**6)]
    assert len({keyed_uniform(*key) for key in keys}) == len(keys)  # (1, 23) and (12, 3) are different keys


def test_keyed_uniform_is_pinned() -> None:
    """Stored seeds must go on meaning the same texts, so a change of the draw is a break."""
    assert keyed_uniform(0, 0) == 0.3859926107094097
    assert keyed_uniform(7, 123) == 0.8626964980645386
    assert keyed_uniform(2**63 - 1, 1) == 0.24997269008693568


@pytest.mark.parametrize("by", ["position", "seed"])
def test_keyed_uniform_is_uniform(by: str) -> None:
    draws = [keyed_uniform(3, i) if by == "position" else keyed_uniform(i, 3) for i in range(20_000)]
    assert all(0.0 <= draw < 1.0 for draw in draws)
    counts = Counter(int(draw * 100) for draw in draws)
    assert p_value([counts[i] for i in range(100)], [200.0] * 100) > FALSE_ALARM


@pytest.mark.parametrize(("step", "name"), [((0, 1), "next position"), ((1, 0), "next seed")])
def test_neighbouring_draws_are_independent(step: tuple[int, int], name: str) -> None:
    counts = Counter(
        (
            int(keyed_uniform(seed, position) * 10),
            int(keyed_uniform(seed + step[0], position + step[1]) * 10),
        )
        for seed, position in product(range(0, 200, 2), range(0, 200, 2))
    )
    cells = [counts[cell] for cell in product(range(10), range(10))]
    assert p_value(cells, [100.0] * 100) > FALSE_ALARM


# Logits → token ------------------------------------------------------------------------------------------------------


def draws(temperature: float, num_draws: int, seed: int = 11) -> Counter[int]:
    rows = LOGITS.expand(num_draws, -1)
    return Counter(
        choose_tokens(rows, SamplingParams(temperature=temperature), seed, range(num_draws)).tolist()
    )


@pytest.mark.parametrize("temperature", [0.3, 1.0, 5.0])
def test_tokens_follow_the_softmax(temperature: float) -> None:
    counts = draws(temperature, 20_000)
    expected = (20_000 * (LOGITS / temperature).softmax(dim=-1)).tolist()
    assert p_value([counts[i] for i in range(len(LOGITS))], expected) > FALSE_ALARM


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(-50, 50), min_size=1, max_size=9), st.integers(0, 2**63 - 1), st.integers(0, 10**6))
def test_the_draw_inverts_the_cdf(logits: list[float], seed: int, position: int) -> None:
    """Against a plain loop over the probabilities."""
    row = torch.tensor([logits], dtype=torch.float64)
    (token,) = choose_tokens(row, SamplingParams(temperature=0.7), seed, [position]).tolist()
    top = max(logits)
    weights = [math.exp((x - top) / 0.7) for x in logits]
    below = sum(weights[:token]) / sum(weights)
    upto = sum(weights[: token + 1]) / sum(weights)
    assert below - 1e-12 <= keyed_uniform(seed, position) <= upto + 1e-12


@settings(deadline=None, max_examples=50)
@given(
    st.integers(1, 6), st.integers(2, 9), st.integers(0, 99), st.sampled_from([torch.float32, torch.float64])
)
def test_temperature_zero_is_argmax(rows: int, vocab: int, seed: int, dtype: torch.dtype) -> None:
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)).to(dtype)
    tokens = choose_tokens(logits, SamplingParams(), seed, range(rows))
    assert tokens.tolist() == logits.argmax(dim=-1).tolist()
    assert tokens.dtype == torch.int64


@pytest.mark.parametrize("temperature", [1e-3, 1e-12, 1e-300, 5e-324])
def test_a_tiny_temperature_is_nearly_argmax(temperature: float) -> None:
    """Down to the smallest positive number, where a logit divided by it is infinite."""
    assert set(draws(temperature, 200)) == {3}
    zeros = torch.zeros(1, 4)
    assert choose_tokens(zeros, SamplingParams(temperature=temperature), 0, [0]).item() in range(4)


def test_a_large_temperature_is_uniform() -> None:
    counts = draws(100.0, 6000)
    expected = (6000 * (LOGITS / 100.0).softmax(dim=-1)).tolist()
    assert p_value([counts[i] for i in range(6)], expected) > FALSE_ALARM
    assert min(counts.values()) > 600


def test_an_impossible_token_is_never_drawn() -> None:
    logits = torch.tensor([[-math.inf, 0.0, -math.inf, 0.0, -math.inf]]).expand(2000, -1)
    tokens = choose_tokens(logits, SamplingParams(temperature=1.0), 5, range(2000)).tolist()
    assert set(tokens) == {1, 3}


@pytest.mark.parametrize(("draw", "token"), [(0.0, 1), (0.25, 2), (0.5, 4), (0.75, 5), (1 - 2**-53, 5)])
def test_a_draw_on_an_edge_belongs_to_the_token_above(
    draw: float, token: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four tokens share the unit interval; impossible ones, at the front too, have nothing of it."""
    monkeypatch.setattr(sampling, "keyed_uniform", lambda seed, position: draw)
    logits = torch.tensor([[-math.inf, 0.0, 0.0, -math.inf, 0.0, 0.0]])
    assert choose_tokens(logits, SamplingParams(temperature=1.0), 0, [0]).tolist() == [token]


def test_rows_are_drawn_one_by_one() -> None:
    """A row's token depends on its own logits and position, not on the rows beside it."""
    logits = torch.randn(8, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    params = SamplingParams(temperature=1.0)
    together = choose_tokens(logits, params, 9, range(40, 48)).tolist()
    alone = [choose_tokens(logits[i : i + 1], params, 9, [40 + i]).item() for i in range(8)]
    assert together == alone


# The joint distribution under speculation ----------------------------------------------------------------------------

VOCAB, NUM_TEXTS, TEMPERATURE = 4, 1200, 1.2
PROMPT = (1, 3, 0)


@pytest.fixture(scope="module")
def model() -> NativeTarget:
    return tiny_target(vocab_size=VOCAB, num_layers=1, max_positions=16)


@pytest.fixture(scope="module")
def joint(model: NativeTarget) -> dict[tuple[int, int], float]:
    """Exact probability of the first two tokens, from the target's own logits."""

    def distribution(tokens: tuple[int, ...]) -> list[float]:
        session = model.open(8)
        (output,) = model.verify([VerifyRows(session, tokens, EMPTY_PROPOSAL, last_row_only=True)])
        session.close()
        probabilities: list[float] = (output.logits[0] / TEMPERATURE).softmax(dim=-1).tolist()
        return probabilities

    first = distribution(PROMPT)
    return {
        (a, b): first[a] * second for a in range(VOCAB) for b, second in enumerate(distribution((*PROMPT, a)))
    }


class WholeTree(ScriptedDrafter):
    """Drafts every token, so that the second token is always an accepted draft."""

    def guess(self, memory: Memory, num_draft_tokens: int) -> Proposal:
        return Proposal(tuple(range(VOCAB)), (0,) * VOCAB)


@pytest.mark.parametrize("kind", ["plain", "every token", "tree"])
def test_the_joint_of_two_tokens_is_the_targets(
    kind: str, model: NativeTarget, joint: dict[tuple[int, int], float]
) -> None:
    drafter = {
        "plain": None,
        "every token": WholeTree(VOCAB + 1),
        "tree": TreeDrafter(6, (), VOCAB),
    }[kind]
    engine = Engine(model, drafter, max_sequences=100)
    requests = [
        Request(str(i), PROMPT, SamplingParams(2, TEMPERATURE, seed=10_000 + i, ignore_eos=True))
        for i in range(NUM_TEXTS)
    ]
    completions = run_checked(engine, requests)
    counts = Counter(c.token_ids for c in completions.values())
    pairs = list(joint)
    assert (
        p_value([counts[pair] for pair in pairs], [NUM_TEXTS * joint[pair] for pair in pairs]) > FALSE_ALARM
    )
    accepted = sum(step.num_accepted > 0 for c in completions.values() for step in c.steps)
    if kind == "every token":
        assert accepted == NUM_TEXTS
    elif drafter is not None:
        assert 0 < accepted < NUM_TEXTS
