"""The law of the house: no drafter, block size, tree, batch, cancellation or early end changes a token of any text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.errors import ConfigError
from paceline.core.params import SamplingParams
from paceline.core.types import Completion, Proposal, Request
from paceline.drafter.base import Drafter
from paceline.drafter.config import FULL, SLIDING
from paceline.engine.engine import Engine
from paceline.target.native import NativeTarget
from paceline.testing import (
    END_TOKEN,
    AlwaysWrongDrafter,
    ConstantDrafter,
    Memory,
    OracleDrafter,
    RandomDrafter,
    TreeDrafter,
    assert_lossless,
    plain_texts,
    run_checked,
    tiny_drafter,
    tiny_target,
    whole,
)

MAX_POSITIONS = 64
LARGEST_BLOCK = 16
Texts = Sequence[Sequence[int]]
MakeDrafter = Callable[[NativeTarget, int, Texts, int], Drafter]


class Siblings(OracleDrafter):
    """Drafts the right tokens, but all as children of the anchor, where only the first of them is right."""

    def guess(self, memory: Memory, num_draft_tokens: int) -> Proposal:
        chain = super().guess(memory, num_draft_tokens)
        return replace(chain, parents=(0,) * len(chain.tokens))


DRAFTERS: dict[str, MakeDrafter] = {
    "random": lambda target, size, texts, seed: RandomDrafter(size, target.spec.vocab_size, seed),
    "end of text": lambda target, size, texts, seed: ConstantDrafter(size, END_TOKEN),
    "mask": lambda target, size, texts, seed: ConstantDrafter(size, target.spec.vocab_size - 1),
    "oracle": lambda target, size, texts, seed: OracleDrafter(size, texts),
    "always wrong": lambda target, size, texts, seed: AlwaysWrongDrafter(size, texts, target.spec.vocab_size),
    "trees": lambda target, size, texts, seed: TreeDrafter(size, texts, target.spec.vocab_size, seed=seed),
    "siblings": lambda target, size, texts, seed: Siblings(size, texts),
    "dflash": lambda target, size, texts, seed: tiny_drafter(target, size, seed=seed),
    "dflash, window 3": lambda target, size, texts, seed: tiny_drafter(
        target, size, layer_types=(SLIDING, FULL), sliding_window=3, seed=seed
    ),
}


@cache
def target(vocab_size: int) -> NativeTarget:
    """One target for all examples, so that its slots are dirty and its capacity has grown.

    With 5 tokens ends of text and lucky drafts are everywhere; with 61 they are rare.
    """
    return tiny_target(vocab_size=vocab_size, max_positions=MAX_POSITIONS)


def filters(vocab_size: int, max_new_tokens: int) -> st.SearchStrategy[dict[str, Any]]:
    """What else may shape a text: mostly nothing, or a few at a time."""
    tokens = st.integers(0, vocab_size - 1)
    some: dict[str, st.SearchStrategy[Any]] = {
        "top_k": st.integers(1, 4),
        "top_p": st.floats(0.1, 0.99),
        "min_p": st.floats(0.01, 0.5),
        "repetition_penalty": st.floats(0.5, 2.0),
        "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.floats(-2, 2),
        "logit_bias": st.dictionaries(tokens, st.floats(-5, 5), max_size=3),
        "bad_words": st.lists(tokens, min_size=1, max_size=3).map(lambda word: (tuple(word),)),
        "min_new_tokens": st.integers(0, max_new_tokens),
    }
    return st.just({}) | st.fixed_dictionaries({}, optional=some)


@st.composite
def requests(draw: st.DrawFn, vocab_size: int) -> list[Request]:
    tokens = st.integers(0, vocab_size - 1)
    made = []
    for i in range(draw(st.integers(1, 5))):
        max_new_tokens = draw(st.integers(1, 16))
        at_the_limit = draw(st.integers(0, 5)) == 0
        longest = MAX_POSITIONS - max_new_tokens
        length = longest if at_the_limit else draw(st.integers(1, min(longest, 20)))
        prompt = (draw(st.lists(tokens, min_size=1, max_size=8)) * length)[:length]
        params = SamplingParams(
            max_new_tokens=max_new_tokens,
            temperature=draw(st.sampled_from([0.0, 0.0, 0.6, 1.5])),
            seed=draw(st.integers(0, 2**63 - 1)),
            stop_token_ids=tuple(draw(st.lists(tokens, max_size=2))),
            ignore_eos=draw(st.booleans()),
            **draw(filters(vocab_size, max_new_tokens)),
        )
        made.append(Request(f"r{i}", tuple(prompt), params))
    return made


@st.composite
def workloads(draw: st.DrawFn) -> tuple[int, list[Request], str, int, int, int]:
    """Vocabulary size, requests, drafter, its block size, its seed, and how many requests step together."""
    vocab_size, size = draw(st.sampled_from([5, 61])), draw(st.integers(2, LARGEST_BLOCK))
    made = draw(requests(vocab_size))
    sizes = st.one_of(st.none(), st.integers(1, size))
    made = [replace(request, block_size=draw(sizes)) for request in made]
    return (
        vocab_size,
        made,
        draw(st.sampled_from(sorted(DRAFTERS))),
        size,
        draw(st.integers(0, 99)),
        draw(st.integers(1, 5)),
    )


def texts_of(completions: Sequence[Completion]) -> list[tuple[int, ...]]:
    return [whole(completion) for completion in completions]


def free_slots(model: NativeTarget) -> tuple[int, int]:
    """How many K/V slots are free, and how many there are."""
    return len(set(model._free)), model._cache[0][0].shape[0]


@settings(deadline=None, max_examples=60)
@given(workloads())
def test_no_drafter_changes_any_text(workload: tuple[int, list[Request], str, int, int, int]) -> None:
    vocab_size, made, kind, size, seed, max_sequences = workload
    model = target(vocab_size)
    speculating = [request for request in made if request.block_size != 1]  # the only ones a drafter meets
    drafter = DRAFTERS[kind](model, size, texts_of(plain_texts(model, speculating)), seed)
    assert_lossless(model, drafter, made, max_sequences=max_sequences)
    free, slots = free_slots(model)
    assert free == slots


@settings(deadline=None, max_examples=25)
@given(workloads(), st.dictionaries(st.integers(0, 4), st.integers(0, 10)))
def test_cancelling_hurts_nobody_else(
    workload: tuple[int, list[Request], str, int, int, int], cancel_at: dict[int, int]
) -> None:
    vocab_size, made, kind, size, seed, max_sequences = workload
    model = target(vocab_size)
    plain = plain_texts(model, made)
    drafter = DRAFTERS[kind](model, size, texts_of(plain), seed)
    engine = Engine(model, drafter, max_sequences=max_sequences)
    cancelled: set[str] = set()

    def cancel(number: int) -> None:
        for index, when in cancel_at.items():
            if when == number and engine.cancel(f"r{index}"):
                cancelled.add(f"r{index}")
                assert not engine.cancel(f"r{index}"), "a second time there is nothing to cancel"

    completions = run_checked(engine, made, before_step=cancel)
    for expected in plain:
        got = completions[expected.request_id]
        if expected.request_id in cancelled:
            assert got.finish_reason == "cancelled"
            assert got.token_ids == expected.token_ids[: len(got.token_ids)]
        else:
            assert (got.token_ids, got.finish_reason) == (expected.token_ids, expected.finish_reason)
    free, slots = free_slots(model)
    assert free == slots


PROMPTS = ((3, 1, 4), (15, 9), (2, 6, 5, 35, 8, 9), (7, 9, 32))


def sampled(count: int = 4, max_new_tokens: int = 14, temperature: float = 0.8) -> list[Request]:
    """Requests of full length that the end of text cannot shorten."""
    return [
        Request(str(i), PROMPTS[i], SamplingParams(max_new_tokens, temperature, seed=i, ignore_eos=True))
        for i in range(count)
    ]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("size", [2, 5, 16])
def test_an_oracle_is_always_right(size: int, temperature: float) -> None:
    model, made = target(61), sampled(temperature=temperature)
    oracle = OracleDrafter(size, texts_of(plain_texts(model, made)))
    for completion in assert_lossless(model, oracle, made, max_sequences=3):
        left = len(completion.token_ids) - 1  # the first token is prefill's
        for record in completion.steps:
            assert record.num_drafted == record.num_accepted == min(size - 1, left)
            left -= record.num_emitted
        assert left == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_always_wrong_drafter_costs_speed_alone(temperature: float) -> None:
    model, made = target(61), sampled(temperature=temperature)
    wrong = AlwaysWrongDrafter(4, texts_of(plain_texts(model, made)), model.spec.vocab_size)
    for completion in assert_lossless(model, wrong, made, max_sequences=3):
        assert [record.num_accepted for record in completion.steps] == [0] * 13
        assert completion.acceptance_length == 1.0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_text_may_end_anywhere(temperature: float) -> None:
    """At every length, and at every token that is declared an end: inside a block, on its bonus token, at prefill."""
    model = target(61)
    (request,) = sampled(1, temperature=temperature)
    (text,) = plain_texts(model, [request])
    ended = [
        replace(request, id=f"length {n}", params=replace(request.params, max_new_tokens=n))
        for n in range(1, len(text.token_ids) + 1)
    ] + [
        replace(request, id=f"stop {token}", params=replace(request.params, stop_token_ids=(token,)))
        for token in sorted(set(text.token_ids))
    ]
    oracle = OracleDrafter(5, [whole(text)] * len(ended))  # knows the text beyond its end
    for completion in assert_lossless(model, oracle, ended):
        kind, _, value = completion.request_id.partition(" ")
        assert completion.finish_reason == kind
        end = int(value) if kind == "length" else text.token_ids.index(int(value)) + 1
        assert completion.token_ids == text.token_ids[:end]


def test_a_text_may_fill_every_position() -> None:
    model = target(61)
    params = SamplingParams(max_new_tokens=20, ignore_eos=True)
    made = [Request("full", tuple(range(MAX_POSITIONS - 20)), params)]
    oracle = OracleDrafter(LARGEST_BLOCK, texts_of(plain_texts(model, made)))
    (completion,) = assert_lossless(model, oracle, made)
    assert len(whole(completion)) == MAX_POSITIONS
    assert_lossless(model, tiny_drafter(model, LARGEST_BLOCK), made)


def test_a_seed_is_the_text_whatever_travels_with_it() -> None:
    model, made = target(61), sampled(temperature=1.0)
    engine = Engine(model, tiny_drafter(model, 4), max_sequences=4)
    together = run_checked(engine, made)
    for request, alone in zip(made, plain_texts(model, made), strict=True):
        assert together[request.id].token_ids == alone.token_ids
    other_seed = [replace(r, params=replace(r.params, seed=100 + int(r.id))) for r in made]
    assert plain_texts(model, other_seed)[0].token_ids != together["0"].token_ids


@pytest.mark.parametrize("kind", ["oracle", "trees"])
def test_a_drafter_is_shown_the_hidden_states_of_plain_decoding(kind: str) -> None:
    """Rows of refused drafts and of other branches must never reach a drafter."""
    model, made, taps = target(61), sampled(temperature=1.0), (0, 1)
    silent = OracleDrafter(2, (), taps)  # knows no text, so every step is plain
    texts = texts_of(list(run_checked(Engine(model, silent), made).values()))
    speculating = (
        OracleDrafter(5, texts, taps)
        if kind == "oracle"
        else TreeDrafter(9, texts, 61, target_layer_ids=taps)
    )
    run_checked(Engine(model, speculating), made)
    for plain, shown in zip(silent.memories, speculating.memories, strict=True):
        length = min(plain.length, shown.length)
        assert length >= len(PROMPTS[plain.number]) + 12
        torch.testing.assert_close(shown.hidden[:length], plain.hidden[:length], rtol=0, atol=1e-10)


class Stumbling(TreeDrafter):
    """Raises in every third draft."""

    def draft(self, *block: Any, **options: Any) -> list[Proposal]:
        self.num_calls = getattr(self, "num_calls", 0) + 1
        if self.num_calls % 3 == 0:
            raise RuntimeError("stumbled")
        return super().draft(*block, **options)


def test_a_step_that_raised_can_be_repeated() -> None:
    model, made = target(61), sampled(temperature=1.0)
    plain = plain_texts(model, made)
    engine = Engine(model, Stumbling(6, texts_of(plain), 61), max_sequences=3)
    for request in made:
        engine.add(request)
    num_stumbles = 0
    while engine.has_work:
        try:
            engine.step()
        except RuntimeError:
            num_stumbles += 1
        for sequence in engine.scheduler.running:
            sequence.check()
    assert num_stumbles > 1
    assert [engine.take_completion(r.id).token_ids for r in made] == [c.token_ids for c in plain]


def test_sampled_requests_need_a_seed_to_be_compared() -> None:
    request = Request("unseeded", (1, 2), SamplingParams(temperature=1.0))
    with pytest.raises(ConfigError, match="'unseeded'"):
        assert_lossless(target(61), RandomDrafter(4, 61), [request])
