"""The native runner says what transformers says, and reads or refuses folders by name."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from paceline.core.errors import CheckpointError, UnsupportedTargetError
from paceline.core.types import EMPTY_PROPOSAL
from paceline.target.base import TargetOutput, VerifyRows
from paceline.target.native import NativeTarget
from paceline.target.weights import Shape
from paceline.testing import tiny_shape, tiny_target, tiny_tensors

VOCAB = 61
PROMPT = [5, 17, 3, 44, 9, 60, 21, 8, 33, 12, 50, 7]
FAMILIES: dict[str, tuple[Any, Any]] = {
    "LlamaForCausalLM": (LlamaConfig, LlamaForCausalLM),
    "MistralForCausalLM": (MistralConfig, MistralForCausalLM),
    "Qwen2ForCausalLM": (Qwen2Config, Qwen2ForCausalLM),
    "Qwen3ForCausalLM": (Qwen3Config, Qwen3ForCausalLM),
}


def fresh(model: NativeTarget, tokens: Sequence[int]) -> TargetOutput:
    """All rows of a text in one pass over an empty session."""
    session = model.open(60)
    (output,) = model.verify([VerifyRows(session, tokens, EMPTY_PROPOSAL)])
    session.close()
    return output


def assert_same(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)


# Against transformers ------------------------------------------------------------------------------------------------


class ExactRMSNorm(torch.nn.Module):
    """transformers' norms compute in float32 whatever the dtype; for a float64 comparison they must not."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight, self.eps = norm.weight, norm.variance_epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


class ExactRotary(torch.nn.Module):
    """Angles in float64, where transformers has float32."""

    def __init__(self, theta: float, dim: int) -> None:
        super().__init__()
        self.frequencies = theta ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = position_ids[..., None] * self.frequencies
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos(), angles.sin()


def transformers_model(shape: Shape, **overrides: Any) -> Any:
    config_class, model_class = FAMILIES[shape.architecture]
    config = config_class(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        rms_norm_eps=shape.rms_norm_eps,
        max_position_embeddings=shape.max_positions,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        tie_word_embeddings=shape.tie_word_embeddings,
        sliding_window=None,
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=0,
        **overrides,
    )
    return model_class(config).double().eval()


def exact(model: Any) -> Any:
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__.endswith("RMSNorm"):
                setattr(parent, name, ExactRMSNorm(child))
    config = model.config
    model.model.rotary_emb = ExactRotary(config.rope_parameters["rope_theta"], config.head_dim)
    return model


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("architecture", FAMILIES)
@torch.inference_mode()
def test_logits_and_taps_are_transformers(architecture: str, tied: bool, tmp_path: Path) -> None:
    shape = replace(
        tiny_shape(num_layers=4, architecture=architecture), tie_word_embeddings=tied, rope_theta=500.0
    )
    tensors = tiny_tensors(shape, seed=3)
    if tied:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    model = transformers_model(shape)
    model.load_state_dict(tensors)
    model.save_pretrained(tmp_path)
    target = NativeTarget.load(tmp_path, name="tiny", dtype=torch.float64, device=torch.device("cpu"))
    assert target.spec.architecture == architecture
    assert target.spec.eos_token_ids == (2,)
    target.tap((0, 2))
    states: dict[int, torch.Tensor] = {}
    for i, layer in enumerate(model.model.layers):  # hidden_states[-1] would come after the final norm
        layer.register_forward_hook(
            lambda _, args, out, i=i: states.update({i: out[0] if isinstance(out, tuple) else out})
        )
    expected = exact(model)(torch.tensor([PROMPT])).logits[0]
    got = fresh(target, PROMPT)
    assert_same(got.logits, expected)
    assert_same(got.hidden, torch.cat([states[0].view(12, -1), states[2].view(12, -1)], dim=-1))
    target.tap((3,))
    assert_same(fresh(target, PROMPT).hidden, states[3].view(12, -1))


# Folders and configs -------------------------------------------------------------------------------------------------


def folder_of(path: Path, tensors: dict[str, torch.Tensor], **config: Any) -> Path:
    raw = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "vocab_size": VOCAB,
        "rope_theta": 10_000.0,
        "eos_token_id": [2, 7],
    }
    (path / "config.json").write_text(json.dumps(raw | config), encoding="utf-8")
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, path / "model.safetensors")
    return path


def load(path: Path) -> NativeTarget:
    return NativeTarget.load(path, name="tiny", dtype=torch.float64, device=torch.device("cpu"))


def test_a_folder_is_the_target(tmp_path: Path) -> None:
    loaded = load(folder_of(tmp_path, tiny_tensors(tiny_shape())))
    assert_same(fresh(loaded, PROMPT).logits, fresh(tiny_target(), PROMPT).logits)
    assert loaded.spec.eos_token_ids == (2, 7)
    assert loaded.spec.max_positions == 2048


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architecture 'GPT2LMHeadModel'"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope scaling"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope scaling"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope scaling"),
        ({"partial_rotary_factor": 0.5}, "partial rotary"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 64}, "sliding-window layers"),
        ({"sliding_window": 64, "use_sliding_window": True}, "sliding-window layers"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window layers"),
    ],
)
def test_a_config_it_does_not_do_is_refused_by_name(
    config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedTargetError, match=f"{message}.*hint: backend='hf'"):
        load(folder_of(tmp_path, tiny_tensors(tiny_shape()), **config))


def test_tensors_must_be_all_there_and_all_known(tmp_path: Path) -> None:
    tensors = tiny_tensors(tiny_shape())
    missing = {name: t for name, t in tensors.items() if name != "model.layers.1.mlp.up_proj.weight"}
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        load(folder_of(tmp_path, missing))
    with pytest.raises(UnsupportedTargetError, match=r"adapter\.weight"):
        load(folder_of(tmp_path, tensors | {"model.adapter.weight": torch.zeros(2)}))
    with pytest.raises(CheckpointError, match="biases on some of"):
        load(folder_of(tmp_path, tensors | {"model.layers.0.self_attn.q_proj.bias": torch.zeros(32)}))
    (folder_of(tmp_path, tensors) / "model.safetensors").write_bytes(
        (tmp_path / "model.safetensors").read_bytes()[:-100]
    )
    with pytest.raises(CheckpointError, match="not a whole safetensors file"):
        load(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no \.safetensors file"):
        load(tmp_path)
