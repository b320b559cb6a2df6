"""Plain, chain, tree and batched passes of the native runner give the same bits; the probe says where they do not.

Plain decoding is the reference everywhere: one token at a time in a session of its own. Lengths lie just below those at
which kernels split their sums elsewhere.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pytest
import torch

from paceline.core.errors import UnsupportedTargetError
from paceline.core.types import EMPTY_PROPOSAL, Proposal
from paceline.engine.runtime import default_tree_nodes, probe_rows
from paceline.llm import LLM
from paceline.target.base import TargetOutput, TargetSession, VerifyRows
from paceline.target.native import NativeSession, NativeTarget
from paceline.target.plan import (
    Layout,
    num_pass_rows,
    placed_rows,
    plan_pass,
    seat,
    split_pass,
    walk,
    whole,
)
from paceline.testing import tiny_shape, tiny_target, tiny_tensors

VOCAB, ROOM = 61, 384
LENGTHS = (30, 53, 243, 308)
BUSHY = Proposal((11, 22, 33, 44, 55, 11, 7, 9), (0, 0, 1, 1, 2, 5, 0, 3))
LATE = Proposal((1, 2, 3, 4, 5), (0, 0, 2, 0, 4))
TREES = (BUSHY, LATE)


def make(dtype: torch.dtype, architecture: str = "LlamaForCausalLM", *, exact: bool = True) -> NativeTarget:
    """Returns a tiny target of 8 heads over 4 K/V heads, all layers tapped."""
    shape = tiny_shape(hidden_size=64, max_positions=ROOM, architecture=architecture)
    model = NativeTarget(shape, tiny_tensors(shape), name="tiny", dtype=dtype, exact=exact)
    model.tap((0, 1))
    return model


def text(length: int, seed: int = 0, vocab: int = VOCAB) -> list[int]:
    """Returns random tokens."""
    rng = random.Random(seed)
    return [rng.randrange(vocab) for _ in range(length)]


def prefilled(model: NativeTarget, tokens: Sequence[int], room: int = 40) -> NativeSession:
    """Returns a session that holds the tokens and has room for more."""
    session = model.open(len(tokens) + room)
    model.verify([VerifyRows(session, tokens, EMPTY_PROPOSAL, last_row_only=True)])
    session.keep(range(len(tokens)))
    return session


def path_to(proposal: Proposal, row: int) -> list[int]:
    """Rows from the anchor to `row`."""
    path = [row]
    while path[0]:
        path.insert(0, proposal.parents[path[0] - 1])
    return path


@dataclass
class Plain:
    """Plain decoding behind a prompt: what it says after a continuation, and the K/V it leaves."""

    model: NativeTarget
    prompt: Sequence[int]

    def __post_init__(self) -> None:
        self._session = prefilled(self.model, self.prompt)
        self._known: dict[tuple[int, ...], tuple[TargetOutput, list[torch.Tensor]]] = {}

    def after(self, tokens: Sequence[int]) -> tuple[TargetOutput, list[torch.Tensor]]:
        """Returns the last row's output and the continuation's K/V."""
        key = tuple(tokens)
        if key not in self._known:
            session = self._session
            for token in tokens:
                (output,) = self.model.verify([VerifyRows(session, [token], EMPTY_PROPOSAL)])
                session.keep([0])
            self._known[key] = output, kv(self.model, session, len(tokens))
            session.length = len(self.prompt)
        return self._known[key]


def kv(model: NativeTarget, session: NativeSession, count: int) -> list[torch.Tensor]:
    """Returns copies of the last `count` committed rows' keys and values, layer by layer."""
    rows = slice(session.length - count, session.length)
    return [cached[session.slot, rows].clone() for pair in model._cache for cached in pair]


def differing(output: TargetOutput, plain: Plain, anchor: int, drafts: Proposal) -> list[int]:
    """Returns the rows of a part whose logits or hidden states are not those of plain decoding."""
    tokens, rows = [anchor, *drafts.tokens], []
    for row in range(len(tokens)):
        expected, _ = plain.after([tokens[r] for r in path_to(drafts, row)])
        same = torch.equal(output.logits[row], expected.logits[0])
        rows += [] if same and torch.equal(output.hidden[row], expected.hidden[0]) else [row]
    return rows


