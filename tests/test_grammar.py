"""Languages under speculation: every row is masked as plain decoding would, and no draft changes that."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grammar_texts import (
    EOS,
    GRAMMARS,
    OTHER_EOS,
    VOCAB_SIZE,
    choose,
    padded_compiler,
    two_ended_codec,
    write,
)
from paceline.core.errors import RequestError
from paceline.core.params import Grammar
from paceline.core.types import EMPTY_PROPOSAL, Proposal
from paceline.engine.grammar import Automaton, Delayed, walk
from paceline.target.grammar import GrammarCompiler, TokenAutomaton
from paceline.target.text import TextCodec


class Toy:
    """A random language of 6 tokens, of which 0 ends a text and 5 may meet a limit."""

    ENDS, VOCAB_SIZE = 0, 6

    def __init__(self, seed: int, *, limited: bool = False) -> None:
        self._seed, self._limited = seed, limited
        self.tokens: list[int] = []
        self.num_masks = 0

    @property
    def has_ended(self) -> bool:
        return self.ENDS in self.tokens

    def mask(self) -> torch.Tensor:
        self.num_masks += 1
        if self._limited and 5 in self.tokens:
            raise RequestError("grammar: a limit")
        if self.has_ended:
            return torch.arange(self.VOCAB_SIZE) == self.ENDS
        draws = random.Random(f"{self._seed} {self.tokens}")
        return torch.tensor([draws.random() < 0.6 for _ in range(self.VOCAB_SIZE - 1)] + [True])

    def advance(self, tokens: Sequence[int]) -> None:
        self.tokens += tokens

    def retreat(self, num_tokens: int) -> None:
        assert 0 <= num_tokens <= len(self.tokens)
        del self.tokens[len(self.tokens) - num_tokens :]


def path_of(row: int, proposal: Proposal) -> list[int]:
    """Returns the tokens from the anchor to a row."""
    tokens: list[int] = []
    while row > 0:
        tokens.insert(0, proposal.tokens[row - 1])
        row = proposal.parents[row - 1]
    return tokens


def expected_walk(
    reopen: Callable[[], Automaton], text: list[int], proposal: Proposal
) -> tuple[list[int], torch.Tensor]:
    """Returns the rows that stay and their masks: each from an automaton of its own that was fed its whole path."""

    def after(path: list[int]) -> Automaton:
        fresh = reopen()
        fresh.advance(text + path)
        return fresh

    rows, masks = [0], [after([]).mask()]
    for row, parent in enumerate(proposal.parents, start=1):
        *path, token = path_of(row, proposal)
        if parent in rows and not after(path).has_ended and masks[rows.index(parent)][token]:
            try:
                masks.append(after([*path, token]).mask())
            except RequestError:
                continue
            rows.append(row)
    return rows, torch.stack(masks)


def check_walk(
    reopen: Callable[[], Automaton], automaton: Automaton, text: list[int], proposal: Proposal
) -> None:
    """Compares a walk with the reference, twice, since it must leave the automaton where it was."""
    rows, masks = expected_walk(reopen, text, proposal)
    for _ in range(2):
        part, legal = walk(automaton, proposal)
        assert part.tokens == tuple(proposal.tokens[row - 1] for row in rows[1:])
        assert part.parents == tuple(rows.index(proposal.parents[row - 1]) for row in rows[1:])
        assert legal.dtype == torch.bool and torch.equal(legal, masks)
    assert torch.equal(automaton.mask(), masks[0])


@st.composite
def trees(draw: st.DrawFn, num_tokens: int, max_nodes: int = 16) -> Proposal:
    tokens = draw(st.lists(st.integers(0, num_tokens - 1), max_size=max_nodes))
    if draw(st.booleans()):
        return Proposal.chain(tokens)
    return Proposal(tuple(tokens), tuple(draw(st.integers(0, node)) for node in range(len(tokens))))


@settings(deadline=None, max_examples=300)
@given(seed=st.integers(0, 10**6), limited=st.booleans(), proposal=trees(Toy.VOCAB_SIZE))
def test_each_row_is_masked_as_if_its_path_had_been_emitted(
    seed: int, limited: bool, proposal: Proposal
) -> None:
    def reopen() -> Toy:
        return Toy(seed, limited=limited)

    toy = reopen()
    toy.advance([3, 1])
    check_walk(reopen, toy, [3, 1], proposal)
    assert toy.tokens == [3, 1]
    if not limited:
        toy.num_masks = 0
        assert walk(toy, proposal)[1].shape[0] == toy.num_masks


@settings(deadline=None, max_examples=300)
@given(
    seed=st.integers(0, 10**6), text=st.lists(st.integers(1, 2), max_size=4), proposal=trees(Toy.VOCAB_SIZE)
)
def test_a_delayed_language_begins_in_the_middle_of_a_block(
    seed: int, text: list[int], proposal: Proposal
) -> None:
    def reopen() -> Delayed:
        return Delayed(Toy(seed), (1, 2, 1))

    delayed = reopen()
    delayed.advance(text)
    check_walk(reopen, delayed, text, proposal)


@settings(deadline=None, max_examples=200)
@given(moves=st.lists(st.one_of(st.lists(st.integers(1, 2), max_size=5), st.integers(0, 6)), max_size=20))
def test_a_switch_is_taken_back_with_the_tokens_that_made_it(moves: list[list[int] | int]) -> None:
    inner = Toy(0)
    delayed, tokens = Delayed(inner, (1, 2, 1)), list[int]()
    for move in moves:
        if isinstance(move, int):
            move = min(move, len(tokens))
            delayed.retreat(move)
            del tokens[len(tokens) - move :]
        else:
            delayed.advance(move)
            tokens += move
        found = next((i for i in range(3, len(tokens) + 1) if tokens[i - 3 : i] == [1, 2, 1]), None)
        assert delayed.has_begun == (found is not None)
        assert inner.tokens == ([] if found is None else tokens[found:])


def test_a_language_delayed_by_nothing_begins_at_once() -> None:
    delayed = Delayed(Toy(4), ())
    assert delayed.has_begun and torch.equal(delayed.mask(), Toy(4).mask())


@pytest.fixture(scope="module")
def codec() -> TextCodec:
    return two_ended_codec()


@pytest.fixture(scope="module")
def compiler(codec: TextCodec) -> GrammarCompiler:
    return padded_compiler(codec)


def plausible_tree(automaton: TokenAutomaton, draws: random.Random, num_nodes: int) -> Proposal:
    """Returns a tree whose nodes mostly, but not always, follow the language."""
    tokens: list[int] = []
    parents: list[int] = []
    for node in range(num_nodes):
        parent = node if draws.random() < 0.7 else draws.randrange(node + 1)
        path = path_of(parent, Proposal(tuple(tokens), tuple(parents)))
        token = draws.randrange(VOCAB_SIZE)
        try:
            automaton.advance(path)
            if draws.random() < 0.9:
                token = choose(automaton.mask(), draws)
            automaton.retreat(len(path))
        except RequestError:
            pass  # behind a token that the language forbids
        tokens.append(token)
        parents.append(parent)
    return Proposal(tuple(tokens), tuple(parents))


@pytest.mark.parametrize("name", GRAMMARS)
def test_the_real_automaton_walks_like_a_fresh_one(compiler: GrammarCompiler, name: str) -> None:
    draws = random.Random(5)
    for _ in range(12):
        text = write(compiler.open(GRAMMARS[name]), draws)
        text = text[: draws.randrange(len(text) + 1)]
        automaton = compiler.open(GRAMMARS[name])
        automaton.advance(text)
        proposal = plausible_tree(automaton, draws, 12)
        check_walk(lambda: compiler.open(GRAMMARS[name]), automaton, text, proposal)


@pytest.mark.parametrize("name", GRAMMARS)
def test_the_real_automaton_begins_in_the_middle_of_a_block(compiler: GrammarCompiler, name: str) -> None:
    def reopen() -> Delayed:
        return Delayed(compiler.open(GRAMMARS[name]), (7, 9))

    draws = random.Random(6)
    for _ in range(6):
        text = write(compiler.open(GRAMMARS[name]), draws)[:4]
        inner = compiler.open(GRAMMARS[name])
        inner.advance(text)
        tree = plausible_tree(inner, draws, 8)
        chain = (9, *text)
        parents = (*range(len(chain)), *(parent + len(chain) for parent in tree.parents))
        delayed = reopen()
        delayed.advance([7])
        check_walk(reopen, delayed, [7], Proposal(chain + tree.tokens, parents))


def test_tokens_are_consumed_all_or_none(compiler: GrammarCompiler, codec: TextCodec) -> None:
    a, b = codec.encode("a"), codec.encode("b")
    delayed = Delayed(compiler.open(Grammar("regex", "ab")), (7,))
    with pytest.raises(RequestError, match="not in the language"):
        delayed.advance([7, *a, *a])
    assert not delayed.has_begun and delayed.mask().all()
    delayed.advance([7, *a, *b, EOS])
    assert delayed.has_ended


def test_nothing_is_drafted_behind_an_end_of_text(compiler: GrammarCompiler, codec: TextCodec) -> None:
    draft = [*codec.encode("a"), EOS, EOS, *codec.encode("b")]
    part, legal = walk(compiler.open(Grammar("regex", "ab?")), Proposal.chain(draft))
    assert part == Proposal.chain(draft[:2]) and legal[2].nonzero()[:, 0].tolist() == [OTHER_EOS, EOS]


def test_a_dead_end_ends_the_request_and_no_draft_can_cause_it(
    compiler: GrammarCompiler, codec: TextCodec
) -> None:
    automaton = compiler.open(Grammar("lark", 'start: "a" ("b" | "c" x)\nx: x'))
    a, b, c = (codec.encode(letter)[0] for letter in "abc")
    fresh = automaton.copy()
    fresh.advance([a])
    expected = fresh.mask()
    assert expected[[b, c]].all()
    for _ in range(2):  # the first visit of the dead end must not spoil the second
        part, legal = walk(automaton, Proposal((a, c, b), (0, 1, 1)))
        assert part == Proposal((a, b), (0, 1)) and torch.equal(legal[1], expected)
    automaton.advance([a, c])
    for _ in range(2):
        with pytest.raises(RequestError, match=r"^grammar: the text cannot go on after 2 tokens: no token"):
            walk(automaton, EMPTY_PROPOSAL)
    automaton.retreat(1)
    assert torch.equal(automaton.mask(), expected)
