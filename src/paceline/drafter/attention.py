"""What blocks attend to: one block behind its context, or all blocks of a document at once.

Shape suffixes: A anchors, S slots, T context tokens, H heads, G kv heads, E head dim.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from paceline.core.block import LayerRule, attends


def attend_one(
    q_HSE: torch.Tensor,
    k_GSE: torch.Tensor,
    v_GSE: torch.Tensor,
    context: tuple[torch.Tensor, torch.Tensor, int],
    positions_S: torch.Tensor,
    rule: LayerRule,
) -> torch.Tensor:
    """Returns what one sequence's block attends to, (S, H, E)."""
    context_keys, context_values, first = context
    keys, values = torch.cat([context_keys, k_GSE], dim=1), torch.cat([context_values, v_GSE], dim=1)
    mask = None
    if rule.causal or rule.window is not None:
        query, anchor = positions_S[:, None], positions_S[0]
        behind = torch.arange(first, first + context_keys.shape[1], device=q_HSE.device)
        mask = torch.cat(
            [
                attends(query, behind[None], anchor, rule, in_block=False),
                attends(query, positions_S[None], anchor, rule, in_block=True),
            ],
            dim=1,
        )
    out = F.scaled_dot_product_attention(q_HSE[None], keys[None], values[None], mask, enable_gqa=True)
    return out[0].transpose(0, 1)


def attend_blocks(
    rule: LayerRule,
    q_ASHE: torch.Tensor,
    k_ASGE: torch.Tensor,
    v_ASGE: torch.Tensor,
    context_keys_TGE: torch.Tensor,
    context_values_TGE: torch.Tensor,
    positions_AS: torch.Tensor,
) -> torch.Tensor:
    """Returns what the blocks of one document attend to, (A, S, H · E).

    One softmax over two score matrices, context and own block, so no block pays for the keys of another.
    """
    num_anchors, slots, heads, dim = q_ASHE.shape
    groups, length = k_ASGE.shape[2], context_keys_TGE.shape[0]
    query, anchor = positions_AS[:, :, None], positions_AS[:, :1, None]
    behind = torch.arange(length, device=q_ASHE.device)
    sees_context = attends(query, behind, anchor, rule, in_block=False)
    sees_block = attends(query, positions_AS[:, None, :], anchor, rule, in_block=True)
    bias = torch.zeros(num_anchors, slots, length + slots, dtype=q_ASHE.dtype, device=q_ASHE.device)
    bias.masked_fill_(~torch.cat([sees_context, sees_block], dim=-1), float("-inf"))

    q = q_ASHE.view(num_anchors, slots, groups, heads // groups, dim) * dim**-0.5
    q_context = q.permute(2, 0, 3, 1, 4).reshape(groups, -1, dim)
    q_block = q.permute(0, 2, 3, 1, 4).reshape(num_anchors, groups, -1, dim)
    on_context = torch.bmm(q_context, context_keys_TGE.permute(1, 2, 0))
    on_block = q_block @ k_ASGE.permute(0, 2, 3, 1)
    shape = (groups, num_anchors, heads // groups, slots)
    scores = torch.cat(
        [on_context.view(*shape, length), on_block.transpose(0, 1).view(*shape, slots)], dim=-1
    )
    weights = (scores + bias[:, None]).softmax(dim=-1)
    from_context, from_block = weights.split([length, slots], dim=-1)
    attended = torch.bmm(from_context.reshape(groups, -1, length), context_values_TGE.transpose(0, 1)).view(
        *shape, dim
    )
    block_values = v_ASGE.transpose(1, 2)
    from_block = from_block.transpose(0, 1).reshape(num_anchors, groups, -1, slots) @ block_values
    attended = attended + from_block.view(num_anchors, groups, *shape[2:], dim).transpose(0, 1)
    out: torch.Tensor = attended.permute(1, 3, 0, 2, 4).reshape(num_anchors, slots, heads * dim)
    return out
