"""Which drafts stand: one rule for chains and trees."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.types import EMPTY_PROPOSAL, Proposal
from paceline.core.verification import judge


@pytest.mark.parametrize(
    ("drafts", "said", "path", "tokens"),
    [
        ([], [7], (0,), (7,)),  # plain decoding
        ([5, 6, 7], [5, 6, 7, 8], (0, 1, 2, 3), (5, 6, 7, 8)),  # all right, and the bonus token
        ([5, 6, 7], [4, 6, 7, 8], (0,), (4,)),  # wrong from the start, right behind it
        ([5, 6, 7], [5, 9, 7, 8], (0, 1), (5, 9)),  # wrong in the middle
        ([5, 6, 7], [5, 6, 9, 8], (0, 1, 2), (5, 6, 9)),  # wrong at the end
        ([5, 5, 5], [5, 5, 4, 5], (0, 1, 2), (5, 5, 4)),
    ],
)
def test_a_chain_stands_up_to_its_first_fault(
    drafts: list[int], said: list[int], path: tuple[int, ...], tokens: tuple[int, ...]
) -> None:
    verdict = judge(Proposal.chain(drafts), said)
    assert (verdict.path, verdict.tokens) == (path, tokens)
    assert verdict.num_accepted == len(path) - 1
    assert verdict.bonus_token == tokens[-1]


#        anchor
#      ┌───┴───┐
#      1: 5    2: 6        rows: tokens
#    ┌─┴──┐    │
#  3: 7  4: 8  5: 7
#              │
#              6: 9
TREE = Proposal((5, 6, 7, 8, 7, 9), (0, 0, 1, 1, 2, 5))


@pytest.mark.parametrize(
    ("said", "path", "tokens"),
    [
        ([5, 8, 0, 0, 3, 0, 0], (0, 1, 4), (5, 8, 3)),
        ([6, 0, 7, 0, 0, 9, 2], (0, 2, 5, 6), (6, 7, 9, 2)),
        ([6, 0, 8, 0, 0, 9, 2], (0, 2), (6, 8)),  # 8 is a child of row 1, not of row 2
        ([7, 7, 7, 7, 7, 7, 7], (0,), (7,)),  # 7 is nobody's child at the anchor
    ],
)
def test_a_tree_stands_along_one_path(
    said: list[int], path: tuple[int, ...], tokens: tuple[int, ...]
) -> None:
    verdict = judge(TREE, said)
    assert (verdict.path, verdict.tokens) == (path, tokens)


def test_of_twins_the_first_is_followed() -> None:
    twins = Proposal((5, 5, 6, 6), (0, 0, 2, 1))  # both twins are right, each with a child of its own
    assert judge(twins, [5, 6, 6, 1, 2]).path == (0, 1, 4)


def test_a_deep_tree_is_walked_to_its_leaf() -> None:
    depth = 3000
    assert judge(Proposal.chain(range(depth)), range(depth + 1)).num_accepted == depth  # type: ignore[arg-type]


@pytest.mark.parametrize("said", [[], [1, 2], [1, 2, 3, 4]])
def test_one_target_token_a_row(said: list[int]) -> None:
    with pytest.raises(ValueError, match="expected 3 target tokens"):
        judge(Proposal.chain([1, 2]), said)


@st.composite
def judged_trees(draw: st.DrawFn) -> tuple[Proposal, list[int]]:
    size = draw(st.integers(0, 12))
    token = st.integers(0, 2)
    proposal = Proposal(
        tuple(draw(token) for _ in range(size)), tuple(draw(st.integers(0, i)) for i in range(size))
    )
    return proposal, [draw(token) for _ in range(size + 1)]


@settings(deadline=None, max_examples=200)
@given(judged_trees())
def test_a_verdict_is_the_longest_path_that_was_said(tree: tuple[Proposal, list[int]]) -> None:
    proposal, said = tree
    verdict = judge(proposal, said)
    assert verdict.path[0] == 0
    assert len(verdict.tokens) == len(verdict.path)
    assert list(verdict.path) == sorted(set(verdict.path)), "parents come before their children"
    for above, row, token in zip(verdict.path, verdict.path[1:], verdict.tokens, strict=False):
        assert proposal.parents[row - 1] == above
        assert proposal.tokens[row - 1] == token == said[above]
    last = verdict.path[-1]
    assert verdict.bonus_token == said[last]
    children = [t for t, parent in zip(proposal.tokens, proposal.parents, strict=True) if parent == last]
    assert said[last] not in children, "a right child was left standing"


def test_chains_are_recognised() -> None:
    assert EMPTY_PROPOSAL.is_chain
    assert Proposal.chain([4, 4, 4]) == Proposal((4, 4, 4), (0, 1, 2))
    assert Proposal.chain([4, 4, 4]).is_chain
    assert not TREE.is_chain


def test_depths_count_from_the_anchor() -> None:
    assert EMPTY_PROPOSAL.depths == (0,)
    assert Proposal.chain([4, 4, 4]).depths == (0, 1, 2, 3)
    assert TREE.depths == (0, 1, 1, 2, 2, 2, 3)
