"""A new drafter's first weights: copies of the target's own layers, and a fusion that begins as one tap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

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
    drafter: DFlash, target: Mapping[str, torch.Tensor], layer_ids: Sequence[int], seed: int
) -> list[str]:
    """Sets a drafter's weights from the target's and returns the names that were copied.

    Layer i starts as target layer `layer_ids[i]` where shapes agree, the final norm as the target's, `fc` as the
    identity on the last tap with small noise elsewhere.

    Args:
        target: the target's tensors by transformers names; those of the named layers and the final norm suffice.
    """
    copied = []
    for i, source in enumerate(layer_ids):
        for part in _COPIED:
            tensor = target.get(f"model.layers.{source}.{part}.weight")
            own = drafter.get_parameter(f"layers.{i}.{part}.weight")
            if tensor is not None and tensor.shape == own.shape:
                own.copy_(tensor)
                copied.append(f"layers.{i}.{part}.weight")
    norm = target.get("model.norm.weight")
    if norm is not None and norm.shape == drafter.norm.weight.shape:
        drafter.norm.weight.copy_(norm)
        copied.append("norm.weight")
    width = drafter.config.hidden_size
    noise = torch.randn(drafter.fc.weight.shape, generator=torch.Generator().manual_seed(seed))
    drafter.fc.weight.copy_(0.1 * noise / drafter.fc.weight.shape[1] ** 0.5)
    drafter.fc.weight[:, -width:] += torch.eye(width)
    return copied
