"""EAGLE-3's decoder layer: q, k and v see a token's embedding beside a feature, the residual stream the feature alone.

Parameter names are those of the checkpoints, so a state dict is a checkpoint.

Shape suffixes: A anchors, S slots, W rows of a level, R rows, T context rows, D hidden, H heads, G kv heads,
E head dim.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from paceline.drafter.config import Eagle3Config
from paceline.drafter.context import ContextKV
from paceline.drafter.layers import MLP, Projection, RMSNorm, Rope


class Attention(nn.Module):
    """Projections of rows that are twice as wide as the residual stream."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = Projection(2 * config.hidden_size, queries)
        self.k_proj = Projection(2 * config.hidden_size, keys)
        self.v_proj = Projection(2 * config.hidden_size, keys)
        self.o_proj = Projection(queries, config.hidden_size)


class Midlayer(nn.Module):
    """The one decoder layer, by the names of its checkpoints."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def rows(self, embeddings_RD: torch.Tensor, features_RD: torch.Tensor) -> torch.Tensor:
        """Returns what the projections take, (R, 2 · D)."""
        return torch.cat([self.input_layernorm(embeddings_RD), self.hidden_norm(features_RD)], dim=-1)

    def queries(self, rows: torch.Tensor, rope: Rope) -> torch.Tensor:
        """Returns rotated queries (R, H, E)."""
        return rope.rotate(self._heads(self.self_attn.q_proj(rows)))

    def keys(self, rows: torch.Tensor, rope: Rope) -> torch.Tensor:
        """Returns rotated keys (R, G, E)."""
        return rope.rotate(self._heads(self.self_attn.k_proj(rows)))

    def values(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns values (R, G, E)."""
        return self._heads(self.self_attn.v_proj(rows))

    def finish(self, features_RD: torch.Tensor, attended_RHE: torch.Tensor) -> torch.Tensor:
        """Returns the layer's output from its features and what their heads attended to."""
        x = features_RD + self.self_attn.o_proj(attended_RHE.flatten(1))
        out: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(x.shape[0], -1, self.self_attn.head_dim)


def attend(
    q_WHE: torch.Tensor,
    k_WGE: torch.Tensor,
    v_WGE: torch.Tensor,
    scratch: ContextKV,
    lineage_WR: torch.Tensor,
) -> torch.Tensor:
    """Returns what one sequence's rows attend to, (W, H, E): context, ancestors, themselves. Mutates: the scratch."""
    scratch.append(k_WGE[None], v_WGE[None])
    keys, values, _ = scratch.view(0, None)
    mask = None  # a row alone has but its ancestors before it
    if len(lineage_WR) > 1:
        mask = F.pad(lineage_WR, (scratch.length - lineage_WR.shape[1], 0), value=True)
    out = F.scaled_dot_product_attention(
        q_WHE.transpose(0, 1)[None], keys[None], values[None], mask, enable_gqa=True
    )
    return out[0].transpose(0, 1)


def attend_blocks(
    q_AHE: torch.Tensor,
    block_keys_ASGE: torch.Tensor,
    block_values_ASGE: torch.Tensor,
    context: tuple[torch.Tensor, torch.Tensor],
    num_seen_A: torch.Tensor,
) -> torch.Tensor:
    """Returns what one step's rows of one document's blocks attend to, (A, H, E).

    One softmax over two score matrices: the first `num_seen_A` rows of the context, and the own block up to this step.
    """
    keys_TGE, values_TGE = context
    num_anchors, heads, dim = q_AHE.shape
    length, groups = keys_TGE.shape[:2]
    q = q_AHE.view(num_anchors, groups, heads // groups, dim) * dim**-0.5
    unseen_AT = torch.arange(length, device=q.device) >= num_seen_A[:, None]
    on_context = torch.einsum("aghe,tge->aght", q, keys_TGE)
    on_context = on_context.masked_fill(unseen_AT[:, None, None], float("-inf"))
    on_block = torch.einsum("aghe,asge->aghs", q, block_keys_ASGE)
    weights = torch.cat([on_context, on_block], dim=-1).softmax(dim=-1)
    from_context, from_block = weights.split([length, on_block.shape[-1]], dim=-1)
    attended = torch.einsum("aght,tge->aghe", from_context, values_TGE)
    attended = attended + torch.einsum("aghs,asge->aghe", from_block, block_values_ASGE)
    return attended.reshape(num_anchors, heads, dim)
