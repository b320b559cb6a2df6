"""A whole pair in a folder, tiny and random: weights, a tokenizer with a chat template, a drafter."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from paceline.checkpoint.store import DrafterCheckpoint
from paceline.llm import LLM
from paceline.target.native import NativeTarget
from paceline.testing import tiny_drafter, tiny_shape, tiny_tensors

END, START = "<|end|>", "<|start|>"
TEMPLATE = "{% for m in messages %}<|start|>{{ m['content'] }}<|end|>{% endfor %}<|start|>"
MAX_POSITIONS = 128


def tiny_llm(
    folder: Path, *, drafter: bool = True, block_size: int = 5, max_sequences: int = 3, seed: int = 0
) -> LLM:
    """Returns a float64 pair whose target and drafter were written into an empty folder."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[:96]
    shape = tiny_shape(vocab_size=len(letters) + 2, max_positions=MAX_POSITIONS)
    tensors = tiny_tensors(shape, seed)
    target = folder / "target"
    target.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate_size,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_positions,
        "eos_token_id": 0,
    }
    (target / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, target / "model.safetensors")
    _tokenizer(letters).save_pretrained(target)
    if drafter:
        made = tiny_drafter(NativeTarget(shape, tensors, name="tiny", dtype=torch.float64), block_size)
        DrafterCheckpoint.of(made, torch.float64, {}).save(folder / "drafter")
    return LLM(
        target,
        folder / "drafter" if drafter else None,
        device="cpu",
        dtype="float64",
        max_sequences=max_sequences,
        offline=True,
    )


def _tokenizer(letters: list[str]) -> PreTrainedTokenizerFast:
    vocab = {token: i for i, token in enumerate([END, START, *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.add_special_tokens([AddedToken(END, special=True), AddedToken(START, special=True)])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, chat_template=TEMPLATE)
