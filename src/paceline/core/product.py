"""Matrix products whose rows do not depend on their neighbours.

A pass over 8 rows and a pass over 1 row usually take different kernels and round differently, which flips near-ties.
With weights prepacked for one kernel the rows stay the same bits, and memory is read in order, so it is also the
fastest product of a few rows that PyTorch offers on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

ROW_PAD = 4
"""Products of one, two or three rows round in their own way, unless the weights are packed."""
PACK_ROWS = 32
"""The row count that packing is tuned for; up to so many rows a bfloat16 pass keeps its bits."""

Product = Callable[[torch.Tensor], torch.Tensor]


def is_packable(weight: torch.Tensor) -> bool:
    """Whether oneDNN can prepack this weight here: float32, or bfloat16 with AVX-512 or AMX."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype is torch.float32


def linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Product:
    """Returns x (…, I) ↦ x · weightᵀ + bias (…, O), over a private prepacked copy of `weight` (O, I) where possible.

    Pure. Not differentiable. What cannot be packed takes `torch.nn.functional.linear`: in float64 on a CPU over rows in
    fours, which keeps their bits.
    """
    if not is_packable(weight):
        in_fours = weight.device.type == "cpu" and weight.dtype is torch.float64
        return lambda x: _in_fours(x, weight, bias) if in_fours else F.linear(x, weight, bias)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), PACK_ROWS)
    pointwise = torch.ops.mkldnn._linear_pointwise.default

    def product(x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = pointwise(x, packed, bias, "none", [], "")
        return out

    return product


def _in_fours(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Returns the product, computed over a multiple of `ROW_PAD` rows."""
    rows = x.reshape(-1, x.shape[-1])
    padding = rows[:1].expand(-rows.shape[0] % ROW_PAD, -1)
    return F.linear(torch.cat([rows, padding]), weight, bias)[: rows.shape[0]].view(*x.shape[:-1], -1)
