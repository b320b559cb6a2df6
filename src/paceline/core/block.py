"""Geometry of a draft block, and the one attention predicate behind every mask.

A block of S slots sits at absolute positions anchor … anchor + S - 1. Slot 0 holds the anchor, a clean token without
target features; slots 1 … S - 1 hold masks and predict the token at their own position. Context is strictly before
the anchor, in training and in decoding alike.

Source: DFlash (arXiv 2602.06036) §3; window and causality per layer as in z-lab's `dflash` 0.1.0.

Shape suffixes: A anchors, S slots, T context tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class LayerRule:
    """What a drafter layer's slots may see.

    Args:
        causal: a slot sees only slots up to its own (sliding layers by default); otherwise the whole block.
        window: a query at position p sees keys nearer than `window` positions; `None` sees all.
    """

    causal: bool = False
    window: int | None = None


def attends(
    query: torch.Tensor, key: torch.Tensor, anchor: torch.Tensor | int, rule: LayerRule, *, in_block: bool
) -> torch.Tensor:
    """Returns where a query slot may look; broadcasts over absolute positions.

    Args:
        query: positions of block slots.
        key: positions of context tokens, or of slots of the same block when `in_block`.
        anchor: position of the block's anchor.
        rule: the layer's rule.
        in_block: whether `key` are slots of the block itself.

    Returns:
        Bool tensor, True where the query attends to the key.

    Pure.
    """
    if in_block:
        seen = key >= anchor
        if rule.causal:
            seen = seen & (key <= query)
    else:
        seen = key < anchor
    if rule.window is not None:
        seen = seen & (query - key < rule.window) & (key - query < rule.window)
    return seen.broadcast_to(torch.broadcast_shapes(query.shape, key.shape))


def slot_positions(anchors_A: torch.Tensor, num_slots: int) -> torch.Tensor:
    """Returns absolute positions (A, S) of the slots behind each anchor. Pure."""
    return anchors_A[:, None] + torch.arange(num_slots, device=anchors_A.device)
