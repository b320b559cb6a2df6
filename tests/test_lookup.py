"""Prompt lookup against a scan of the whole text, and in the engine, where it changes no text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.errors import ConfigError
from paceline.core.params import SamplingParams
from paceline.core.types import EMPTY_PROPOSAL, Request
from paceline.drafter.lookup import Places, PromptLookup
from paceline.engine.engine import Engine
from paceline.target.hf import HFTarget
from paceline.target.native import NativeTarget
from paceline.testing import (
    assert_lossless,
    plain_texts,
    run_checked,
    tiny_shape,
    tiny_target,
    tiny_tensors,
)
from test_native_parity import transformers_model


def scan(text: Sequence[int], num_tokens: int, max_ngram: int, min_ngram: int) -> list[int]:
    """Returns what is drafted behind a text whose last token is the anchor, found by looking everywhere."""
    for size in range(max_ngram, min_ngram - 1, -1):
        for start in range(len(text) - size - 1, -1, -1):
            if size < len(text) and text[start : start + size] == text[-size:]:
                longer = list(text)
                for i in range(num_tokens):
                    longer.append(longer[start + size + i])
                return longer[len(text) :]
    return []


def drafted(drafter: PromptLookup, pieces: Sequence[Sequence[int]], num_tokens: int) -> list[int]:
    """Returns the draft behind a text that was shown in pieces, its last token being the anchor."""
    context = drafter.open(0)
    *shown, anchor = [token for piece in pieces for token in piece]
    for piece in pieces:
        ids, shown = shown[: len(piece)], shown[len(piece) :]
        drafter.inject([context], [torch.zeros(len(ids), 0)], [ids])
    (first,) = drafter.draft([anchor], [context], num_tokens)
    assert drafter.draft([anchor], [context], num_tokens) == [first] and first.is_chain
    return list(first.tokens)


PIECES = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=9), min_size=1, max_size=8)


@settings(deadline=None, max_examples=400)
@given(pieces=PIECES, num_tokens=st.integers(1, 12), sizes=st.tuples(st.integers(1, 4), st.integers(1, 4)))
def test_a_draft_is_what_a_scan_finds(
    pieces: list[list[int]], num_tokens: int, sizes: tuple[int, int]
) -> None:
    drafter = PromptLookup(13, max(sizes), min(sizes))
    text = [token for piece in pieces for token in piece]
    assert drafted(drafter, pieces, num_tokens) == scan(text, num_tokens, max(sizes), min(sizes))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ([1, 2, 3, 9, 1, 2, 3], [9, 1, 2, 3, 9]),  # and on through its own copy
        ([1, 2, 7, 1, 2, 8, 1, 2], [8, 1, 2, 8, 1]),  # the latest place
        ([1, 2, 3, 4, 2, 3, 5, 1, 2, 3], [4, 2, 3, 5, 1]),  # a longer end before a later place
        ([4, 4], [4, 4, 4, 4, 4]),
        ([1, 2, 3], []),
        ([1], []),
    ],
)
def test_the_longest_end_then_the_latest_place(text: list[int], expected: list[int]) -> None:
    assert drafted(PromptLookup(), [text], 5) == expected


def test_contexts_do_not_see_each_other() -> None:
    drafter = PromptLookup(4)
    first, second = drafter.open(8), drafter.open(8)
    rows = torch.zeros(2, 0)
    drafter.inject([first, second], [rows, rows], [[5, 6], [7, 8]])
    drafts = drafter.draft([5, 5], [first, second], 2)
    assert [proposal.tokens for proposal in drafts] == [(6, 5), ()]
    assert drafts[1] is EMPTY_PROPOSAL and (first.length, second.length) == (2, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 1}, "block_size: expected at least 2"),
        ({"max_ngram": 2, "min_ngram": 3}, "got 3 and 2"),
        ({"min_ngram": 0}, "got 0 and 3"),
    ],
)
def test_sizes_that_are_none_are_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PromptLookup(**options)


# In the engine -------------------------------------------------------------------------------------------------------

LOOPS = SamplingParams(max_new_tokens=40, ignore_eos=True)


def repetitive_target(seed: int = 1) -> NativeTarget:
    """Few words, so greedy texts run into loops and sampled ones repeat themselves now and then."""
    return tiny_target(seed, vocab_size=9)


def requests(params: SamplingParams) -> list[Request]:
    """Requests of several lengths, one with a prompt that repeats itself."""
    prompts = [(3, 4, 5), (3,), (5, 6, 7, 8) * 5, (8, 7), (4, 4, 4, 4, 4)]
    return [Request(str(i), prompt, params) for i, prompt in enumerate(prompts)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("max_sequences", "block_size"), [(1, 8), (3, 8), (8, 2), (2, 20)])
def test_no_text_changes(max_sequences: int, block_size: int, temperature: float) -> None:
    """Fewer places than requests, so that some are admitted in the middle of others' texts."""
    params = SamplingParams(max_new_tokens=40, ignore_eos=True, temperature=temperature, seed=4)
    texts = assert_lossless(
        repetitive_target(), PromptLookup(block_size), requests(params), max_sequences=max_sequences
    )
    assert sum(step.num_accepted for text in texts for step in text.steps) > 20


