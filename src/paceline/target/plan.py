"""One pass over static K/V slots: which rows run together, where their K/V go, and what each of them sees.

A tree cannot lie in a slot as it is: a node two tokens behind the anchor would stand wherever its turn comes, and
attention would sum its keys in another order than in plain decoding. So attention walks a tree depth first, in runs of
nodes that follow each other. Each run is laid exactly where plain decoding would put it, over the run it branches off
from, and is attended to before the next one is laid. All the rest of a pass takes the rows of all runs at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch

from paceline.core.product import ROW_PAD
from paceline.target.base import VerifyRows

KV_PAD, KV_BLOCK = 64, 512
"""K/V lengths that attention sees are multiples of the first; kernels work through them in blocks of the second."""
KV_SPARE = 8
"""So many masked keys at least end a K/V length: products in float64 sum the last few keys in another order."""


def padded_length(length: int) -> int:
    """Returns a K/V length at which attention sums in the same order as at any longer one.

    Masked keys add zeros, which change nothing so long as the kernel splits the sum at the same places. Within a block
    of 512 keys a CPU's matrix product over 256 or 320 keys splits elsewhere than over 384 and more, so those two
    lengths are passed over. Pure.
    """
    padded = round_up(length + KV_SPARE, KV_PAD)
    rest = padded % KV_BLOCK
    return padded + 384 - rest if rest in (256, 320) else padded


# Walks ---------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Run:
    """Rows of a part that follow each other, the first of them `depth` tokens behind the part's first row."""

    depth: int
    rows: list[int]


def walk(part: VerifyRows) -> list[Run]:
    """Returns the part's rows in depth-first order, cut where a row does not follow the one before it.

    First children come last, so what is left in the slot at the end is the path of the likeliest nodes. Pure.
    """
    root = len(part.anchor_tokens) - 1
    below: dict[int, list[int]] = {}
    for node, parent in enumerate(part.proposal.parents):
        below.setdefault(root + parent, []).append(root + 1 + node)
    runs = [Run(0, list(range(root + 1)))]
    waiting = [(root + 1, row) for row in below.get(root, ())]
    while waiting:
        depth, row = waiting.pop()
        if runs[-1].depth + len(runs[-1].rows) == depth:
            runs[-1].rows.append(row)
        else:
            runs.append(Run(depth, [row]))
        waiting += [(depth + 1, child) for child in below.get(row, ())]
    return runs


def whole(part: VerifyRows) -> list[Run]:
    """Returns all rows as one run: a tree's nodes lie behind each other, and a mask tells who sees whom. Pure."""
    return [Run(0, list(range(part.num_rows)))]


def placed_rows(runs: Sequence[Run]) -> list[int]:
    """Returns the rows that lie in the slot, in order, after these runs. Pure."""
    placed: list[int] = []
    for run in runs:
        placed[run.depth :] = run.rows
    return placed


def num_pass_rows(walks: Sequence[Sequence[Run]]) -> int:
    """Returns the rows of a pass over parts with these walks, padding included. Pure."""
    legs = zip_longest(*([len(run.rows) for run in runs] for runs in walks), fillvalue=0)
    return sum(max(widths) * sum(width > 0 for width in widths) for widths in legs)


def split_pass(order: list[int], walks: Sequence[Sequence[Run]], max_rows: int | None) -> list[list[int]]:
    """Returns the parts, cut into passes of at most `max_rows` rows; a wider part has its own. Pure."""
    if max_rows is None:
        return [order]
    passes: list[list[int]] = []
    for n in order:
        if passes and num_pass_rows([walks[i] for i in (*passes[-1], n)]) <= max_rows:
            passes[-1].append(n)
        else:
            passes.append([n])
    return passes


# Plans ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Layout:
    """What the passes of a model share.

    Args:
        num_heads, num_kv_heads: H and G.
        room: rows of a K/V slot; the last of them belongs to no session, and padding beyond the room goes there.
        min_rows: fewest rows of a pass.
        device: where index tensors go.
    """

    num_heads: int
    num_kv_heads: int
    room: int
    min_rows: int
    device: torch.device


@dataclass(slots=True)
class Leg:
    """A rectangle of rows that attention takes at once: the next run of each part that has one.

    Args:
        rows: which rows of the pass, N · W of them.
        tokens, positions: (N · W,) their input ids and absolute positions, padding included.
        places: (N · W,) where their K/V are written, counted through all slots.
        slots: the parts' K/V slots, a slice when they are contiguous (then attention reads them in place).
        queries: (N, G, Q) which of the pass's R · H query vectors attention takes: the W rows of each head that shares
            a K/V head, then copies of the first up to a multiple of `ROW_PAD`.
        answers: (N · W · H,) where in what attention returns for them each row's heads are.
        visible: (N, Q, T) which K/V each of them sees; for T see `padded_length`.
    """

    rows: slice
    tokens: torch.Tensor
    positions: torch.Tensor
    places: torch.Tensor
    slots: slice | torch.Tensor
    queries: torch.Tensor
    answers: torch.Tensor
    visible: torch.Tensor

    def mask(self, dtype: torch.dtype) -> torch.Tensor:
        """Returns the additive mask (N, 1, Q, T)."""
        mask = torch.zeros(self.visible.shape, dtype=dtype, device=self.visible.device)
        return mask.masked_fill_(~self.visible, -math.inf)[:, None]


