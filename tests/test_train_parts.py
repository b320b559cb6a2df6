"""The arithmetic of training: losses and their gradients, position weights, Muon, the schedule."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.drafter.config import Eagle3Config
from paceline.drafter.dflash2 import DFlash2
from paceline.drafter.eagle3 import Eagle3
from paceline.train.losses import (
    IGNORED,
    SoftLabels,
    Weigh,
    block_loss,
    candidates_with,
    dpace_weights,
    exponential_weights,
    position_weights,
    selector_scores,
    uniform_weights,
    with_selector,
)
from paceline.train.optimizer import Muon, orthogonalise, schedule, split_parameters
from tiny_trainer import make_config, make_drafter

# Losses --------------------------------------------------------------------------------------------------------------

WEIGHS = {
    "exponential": exponential_weights(4.0),
    "dpace": dpace_weights(0.5),
    "dpace, alpha 0": dpace_weights(0.0),
    "uniform": uniform_weights,
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


@pytest.mark.parametrize("chunk_blocks", [2, 64])
def test_a_head_that_learns_has_its_gradient(chunk_blocks: int) -> None:
    hidden, head, labels = loss_case(4)
    head.requires_grad_()
    expected = torch.autograd.grad(reference_loss(hidden, head, labels, dpace_weights(0.5)), [hidden, head])
    got = block_loss(hidden, head, labels, dpace_weights(0.5), chunk_blocks=chunk_blocks)
    for mine, reference in zip(torch.autograd.grad(got.loss, [hidden, head]), expected, strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-10, atol=1e-12)
    with torch.no_grad():
        assert not block_loss(hidden, head, labels, dpace_weights(0.5)).total.requires_grad
    (alone,) = torch.autograd.grad(block_loss(hidden.detach(), head, labels, uniform_weights).total, [head])
    assert alone.abs().sum() > 0, "also where no state needs one"


def test_the_likeliest_rows_are_returned() -> None:
    hidden, head, labels = loss_case(5)
    result = block_loss(hidden, head, labels, uniform_weights, chunk_blocks=2, top_k=4)
    assert result.top is not None
    assert torch.equal(result.top, (hidden @ head.T).topk(4, dim=-1).indices)
    everything = block_loss(hidden, head, labels, uniform_weights, top_k=99).top
    assert everything is not None
    assert everything.shape[-1] == 19, "there are no more rows than that"
    assert block_loss(hidden, head, labels, uniform_weights).top is None


def test_totals_and_weights_add_up_over_parts() -> None:
    hidden, head, labels = loss_case(6)
    whole = block_loss(hidden, head, labels, dpace_weights(0.5))
    parts = [
        block_loss(h, head, y, dpace_weights(0.5))
        for h, y in zip(hidden.split(3), labels.split(3), strict=True)
    ]
    torch.testing.assert_close(sum(p.total for p in parts), whole.total)
    torch.testing.assert_close(sum(p.weight for p in parts), whole.weight)
    assert sum(p.loss.item() for p in parts) / len(parts) != pytest.approx(whole.loss.item(), rel=1e-4)


# Soft labels ---------------------------------------------------------------------------------------------------------


def soft_case(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, SoftLabels, torch.Tensor]:
    """A loss case, the target's four likeliest tokens of which some are unknown, and what that means as (A, K, V)."""
    hidden, head, labels = loss_case(seed)
    rng = torch.Generator().manual_seed(seed + 1)
    said = torch.randn(*labels.shape, 30, generator=rng, dtype=torch.float64).log_softmax(dim=-1)
    top = said.topk(4, dim=-1)
    ids = torch.where(top.indices < 19, top.indices, IGNORED)  # the draft vocabulary has 19 of the 30 tokens
    ids[0] = IGNORED  # nothing known of the whole first block
    top.values[1, :, 3] = -torch.inf  # a token without any probability
    top.values[2] = -torch.inf  # and nothing but such
    meaning = torch.zeros(*labels.shape, 20, dtype=torch.float64)
    meaning.scatter_(-1, torch.where(ids == IGNORED, 19, ids), top.values.exp())
    meaning = meaning[..., :19]
    nothing = meaning.sum(-1) == 0
    meaning[nothing] = torch.nn.functional.one_hot(labels[nothing].clamp(min=0), 19).double()
    return hidden, head, labels, SoftLabels(ids.int(), top.values), meaning / meaning.sum(-1, keepdim=True)


