"""Qwen3-shaped building blocks with K/V injection.

Parameter names are those of the checkpoint format, so a state dict is a checkpoint.

Shape suffixes: R rows, B blocks, S slots, H query heads, G kv heads, E head dim, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from paceline.core.product import Product, linear
from paceline.drafter.config import DrafterConfig, NeuralConfig


def random_weight(*sizes: int) -> nn.Parameter:
    """Returns a weight drawn from N(0, 0.02²)."""
    weight = nn.Parameter(torch.empty(*sizes))
    if not weight.is_meta:  # to fill nothing at random, PyTorch would load its compiler for seconds
        nn.init.normal_(weight, std=0.02)
    return weight


class Projection(nn.Module):
    """x (…, I) ↦ x · weightᵀ (…, O); prepacked for inference by `freeze`."""

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        self.weight = random_weight(num_out, num_in)
        self._product: Product | None = None

    def freeze(self) -> None:
        """Prepacks the current weight; training afterwards is an error of the caller."""
        self.weight.requires_grad_(False)
        self._product = linear(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight) if self._product is None else self._product(x)


class RMSNorm(nn.Module):
    """x · rsqrt(mean x² + eps) · weight over the last axis."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.to(self.weight.dtype), self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    """Projections of one layer's attention; the attending itself is the caller's, who knows the context."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.q_proj = Projection(config.hidden_size, config.num_heads * config.head_dim)
        self.k_proj = Projection(config.hidden_size, config.num_kv_heads * config.head_dim)
        self.v_proj = Projection(config.hidden_size, config.num_kv_heads * config.head_dim)
        self.o_proj = Projection(config.num_heads * config.head_dim, config.hidden_size)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def queries(self, x_RD: torch.Tensor, rope: Rope) -> torch.Tensor:
        """Returns normed, rotated queries (R, H, E)."""
        return rope.rotate(self.q_norm(self._heads(self.q_proj(x_RD))))

    def keys(self, x_RD: torch.Tensor, rope: Rope) -> torch.Tensor:
        """Returns normed, rotated keys (R, G, E) of block states or of injected context."""
        return rope.rotate(self.k_norm(self._heads(self.k_proj(x_RD))))

    def values(self, x_RD: torch.Tensor) -> torch.Tensor:
        """Returns values (R, G, E)."""
        return self._heads(self.v_proj(x_RD))

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(x.shape[0], -1, self.head_dim)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: NeuralConfig) -> None:
        super().__init__()
        self.gate_proj = Projection(config.hidden_size, config.intermediate_size)
        self.up_proj = Projection(config.hidden_size, config.intermediate_size)
        self.down_proj = Projection(config.intermediate_size, config.hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """One pre-norm decoder layer."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x_BSD: torch.Tensor, attend: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Returns the layer's output (B, S, D).

        Args:
            x_BSD: its input, block by block.
            attend: normed input ↦ what the heads of each slot attended to, (B, S, H · E).
        """
        x = x_BSD + self.self_attn.o_proj(attend(self.input_layernorm(x_BSD)))
        out: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Rope:
    """Rotary embedding at given absolute positions (half-split layout).

    Args:
        positions: (R,) absolute positions.
        theta, head_dim: as usual.
        dtype: dtype of the result; angles are float64, products at least float32.
    """

    def __init__(self, positions: torch.Tensor, theta: float, head_dim: int, dtype: torch.dtype) -> None:
        exponent = torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions.device) / head_dim
        angles = positions.double()[:, None] / theta**exponent
        table = torch.cat([angles, angles], dim=-1)[:, None]
        precise = torch.promote_types(dtype, torch.float32)
        self.cos, self.sin = table.cos().to(precise), table.sin().to(precise)

    def rotate(self, x_RHE: torch.Tensor) -> torch.Tensor:
        """Returns x turned by its row's position. Pure."""
        left, right = x_RHE.chunk(2, dim=-1)
        return (x_RHE * self.cos + torch.cat([-right, left], dim=-1) * self.sin).to(x_RHE.dtype)
