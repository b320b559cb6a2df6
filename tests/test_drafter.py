"""DFlash: training and decoding are one function, contexts are append-only, and nothing of the target is registered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.checkpoint import zlab
from paceline.core.block import LayerRule, attends, slot_positions
from paceline.core.errors import CapacityError, ConfigError
from paceline.drafter.base import Blocks
from paceline.drafter.config import (
    FULL,
    SLIDING,
    DrafterConfig,
    default_target_layer_ids,
    from_hidden_states_index,
    to_hidden_states_index,
)
from paceline.drafter.context import ContextKV
from paceline.drafter.dflash import DFlash
from paceline.target.native import NativeTarget
from paceline.testing import tiny_drafter, tiny_target

NUM_TOKENS, BLOCK = 23, 6
VARIANTS: dict[str, dict[str, Any]] = {
    "full": {},
    "full, causal": {"is_causal": True},
    "sliding 3": {"layer_types": (SLIDING, SLIDING), "sliding_window": 3},
    "sliding 5, not causal": {
        "layer_types": (SLIDING, SLIDING),
        "sliding_window": 5,
        "is_causal": False,
    },
    "sliding 4, then full": {"layer_types": (SLIDING, FULL), "sliding_window": 4},
    "sliding 1": {"layer_types": (SLIDING,), "sliding_window": 1},
    "sliding 1, not causal": {"layer_types": (SLIDING,), "sliding_window": 1, "is_causal": False},
    "sliding 2048": {"layer_types": (SLIDING, SLIDING), "sliding_window": 2048},
    "dflash 2": {"variant": "dflash2"},
    "dflash 2, sliding 3": {
        "variant": "dflash2",
        "layer_types": (SLIDING, SLIDING),
        "sliding_window": 3,
    },
}
CAUSAL = ["full, causal", "sliding 3", "sliding 1", "sliding 2048", "dflash 2, sliding 3"]


@pytest.fixture(scope="module")
def target() -> NativeTarget:
    return tiny_target(num_layers=5)


@pytest.fixture(scope="module")
def hidden(target: NativeTarget) -> torch.Tensor:
    """Tapped rows (T, 2 · D) of one document."""
    return torch.randn(
        NUM_TOKENS,
        2 * target.spec.hidden_size,
        generator=torch.Generator().manual_seed(1),
        dtype=torch.float64,
    )


TOKENS = [(5 * i + 3) % 60 for i in range(NUM_TOKENS + 1)]


def contexts_at(drafter: DFlash, hidden: torch.Tensor, lengths: Sequence[int]) -> list[ContextKV]:
    """Returns contexts of the first `lengths` rows, each with a little room behind."""
    contexts = [drafter.open(length + 3) for length in lengths]
    shown = [(context, hidden[:length]) for context, length in zip(contexts, lengths, strict=True) if length]
    if shown:
        drafter.inject([context for context, _ in shown], [rows for _, rows in shown])
    return contexts


def decoded(drafter: DFlash, hidden: torch.Tensor, anchor: int, num_drafts: int) -> torch.Tensor:
    """Returns logits (K, V) by the engine's way: inject everything before the anchor, then draft."""
    return drafter.draft_logits([TOKENS[anchor]], contexts_at(drafter, hidden, [anchor]), num_drafts)[0]


def blocks(target: NativeTarget, hidden: torch.Tensor, anchors: Sequence[int]) -> Blocks:
    last, ids = max(anchors), torch.tensor(TOKENS)
    positions = torch.tensor(anchors)[:, None] + torch.arange(BLOCK)
    return Blocks(hidden[:last], ids[:last], torch.tensor(anchors), ids[positions.clamp(max=NUM_TOKENS)])


def trained(
    drafter: DFlash, target: NativeTarget, documents: Sequence[Blocks], num_slots: int | None = None
) -> torch.Tensor:
    """Returns logits (A, K, V) by the trainer's way."""
    logits: torch.Tensor = target.heads.lm_head(
        drafter.forward_blocks(documents, target.heads.embed_weight, num_slots)
    )
    return logits


def assert_same(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)


# Training is decoding ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_training_is_decoding_at_every_anchor(
    variant: str, target: NativeTarget, hidden: torch.Tensor
) -> None:
    drafter = tiny_drafter(target, BLOCK, **VARIANTS[variant])
    anchors = list(range(NUM_TOKENS + 1))  # from the very first token to the one behind the last row
    logits = trained(drafter, target, [blocks(target, hidden, anchors)])
    assert logits.shape == (len(anchors), BLOCK - 1, target.spec.vocab_size)
    for anchor in anchors:
        assert_same(logits[anchor], decoded(drafter, hidden, anchor, BLOCK - 1))


