"""Index tensors of one rectangular pass over static K/V slots."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.target.base import VerifyRows

ROW_PAD = 4
"""Attention runs on a multiple of so many query rows: products of one, two or three rows round in their own way."""
KV_PAD, KV_BLOCK = 64, 512
"""K/V lengths that attention sees are multiples of the first; kernels work through them in blocks of the second."""


def padded_length(length: int) -> int:
    """Returns a K/V length at which attention sums in the same order as at any longer one.

    Masked keys add zeros, which change nothing so long as the kernel splits the sum at the same places. Within a block
    of 512 keys a CPU's matrix product over 256 or 320 keys splits elsewhere than over 384 and more, so those two
    lengths are passed over. Pure.
    """
    padded = round_up(length, KV_PAD)
    rest = padded % KV_BLOCK
    return padded + 384 - rest if rest in (256, 320) else padded


@dataclass(slots=True)
class Plan:
    """Index tensors of one rectangular pass.

    Args:
        tokens, positions: (N, W) input ids and absolute positions, right-padded.
        slots: K/V slots, a slice when they are contiguous (then attention reads them in place).
        slot_index, cache_index: (N, 1) and (N, W) where each row's K/V are written.
        visible: (N, W, T) which K/V each row sees.
        kv_length: T, see `padded_length`.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    slots: slice | torch.Tensor
    slot_index: torch.Tensor
    cache_index: torch.Tensor
    visible: torch.Tensor
    kv_length: int

    def mask(self, dtype: torch.dtype, group: int) -> torch.Tensor:
        """Returns the additive mask (N, 1, R, T) of the `group` · W query rows, padded as `pad` does."""
        num_seq, width, length = self.visible.shape
        mask = torch.zeros(num_seq, width, length, dtype=dtype, device=self.visible.device)
        mask.masked_fill_(~self.visible, -math.inf)
        mask = mask[:, None].expand(num_seq, group, width, length).reshape(num_seq, 1, group * width, length)
        return self.pad(mask)

    def pad(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns `rows` (N, G, R, ·) with copies of the first behind them, up to a multiple of `ROW_PAD`."""
        missing = -rows.shape[2] % ROW_PAD
        return torch.cat([rows, rows[:, :, :1].expand(-1, -1, missing, -1)], dim=2) if missing else rows


def plan_pass(
    batch: Sequence[VerifyRows], slots: Sequence[int], room: int, device: torch.device, min_rows: int = 1
) -> Plan:
    """Returns the pass that runs all parts, padded to the widest and to `min_rows` rows in all.

    Args:
        slots: the parts' K/V slots, ascending.
        room: rows of a slot; the last of them belongs to no session, and padding beyond the room goes there.
    """
    width = max(part.num_rows for part in batch)
    width = max(width, min_rows if len(batch) == 1 else 1)
    starts = [part.session.length for part in batch]
    kv_length = min(padded_length(max(starts) + width), room)
    tokens = torch.zeros(len(batch), width, dtype=torch.long)
    depths = torch.arange(width).repeat(len(batch), 1)
    sees = torch.ones(width, width, dtype=torch.bool).tril().repeat(len(batch), 1, 1)
    for n, part in enumerate(batch):
        tokens[n, : part.num_rows] = torch.tensor([*part.anchor_tokens, *part.proposal.tokens])
        if not part.proposal.is_chain:
            _place_tree(part, depths[n], sees[n])
    start = torch.tensor(starts)[:, None]
    cache_index = (start + torch.arange(width)).clamp(max=room - 1)
    visible = torch.arange(kv_length)[None, None] < start[:, :, None]
    visible = visible.repeat(1, width, 1)
    rows = cache_index[:, None, :].expand(-1, width, -1)
    visible.scatter_(2, rows, sees)
    contiguous = list(slots) == list(range(slots[0], slots[0] + len(slots)))
    return Plan(
        tokens=tokens.to(device),
        positions=(start + depths).clamp(max=room - 1).to(device),
        slots=slice(slots[0], slots[0] + len(slots)) if contiguous else torch.tensor(slots, device=device),
        slot_index=torch.tensor(slots, device=device)[:, None],
        cache_index=cache_index.to(device),
        visible=visible.to(device),
        kv_length=kv_length,
    )


def _place_tree(part: VerifyRows, depths: torch.Tensor, sees: torch.Tensor) -> None:
    """Writes a tree's depths (W,) and ancestor mask (W, W) over those of a chain. Mutates: both."""
    root = len(part.anchor_tokens) - 1
    sees[root + 1 :, root + 1 :] = False
    depths[root : root + len(part.proposal.depths)] = root + torch.tensor(part.proposal.depths)
    for node, parent in enumerate(part.proposal.parents):
        row, above = root + 1 + node, root + parent
        sees[row] = sees[above]
        sees[row, row] = True


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