# Chains --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 8), (9, 3, 64), (6, 6, 16), (8, 1, 8)])
def test_chains(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    """A row has the same bits in passes of 1 to 32 rows.

    Heads that share K/V run as rows of one product, so how many rows a product has depends on the model too.
    """
    shape = replace(
        tiny_shape(hidden_size=heads * head_dim, max_positions=ROOM),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
    )
    model = NativeTarget(shape, tiny_tensors(shape), name="tiny", dtype=dtype)
    for length in (40, 243, 308):
        assert differing_chains(model, length) == [], f"(width, row) behind {length} tokens"


def differing_chains(model: NativeTarget, length: int) -> list[tuple[int, int]]:
    """Returns (width, row) of every row that has other bits in a pass of 2 to 32 rows than in a pass of its own."""
    ids = text(length + 32)
    session, rest = prefilled(model, ids[:length]), ids[length:]
    wide = {
        width: model.verify([VerifyRows(session, rest[:1], Proposal.chain(rest[1:width]))])[0].logits
        for width in range(2, 33)
    }
    found = []
    for row, token in enumerate(rest):
        (lone,) = model.verify([VerifyRows(session, [token], EMPTY_PROPOSAL)])
        session.keep([0])
        found += [(w, row) for w in wide if row < w and not torch.equal(wide[w][row], lone.logits[0])]
    session.close()
    return sorted(found)


# Trees ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_branches(architecture: str, dtype: torch.dtype) -> None:
    """Every row of a tree says, bit by bit, what plain decoding says along its path."""
    model = make(dtype, architecture)
    for length in LENGTHS:
        plain = Plain(model, text(length))
        session = prefilled(model, plain.prompt)
        for tree in TREES:
            (output,) = model.verify([VerifyRows(session, [30], tree)])
            assert differing(output, plain, 30, tree) == [], f"rows behind {length} tokens"
        session.close()


def test_branches_in_bfloat16() -> None:
    model = make(torch.bfloat16)
    plain = Plain(model, text(53))
    (output,) = model.verify([VerifyRows(prefilled(model, plain.prompt), [30], BUSHY)])
    assert differing(output, plain, 30, BUSHY) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_kept_path_leaves_the_cache_of_plain_decoding(dtype: torch.dtype) -> None:
    """Whatever node is accepted, K/V are those of plain decoding, and so is what is said behind them."""
    model = make(dtype)
    plain = Plain(model, text(53))
    for tree in TREES:
        tokens = [30, *tree.tokens]
        for row in range(len(tokens)):
            session, path = prefilled(model, plain.prompt), path_to(tree, row)
            model.verify([VerifyRows(session, [30], tree)])
            session.keep(path)
            spelled = [tokens[r] for r in path]
            got, expected = kv(model, session, len(path)), plain.after(spelled)[1]
            assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True)), path
            (output,) = model.verify([VerifyRows(session, [8], LATE)])
            assert torch.equal(output.logits[0], plain.after([*spelled, 8])[0].logits[0]), path
            session.close()


def test_a_tree_that_is_not_kept_is_forgotten() -> None:
    model = make(torch.float32)
    plain = Plain(model, text(30))
    session = prefilled(model, plain.prompt)
    model.verify([VerifyRows(session, [1], BUSHY)])
    session.keep([])
    model.verify([VerifyRows(session, [2], LATE)])  # not even kept: the next pass stands for it
    (output,) = model.verify([VerifyRows(session, [3], Proposal.chain([4, 5]))])
    session.keep([0, 1])
    assert differing(output, plain, 3, Proposal.chain([4, 5])) == []
    expected = plain.after([3, 4])[1]
    assert all(torch.equal(a, b) for a, b in zip(kv(model, session, 2), expected, strict=True))


