"""τ and speed by real decoding: they are those of the engine's own records, and two drafters meet prompt by prompt."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.core.acceptance import acceptance_length
from paceline.core.params import SamplingParams
from paceline.core.types import Request
from paceline.engine.engine import Engine
from paceline.testing import BigramDrafter, RandomDrafter, run_checked, tiny_target
from paceline.train.adaptation.evaluate import Answer, Comparison, Evaluation, decode, evaluate
from paceline.train.data.prompts import Prompt

TARGET = tiny_target()
PROMPTS = [Prompt(str(i), "ab"[i % 2], (i + 3, i + 5, 4)) for i in range(8)]
BIGRAM = BigramDrafter(TARGET)


def engine(max_sequences: int = 1) -> Engine:
    return Engine(TARGET, BIGRAM, max_sequences=max_sequences)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("max_sequences", [1, 3])
def test_numbers_are_those_of_the_records(temperature: float, max_sequences: int) -> None:
    found = decode(lambda: engine(max_sequences), PROMPTS, max_new_tokens=12, temperature=temperature)
    requests = [
        Request(str(i), p.token_ids, SamplingParams(max_new_tokens=12, temperature=temperature, seed=i))
        for i, p in enumerate(PROMPTS)
    ]
    texts = run_checked(engine(), requests)
    assert [a.token_ids for a in found.answers] == [texts[str(i)].token_ids for i in range(len(PROMPTS))]
    steps = [step for text in texts.values() for step in text.steps]
    said = found.to_dict()
    assert said["acceptance_length"] == acceptance_length(steps)
    assert said["num_steps"] == len(steps)
    of_kind = [step for i, text in enumerate(texts.values()) for step in text.steps if i % 2]
    assert said["by_kind"]["b"] == acceptance_length(of_kind)
    assert found.tokens_per_s > 0


def test_arms_answer_a_prompt_in_turns_before_the_next_comes() -> None:
    order: list[str] = []

    def arm(name: str) -> Engine:
        order.append(name)
        return engine() if name == "a" else Engine(TARGET, RandomDrafter(3, 61), max_sequences=1)

    told: list[int] = []
    found = evaluate(
        {"a": lambda: arm("a"), "b": lambda: arm("b")},
        PROMPTS[:3],
        max_new_tokens=6,
        temperature=0.8,
        tell=lambda: told.append(len(order)),
    )
    assert order == ["a", "b", *"ab", *"ba", *"ab"]  # once to warm up
    assert told == [4, 6, 8]
    compared = Comparison.of(found["b"], found["a"])
    assert compared.num_identical == 3
    after, before = (found[name].to_dict()["acceptance_length"] for name in "ab")
    assert compared.acceptance_length.value == after / before


def answers(*numbers: tuple[int, int, float]) -> Evaluation:
    """Returns an evaluation of texts with (committed tokens, steps, seconds)."""
    return Evaluation(tuple(Answer("k", s, c, (1,) * (c + 1), 0.1, seconds) for c, s, seconds in numbers))


def test_ratios_are_of_pooled_rates_with_paired_intervals() -> None:
    before = answers(*[(20, 20 + 2 * i, 2.0 + i) for i in range(10)])
    after = answers(*[(20, 10 + i, (2.0 + i) / 4) for i in range(10)])
    compared = Comparison.of(before, after)
    for ratio, value in ((compared.acceptance_length, 2.0), (compared.tokens_per_s, 4.0)):
        # prompts differ a lot, but each gained the same: pairs leave no doubt
        assert [ratio.value, ratio.low, ratio.high] == pytest.approx([value] * 3)
    assert compared.num_identical == 10


def test_an_interval_holds_the_doubt_between_prompts() -> None:
    before = answers(*[(20, 10, 1.0)] * 20)
    after = answers(*([(20, 5, 1.0)] * 10 + [(20, 20, 1.0)] * 10))
    ratio = Comparison.of(before, after).acceptance_length
    assert ratio.value == pytest.approx(0.8)
    assert ratio.low < 0.7
    assert ratio.high > 1
    assert Comparison.of(before, after) == Comparison.of(before, after)


def test_texts_that_differ_are_counted() -> None:
    before = answers((20, 10, 1.0), (20, 10, 1.0))
    other = replace(before.answers[1], token_ids=(9,) * 21)
    assert Comparison.of(before, Evaluation((before.answers[0], other))).num_identical == 1


def test_texts_without_steps_count_nothing() -> None:
    empty = answers((0, 0, 0.0))
    assert (empty.to_dict()["acceptance_length"], empty.tokens_per_s) == (1.0, 0.0)
    ratio = Comparison.of(empty, empty).acceptance_length
    assert (ratio.value, ratio.low, ratio.high) == (1.0, 1.0, 1.0)
