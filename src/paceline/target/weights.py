"""What a transformers folder says of a Llama-shaped target: its sizes and its tensors."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from paceline.core.errors import CheckpointError, UnsupportedTargetError

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a Llama-shaped decoder, read from a transformers config."""

    architecture: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    max_positions: int
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Shape:
        """Returns the shape, or raises `UnsupportedTargetError` naming what this runner does not do."""
        architecture = (config.get("architectures") or ["?"])[0]
        reason = _unsupported(architecture, config)
        if reason:
            raise UnsupportedTargetError(f"the native runner does not do {reason}; hint: backend='hf'")
        heads = int(config["num_attention_heads"])
        rope = config.get("rope_parameters") or {}
        eos = config.get("eos_token_id")
        return cls(
            architecture=architecture,
            hidden_size=int(config["hidden_size"]),
            num_layers=int(config["num_hidden_layers"]),
            num_heads=heads,
            num_kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
            intermediate_size=int(config["intermediate_size"]),
            vocab_size=int(config["vocab_size"]),
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10_000.0),
            max_positions=int(config.get("max_position_embeddings", 2048)),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (int(eos),),
        )


def _unsupported(architecture: str, config: dict[str, Any]) -> str | None:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if architecture not in ARCHITECTURES:
        return f"architecture {architecture!r} (it does {', '.join(ARCHITECTURES)})"
    if config.get("hidden_act", "silu") != "silu":
        return f"hidden_act {config['hidden_act']!r} (only silu)"
    if (rope.get("rope_type") or rope.get("type") or "default") != "default":
        return f"rope scaling {rope!r} (only the default)"
    if float(rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0) != 1.0:
        return "partial rotary embeddings"
    window = config.get("sliding_window")
    uses_window = config.get("use_sliding_window", architecture == "MistralForCausalLM")
    if (window and uses_window) or "sliding_attention" in (config.get("layer_types") or ()):
        return f"sliding-window layers (window {window})"
    return None


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Returns all tensors of a folder's safetensors files, memory-mapped.

    Raises:
        CheckpointError: no file, or one that is truncated.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder}: no .safetensors file; hint: convert the weights to safetensors")
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as handle:
                tensors.update((key, handle.get_tensor(key)) for key in handle.keys())  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{file}: not a whole safetensors file ({error}); hint: fetch it again"
            ) from error
    return tensors