@dataclass(slots=True)
class Plan:
    """A pass over R rows.

    Args:
        legs: what attention takes, in order; their rows stand one behind the other.
        rows: by part, where each of its rows is in the pass.
        answers: (R · H,) where each row's heads are in what attention returns, leg behind leg.
    """

    legs: list[Leg]
    rows: list[list[int]]
    answers: torch.Tensor


def plan_pass(
    batch: Sequence[VerifyRows], walks: Sequence[Sequence[Run]], slots: Sequence[int], layout: Layout
) -> Plan:
    """Returns the pass that takes all parts along their walks, padded to the widest run of each leg.

    Args:
        walks: the parts' runs, by `walk` or `whole`.
        slots: the parts' K/V slots, ascending.
    """
    legs, answers = list[Leg](), list[torch.Tensor]()
    rows = [[0] * part.num_rows for part in batch]
    min_width = layout.min_rows if num_pass_rows(walks) < layout.min_rows else 1
    num_rows = num_queries = 0
    for turn in range(max(len(runs) for runs in walks)):
        there = [n for n, runs in enumerate(walks) if len(runs) > turn]
        runs = [walks[n][turn] for n in there]
        width = max(min_width, *(len(run.rows) for run in runs))
        for start, n, run in zip(range(num_rows, 1 << 62, width), there, runs, strict=False):
            for column, row in enumerate(run.rows):
                rows[n][row] = start + column
        taken = torch.arange(num_rows, num_rows + len(there) * width).view(len(there), width)
        legs.append(_plan_leg([batch[n] for n in there], runs, [slots[n] for n in there], taken, layout))
        answers.append(legs[-1].answers + num_queries)
        num_rows, num_queries = num_rows + taken.numel(), num_queries + legs[-1].queries.numel()
    return Plan(legs, rows, torch.cat(answers))


def _plan_leg(
    parts: Sequence[VerifyRows], runs: Sequence[Run], slots: Sequence[int], rows: torch.Tensor, layout: Layout
) -> Leg:
    """Returns the leg that takes one run of each part at `rows` (N, W) of the pass."""
    num_seq, width = rows.shape
    start = torch.tensor([part.session.length + run.depth for part, run in zip(parts, runs, strict=True)])
    positions = (start[:, None] + torch.arange(width)).clamp(max=layout.room - 1)
    places = positions + layout.room * torch.tensor(slots)[:, None]
    kv_length = min(padded_length(int(start.max()) + width), layout.room)
    visible = torch.arange(kv_length) <= positions[..., None]
    tokens = torch.zeros_like(rows)
    for n, (part, run) in enumerate(zip(parts, runs, strict=True)):
        ids = [*part.anchor_tokens, *part.proposal.tokens]
        tokens[n, : len(run.rows)] = torch.tensor([ids[row] for row in run.rows])
        if len(run.rows) == part.num_rows and not part.proposal.is_chain:
            _lay_whole(part, positions[n], visible[n])
    heads = torch.arange(layout.num_heads).view(layout.num_kv_heads, -1, 1)
    group = heads.shape[1]
    padded = torch.arange(round_up(group * max(width, layout.min_rows), ROW_PAD))
    padded[group * width :] = 0
    queries = (rows[:, None, None] * layout.num_heads + heads).flatten(2)[..., padded]
    answers = torch.arange(queries.numel()).view(queries.shape)[..., : group * width]
    contiguous = list(slots) == list(range(slots[0], slots[0] + num_seq))
    device = layout.device
    return Leg(
        rows=slice(int(rows[0, 0]), int(rows[-1, -1]) + 1),
        tokens=tokens.view(-1).to(device),
        positions=positions.view(-1).to(device),
        places=places.view(-1).to(device),
        slots=slice(slots[0], slots[0] + num_seq) if contiguous else torch.tensor(slots, device=device),
        queries=queries.to(device),
        answers=answers.unflatten(2, (group, width)).permute(0, 3, 1, 2).reshape(-1).to(device),
        visible=visible[:, padded % width].to(device),
    )


def _lay_whole(part: VerifyRows, positions: torch.Tensor, visible: torch.Tensor) -> None:
    """Writes the positions (W,) and the sight (W, T) of a tree in one run over those of a chain. Mutates: both."""
    start, root = part.session.length, len(part.anchor_tokens) - 1
    visible[root + 1 :, start + root + 1 :] = False
    for node, parent in enumerate(part.proposal.parents):
        row, above = root + 1 + node, root + parent
        positions[row] = positions[above] + 1
        visible[row] = visible[above]
        visible[row, start + row] = True


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
