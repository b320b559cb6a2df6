"""How an EAGLE-3 drafter begins: as the target's own last layer on its last feature."""

from __future__ import annotations

import pytest
import torch

from paceline.checkpoint.store import new_drafter
from paceline.core.types import EMPTY_PROPOSAL
from paceline.drafter.eagle3 import Eagle3, Unroll
from paceline.target.base import VerifyRows
from paceline.target.native import NativeTarget
from paceline.testing import tiny_eagle3, tiny_shape, tiny_target, tiny_tensors
from paceline.train.initialise import initialise

LAYERS = 3


def begun(
    architecture: str, seed: int = 0
) -> tuple[NativeTarget, dict[str, torch.Tensor], Eagle3, list[str]]:
    target = tiny_target(num_layers=LAYERS, architecture=architecture)
    tensors = tiny_tensors(tiny_shape(num_layers=LAYERS, architecture=architecture))
    drafter = new_drafter(tiny_eagle3(target, draft_vocab_size=20, target_layer_ids=(0, 1)).config).double()
    assert isinstance(drafter, Eagle3)
    hidden = torch.randn(300, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return target, tensors, drafter, initialise(drafter, tensors, (LAYERS - 1,), hidden, seed)


def test_the_layer_is_the_targets_last() -> None:
    _, tensors, drafter, copied = begun("LlamaForCausalLM")
    last, weights = f"model.layers.{LAYERS - 1}", drafter.state_dict()
    for ours, theirs in {
        "midlayer.hidden_norm": f"{last}.input_layernorm",
        "midlayer.post_attention_layernorm": f"{last}.post_attention_layernorm",
        "midlayer.self_attn.o_proj": f"{last}.self_attn.o_proj",
        "midlayer.mlp.gate_proj": f"{last}.mlp.gate_proj",
        "midlayer.mlp.up_proj": f"{last}.mlp.up_proj",
        "midlayer.mlp.down_proj": f"{last}.mlp.down_proj",
        "norm": "model.norm",
    }.items():
        assert torch.equal(weights[f"{ours}.weight"], tensors[f"{theirs}.weight"]), ours
        assert f"{ours}.weight" in copied
    for part in "qkv":
        embedding, feature = weights[f"midlayer.self_attn.{part}_proj.weight"].chunk(2, dim=1)
        assert torch.equal(feature, tensors[f"{last}.self_attn.{part}_proj.weight"])
        assert 0 < embedding.square().sum(1).mean().sqrt() < 0.15
        assert f"midlayer.self_attn.{part}_proj.weight" in copied
    assert len(copied) == 10
    assert not weights["lm_head.weight"].any(), "the head is `start`'s"
    first, second = weights["fc.weight"].split(32, dim=1)
    assert first.abs().max() < 0.1
    assert (second - torch.eye(32)).abs().max() < 0.1


def test_noise_is_keyed() -> None:
    first, again, other = (begun("LlamaForCausalLM", seed)[2].state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["fc.weight"], other["fc.weight"])


def test_norms_of_queries_and_keys_go_into_their_projections() -> None:
    """A Qwen3 layer norms them; here they come out as large on average, by channel in the norm's proportions."""
    _, tensors, drafter, _ = begun("Qwen3ForCausalLM")
    rows = torch.randn(4000, 32, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    for part in "qk":
        weight = drafter.state_dict()[f"midlayer.self_attn.{part}_proj.weight"][:, 32:]
        heads = (drafter.midlayer.hidden_norm(rows).detach() @ weight.T).unflatten(-1, (-1, 8))
        expected = tensors[f"model.layers.{LAYERS - 1}.self_attn.{part}_norm.weight"]
        raw = tensors[f"model.layers.{LAYERS - 1}.self_attn.{part}_proj.weight"]
        ratio = (weight / raw).unflatten(0, (-1, 8))
        assert (ratio - ratio[:1, :, :1]).abs().max() < 1e-9, "one factor a channel"
        torch.testing.assert_close(ratio[0, :, 0] / expected, (ratio[0, :1, 0] / expected[:1]).expand(8))
        assert float((heads / expected).square().mean().sqrt()) == pytest.approx(1.0, abs=0.1)


def test_a_first_step_is_the_targets_own_layer_without_context() -> None:
    """On the feature of a lone token the drafter says what the target says, but for the small noise."""
    target, _, drafter, _ = begun("LlamaForCausalLM")
    drafter.fc.weight.data[:, :32] = 0
    drafter.fc.weight.data[:, 32:] = torch.eye(32)
    drafter.midlayer.self_attn.v_proj.weight.data[:, :32] = 0
    drafter.start(target.heads.head_weight, torch.arange(0, 40, 2))
    drafter.bind(target.heads)
    target.tap((0, LAYERS - 2))
    session = target.open(1)
    (output,) = target.verify([VerifyRows(session, [5], EMPTY_PROPOSAL)])
    session.close()
    context = drafter.open(1)
    drafter.inject([context], [output.hidden], [[5]])
    logits = Unroll(drafter, [context], 1).step(torch.tensor([[9]]), torch.zeros(1, 1, dtype=torch.long))
    torch.testing.assert_close(logits[0, 0], output.logits[0, drafter.token_ids], rtol=0, atol=1e-9)
