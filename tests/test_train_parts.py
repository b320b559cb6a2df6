"""The arithmetic of training: losses and their gradients, position weights, Muon, the schedule."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.train.batch import (
    IGNORED,
)
from paceline.train.losses import Weigh, block_loss, dpace_weights, exponential_weights
from paceline.train.optimizer import Muon, orthogonalise, schedule

# Losses --------------------------------------------------------------------------------------------------------------

WEIGHS = {
    "exponential": exponential_weights(4.0),
    "dpace": dpace_weights(0.5),
    "dpace, alpha 0": dpace_weights(0.0),
}


def loss_case(seed: int, blocks: int = 7, drafts: int = 5) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, head and labels, a quarter of them ignored."""
    rng = torch.Generator().manual_seed(seed)
    hidden = torch.randn(blocks, drafts, 12, generator=rng, dtype=torch.float64)
    head = torch.randn(19, 12, generator=rng, dtype=torch.float64)
    labels = torch.randint(0, 19, (blocks, drafts), generator=rng)
    labels[torch.rand(blocks, drafts, generator=rng) < 0.25] = IGNORED
    return hidden.requires_grad_(), head, labels


def reference_loss(
    hidden: torch.Tensor, head: torch.Tensor, labels: torch.Tensor, weigh: Weigh
) -> torch.Tensor:
    """The definition, by autograd: Σ(w · ce) / Σw with weights that carry no gradient."""
    log_probs = (hidden @ head.T).log_softmax(dim=-1).gather(2, labels.clamp(min=0)[..., None])[..., 0]
    weights = weigh(log_probs.detach(), labels != IGNORED)
    assert (weights[labels == IGNORED] == 0).all()
    return -(weights * log_probs).sum() / weights.sum()


@pytest.mark.parametrize("name", WEIGHS)
@pytest.mark.parametrize("chunk_blocks", [1, 3, 7, 64])
def test_the_loss_is_weighted_cross_entropy(name: str, chunk_blocks: int) -> None:
    hidden, head, labels = loss_case(0)
    expected = reference_loss(hidden, head, labels, WEIGHS[name])
    (gradient,) = torch.autograd.grad(expected, hidden)
    got = block_loss(hidden, head, labels, WEIGHS[name], chunk_blocks=chunk_blocks)
    torch.testing.assert_close(got.loss, expected, rtol=1e-12, atol=1e-12)
    (3.0 * got.loss).backward()
    torch.testing.assert_close(hidden.grad, 3.0 * gradient, rtol=1e-10, atol=1e-12)
    top = (hidden @ head.T).argmax(dim=-1)
    assert torch.equal(got.correct, (top == labels) & (labels != IGNORED))
    assert torch.equal(got.supervised, labels != IGNORED)


@settings(deadline=None, max_examples=15)
@given(st.integers(0, 10**6), st.integers(1, 9), st.integers(1, 6), st.integers(1, 9))
def test_chunks_change_nothing(seed: int, blocks: int, drafts: int, chunk: int) -> None:
    hidden, head, labels = loss_case(seed, blocks, drafts)
    whole = block_loss(hidden, head, labels, dpace_weights(0.3))
    (expected,) = torch.autograd.grad(whole.loss, hidden)
    parts = block_loss(hidden, head, labels, dpace_weights(0.3), chunk_blocks=chunk)
    (got,) = torch.autograd.grad(parts.loss, hidden)
    torch.testing.assert_close(parts.loss, whole.loss, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)
    assert torch.equal(parts.correct, whole.correct)


def test_ignored_labels_do_not_matter() -> None:
    hidden, head, labels = loss_case(1)
    before = block_loss(hidden, head, labels, exponential_weights(4.0))
    (gradient,) = torch.autograd.grad(before.loss, hidden)
    assert (gradient[labels == IGNORED] == 0).all()
    moved = hidden.detach().clone()
    moved[labels == IGNORED] += 5.0
    after = block_loss(moved, head, labels, exponential_weights(4.0))
    torch.testing.assert_close(after.loss, before.loss, rtol=1e-12, atol=1e-12)


def test_a_batch_without_labels_has_no_loss() -> None:
    hidden, head, labels = loss_case(2)
    result = block_loss(hidden, head, torch.full_like(labels, IGNORED), dpace_weights(0.5))
    result.loss.backward()
    assert result.loss.item() == 0.0
    assert hidden.grad is not None
    assert (hidden.grad == 0).all()
    assert not result.correct.any()


def test_low_precision_hidden_states_have_a_float32_loss() -> None:
    hidden, head, labels = loss_case(3)
    exact = reference_loss(hidden, head, labels, exponential_weights(4.0)).item()
    low = hidden.detach().bfloat16().requires_grad_()
    result = block_loss(low, head.bfloat16(), labels, exponential_weights(4.0))
    result.loss.backward()
    assert result.loss.dtype is torch.float32
    assert result.loss.item() == pytest.approx(exact, rel=0.05)
    assert low.grad is not None
    assert low.grad.dtype is torch.bfloat16


def test_exponential_weights_by_hand() -> None:
    supervised = torch.tensor([[True, True, True], [True, False, True]])
    weights = exponential_weights(2.0)(torch.zeros(2, 3, dtype=torch.float64), supervised)
    expected = [[1.0, math.exp(-0.5), math.exp(-1.0)], [1.0, 0.0, math.exp(-1.0)]]
    assert weights.tolist() == [pytest.approx(row) for row in expected]


