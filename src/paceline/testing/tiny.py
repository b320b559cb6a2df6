"""Tiny random targets and drafters, small enough for laws to be tested by equality."""

from __future__ import annotations

import torch

from paceline.checkpoint.zlab import new_drafter
from paceline.drafter.base import NeuralDrafter
from paceline.drafter.config import FULL, DrafterConfig, Eagle3Config
from paceline.drafter.dflash import DFlash
from paceline.drafter.eagle3 import Eagle3
from paceline.target.base import Target
from paceline.target.native import NativeTarget
from paceline.target.weights import Shape

TINY_HEAD_DIM = 8
END_TOKEN = 2
"""End-of-text id of tiny targets."""


def tiny_shape(
    *,
    vocab_size: int = 61,
    num_layers: int = 2,
    hidden_size: int = 32,
    max_positions: int = 128,
    architecture: str = "LlamaForCausalLM",
) -> Shape:
    """Returns the sizes of a tiny decoder: heads of 8, half as many key-value heads, an untied head. Pure."""
    num_heads = hidden_size // TINY_HEAD_DIM
    return Shape(
        architecture=architecture,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads // 2,
        head_dim=TINY_HEAD_DIM,
        intermediate_size=hidden_size * 3 // 2,
        vocab_size=vocab_size,
        rms_norm_eps=1e-6,
        rope_theta=10_000.0,
        max_positions=max_positions,
        tie_word_embeddings=False,
        eos_token_ids=(END_TOKEN,),
    )


def tiny_tensors(shape: Shape, seed: int = 0) -> dict[str, torch.Tensor]:
    """Returns random float64 weights by transformers names, large enough that every part shows in the logits.

    A Qwen2 shape gets biases on q, k and v, a Qwen3 shape norms on q and k. Pure.
    """
    rng = torch.Generator().manual_seed(seed)

    def matrix(num_out: int, num_in: int, gain: float = 1.0) -> torch.Tensor:
        scale: float = gain * num_in**-0.5
        return torch.randn(num_out, num_in, generator=rng, dtype=torch.float64) * scale

    def around(centre: float, size: int) -> torch.Tensor:
        return centre + 0.2 * torch.randn(size, generator=rng, dtype=torch.float64)

    width, mlp = shape.hidden_size, shape.intermediate_size
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    tensors = {
        "model.embed_tokens.weight": matrix(shape.vocab_size, width, width**0.5),
        "model.norm.weight": around(1.0, width),
        "lm_head.weight": matrix(shape.vocab_size, width, 3.0),
    }
    for i in range(shape.num_layers):
        layer = f"model.layers.{i}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{layer}.{norm}.weight"] = around(1.0, width)
        for name, size in (("q", queries), ("k", keys), ("v", keys)):
            tensors[f"{layer}.self_attn.{name}_proj.weight"] = matrix(size, width)
            if shape.architecture == "Qwen2ForCausalLM":
                tensors[f"{layer}.self_attn.{name}_proj.bias"] = around(0.0, size)
            if shape.architecture == "Qwen3ForCausalLM" and name != "v":
                tensors[f"{layer}.self_attn.{name}_norm.weight"] = around(1.0, shape.head_dim)
        tensors[f"{layer}.self_attn.o_proj.weight"] = matrix(width, queries)
        for name in ("gate", "up"):
            tensors[f"{layer}.mlp.{name}_proj.weight"] = matrix(mlp, width)
        tensors[f"{layer}.mlp.down_proj.weight"] = matrix(width, mlp)
    return tensors


def tiny_target(
    seed: int = 0,
    *,
    vocab_size: int = 61,
    num_layers: int = 2,
    hidden_size: int = 32,
    max_positions: int = 128,
    architecture: str = "LlamaForCausalLM",
    dtype: torch.dtype = torch.float64,
) -> NativeTarget:
    """Returns a random target; in float64 no two logits are near-ties, so laws can be tested by equality."""
    shape = tiny_shape(
        vocab_size=vocab_size,
        num_layers=num_layers,
        hidden_size=hidden_size,
        max_positions=max_positions,
        architecture=architecture,
    )
    return NativeTarget(shape, tiny_tensors(shape, seed), name="tiny", dtype=dtype)


