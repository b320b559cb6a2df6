"""One pass over static K/V slots: which rows run together, where their K/V go, and what each of them sees.

A tree cannot lie in a slot as it is: a node two tokens behind the anchor would stand wherever its turn comes, and
attention would sum its keys in another order than in plain decoding. So attention walks a tree depth first, in runs of
nodes that follow each other. Each run is laid exactly where plain decoding would put it, over the run it branches off
from, and is attended to before the next one is laid. All the rest of a pass takes the rows of all runs at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from paceline.core.attention import grouped_mask
from paceline.core.recorder import MAX_SEQUENCES, MAX_WIDTH, Tensors, bucket, length_bucket, window
from paceline.target.base import VerifyRows

KV_PAD, KV_BLOCK = 64, 512
"""K/V lengths that attention sees are multiples of the first; kernels work through them in blocks of the second."""
SPARE_ROWS = 1
"""Rows of padding that are cheaper than another leg."""
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


def seat(walks: Sequence[Sequence[Run]]) -> list[list[int]]:
    """Returns which parts share a leg, by leg and in order: those of one turn, as long as little of it is padding.

    A row of padding costs what any row costs, and a further leg about as much as `SPARE_ROWS` of them: its calls.

    Args:
        walks: the parts' runs. Turn t takes the run t of each part that has one.

    Pure.
    """
    legs: list[list[int]] = []
    for turn in range(max(map(len, walks), default=0)):
        width, seated = 0, list[int]()
        for n, runs in enumerate(walks):
            if len(runs) <= turn:
                continue
            wider = max(width, own := len(runs[turn].rows))
            padding = wider * (len(seated) + 1) - width * len(seated) - own
            if seated and padding > SPARE_ROWS:
                legs.append(seated)
                seated, wider = [], own
            seated, width = [*seated, n], wider
        legs.append(seated)
    return legs


def num_pass_rows(walks: Sequence[Sequence[Run]]) -> int:
    """Returns the rows of a pass over parts with these walks, padding included. Pure."""
    turns, num_rows = [0] * len(walks), 0
    for seated in seat(walks):
        num_rows += len(seated) * max(len(walks[n][turns[n]].rows) for n in seated)
        for n in seated:
            turns[n] += 1
    return num_rows


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


@dataclass(slots=True)
class Branches:
    """A tree's K/V, until it is known which of its nodes are kept.

    Args:
        kv: keys and values of all rows of the pass, (layers, 2, R, G, E).
        rows: where the part's rows are in the pass.
        placed: the rows that lie in the slot, in order.
    """

    kv: torch.Tensor
    rows: list[int]
    placed: list[int]


# Plans ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Layout:
    """What the passes of a model share.

    Args:
        group: heads that share K/V.
        room: rows of a K/V slot; the last of them belongs to no session, and padding goes there.
        min_rows: fewest rows of a pass.
        framed: pad passes to frames where they fit one.
    """

    group: int
    room: int
    min_rows: int
    framed: bool = False


@dataclass(frozen=True, slots=True)
class Frame:
    """The rectangle of fixed size that a pass is padded to, so that it can be recorded.

    Args:
        first, num_slots: the K/V slots that it covers, all of them whoever has rows.
        width: rows of each.
        kv_length: T.
    """

    first: int
    num_slots: int
    width: int
    kv_length: int


@dataclass(frozen=True, slots=True)
class Leg:
    """A rectangle of rows that attention takes at once: the next run of each part that has one.

    Padding writes its K/V where no session reads and sees one key of its slot.

    Args:
        numbers: (4, N, W) of each row its input id, its absolute position, where its K/V are written, counted through
            all slots, and the last key of its slot that it sees.
        ancestry: (N, W, W) which rows of its run each row sees beyond that key; `None` where there are no branches.
        start: which row of the pass is its first.
        slots: the rows' K/V slots, a slice when they are contiguous (then attention reads them in place).
        kv_length: T, how much of the slots attention sees (see `padded_length`).
    """

    numbers: torch.Tensor
    ancestry: torch.Tensor | None
    start: int
    slots: slice | torch.Tensor
    kv_length: int

    @property
    def tensors(self) -> Tensors:
        """What differs between passes of one shape."""
        return (self.numbers,) if self.ancestry is None else (self.numbers, self.ancestry)

    def over(self, numbers: torch.Tensor, ancestry: torch.Tensor | None = None) -> Leg:
        """Returns this leg over other `tensors`, on any device. Pure."""
        slots = self.slots if isinstance(self.slots, slice) else self.slots.to(numbers.device)
        return replace(self, numbers=numbers, ancestry=ancestry, slots=slots)

    @property
    def size(self) -> tuple[int, int]:
        """N and W."""
        return self.numbers.shape[1], self.numbers.shape[2]

    @property
    def rows(self) -> slice:
        """Which rows of the pass they are."""
        return slice(self.start, self.start + self.numbers[0].numel())

    def mask(self, layout: Layout, dtype: torch.dtype) -> torch.Tensor:
        """Returns the additive mask (N, 1, Q, T) for `attend_grouped`."""
        keys_T = torch.arange(self.kv_length, device=self.numbers.device)
        seen_NWT = keys_T <= self.numbers[3, ..., None]
        if self.ancestry is not None:
            width = self.size[1]
            row_NT = keys_T - self.numbers[1, :, :1]  # which row of the run lies there
            row_NWT = row_NT.clamp(0, width - 1)[:, None].expand(-1, width, -1)
            seen_NWT |= self.ancestry.gather(2, row_NWT) & ((row_NT >= 0) & (row_NT < width))[:, None]
        return grouped_mask(seen_NWT, layout.group, layout.min_rows, dtype)


@dataclass(slots=True)
class Plan:
    """A pass.

    Args:
        legs: what attention takes, in order; their rows stand one behind the other.
        rows: by part, where each of its rows is in the pass.
        frame: what the one leg is padded to, if it is.
    """

    legs: list[Leg]
    rows: list[list[int]]
    frame: Frame | None


def plan_pass(
    batch: Sequence[VerifyRows], walks: Sequence[Sequence[Run]], slots: Sequence[int], layout: Layout
) -> Plan:
    """Returns the pass that takes all parts along their walks, legs padded to their widest run (see `seat`).

    Args:
        walks: the parts' runs, by `walk` or `whole`.
        slots: the parts' K/V slots, ascending.
    """
    min_width = layout.min_rows if num_pass_rows(walks) < layout.min_rows else 1
    frame = _frame(batch, walks, slots, min_width, layout) if layout.framed else None
    if frame is not None:
        return _framed(batch, walks, slots, frame, layout)
    legs, num_rows, turns = list[Leg](), 0, [0] * len(batch)
    rows = [[0] * part.num_rows for part in batch]
    for seated in seat(walks):
        runs = {n: walks[n][turns[n]] for n in seated}
        width = max(min_width, *(len(run.rows) for run in runs.values()))
        for start, (n, run) in zip(range(num_rows, 1 << 62, width), runs.items(), strict=False):
            turns[n] += 1
            for column, row in enumerate(run.rows):
                rows[n][row] = start + column
        there = {slots[n]: (batch[n], run) for n, run in runs.items()}
        kv_length = min(_kv_length(there.values(), width), layout.room)
        legs.append(_plan_leg(there, list(there), (width, kv_length), num_rows, layout))
        num_rows += len(seated) * width
    return Plan(legs, rows, None)


def _framed(
    batch: Sequence[VerifyRows],
    walks: Sequence[Sequence[Run]],
    slots: Sequence[int],
    frame: Frame,
    layout: Layout,
) -> Plan:
    """Returns the pass that takes parts of one run each, padded to a frame."""
    seated = {slot: (part, runs[0]) for slot, part, runs in zip(slots, batch, walks, strict=True)}
    covered = range(frame.first, frame.first + frame.num_slots)
    leg = _plan_leg(seated, covered, (frame.width, frame.kv_length), 0, layout)
    starts = [(slot - frame.first) * frame.width for slot in slots]
    rows = [list(range(start, start + part.num_rows)) for start, part in zip(starts, batch, strict=True)]
    return Plan([leg], rows, frame)


def _frame(
    batch: Sequence[VerifyRows],
    walks: Sequence[Sequence[Run]],
    slots: Sequence[int],
    min_width: int,
    layout: Layout,
) -> Frame | None:
    """Returns the frame that a pass fits, or `None` where it is too large, or walks branches one by one."""
    first, num_slots = window(slots)
    width = bucket(max(min_width, *(part.num_rows for part in batch)))
    if num_slots > MAX_SEQUENCES or width > MAX_WIDTH or any(len(runs) > 1 for runs in walks):
        return None
    if num_slots * width > MAX_WIDTH and num_slots * width > 4 * num_pass_rows(walks):
        return None  # a piece of a prompt beside many narrow parts: mostly padding
    longest = _kv_length([(part, runs[0]) for part, runs in zip(batch, walks, strict=True)], width)
    return Frame(first, num_slots, width, length_bucket(longest, layout.room))


def _kv_length(runs: Iterable[tuple[VerifyRows, Run]], width: int) -> int:
    return padded_length(max(part.session.length + run.depth for part, run in runs) + width)


def _plan_leg(
    seated: Mapping[int, tuple[VerifyRows, Run]],
    slots: Sequence[int],
    sizes: tuple[int, int],
    start: int,
    layout: Layout,
) -> Leg:
    """Returns the leg that takes one run of each part.

    Args:
        seated: parts and their runs by slot.
        slots: the leg's slots, ascending; those without a part are padding.
        sizes: W and T.
        start: the leg's first row in the pass.
    """
    width, kv_length = sizes
    numbers: list[list[int]] = [[], [], [], []]
    ancestry = None
    for seat, slot in enumerate(slots):
        count, scratch = 0, (slot + 1) * layout.room - 1
        if slot in seated:
            part, run = seated[slot]
            count, first = len(run.rows), part.session.length + run.depth
            ids = [*part.anchor_tokens, *part.proposal.tokens]
            positions: Sequence[int] = range(first, first + count)
            limits = positions
            if count == part.num_rows and not part.proposal.is_chain:
                if ancestry is None:
                    ancestry = torch.zeros(len(slots), width, width, dtype=torch.bool)
                positions, limits = _lay_whole(part, ancestry[seat])
            places = range(slot * layout.room + first, slot * layout.room + first + count)
            for column, values in zip(
                numbers, ([ids[r] for r in run.rows], positions, places, limits), strict=True
            ):
                column.extend(values)
        for column, filler in zip(numbers, (0, 0, scratch, 0), strict=True):
            column.extend([filler] * (width - count))
    contiguous = slots[-1] - slots[0] == len(slots) - 1
    return Leg(
        numbers=torch.tensor(numbers).view(4, len(slots), width),
        ancestry=ancestry,
        start=start,
        slots=slice(slots[0], slots[-1] + 1) if contiguous else torch.tensor(slots),
        kv_length=kv_length,
    )


def _lay_whole(part: VerifyRows, ancestry: torch.Tensor) -> tuple[list[int], list[int]]:
    """Returns positions and limits of a tree that lies in one run, row behind row. Mutates: its ancestry (W, W)."""
    start, root = part.session.length, len(part.anchor_tokens) - 1
    positions = list(range(start, start + root + 1))
    for node, parent in enumerate(part.proposal.parents):
        row, above = root + 1 + node, root + parent
        positions.append(positions[above] + 1)
        ancestry[row] = ancestry[above]
        ancestry[row, row] = True
    limits = [min(position, start + root) for position in positions]
    return positions, limits


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
