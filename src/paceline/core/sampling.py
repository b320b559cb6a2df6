"""Logits → token: the only place that knows temperature and seeds.

The token at a position is a function of the target's logits there, the request's parameters, its seed and the
absolute position, and of nothing else. So it does not matter how the logits were reached: by plain decoding, by any
drafter, in any batch. Temperature 0 is the one-hot case.

The draw: one uniform number keyed by (seed, position) through BLAKE2b, and the inverse CDF over the vocabulary in
float64.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from paceline.core.types import SamplingParams


def keyed_uniform(seed: int, position: int) -> float:
    """Returns a number in [0, 1) that depends on (seed, position) alone. Pure."""
    digest = hashlib.blake2b(f"{seed}:{position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def choose_tokens(
    logits_RV: torch.Tensor, params: SamplingParams, seed: int, positions: Sequence[int]
) -> torch.Tensor:
    """Returns the token that the request's law says at each row, on the logits' device.

    Args:
        logits_RV: raw target logits of R rows.
        params: the request's sampling parameters.
        seed: the request's key.
        positions: absolute position of the token that each row predicts, length R.

    Returns:
        (R,) int64.

    Pure.
    """
    if params.temperature == 0.0:
        return logits_RV.argmax(dim=-1)
    below = logits_RV.double() - logits_RV.amax(
        dim=-1, keepdim=True
    )  # at a tiny temperature only 0 stays finite
    cdf = (below / params.temperature).softmax(dim=-1).cumsum(dim=-1)
    draws = torch.tensor(
        [keyed_uniform(seed, p) for p in positions], dtype=torch.float64, device=logits_RV.device
    )
    tokens = torch.searchsorted(cdf, draws[:, None] * cdf[:, -1:], right=True)[:, 0]
    return tokens.clamp_(max=logits_RV.shape[-1] - 1)
