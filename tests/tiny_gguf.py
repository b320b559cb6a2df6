"""Tiny models with a tiny tokenizer, written as GGUF files the way llama.cpp's converter lays them out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config

BYTES = [chr(b) for b in (*range(33, 127), *range(161, 173), *range(174, 256))]
TOKENS = ["<|end|>", "<|start|>", "<think>", *BYTES, "Ġ", "Ċ", "in", "ing", "Ġin", "Ġ4", "ĠĠ", "<unused>"]
TYPES = [3, 3, 4, *[1] * (len(TOKENS) - 4), 5]
MERGES = ["i n", "in g", "Ġ in", "Ġ 4", "Ġ Ġ"]
TEMPLATE = "{% for m in messages %}<|start|>{{ m['content'] }}<|end|>{% endfor %}"
SIZES: dict[str, Any] = {
    "vocab_size": len(TOKENS),
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rope_theta": 50000.0,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.1,
    "bos_token_id": 1,
    "eos_token_id": 0,
}
CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: LlamaConfig(**SIZES, tie_word_embeddings=True),
    "qwen2": lambda: Qwen2Config(**SIZES, tie_word_embeddings=False),
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=True),
}
GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.o_proj": "attn_output",
    **{f"self_attn.{p}_proj": f"attn_{p}" for p in "qkv"},
    **{f"self_attn.{p}_norm": f"attn_{p}_norm" for p in "qk"},
    **{f"mlp.{p}_proj": f"ffn_{p}" for p in ("gate", "up", "down")},
}


def tiny_model(architecture: str) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[architecture](), dtype=torch.float64)
    for parameter in model.parameters():  # norms and biases are constant at first
        parameter.data += 0.1 * torch.randn_like(parameter)
        parameter.data = parameter.data.bfloat16().double()
    return model.eval()


def write_gguf(
    path: Path,
    architecture: str = "llama",
    *,
    model: Any = None,
    quantize: bool = False,
    pre: str = "smollm",
    change: Callable[[gguf.GGUFWriter, dict[str, np.ndarray]], object] = lambda writer, tensors: None,
) -> Path:
    """Writes a model as llama.cpp's converter lays it out; `change` may add to it or spoil it."""
    model = model or tiny_model(architecture)
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(SIZES["rope_theta"])
    if architecture == "qwen3":
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types(TYPES)
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_chat_template(TEMPLATE)
    tensors = gguf_tensors(model, architecture)
    change(writer, tensors)
    for name, tensor in tensors.items():
        kind = gguf.GGMLQuantizationType.Q8_0 if quantize and tensor.ndim == 2 else None
        writer.add_tensor(name, gguf.quantize(tensor, kind) if kind else tensor, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_tensors(model: Any, architecture: str) -> dict[str, np.ndarray]:
    tensors = {}
    heads = {"q_proj": model.config.num_attention_heads, "k_proj": model.config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        array = tensor.float().numpy()
        projection = name.split(".")[-2]
        if architecture == "llama" and projection in heads:
            halves = array.reshape(heads[projection], 2, -1, array.shape[1])
            array = halves.swapaxes(1, 2).reshape(array.shape)
        stem, suffix = name.rsplit(".", 1)
        prefix = ""
        if stem.startswith("model.layers."):
            index, stem = stem.removeprefix("model.layers.").split(".", 1)
            prefix = f"blk.{index}."
        tensors[f"{prefix}{GGUF_NAMES[stem]}.{suffix}"] = np.ascontiguousarray(array)
    return tensors


def logits_of(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    return logits(model)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        out: torch.Tensor = model(input_ids=torch.arange(3, 40)[None]).logits
    return out


def leftovers(cache: Path) -> list[str]:
    """Everything below the cache that could be mistaken for a model."""
    return sorted(
        p.relative_to(cache).as_posix() for p in cache.rglob("*") if p.suffix != ".lock" and p.is_file()
    )
