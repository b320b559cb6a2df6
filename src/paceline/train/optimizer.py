"""Muon for matrices, Adam for the rest, in the weights' dtype; learning rates are pure functions of the step.

Muon replaces each matrix's momentum by its nearest semi-orthogonal matrix (Newton-Schulz) and scales it to Adam's
typical update size. `torch.optim.Muon` orthogonalises in bfloat16, which processors without bfloat16 products emulate
at a hundredth of their speed; this one computes in the gradient's dtype. With `block_rows`, wide matrices are
orthogonalised in bands of rows, which costs in proportion to the band and keeps the update's size.

Source: Keller Jordan et al., Muon (2024); update size matched to AdamW as in Moonlight (arXiv 2502.16982); bands as
in MuonBP (arXiv 2510.16981).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

from paceline.drafter.base import NeuralDrafter
from paceline.drafter.layers import Projection

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalise(matrix: torch.Tensor, num_steps: int = 5) -> torch.Tensor:
    """Returns nearly the closest semi-orthogonal matrix of each (…, n, m) matrix, in its dtype. Pure."""
    a, b, c = _COEFFICIENTS
    tall = matrix.shape[-2] > matrix.shape[-1]
    x: torch.Tensor = matrix.mT if tall else matrix
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=1e-20)
    for _ in range(num_steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Momentum orthogonalised by Newton-Schulz (Nesterov form), with decoupled weight decay.

    Args:
        params: matrices.
        lr: learning rate, of AdamW's scale.
        momentum: of the gradient's running mean.
        weight_decay: per unit of lr.
        block_rows: rows orthogonalised together; `None` takes whole matrices.
    """

    def __init__(
        self,
        params: Iterable[torch.nn.Parameter],
        lr: float,
        *,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        block_rows: int | None = None,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "block_rows": block_rows}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Updates every matrix that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, param.grad, group)

    def _update(self, param: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        if not state:
            state["momentum"] = torch.zeros_like(param)
        buffer = state["momentum"].lerp_(grad, 1 - group["momentum"])
        direction = grad.lerp(buffer, group["momentum"])
        bands = _bands(direction, group["block_rows"])
        update = orthogonalise(bands).reshape_as(param)
        scale = 0.2 * math.sqrt(max(bands.shape[-2:]))
        param.mul_(1 - group["lr"] * group["weight_decay"])
        param.add_(update, alpha=-group["lr"] * scale)


def _bands(matrix: torch.Tensor, block_rows: int | None) -> torch.Tensor:
    """Returns the matrix as (bands, rows, columns); one band where the rows do not divide."""
    rows = matrix.shape[0]
    if block_rows is None or rows <= block_rows or rows % block_rows:
        return matrix[None]
    return matrix.view(rows // block_rows, block_rows, -1)


def split_parameters(drafter: NeuralDrafter) -> tuple[list[torch.nn.Parameter], list[torch.nn.Parameter]]:
    """Returns the trained matrices for Muon, and the rest: norms, kernels, and what has a row for each token.

    A table of tokens is no map between spaces, and most of its rows have no gradient in most steps: orthogonalising it
    would move every row, seen or not. Pure.
    """
    config = drafter.config
    tables = {config.vocab_size, getattr(config, "draft_vocab_size", config.vocab_size)}
    weights = [m.weight for m in drafter.modules() if isinstance(m, Projection)]
    maps = {id(w) for w in weights if w.shape[0] not in tables}
    trained = [p for p in drafter.parameters() if p.requires_grad]
    return [p for p in trained if id(p) in maps], [p for p in trained if id(p) not in maps]


def schedule(step: int, *, max_steps: int, warmup_steps: int, decay_steps: int) -> float:
    """Returns the learning rate's factor: linear up, constant, linear down to zero over the last steps. Pure."""
    rising = (step + 1) / max(1, warmup_steps)
    falling = (max_steps - step) / max(1, decay_steps)
    return max(0.0, min(1.0, rising, falling))
