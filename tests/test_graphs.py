"""Recorded passes say what unrecorded ones say, leave the same K/V, and touch nothing of anybody else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.core.errors import ConfigError
from paceline.core.params import SamplingParams
from paceline.core.recorder import Tensors, bucket, length_bucket, window
from paceline.core.types import EMPTY_PROPOSAL, Proposal, Request
from paceline.engine.engine import Engine
from paceline.engine.graphs import Eager, Graphs
from paceline.engine.runtime import probe_rows, record_passes
from paceline.engine.tree import TreeDrafter
from paceline.target.base import TargetOutput, VerifyRows
from paceline.target.native import NativeSession, NativeTarget
from paceline.target.plan import padded_length
from paceline.testing import (
    assert_lossless,
    plain_texts,
    run_checked,
    tiny_drafter,
    tiny_target,
    tiny_tensors,
)
from test_recorded_drafts import DRAFTERS

CPU = torch.device("cpu")
VOCAB, CAPACITY = 61, 90
HAS_GRAPHS = torch.cuda.is_available()


def new_graphs(**options: Any) -> Graphs:
    return Graphs(Eager(CPU), **options)


def target_with(recorder: Graphs | None, *, exact: bool = True, **options: Any) -> NativeTarget:
    """Returns a tiny target whose passes `recorder` runs; all its layers are tapped."""
    target = tiny_target(max_positions=200, **options)
    target.exact = exact
    target.record(recorder)
    target.tap((0, 1))
    return target


# Buckets -------------------------------------------------------------------------------------------------------------


@given(st.integers(1, 5000))
def test_a_bucket_is_the_least_power_of_two(size: int) -> None:
    assert bucket(size) >= size > bucket(size) // 2
    assert bucket(size).bit_count() == 1


@given(st.sets(st.integers(0, 31), min_size=1))
def test_a_window_is_aligned_and_holds_all(slots: set[int]) -> None:
    first, size = window(sorted(slots))
    assert first <= min(slots) and max(slots) < first + size
    assert size.bit_count() == 1 and first % size == 0
    halves = {(slot - first) * 2 // size for slot in slots}
    assert size == 1 or halves == {0, 1}, "a smaller window would do"


@given(st.integers(1, 9000), st.integers(200, 9000))
def test_a_length_bucket_keeps_the_order_of_sums(length: int, capacity: int) -> None:
    room = padded_length(max(length, capacity))
    length = length_bucket(padded_length(length), room)
    assert length == room or length % 512 == 0


# The target ----------------------------------------------------------------------------------------------------------


Part = tuple[list[int], Proposal, bool]
"""Tokens, drafts behind them, and whether only the last row is asked for."""


@dataclass
class Twins:
    """Two targets of the same weights, the second of them recorded, and the same sessions of both."""

    plain: NativeTarget
    recorded: NativeTarget
    sessions: list[tuple[NativeSession, NativeSession]]

    @classmethod
    def of(cls, lengths: Sequence[int], *, exact: bool) -> Twins:
        twins = cls(target_with(None, exact=exact), target_with(new_graphs(), exact=exact), [])
        for length in lengths:
            pair = twins.plain.open(CAPACITY), twins.recorded.open(CAPACITY)
            twins.sessions.append(pair)
            if length:
                for target, session in zip((twins.plain, twins.recorded), pair, strict=True):
                    ids = [(7 * i + length) % VOCAB for i in range(length)]
                    target.verify([VerifyRows(session, ids, EMPTY_PROPOSAL, last_row_only=True)])
                    session.keep(range(length))
        return twins

    def verify(self, parts: Sequence[tuple[int, Part]]) -> list[list[TargetOutput]]:
        """Returns what both say to parts of sessions, by their number."""
        return [
            target.verify([VerifyRows(self.sessions[n][twin], *part) for n, part in parts])
            for twin, target in enumerate((self.plain, self.recorded))
        ]


def proposals(exact: bool) -> st.SearchStrategy[Proposal]:
    def grown(tokens: list[int], choices: list[int]) -> Proposal:
        return Proposal(tuple(tokens), tuple(c % (i + 1) for i, c in enumerate(choices[: len(tokens)])))

    tokens = st.lists(st.integers(0, VOCAB - 1), max_size=12)
    chains = tokens.map(Proposal.chain)
    trees = st.builds(grown, tokens, st.lists(st.integers(0, 11), min_size=12, max_size=12))
    return chains if exact else st.one_of(chains, trees)


def path_to(proposal: Proposal, row: int) -> list[int]:
    path = [row]
    while path[0]:
        path.insert(0, proposal.parents[path[0] - 1])
    return path


def rows_of(target: NativeTarget, session: NativeSession, count: int) -> list[torch.Tensor]:
    return [cached[session.slot, :count] for pair in target._cache for cached in pair]


@pytest.mark.parametrize("exact", [True, False], ids=["chains", "trees"])
@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_recorded_passes_are_the_same_bits(exact: bool, data: st.DataObject) -> None:
    """Any batches of any sessions: logits, hidden states and K/V; what does not take part is not touched."""
    lengths = data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=5), "lengths")
    twins = Twins.of(lengths, exact=exact)
    for _ in range(data.draw(st.integers(1, 4), "steps")):
        there = data.draw(st.permutations(range(len(lengths))).map(lambda p: p[: 1 + p[0] % len(p)]))
        parts = [
            (
                n,
                (
                    [data.draw(st.integers(0, VOCAB - 1))],
                    data.draw(proposals(exact)),
                    data.draw(st.booleans()),
                ),
            )
            for n in there
        ]
        parts = [p for p in parts if twins.sessions[p[0]][1].length + 13 <= CAPACITY]
        if not parts:
            break
        recorded = twins.recorded
        before = {
            n: [rows.clone() for rows in rows_of(recorded, session, session.capacity)]
            for n, (_, session) in enumerate(twins.sessions)
        }
        plain, replayed = twins.verify(parts)
        for expected, got in zip(plain, replayed, strict=True):
            assert torch.equal(got.logits, expected.logits) and torch.equal(got.hidden, expected.hidden)
        took_part = {n: 1 + len(proposal.tokens) for n, (_, proposal, _) in parts}
        for n, (_, session) in enumerate(twins.sessions):
            touched = slice(session.length, session.length + took_part.get(n, 0))
            for old, new in zip(before[n], rows_of(recorded, session, session.capacity), strict=True):
                untouched = torch.ones(len(new), dtype=torch.bool)
                untouched[touched] = False
                assert torch.equal(old[untouched], new[untouched]), "padding was written into a session"
        for n, (_, proposal, _) in parts:
            path = path_to(proposal, data.draw(st.integers(0, len(proposal.tokens))))
            for session in twins.sessions[n]:
                session.keep(path)
        for one, other in twins.sessions:
            both = rows_of(twins.plain, one, one.length), rows_of(recorded, other, other.length)
            assert all(torch.equal(a, b) for a, b in zip(*both, strict=True))


@pytest.mark.parametrize("drafts", [Proposal((1, 2, 3), (0, 0, 1)), Proposal.chain([1, 2, 3])], ids=str)
def test_outputs_outlive_the_next_pass(drafts: Proposal) -> None:
    """A replay writes over its outputs; what a caller was given must not change, a tree's K/V among it."""
    twins, halves = (
        Twins.of([5, 9, 3, 7], exact=False),
        ((0, 2), (1, 3)),
    )  # of one window, so of one recording
    said = [twins.verify([(n, ([4 + n], drafts, False)) for n in half]) for half in halves]
    for half in said:
        for plain, replayed in zip(*half, strict=True):
            assert torch.equal(plain.logits, replayed.logits) and torch.equal(plain.hidden, replayed.hidden)
    path = path_to(drafts, 2)
    for one, other in twins.sessions:
        one.keep(path)
        other.keep(path)
        both = rows_of(twins.plain, one, one.length), rows_of(twins.recorded, other, other.length)
        assert all(torch.equal(a, b) for a, b in zip(*both, strict=True))


