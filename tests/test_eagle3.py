"""EAGLE-3: training, decoding and the published unroll are one function; trees and chains change no text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3_blocks import (
    BLOCK,
    NUM_TOKENS,
    TOKENS,
    assert_same,
    contexts_at,
    feature_rows,
    forced,
    rows_of,
    unfrozen,
)
from paceline.core.errors import CapacityError, ConfigError, IncompatiblePairError
from paceline.drafter.base import Blocks
from paceline.drafter.config import Eagle3Config
from paceline.drafter.eagle3 import Eagle3
from paceline.target.native import NativeTarget
from paceline.testing import tiny_eagle3, tiny_target


@pytest.fixture(scope="module")
def target() -> NativeTarget:
    return tiny_target(num_layers=4)


@pytest.fixture(scope="module")
def hidden() -> torch.Tensor:
    return feature_rows()


@pytest.fixture(scope="module")
def drafter(target: NativeTarget) -> Eagle3:
    return tiny_eagle3(target, BLOCK, draft_vocab_size=23)


def blocks(hidden: torch.Tensor, anchors: Sequence[int]) -> Blocks:
    last, ids = max(anchors), torch.tensor(TOKENS)
    slots = torch.tensor(anchors)[:, None] + torch.arange(BLOCK)
    return Blocks(hidden[:last], ids[:last], torch.tensor(anchors), ids[slots])


def trained(
    drafter: Eagle3, target: NativeTarget, documents: Sequence[Blocks], num_slots: int | None = None
) -> torch.Tensor:
    """Returns logits (A, K, V) by the trainer's way."""
    states = drafter.forward_blocks(documents, target.heads.embed_weight, num_slots)
    return states @ drafter.head(target.heads.head_weight, drafter.token_ids).T


# One function, by three ways -----------------------------------------------------------------------------------------


