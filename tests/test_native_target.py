"""The native runner keeps the laws of the protocol: keep, roll back, trees, batches, slots, capacity."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.errors import CapacityError, UnsupportedTargetError
from paceline.core.types import EMPTY_PROPOSAL, Proposal
from paceline.target.base import Target, TargetOutput, TargetSession, VerifyRows
from paceline.target.native import NativeSession, NativeTarget
from paceline.testing import tiny_target, tiny_tensors

VOCAB, TAPS = 61, (0, 1, 2)
PROMPT = [5, 17, 3, 44, 9, 60, 21, 8, 33, 12, 50, 7]
TREE = Proposal((11, 22, 33, 44, 55, 11), (0, 0, 1, 1, 2, 5))


@pytest.fixture
def target() -> NativeTarget:
    model = tiny_target(num_layers=3)
    model.tap(TAPS)
    return model


def prefilled(model: NativeTarget, tokens: Sequence[int], capacity: int = 60) -> NativeSession:
    session = model.open(capacity)
    model.verify([VerifyRows(session, tokens, EMPTY_PROPOSAL, last_row_only=True)])
    session.keep(range(len(tokens)))
    return session


def fresh(model: NativeTarget, tokens: Sequence[int]) -> TargetOutput:
    """All rows of a text in one pass over an empty session."""
    session = model.open(60)
    (output,) = model.verify([VerifyRows(session, tokens, EMPTY_PROPOSAL)])
    session.close()
    return output


def assert_same(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)


def assert_same_output(got: TargetOutput, expected: TargetOutput, rows: slice = slice(None)) -> None:
    assert_same(got.logits, expected.logits[rows])
    assert_same(got.hidden, expected.hidden[rows])


# Keep and roll back --------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=30)
@given(st.data())
def test_what_was_kept_is_all_that_counts(data: st.DataObject) -> None:
    """Passes of any width of which any front part is kept, none included, leave what a fresh run of the text has."""
    model = shared_target()
    session, text = model.open(60), list[int]()
    try:
        for _ in range(data.draw(st.integers(1, 6))):
            rows = data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=8))
            split = data.draw(st.integers(1, len(rows)))
            part = VerifyRows(session, rows[:split], Proposal.chain(rows[split:]))
            (output,) = model.verify([part])
            assert_same_output(output, fresh(model, text + rows), slice(len(text), None))
            kept = data.draw(st.integers(0, len(rows)))
            session.keep(range(kept))
            text += rows[:kept]
            assert session.length == len(text)
    finally:
        session.close()


_SHARED: list[NativeTarget] = []


def shared_target() -> NativeTarget:
    """One target for all examples: its slots are dirty."""
    if not _SHARED:
        _SHARED.append(tiny_target(num_layers=3))
        _SHARED[0].tap(TAPS)
    return _SHARED[0]


def test_a_pass_that_is_not_kept_is_forgotten(target: NativeTarget) -> None:
    session = prefilled(target, PROMPT)
    for wrong in ([1] * 9, [2] * 30, [3]):
        target.verify([VerifyRows(session, wrong[:1], Proposal.chain(wrong[1:]))])
        session.keep([])
    assert session.length == len(PROMPT)
    (output,) = target.verify([VerifyRows(session, [4], EMPTY_PROPOSAL)])
    assert_same_output(output, fresh(target, [*PROMPT, 4]), slice(-1, None))


def test_the_last_row_alone(target: NativeTarget) -> None:
    (whole,) = target.verify([VerifyRows(target.open(60), PROMPT, EMPTY_PROPOSAL)])
    (last,) = target.verify([VerifyRows(target.open(60), PROMPT, EMPTY_PROPOSAL, last_row_only=True)])
    assert last.logits.shape == (1, VOCAB)
    assert_same(last.logits, whole.logits[-1:])
    assert_same(last.hidden, whole.hidden)


# Trees ---------------------------------------------------------------------------------------------------------------


def path_to(proposal: Proposal, row: int) -> list[int]:
    """Rows from the anchor to `row`."""
    path = [row]
    while path[0]:
        path.insert(0, proposal.parents[path[0] - 1])
    return path


def test_a_tree_row_is_its_path_as_a_chain(target: NativeTarget) -> None:
    session = prefilled(target, PROMPT)
    (output,) = target.verify([VerifyRows(session, [30], TREE)])
    for row in range(7):
        path = [TREE.tokens[r - 1] for r in path_to(TREE, row)[1:]]
        (chain,) = target.verify([VerifyRows(session, [30], Proposal.chain(path))])
        assert_same(output.logits[row], chain.logits[-1])
        assert_same(output.hidden[row], chain.hidden[-1])


@pytest.mark.parametrize("row", range(7))
def test_a_tree_path_is_kept_packed(row: int, target: NativeTarget) -> None:
    session, path = prefilled(target, PROMPT), path_to(TREE, row)
    target.verify([VerifyRows(session, [30], TREE)])
    session.keep(path)
    assert session.length == len(PROMPT) + len(path)
    (output,) = target.verify([VerifyRows(session, [8], Proposal.chain([9]))])
    text = [*PROMPT, 30, *(TREE.tokens[r - 1] for r in path[1:]), 8, 9]
    assert_same_output(output, fresh(target, text), slice(-2, None))


def test_a_tree_may_hang_on_a_prompt(target: NativeTarget) -> None:
    (output,) = target.verify([VerifyRows(target.open(60), PROMPT, TREE)])
    session = prefilled(target, PROMPT[:-1])
    (behind,) = target.verify([VerifyRows(session, PROMPT[-1:], TREE)])
    assert_same_output(behind, output, slice(len(PROMPT) - 1, None))


# Batches -------------------------------------------------------------------------------------------------------------


def test_a_batch_is_its_parts(target: NativeTarget) -> None:
    """Chains, a tree, a prompt and a lone row behind contexts of different lengths, in any order of slots."""
    parts = [
        ([], PROMPT, EMPTY_PROPOSAL, True),
        (PROMPT, [30], TREE, False),
        (PROMPT[:3], [2], Proposal.chain([4, 5]), False),
        (PROMPT[:7], [9], EMPTY_PROPOSAL, False),
    ]

    def run(orders: Sequence[int]) -> dict[int, TargetOutput]:
        sessions = {i: prefilled(target, parts[i][0]) if parts[i][0] else target.open(60) for i in orders}
        batch = [VerifyRows(sessions[i], *parts[i][1:]) for i in reversed(orders)]
        outputs = dict(zip(reversed(orders), target.verify(batch), strict=True))
        for session in sessions.values():
            session.close()
        return outputs

    alone = {i: run([i])[i] for i in range(4)}
    for orders in ([0, 1, 2, 3], [3, 1, 0], [2, 0]):
        for i, output in run(orders).items():
            assert_same_output(output, alone[i])


@pytest.mark.parametrize("width", [20, 60])
def test_a_wide_part_does_not_need_room_beside_it(width: int) -> None:
    """Parts are padded to the widest of a pass; the padding of a nearly full session must go somewhere."""
    model = tiny_target(max_positions=128)
    short, wide = model.open(96), model.open(96)
    short_text = PROMPT * 8
    for session, text in ((short, short_text[:95]), (wide, PROMPT)):
        model.verify([VerifyRows(session, text, EMPTY_PROPOSAL)])
        session.keep(range(len(text)))
    lone = VerifyRows(short, short_text[95:], EMPTY_PROPOSAL)
    (expected,) = model.verify([lone])
    got, _ = model.verify([lone, VerifyRows(wide, [3], Proposal.chain([5] * (width - 1)))])
    assert_same(got.logits, expected.logits)


# Slots and capacity --------------------------------------------------------------------------------------------------


def test_a_slot_is_used_again(target: NativeTarget) -> None:
    first, second = prefilled(target, PROMPT), prefilled(target, PROMPT[::-1])
    slot = first.slot
    assert slot != second.slot
    first.close()
    first.close()  # harmless when repeated: the slot is free once
    again, other = target.open(20), target.open(20)
    assert again.slot == slot != other.slot
    assert len({again.slot, other.slot, second.slot}) == 3
    (output,) = target.verify([VerifyRows(again, [1, 2], EMPTY_PROPOSAL)])
    assert_same_output(output, fresh(target, [1, 2]))


def test_growing_leaves_running_sessions_intact() -> None:
    """More sessions and longer ones than there was room for, opened while others run."""
    model = tiny_target(num_layers=3, max_positions=400)
    model.tap(TAPS)
    sessions = []
    for i in range(6):
        capacity = 30 + 60 * i
        session = model.open(capacity)
        model.verify([VerifyRows(session, PROMPT[i:], EMPTY_PROPOSAL)])
        session.keep(range(len(PROMPT) - i))
        sessions.append(session)
    assert len({session.slot for session in sessions}) == 6
    for i, output in enumerate(model.verify([VerifyRows(s, [4], Proposal.chain([6])) for s in sessions])):
        assert_same_output(output, fresh(model, [*PROMPT[i:], 4, 6]), slice(-2, None))
    long = (PROMPT * 40)[:330]
    (output,) = model.verify([VerifyRows(model.open(330), long, EMPTY_PROPOSAL)])
    (again,) = model.verify([VerifyRows(model.open(400), long, EMPTY_PROPOSAL)])
    assert_same_output(output, again)


def test_capacity_is_refused_beyond_the_positions(target: NativeTarget) -> None:
    assert target.open(128).capacity == 128
    with pytest.raises(CapacityError, match=r"129 tokens asked for, tiny has 128 positions; hint"):
        target.open(129)


@pytest.mark.parametrize("drafts", [0, 3])
def test_a_pass_beyond_the_capacity_is_refused(drafts: int, target: NativeTarget) -> None:
    session = prefilled(target, PROMPT, capacity=13)
    rows = VerifyRows(session, [1] if drafts else [1, 2], Proposal.chain([5] * drafts))
    with pytest.raises(CapacityError, match="rows do not fit the session's 13"):
        target.verify([rows])
    (output,) = target.verify([VerifyRows(session, [1], EMPTY_PROPOSAL)])
    assert_same_output(output, fresh(target, [*PROMPT, 1]), slice(-1, None))


def test_a_closed_or_foreign_session_is_refused(target: NativeTarget) -> None:
    session = prefilled(target, PROMPT)
    session.close()
    with pytest.raises(UnsupportedTargetError, match="expected an open session of the native runner"):
        target.verify([VerifyRows(session, [1], EMPTY_PROPOSAL)])


@pytest.mark.parametrize("layer", [-1, 3])
def test_only_layers_that_exist_can_be_tapped(layer: int, target: NativeTarget) -> None:
    with pytest.raises(UnsupportedTargetError, match=rf"target layer id {layer}: expected 0…2"):
        target.tap((0, layer))


def test_without_taps_there_is_no_hidden(target: NativeTarget) -> None:
    target.tap(())
    assert fresh(target, PROMPT).hidden.shape == (12, 0)


def test_it_obeys_the_protocol(target: NativeTarget) -> None:
    session: TargetSession = target.open(4)
    protocol: Target = target
    assert isinstance(session, TargetSession)
    assert protocol.dtype is torch.float64
    assert protocol.device == torch.device("cpu")


def test_the_heads_are_the_targets(target: NativeTarget) -> None:
    tensors = tiny_tensors(target.shape)
    ids = torch.tensor([[3, 4], [5, 6]])
    assert torch.equal(target.heads.embed(ids), tensors["model.embed_tokens.weight"][ids])
    x = torch.randn(2, 3, 32, dtype=torch.float64)
    assert_same(target.heads.lm_head(x), x @ tensors["lm_head.weight"].T)
    assert torch.equal(target.heads.head_weight, tensors["lm_head.weight"])