def test_a_lone_part_is_given_copies_too() -> None:
    target = target_with(new_graphs())
    session = target.open(CAPACITY)
    first, second = (
        target.verify([VerifyRows(session, [token], Proposal.chain([7]))])[0] for token in (5, 6)
    )
    (again,) = target.verify([VerifyRows(session, [5], Proposal.chain([7]))])
    for one, other in ((first.logits, again.logits), (first.hidden, again.hidden)):
        assert torch.equal(one, other)
    assert not torch.equal(first.hidden, second.hidden)


def test_a_bucket_is_recorded_once() -> None:
    graphs = new_graphs()
    target = target_with(graphs)
    session = target.open(CAPACITY)
    for width in (3, 4, 3, 4):
        target.verify([VerifyRows(session, [1], Proposal.chain([2] * (width - 1)))])
        session.keep([0])
    assert (graphs.num_recorded, graphs.num_replayed) == (1, 4)
    target.verify([VerifyRows(session, [1], Proposal.chain([2] * 4))])
    assert (graphs.num_recorded, graphs.num_replayed) == (2, 5)


def test_what_fits_no_bucket_runs_as_it_is() -> None:
    graphs = new_graphs()
    target = target_with(graphs)
    session = target.open(180)
    target.verify([VerifyRows(session, [1] * 65, EMPTY_PROPOSAL)])
    session.keep(range(65))
    target.verify([VerifyRows(session, [1], Proposal((1, 2, 3), (0, 0, 1)))])  # walked in two runs
    assert graphs.num_replayed == 0
    target.verify([VerifyRows(session, [1], EMPTY_PROPOSAL)])
    assert graphs.num_replayed == 1