def test_a_tree_behind_a_prompt() -> None:
    """A tree may hang on many anchor tokens: its rows are those of a tree behind the last of them."""
    model, prompt = make(torch.float32), text(53)
    (whole_pass,) = model.verify([VerifyRows(model.open(80), prompt, BUSHY)])
    (behind,) = model.verify([VerifyRows(prefilled(model, prompt[:-1]), prompt[-1:], BUSHY)])
    assert torch.equal(whole_pass.logits[52:], behind.logits)
    assert torch.equal(whole_pass.hidden[52:], behind.hidden)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_without_walking_branches_are_right_but_not_the_same_bits(dtype: torch.dtype) -> None:
    """What the walk is for: a tree laid out in one run sums its keys in another order."""
    model, loose = make(dtype), make(dtype, exact=False)
    found = []
    for length in LENGTHS:
        plain = Plain(model, text(length))
        session = prefilled(loose, plain.prompt)
        (output,) = loose.verify([VerifyRows(session, [30], BUSHY)])
        (walked,) = model.verify([VerifyRows(prefilled(model, plain.prompt), [30], BUSHY)])
        torch.testing.assert_close(output.logits, walked.logits)
        torch.testing.assert_close(output.hidden, walked.hidden)
        found += differing(output, plain, 30, BUSHY)
        session.keep(path_to(BUSHY, 6))
        (after,) = loose.verify([VerifyRows(session, [8], EMPTY_PROPOSAL)])
        spelled = [30, *(BUSHY.tokens[r - 1] for r in path_to(BUSHY, 6)[1:]), 8]
        torch.testing.assert_close(after.logits, plain.after(spelled)[0].logits)
    assert found and 0 not in found and 1 not in found, "the first child stands where plain decoding puts it"


# Batches -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chosen", [(0, 1, 2, 3), (0, 2), (3, 1), (3, 0, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_batches(chosen: tuple[int, ...], dtype: torch.dtype) -> None:
    """Texts of all lengths keep their bits together: trees, chains and lone rows, in neighbouring slots or not."""
    model = make(dtype)
    plains = [Plain(model, text(length, seed=i)) for i, length in enumerate(LENGTHS)]
    sessions = [prefilled(model, plain.prompt) for plain in plains]
    drafts = [BUSHY, EMPTY_PROPOSAL, Proposal.chain(text(11)), LATE, Proposal.chain(text(3))]
    for turn in range(2):
        proposals = {i: drafts[(i + turn) % 5] for i in chosen}
        outputs = model.verify([VerifyRows(sessions[i], [9], p) for i, p in proposals.items()])
        for (i, proposal), output in zip(proposals.items(), outputs, strict=True):
            assert differing(output, plains[i], 9, proposal) == [], f"rows behind {LENGTHS[i]} tokens"


def test_a_prompt_beside_a_tree() -> None:
    model = make(torch.float32)
    plain, prompt = Plain(model, text(53)), text(200, seed=5)
    session = prefilled(model, plain.prompt)
    parts = [VerifyRows(session, [30], BUSHY), VerifyRows(model.open(220), prompt, EMPTY_PROPOSAL)]
    tree, chunk = model.verify(parts)
    (alone,) = model.verify(parts[1:])
    assert differing(tree, plain, 30, BUSHY) == []
    assert torch.equal(chunk.logits, alone.logits)


@pytest.mark.parametrize("exact", [True, False])
def test_padding_of_a_batch_of_trees_harms_no_path(exact: bool) -> None:
    """Runs are padded to the widest of their leg; what padding overwrites is needed by nobody."""
    model = make(torch.float64, exact=exact)
    wide, late = (
        Proposal((1, 2, 3, 4, 5, 6), (0, 0, 2, 3, 4, 5)),
        Proposal((1, 2, 3, 4, 5, 6), (0, 1, 2, 3, 0, 5)),
    )
    sessions = [prefilled(model, text(40, seed=i)) for i in range(2)]
    for tree, session, path in zip((wide, late), sessions, ([0, 1], [0, 1, 2, 3, 4]), strict=True):
        model.verify([VerifyRows(s, [30], t) for s, t in zip(sessions, (wide, late), strict=True)])
        spelled = [30, *(tree.tokens[r - 1] for r in path[1:])]
        session.keep(path)
        expected = Plain(model, text(40, seed=sessions.index(session))).after(spelled)[1]
        got = kv(model, session, len(path))
        close = torch.equal if exact else torch.allclose
        assert all(close(a, b) for a, b in zip(got, expected, strict=True))


