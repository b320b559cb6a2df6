"""Attention of few query rows over long K/V: heads that share keys and values run as rows of one product.

Shape suffixes: N sequences, W rows of each, H heads, G key-value heads, E head dim, Q query vectors of a key-value
head, T keys.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from paceline.core.product import ROW_PAD


def grouped_mask(seen_NWT: torch.Tensor, group: int, min_rows: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns the additive mask (N, 1, Q, T) of rows that see these keys, for `attend_grouped`. Pure.

    Args:
        group: heads that share K/V, H / G.
        min_rows: as many rows at least are padded to; Q is a multiple of `ROW_PAD`.
    """
    num_queries = group * max(seen_NWT.shape[1], min_rows)
    seen_NQT = _padded(seen_NWT.repeat(1, group, 1), -(-num_queries // ROW_PAD) * ROW_PAD)
    mask = torch.zeros(seen_NQT.shape, dtype=dtype, device=seen_NQT.device)
    return mask.masked_fill_(~seen_NQT, -math.inf)[:, None]


def attend_grouped(
    q_NWHE: torch.Tensor, k_NGTE: torch.Tensor, v_NGTE: torch.Tensor, mask_N1QT: torch.Tensor
) -> torch.Tensor:
    """Returns what each row's heads attend to, (N · W, H · E). Pure."""
    (_, width, heads, _), groups = q_NWHE.shape, k_NGTE.shape[1]
    group = heads // groups
    rows_NGQE = q_NWHE.unflatten(2, (groups, group)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    rows_NGQE = _padded(rows_NGQE.contiguous(), mask_N1QT.shape[2])
    out = F.scaled_dot_product_attention(rows_NGQE, k_NGTE, v_NGTE, mask_N1QT)
    answers_NGQE = out[:, :, : group * width].unflatten(2, (group, width))
    seen: torch.Tensor = answers_NGQE.permute(0, 3, 1, 2, 4).flatten(0, 1).flatten(1)
    return seen


def _padded(x: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Returns `x` (…, rows, ·) with copies of its first row up to `num_rows`."""
    missing = num_rows - x.shape[-2]
    if not missing:
        return x
    return torch.cat([x, x[..., :1, :].expand(*x.shape[:-2], missing, x.shape[-1])], dim=-2)
