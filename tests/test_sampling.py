"""The draw: keyed noise, the softmax's own distribution, and a joint of several tokens that speculation leaves alone.

Every statistical test uses fixed seeds and fails a correct law once in a million draws of those seeds.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2, kstest

from paceline.core.noise import gumbel_row
from paceline.core.params import GREEDY_BELOW, SamplingParams
from paceline.core.sampling import Law
from paceline.core.types import EMPTY_PROPOSAL, Proposal, Request
from paceline.drafter.base import Drafter
from paceline.engine import tree
from paceline.engine.engine import Engine
from paceline.target.base import VerifyRows
from paceline.target.native import NativeTarget
from paceline.testing import (
    END_TOKEN,
    Memory,
    ScriptedDrafter,
    TreeDrafter,
    run_checked,
    tiny_drafter,
    tiny_target,
)

FALSE_ALARM = 1e-6
LOGITS = torch.tensor([1.0, -2.0, 0.5, 3.0, 2.9, -40.0], dtype=torch.float64)
IMPOSSIBLE = -math.inf


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


# Noise ---------------------------------------------------------------------------------------------------------------


def plain_noise(seed: int, sample_index: int, position: int, token: int) -> float:
    """Returns one token's noise by whole numbers, as the law states it."""
    digest = hashlib.blake2b(f"{seed}:{sample_index}:{position}".encode(), digest_size=8).digest()
    x = token
    for start in (0, 4):
        x ^= int.from_bytes(digest[start : start + 4], "little")
        for shift, multiplier in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
            x = ((x ^ (x >> shift)) * multiplier) & 0xFFFFFFFF
        x ^= x >> 16
    uniform = np.float32((x & 0x7FFFFFFF) * 2.0**-31) + np.float32(2.0**-32)
    return -math.log(-math.log1p(-min(float(uniform), 1.0 - 2.0**-24)))


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**63 - 1), st.integers(0, 127), st.integers(0, 10**6))
def test_noise_is_the_hash_that_it_says_it_is(seed: int, sample_index: int, position: int) -> None:
    row = gumbel_row(seed, sample_index, position, 300)
    assert row.dtype == torch.float32
    expected = [plain_noise(seed, sample_index, position, token) for token in range(300)]
    torch.testing.assert_close(row.double(), torch.tensor(expected).double(), rtol=2e-6, atol=2e-6)


def test_noise_is_pinned() -> None:
    """Stored seeds must go on meaning the same texts, so a change of the noise is a break."""
    for key, first, winner in (
        ((0, 0, 0), [1.0136707, 1.2242950, -0.7281211], 21293),
        ((7, 1, 123), [0.7822812, 1.4588510, 0.7788287], 2328),
        ((2**63 - 1, 127, 10**6), [-0.9213680, -0.0226810, -0.4799920], 40066),
    ):
        row = gumbel_row(*key, 49152)
        assert row[:3].tolist() == pytest.approx(first, rel=1e-5)
        assert row.argmax().item() == winner


def test_a_drawn_text_is_pinned() -> None:
    law = Law(SamplingParams(temperature=0.8, top_p=0.95), 6, seed=11)
    text = [0]
    for _ in range(24):
        text.append(int(law.choose(LOGITS[None], text)))
    assert "".join(map(str, text)) == "0434344433344334443443344"


def test_noise_is_a_function_of_its_key_alone() -> None:
    keys = [
        *product(range(12), range(12), range(12)),
        (1, 23, 4),
        (12, 3, 4),
        (1, 2, 34),
        (2**63 - 1, 0, 10**6),
    ]
    rows = {key: tuple(gumbel_row(*key, 4).tolist()) for key in keys}
    assert len(set(rows.values())) == len(keys)
    assert all(tuple(gumbel_row(*key, 4).tolist()) == rows[key] for key in keys[:50])


@pytest.mark.parametrize("by", ["token", "position", "seed", "sample"])
def test_noise_is_gumbel(by: str) -> None:
    rows = {
        "token": lambda: [gumbel_row(3, 1, 4, 200_000)],
        "position": lambda: [gumbel_row(3, 1, i, 2) for i in range(3000)],
        "seed": lambda: [gumbel_row(i, 1, 3, 2) for i in range(3000)],
        "sample": lambda: [gumbel_row(3, i, 3, 2) for i in range(3000)],
    }[by]()
    noise = torch.cat(rows).double().numpy()
    assert np.isfinite(noise).all()
    assert kstest(noise, "gumbel_r").pvalue > FALSE_ALARM


