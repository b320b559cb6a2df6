"""Documents → blocks: anchors, labels, order, and a stream that resumes where it stopped."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.errors import ConfigError
from paceline.train.data.batch import (
    BlockSampler,
    Cursor,
    DraftVocabulary,
    TrainBatch,
    draw_anchors,
    generator,
    num_anchors,
)
from paceline.train.data.features import ABSENT, Document, blank_top
from paceline.train.losses import IGNORED

VOCAB, WIDTH = 30, 4
EMBEDDING = torch.randn(VOCAB, WIDTH, generator=torch.Generator().manual_seed(0))


def make_document(number: int, num_prompt: int, num_response: int) -> Document:
    """Hidden rows say where they are from: (document, position, 0, 0)."""
    length = num_prompt + num_response
    ids = torch.tensor([(7 * number + 3 * position) % VOCAB for position in range(length)], dtype=torch.long)
    hidden = torch.zeros(length, WIDTH)
    hidden[:, 0], hidden[:, 1] = number, torch.arange(length)
    hidden[-1] = math.nan  # the row that nobody computed and nobody may see
    return Document(ids, torch.arange(length) >= num_prompt, hidden)


def make_conversation(number: int, turns: Sequence[tuple[int, int]], num_top: int = 0) -> Document:
    """A document of several (prompt, answer) turns; a token's likeliest are itself and those behind it."""
    document = make_document(number, 0, sum(map(sum, turns)))
    mask = torch.cat([torch.arange(p + a) >= p for p, a in turns])
    if not num_top:
        return replace(document, supervised=mask)
    top_ids, top_log_probs = blank_top(len(mask), num_top)
    top_ids[mask] = ((document.token_ids[mask, None] + torch.arange(num_top)) % VOCAB).int()
    top_log_probs[mask] = -torch.arange(num_top).half()
    top_ids[mask, -1] = ABSENT  # fewer had any probability
    return replace(document, supervised=mask, top_ids=top_ids, top_log_probs=top_log_probs)


shapes = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 9)), min_size=1, max_size=7)


@st.composite
def samplers(draw: st.DrawFn) -> tuple[list[Document], dict[str, int]]:
    documents = [make_document(i, *shape) for i, shape in enumerate(draw(shapes))]
    usable = any(num_anchors(document) for document in documents)
    documents += [] if usable else [make_document(len(documents), 2, 5)]
    kwargs = {
        "blocks_per_step": draw(st.integers(1, 12)),
        "anchors_per_document": draw(st.integers(1, 5)),
        "seed": draw(st.integers(0, 10**6)),
    }
    return documents, kwargs


def sampler(documents: Sequence[Document], max_tokens: int | None = None, **kwargs: int) -> BlockSampler:
    vocabulary = DraftVocabulary.covering(documents, VOCAB, max_tokens)
    return BlockSampler(documents, EMBEDDING, vocabulary, **kwargs)


@settings(deadline=None, max_examples=40)
@given(samplers(), st.integers(1, 7))
def test_blocks_are_what_decoding_would_meet(
    case: tuple[list[Document], dict[str, int]], num_drafts: int
) -> None:
    documents, kwargs = case
    batch, _ = sampler(documents, **kwargs).next(Cursor(), 0, num_drafts)
    assert batch.num_blocks == kwargs["blocks_per_step"]
    assert batch.labels.shape == (batch.num_blocks, num_drafts)
    labels = iter(batch.labels.tolist())
    for blocks in batch.documents:
        document = documents[int(blocks.hidden[0, 0])]
        anchors, ids = blocks.anchors.tolist(), document.token_ids.tolist()
        assert 1 <= len(anchors) <= kwargs["anchors_per_document"]
        assert anchors == sorted(set(anchors))
        assert document.supervised[anchors[0]] and anchors[-1] <= len(ids) - 2
        assert len(blocks.hidden) == anchors[-1], "nothing at or behind the last anchor is handed out"
        assert torch.equal(blocks.hidden, document.hidden[: anchors[-1]])
        assert blocks.hidden.isfinite().all()
        assert torch.equal(blocks.token_ids, document.token_ids[: anchors[-1]])
        assert torch.equal(blocks.block_ids[:, 0], document.token_ids[blocks.anchors])
        for anchor in anchors:
            expected = ids[anchor + 1 : anchor + 1 + num_drafts]
            assert next(labels) == expected + [IGNORED] * (num_drafts - len(expected))
    assert next(labels, None) is None


