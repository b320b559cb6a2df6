"""A recipe's `[drafter]` → the shape of a drafter for one target, and the drafter with its first weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoint.store import DrafterCheckpoint
from paceline.checkpoint.store import new_drafter as build_drafter
from paceline.core.errors import ConfigError
from paceline.drafter.base import NeuralDrafter
from paceline.drafter.config import (
    DFLASH2_FIELDS,
    DrafterConfig,
    Eagle3Config,
    NeuralConfig,
    default_target_layer_ids,
)
from paceline.drafter.dflash import DFlash
from paceline.drafter.dflash2 import DFlash2
from paceline.target.weights import Shape, read_tensors
from paceline.train.config import ShapeConfig, TrainConfig
from paceline.train.data.features import Document
from paceline.train.data.prefill import hidden_of
from paceline.train.initialise import initialise

WORK_DTYPE = torch.float32
NUM_LAYERS, BLOCK_SIZE = 5, 16
DFLASH2_DEFAULTS = dict(zip(DFLASH2_FIELDS, (2, 16, 64, 16), strict=True))
NUM_EAGLE3_TAPS = 3
NUM_SCALE_DOCUMENTS = 8
"""Documents whose hidden states set the scales of a new drafter's norms: a thousand rows or more."""


def drafter_config(recipe: TrainConfig, folder: Path) -> NeuralConfig:
    """Returns the shape of the drafter that a recipe wants for the target in `folder`.

    Raises:
        ConfigError: a value out of range, or a given drafter of another shape.
    """
    shape = recipe.drafter
    target = Shape.from_config(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    if shape.initial_drafter is not None:
        return _given_config(recipe, target, Path(shape.initial_drafter))
    num_layers = 1 if shape.algorithm == "eagle3" else shape.num_layers or NUM_LAYERS
    chosen = _initial_layers(shape, target.num_layers, num_layers)
    if len(chosen) != num_layers or not all(0 <= i < target.num_layers for i in chosen):
        raise ConfigError(
            f"drafter.initial_layers: expected {num_layers} of the target's layers 0…{target.num_layers - 1}, "
            f"got {list(chosen)}"
        )
    num_taps = NUM_EAGLE3_TAPS if shape.algorithm == "eagle3" else num_layers
    sizes: dict[str, Any] = {
        "block_size": shape.block_size or BLOCK_SIZE,
        "hidden_size": target.hidden_size,
        "num_heads": target.num_heads,
        "num_kv_heads": target.num_kv_heads,
        "head_dim": target.head_dim,
        "intermediate_size": target.intermediate_size,
        "vocab_size": target.vocab_size,
        "target_layer_ids": shape.target_layer_ids or default_target_layer_ids(target.num_layers, num_taps),
        "num_target_layers": target.num_layers,
        "rope_theta": target.rope_theta,
        "rms_norm_eps": target.rms_norm_eps,
        "max_positions": target.max_positions,
    }
    if shape.algorithm == "eagle3":
        return Eagle3Config(**sizes, draft_vocab_size=_draft_vocab_size(recipe, target.vocab_size))
    assert shape.mask_token_id is not None  # `ShapeConfig` sees to it
    return DrafterConfig(
        **sizes,
        num_layers=num_layers,
        mask_token_id=shape.mask_token_id,
        layer_types=_layer_types(shape, num_layers),
        sliding_window=shape.sliding_window,
        variant=shape.algorithm,
        **(_dflash2_sizes(shape) if shape.algorithm == "dflash2" else {}),
    )


def _draft_vocab_size(recipe: TrainConfig, vocab_size: int) -> int:
    return min(recipe.train.draft_vocab_size or vocab_size, vocab_size)


def _dflash2_sizes(shape: ShapeConfig) -> dict[str, Any]:
    said = {name: getattr(shape, name) for name in DFLASH2_FIELDS}
    return {name: DFLASH2_DEFAULTS[name] if value is None else value for name, value in said.items()}


def _layer_types(shape: ShapeConfig, num_layers: int) -> tuple[str, ...]:
    return shape.layer_types * num_layers if len(shape.layer_types) == 1 else shape.layer_types


def _initial_layers(shape: ShapeConfig, depth: int, num_layers: int) -> tuple[int, ...]:
    return shape.initial_layers or tuple(range(depth - num_layers, depth))


def algorithm_of(config: NeuralConfig) -> str:
    """Returns what a recipe calls drafters of this shape. Pure."""
    return config.variant if isinstance(config, DrafterConfig) else "eagle3"


def _given_config(recipe: TrainConfig, target: Shape, folder: Path) -> NeuralConfig:
    """Returns the shape of a drafter begun with the one in `folder`, which must be what recipe and target say."""
    shape, config = recipe.drafter, DrafterCheckpoint.load(folder).config
    if shape.algorithm == "dflash2" and isinstance(config, DrafterConfig) and config.variant == "dflash":
        config = replace(config, variant="dflash2", **_dflash2_sizes(shape))
    if algorithm_of(config) != shape.algorithm:
        raise ConfigError(
            f"drafter.initial_drafter {folder}: expected algorithm {shape.algorithm!r}, got {algorithm_of(config)!r}"
        )
    expected: dict[str, Any] = {
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "num_target_layers": target.num_layers,
        **{
            name: getattr(shape, name)
            for name in ("mask_token_id", "block_size", "sliding_window", *DFLASH2_FIELDS)
        },
        "target_layer_ids": shape.target_layer_ids,
        "draft_vocab_size": recipe.train.draft_vocab_size and _draft_vocab_size(recipe, target.vocab_size),
    }
    if isinstance(config, DrafterConfig):
        expected |= {"num_layers": shape.num_layers, "layer_types": _layer_types(shape, config.num_layers)}
    said = {
        name: value for name, value in expected.items() if value not in (None, ()) and hasattr(config, name)
    }
    found = {name: getattr(config, name) for name in said}
    wrong = [f"{n}: expected {said[n]}, got {found[n]}" for n in said if said[n] != found[n]]
    if wrong:
        raise ConfigError(
            f"drafter.initial_drafter {folder} does not fit recipe and target: {'; '.join(wrong)}"
        )
    return config


def new_drafter(
    recipe: TrainConfig, config: NeuralConfig, folder: Path, documents: Sequence[Document]
) -> NeuralDrafter:
    """Returns a float32 drafter for the target in `folder`: a given one, or one begun from the target's own layers."""
    shape = recipe.drafter
    torch.manual_seed(recipe.train.seed)
    if shape.initial_drafter is not None:
        given = DrafterCheckpoint.load(Path(shape.initial_drafter)).build(WORK_DTYPE)
        if isinstance(given, DFlash) and isinstance(config, DrafterConfig) and given.config != config:
            return DFlash2.from_dflash(given, config)
        return given
    drafter = build_drafter(config)
    num_layers = 1 if isinstance(config, Eagle3Config) else config.num_layers
    layers = _initial_layers(shape, config.num_target_layers, num_layers)
    rows = torch.cat([hidden[:-1] for hidden in hidden_of(documents[:NUM_SCALE_DOCUMENTS])])
    initialise(drafter, read_tensors(folder), layers, rows, recipe.train.seed)
    return drafter