@pytest.mark.parametrize("by", ["next position", "next seed", "next sample", "next token", "256 tokens on"])
def test_neighbouring_noise_is_independent(by: str) -> None:
    size = 50_000
    there = {
        "next position": (3, 0, 8, 0),
        "next seed": (4, 0, 7, 0),
        "next sample": (3, 1, 7, 0),
        "next token": (3, 0, 7, 1),
        "256 tokens on": (3, 0, 7, 256),
    }[by]
    here = gumbel_row(3, 0, 7, size + 256)[:size]
    beside = gumbel_row(*there[:3], size + 256)[there[3] : there[3] + size]
    cells = [(x.neg().exp().neg().exp() * 10).long().clamp(0, 9) for x in (here, beside)]
    counts = torch.bincount(cells[0] * 10 + cells[1], minlength=100).tolist()
    assert p_value(counts, [size / 100] * 100) > FALSE_ALARM


# Logits → token ------------------------------------------------------------------------------------------------------


def draws(
    params: SamplingParams, num_draws: int, logits_V: torch.Tensor = LOGITS, seed: int = 11
) -> Counter[int]:
    """Returns how often each token is drawn from the same logits at so many positions."""
    law = Law(params, len(logits_V), seed=seed)
    chain = Proposal.chain([0] * (num_draws - 1))
    return Counter(law.choose(logits_V.expand(num_draws, -1), [0], chain).tolist())


FILTERED = [
    (SamplingParams(temperature=0.3), {0, 1, 2, 3, 4, 5}),
    (SamplingParams(temperature=1.0), {0, 1, 2, 3, 4, 5}),
    (SamplingParams(temperature=5.0), {0, 1, 2, 3, 4, 5}),
    (SamplingParams(temperature=100.0), {0, 1, 2, 3, 4, 5}),
    (SamplingParams(temperature=2.0, top_k=3), {0, 3, 4}),
    (SamplingParams(temperature=2.0, top_p=0.6), {3, 4}),
    (SamplingParams(temperature=1.0, min_p=0.08), {0, 2, 3, 4}),
    (SamplingParams(temperature=1.0, allowed_token_ids=(0, 2)), {0, 2}),
]


@pytest.mark.parametrize(("params", "possible"), FILTERED)
def test_tokens_follow_the_softmax(params: SamplingParams, possible: set[int]) -> None:
    num_draws = 3000
    weights = [
        math.exp(x / params.temperature) if token in possible else 0.0
        for token, x in enumerate(LOGITS.tolist())
    ]
    expected = [num_draws * weight / sum(weights) for weight in weights]
    counts = draws(params, num_draws)
    assert p_value([counts[i] for i in range(6)], expected) > FALSE_ALARM
    assert set(counts) <= possible


@pytest.mark.parametrize("temperature", [0.3, 1.0, 5.0])
def test_many_draws_follow_the_softmax(temperature: float) -> None:
    """As the law draws, with the noise of one long row for that of many positions."""
    num_draws = 50_000
    noise = gumbel_row(5, 0, 9, 6 * num_draws).view(num_draws, 6)
    shaped = Law(SamplingParams(temperature=temperature), 6).shape(LOGITS[None])
    counts = torch.bincount((shaped + noise).argmax(dim=-1), minlength=6).tolist()
    expected = (num_draws * (LOGITS / temperature).softmax(dim=-1)).tolist()
    assert p_value(counts, expected) > FALSE_ALARM


@settings(deadline=None, max_examples=50)
@given(
    st.integers(1, 6),
    st.integers(2, 9),
    st.integers(0, 99),
    st.sampled_from([torch.float32, torch.float64]),
    st.sampled_from([0.0, 1e-300, 9.9e-6]),
)
def test_below_the_least_temperature_is_greedy(
    rows: int, vocab: int, seed: int, dtype: torch.dtype, temperature: float
) -> None:
    """Whatever filters ask for, since the likeliest token passes them all; of equals the first."""
    logits = (
        torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)).round(decimals=1).to(dtype)
    )
    params = SamplingParams(temperature=temperature, top_k=1, top_p=0.1, min_p=0.5)
    assert params.is_greedy
    tokens = Law(params, vocab, seed=seed).choose(logits, [0], Proposal.chain([0] * (rows - 1)))
    assert tokens.tolist() == [row.index(max(row)) for row in logits.tolist()]
    assert tokens.dtype == torch.int64


