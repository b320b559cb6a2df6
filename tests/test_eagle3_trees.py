"""EAGLE-3's chains and trees: the likeliest paths in order, and nothing that changes a text."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from eagle3_blocks import BLOCK, TOKENS, assert_same, contexts_at, feature_rows, forced, rows_of, unfrozen
from paceline.core.noise import gumbel_row
from paceline.core.params import SamplingParams
from paceline.core.sampling import Law
from paceline.core.types import EMPTY_PROPOSAL, Proposal, Request
from paceline.drafter.base import Drafter
from paceline.drafter.eagle3 import Eagle3
from paceline.engine.engine import Engine
from paceline.engine.tree import TreeDrafter
from paceline.target.base import VerifyRows
from paceline.target.native import NativeTarget
from paceline.testing import assert_lossless, run_checked, tiny_eagle3, tiny_target, whole
from watching import Watched


@pytest.fixture(scope="module")
def target() -> NativeTarget:
    return tiny_target(num_layers=4)


@pytest.fixture(scope="module")
def hidden() -> torch.Tensor:
    return feature_rows()


@pytest.fixture(scope="module")
def drafter(target: NativeTarget) -> Eagle3:
    return tiny_eagle3(target, BLOCK, draft_vocab_size=23)


def paths(proposal: Proposal) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = [()]
    for token, parent in zip(proposal.tokens, proposal.parents, strict=True):
        found.append((*found[parent], token))
    return found[1:]


def test_the_tree_is_that_of_a_search_path_by_path(hidden: torch.Tensor) -> None:
    """Every path decoded alone: all of the few tokens are children, the best ten of a level are expanded."""
    drafter = tiny_eagle3(tiny_target(num_layers=4), BLOCK, draft_vocab_size=6)
    (context,) = contexts_at(drafter, hidden, [8])
    scored: dict[tuple[int, ...], float] = {}
    level: list[tuple[int, ...]] = [()]
    for _ in range(BLOCK - 1):
        children: dict[tuple[int, ...], float] = {}
        for path in level:
            log_probs = forced(drafter, context, [17, *path])[-1].log_softmax(-1)
            for token, log_prob in zip(drafter.token_ids.tolist(), log_probs.tolist(), strict=True):
                children[*path, token] = scored.get(path, 0.0) + log_prob
        scored |= children
        level = sorted(children, key=lambda path: -children[path])[:10]
    best = sorted(scored, key=lambda path: -scored[path])
    (tree,) = drafter.draft_trees([17], [context], 40)
    assert paths(tree) == best[:40]
    assert tree.chances == pytest.approx([math.exp(scored[path]) for path in best[:40]])
    assert max(map(len, best[:40])) == BLOCK - 1, "deep enough to tell levels apart"
    assert any(len(p) > len(q) for p, q in itertools.pairwise(best[:40])), "depths are mixed"


@pytest.mark.parametrize("small", [1, 2, 3, 7, 11, 25])
def test_a_front_part_of_a_tree_is_the_smaller_tree(
    small: int, hidden: torch.Tensor, drafter: Eagle3
) -> None:
    contexts = contexts_at(drafter, hidden, [3, 18])
    laws = [Law(SamplingParams(temperature=t, seed=3), 61, seed=3) for t in (0.0, 1.0)]
    large = drafter.draft_trees([1, 2], contexts, 30, laws)
    for tree, cut in zip(large, drafter.draft_trees([1, 2], contexts, small, laws), strict=True):
        assert (cut.tokens, cut.parents) == (tree.tokens[:small], tree.parents[:small])
        assert cut.chances == pytest.approx(tree.chances[:small])
        assert all(parent <= node for node, parent in enumerate(tree.parents))


def test_fewer_tokens_than_nodes_make_what_there_is(hidden: torch.Tensor) -> None:
    drafter = tiny_eagle3(tiny_target(num_layers=4), 3, draft_vocab_size=2)
    (tree,) = drafter.draft_trees([1], contexts_at(drafter, hidden, [4]), 50)
    assert sorted(map(len, paths(tree))) == [1, 1, 2, 2, 2, 2]


# Losslessness --------------------------------------------------------------------------------------------------------


def requests(temperature: float) -> list[Request]:
    return [
        Request(
            str(i),
            tuple((11 * i + 5 * j + 1) % 61 for j in range(1 + 3 * i)),
            SamplingParams(max_new_tokens=10 + i, temperature=temperature, seed=i, ignore_eos=True),
        )
        for i in range(5)
    ]


def agreeing(target: NativeTarget, block_size: int) -> Eagle3:
    """A drafter that is right now and then: the target's own head and last layer's feature, little else."""
    drafter = tiny_eagle3(target, block_size, target_layer_ids=(0, target.spec.num_layers - 1))
    width = target.spec.hidden_size
    unbound = unfrozen(drafter)
    with torch.no_grad():
        unbound.fc.weight.mul_(0.05)[:, -width:] += torch.eye(width, dtype=torch.float64)
        unbound.midlayer.self_attn.o_proj.weight.mul_(0.05)
        unbound.midlayer.mlp.down_proj.weight.mul_(0.05)
        unbound.lm_head.weight.copy_(target.heads.head_weight)
    return unbound.bind(target.heads)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("kind", "num_nodes"),
    [("random", None), ("random", 7), ("agreeing", None), ("agreeing", 1), ("agreeing", 24)],
)
def test_no_text_changes(kind: str, num_nodes: int | None, temperature: float) -> None:
    target = tiny_target(seed=3, num_layers=3)
    made = tiny_eagle3(target, BLOCK, draft_vocab_size=40) if kind == "random" else agreeing(target, BLOCK)
    drafter: Drafter = made if num_nodes is None else TreeDrafter(made, num_nodes)
    assert_lossless(target, drafter, requests(temperature), max_sequences=3)


@pytest.mark.parametrize("num_nodes", [None, 12])
def test_rows_of_accepted_drafts_are_those_of_the_text(num_nodes: int | None, target: NativeTarget) -> None:
    """After rejections and acceptances a context is the one that the text alone would make."""
    made = agreeing(target, BLOCK)
    watched = Watched(made if num_nodes is None else TreeDrafter(made, num_nodes))
    texts = run_checked(Engine(target, watched, max_sequences=3), requests(1.0))
    steps = [step for text in texts.values() for step in text.steps]
    assert {0, 1} <= {step.num_accepted for step in steps}, "some drafts stood, others fell"
    for context, text in zip(watched.contexts, texts.values(), strict=True):
        tokens = whole(text)[: context.length]
        session = target.open(len(tokens))
        (output,) = target.verify([VerifyRows(session, tokens, EMPTY_PROPOSAL, last_row_only=True)])
        session.close()
        expected = made.open(len(tokens))
        made.inject([expected], [output.hidden], [tokens])
        for got, known in zip(rows_of(context), rows_of(expected), strict=True):
            assert_same(got, known)


def test_a_draft_is_the_drawn_token_where_the_drafter_knows_the_noise(
    hidden: torch.Tensor, drafter: Eagle3
) -> None:
    (context,) = contexts_at(drafter, hidden, [6])
    law = Law(SamplingParams(temperature=0.7, seed=5), 61, seed=5)
    (proposal,) = drafter.draft([TOKENS[6]], [context], 3, [law])
    logits = forced(drafter, context, [TOKENS[6], *proposal.tokens[:2]])
    noise = torch.stack([gumbel_row(5, 0, 7 + k, 61) for k in range(3)])[:, drafter.token_ids]
    expected = drafter.token_ids[(logits / 0.7 + noise).argmax(-1)]
    assert list(proposal.tokens) == expected.tolist()
    assert proposal != drafter.draft([TOKENS[6]], [context], 3)[0], "the noise shows"
