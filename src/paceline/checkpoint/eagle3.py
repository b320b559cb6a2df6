"""EAGLE-3's checkpoint layout ↔ `Eagle3Config`: a flat Llama config with `draft_vocab_size`, and a strict manifest.

Tensors have the names that SafeAILab's and SpecForge's files have: `fc`, `midlayer.*`, `norm`, `lm_head`, and beside a
reduced vocabulary `d2t` (int64 offsets: token = row + d2t[row]) and `t2d` (bool, which tokens have a row). vLLM and
SGLang load the folder as it is; the embedding is the target's and not stored.

Which layers are tapped is written twice, since engines count differently. Where R(i) is the output of decoder layer i:

    eagle_aux_hidden_state_layer_ids               i + 1    vLLM taps before layer i + 1
    eagle_config.eagle_aux_hidden_state_layer_ids  i        SGLang adds the one itself; vLLM would not

The first is what counts when reading. The second alone is refused: one file means different layers to the two engines.

Source: vLLM 0.30 `llama_eagle3.py` and `gpu_model_runner.py`, SGLang's EAGLE-3 worker, SpecForge 0.2.0.
"""

from __future__ import annotations

from typing import Any

import torch

from paceline.checkpoint.rope import rope_theta, rope_to_json
from paceline.core.errors import CheckpointError, ConfigError
from paceline.drafter.config import Eagle3Config, from_hidden_states_index, to_hidden_states_index

ARCHITECTURE = "LlamaForCausalLMEagle3"
_TAPS = "eagle_aux_hidden_state_layer_ids"
_DEFAULT_BLOCK_SIZE = 8
"""Of files that do not say how many steps they were trained for: the seven of the paper, and the anchor."""
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "attention_bias": (None, False),
    "fc_norm": (None, False),
    "hidden_act": (None, "silu"),
    "logit_scale": (None, 1.0),
    "mlp_bias": (None, False),
    "norm_before_fc": (None, False),
    "norm_before_residual": (None, False),
    "norm_output": (None, False),
    "num_hidden_layers": (None, 1),
    "parallel_drafting": (None, False),
    "use_aux_hidden_state": (None, True),
}
"""Keys that change the function, with the values this reader implements."""
_NESTED = {_TAPS, "use_aux_hidden_state", "norm_before_fc"}
"""Keys of `eagle_config` that this reader knows."""


def config_from_json(raw: dict[str, Any]) -> Eagle3Config:
    """Returns the config of an EAGLE-3 checkpoint.

    Raises:
        ConfigError: a key missing, out of range, or set to something not implemented.
    """
    nested = raw.get("eagle_config") or {}

    def need(key: str) -> Any:
        if raw.get(key) is None:
            raise ConfigError(f"{key}: expected at top level, found none")
        return raw[key]

    for key, implemented in _NEUTRAL.items():
        for level in (raw, nested):
            if level.get(key) not in implemented:
                raise ConfigError(
                    f"{key}: {level.get(key)!r} is not implemented; expected one of {implemented}"
                )
    if unknown := sorted(set(nested) - _NESTED):
        raise ConfigError(f"eagle_config: {unknown} are not known, so what they ask for would be ignored")
    hidden_size, vocab_size = int(need("hidden_size")), int(need("vocab_size"))
    if raw.get("target_hidden_size") not in (None, hidden_size):
        raise ConfigError(f"target_hidden_size: expected {hidden_size}, got {raw['target_hidden_size']}")
    return Eagle3Config(
        block_size=int(raw.get("block_size", _DEFAULT_BLOCK_SIZE)),
        hidden_size=hidden_size,
        num_heads=int(need("num_attention_heads")),
        num_kv_heads=int(need("num_key_value_heads")),
        head_dim=int(raw.get("head_dim") or hidden_size // need("num_attention_heads")),
        intermediate_size=int(need("intermediate_size")),
        vocab_size=vocab_size,
        draft_vocab_size=int(raw.get("draft_vocab_size") or vocab_size),
        target_layer_ids=_taps(raw, nested),
        num_target_layers=int(need("num_target_layers")),
        rope_theta=rope_theta(raw),
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        max_positions=int(raw.get("max_position_embeddings", 8192)),
    )


def _taps(raw: dict[str, Any], nested: dict[str, Any]) -> tuple[int, ...]:
    """Returns the tapped layers by the ids at top level, which every engine understands alike."""
    if raw.get(_TAPS) is None:
        raise ConfigError(
            f"{_TAPS}: expected at top level, found none; hint: name them there, a layer's index plus one; engines "
            "that find none tap 2, N // 2 and N - 3 of a target of N layers"
        )
    taps = tuple(from_hidden_states_index(int(index)) for index in raw[_TAPS])
    if nested.get(_TAPS) not in (None, list(taps)):
        raise ConfigError(
            f"eagle_config.{_TAPS}: expected {list(taps)}, one less than at top level, got {nested[_TAPS]}"
        )
    if raw.get("num_aux_hidden_states") not in (None, len(taps)):
        raise ConfigError(f"num_aux_hidden_states: expected {len(taps)}, got {raw['num_aux_hidden_states']}")
    return taps


def config_to_json(config: Eagle3Config, dtype: torch.dtype) -> dict[str, Any]:
    """Returns the flat config that vLLM and SGLang read. Pure."""
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "block_size": config.block_size,
        "draft_vocab_size": config.draft_vocab_size,
        "dtype": str(dtype).removeprefix("torch."),
        _TAPS: [to_hidden_states_index(i) for i in config.target_layer_ids],
        "eagle_config": {_TAPS: list(config.target_layer_ids), "use_aux_hidden_state": True},
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_positions,
        "mlp_bias": False,
        "num_attention_heads": config.num_heads,
        "num_aux_hidden_states": len(config.target_layer_ids),
        "num_hidden_layers": 1,
        "num_key_value_heads": config.num_kv_heads,
        "num_target_layers": config.num_target_layers,
        "rms_norm_eps": config.rms_norm_eps,
        **rope_to_json(config.rope_theta),
        "tie_word_embeddings": False,
        "vocab_size": config.vocab_size,
    }


def check_vocabulary(config: Eagle3Config, tensors: dict[str, torch.Tensor], where: str) -> None:
    """Raises `CheckpointError` where `d2t` and `t2d` do not say, both, which ascending tokens the head's rows are."""
    if config.draft_vocab_size == config.vocab_size:
        return
    offsets, is_drafted = tensors["d2t"], tensors["t2d"]
    if (offsets.dtype, is_drafted.dtype) != (torch.int64, torch.bool):
        raise CheckpointError(
            f"{where}: expected d2t in int64 and t2d in bool, got {offsets.dtype} and {is_drafted.dtype}"
        )
    token_ids = torch.arange(len(offsets)) + offsets
    if not torch.equal(token_ids, is_drafted.nonzero()[:, 0]):
        raise CheckpointError(
            f"{where}: d2t and t2d disagree on which {len(offsets)} of the target's {len(is_drafted)} tokens the "
            "head scores, in ascending order; d2t holds offsets: token = row + d2t[row]"
        )
