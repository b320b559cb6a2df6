"""How a transformers K/V cache returns to a shorter length, and which kinds cannot.

Only a layer that keeps every position in order can forget its newest ones. A ring that overwrites old positions has
lost them by the time a draft is rejected, and a recurrent state has no positions to forget.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from paceline.core.errors import UnsupportedTargetError

CROPPABLE = "DynamicLayer"
"""Class name of cache layers that keep every position; compared exactly, since subclasses change the layout."""

ATTENTION = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
"""Layer types whose K/V can be kept for every position."""


def check(cache: Any, layer_types: Sequence[str] = ()) -> None:
    """Checks that every layer of a transformers cache can roll back.

    Args:
        cache: the cache that sessions will use.
        layer_types: the config's own list, since early transformers 5 gave recurrent layers ordinary cache layers.

    Raises:
        UnsupportedTargetError: naming the classes or types that cannot.
    """
    others = {type(layer).__name__ for layer in cache.layers} - {CROPPABLE}
    others |= set(layer_types) - ATTENTION
    if others:
        raise UnsupportedTargetError(
            f"cache layers {', '.join(sorted(others))} cannot return to a shorter length once a draft "
            f"is rejected (only {CROPPABLE} can); hint: use a target whose layers are all attention with their own K/V"
        )


def rollback(cache: Any, length: int) -> None:
    """Forgets all K/V behind the first `length` positions. Mutates: `cache`."""
    for layer in cache.layers:
        if layer.get_seq_length() > length:
            layer.keys, layer.values = layer.keys[..., :length, :], layer.values[..., :length, :]


def copy_rows(cache: Any, other: Any, length: int) -> None:
    """Copies the first `length` positions to another cache, which is empty. Mutates: `other`."""
    for layer, copy in zip(cache.layers, other.layers, strict=True):
        copy.update(layer.keys[..., :length, :], layer.values[..., :length, :])


def keep_rows(cache: Any, length: int, rows: Sequence[int]) -> None:
    """Keeps the first `length` positions and, packed behind them, positions `length + row`. Mutates: `cache`."""
    if list(rows) == list(range(len(rows))):
        rollback(cache, length + len(rows))
        return
    for layer in cache.layers:
        kept = torch.tensor([*range(length), *(length + row for row in rows)], device=layer.keys.device)
        layer.keys, layer.values = layer.keys.index_select(-2, kept), layer.values.index_select(-2, kept)