def test_the_least_temperature_is_nearly_greedy() -> None:
    params = SamplingParams(temperature=GREEDY_BELOW)
    assert not params.is_greedy
    assert set(draws(params, 200, LOGITS.float())) == {3}
    assert set(draws(params, 200, torch.zeros(4))) == {0, 1, 2, 3}, "equals are drawn"


def test_an_impossible_token_is_never_drawn() -> None:
    logits = torch.tensor([IMPOSSIBLE, 0.0, IMPOSSIBLE, 0.0, IMPOSSIBLE])
    assert set(draws(SamplingParams(temperature=1.0), 1000, logits)) == {1, 3}


def test_the_only_token_left_is_drawn_with_the_worst_noise() -> None:
    vocab = 5000
    law = Law(SamplingParams(temperature=1.0), vocab, seed=2)
    worst = int(gumbel_row(2, 0, 1, vocab).argmin())
    logits = torch.full((1, vocab), IMPOSSIBLE)
    logits[0, worst] = -1e30
    assert law.choose(logits, [0]).tolist() == [worst]
    only = Law(SamplingParams(temperature=1.0, allowed_token_ids=(worst,)), vocab, seed=2)
    assert only.choose(torch.zeros(1, vocab), [0]).tolist() == [worst]


def test_a_row_is_drawn_at_the_position_behind_its_node() -> None:
    """Siblings share a position's noise; a child has the next one's."""
    law, flat = Law(SamplingParams(temperature=1.0), 300, seed=9, sample_index=4), torch.zeros(4, 300)
    chosen = law.choose(flat, [5, 6], Proposal((1, 2, 3), (0, 0, 1))).tolist()
    assert chosen == [int(gumbel_row(9, 4, position, 300).argmax()) for position in (2, 3, 3, 4)]