def test_a_loop_is_drafted_whole() -> None:
    (text,) = assert_lossless(repetitive_target(), PromptLookup(8), requests(LOOPS)[:1])
    assert text.steps[-2].num_accepted == 7


def test_drafts_are_what_the_text_so_far_gives() -> None:
    """Which rows the engine shows, in prefill and after each step, is told by what is drafted from them."""
    target, drafter = repetitive_target(), PromptLookup(6, max_ngram=2)
    engine = Engine(target, drafter, max_sequences=2)
    for request in requests(LOOPS):
        engine.add(request)
    num_steps = 0
    while engine.has_work:
        engine.step()
        for sequence in engine.scheduler.running:
            sequence.check()
            assert isinstance(sequence.context, Places)
            (draft,) = drafter.draft([sequence.anchor], [sequence.context], 5)
            assert list(draft.tokens) == scan(sequence.tokens, 5, 2, 1)
            num_steps += 1
    assert num_steps > 20


def test_what_was_cancelled_leaves_nothing_to_others() -> None:
    target, made = repetitive_target(), requests(LOOPS)
    engine = Engine(target, PromptLookup(6), max_sequences=2)

    def cancel(number: int) -> None:
        if number == 2:
            assert engine.cancel("1")

    texts = run_checked(engine, made, before_step=cancel)
    plain = {text.request_id: text for text in plain_texts(target, made)}
    assert texts["1"].finish_reason == "cancelled"
    assert texts["1"].token_ids == plain["1"].token_ids[: len(texts["1"].token_ids)]
    assert all(texts[name].token_ids == plain[name].token_ids for name in "0234")


def test_a_long_prompt_is_shown_piece_by_piece() -> None:
    target = tiny_target(1, vocab_size=9, max_positions=1200)
    prompt = tuple((7 * i * i + i // 5) % 9 for i in range(1100))
    assert_lossless(target, PromptLookup(8), [Request("long", prompt, LOOPS)])


def test_transformers_models_are_drafted_for_without_taps() -> None:
    shape = tiny_shape(vocab_size=9)
    model = transformers_model(shape).double()
    model.load_state_dict(tiny_tensors(shape, 1))
    target = HFTarget(model, name="tiny")
    (text, *_) = assert_lossless(target, PromptLookup(8), requests(LOOPS), max_sequences=2)
    assert sum(step.num_accepted for step in text.steps) > 10


class Noting(PromptLookup):
    """Notes the sizes of the hidden states it is shown."""

    def __init__(self) -> None:
        super().__init__()
        self.shown: list[tuple[int, ...]] = []

    def inject(
        self, contexts: Sequence[Any], hidden: Sequence[torch.Tensor], tokens: Sequence[Sequence[int]]
    ) -> None:
        self.shown += [tuple(rows.shape) for rows in hidden]
        super().inject(contexts, hidden, tokens)


def test_no_hidden_states_are_carried_along() -> None:
    target, drafter = repetitive_target(), Noting()
    target.tap([0, 1])  # what another engine asked for
    (text,) = assert_lossless(target, drafter, requests(LOOPS)[2:3])
    kept = [(step.num_accepted + 1, 0) for step in text.steps]
    assert drafter.shown == [(len(text.prompt_ids), 0), *kept]