def rotated(x_THE: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotary embedding as a product of complex numbers."""
    half = x_THE.shape[-1] // 2
    angles = positions.double()[:, None] * theta ** (-torch.arange(half, dtype=torch.float64) / half)
    turned = torch.complex(x_THE[..., :half], x_THE[..., half:]) * torch.polar(
        torch.ones_like(angles), angles
    ).unsqueeze(1)
    return torch.cat([turned.real, turned.imag], dim=-1)


def published(drafter: Eagle3, embed: torch.Tensor, hidden: torch.Tensor, num_steps: int) -> torch.Tensor:
    """Training-time test over the whole sequence, logits (steps, T, V): no blocks, anchors or contexts.

    Row t of step i has the embedding of token t + 1 + i and the output of step i − 1 at row t; it sees the rows up to t
    of step 0, and of each later step row t alone. Source: EAGLE-3 (arXiv 2503.01840) §3.2.
    """
    config, weights = drafter.config, dict(drafter.state_dict())
    length, group = len(hidden), config.num_heads // config.num_kv_heads

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        scale = (x.square().mean(-1, keepdim=True) + config.rms_norm_eps).rsqrt()
        normed: torch.Tensor = x * scale * weights[f"{name}.weight"]
        return normed

    ids, rows = torch.tensor(TOKENS), torch.arange(length)
    states, keys, values, said = hidden @ weights["fc.weight"].T, [], [], []
    for step in range(num_steps):
        both = torch.cat(
            [
                norm(embed[ids[rows + 1 + step]], "midlayer.input_layernorm"),
                norm(states, "midlayer.hidden_norm"),
            ],
            dim=-1,
        )
        q, k, v = (
            (both @ weights[f"midlayer.self_attn.{n}_proj.weight"].T).view(length, -1, config.head_dim)
            for n in "qkv"
        )
        q, k = rotated(q, rows + step, config.rope_theta), rotated(k, rows + step, config.rope_theta)
        keys.append(k.repeat_interleave(group, 1))
        values.append(v.repeat_interleave(group, 1))
        sees = [torch.ones(length, length).tril()] + [torch.eye(length)] * step
        scores = torch.einsum("qhe,khe->hqk", q, torch.cat(keys)) * config.head_dim**-0.5
        scores = scores.masked_fill(torch.cat(sees, dim=1) == 0, -torch.inf)
        attended = torch.einsum("hqk,khe->qhe", scores.softmax(-1), torch.cat(values)).reshape(length, -1)
        x = states + attended @ weights["midlayer.self_attn.o_proj.weight"].T
        normed = norm(x, "midlayer.post_attention_layernorm")
        gate, up = (normed @ weights[f"midlayer.mlp.{n}_proj.weight"].T for n in ("gate", "up"))
        states = x + (F.silu(gate) * up) @ weights["midlayer.mlp.down_proj.weight"].T
        said.append(norm(states, "norm") @ weights["lm_head.weight"].T)
    return torch.stack(said)


def test_training_is_the_published_unroll(
    target: NativeTarget, hidden: torch.Tensor, drafter: Eagle3
) -> None:
    anchors = list(range(1, NUM_TOKENS + 1))
    logits = trained(drafter, target, [blocks(hidden, anchors)])
    expected = published(drafter, target.heads.embed_weight, hidden, BLOCK - 1)
    assert logits.shape == (NUM_TOKENS, BLOCK - 1, 23)
    assert_same(logits, expected.transpose(0, 1))


def test_training_is_decoding_at_every_anchor(
    target: NativeTarget, hidden: torch.Tensor, drafter: Eagle3
) -> None:
    anchors = list(range(1, NUM_TOKENS + 1))
    logits = trained(drafter, target, [blocks(hidden, anchors)])
    for row, context in zip(logits, contexts_at(drafter, hidden, anchors), strict=True):
        path = TOKENS[context.length : context.length + BLOCK - 1]
        assert_same(row, forced(drafter, context, path))


def test_a_chain_is_the_likeliest_token_step_by_step(
    target: NativeTarget, hidden: torch.Tensor, drafter: Eagle3
) -> None:
    """The drafts are those of training fed with the drafts."""
    lengths = [1, 6, 14]
    drafts = drafter.draft([TOKENS[n] for n in lengths], contexts_at(drafter, hidden, lengths), BLOCK - 1)
    for length, proposal in zip(lengths, drafts, strict=True):
        ids = torch.tensor([[TOKENS[length], *proposal.tokens]])
        document = replace(blocks(hidden, [length]), block_ids=ids)
        log_probs, best = trained(drafter, target, [document])[0].log_softmax(-1).max(-1)
        assert proposal.is_chain and list(proposal.tokens) == drafter.token_ids[best].tolist()
        assert proposal.chances == pytest.approx(log_probs.cumsum(-1).exp().tolist())


@pytest.mark.parametrize("num_slots", [2, 3, 4])
def test_shorter_blocks_are_the_same_function(
    num_slots: int, target: NativeTarget, hidden: torch.Tensor, drafter: Eagle3
) -> None:
    document = [blocks(hidden, [2, 7, 18])]
    assert drafter.is_causal
    whole = trained(drafter, target, document)
    assert_same(trained(drafter, target, document, num_slots), whole[:, : num_slots - 1])
    contexts = contexts_at(drafter, hidden, [7])
    long, short = (drafter.draft([5], contexts, k)[0].tokens for k in (BLOCK - 1, num_slots - 1))
    assert long[: num_slots - 1] == short


def test_documents_do_not_see_each_other(target: NativeTarget, hidden: torch.Tensor, drafter: Eagle3) -> None:
    first, second = blocks(hidden, [3, 9]), blocks(hidden.flip(0), [1, 4, 18])
    apart = torch.cat([trained(drafter, target, [first]), trained(drafter, target, [second])])
    assert_same(trained(drafter, target, [first, second]), apart)


def test_blocks_see_nothing_behind_their_anchor(
    target: NativeTarget, hidden: torch.Tensor, drafter: Eagle3
) -> None:
    before = trained(drafter, target, [blocks(hidden, [9, 18])])
    after = trained(drafter, target, [blocks(torch.cat([hidden[:9], -hidden[9:]]), [9, 18])])
    assert_same(after[0], before[0])
    assert (after[1] - before[1]).abs().max() > 1e-3


def test_the_gradient_of_training_reaches_every_weight(
    target: NativeTarget, hidden: torch.Tensor, drafter: Eagle3
) -> None:
    copy = unfrozen(drafter)
    trained(copy, target, [blocks(hidden, [4, 9])]).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in copy.parameters())


# Contexts ------------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=30)
@given(pieces=st.lists(st.integers(1, 6), min_size=1, max_size=6))
def test_injecting_in_pieces_is_injecting_at_once(pieces: list[int]) -> None:
    drafter = tiny_eagle3(tiny_target(), BLOCK)
    total = sum(pieces)
    rows = torch.randn(total, 64, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    ids = [(5 * i) % 61 for i in range(total)]
    at_once, in_pieces = drafter.open(total), drafter.open(total)
    drafter.inject([at_once], [rows], [ids])
    done = 0
    for piece in rows.split(pieces):
        drafter.inject([in_pieces], [piece], [ids[done : done + len(piece)]])
        done += len(piece)
        assert in_pieces.length == done
    assert at_once.rows.length == total - 1
    for got, expected in zip(rows_of(in_pieces), rows_of(at_once), strict=True):
        assert_same(got, expected)


def test_the_first_injected_token_is_what_the_newest_feature_waited_for(
    hidden: torch.Tensor, drafter: Eagle3
) -> None:
    contexts = contexts_at(drafter, hidden, [5, 5])
    drafter.inject(contexts, [hidden[5:6]] * 2, [[8], [9]])
    first, second = (rows_of(context)[0] for context in contexts)
    assert torch.equal(first[:, :4], second[:, :4])
    assert (first[:, 4] - second[:, 4]).abs().max() > 1e-3


def test_drafting_leaves_contexts_as_they_are(hidden: torch.Tensor, drafter: Eagle3) -> None:
    contexts = contexts_at(drafter, hidden, [5, 12])
    before = [[t.clone() for t in rows_of(context)] for context in contexts]
    chains, trees = drafter.draft([1, 2], contexts, 4), drafter.draft_trees([1, 2], contexts, 9)
    assert [context.length for context in contexts] == [5, 12]
    for context, kept in zip(contexts, before, strict=True):
        assert all(torch.equal(now, then) for now, then in zip(rows_of(context), kept, strict=True))
    assert (drafter.draft([1, 2], contexts, 4), drafter.draft_trees([1, 2], contexts, 9)) == (chains, trees)


def test_a_batch_is_its_parts(hidden: torch.Tensor, drafter: Eagle3) -> None:
    lengths, anchors = [7, 1, 2, 18], [4, 9, 2, 33]
    contexts = contexts_at(drafter, hidden, lengths)
    for draft in (drafter.draft, drafter.draft_trees):
        alone = [draft([a], [c], 4)[0] for a, c in zip(anchors, contexts, strict=True)]
        assert draft(anchors, contexts, 4) == alone
    drafter.inject(
        contexts[:3], [hidden[n : n + 3] for n in lengths[:3]], [TOKENS[n : n + 3] for n in lengths[:3]]
    )
    for context, longer in zip(contexts, contexts_at(drafter, hidden, [10, 4, 5, 18]), strict=True):
        for got, expected in zip(rows_of(context), rows_of(longer), strict=True):
            assert_same(got, expected)


def test_a_context_is_full_at_its_capacity(hidden: torch.Tensor, drafter: Eagle3) -> None:
    context = drafter.open(4)
    drafter.inject([context], [hidden[:4]], [TOKENS[:4]])
    with pytest.raises(CapacityError):
        drafter.inject([context], [hidden[4:6]], [TOKENS[4:6]])


# The vocabulary ------------------------------------------------------------------------------------------------------


def fresh(target: NativeTarget, draft_vocab_size: int) -> Eagle3:
    return Eagle3(tiny_eagle3(target, BLOCK, draft_vocab_size=draft_vocab_size).config).double()


def test_a_fresh_drafter_takes_the_vocabulary_and_the_targets_rows(target: NativeTarget) -> None:
    drafter, ids = fresh(target, 4), torch.tensor([3, 8, 20, 44])
    drafter.start(target.heads.head_weight, ids)
    assert drafter.token_ids.tolist() == ids.tolist()
    assert drafter.d2t.tolist() == [3, 7, 18, 41], "offsets"
    assert drafter.t2d.nonzero()[:, 0].tolist() == ids.tolist()
    assert torch.equal(drafter.lm_head.weight, target.heads.head_weight[ids])
    assert drafter.head(target.heads.head_weight, ids) is drafter.lm_head.weight


def test_a_begun_drafter_keeps_its_head(target: NativeTarget) -> None:
    drafter = tiny_eagle3(target, BLOCK, draft_vocab_size=7)
    before = drafter.lm_head.weight.clone()
    drafter.start(target.heads.head_weight, drafter.token_ids.clone())
    assert torch.equal(drafter.lm_head.weight, before)
    with pytest.raises(ConfigError, match="expected the tokens that this drafter's head has learned"):
        drafter.start(target.heads.head_weight, torch.arange(7))
    with pytest.raises(ConfigError, match=r"expected 7 tokens, .* got 8"):
        drafter.start(target.heads.head_weight, torch.arange(8))


def test_a_whole_vocabulary_needs_no_map(target: NativeTarget) -> None:
    drafter = fresh(target, 61)
    drafter.start(target.heads.head_weight, torch.arange(61))
    assert torch.equal(drafter.lm_head.weight, target.heads.head_weight)
    assert drafter.token_ids.tolist() == list(range(61))
    assert not {"d2t", "t2d"} & set(drafter.state_dict())


def test_binding_may_leave_tokens_out(target: NativeTarget, hidden: torch.Tensor) -> None:
    drafter = tiny_eagle3(target, BLOCK, draft_vocab_size=23)
    context = contexts_at(drafter, hidden, [6])[0]
    whole, known = forced(drafter, context, [5, 5]), drafter.token_ids
    allowed = torch.tensor([0, 2, 3, 5, 10, 13])
    drafter.bind(target.heads, allowed)
    kept = torch.isin(known, allowed)
    assert 0 < kept.sum() < len(allowed), "some are known, others are not"
    assert_same(forced(drafter, context, [5, 5]), whole[:, kept])
    assert {t for p in drafter.draft_trees([5], [context], 9) for t in p.tokens} <= set(allowed.tolist())
    with pytest.raises(IncompatiblePairError, match="knows none of the 1 tokens"):
        drafter.bind(target.heads, torch.tensor([1]))


def test_another_target_is_refused(target: NativeTarget) -> None:
    with pytest.raises(IncompatiblePairError, match="an embedding of 61 × 32, the target's is 50 × 32"):
        tiny_eagle3(target).bind(tiny_target(vocab_size=50).heads)


def test_nothing_of_the_target_is_registered(target: NativeTarget, hidden: torch.Tensor) -> None:
    drafter = tiny_eagle3(target, BLOCK, draft_vocab_size=9)
    drafter.draft([1], contexts_at(drafter, hidden, [3]), 3)
    assert not any("embed" in name for name in drafter.state_dict())
    assert len(drafter.state_dict()) == 15


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_size": 1}, "block_size: expected at least 2"),
        ({"draft_vocab_size": 0}, "draft_vocab_size: expected 1…61"),
        ({"draft_vocab_size": 62}, "draft_vocab_size: expected 1…61 .*, got 62"),
        ({"target_layer_ids": ()}, "target_layer_ids"),
        ({"target_layer_ids": (1, 0)}, "target_layer_ids: expected ascending"),
        ({"target_layer_ids": (0, 4)}, "target_layer_ids: expected ascending layers in 0…3"),
        ({"num_heads": 3}, "num_heads 3 is not a multiple of num_kv_heads 2"),
        ({"num_kv_heads": 0}, "num_kv_heads: expected at least 1"),
        ({"head_dim": 7}, "head_dim: expected an even number"),
        ({"hidden_size": 0}, "hidden_size: expected at least 1"),
        ({"intermediate_size": 0}, "intermediate_size: expected at least 1"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(
    change: dict[str, Any], message: str, target: NativeTarget
) -> None:
    config: Eagle3Config = tiny_eagle3(target).config
    with pytest.raises(ConfigError, match=message):
        replace(config, **change)