# The real target -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_real_target_keeps_its_bits() -> None:
    """A tree and a chain beside it, behind prompts of two lengths, row by row against plain decoding."""
    model = LLM(drafter=None, dtype="float32").target
    assert isinstance(model, NativeTarget)
    model.tap((1, 15, 29))
    plains = [Plain(model, text(length, seed=length, vocab=40_000)) for length in (53, 308)]
    sessions = [prefilled(model, plain.prompt) for plain in plains]
    chain, tree = Proposal.chain(text(7)), LATE
    for drafts in ((tree, chain), (chain, tree)):
        outputs = model.verify([VerifyRows(s, [30], p) for s, p in zip(sessions, drafts, strict=True)])
        for output, plain, proposal in zip(outputs, plains, drafts, strict=True):
            assert differing(output, plain, 30, proposal) == []
    sessions[1].keep([0, 4, 5])
    expected = plains[1].after([30, 4, 5])[1]
    assert all(torch.equal(a, b) for a, b in zip(kv(model, sessions[1], 3), expected, strict=True))


# Walks ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def session() -> Iterator[TargetSession]:
    model = tiny_target()
    opened = model.open(40)
    yield opened
    opened.close()


def runs(part: VerifyRows) -> list[tuple[int, list[int]]]:
    """The walk as plain data."""
    return [(run.depth, run.rows) for run in walk(part)]


def test_a_chain_is_one_run(session: TargetSession) -> None:
    assert runs(VerifyRows(session, [1, 2], Proposal.chain([3, 4]))) == [(0, [0, 1, 2, 3])]
    assert runs(VerifyRows(session, [1], EMPTY_PROPOSAL)) == [(0, [0])]


def test_a_walk_ends_on_the_likeliest_path(session: TargetSession) -> None:
    part = VerifyRows(session, [1], BUSHY)
    assert runs(part) == [(0, [0, 7]), (1, [2, 5, 6]), (1, [1, 4]), (2, [3, 8])]
    assert placed_rows(walk(part)) == path_to(BUSHY, 8)
    assert placed_rows(whole(part)) == list(range(9))
    shifted = VerifyRows(session, [1, 2, 3], BUSHY)
    assert runs(shifted) == [(0, [0, 1, 2, 9]), (3, [4, 7, 8]), (3, [3, 6]), (4, [5, 10])]


def test_passes_are_cut_by_their_padded_rows(session: TargetSession) -> None:
    walks = [walk(VerifyRows(session, [1], p)) for p in (BUSHY, LATE, EMPTY_PROPOSAL)]
    assert [num_pass_rows([w]) for w in walks] == [9, 6, 1]
    assert num_pass_rows(walks[:2]) == 2 * 3 + 2 * 3 + 2 * 2 + 2
    assert split_pass([2, 0, 1], walks, None) == [[2, 0, 1]]
    assert split_pass([2, 0, 1], walks, 19) == [[2, 0, 1]]
    assert split_pass([2, 0, 1], walks, 18) == [[2, 0], [1]]
    assert split_pass([0, 1, 2], walks, 15) == [[0], [1, 2]]
    assert split_pass([0, 1, 2], walks, 4) == [[0], [1], [2]]


def test_wide_parts_do_not_widen_narrow_ones(session: TargetSession) -> None:
    walks = [walk(VerifyRows(session, [1] * width, EMPTY_PROPOSAL)) for width in (1, 1, 64, 2, 1, 3)]
    assert seat(walks) == [[0, 1], [2], [3, 4], [5]]
    assert num_pass_rows(walks) == 1 + 1 + 64 + 2 * 2 + 3
    assert seat([]) == []


