"""`ContextKV`: the injected keys and values of one sequence, append-only."""

from __future__ import annotations

import torch

from paceline.core.errors import CapacityError


class ContextKV:
    """Keys and values of the committed tokens for every drafter layer.

    Interval picture: rows [0, length) are committed and never change; rows [length, capacity) are free. Drafting reads
    a view and writes nothing, so there is nothing to crop.
    """

    def __init__(
        self, num_layers: int, num_kv_heads: int, head_dim: int, capacity: int, like: torch.Tensor
    ) -> None:
        self.length = 0
        self.capacity = capacity
        self._kv = like.new_empty(num_layers, 2, num_kv_heads, capacity, head_dim)

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Adds rows: keys and values (layers, rows, G, E), keys normed and rotated. Mutates: length and storage."""
        rows = keys.shape[1]
        if self.length + rows > self.capacity:
            raise CapacityError(f"context of {self.capacity} rows cannot take {rows} after {self.length}")
        self._kv[:, 0, :, self.length : self.length + rows] = keys.transpose(1, 2)
        self._kv[:, 1, :, self.length : self.length + rows] = values.transpose(1, 2)
        self.length += rows

    def fork(self, length: int, capacity: int) -> ContextKV:
        """Returns a context with room for `capacity` tokens that holds copies of the first `length` rows. Pure."""
        num_layers, _, num_kv_heads, _, head_dim = self._kv.shape
        forked = ContextKV(num_layers, num_kv_heads, head_dim, capacity, self._kv)
        forked._kv[:, :, :, :length] = self._kv[:, :, :, :length]
        forked.length = length
        return forked

    def view(self, layer: int, window: int | None) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Returns a layer's keys and values (G, rows, E) that a block may see, and the first row's position."""
        first = 0 if window is None else max(0, self.length - window + 1)
        keys, values = self._kv[layer, :, :, first : self.length]
        return keys, values, first