def tiny_drafter(
    target: Target,
    block_size: int = 4,
    *,
    layer_types: tuple[str, ...] = (FULL, FULL),
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    target_layer_ids: tuple[int, ...] = (0, 1),
    variant: str = "dflash",
    seed: int = 0,
) -> DFlash:
    """Returns a random DFlash drafter, of version 1 or 2, of the target's width and dtype, bound to its heads."""
    spec = target.spec
    config = DrafterConfig(
        block_size=block_size,
        hidden_size=spec.hidden_size,
        num_layers=len(layer_types),
        num_heads=spec.hidden_size // TINY_HEAD_DIM,
        num_kv_heads=spec.hidden_size // TINY_HEAD_DIM // 2,
        head_dim=TINY_HEAD_DIM,
        intermediate_size=spec.hidden_size * 3 // 2,
        vocab_size=spec.vocab_size,
        target_layer_ids=target_layer_ids,
        num_target_layers=spec.num_layers,
        mask_token_id=spec.vocab_size - 1,
        layer_types=layer_types,
        sliding_window=sliding_window,
        is_causal=is_causal,
        variant=variant,
        **({"conv_group_size": 8, "selector_rank": 8, "selector_top_k": 5} if variant == "dflash2" else {}),
    )
    drafter = new_drafter(config).to(target.device, target.dtype)
    rng = torch.Generator().manual_seed(seed)
    for name, parameter in drafter.named_parameters():
        noise = torch.randn(parameter.shape, generator=rng, dtype=torch.float64)
        if parameter.ndim == 1:
            noise = 1.0 + 0.2 * noise
        elif not name.endswith("codebook"):
            noise *= parameter.shape[1] ** -0.5
        parameter.data.copy_(noise)
    return drafter.bind(target.heads)


def tiny_eagle3(
    target: Target,
    block_size: int = 4,
    *,
    draft_vocab_size: int | None = None,
    target_layer_ids: tuple[int, ...] = (0, 1),
    seed: int = 0,
) -> Eagle3:
    """Returns a random EAGLE-3 drafter of the target's width and dtype, bound to its embedding.

    Args:
        draft_vocab_size: so many tokens, spread over the target's; `None` drafts all of them.
    """
    spec = target.spec
    config = Eagle3Config(
        block_size=block_size,
        hidden_size=spec.hidden_size,
        num_heads=spec.hidden_size // TINY_HEAD_DIM,
        num_kv_heads=spec.hidden_size // TINY_HEAD_DIM // 2,
        head_dim=TINY_HEAD_DIM,
        intermediate_size=spec.hidden_size * 3 // 2,
        vocab_size=spec.vocab_size,
        draft_vocab_size=draft_vocab_size or spec.vocab_size,
        target_layer_ids=target_layer_ids,
        num_target_layers=spec.num_layers,
    )
    drafter = Eagle3(config).to(target.device, target.dtype)
    spread = torch.arange(config.draft_vocab_size) * spec.vocab_size // config.draft_vocab_size
    drafter.start(target.heads.head_weight, spread)
    _randomise(drafter, seed)  # the head too, which is its own
    return drafter.bind(target.heads)


def _randomise(drafter: NeuralDrafter, seed: int) -> None:
    """Sets weights large enough that every part shows in the logits. Mutates: the drafter."""
    rng = torch.Generator().manual_seed(seed)
    for parameter in drafter.parameters():
        noise = torch.randn(parameter.shape, generator=rng, dtype=torch.float64)
        parameter.data.copy_(1.0 + 0.2 * noise if parameter.ndim == 1 else noise * parameter.shape[1] ** -0.5)