def same_batch(first: TrainBatch, second: TrainBatch) -> bool:
    return torch.equal(first.labels, second.labels) and all(
        torch.equal(getattr(a, field), getattr(b, field))
        for a, b in zip(first.documents, second.documents, strict=True)
        for field in ("hidden", "token_ids", "anchors", "block_ids")
    )


@settings(deadline=None, max_examples=25)
@given(samplers(), st.integers(1, 6))
def test_a_resumed_sampler_draws_what_the_first_would(
    case: tuple[list[Document], dict[str, int]], stopped_at: int
) -> None:
    documents, kwargs = case
    running, cursor = sampler(documents, **kwargs), Cursor()
    for step in range(stopped_at):
        _, cursor = running.next(cursor, step, 3)
    expected, behind = running.next(cursor, stopped_at, 3)
    got, also_behind = sampler(documents, **kwargs).next(cursor, stopped_at, 3)
    assert same_batch(got, expected)
    assert also_behind == behind


@settings(deadline=None, max_examples=25)
@given(samplers())
def test_every_document_is_visited_once_an_epoch(case: tuple[list[Document], dict[str, int]]) -> None:
    documents, kwargs = case
    drawing, cursor, visited = sampler(documents, **kwargs), Cursor(), list[int]()
    usable = [i for i, document in enumerate(documents) if num_anchors(document)]
    assert len(drawing.documents) == len(usable)
    for step in range(30):
        batch, cursor = drawing.next(cursor, step, 3)
        visited += [int(blocks.hidden[0, 0]) for blocks in batch.documents]
    assert (cursor.epoch, cursor.index) == divmod(len(visited), len(usable))
    for start in range(0, len(visited) - len(usable) + 1, len(usable)):
        assert sorted(visited[start : start + len(usable)]) == usable


def test_epochs_are_shuffled_anew_and_seeds_differ() -> None:
    documents = [make_document(i, 2, 5) for i in range(12)]

    def orders(seed: int) -> list[list[int]]:
        drawing, cursor, found = (
            sampler(documents, blocks_per_step=12, anchors_per_document=1, seed=seed),
            Cursor(),
            [],
        )
        for step in range(2):
            batch, cursor = drawing.next(cursor, step, 3)
            found.append([int(blocks.hidden[0, 0]) for blocks in batch.documents])
        return found

    first, second = orders(0)
    assert first != second
    assert orders(0) == [first, second]
    assert orders(1)[0] != first


def test_every_anchor_is_drawn_in_the_end() -> None:
    document = make_document(0, 4, 9)
    assert num_anchors(document) == 8
    rng = generator(3)
    seen = {int(a) for _ in range(60) for a in draw_anchors(document, 2, rng)}
    assert seen == set(range(4, 12))
    assert draw_anchors(document, 99, rng).tolist() == list(range(4, 12))


def test_documents_without_a_pair_of_tokens_are_refused() -> None:
    with pytest.raises(ConfigError, match="responses of at least two tokens, got none"):
        sampler(
            [make_document(0, 5, 1), make_document(1, 3, 0)],
            blocks_per_step=1,
            anchors_per_document=1,
            seed=0,
        )


def test_generators_are_keyed() -> None:
    keys = [(0,), (1,), (0, 0), (0, 1), (1, 0), (0, -2), (0, -3), (2**40, 7)]
    draws = [torch.rand(4, generator=generator(*key)).tolist() for key in keys]
    assert len({tuple(draw) for draw in draws}) == len(keys)
    assert torch.rand(4, generator=generator(0, 1)).tolist() == draws[3]


