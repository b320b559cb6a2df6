"""A new drafter's first weights: copies of the target's own layers, and a fusion that begins as one tap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F

from paceline.drafter.dflash import DFlash

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
    drafter: DFlash,
    target: Mapping[str, torch.Tensor],
    layer_ids: Sequence[int],
    hidden: torch.Tensor,
    seed: int,
) -> list[str]:
    """Sets a drafter's weights from the target's and returns the names that were copied.

    Layer i starts as target layer `layer_ids[i]` where shapes agree, the final norm as the target's, `fc` as the
    identity on the last tap with small noise elsewhere, the context's norm as the mean of the copied layers' input
    norms. Query and key norms start at the scale that the copied projections give, so that attention begins as sharp
    as it was in the target.

    Args:
        target: the target's tensors by transformers names; those of the named layers and the final norm suffice.
        hidden: (rows, taps · D) tapped hidden states of some text, for those scales.
    """
    copied = [name for i, source in enumerate(layer_ids) for name in _copy_layer(drafter, target, i, source)]
    norm = target.get("model.norm.weight")
    if norm is not None and norm.shape == drafter.norm.weight.shape:
        drafter.norm.weight.copy_(norm)
        copied.append("norm.weight")
    width = drafter.config.hidden_size
    noise = torch.randn(drafter.fc.weight.shape, generator=torch.Generator().manual_seed(seed))
    drafter.fc.weight.copy_(0.1 * noise / drafter.fc.weight.shape[1] ** 0.5)
    drafter.fc.weight[:, -width:] += torch.eye(width)
    layers = range(drafter.config.num_layers)
    norms: list[torch.Tensor] = [drafter.get_parameter(f"layers.{i}.input_layernorm.weight") for i in layers]
    drafter.hidden_norm.weight.copy_(torch.stack(norms).mean(dim=0))
    for i in range(drafter.config.num_layers):
        for part in ("q", "k"):
            if f"layers.{i}.self_attn.{part}_norm.weight" not in copied:
                _scale_norm(drafter, i, part, hidden[:, -width:].to(drafter.fc.weight.dtype))
    return copied


def _copy_layer(drafter: DFlash, target: Mapping[str, torch.Tensor], index: int, source: int) -> list[str]:
    copied = []
    for part in _COPIED:
        tensor = target.get(f"model.layers.{source}.{part}.weight")
        own = drafter.get_parameter(f"layers.{index}.{part}.weight")
        if tensor is not None and tensor.shape == own.shape:
            own.copy_(tensor)
            copied.append(f"layers.{index}.{part}.weight")
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