@pytest.mark.parametrize("variant", CAUSAL)
@pytest.mark.parametrize("num_slots", [2, 3, 6])
def test_shorter_blocks_of_a_causal_drafter_are_the_same_function(
    variant: str, num_slots: int, target: NativeTarget, hidden: torch.Tensor
) -> None:
    drafter = tiny_drafter(target, BLOCK, **VARIANTS[variant])
    document = [blocks(target, hidden, [2, 7, 20])]
    long, short = trained(drafter, target, document), trained(drafter, target, document, num_slots)
    assert_same(short, long[:, : num_slots - 1])
    assert_same(decoded(drafter, hidden, 7, num_slots - 1), long[1, : num_slots - 1])


def test_shorter_blocks_of_a_bidirectional_drafter_are_another_function(
    target: NativeTarget, hidden: torch.Tensor
) -> None:
    drafter = tiny_drafter(target, BLOCK)
    document = [blocks(target, hidden, [7])]
    difference = trained(drafter, target, document, 3) - trained(drafter, target, document)[:, :2]
    assert difference.abs().max() > 1e-3


def test_documents_do_not_see_each_other(target: NativeTarget, hidden: torch.Tensor) -> None:
    drafter = tiny_drafter(target, BLOCK, layer_types=(SLIDING, FULL), sliding_window=4)
    first, second = blocks(target, hidden, [3, 9]), blocks(target, hidden.flip(0), [1, 4, 22])
    together = trained(drafter, target, [first, second])
    apart = torch.cat([trained(drafter, target, [first]), trained(drafter, target, [second])])
    assert_same(together, apart)


def test_blocks_see_nothing_behind_their_anchor(target: NativeTarget, hidden: torch.Tensor) -> None:
    drafter = tiny_drafter(target, BLOCK)
    changed = torch.cat([hidden[:9], -hidden[9:]])
    before = trained(drafter, target, [blocks(target, hidden, [9, 20])])
    after = trained(drafter, target, [blocks(target, changed, [9, 20])])
    assert_same(after[0], before[0])
    assert (after[1] - before[1]).abs().max() > 1e-3


def test_the_gradient_of_training_reaches_every_weight(target: NativeTarget, hidden: torch.Tensor) -> None:
    bound = tiny_drafter(target, BLOCK)
    drafter = DFlash(bound.config).double()
    drafter.load_state_dict(bound.state_dict())
    logits = trained(drafter, target, [blocks(target, hidden, [4, 9])])
    logits.square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in drafter.parameters())