@pytest.mark.parametrize("name", WEIGHS)
@pytest.mark.parametrize("chunk_blocks", [3, 64])
def test_soft_labels_are_cut_and_renormalised(name: str, chunk_blocks: int) -> None:
    hidden, head, labels, soft, meaning = soft_case(0)
    head.requires_grad_()
    log_probs = (hidden @ head.T).log_softmax(dim=-1)
    gold = log_probs.gather(2, labels.clamp(min=0)[..., None])[..., 0]
    weights = WEIGHS[name](
        gold.detach(), labels != IGNORED
    )  # of the hard label, which is what must be drafted
    expected = -(weights * (meaning * log_probs).sum(-1)).sum() / weights.sum()
    got = block_loss(hidden, head, labels, WEIGHS[name], chunk_blocks=chunk_blocks, soft=soft)
    torch.testing.assert_close(got.loss, expected, rtol=1e-12, atol=1e-12)
    references = torch.autograd.grad(expected, [hidden, head])
    for mine, reference in zip(torch.autograd.grad(got.loss, [hidden, head]), references, strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-10, atol=1e-12)
    hard = block_loss(hidden, head, labels, WEIGHS[name], chunk_blocks=chunk_blocks)
    assert torch.equal(got.correct, hard.correct), "a draft stands when it is the label"
    assert torch.equal(got.weights, hard.weights)


def test_soft_labels_of_one_token_are_hard_labels() -> None:
    hidden, head, labels = loss_case(7)
    soft = SoftLabels(labels[..., None], torch.full((*labels.shape, 1), -3.0).half())
    got, expected = (block_loss(hidden, head, labels, dpace_weights(0.5), soft=s).loss for s in (soft, None))
    torch.testing.assert_close(got, expected)


# The selector --------------------------------------------------------------------------------------------------------


class Bilinear:
    """A selector by hand: unary + ⟨A[a] ⊙ h, B[b]⟩ over 40 tokens."""

    def __init__(self) -> None:
        rng = torch.Generator().manual_seed(9)
        self.before, self.behind = torch.randn(2, 40, 12, generator=rng, dtype=torch.float64)
        self.before.requires_grad_()
        self.behind.requires_grad_()

    def rescore(
        self, states: torch.Tensor, candidates: torch.Tensor, unary: torch.Tensor, predecessors: torch.Tensor
    ) -> torch.Tensor:
        return unary + torch.einsum(
            "akr,akr,akcr->akc", self.before[predecessors], states, self.behind[candidates]
        )


