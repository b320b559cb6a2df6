"""z-lab's checkpoint layout ↔ `DrafterConfig`: a flat Qwen3 config with `dflash_config`, and a strict tensor manifest.

Keys are looked up in `dflash_config` first, then at top level; both rope dialects are read and both are written, since
engines know one or the other and fall back silently. DFlash 2's own keys are written in `dflash_config`, where all
engines look. Keys that would change the function and are not implemented are refused by name.

DFlash 2 stores its two codebooks without the suffix `.weight` of other matrices.

Source: z-lab `dflash` 0.1.0 and its released checkpoints.
"""

from __future__ import annotations

from typing import Any

import torch

from paceline.checkpoint.rope import rope_theta, rope_to_json
from paceline.core.errors import ConfigError, UnknownFormatError
from paceline.drafter.config import DFLASH2_FIELDS, SLIDING, DrafterConfig, default_target_layer_ids
from paceline.drafter.dflash import DFlash
from paceline.drafter.dflash2 import DFlash2

ARCHITECTURE, ARCHITECTURE_2 = "DFlashDraftModel", "DFlash2DraftModel"
ARCHITECTURES = {"dflash": ARCHITECTURE, "dflash2": ARCHITECTURE_2}
"""What a config calls each variant."""
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "input_embedding_scale": (None, 1.0),
    "output_multiplier": (None, 1.0),
    "final_logit_softcapping": (None,),
    "sample_from_anchor": (None, False),
    "projector_type": (None, "dflash"),
    "attention_bias": (None, False),
    "hidden_act": (None, "silu"),
}
"""Keys that change the function, with the values this reader implements."""
_NESTED = {"block_size", "causal", "mask_token_id", "num_target_layers", "target_layer_ids", *_NEUTRAL}
"""Keys of `dflash_config` that this reader knows."""


def new_drafter(config: DrafterConfig) -> DFlash:
    """Returns a module of the config's variant, with a new drafter's weights."""
    return DFlash2(config) if config.variant == "dflash2" else DFlash(config)


def config_from_json(raw: dict[str, Any]) -> DrafterConfig:
    """Returns the config of a z-lab checkpoint, of either variant.

    Raises:
        UnknownFormatError: another architecture.
        ConfigError: a key missing, out of range, or set to something not implemented.
    """
    architectures = raw.get("architectures") or []
    variant = next((v for v, name in ARCHITECTURES.items() if architectures == [name]), None)
    if variant is None:
        expected = " or ".join(f"[{name!r}]" for name in ARCHITECTURES.values())
        raise UnknownFormatError(f"architectures: expected {expected}, got {architectures}")
    nested, own = raw.get("dflash_config") or {}, DFLASH2_FIELDS if variant == "dflash2" else ()

    def get(key: str, default: Any = None) -> Any:
        return nested.get(key, raw.get(key, default))

    def need(key: str) -> Any:
        value = get(key)
        if value is None:
            raise ConfigError(f"{key}: expected in dflash_config or at top level, found in neither")
        return value

    for key, implemented in _NEUTRAL.items():
        if get(key) not in implemented:
            raise ConfigError(f"{key}: {get(key)!r} is not implemented; expected one of {implemented}")
    if unknown := sorted(set(nested) - _NESTED - set(own)):
        raise ConfigError(f"dflash_config: {unknown} are not known, so what they ask for would be ignored")
    layer_types, slides = tuple(get("layer_types") or ()), bool(get("use_sliding_window", False))
    if slides and not layer_types:
        raise ConfigError("layer_types: expected beside use_sliding_window, found none; hint: write them out")
    if SLIDING in layer_types and not slides:
        raise ConfigError(
            f"use_sliding_window: expected true beside {SLIDING!r}; without it there is no window"
        )
    num_layers, depth = int(need("num_hidden_layers")), int(need("num_target_layers"))
    taps = get("target_layer_ids")
    causal = get("causal", raw.get("is_causal"))
    return DrafterConfig(
        block_size=int(get("block_size", 16)),
        hidden_size=int(need("hidden_size")),
        num_layers=num_layers,
        num_heads=int(need("num_attention_heads")),
        num_kv_heads=int(need("num_key_value_heads")),
        head_dim=int(get("head_dim") or need("hidden_size") // need("num_attention_heads")),
        intermediate_size=int(need("intermediate_size")),
        vocab_size=int(need("vocab_size")),
        target_layer_ids=tuple(taps) if taps else default_target_layer_ids(depth, num_layers),
        num_target_layers=depth,
        mask_token_id=int(need("mask_token_id")),
        layer_types=layer_types,
        sliding_window=get("sliding_window"),
        is_causal=causal,
        rope_theta=rope_theta(raw),
        rms_norm_eps=float(get("rms_norm_eps", 1e-6)),
        max_positions=int(get("max_position_embeddings", 8192)),
        variant=variant,
        **{key: int(need(key)) for key in own},
    )


def config_to_json(config: DrafterConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Returns the flat config that z-lab's package, vLLM and SGLang read. Pure."""
    sliding = SLIDING in config.layer_types
    raw: dict[str, Any] = {
        "architectures": [ARCHITECTURES[config.variant]],
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "block_size": config.block_size,
        "dflash_config": {
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": list(config.target_layer_ids),
        },
        "dtype": str(dtype).removeprefix("torch."),
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "layer_types": list(config.layer_types),
        "max_position_embeddings": config.max_positions,
        "max_window_layers": 0 if sliding else config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.num_kv_heads,
        "num_target_layers": config.num_target_layers,
        "rms_norm_eps": config.rms_norm_eps,
        **rope_to_json(config.rope_theta),
        "sliding_window": config.sliding_window,
        "tie_word_embeddings": False,
        "use_sliding_window": sliding,
        "vocab_size": config.vocab_size,
    }
    if config.variant == "dflash2":
        raw["dflash_config"] |= {key: getattr(config, key) for key in DFLASH2_FIELDS}
    if config.is_causal is not None:
        raw["is_causal"] = config.is_causal
    return raw


def manifest(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Returns every tensor's name and shape, 11 · layers + 3 of them, in DFlash 2 15 · layers + 6. Pure."""
    with torch.device("meta"):
        return {name: tuple(tensor.shape) for name, tensor in new_drafter(config).state_dict().items()}
