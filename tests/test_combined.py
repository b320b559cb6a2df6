"""Lookup and another drafter together: who drafts what, and in the engine, where it changes no text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.cli.decoding import describe
from paceline.core.errors import ConfigError
from paceline.core.params import SamplingParams
from paceline.core.sampling import Law
from paceline.core.types import Proposal, Request
from paceline.drafter.base import Drafter
from paceline.drafter.combined import Both, Combined, sure_lookup
from paceline.drafter.lookup import PromptLookup
from paceline.engine.engine import Engine
from paceline.engine.tree import TreeDrafter
from paceline.llm import LLM
from paceline.target.native import NativeTarget
from paceline.testing import (
    ConstantDrafter,
    RandomDrafter,
    ScriptedDrafter,
    assert_lossless,
    run_checked,
    tiny_drafter,
    tiny_eagle3,
    tiny_target,
)
from tiny_llm import tiny_llm

REPEATED, NEW = [1, 2, 3, 9, 1, 2, 3], [1, 2, 3, 4, 5, 6, 7]


class Noting(ScriptedDrafter):
    """Drafts as long a chain of one token as it is asked for, and notes what it was asked."""

    def __init__(self, block_size: int, target_layer_ids: tuple[int, ...] = ()) -> None:
        super().__init__(block_size, target_layer_ids)
        self.asked: list[tuple[list[int], int, Sequence[Law] | None]] = []

    def draft(
        self,
        anchors: Sequence[int],
        contexts: Sequence[Any],
        num_draft_tokens: int,
        laws: Sequence[Law] | None = None,
    ) -> list[Proposal]:
        self.asked.append((list(anchors), num_draft_tokens, laws))
        return super().draft(anchors, contexts, num_draft_tokens, laws)

    def guess(self, memory: Any, num_draft_tokens: int) -> Proposal:
        return Proposal.chain([0] * num_draft_tokens)


def shown(drafter: Combined, *texts: Sequence[int]) -> tuple[list[int], list[Both]]:
    """Returns anchors and contexts of texts of which all but the last token were shown."""
    contexts = [drafter.open(32) for _ in texts]
    rows = [torch.zeros(len(text) - 1, 0) for text in texts]
    drafter.inject(contexts, rows, [list(text[:-1]) for text in texts])
    return [text[-1] for text in texts], contexts


def laws(count: int) -> list[Law]:
    return [
        Law(SamplingParams(seed=i), 10, seed=i, num_prompt_tokens=1, eos_token_ids=()) for i in range(count)
    ]


# Who drafts ----------------------------------------------------------------------------------------------------------


def test_only_those_that_repeat_nothing_are_asked_of_the_other() -> None:
    other = Noting(6)
    drafter = Combined(PromptLookup(4, 3, 3), other)
    anchors, contexts = shown(drafter, NEW, REPEATED, [5, 4, 3], REPEATED)
    given = laws(4)
    drafts = drafter.draft(anchors, contexts, 5, given)
    assert [draft.tokens for draft in drafts] == [(0,) * 5, (9, 1, 2), (0,) * 5, (9, 1, 2)]
    ((asked, num_tokens, told),) = other.asked
    assert (asked, num_tokens, told) == ([7, 3], 5, [given[0], given[2]])


def test_nobody_else_is_asked_where_all_repeat_themselves() -> None:
    other = Noting(6)
    drafter = Combined(PromptLookup(4, 3, 3), other)
    drafter.draft(*shown(drafter, REPEATED, REPEATED), 3)
    assert other.asked == []
    drafter.draft(*shown(drafter, NEW), 3)
    assert other.asked == [([7], 3, None)]


def test_an_end_must_be_long_enough() -> None:
    """The end 1 2 3 stands in the text once more, and no longer one does."""
    for min_ngram, expected in ((3, (9, 1)), (4, (0, 0))):
        drafter = Combined(PromptLookup(8, 6, min_ngram), Noting(6))
        (draft,) = drafter.draft(*shown(drafter, REPEATED), 2)
        assert draft.tokens == expected
    usual = sure_lookup()
    assert usual.max_ngram >= usual.min_ngram > PromptLookup().min_ngram


@pytest.mark.parametrize(("copies", "guesses"), [(4, 7), (7, 4)])
def test_each_is_asked_within_its_own_blocks(copies: int, guesses: int) -> None:
    drafter = Combined(PromptLookup(copies, 3, 3), Noting(guesses))
    assert drafter.block_size == 7
    anchors, contexts = shown(drafter, REPEATED, NEW)
    lengths = [[len(draft.tokens) for draft in drafter.draft(anchors, contexts, k)] for k in (6, 5, 2)]
    assert lengths == [[copies - 1, guesses - 1], [min(5, copies - 1), min(5, guesses - 1)], [2, 2]]


def test_what_fails_leaves_the_contexts_equally_long() -> None:
    class Failing(ConstantDrafter):
        def inject(self, *given: Any) -> None:
            raise torch.OutOfMemoryError("no memory is left")

    drafter = Combined(PromptLookup(), Failing(4, 1))
    context = drafter.open(8)
    with pytest.raises(torch.OutOfMemoryError):
        drafter.inject([context], [torch.zeros(2, 0)], [[1, 2]])
    assert context.length == context.context.length == 0


# In the engine -------------------------------------------------------------------------------------------------------

OTHERS: dict[str, Callable[[NativeTarget], Drafter]] = {
    "dflash": lambda target: tiny_drafter(target, 5),
    "trees": lambda target: TreeDrafter(tiny_drafter(target, 4), 11),
    "dflash2": lambda target: tiny_drafter(target, 4, variant="dflash2"),
    "dflash2 trees": lambda target: TreeDrafter(tiny_drafter(target, 4, variant="dflash2"), 6),
    "eagle3": lambda target: tiny_eagle3(target, 4),
    "eagle3 trees": lambda target: TreeDrafter(tiny_eagle3(target, 4), 6),
    "random": lambda target: RandomDrafter(4, target.spec.vocab_size),
}


def repetitive_target() -> NativeTarget:
    """Few words, so that texts repeat themselves now and then."""
    return tiny_target(1, vocab_size=9)


def requests(params: SamplingParams) -> list[Request]:
    """Requests of several lengths and block sizes, one of which decodes plainly."""
    prompts = [(3, 4, 5), (3,), (5, 6, 7, 8) * 5, (8, 7), (4, 4, 4, 4, 4)]
    sizes = [None, 3, None, 1, None]
    return [
        Request(str(i), prompt, params, block_size=size)
        for i, (prompt, size) in enumerate(zip(prompts, sizes, strict=True))
    ]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("max_sequences", [1, 3, 5])
@pytest.mark.parametrize("other", OTHERS)
def test_no_text_changes(other: str, max_sequences: int, temperature: float) -> None:
    """Fewer places than requests, so that some are admitted in the middle of others' texts."""
    target = repetitive_target()
    params = SamplingParams(max_new_tokens=24, ignore_eos=True, temperature=temperature, seed=4)
    drafter = Combined(PromptLookup(6, 4, 2), OTHERS[other](target))
    texts = assert_lossless(target, drafter, requests(params), max_sequences=max_sequences)
    assert sum(step.num_accepted for text in texts for step in text.steps) > 10
    assert not any(step.num_drafted for step in texts[3].steps)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_do_not_depend_on_who_travels_along(temperature: float) -> None:
    """Records of what was drafted and accepted are the same alone and in batches in which others are copied for."""
    target = repetitive_target()
    params = SamplingParams(max_new_tokens=24, ignore_eos=True, temperature=temperature, seed=4)

    def records(max_sequences: int) -> list[list[tuple[int, int]]]:
        drafter = Combined(PromptLookup(6, 4, 2), tiny_drafter(target, 5))
        texts = run_checked(Engine(target, drafter, max_sequences=max_sequences), requests(params))
        return [[(step.num_drafted, step.num_accepted) for step in text.steps] for text in texts.values()]

    alone = records(1)
    assert alone == records(2) == records(5)
    assert {drafted for text in alone for drafted, _ in text} == {0, 2, 4, 5}