def test_a_draft_vocabulary_keeps_the_commonest_response_tokens() -> None:
    prompt, response = [9, 9, 9, 9], [5, 5, 5, 2, 2, 7, 1]
    document = Document(torch.tensor(prompt + response), torch.arange(11) >= 4, torch.zeros(11, WIDTH))
    vocabulary = DraftVocabulary.covering([document], VOCAB, 3)
    assert vocabulary.token_ids.tolist() == [1, 2, 5], (
        "prompt tokens do not count; of equals the lower id is kept"
    )
    assert vocabulary.index[[1, 2, 5]].tolist() == [0, 1, 2]
    assert (vocabulary.index == IGNORED).sum() == VOCAB - 3
    for everything in (None, VOCAB, VOCAB + 5):
        whole = DraftVocabulary.covering([document], VOCAB, everything)
        assert torch.equal(whole.token_ids, torch.arange(VOCAB))
        assert torch.equal(whole.index, torch.arange(VOCAB))
    drawing = BlockSampler(
        [document], EMBEDDING, vocabulary, blocks_per_step=1, anchors_per_document=1, seed=0
    )
    labels = drawing.assemble([(document, torch.tensor([4]))], 8).labels.tolist()
    assert labels == [
        [2, 2, 1, 1, IGNORED, 0, IGNORED, IGNORED]
    ]  # 7 is not kept; two slots hang over the end


conversations = st.lists(
    st.lists(st.tuples(st.integers(1, 3), st.integers(0, 5)), min_size=1, max_size=4), min_size=1, max_size=5
)


@settings(deadline=None, max_examples=60)
@given(conversations, st.integers(1, 7), st.integers(0, 10**6), st.booleans())
def test_no_block_leaves_the_answer_that_its_anchor_is_in(
    shapes: list[list[tuple[int, int]]], num_drafts: int, seed: int, kept_whole: bool
) -> None:
    documents = [make_conversation(i, [*turns, (1, 3)], 3) for i, turns in enumerate(shapes)]
    max_tokens = None if kept_whole else 12
    drawing = sampler(documents, max_tokens, blocks_per_step=9, anchors_per_document=4, seed=seed)
    index = DraftVocabulary.covering(documents, VOCAB, max_tokens).index
    batch, _ = drawing.next(Cursor(), 0, num_drafts)
    assert batch.soft is not None
    rows = iter(zip(batch.labels, batch.soft.ids, batch.soft.log_probs, strict=True))
    for blocks in batch.documents:
        document = documents[int(blocks.hidden[0, 0])]
        for anchor in blocks.anchors.tolist():
            labels, soft_ids, log_probs = next(rows)
            assert document.supervised[anchor] and document.supervised[anchor + 1], "a pair of one answer"
            answered = True
            for k in range(num_drafts):
                position = anchor + 1 + k
                answered &= position < len(document.token_ids) and bool(document.supervised[position])
                if not answered:
                    assert labels[k] == IGNORED
                    assert (soft_ids[k] == IGNORED).all()
                    continue
                token = int(document.token_ids[position])
                assert labels[k] == index[token]
                assert soft_ids[k].tolist() == [index[token], index[(token + 1) % VOCAB], IGNORED]
                assert log_probs[k].tolist()[:2] == [0, -1]
    assert next(rows, None) is None


def test_documents_of_several_kinds_are_refused() -> None:
    documents = [make_conversation(0, [(2, 4)]), make_conversation(1, [(2, 4)], 3)]
    with pytest.raises(ConfigError, match=r"equally many likeliest tokens, got \[0, 3\]"):
        sampler(documents, blocks_per_step=1, anchors_per_document=1, seed=0)


def test_without_what_the_target_said_labels_are_hard() -> None:
    drawing = sampler([make_conversation(0, [(2, 4)])], blocks_per_step=1, anchors_per_document=1, seed=0)
    assert drawing.next(Cursor(), 0, 3)[0].soft is None


def test_a_batch_may_be_empty() -> None:
    drawing = sampler([make_conversation(0, [(2, 4)], 3)], blocks_per_step=1, anchors_per_document=1, seed=0)
    batch = drawing.assemble([], 4)
    assert (batch.num_blocks, batch.labels.shape, batch.documents) == (0, (0, 4), [])


def test_what_a_drafter_has_learned_to_draft_stays_in_its_vocabulary() -> None:
    ids = torch.tensor([1, 5, 5, 5, 6, 6, 7])
    document = Document(ids, torch.arange(7) > 0, torch.zeros(7, 2))
    assert DraftVocabulary.covering([document], 20, 3).token_ids.tolist() == [5, 6, 7]
    learned = torch.tensor([2, 11])
    vocabulary = DraftVocabulary.covering([document], 20, 3, learned)
    assert vocabulary.token_ids.tolist() == [2, 5, 11]
    assert vocabulary.index[[2, 5, 11, 6]].tolist() == [0, 1, 2, IGNORED]