def test_dpace_weights_by_hand() -> None:
    """q = .6 .4 .8 and α = .5 give s = .8 .7 .9, products c = .8 .56 .504, and weights that sum them from the right."""
    log_probs = torch.tensor([[0.6, 0.4, 0.8]], dtype=torch.float64).log()
    all_of_it = torch.ones(1, 3, dtype=torch.bool)
    (weights,) = dpace_weights(0.5)(log_probs, all_of_it).tolist()
    assert weights == pytest.approx([0.8 + 0.56 + 0.504, 0.56 + 0.504, 0.504])
    (weights,) = dpace_weights(1.0)(log_probs, all_of_it).tolist()
    assert weights == pytest.approx([3.0, 2.0, 1.0]), (
        "without the drafter's own probabilities only depth counts"
    )
    (weights,) = dpace_weights(0.5)(log_probs, torch.tensor([[True, False, True]])).tolist()
    assert weights == pytest.approx([0.8, 0.0, 0.0]), "no block is accepted beyond a slot that has no label"


# Optimizer -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(16, 16), (8, 40), (40, 8), (3, 8, 20)])
def test_orthogonalised_singular_values_are_near_one(shape: tuple[int, ...]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    result = orthogonalise(matrix)
    assert result.shape == matrix.shape
    assert result.dtype is torch.float64
    values = torch.linalg.svdvals(result)
    assert values.max() < 1.25
    assert values.min() > 0.5
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    inner = left.mT @ result @ right.mT
    torch.testing.assert_close(inner, torch.diag_embed(inner.diagonal(dim1=-2, dim2=-1)), rtol=0, atol=1e-9)
    torch.testing.assert_close(orthogonalise(1e-6 * matrix), result)


def test_orthogonalising_nothing_is_nothing() -> None:
    assert (orthogonalise(torch.zeros(4, 6)) == 0).all()


def muon_step(weight: torch.Tensor, gradients: Sequence[torch.Tensor], **kwargs: Any) -> torch.Tensor:
    parameter = torch.nn.Parameter(weight.clone())
    optimizer = Muon([parameter], lr=0.1, **kwargs)
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    return parameter.detach()


def test_muon_by_hand() -> None:
    rng = torch.Generator().manual_seed(5)
    weight, first, second = (torch.randn(6, 10, generator=rng, dtype=torch.float64) for _ in range(3))
    scale = 0.1 * 0.2 * math.sqrt(10)
    expected = weight - scale * orthogonalise(first)
    torch.testing.assert_close(muon_step(weight, [first]), expected)
    running = 0.95 * (0.05 * first) + 0.05 * second
    expected = expected - scale * orthogonalise(0.05 * second + 0.95 * running)
    torch.testing.assert_close(muon_step(weight, [first, second]), expected)


def test_muon_decays_weights_apart_from_the_gradient() -> None:
    rng = torch.Generator().manual_seed(6)
    weight, gradient = (torch.randn(6, 10, generator=rng, dtype=torch.float64) for _ in range(2))
    moved = muon_step(weight, [gradient]) - weight
    torch.testing.assert_close(
        muon_step(weight, [gradient], weight_decay=0.5), weight * (1 - 0.1 * 0.5) + moved
    )


def test_muon_updates_are_of_adams_size() -> None:
    rng = torch.Generator().manual_seed(7)
    for shape in ((64, 64), (64, 256), (256, 64)):
        weight, gradient = torch.zeros(shape), torch.randn(shape, generator=rng)
        size = muon_step(weight, [gradient]).square().mean().sqrt().item()
        assert 0.7 * 0.02 < size < 1.2 * 0.02, "an AdamW update is about 0.2 · lr"


def test_muon_bands_are_matrices_of_their_own() -> None:
    rng = torch.Generator().manual_seed(8)
    weight, gradient = (torch.randn(12, 10, generator=rng, dtype=torch.float64) for _ in range(2))
    banded = muon_step(weight, [gradient], block_rows=4)
    apart = [muon_step(w, [g]) for w, g in zip(weight.split(4), gradient.split(4), strict=True)]
    torch.testing.assert_close(banded, torch.cat(apart))
    whole = muon_step(weight, [gradient])
    assert (whole - banded).abs().max() > 1e-3
    for undivided in (None, 12, 99, 5):  # 5 does not divide 12 rows
        torch.testing.assert_close(muon_step(weight, [gradient], block_rows=undivided), whole)


def test_muon_leaves_weights_without_a_gradient() -> None:
    still, moved = (torch.nn.Parameter(torch.ones(3, 3)) for _ in range(2))
    optimizer = Muon([still, moved], lr=0.1)
    moved.grad = torch.eye(3)
    optimizer.step()
    assert torch.equal(still.detach(), torch.ones(3, 3))
    assert not torch.equal(moved.detach(), torch.ones(3, 3))


def test_the_schedule_by_hand() -> None:
    factors = [schedule(step, max_steps=10, warmup_steps=4, decay_steps=4) for step in range(12)]
    assert factors == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    assert [schedule(s, max_steps=3, warmup_steps=0, decay_steps=0) for s in range(4)] == [1.0, 1.0, 1.0, 0.0]
    crossing = [schedule(step, max_steps=6, warmup_steps=5, decay_steps=5) for step in range(6)]
    assert crossing == pytest.approx([0.2, 0.4, 0.6, 0.6, 0.4, 0.2])