def test_recordings_end_where_their_tensors_move() -> None:
    graphs = new_graphs()
    target, plain = target_with(graphs), target_with(None)
    sessions = [(target.open(20), plain.open(20))]

    def agree() -> None:
        one, other = (
            model.verify([VerifyRows(pair[i], [3], Proposal.chain([4])) for pair in sessions])
            for i, model in enumerate((target, plain))
        )
        assert all(torch.equal(a.logits, b.logits) for a, b in zip(one, other, strict=True))
        for pair in sessions:
            for session in pair:
                session.keep([0, 1])

    agree()
    assert len(graphs) == 1
    sessions.append((target.open(20), plain.open(20)))  # more slots
    assert len(graphs) == 0
    agree()
    for session in sessions[0]:
        session.close()
    sessions[0] = (target.open(150), plain.open(150))  # longer ones
    assert len(graphs) == 0
    agree()
    for model in (target, plain):
        model.tap((1,))
    agree()
    assert len(graphs) == 2


def test_the_recording_least_used_goes() -> None:
    graphs = new_graphs(max_passes=2)
    target = target_with(graphs)
    session = target.open(CAPACITY)
    for width in (1, 2, 1, 4, 1, 2):  # 4 drives 2 out, 2 drives 4 out; 1 stays
        target.verify([VerifyRows(session, [1], Proposal.chain([2] * (width - 1)))])
    assert len(graphs) == 2 and graphs.num_recorded == 4
    with pytest.raises(ConfigError, match="max_passes: expected at least 1, got 0"):
        new_graphs(max_passes=0)


def test_a_probe_finds_recorded_passes_exact() -> None:
    """In float64 a bucket's padding changes no bits; the probe holds outputs of many passes against each other."""
    target = tiny_target(max_positions=600)
    target.record(graphs := new_graphs())
    probe = probe_rows(target, widths=(2, 5, 8))
    assert probe.is_exact, probe
    assert graphs.num_replayed > 40


# Texts ---------------------------------------------------------------------------------------------------------------


def requests(count: int, **params: Any) -> list[Request]:
    return [
        Request(
            f"r{i}",
            tuple((i * 5 + j) % VOCAB for j in range(3 + 4 * i)),
            SamplingParams(max_new_tokens=24, **params),
        )
        for i in range(count)
    ]


