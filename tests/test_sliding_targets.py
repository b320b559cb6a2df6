"""Targets with sliding windows through transformers: texts several windows long, plain, in chains and in trees."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    Llama4TextConfig,
    MistralConfig,
    MistralForCausalLM,
    PretrainedConfig,
    Qwen2Config,
    Qwen3NextConfig,
    RecurrentGemmaConfig,
)

from paceline.core.errors import UnsupportedTargetError
from paceline.core.params import SamplingParams
from paceline.core.types import EMPTY_PROPOSAL, Proposal, Request
from paceline.engine.engine import Engine
from paceline.engine.tree import TreeDrafter as GrownTrees
from paceline.target.base import VerifyRows
from paceline.target.hf import HFTarget, _windows
from paceline.target.native import NativeTarget
from paceline.testing import (
    OracleDrafter,
    TreeDrafter,
    assert_lossless,
    plain_texts,
    run_checked,
    tiny_drafter,
    whole,
)

VOCAB_SIZE, NUM_NEW, WINDOW = 41, 24, 5
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 96,
    "initializer_range": 0.5,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
MIXED = ["sliding_attention", "full_attention"]
NO_WINDOW = 90  # longer than any text here
CONFIGS: dict[str, Callable[[int], PretrainedConfig]] = {
    "mistral": lambda window: MistralConfig(**SIZES, sliding_window=window),
    "gemma2": lambda window: Gemma2Config(**SIZES, sliding_window=window, query_pre_attn_scalar=8),
    "gemma3": lambda window: Gemma3TextConfig(**SIZES, sliding_window=window, layer_types=MIXED),
    "qwen2": lambda window: Qwen2Config(
        **SIZES, sliding_window=window, use_sliding_window=True, max_window_layers=1
    ),
    "gpt-oss": lambda window: GptOssConfig(
        **SIZES, sliding_window=window, layer_types=MIXED, num_local_experts=4, num_experts_per_tok=2
    ),
}
PROMPTS = (tuple(3 + 7 * i % 37 for i in range(19)), tuple(range(20, 27)))


def model_of(config: PretrainedConfig) -> Any:
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float64, experts_implementation="eager"
    ).eval()
    for parameter in model.parameters():  # norms start at one; give every tensor something to get wrong
        parameter.data += 0.1 * torch.randn_like(parameter)
    head: Any = model.get_output_embeddings()
    head.weight = torch.nn.Parameter(
        torch.randn_like(head.weight)
    )  # some configs tie it whatever they are told
    return model


@cache
def target(name: str, window: int) -> HFTarget:
    return HFTarget(model_of(CONFIGS[name](window)), name=name)


def requests() -> list[Request]:
    return [Request(str(i), p, SamplingParams(NUM_NEW, ignore_eos=True)) for i, p in enumerate(PROMPTS)]


@cache
def generated(name: str, window: int) -> list[tuple[int, ...]]:
    """What transformers' own greedy loop says, with its own cache."""
    model, texts = model_of(CONFIGS[name](window)), []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        whole_text = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NUM_NEW,
            do_sample=False,
            eos_token_id=None,
        )
        texts.append(tuple(whole_text[0].tolist()))
    assert all(len(set(text[-NUM_NEW:])) > 6 for text in texts), "texts that go in circles would prove little"
    return texts


@pytest.mark.parametrize("name", CONFIGS)
def test_texts_are_those_of_transformers_beyond_the_window(name: str) -> None:
    assert generated(name, WINDOW) != generated(name, NO_WINDOW), "the window must matter"
    model, made = target(name, WINDOW), requests()
    assert [whole(text) for text in plain_texts(model, made)] == generated(name, WINDOW)
    for block_size in (3, 8):  # narrower and wider than the window
        oracle = OracleDrafter(block_size, generated(name, WINDOW), (0, 1))
        for text in run_checked(Engine(model, oracle), made).values():
            assert whole(text) == generated(name, WINDOW)[int(text.request_id)]
            assert all(step.num_accepted == step.num_drafted for step in text.steps)
    assert_lossless(model, tiny_drafter(model, 6), made)


