"""The same numbers as z-lab's own `dflash` package: weights through a checkpoint, growing contexts, whole texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from dflash.model import (
    DFlash2DraftModel,
    DFlashDraftModel,
    _crop_to,
    _make_cache,
    build_target_layer_ids,
    dflash_generate,
    extract_context_feature,
)
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.checkpoint.store import DrafterCheckpoint
from paceline.core.params import SamplingParams
from paceline.core.types import Request
from paceline.drafter.config import FULL, SLIDING, default_target_layer_ids, to_hidden_states_index
from paceline.drafter.dflash import DFlash
from paceline.drafter.dflash2 import DFlash2
from paceline.engine.engine import Engine
from paceline.target.native import NativeTarget
from paceline.testing import plain_texts, run_checked, tiny_drafter, tiny_shape, tiny_target, tiny_tensors

BLOCK = 6
TOLERANCE = (
    2e-5  # of logits around 3; in float64 too, since z-lab's norms and angles are float32 whatever the dtype
)
GROWTH = [9, 1, 3, 6, 2, 1, 5]  # rows that each step adds, the prompt first
VARIANTS: dict[str, dict[str, Any]] = {
    "full": {},
    "full, causal": {"is_causal": True},
    "sliding 5": {"layer_types": (SLIDING, SLIDING), "sliding_window": 5},
    "sliding 3, not causal": {"layer_types": (SLIDING, SLIDING), "sliding_window": 3, "is_causal": False},
    "sliding 4, then full": {"layer_types": (SLIDING, FULL), "sliding_window": 4},
    "full, then sliding 4, causal": {
        "layer_types": (FULL, SLIDING),
        "sliding_window": 4,
        "is_causal": True,
    },
    "sliding 2048": {"layer_types": (SLIDING, SLIDING), "sliding_window": 2048},
    "one layer, three taps": {"layer_types": (FULL,), "target_layer_ids": (0, 2, 4)},
    "dflash 2": {"variant": "dflash2"},
    "dflash 2, sliding 5": {
        "variant": "dflash2",
        "layer_types": (SLIDING, SLIDING),
        "sliding_window": 5,
    },
    "dflash 2, sliding 3, not causal": {
        "variant": "dflash2",
        "layer_types": (SLIDING, SLIDING),
        "sliding_window": 3,
        "is_causal": False,
    },
}


def reference(drafter: DFlash, folder: Path) -> DFlashDraftModel:
    """Returns z-lab's model with the drafter's weights, handed over on disk; every tensor must find its place."""
    DrafterCheckpoint.of(drafter, drafter.fc.weight.dtype, {}).save(folder)
    kind = DFlash2DraftModel if isinstance(drafter, DFlash2) else DFlashDraftModel
    model, info = kind.from_pretrained(folder, dtype=drafter.fc.weight.dtype, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert (model.block_size, model.mask_token_id) == (drafter.block_size, drafter.config.mask_token_id)
    assert tuple(model.target_layer_ids) == drafter.target_layer_ids
    return model.eval()


@torch.inference_mode()
def reference_states(
    model: DFlashDraftModel, cache: Any, target: NativeTarget, rows: torch.Tensor, start: int, anchor: int
) -> torch.Tensor:
    """Returns states (K, D) of z-lab's block behind `start` committed tokens, `rows` of them new, as its loop does."""
    ids = torch.tensor([[anchor] + [model.mask_token_id] * (BLOCK - 1)])
    positions = torch.arange(start - len(rows), start + BLOCK)[None]
    states: torch.Tensor = model(
        target_hidden=rows[None],
        noise_embedding=target.heads.embed(ids),
        position_ids=positions,
        past_key_values=cache,
        use_cache=True,
    )
    _crop_to(cache, start)
    return states[0, 1:]


