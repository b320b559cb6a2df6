"""Rotary embedding by a table of absolute positions, half-split layout."""

from __future__ import annotations

import torch

from paceline.target.weights import Shape

Table = tuple[torch.Tensor, torch.Tensor]


def rope_table(shape: Shape, length: int, dtype: torch.dtype, device: torch.device) -> Table:
    """Returns cos and signed sin (length, E) of absolute positions, for `rotate`."""
    exponent = torch.arange(0, shape.head_dim, 2, dtype=torch.float64) / shape.head_dim
    angles = torch.arange(length, dtype=torch.float64)[:, None] / shape.rope_theta**exponent
    cos, sin = torch.cat([angles.cos()] * 2, dim=-1), torch.cat([-angles.sin(), angles.sin()], dim=-1)
    return cos.to(device, dtype), sin.to(device, dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Returns `x` (R, heads, E) turned by cos and signed sin (R, 1, E) of its rows. Pure."""
    return (x * cos + x.roll(x.shape[-1] // 2, -1) * sin).to(x.dtype)