@pytest.mark.parametrize("name", CONFIGS)
def test_trees_keep_the_window(name: str) -> None:
    model, made = target(name, WINDOW), requests()
    for drafter in (
        TreeDrafter(12, generated(name, WINDOW), VOCAB_SIZE, seed=1),
        GrownTrees(tiny_drafter(model, 6), 8),
    ):
        texts = run_checked(Engine(model, drafter), made)
        assert [whole(texts[request.id]) for request in made] == generated(name, WINDOW)


@pytest.mark.parametrize("window", [1, 5])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_node_of_a_deep_tree_is_its_path_as_a_chain(name: str, window: int) -> None:
    """The window ends among the prompt, in the middle of the tree, or at the node itself."""
    model, prompt = target(name, window), PROMPTS[0]
    tree = Proposal((11, 22, 33, 4, 15, 6, 17), (0, 0, 1, 3, 4, 2, 5))
    paths = [[], [11], [22], [11, 33], [11, 33, 4], [11, 33, 4, 15], [22, 6], [11, 33, 4, 15, 17]]
    session = model.open(60)
    model.verify([VerifyRows(session, prompt[:-1], EMPTY_PROPOSAL)])
    session.keep(range(len(prompt) - 1))
    (output,) = model.verify([VerifyRows(session, prompt[-1:], tree)])
    for row, path in enumerate(paths):
        (expected,) = model.verify([VerifyRows(model.open(60), [*prompt, *path], EMPTY_PROPOSAL)])
        torch.testing.assert_close(output.logits[row], expected.logits[-1], rtol=1e-5, atol=1e-5)


class Unplaced(MistralForCausalLM):
    """A model that counts positions itself."""

    def forward(self, input_ids: torch.Tensor, cache: Any = None, **options: Any) -> Any:
        return super().forward(input_ids=input_ids, cache=cache, **options)


def test_where_nodes_cannot_be_placed_only_chains_are_taken() -> None:
    model = HFTarget(Unplaced(MistralConfig(**SIZES, sliding_window=4)).double(), name="tiny")
    session = model.open(20)
    with pytest.raises(UnsupportedTargetError, match=r"Unplaced takes chains only.*hint: draft a chain"):
        model.verify([VerifyRows(session, [1], Proposal((3, 4), (0, 0)))])
    model.verify([VerifyRows(session, [1], Proposal.chain((3, 4)))])
    session.keep(range(3))


def test_masks_of_chunks_are_no_windows() -> None:
    assert _windows(Llama4TextConfig(**SIZES, attention_chunk_size=8)) == {}
    mixed = {"full_attention": None, "sliding_attention": 7}
    assert {name: _windows(make(7)) for name, make in CONFIGS.items()} == {
        name: {"sliding_attention": 7} if name in ("mistral",) else mixed for name in CONFIGS
    }


@pytest.mark.parametrize("name", CONFIGS)
def test_the_native_runner_refuses_a_window(name: str, tmp_path: Path) -> None:
    model_of(CONFIGS[name](8)).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["sliding_window"] == 8
    reason = "sliding-window layers" if name.startswith(("mistral", "qwen")) else "architecture"
    with pytest.raises(UnsupportedTargetError, match=rf"does not do {reason}.*hint: backend='hf'"):
        NativeTarget.load(tmp_path, name=name, dtype=torch.float64, device=torch.device("cpu"))


RECURRENT: list[tuple[Callable[[], PretrainedConfig], str]] = [
    (lambda: Qwen3NextConfig(**SIZES, num_experts=2, num_experts_per_tok=1), "Qwen3NextForCausalLM"),
    (lambda: RecurrentGemmaConfig(**SIZES, lru_width=32), "RecurrentGemmaForCausalLM"),
]


@pytest.mark.parametrize(("make", "name"), RECURRENT, ids=[name for _, name in RECURRENT])
def test_layers_with_a_recurrent_state_are_refused_by_name(
    make: Callable[[], PretrainedConfig], name: str
) -> None:
    with pytest.raises(UnsupportedTargetError, match=rf"{name} keeps a recurrent state.*hint"):
        HFTarget(AutoModelForCausalLM.from_config(make()), name="tiny")
