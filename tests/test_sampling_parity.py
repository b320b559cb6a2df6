"""The law's operations against transformers' own processors, against plain Python, and row by row against itself.

Two float comparisons are made away from their border, where another order of rounding may decide: the sum of
probabilities at top-p and the share at min-p. `assume` leaves out the few examples that come within 1e-5 of either, or
have two scores so near each other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import GenerationConfig, GenerationMixin, LlamaConfig

from paceline.core.errors import RequestError
from paceline.core.params import SamplingParams
from paceline.core.sampling import Law
from paceline.core.types import EMPTY_PROPOSAL, Proposal

VOCAB = 40
END = 7
DTYPES = (torch.float32, torch.float64)


def normal(rows: int, vocab: int, seed: int, dtype: torch.dtype, scale: float = 3.0) -> torch.Tensor:
    return (scale * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))).to(dtype)


# transformers --------------------------------------------------------------------------------------------------------


class Generator(GenerationMixin):
    """As much of a model as building processors takes."""

    config = LlamaConfig()


def theirs(
    params: SamplingParams, scores: torch.Tensor, tokens: Sequence[int], num_prompt_tokens: int
) -> torch.Tensor:
    """Returns what transformers' processors, built and ordered by itself, make of one row of scores."""
    sampled = not params.is_greedy
    config = GenerationConfig(
        do_sample=sampled,
        num_beams=1,
        num_return_sequences=1,
        sequence_bias={(token,): value for token, value in params.bias} or None,
        repetition_penalty=float(params.repetition_penalty),
        bad_words_ids=[list(word) for word in params.bad_words] or None,
        min_new_tokens=params.min_new_tokens,
        **(
            {
                "temperature": float(params.temperature),
                "top_k": params.top_k,
                "top_p": params.top_p,
                "min_p": params.min_p or None,
            }
            if sampled
            else {}
        ),
    )
    config._eos_token_tensor = torch.tensor(sorted(params.ends((END,))))
    allowed = params.allowed_token_ids
    processors = Generator()._get_logits_processor(  # type: ignore[misc]
        config,
        input_ids_seq_length=num_prompt_tokens,
        prefix_allowed_tokens_fn=None if allowed is None else lambda _, ids: list(allowed),
        device="cpu",
    )
    result: torch.Tensor = processors(torch.tensor([list(tokens)]), scores.clone())  # type: ignore[arg-type]
    return result


token_ids = st.integers(0, VOCAB - 1)
biases = st.dictionaries(token_ids, st.integers(-40, 40).map(lambda n: n / 8), min_size=1, max_size=5)
bad_words = st.lists(
    st.lists(st.integers(0, 5), min_size=2, max_size=3).map(tuple)
    | st.sampled_from(
        [(t,) for t in range(VOCAB) if t != END]
    ),  # transformers drops a bad word that is an end
    min_size=1,
    max_size=12,
).map(tuple)
ADJUSTMENTS: dict[str, st.SearchStrategy[Any]] = {
    "logit_bias": biases,
    "repetition_penalty": st.floats(0.2, 3.0),
    "bad_words": bad_words,
    "min_new_tokens": st.integers(1, 6),
    "allowed_token_ids": st.lists(token_ids, min_size=1, max_size=VOCAB, unique=True).map(tuple),
}
FILTERS: dict[str, st.SearchStrategy[Any]] = {
    "temperature": st.floats(0.05, 4.0),
    "top_k": st.integers(1, VOCAB + 3),
    "top_p": st.floats(0.01, 0.99),
    "min_p": st.floats(0.001, 1.0),
}
histories = st.tuples(
    st.lists(st.integers(0, 9), min_size=1, max_size=5), st.lists(st.integers(0, 9), max_size=6)
)


def given_history(history: tuple[list[int], list[int]], params: SamplingParams) -> tuple[list[int], Law]:
    prompt, text = history
    try:
        params.check_for_target(VOCAB, (END,))
    except RequestError:
        assume(False)
    return prompt + text, Law(params, VOCAB, num_prompt_tokens=len(prompt), eos_token_ids=(END,))


