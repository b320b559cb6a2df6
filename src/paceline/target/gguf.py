"""GGUF files → model folders, without building the model.

Only what can be carried over exactly is converted: the Llama, Qwen2 and Qwen3 shapes with a byte-level BPE vocabulary.
A tensor, a model setting or a way of splitting text that has no counterpart is refused by name, never dropped.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, TokenType, dequantize
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from paceline.core.errors import CheckpointError, UnknownFormatError
from paceline.target.folder import Progress

_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_HINT = "hint: use the model's safetensors folder or its hub id instead"


@dataclass(frozen=True, slots=True)
class _Architecture:
    """How one GGUF architecture maps to a transformers class."""

    class_name: str
    rotary_interleaved: bool = (
        False  # llama.cpp stores the q and k rows of Llama with rotary pairs side by side
    )
    qkv_bias: bool = False
    qk_norm: bool = False


_ARCHITECTURES = {
    "llama": _Architecture("LlamaForCausalLM", rotary_interleaved=True),
    "qwen2": _Architecture("Qwen2ForCausalLM", qkv_bias=True),
    "qwen3": _Architecture("Qwen3ForCausalLM", qk_norm=True),
}

_SETTINGS = {
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "rope.freq_base",
    "rope.dimension_count",
    "vocab_size",
}


def convert_gguf(source: Path, folder: Path, progress: Progress) -> None:
    """Writes config, bfloat16 weights and tokenizer of the GGUF file `source` into the existing `folder`.

    Args:
        source: a GGUF file, quantised or not; weights are dequantised to float32, then rounded to bfloat16.
        folder: receives config.json, generation_config.json, model.safetensors, tokenizer.json, tokenizer_config.json.
        progress: called as `progress("convert", tensors done, tensors in all)`.

    Raises:
        UnknownFormatError: not a GGUF file, or one that holds something without a counterpart.
        CheckpointError: tensors that are missing, of another shape than the settings say, or not finite.
    """
    reader = _open(source)
    metadata = {key: field.contents() for key, field in reader.fields.items()}
    config = _config(source, metadata, tied="output.weight" not in {tensor.name for tensor in reader.tensors})
    tokenizer, tokenizer_config = _tokenizer(source, metadata)
    tensors = _weights(source, reader, config, progress)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "config.json", config)
    specials = {key: value for key, value in config.items() if key.endswith("_token_id")}
    _write_json(folder / "generation_config.json", specials)
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", tokenizer_config)


def _open(source: Path) -> GGUFReader:
    try:
        return GGUFReader(source)
    except (ValueError, IndexError, KeyError, OSError) as error:
        raise UnknownFormatError(
            f"{source}: expected a complete GGUF file, but reading it failed ({error}); hint: fetch the file again"
        ) from error


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _architecture(source: Path, metadata: dict[str, Any]) -> _Architecture:
    name = metadata.get("general.architecture")
    if name not in _ARCHITECTURES:
        raise UnknownFormatError(
            f"{source}: general.architecture: expected one of {', '.join(_ARCHITECTURES)}, got {name!r}; {_HINT}"
        )
    return _ARCHITECTURES[name]


def _config(source: Path, metadata: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    """Returns the config.json of the model that the metadata describe."""
    architecture = _architecture(source, metadata)
    prefix = f"{metadata['general.architecture']}."
    settings = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    unknown = sorted(set(settings) - _SETTINGS)
    if unknown:
        raise UnknownFormatError(
            f"{source}: settings without a counterpart: {', '.join(prefix + key for key in unknown)}; {_HINT}"
        )

    def need(key: str) -> Any:
        if key not in settings:
            raise CheckpointError(
                f"{source}: the setting {prefix}{key} is missing; hint: fetch another copy of the model"
            )
        return settings[key]

    num_heads = need("attention.head_count")
    head_dim = settings.get("attention.key_length", need("embedding_length") // num_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if settings.get(key, head_dim) != head_dim:
            raise UnknownFormatError(
                f"{source}: {prefix}{key} is {settings[key]}, expected the head size {head_dim}"
            )
    rope_theta = _shortest(settings.get("rope.freq_base", 10000.0))
    config = {
        "architectures": [architecture.class_name],
        "model_type": metadata["general.architecture"],
        "dtype": "bfloat16",
        "vocab_size": len(metadata.get("tokenizer.ggml.tokens", ())),
        "hidden_size": need("embedding_length"),
        "intermediate_size": need("feed_forward_length"),
        "num_hidden_layers": need("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": settings.get("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": need("context_length"),
        "rms_norm_eps": _shortest(need("attention.layer_norm_rms_epsilon")),
        # The same value twice: readers before transformers 5 look for the first, later ones for the second.
        "rope_theta": rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": rope_theta},
        "tie_word_embeddings": tied,
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        if f"tokenizer.ggml.{key}_token_id" in metadata:
            config[f"{name}_token_id"] = metadata[f"tokenizer.ggml.{key}_token_id"]
    return config


def _shortest(value: float) -> float:
    """Returns the shortest decimal that is this float32, so that a stored 1e-5 reads 1e-05 again."""
    return float(str(np.float32(value)))


def _weights(
    source: Path, reader: GGUFReader, config: dict[str, Any], progress: Progress
) -> dict[str, torch.Tensor]:
    """Returns the bfloat16 state dict, each tensor checked for presence, shape and finite values."""
    expected = dict(_expected_tensors(config))
    found = {tensor.name: tensor for tensor in reader.tensors}
    missing, unknown = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    if missing:
        raise CheckpointError(f"{source}: tensors missing: {', '.join(missing)}; hint: fetch the file again")
    if unknown:
        raise UnknownFormatError(
            f"{source}: tensors without a counterpart in {config['architectures'][0]}: {', '.join(unknown)}; {_HINT}"
        )
    interleaved = _ARCHITECTURES[config["model_type"]].rotary_interleaved
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    tensors = {}
    for done, (name, (target_name, shape)) in enumerate(expected.items()):
        progress("convert", done, len(expected))
        array = dequantize(found[name].data, found[name].tensor_type)
        if array.shape != shape:
            raise CheckpointError(
                f"{source}: {name} has the shape {array.shape}, expected {shape} from its settings"
            )
        projection = target_name.split(".")[-2]
        if interleaved and projection in heads:
            array = _split_rotary_pairs(array, heads[projection])
        tensor = torch.from_numpy(np.array(array)).to(
            torch.bfloat16
        )  # a copy: some arrays are read-only views
        if not torch.isfinite(tensor).all():
            raise CheckpointError(
                f"{source}: {name} holds values that are not finite; hint: fetch the file again"
            )
        tensors[target_name] = tensor
    progress("convert", len(expected), len(expected))
    return tensors


def _expected_tensors(config: dict[str, Any]) -> Iterator[tuple[str, tuple[str, tuple[int, ...]]]]:
    """Yields GGUF name → (transformers name, shape) for every tensor that such a model has."""
    architecture = _ARCHITECTURES[config["model_type"]]
    hidden, mlp, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    yield "token_embd.weight", ("model.embed_tokens.weight", (config["vocab_size"], hidden))
    yield "output_norm.weight", ("model.norm.weight", (hidden,))
    if not config["tie_word_embeddings"]:
        yield "output.weight", ("lm_head.weight", (config["vocab_size"], hidden))
    layer = {
        "attn_norm.weight": ("input_layernorm.weight", (hidden,)),
        "attn_q.weight": ("self_attn.q_proj.weight", (q, hidden)),
        "attn_k.weight": ("self_attn.k_proj.weight", (kv, hidden)),
        "attn_v.weight": ("self_attn.v_proj.weight", (kv, hidden)),
        "attn_output.weight": ("self_attn.o_proj.weight", (hidden, q)),
        "ffn_norm.weight": ("post_attention_layernorm.weight", (hidden,)),
        "ffn_gate.weight": ("mlp.gate_proj.weight", (mlp, hidden)),
        "ffn_up.weight": ("mlp.up_proj.weight", (mlp, hidden)),
        "ffn_down.weight": ("mlp.down_proj.weight", (hidden, mlp)),
    }
    if architecture.qkv_bias:
        layer |= {f"attn_{p}.bias": (f"self_attn.{p}_proj.bias", (q if p == "q" else kv,)) for p in "qkv"}
    if architecture.qk_norm:
        layer |= {f"attn_{p}_norm.weight": (f"self_attn.{p}_norm.weight", (head_dim,)) for p in "qk"}
    for index in range(config["num_hidden_layers"]):
        for name, (target_name, shape) in layer.items():
            yield f"blk.{index}.{name}", (f"model.layers.{index}.{target_name}", shape)


def _split_rotary_pairs(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Returns the rows of each head with pairs (0, E/2), (1, E/2 + 1), … instead of (0, 1), (2, 3), …"""
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def _tokenizer(source: Path, metadata: dict[str, Any]) -> tuple[Tokenizer, dict[str, Any]]:
    """Returns the tokenizer and its tokenizer_config.json."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise UnknownFormatError(
            f"{source}: tokenizer.ggml.model: expected 'gpt2' (byte-level BPE), got {kind!r}; {_HINT}"
        )
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    vocab = {token: i for i, token in enumerate(tokens) if types[i] != TokenType.UNUSED}
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.decoder = decoders.ByteLevel()
    _set_splitting(tokenizer, source, metadata)
    for token, kind in zip(tokens, types, strict=True):
        if kind == TokenType.CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True)])
        elif kind == TokenType.USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, normalized=False, special=False)])
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": metadata[f"{metadata['general.architecture']}.context_length"],
        "clean_up_tokenization_spaces": False,
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        if f"tokenizer.ggml.{key}_token_id" in metadata:
            config[f"{name}_token"] = tokens[metadata[f"tokenizer.ggml.{key}_token_id"]]
    if metadata.get("tokenizer.ggml.add_bos_token"):
        bos = (config["bos_token"], metadata["tokenizer.ggml.bos_token_id"])
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{bos[0]} $A", special_tokens=[bos])
    if "tokenizer.chat_template" in metadata:
        config["chat_template"] = metadata["tokenizer.chat_template"]
    return tokenizer, config


def _set_splitting(tokenizer: Tokenizer, source: Path, metadata: dict[str, Any]) -> None:
    """Sets how text is cut before the merges. Mutates: `tokenizer`.

    Source: `tokenizer.ggml.pre` names the split the vocabulary was trained with (llama.cpp, llama-vocab.cpp).
    """
    bytes_after_split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    match metadata.get("tokenizer.ggml.pre"):
        case "gpt-2":
            tokenizer.pre_tokenizer = gpt2
        case "smollm":
            tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
                [pre_tokenizers.Digits(individual_digits=True), gpt2]
            )
        case "qwen2":
            tokenizer.normalizer = normalizers.NFC()
            split = pre_tokenizers.Split(Regex(_QWEN2_SPLIT), behavior="isolated")
            tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_after_split])
        case other:
            raise UnknownFormatError(
                f"{source}: tokenizer.ggml.pre: expected one of gpt-2, qwen2, smollm, got {other!r}; {_HINT}"
            )