def selector_case() -> tuple[Bilinear, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Selector, states, head, labels, the rows' token ids and the true tokens before each slot."""
    hidden, head, labels = loss_case(8)
    token_ids = torch.arange(19) * 2 + 1
    before = torch.randint(0, 40, labels.shape, generator=torch.Generator().manual_seed(10))
    return Bilinear(), hidden, head, labels, token_ids, before


@pytest.mark.parametrize("chunk_blocks", [2, 64])
def test_the_selectors_loss_is_cross_entropy_among_candidates(chunk_blocks: int) -> None:
    selector, hidden, head, labels, token_ids, before = selector_case()
    unary = hidden @ head.T
    top = unary.topk(6, dim=-1).indices
    supervised, gold = labels != IGNORED, labels.clamp(min=0)
    found = (top == gold[..., None]).any(-1)
    assert 0 < found[supervised].sum() < supervised.sum(), "both kinds occur"
    rows = top.clone()
    rows[..., -1] = torch.where(found | ~supervised, rows[..., -1], gold)
    scores = selector.rescore(hidden, token_ids[rows], unary.gather(-1, rows), before)
    place = (rows == gold[..., None]).int().argmax(-1)
    chosen = scores.log_softmax(-1).gather(-1, place[..., None])[..., 0]
    weights = dpace_weights(0.5)(
        unary.log_softmax(-1).gather(-1, gold[..., None])[..., 0].detach(), supervised
    )
    expected = (
        reference_loss(hidden, head, labels, dpace_weights(0.5))
        - 0.7 * (weights * chosen).sum() / weights.sum()
    )

    loss = block_loss(hidden, head, labels, dpace_weights(0.5), chunk_blocks=chunk_blocks, top_k=6)
    assert loss.top is not None
    candidates = candidates_with(loss.top, labels)
    assert torch.equal(candidates, rows)
    got_scores = selector_scores(selector, hidden, head, candidates, token_ids, before, chunk_blocks)
    got = with_selector(loss, got_scores, candidates, labels, 0.7)
    torch.testing.assert_close(got.loss, expected, rtol=1e-12, atol=1e-12)
    learning = [hidden, selector.before, selector.behind]
    references = torch.autograd.grad(expected, learning)
    for mine, reference in zip(torch.autograd.grad(got.loss, learning), references, strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-10, atol=1e-12)


def test_a_choice_is_right_only_where_drafting_could_make_it() -> None:
    _, hidden, head, labels, *_ = selector_case()
    loss = block_loss(hidden, head, labels, uniform_weights, top_k=3)
    assert loss.top is not None
    candidates = candidates_with(loss.top, labels)
    certain = (candidates == labels[..., None]).double() * 50  # the selector knows every label
    got = with_selector(loss, certain, candidates, labels, 1.0)
    assert torch.equal(got.correct, (loss.top == labels[..., None]).any(-1))
    assert 0 < got.correct.sum() < got.supervised.sum()
    blind = with_selector(loss, torch.zeros_like(certain), candidates, labels, 1.0)
    assert torch.equal(blind.correct, (loss.top[..., 0] == labels) & loss.supervised)


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


def test_weights_by_name() -> None:
    log_probs, supervised = torch.tensor([[-1.0, -2.0]]), torch.tensor([[True, True]])
    for name, expected in (
        ("dpace", dpace_weights(0.3)),
        ("exponential", exponential_weights(5.0)),
        ("uniform", uniform_weights),
    ):
        weigh = position_weights(name, alpha=0.3, decay=5.0)
        assert torch.equal(weigh(log_probs, supervised), expected(log_probs, supervised))
    assert uniform_weights(log_probs, torch.tensor([[True, False]])).tolist() == [[1.0, 0.0]]


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


def names_of(drafter: torch.nn.Module, parameters: Sequence[torch.nn.Parameter]) -> set[str]:
    known = {id(p): name for name, p in drafter.named_parameters()}
    return {known[id(p)] for p in parameters}


def test_muon_takes_what_maps_states_to_states() -> None:
    first = make_drafter()
    matrices, others = split_parameters(first)
    assert names_of(first, matrices) == {n for n, p in first.named_parameters() if p.ndim == 2}
    assert len(matrices) + len(others) == len(list(first.parameters()))

    second = DFlash2(make_config(variant="dflash2", conv_group_size=8, selector_rank=8, selector_top_k=5))
    matrices, others = split_parameters(second)
    rest = names_of(second, others)
    assert {"candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook"} <= rest
    assert {n for n in rest if "base_kernel" in n} == {
        n for n, _ in second.named_parameters() if "base_kernel" in n
    }
    assert "candidate_selector.hidden_projection.weight" in names_of(second, matrices)

    third = Eagle3(Eagle3Config(4, 32, 4, 2, 8, 48, 40, 30, (0, 2), 3))
    third.fc.weight.requires_grad_(False)
    matrices, others = split_parameters(third)
    assert "lm_head.weight" in names_of(third, others)
    assert "midlayer.mlp.up_proj.weight" in names_of(third, matrices)
    assert "fc.weight" not in names_of(third, [*matrices, *others]), "what is frozen stays so"


def test_the_schedule_by_hand() -> None:
    factors = [schedule(step, max_steps=10, warmup_steps=4, decay_steps=4) for step in range(12)]
    assert factors == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    assert [schedule(s, max_steps=3, warmup_steps=0, decay_steps=0) for s in range(4)] == [1.0, 1.0, 1.0, 0.0]
    crossing = [schedule(step, max_steps=6, warmup_steps=5, decay_steps=5) for step in range(6)]
    assert crossing == pytest.approx([0.2, 0.4, 0.6, 0.6, 0.4, 0.2])