# In a pair -----------------------------------------------------------------------------------------------------------


def test_a_pair_joins_its_drafter_with_lookup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.llm.shipped_drafter", lambda target: tmp_path / "drafter")
    llm = tiny_llm(tmp_path, block_size=5)
    combined = LLM(llm.folder, device="cpu", dtype="float64", offline=True)
    assert isinstance(combined.drafter, Combined) and combined.drafter.drafter is combined.neural
    trees = combined.new_engine(tree_nodes=9).drafter
    assert isinstance(trees, Combined) and isinstance(trees.drafter, TreeDrafter)
    assert combined.new_engine(tree_nodes=9).block_size == 10
    assert combined.checkpoint is not None
    alone = LLM(llm.folder, device="cpu", dtype="float64", lookup=False, offline=True)
    assert alone.drafter is alone.neural is not None
    assert isinstance(alone.new_engine(tree_nodes=9).drafter, TreeDrafter)
    params = SamplingParams(max_new_tokens=20, temperature=0.8, seed=3)
    prompts = ["abcabcabcabc", "What is it?", "xyxyxy"]
    plain = LLM(llm.folder, None, device="cpu", dtype="float64", offline=True).generate(prompts, params)
    texts = combined.generate(prompts, params)
    assert [text.token_ids for text in texts] == [text.token_ids for text in plain]
    assert any(step.num_drafted for text in texts for step in text.steps)


