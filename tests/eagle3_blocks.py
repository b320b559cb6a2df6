"""Support of EAGLE-3's tests: one text, its features, and the steps behind any of its tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.drafter.eagle3 import Eagle3, Eagle3Context, Unroll

NUM_TOKENS, BLOCK = 19, 5
TOKENS = [(7 * i + 3) % 61 for i in range(NUM_TOKENS + BLOCK)]
"""The text, and what lies behind the last row of features."""


def feature_rows() -> torch.Tensor:
    """Returns tapped rows (T, 2 · D) of the text, as random ones."""
    return torch.randn(NUM_TOKENS, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def contexts_at(drafter: Eagle3, hidden: torch.Tensor, lengths: Sequence[int]) -> list[Eagle3Context]:
    """Returns contexts of the first `lengths` rows, each with a little room behind."""
    contexts = [drafter.open(length + 6) for length in lengths]
    drafter.inject(contexts, [hidden[:n] for n in lengths], [TOKENS[:n] for n in lengths])
    return contexts


def forced(drafter: Eagle3, context: Eagle3Context, path: Sequence[int]) -> torch.Tensor:
    """Returns logits (K, V) by the engine's way, with `path` in the place of what would be drafted."""
    unroll = Unroll(drafter, [context], len(path))
    parent = torch.zeros(1, 1, dtype=torch.long)
    return torch.cat([unroll.step(torch.tensor([[token]]), parent)[0] for token in path])


def assert_same(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)


def unfrozen(drafter: Eagle3) -> Eagle3:
    """Returns a copy that can learn."""
    copy = Eagle3(drafter.config).double()
    copy.load_state_dict(drafter.state_dict())
    return copy


def rows_of(context: Eagle3Context) -> list[torch.Tensor]:
    return [*context.rows.view(0, None)[:2], context.waiting]