@pytest.mark.parametrize("name", [*ADJUSTMENTS, "all"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_adjustments_are_those_of_transformers_to_the_bit(name: str, dtype: torch.dtype) -> None:
    values = st.fixed_dictionaries(ADJUSTMENTS if name == "all" else {name: ADJUSTMENTS[name]})

    @settings(deadline=None, max_examples=60)
    @given(values, histories, st.integers(0, 10_000))
    def check(values: dict[str, Any], history: tuple[list[int], list[int]], seed: int) -> None:
        params = SamplingParams(**values)
        tokens, law = given_history(history, params)
        logits = normal(1, VOCAB, seed, dtype)
        expected = theirs(params, logits, tokens, len(history[0]))
        assert torch.equal(law.adjust(logits, tokens), expected)
        assert law.choose(logits, tokens).item() == expected.argmax().item()

    check()


def near_the_border(params: SamplingParams, scores: torch.Tensor) -> bool:
    """Whether a breath more or less would keep other tokens of adjusted scores (float64), or two are nearly equal."""
    gaps = scores[scores.isfinite()].sort().values.diff()
    if len(gaps) and gaps.min() < 1e-5:
        return True
    kept = set()
    for sign in (-1, 1):
        breath: dict[str, Any] = {name: getattr(params, name) for name in FILTERS}
        if params.top_p < 1.0:
            breath["top_p"] += sign * 1e-5
        breath["min_p"] = min(1.0, params.min_p * (1 + sign * 1e-5))
        kept.add(tuple(theirs(SamplingParams(**breath), scores, [0], 1).isfinite()[0].tolist()))
    return len(kept) > 1


@pytest.mark.parametrize("name", [*FILTERS, "all filters", "everything"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_filters_keep_what_those_of_transformers_keep(name: str, dtype: torch.dtype) -> None:
    chosen = {
        "all filters": FILTERS,
        "everything": FILTERS | ADJUSTMENTS,
    }.get(name) or {"temperature": st.just(1.0), name: FILTERS[name]}

    @settings(deadline=None, max_examples=60)
    @given(st.fixed_dictionaries(chosen), histories, st.integers(0, 10_000))
    def check(values: dict[str, Any], history: tuple[list[int], list[int]], seed: int) -> None:
        params = SamplingParams(**values)
        tokens, law = given_history(history, params)
        logits = normal(1, VOCAB, seed, dtype)
        adjusted = law.adjust(logits, tokens)
        assume(not near_the_border(params, adjusted.double()))
        expected = theirs(params, logits, tokens, len(history[0]))
        got = law.shape(adjusted)
        assert torch.equal(got.isfinite(), expected.isfinite())
        assert got.max() == 0.0
        rounding = 1e-12 if dtype == torch.float64 else 1e-4  # ours subtracts the largest before it divides
        kept = got.isfinite()
        torch.testing.assert_close(got[kept], expected[kept] - expected.max(), rtol=rounding, atol=rounding)
        torch.testing.assert_close(
            law.log_probs(logits, tokens), expected.double().log_softmax(dim=-1), rtol=rounding, atol=rounding
        )

    check()


@settings(deadline=None, max_examples=100)
@given(st.integers(1, VOCAB), st.floats(0.01, 0.99), st.integers(0, 10_000), st.sampled_from(DTYPES))
def test_equals_stay_together(top_k: int, top_p: float, seed: int, dtype: torch.dtype) -> None:
    """The documented deviation: transformers keeps all ties at the limit of top-k, and some at that of top-p."""
    logits = normal(1, VOCAB, seed, dtype).round()  # a handful of values
    by_rank = SamplingParams(temperature=0.7, top_k=top_k)
    kept = Law(by_rank, VOCAB).shape(logits).isfinite()
    assert torch.equal(kept, theirs(by_rank, logits, [0], 1).isfinite())
    assert kept.sum() >= top_k

    by_mass = SamplingParams(temperature=1.0, top_p=top_p)
    assume(
        not any(
            abs(s - top_p) < 1e-5 for s in logits.double().softmax(-1).sort(descending=True)[0].cumsum(-1)[0]
        )
    )
    ours, some = Law(by_mass, VOCAB).shape(logits).isfinite(), theirs(by_mass, logits, [0], 1).isfinite()
    assert (some <= ours).all()
    assert set(logits[ours & ~some].tolist()) <= {logits[some].min().item()}
    assert logits[ours].min() > logits[~ours].max() if not ours.all() else True


def test_a_bad_word_may_be_an_end_of_text() -> None:
    """The other documented deviation: transformers leaves such a word out."""
    params, logits = SamplingParams(bad_words=((END,), (3,))), normal(1, VOCAB, 0, torch.float64)
    law = Law(params, VOCAB, eos_token_ids=(END,))
    assert law.adjust(logits, [1]).isinf().nonzero()[:, 1].tolist() == [3, END]
    assert theirs(params, logits, [1], 1).isinf().nonzero()[:, 1].tolist() == [3]


# Plain Python --------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=100)
@given(st.floats(-2, 2), st.floats(-2, 2), histories, st.integers(0, 10_000))
def test_presence_and_frequency_count_generated_tokens(
    presence: float, frequency: float, history: tuple[list[int], list[int]], seed: int
) -> None:
    """logit − frequency · count − presence · [count > 0], as OpenAI documents it, over the text without the prompt."""
    params = SamplingParams(presence_penalty=presence, frequency_penalty=frequency)
    tokens, law = given_history(history, params)
    logits = normal(1, VOCAB, seed, torch.float64)
    text = history[1]
    expected = [
        logit - (frequency * text.count(token) + presence * (token in text))
        for token, logit in enumerate(logits[0].tolist())
    ]
    assert law.adjust(logits, tokens)[0].tolist() == expected


def test_penalties_come_after_the_bias_and_before_what_is_forbidden() -> None:
    params = SamplingParams(
        logit_bias={1: -6.0},
        repetition_penalty=2.0,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        bad_words=((2,),),
    )
    law = Law(params, 4, num_prompt_tokens=1)
    adjusted = law.adjust(torch.tensor([[1.0, 4.0, 5.0, 8.0]]), [3, 1, 1])
    assert adjusted.tolist() == [[1.0, (4 - 6) * 2 - 0.5 - 0.5, -math.inf, 4.0]]


def test_where_nothing_applies_the_logits_are_the_very_tensor() -> None:
    logits = normal(3, VOCAB, 0, torch.float32)
    assert Law(SamplingParams(), VOCAB).adjust(logits, [1], Proposal.chain([2, 3])) is logits


@pytest.mark.parametrize(
    "values", [{"logit_bias": {3: 1.0}}, {"repetition_penalty": 2.0}, {"bad_words": ((3,),)}]
)
def test_the_targets_logits_are_left_alone(values: dict[str, Any]) -> None:
    logits = normal(1, VOCAB, 0, torch.float32)
    before = logits.clone()
    law = Law(SamplingParams(temperature=1.0, top_k=3, **values), VOCAB)
    law.choose(logits, [3, 3])
    law.log_probs(logits, [3, 3])
    assert torch.equal(logits, before)


# Rows ----------------------------------------------------------------------------------------------------------------


def path_to(proposal: Proposal, row: int) -> list[int]:
    """Returns the drafts that row `row` stands behind."""
    path: list[int] = []
    while row:
        path.insert(0, proposal.tokens[row - 1])
        row = proposal.parents[row - 1]
    return path


def check_rows_alone(
    law: Law,
    logits_RV: torch.Tensor,
    tokens: list[int],
    proposal: Proposal,
    legal_RV: torch.Tensor | None = None,
) -> None:
    """Checks that every row is, to the bit, what plain decoding makes of its logits after the drafts before it."""
    adjusted = law.adjust(logits_RV, tokens, proposal, legal_RV)
    chosen = law.choose(logits_RV, tokens, proposal, legal_RV)
    log_probs = law.log_probs(logits_RV, tokens, proposal, legal_RV)
    for row in range(len(logits_RV)):
        fresh = Law(
            law.params,
            law.vocab_size,
            seed=law.seed,
            sample_index=law.sample_index,
            num_prompt_tokens=law.num_prompt_tokens,
            eos_token_ids=(END,),
        )
        alone = (
            logits_RV[row : row + 1].clone(),
            tokens + path_to(proposal, row),
            EMPTY_PROPOSAL,
            None if legal_RV is None else legal_RV[row : row + 1],
        )
        assert torch.equal(fresh.adjust(*alone), adjusted[row : row + 1])
        assert fresh.choose(*alone).item() == chosen[row].item()
        assert torch.equal(fresh.log_probs(*alone), log_probs[row : row + 1])


@st.composite
def trees(draw: st.DrawFn) -> Proposal:
    size = draw(st.integers(0, 8))
    return Proposal(
        tuple(draw(st.integers(0, 9)) for _ in range(size)),
        tuple(draw(st.integers(0, i)) for i in range(size)),
    )


@settings(deadline=None, max_examples=150)
@given(
    st.fixed_dictionaries(
        {"temperature": st.sampled_from([0.0, 0.3, 1.0])},
        optional=ADJUSTMENTS
        | {name: FILTERS[name] for name in ("top_k", "top_p", "min_p")}
        | {"presence_penalty": st.floats(-2, 2), "frequency_penalty": st.floats(-2, 2)},
    ),
    histories,
    trees(),
    st.booleans(),
    st.integers(0, 10_000),
    st.sampled_from(DTYPES),
)
def test_a_row_acts_as_if_the_drafts_before_it_had_been_emitted(
    values: dict[str, Any],
    history: tuple[list[int], list[int]],
    proposal: Proposal,
    masked: bool,
    seed: int,
    dtype: torch.dtype,
) -> None:
    params = SamplingParams(**values)
    tokens, _ = given_history(history, params)
    law = Law(
        params, VOCAB, seed=seed, sample_index=1, num_prompt_tokens=len(history[0]), eos_token_ids=(END,)
    )
    logits = normal(len(proposal.tokens) + 1, VOCAB, seed, dtype)
    legal = normal(len(logits), VOCAB, seed + 1, dtype) > 0 if masked else None
    if legal is not None:  # a grammar always leaves what the other filters leave, which a random mask may not
        legal |= (law.adjust(logits, tokens, proposal, legal).amax(dim=-1) == -math.inf)[:, None]
    check_rows_alone(law, logits, tokens, proposal, legal)


@pytest.mark.parametrize("vocab_size", [61, 513, 2000, 49152])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_its_neighbours(vocab_size: int, dtype: torch.dtype) -> None:
    """Flat rows beside peaked ones, and one of many equals."""
    logits = normal(7, vocab_size, 5, dtype)
    logits[1::2] *= 0.05
    logits[4] = logits[4].round()
    proposal = Proposal((1, 2, 3, 4, 5, 6), (0, 1, 1, 0, 4, 4))
    every: tuple[dict[str, Any], ...] = (
        {},
        {"temperature": 1.0},
        {"temperature": 1.0, "top_p": 0.9},
        {"temperature": 0.7, "top_p": 0.99, "top_k": 50, "min_p": 0.01},
        {"temperature": 1.5, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "min_p": 0.02},
    )
    for values in every:
        check_rows_alone(Law(SamplingParams(**values), vocab_size, seed=3), logits, [1, 2, 2], proposal)


@pytest.mark.parametrize("vocab_size", [1, 2, 513, 3000])
@pytest.mark.parametrize("dtype", DTYPES)
def test_top_p_keeps_the_smallest_sufficient_set(vocab_size: int, dtype: torch.dtype) -> None:
    """Against a plain loop: few tokens or nearly all, a row alone and between others, masked tokens in it."""
    rows = torch.cat(
        [normal(1, vocab_size, seed, dtype, scale) for seed, scale in ((1, 0.05), (2, 4.0), (3, 0.5))]
    )
    rows[2, 1::3] = -math.inf
    for top_p in (1e-9, 0.3, 0.9, 0.999):
        kept_RV = Law(SamplingParams(temperature=1.0, top_p=top_p), vocab_size).shape(rows).isfinite()
        for logits, kept in zip(rows, kept_RV, strict=True):
            probabilities = logits.double().softmax(-1).tolist()
            expected, mass = set[int](), 0.0
            for probability, token in sorted(((p, i) for i, p in enumerate(probabilities)), reverse=True):
                if mass >= top_p:
                    break
                expected.add(token)
                mass += probability
            assert set(kept.nonzero()[:, 0].tolist()) == expected


def test_a_filter_never_empties_a_row() -> None:
    logits = normal(4, VOCAB, 1, torch.float32)
    harshest = SamplingParams(temperature=100.0, top_k=1, top_p=1e-9, min_p=1.0)
    assert Law(harshest, VOCAB).shape(logits).isfinite().sum(dim=-1).tolist() == [1] * 4
    gentle = SamplingParams(temperature=1.0, top_k=VOCAB + 9, top_p=1.0 - 1e-16)
    assert Law(gentle, VOCAB).shape(logits).isfinite().all()
