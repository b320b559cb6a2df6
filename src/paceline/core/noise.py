"""Keyed Gumbel noise: one number per token, a function of (seed, sample, position, token) and of nothing else.

A token is drawn by adding its noise to its log-weight and taking the maximum, which is a draw from the softmax. Whoever
knows the key knows the noise, before the logits are there; so a drafter can add it to its own logits, and guesses the
very token whenever its distribution is close to the target's.

Source: the Gumbel-max trick; as a coupling of two distributions it agrees with probability at least
(1 − d) / (1 + d), d their total variation distance (arXiv 2408.07978).
"""

from __future__ import annotations

import hashlib

import torch

_ROUNDS = ((16, -2048144789), (13, -1028477387))
"""Shifts and multipliers of MurmurHash3's 32-bit finaliser, the latter as signed integers."""


def gumbel_row(
    seed: int, sample_index: int, position: int, vocab_size: int, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Returns (V,) float32 noise. Pure.

    Every token's number is hashed with two keys of 32 bits, which BLAKE2b makes of (seed, sample, position). Of the
    hash 31 bits become a uniform number that is finest near 0, where the winners come from. A row is always made
    alone, never as part of a larger tensor, so that its bits do not depend on what else is drawn.
    """
    digest = hashlib.blake2b(f"{seed}:{sample_index}:{position}".encode(), digest_size=8).digest()
    x = torch.arange(vocab_size, dtype=torch.int32, device=device)
    for start in (0, 4):
        x.bitwise_xor_(int.from_bytes(digest[start : start + 4], "little", signed=True))
        _mix(x)
    uniform = x.bitwise_and_(0x7FFFFFFF).to(torch.float32).add_(0.5).mul_(2.0**-31)
    waiting = uniform.clamp_(max=1.0 - 2.0**-24).neg_().log1p_().neg_()  # exponential; the smallest wins
    return waiting.log_().neg_()


def _mix(x: torch.Tensor) -> None:
    """Scrambles int32 numbers, one to one. Mutates: x."""
    shifted = torch.empty_like(x)
    for shift, multiplier in _ROUNDS:
        _xor_shifted(x, shift, shifted)
        x.mul_(multiplier)
    _xor_shifted(x, 16, shifted)


def _xor_shifted(x: torch.Tensor, shift: int, out: torch.Tensor) -> None:
    torch.bitwise_right_shift(x, shift, out=out)
    x.bitwise_xor_(out.bitwise_and_((1 << (32 - shift)) - 1))  # the mask makes the shift a logical one