# Contexts ------------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=30)
@given(pieces=st.lists(st.integers(1, 6), min_size=1, max_size=6), variant=st.sampled_from(sorted(VARIANTS)))
def test_injecting_in_pieces_is_injecting_at_once(pieces: list[int], variant: str) -> None:
    target = tiny_target(num_layers=3)
    drafter = tiny_drafter(target, BLOCK, **VARIANTS[variant])
    total = sum(pieces)
    rows = torch.randn(total, 64, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    at_once, in_pieces = drafter.open(total), drafter.open(total)
    drafter.inject([at_once], [rows])
    for piece in rows.split(pieces):
        drafter.inject([in_pieces], [piece])
    assert in_pieces.length == at_once.length == total
    for layer in range(drafter.config.num_layers):
        for got, expected in zip(in_pieces.view(layer, None)[:2], at_once.view(layer, None)[:2], strict=True):
            assert_same(got, expected)


def test_drafting_leaves_contexts_as_they_are(target: NativeTarget, hidden: torch.Tensor) -> None:
    drafter = tiny_drafter(target, BLOCK, layer_types=(SLIDING, FULL), sliding_window=4)
    contexts = contexts_at(drafter, hidden, [5, 12])
    before = [context._kv[:, :, :, : context.length].clone() for context in contexts]
    first = drafter.draft([1, 2], contexts, BLOCK - 1)
    assert [context.length for context in contexts] == [5, 12]
    assert all(torch.equal(c._kv[:, :, :, : c.length], kv) for c, kv in zip(contexts, before, strict=True))
    assert drafter.draft([1, 2], contexts, BLOCK - 1) == first


@pytest.mark.parametrize("variant", ["full", "sliding 3", "sliding 4, then full"])
def test_a_batch_is_its_parts(variant: str, target: NativeTarget, hidden: torch.Tensor) -> None:
    """Contexts of different lengths, an empty one included, drafted and extended together."""
    drafter = tiny_drafter(target, BLOCK, **VARIANTS[variant])
    lengths, anchors = [7, 0, 1, 19], [4, 9, 2, 33]
    contexts = contexts_at(drafter, hidden, lengths)
    together = drafter.draft_logits(anchors, contexts, BLOCK - 1)
    alone = [drafter.draft_logits([a], [c], BLOCK - 1)[0] for a, c in zip(anchors, contexts, strict=True)]
    assert_same(together, torch.stack(alone))
    proposals = drafter.draft(anchors, contexts, BLOCK - 1)
    assert [list(p.tokens) for p in proposals] == together.argmax(dim=-1).tolist()
    assert all(p.is_chain for p in proposals)
    drafter.inject(contexts, [hidden[n : n + k] for n, k in zip(lengths, (1, 3, 2, 1), strict=True)])
    longer = contexts_at(drafter, hidden, [8, 3, 3, 20])
    assert_same(
        drafter.draft_logits(anchors, contexts, BLOCK - 1), drafter.draft_logits(anchors, longer, BLOCK - 1)
    )


def test_a_context_is_full_at_its_capacity(target: NativeTarget, hidden: torch.Tensor) -> None:
    drafter = tiny_drafter(target, BLOCK)
    context = drafter.open(4)
    drafter.inject([context], [hidden[:4]])
    with pytest.raises(CapacityError, match="4 rows cannot take 1 after 4"):
        drafter.inject([context], [hidden[4:5]])
    assert context.length == 4


# A cut head ----------------------------------------------------------------------------------------------------------


def test_a_cut_head_drafts_the_likeliest_of_its_tokens(target: NativeTarget, hidden: torch.Tensor) -> None:
    drafter = tiny_drafter(target, BLOCK)
    contexts = contexts_at(drafter, hidden, [5, 12])
    whole = drafter.draft_logits([1, 2], contexts, BLOCK - 1)
    kept = torch.tensor([3, 8, 20, 21, 44])
    drafter.bind(target.heads, kept)
    assert_same(drafter.draft_logits([1, 2], contexts, BLOCK - 1), whole[..., kept])
    expected = kept[whole[..., kept].argmax(dim=-1)].tolist()
    assert [list(p.tokens) for p in drafter.draft([1, 2], contexts, BLOCK - 1)] == expected
    log_probs, tokens = drafter.candidates([1, 2], contexts, BLOCK - 1, 3)
    best = whole[..., kept].log_softmax(dim=-1).topk(3, dim=-1)
    assert_same(log_probs, best.values)
    assert torch.equal(tokens, kept[best.indices])
    drafter.bind(target.heads)
    assert_same(drafter.draft_logits([1, 2], contexts, BLOCK - 1), whole)


# What is registered --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_taps", [1, 3, 5])
def test_layers_and_taps_are_independent(num_taps: int, target: NativeTarget) -> None:
    for num_layers in (1, 2, 4):
        drafter = tiny_drafter(
            target, BLOCK, layer_types=(FULL,) * num_layers, target_layer_ids=tuple(range(num_taps))
        )
        context = drafter.open(4)
        drafter.inject([context], [torch.ones(3, num_taps * 32, dtype=torch.float64)])
        assert len(drafter.draft([1], [context], 3)[0].tokens) == 3


@pytest.mark.parametrize(("variant", "num_tensors"), [("dflash", 11 * 2 + 3), ("dflash2", 15 * 2 + 6)])
def test_the_state_dict_is_the_checkpoint(variant: str, num_tensors: int, target: NativeTarget) -> None:
    """The borrowed embedding and head appear nowhere, not even after use."""
    drafter = tiny_drafter(target, BLOCK, variant=variant)
    drafter.draft([1], [drafter.open(4)], 3)
    expected = zlab.manifest(drafter.config)
    assert {name: tuple(t.shape) for name, t in drafter.state_dict().items()} == expected
    assert len(expected) == num_tensors
    assert {name for name, _ in drafter.named_parameters()} == set(expected)
    assert not any("embed" in name or "lm_head" in name for name in expected)


# Geometry ------------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 12), st.integers(1, 6), st.booleans(), st.one_of(st.none(), st.integers(1, 14)))
def test_the_predicate_in_words(anchor: int, slots: int, causal: bool, window: int | None) -> None:
    rule = LayerRule(causal, window)
    (positions,) = slot_positions(torch.tensor([anchor]), slots)
    assert positions.tolist() == [anchor + slot for slot in range(slots)]
    keys = torch.arange(anchor + 3)
    in_block = attends(positions[:, None], positions[None], anchor, rule, in_block=True)
    in_context = attends(positions[:, None], keys[None], anchor, rule, in_block=False)
    for slot, query in enumerate(positions.tolist()):
        for other, key in enumerate(positions.tolist()):
            near = window is None or abs(query - key) < window
            assert in_block[slot, other] == (near and (key <= query or not causal))
        for key in keys.tolist():
            assert in_context[slot, key] == (key < anchor and (window is None or query - key < window))
    assert in_block.diagonal().all(), "a slot sees itself, or its softmax would be empty"


@pytest.mark.parametrize("window", [1, 2, 3, 30])
def test_a_view_holds_exactly_what_some_slot_may_see(
    window: int, target: NativeTarget, hidden: torch.Tensor
) -> None:
    drafter = tiny_drafter(target, BLOCK)
    (context,) = contexts_at(drafter, hidden, [10])
    keys, values, first = context.view(0, window)
    seen = attends(torch.tensor(10), torch.arange(10), 10, LayerRule(False, window), in_block=False)
    assert list(range(first, 10)) == seen.nonzero()[:, 0].tolist()
    assert keys.shape[1] == values.shape[1] == 10 - first


# Config --------------------------------------------------------------------------------------------------------------


def test_layer_rules(target: NativeTarget) -> None:
    config = tiny_drafter(target, 4, layer_types=(SLIDING, FULL), sliding_window=7).config
    assert config.layer_rules == (LayerRule(True, 7), LayerRule(False, None))
    assert replace(config, is_causal=False).layer_rules == (LayerRule(False, 7), LayerRule(False, None))
    assert replace(config, is_causal=True).layer_rules == (LayerRule(True, 7), LayerRule(True, None))
    assert config.num_draft_tokens == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_size": 1}, "block_size: expected at least 2"),
        ({"mask_token_id": 61}, r"mask_token_id: .* 0…60, got 61"),
        ({"mask_token_id": -1}, "mask_token_id"),
        ({"target_layer_ids": ()}, "target_layer_ids"),
        ({"target_layer_ids": (1, 0)}, "target_layer_ids: expected ascending"),
        ({"target_layer_ids": (0, 5)}, "target_layer_ids: expected ascending layers in 0…4"),
        ({"layer_types": (FULL,)}, "layer_types: expected 2"),
        ({"layer_types": (FULL, "chunked_attention")}, "layer_types"),
        ({"layer_types": (FULL, SLIDING)}, "sliding_window: sliding layers need a window"),
        ({"num_heads": 3}, "num_heads 3 is not a multiple of num_kv_heads 2"),
        ({"num_kv_heads": 0}, "num_kv_heads: expected at least 1"),
        ({"head_dim": 7}, "head_dim: expected an even number"),
        ({"hidden_size": 0}, "hidden_size: expected at least 1"),
        ({"variant": "eagle3"}, "variant: expected one of .'dflash', 'dflash2'., got 'eagle3'"),
        ({"variant": "dflash2", "conv_kernel_size": 0}, "conv_kernel_size: expected at least 1, got 0"),
        (
            {"variant": "dflash2", "conv_group_size": 0},
            "conv_group_size: expected a divisor of hidden_size 32",
        ),
        ({"variant": "dflash2", "conv_group_size": 12}, "conv_group_size: .* hidden_size 32, got 12"),
        ({"variant": "dflash2", "selector_rank": 0}, "selector_rank: expected at least 1, got 0"),
        ({"variant": "dflash2", "selector_top_k": 0}, "selector_top_k: expected 1…61, got 0"),
        ({"variant": "dflash2", "selector_top_k": 62}, "selector_top_k: expected 1…61, got 62"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(
    change: dict[str, Any], message: str, target: NativeTarget
) -> None:
    config: DrafterConfig = tiny_drafter(target, 4).config
    with pytest.raises(ConfigError, match=message):
        replace(config, **change)


def test_default_taps_are_the_papers() -> None:
    assert default_target_layer_ids(24, 5) == (1, 6, 11, 16, 21)
    assert default_target_layer_ids(36, 5) == (1, 9, 17, 25, 33)
    assert default_target_layer_ids(64, 5) == (1, 16, 31, 46, 61)
    assert default_target_layer_ids(30, 1) == (15,)


def test_the_two_conventions_differ_by_one() -> None:
    assert to_hidden_states_index(0) == 1
    assert [from_hidden_states_index(to_hidden_states_index(i)) for i in range(5)] == list(range(5))
