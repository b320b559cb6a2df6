"""A new drafter's first weights: copies of the target's own layers, and a fusion that begins as one tap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F

from paceline.drafter.base import NeuralDrafter
from paceline.drafter.dflash import DFlash
from paceline.drafter.eagle3 import Eagle3

_NOISE = 0.1
"""Root mean square of what small noise makes of an input of root mean square one."""
_COPIED = (
    "input_layernorm",
    "post_attention_layernorm",
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "self_attn.q_norm",
    "self_attn.k_norm",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)


@torch.no_grad()
def initialise(
    drafter: NeuralDrafter,
    target: Mapping[str, torch.Tensor],
    layer_ids: Sequence[int],
    hidden: torch.Tensor,
    seed: int,
) -> list[str]:
    """Sets a drafter's weights from the target's and returns the names that were copied.

    `fc` starts as the identity on the last tap with small noise elsewhere, the final norm as the target's, the rest as
    `_initialise_dflash` and `_initialise_eagle3` say.

    Args:
        target: the target's tensors by transformers names; those of the named layers and the final norm suffice.
        layer_ids: target layers that the drafter's layers start as, where shapes agree.
        hidden: (rows, taps · D) tapped hidden states of some text, for scales.
        seed: of the noise.
    """
    fusion, rng = drafter.get_parameter("fc.weight"), torch.Generator().manual_seed(seed)
    _begin_fusion(fusion, rng)
    rows = hidden[:, -drafter.config.hidden_size :].to(fusion.dtype)
    if isinstance(drafter, Eagle3):
        copied = _initialise_eagle3(drafter, target, layer_ids[-1], rows, rng)
    else:
        assert isinstance(drafter, DFlash)
        copied = _initialise_dflash(drafter, target, layer_ids, rows)
    return copied + _copy(drafter, {"norm.weight": "model.norm.weight"}, target)


def _begin_fusion(weight: torch.Tensor, rng: torch.Generator) -> None:
    """Makes a fusion the identity on the last tap, small noise elsewhere. Mutates: it."""
    width, wide = weight.shape
    weight.copy_(_NOISE * torch.randn(width, wide, generator=rng) / wide**0.5)
    weight[:, -width:] += torch.eye(width)


def _initialise_dflash(
    drafter: DFlash, target: Mapping[str, torch.Tensor], layer_ids: Sequence[int], rows: torch.Tensor
) -> list[str]:
    """Copies layers; the context's norm starts as the mean of the copied layers' input norms. Mutates: the drafter.

    Query and key norms start at the scale that the copied projections give, so that attention begins as sharp as it
    was in the target.
    """
    copied: list[str] = []
    for i, source in enumerate(layer_ids):
        names = {f"layers.{i}.{part}.weight": f"model.layers.{source}.{part}.weight" for part in _COPIED}
        copied += _copy(drafter, names, target)
    layers = range(drafter.config.num_layers)
    norms: list[torch.Tensor] = [drafter.get_parameter(f"layers.{i}.input_layernorm.weight") for i in layers]
    drafter.hidden_norm.weight.copy_(torch.stack(norms).mean(dim=0))
    for i in layers:
        for part in ("q", "k"):
            if f"layers.{i}.self_attn.{part}_norm.weight" not in copied:
                _scale_norm(drafter, i, part, rows)
    return copied


def _initialise_eagle3(
    drafter: Eagle3,
    target: Mapping[str, torch.Tensor],
    source: int,
    rows: torch.Tensor,
    rng: torch.Generator,
) -> list[str]:
    """Copies a layer, so that a step is the target's own layer on the feature. Mutates: the drafter.

    Of q, k and v the columns of the feature are copied, those of the embedding are small noise. A norm on queries or
    keys, which this layer has not, goes into their projection at the scale that it has on average. The head is for
    `Eagle3.start`.
    """
    there, here = f"model.layers.{source}", "midlayer"
    parts = (
        "post_attention_layernorm",
        "self_attn.o_proj",
        *(f"mlp.{n}_proj" for n in ("gate", "up", "down")),
    )
    names = {f"{here}.{part}.weight": f"{there}.{part}.weight" for part in parts}
    names[f"{here}.hidden_norm.weight"] = f"{there}.input_layernorm.weight"
    copied, width = _copy(drafter, names, target), drafter.config.hidden_size
    normed = drafter.midlayer.hidden_norm(rows)
    for part in ("q", "k", "v"):
        name = f"{here}.self_attn.{part}_proj.weight"
        own = drafter.get_parameter(name)
        own[:, :width] = _NOISE * torch.randn(own.shape[0], width, generator=rng) / width**0.5
        projection = target.get(f"{there}.self_attn.{part}_proj.weight")
        if projection is None or projection.shape != own[:, width:].shape:
            continue
        own[:, width:] = projection
        copied.append(name)
        norm = target.get(f"{there}.self_attn.{part}_norm.weight")
        if norm is not None:
            heads = F.linear(normed, own[:, width:]).unflatten(-1, (-1, len(norm)))
            scale = norm.to(own.dtype) / heads.square().mean().sqrt()
            own[:, width:] *= scale.repeat(heads.shape[1])[:, None]
    return copied


def _copy(
    drafter: NeuralDrafter, sources: Mapping[str, str], target: Mapping[str, torch.Tensor]
) -> list[str]:
    """Copies the target's tensors that are there and of the right shape; returns the drafter's names of them."""
    copied = []
    for name, source in sources.items():
        tensor, own = target.get(source), drafter.get_parameter(name)
        if tensor is not None and tensor.shape == own.shape:
            own.copy_(tensor)
            copied.append(name)
    return copied


def _scale_norm(drafter: DFlash, index: int, part: str, rows: torch.Tensor) -> None:
    """Sets a query or key norm to the root mean square, by channel, of what its projection gives. Mutates: it."""
    norm = drafter.get_parameter(f"layers.{index}.input_layernorm.weight")
    projection = drafter.get_parameter(f"layers.{index}.self_attn.{part}_proj.weight")
    normed = F.rms_norm(rows, norm.shape, norm, drafter.config.rms_norm_eps)
    heads = F.linear(normed, projection).view(-1, drafter.config.head_dim)
    drafter.get_parameter(f"layers.{index}.self_attn.{part}_norm.weight").copy_(
        heads.square().mean(dim=0).sqrt()
    )