# What a drafter may know ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.3, 2.0])
def test_a_drafter_sees_the_noise_that_the_law_will_add(temperature: float) -> None:
    law = Law(SamplingParams(temperature=temperature), 50, seed=3)
    logits = torch.randn(64, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    guesses = law.perturb(logits, position=3).argmax(dim=-1)
    assert torch.equal(guesses, law.choose(logits, [1, 2, 3], Proposal.chain([4] * 63)))
    assert guesses.tolist() != logits.argmax(dim=-1).tolist()


def test_a_reduced_vocabulary_has_the_columns_of_the_whole() -> None:
    law, ids = Law(SamplingParams(temperature=0.7), 50, seed=3), torch.tensor([3, 4, 17, 49])
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    assert torch.equal(law.perturb(logits[:, ids], 8, ids), law.perturb(logits, 8)[:, ids])


def test_a_greedy_law_has_no_noise() -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    assert law_memory(Law(SamplingParams(), 50), logits) == []
    assert torch.equal(Law(SamplingParams(), 50).perturb(logits, 8), logits)


def law_memory(law: Law, logits: torch.Tensor) -> list[int]:
    """Returns the positions whose noise a law remembers after judging a block at positions 2…"""
    law.choose(logits, [1, 2], Proposal.chain([0] * (len(logits) - 1)))
    return sorted(law._noise)


def test_noise_of_decided_positions_is_forgotten() -> None:
    law, logits = Law(SamplingParams(temperature=1.0), 50, seed=3), torch.zeros(4, 50)
    assert law_memory(law, logits) == [2, 3, 4, 5]
    before = law.choose(logits, [1, 2], Proposal.chain([0] * 3))
    law.forget_before(4)
    assert sorted(law._noise) == [4, 5]
    assert torch.equal(law.choose(logits, [1, 2], Proposal.chain([0] * 3)), before)


# The joint distribution under speculation ----------------------------------------------------------------------------

VOCAB, NUM_TEXTS = 4, 400
PROMPT = (1, 3, 0)
PLAIN = SamplingParams(temperature=1.2)
RICH = SamplingParams(
    temperature=3.0,
    top_p=0.93,
    repetition_penalty=1.3,
    presence_penalty=1.5,
    frequency_penalty=2.0,
    logit_bias={1: 1.5},
    min_new_tokens=2,
)


@pytest.fixture(scope="module")
def model() -> NativeTarget:
    return tiny_target(3, vocab_size=VOCAB, num_layers=2, max_positions=32)


def distribution(model: NativeTarget, text: tuple[int, ...], params: SamplingParams) -> list[float]:
    """Returns the next token's probabilities by a plain reading of the parameters that `RICH` uses."""
    session = model.open(8)
    (output,) = model.verify([VerifyRows(session, (*PROMPT, *text), EMPTY_PROPOSAL, last_row_only=True)])
    session.close()
    weights = []
    for token, logit in enumerate(output.logits[0].tolist()):
        logit += dict(params.bias).get(token, 0.0)
        if token in PROMPT + text:
            logit = logit * params.repetition_penalty if logit < 0 else logit / params.repetition_penalty
        logit -= params.frequency_penalty * text.count(token) + params.presence_penalty * (token in text)
        waits = token == END_TOKEN and len(text) < params.min_new_tokens
        weights.append(0.0 if waits else math.exp(logit / params.temperature))
    probabilities = [weight / sum(weights) for weight in weights]
    mass, kept = 0.0, set()
    for token in sorted(range(VOCAB), key=lambda t: -probabilities[t]):
        if mass < params.top_p:
            kept.add(token)
        mass += probabilities[token]
    total = sum(probabilities[token] for token in kept)
    return [p / total if token in kept else 0.0 for token, p in enumerate(probabilities)]


def joint(model: NativeTarget, length: int, params: SamplingParams) -> dict[tuple[int, ...], float]:
    """Returns the exact probability of every text of `length` tokens."""
    texts: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        texts = {
            (*text, token): probability * p
            for text, probability in texts.items()
            for token, p in enumerate(distribution(model, text, params) if probability else [0.0] * VOCAB)
        }
    return texts


class WholeTree(ScriptedDrafter):
    """Drafts every token and every token behind it, so that the second and third token are accepted drafts."""

    def guess(self, memory: Memory, num_draft_tokens: int) -> Proposal:
        below = [(parent, token) for parent in range(1, VOCAB + 1) for token in range(VOCAB)]
        parents, tokens = zip(*below, strict=True)
        return Proposal((*range(VOCAB), *tokens), ((0,) * VOCAB + parents))


def drafter_of(kind: str, model: NativeTarget) -> Drafter | None:
    """Returns a drafter by name."""
    return {
        "plain": lambda: None,
        "every token": lambda: WholeTree(VOCAB + VOCAB**2 + 1),
        "random trees": lambda: TreeDrafter(6, (), VOCAB),
        "chains": lambda: tiny_drafter(model, 4),
        "trees": lambda: tree.TreeDrafter(tiny_drafter(model, 4), 7),
    }[kind]()  # type: ignore[no-untyped-call]


CASES = [
    ("plain", True, 3, PLAIN),
    ("every token", True, 3, PLAIN),
    ("every token", True, 3, RICH),
    ("random trees", True, 2, RICH),
    ("chains", True, 3, PLAIN),
    ("chains", False, 3, RICH),
    ("trees", True, 3, RICH),
]


@pytest.mark.parametrize(("kind", "keyed", "length", "params"), CASES)
def test_the_joint_of_several_tokens_is_the_targets(
    kind: str, keyed: bool, length: int, params: SamplingParams, model: NativeTarget
) -> None:
    law = {name: getattr(params, name) for name in params.__slots__}
    engine = Engine(model, drafter_of(kind, model), max_sequences=100, keyed_drafts=keyed)
    requests = [
        Request(str(i), PROMPT, SamplingParams(**law | {"max_new_tokens": length, "seed": 10_000 + i}))
        for i in range(NUM_TEXTS)
    ]
    completions = run_checked(engine, requests)
    expected: Counter[tuple[int, ...]] = Counter()
    for text, probability in joint(model, length, params).items():
        end = text.index(END_TOKEN) + 1 if END_TOKEN in text else length
        expected[text[:end]] += NUM_TEXTS * probability  # type: ignore[assignment]
    counts = Counter(c.token_ids for c in completions.values())
    assert set(counts) <= {text for text, expectation in expected.items() if expectation > 0}
    texts = list(expected)
    assert p_value([counts[text] for text in texts], [expected[text] for text in texts]) > FALSE_ALARM
    accepted = sum(step.num_accepted for c in completions.values() for step in c.steps)
    assert (accepted > 0) == (kind != "plain")
    if kind == "every token":
        assert all(step.num_accepted == 2 for c in completions.values() for step in c.steps[:1])