@pytest.mark.parametrize("tree_nodes", [None, 7], ids=["chains", "trees"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_texts_are_those_of_plain_decoding(tree_nodes: int | None, temperature: float) -> None:
    """Target and drafter share recordings; sequences come and go."""
    asked = requests(5, temperature=temperature, seed=3)
    target = tiny_target(max_positions=200)
    target.exact = False
    expected = plain_texts(target, asked)
    drafter = tiny_drafter(target, 5)
    graphs = new_graphs()
    for part in (target, drafter):
        part.record(graphs)
    engine_drafter = drafter if tree_nodes is None else TreeDrafter(drafter, tree_nodes)
    got = run_checked(Engine(target, engine_drafter, max_sequences=3), asked)
    assert [got[c.request_id].token_ids for c in expected] == [c.token_ids for c in expected]
    assert graphs.num_recorded < graphs.num_replayed
    target.record(None)
    drafter.record(None)
    assert_lossless(target, engine_drafter, asked)


# What a device needs -------------------------------------------------------------------------------------------------

FORBIDDEN = {
    torch.ops.aten._local_scalar_dense.default: "reads a value on the host",
    torch.ops.aten.nonzero.default: "has a shape that depends on values",
    torch.ops.aten.masked_select.default: "has a shape that depends on values",
    torch.ops.aten.lift_fresh.default: "copies host values",
}


class NoHost(TorchDispatchMode):
    """Refuses what a recording device cannot do."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in FORBIDDEN, f"{func} {FORBIDDEN[func]}"
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Strict:
    """A capture that runs every pass under `NoHost`."""

    device: torch.device = CPU

    def record(self, function: Callable[[], Tensors]) -> Callable[[], Tensors]:
        def replay() -> Tensors:
            with NoHost():  # type: ignore[no-untyped-call]
                return function()

        return replay


@pytest.mark.parametrize("kind", DRAFTERS)
def test_recorded_functions_never_ask_the_host(kind: str) -> None:
    with pytest.raises(AssertionError, match="copies host values"), NoHost():  # type: ignore[no-untyped-call]
        torch.tensor([1, 2])
    target = target_with(Graphs(Strict()), exact=False, architecture="Qwen3ForCausalLM")
    drafter = tiny_drafter(target, 6, **DRAFTERS[kind])
    drafter.record(Graphs(Strict()))
    sessions, contexts = [target.open(50) for _ in range(3)], [drafter.open(50) for _ in range(3)]
    (one, _, other) = target.verify([VerifyRows(s, [1, 2], Proposal((3, 4), (0, 0))) for s in sessions])
    for session in sessions:
        session.keep([0, 1])
    drafter.inject(contexts, [one.hidden[:2], other.hidden[:2], other.hidden[:1]])
    drafter.draft([5, 6, 7], contexts, 5)


def test_a_cpu_records_nothing_unasked() -> None:
    target = tiny_target()
    assert record_passes(CPU, target) is None
    assert target._recorder is None


@pytest.mark.skipif(not HAS_GRAPHS, reason="needs a CUDA device")
@pytest.mark.parametrize("tree_nodes", [None, 7], ids=["chains", "trees"])
def test_graphs_on_a_device(tree_nodes: int | None) -> None:
    device = torch.device("cuda")
    asked = requests(5)
    on_cpu = tiny_target(max_positions=200)
    expected = plain_texts(on_cpu, asked)
    tensors = tiny_tensors(on_cpu.shape)
    target = NativeTarget(on_cpu.shape, tensors, name="tiny", dtype=torch.float64, device=device)
    target.exact = False
    drafter = tiny_drafter(target, 5)
    graphs = record_passes(device, target, drafter)
    got = run_checked(
        Engine(target, drafter if tree_nodes is None else TreeDrafter(drafter, tree_nodes), max_sequences=3),
        asked,
    )
    assert [got[c.request_id].token_ids for c in expected] == [c.token_ids for c in expected]
    assert graphs is not None and 0 < graphs.num_recorded < graphs.num_replayed