@pytest.mark.parametrize(("width", "framed"), [(64, False), (4, True)])
def test_a_frame_is_not_mostly_padding(session: TargetSession, width: int, framed: bool) -> None:
    """A wide piece of a prompt beside seven narrow parts would be padded to eight of its width."""
    parts = [VerifyRows(session, [1] * n, EMPTY_PROPOSAL) for n in (width, *(1,) * 7)]
    layout = Layout(group=1, room=1024, min_rows=1, framed=True)
    plan = plan_pass(parts, [walk(part) for part in parts], range(8), layout)
    assert (plan.frame is not None) is framed


# The probe -----------------------------------------------------------------------------------------------------------


def test_the_probe_finds_rows_that_keep_their_bits() -> None:
    probe = probe_rows(tiny_target(max_positions=192, dtype=torch.float32))
    assert probe.is_exact and probe.verdict == "bit-exact"
    assert probe.kinds == {"chains": True, "trees": True, "batches": True}


def test_the_probe_finds_trees_that_sum_in_another_order() -> None:
    probe = probe_rows(make(torch.float32, exact=False))
    assert (probe.differing, probe.trees, probe.batches) == ((), False, True)
    assert probe.verdict == "chains and batches bit-exact, trees equal up to near-ties"


@pytest.mark.parametrize(
    ("num_rows", "num_parts", "kinds", "verdict"),
    [
        (
            8,
            1,
            {"chains": False, "trees": True, "batches": False},
            "trees bit-exact, chains and batches equal up to near-ties",
        ),
        (5, 1, {"chains": False, "trees": False, "batches": False}, "equal up to near-ties"),
        (
            1,
            3,
            {"chains": True, "trees": True, "batches": False},
            "chains and trees bit-exact, batches equal up to near-ties",
        ),
    ],
)
def test_the_probe_finds_rows_that_depend_on_their_neighbours(
    num_rows: int, num_parts: int, kinds: dict[str, bool], verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes of some shape round their last row otherwise, and no other."""
    model = tiny_target(max_positions=192, dtype=torch.float32)
    verify = model.verify

    def rounds_otherwise(batch: Sequence[VerifyRows]) -> list[TargetOutput]:
        outputs = verify(batch)
        if len(batch) != num_parts:
            return outputs
        return [
            replace(o, logits=torch.cat([o.logits[:-1], o.logits[-1:] * (1 + 1e-6)]))
            if part.num_rows == num_rows and not part.last_row_only
            else o
            for part, o in zip(batch, outputs, strict=True)
        ]

    monkeypatch.setattr(model, "verify", rounds_otherwise)
    probe = probe_rows(model)
    assert probe.kinds == kinds
    assert not probe.is_exact and probe.verdict == verdict
    assert probe.differing == ((num_rows,) if not kinds["chains"] else ())


def test_the_probe_of_a_target_that_takes_chains_only(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_target(max_positions=192, dtype=torch.float32)
    verify = model.verify

    def refuses_trees(batch: Sequence[VerifyRows]) -> list[TargetOutput]:
        if not all(part.proposal.is_chain for part in batch):
            raise UnsupportedTargetError("chains only")
        return verify(batch)

    monkeypatch.setattr(model, "verify", refuses_trees)
    probe = probe_rows(model)
    assert (probe.trees, probe.verdict) == (None, "bit-exact")
    assert probe.kinds == {"chains": True, "batches": True}


def test_trees_are_drafted_where_they_are_exact_or_nearly() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert default_tree_nodes(cpu, torch.float32) == default_tree_nodes(cpu, torch.float32, exact=False) == 2
    assert default_tree_nodes(cpu, torch.bfloat16) == 5
    assert default_tree_nodes(cpu, torch.bfloat16, exact=False) is None
    assert default_tree_nodes(cuda, torch.float32) == 15
    assert default_tree_nodes(cuda, torch.bfloat16) is None