@torch.inference_mode()
def reference_path(
    model: DFlashDraftModel, states: torch.Tensor, logits: torch.Tensor, anchor: int
) -> list[int]:
    """Returns the tokens that z-lab's package makes of a block."""
    path = logits.argmax(dim=-1)
    if isinstance(model, DFlash2DraftModel):
        path = model.candidate_selector.select(states[None], logits[None], torch.tensor([anchor]), 0.0)[0][0]
    return list(map(int, path))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_drafts_are_zlabs_at_every_step(variant: str, dtype: torch.dtype, tmp_path: Path) -> None:
    target = tiny_target(num_layers=5, dtype=dtype)
    drafter = tiny_drafter(target, BLOCK, **VARIANTS[variant])
    model = reference(drafter, tmp_path / "drafter")
    cache, context = _make_cache(model.config), drafter.open(sum(GROWTH))
    width = len(drafter.target_layer_ids) * target.spec.hidden_size
    rng = torch.Generator().manual_seed(3)
    for step, num_rows in enumerate(GROWTH):
        rows = torch.randn(num_rows, width, generator=rng, dtype=torch.float64).to(dtype)
        drafter.inject([context], [rows])
        anchor = 7 * step % target.spec.vocab_size
        states = reference_states(model, cache, target, rows, context.length, anchor)
        expected = target.heads.lm_head(states)
        got = drafter.draft_logits([anchor], [context], BLOCK - 1)[0]
        torch.testing.assert_close(got, expected, rtol=0, atol=TOLERANCE)
        (proposal,) = drafter.draft([anchor], [context], BLOCK - 1)
        assert list(proposal.tokens) == reference_path(model, states, expected, anchor)


VOCAB, NUM_NEW = 7, 40  # so few tokens that a random drafter is often right


def transformers_model(target_seed: int) -> LlamaForCausalLM:
    shape = tiny_shape(vocab_size=VOCAB, num_layers=5)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        rms_norm_eps=shape.rms_norm_eps,
        max_position_embeddings=shape.max_positions,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=2,
    )
    model: LlamaForCausalLM = LlamaForCausalLM(config).double().eval()
    model.load_state_dict(tiny_tensors(shape, target_seed))
    return model


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")  # z-lab passes it
@pytest.mark.parametrize(
    ("variant", "seeds"),
    [
        ("full", (0, 1, 2)),
        ("sliding 5", (0, 1, 2)),
        ("sliding 4, then full", (0, 1, 2)),
        ("dflash 2", (3, 6, 7)),
        ("dflash 2, sliding 5", (6, 7)),
    ],
)
def test_whole_texts_take_the_same_rounds(variant: str, seeds: tuple[int, ...], tmp_path: Path) -> None:
    """z-lab's generation loop on transformers' model, our engine on the native target."""
    num_accepted = 0
    for seed in seeds:
        target = tiny_target(seed, vocab_size=VOCAB, num_layers=5)
        drafter = tiny_drafter(target, BLOCK, seed=seed, **VARIANTS[variant])
        prompt = [3, 1, 5, 4, 6, 0, 2, 3]
        request = Request("text", tuple(prompt), SamplingParams(NUM_NEW, ignore_eos=True))
        model, kept = reference(drafter, tmp_path / str(seed)), Kept()
        output = dflash_generate(
            kept.watching(model),
            transformers_model(seed),
            torch.tensor([prompt]),
            max_new_tokens=NUM_NEW,
            stop_token_ids=None,
        )
        ours = run_checked(Engine(target, drafter), [request])["text"]
        assert ours.token_ids == tuple(output[0, len(prompt) :].tolist())
        assert ours.token_ids == plain_texts(target, [request])[0].token_ids
        starts = [step.position - 1 for step in ours.steps]
        end = len(prompt) + NUM_NEW
        whole_blocks = [start for start in starts if start + BLOCK <= end]  # z-lab shortens those at the end
        assert kept.starts[: len(whole_blocks)] == whole_blocks
        num_accepted += sum(step.num_accepted for step in ours.steps)
    assert num_accepted > 10, "a comparison without accepted drafts would say little"


class Kept:
    """Notes at which lengths a z-lab model was asked to draft."""

    def __init__(self) -> None:
        self.starts: list[int] = []

    def watching(self, model: DFlashDraftModel) -> DFlashDraftModel:
        model.register_forward_pre_hook(self._note, with_kwargs=True)
        return model

    def _note(self, model: DFlashDraftModel, args: Any, kwargs: dict[str, Any]) -> None:
        self.starts.append(int(kwargs["position_ids"][0, -kwargs["noise_embedding"].shape[1]]))


@pytest.mark.parametrize("num_target_layers", [4, 24, 28, 30, 36, 48, 64])
@pytest.mark.parametrize("num_taps", [1, 2, 3, 5])
def test_default_taps_are_zlabs(num_target_layers: int, num_taps: int) -> None:
    expected = build_target_layer_ids(num_target_layers, num_taps)
    assert default_target_layer_ids(num_target_layers, num_taps) == tuple(dict.fromkeys(expected))


def test_layer_ids_mean_the_same_rows() -> None:
    states = [torch.full((1, 2, 3), float(index)) for index in range(6)]
    rows = extract_context_feature(states, [0, 3])
    assert rows[0, 0].tolist() == [to_hidden_states_index(0)] * 3 + [to_hidden_states_index(3)] * 3
