"""Requests of every kind in one batch, admitted and cancelled at any step: each has the text it has alone.

Tiny pairs in float64, so texts are compared for equality. The grammar is a toy over token ids (runs of even and odd
tokens), the text a toy of characters with two tokens each, so that stop strings and half characters meet blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.errors import RequestError
from paceline.core.params import Grammar, SamplingParams
from paceline.core.types import Completion, Request
from paceline.drafter.base import Drafter
from paceline.engine.engine import Engine
from paceline.engine.tree import TreeDrafter
from paceline.testing import END_TOKEN, RandomDrafter, run_checked, tiny_drafter, tiny_target

VOCAB = 61
TARGET = tiny_target(vocab_size=VOCAB)
DFLASH = tiny_drafter(TARGET, 6)
DRAFTERS: dict[str, Drafter] = {
    "chain": DFLASH,
    "tree": TreeDrafter(DFLASH, 7),
    "random": RandomDrafter(5, VOCAB, seed=3),
}


@dataclass
class Runs:
    """Texts in which runs of `length` even and odd tokens take turns; they may end at the end of a run."""

    length: int
    tokens: list[int] = field(default_factory=list)

    @property
    def has_ended(self) -> bool:
        return END_TOKEN in self.tokens

    def mask(self) -> torch.Tensor:
        legal = torch.zeros(VOCAB, dtype=torch.bool)
        if not self.has_ended:
            legal[len(self.tokens) // self.length % 2 :: 2] = True
        legal[END_TOKEN] = self.has_ended or (bool(self.tokens) and len(self.tokens) % self.length == 0)
        return legal

    def advance(self, tokens: Sequence[int]) -> None:
        for i, token in enumerate(tokens):
            if not self.mask()[token]:
                self.retreat(i)
                raise RequestError(f"token {token}")
            self.tokens.append(token)

    def retreat(self, num_tokens: int) -> None:
        del self.tokens[len(self.tokens) - num_tokens :]


class Pairs:
    """A character is two tokens; the first alone is nothing yet."""

    def __init__(self) -> None:
        self._waiting: list[int] = []

    def push(self, ids: Sequence[int]) -> str:
        self._waiting += ids
        whole = len(self._waiting) // 2 * 2
        text = "".join(chr(97 + (a + b) % 5) for a, b in zip(*[iter(self._waiting[:whole])] * 2, strict=True))
        del self._waiting[:whole]
        return text

    def flush(self) -> str:
        rest = "?" * len(self._waiting)
        self._waiting = []
        return rest


def engine(drafter: Drafter | None, max_sequences: int) -> Engine:
    return Engine(
        TARGET,
        drafter,
        max_sequences=max_sequences,
        new_decoder=Pairs,
        open_grammar=lambda grammar: Runs(int(grammar.source)),
    )


ids = st.integers(0, VOCAB - 1)
T = TypeVar("T")


def tuples(items: st.SearchStrategy[T], least: int, most: int) -> st.SearchStrategy[tuple[T, ...]]:
    return st.lists(items, min_size=least, max_size=most).map(lambda values: tuple(values))


words = st.lists(tuples(ids, 1, 2), max_size=2)
greedy_or_hot = st.sampled_from([0.0, 0.3, 1.0, 1.5])


@st.composite
def params(draw: st.DrawFn) -> SamplingParams:
    grammar = draw(
        st.none()
        | st.builds(Grammar, st.just("regex"), st.sampled_from("1234"), st.tuples(ids) | st.just(()))
    )
    free = grammar is None
    forbidden = tuple(draw(words))
    return SamplingParams(
        max_new_tokens=draw(st.integers(3, 24)),
        temperature=draw(greedy_or_hot),
        top_k=draw(st.sampled_from([0, 3, 20])),
        top_p=draw(st.sampled_from([1.0, 0.9, 0.4])),
        min_p=draw(st.sampled_from([0.0, 0.05])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.3])),
        presence_penalty=draw(st.sampled_from([0.0, 0.7])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.4])),
        logit_bias=draw(st.dictionaries(ids, st.floats(-3, 3), max_size=3)),
        bad_words=forbidden if free else (),
        stop=draw(tuples(st.text("abcde", min_size=1, max_size=3), 0, 2)),
        stop_token_ids=draw(tuples(ids, 0, 2)),
        min_new_tokens=draw(st.integers(0, 3)) if free else 0,
        ignore_eos=draw(st.booleans()) if free else False,
        grammar=grammar,
        seed=draw(st.integers(0, 2**63 - 1)),
        logprobs=draw(st.none() | st.integers(0, 3)),
    )


def alone(request: Request) -> Completion:
    return run_checked(engine(None, 1), [request])[request.id]


def assert_same(got: Completion, expected: Completion, was_cancelled: bool) -> None:
    if was_cancelled and got.finish_reason == "cancelled":
        assert got.token_ids == expected.token_ids[: len(got.token_ids)]
        assert expected.text.startswith(got.text.rstrip("?"))
        return
    assert (got.token_ids, got.text) == (expected.token_ids, expected.text)
    assert (got.finish_reason, got.stop_reason) == (expected.finish_reason, expected.stop_reason)
    if expected.logprobs is not None:
        assert got.logprobs is not None and len(got.logprobs) == len(got.token_ids)
        for one, other in zip(got.logprobs, expected.logprobs, strict=True):
            assert abs(one.logprob - other.logprob) < 1e-9
            assert [token for token, _ in one.top] == [token for token, _ in other.top]


@settings(deadline=None, max_examples=60)
@given(
    drafter=st.sampled_from(sorted(DRAFTERS)),
    asked=st.lists(st.tuples(params(), st.lists(ids, min_size=1, max_size=30)), min_size=2, max_size=7),
    max_sequences=st.integers(1, 5),
    cancels=st.dictionaries(st.integers(0, 20), st.integers(0, 6), max_size=3),
)
def test_each_text_is_the_one_it_is_alone(
    drafter: str,
    asked: list[tuple[SamplingParams, list[int]]],
    max_sequences: int,
    cancels: dict[int, int],
) -> None:
    requests = [Request(str(i), tuple(prompt), one) for i, (one, prompt) in enumerate(asked)]
    together = engine(DRAFTERS[drafter], max_sequences)
    cancelled = set()

    def before_step(number: int) -> None:
        name = str(cancels.get(number, -1))
        if together.cancel(name):
            cancelled.add(name)

    completions = run_checked(together, requests, before_step)
    for request in requests:
        assert_same(completions[request.id], alone(request), request.id in cancelled)


def test_the_toy_grammar_binds() -> None:
    """Otherwise the property above would say nothing about grammars."""
    request = Request("a", (5, 6), SamplingParams(12, temperature=1.5, seed=1, grammar=Grammar("regex", "2")))
    text = run_checked(engine(DFLASH, 1), [request])["a"].token_ids
    body = [token for token in text if token != END_TOKEN]
    assert [token % 2 for token in body] == [i // 2 % 2 for i in range(len(body))]
    free = run_checked(engine(DFLASH, 1), [Request("a", (5, 6), SamplingParams(12, temperature=1.5, seed=1))])
    assert free["a"].token_ids != text


class DeadEnd(Runs):
    """A language whose texts lead nowhere behind three tokens."""

    def mask(self) -> torch.Tensor:
        if len(self.tokens) >= 3:
            raise RequestError("grammar: nothing may follow")
        return super().mask()


@pytest.mark.parametrize("drafter", [None, *sorted(DRAFTERS)])
def test_a_dead_end_of_a_grammar_ends_one_text_alone(drafter: str | None) -> None:
    doomed = Request("a", (5, 6), SamplingParams(12, 1.0, seed=1, grammar=Grammar("regex", "9")))
    other = Request("b", (7,), SamplingParams(12, 1.0, seed=2, ignore_eos=True))
    together = Engine(
        TARGET,
        DRAFTERS[drafter] if drafter else None,
        new_decoder=Pairs,
        open_grammar=lambda grammar: DeadEnd(int(grammar.source)),
    )
    reasons = []
    together.add(doomed)
    together.add(other)
    while together.has_work:
        reasons += [d.finish_reason for d in together.step() if d.request_id == "a" and d.finish_reason]
    text = together.take_completion("a")
    assert reasons == ["error"] and text.finish_reason == "error"
    assert text.stop_reason == "grammar: nothing may follow"
    assert len(text.token_ids) == 3
    assert together.take_completion("b").token_ids == alone(other).token_ids