def test_a_pair_paces_itself_unless_told_how_much_to_draft(tmp_path: Path) -> None:
    llm = tiny_llm(tmp_path, block_size=5)
    assert llm.paced is not None
    inner = llm.new_engine().drafter
    assert isinstance(inner, Combined) and inner.drafter is llm.paced
    assert llm.new_engine()._budget is llm.paced.budget
    assert describe(llm, "folder")["tree_nodes"] == "auto"
    for fixed in (llm.new_engine(tree_nodes=2), llm.new_engine(block_size=3), llm.new_engine(plain=True)):
        assert fixed._budget is None
    folder = tmp_path / "drafter"
    chosen = LLM(llm.folder, folder, device="cpu", dtype="float64", tree_nodes=3, offline=True)
    assert chosen.paced is None and chosen.new_engine()._budget is None
    assert describe(chosen, "folder")["tree_nodes"] == 3


def test_a_pair_of_lookup_alone_has_no_weights(tmp_path: Path) -> None:
    folder = tiny_llm(tmp_path, drafter=False).folder

    def load(**options: Any) -> LLM:
        return LLM(folder, "lookup", device="cpu", dtype="float64", offline=True, **options)

    llm = load()
    assert isinstance(llm.drafter, PromptLookup) and llm.neural is None and llm.checkpoint is None
    assert llm.tree_nodes is None and llm.new_engine().drafter is llm.drafter
    (text,) = llm.generate("abababab", SamplingParams(max_new_tokens=30, ignore_eos=True))
    assert any(step.num_drafted for step in text.steps)
    with pytest.raises(ConfigError, match="tree_nodes: 4 needs a drafter with weights"):
        load(tree_nodes=4)
    with pytest.raises(ConfigError, match="block_size: expected 1…8"):
        load(block_size=9)


@pytest.mark.parametrize(
    ("drafter", "message"),
    [
        ("lokup", "'auto' or 'lookup'; got 'lokup'"),
        (Path("lookup"), "got 'lookup', and no such folder is there"),
    ],
)
def test_a_drafter_that_is_none_is_refused(
    drafter: str | Path, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    folder = tiny_llm(tmp_path, drafter=False).folder
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        LLM(folder, drafter, device="cpu", dtype="float64", offline=True)
