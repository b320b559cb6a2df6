"""A recipe: everything that decides what a training run does, read from TOML, strictly.

Unknown keys are refused, values are checked, and the resolved recipe is stored beside the weights.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline.core.errors import ConfigError
from paceline.core.tables import from_table

LOSSES = ("dpace", "exponential")


@dataclass(frozen=True, slots=True)
class SourceConfig:
    """One prompt file of `data.folder`; see `train.data.Source`."""

    file: str
    limit: int | None = None
    categories: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _at_least(1, "data.sources", self, "limit")


@dataclass(frozen=True, slots=True)
class DataConfig:
    """Where prompts come from.

    Args:
        folder: folder of the files; relative to the working folder.
        sources: files and how much of each.
        max_prompts: prompts kept after shuffling all sources together.
        max_prompt_tokens: longer prompts are left out.
        seed: key of the shuffles.
    """

    folder: str = "."
    sources: tuple[SourceConfig, ...] = ()
    max_prompts: int | None = None
    max_prompt_tokens: int = 512
    seed: int = 0

    def __post_init__(self) -> None:
        _at_least(1, "data", self, "max_prompts", "max_prompt_tokens")


@dataclass(frozen=True, slots=True)
class RegenerateConfig:
    """How the target answers; see `train.regenerate.RegenerateSettings`."""

    max_new_tokens: int = 200
    temperatures: tuple[float, ...] = (0.0,)
    num_sequences: int = 64
    prompts_per_shard: int = 512
    seed: int = 0

    def __post_init__(self) -> None:
        _at_least(1, "regenerate", self, "max_new_tokens", "num_sequences", "prompts_per_shard")
        if not self.temperatures or not all(0 <= t <= 100 for t in self.temperatures):
            raise ConfigError(
                f"regenerate.temperatures: expected numbers in 0…100, got {list(self.temperatures)}"
            )


@dataclass(frozen=True, slots=True)
class ShapeConfig:
    """The drafter to grow; what is not said is taken from the target.

    Args:
        mask_token_id: an unused row of the target's embedding.
        num_layers, block_size, target_layer_ids, layer_types, sliding_window: see `DrafterConfig`; one layer type
            stands for all layers.
        initial_layers: target layers whose weights the drafter's layers start from; the last ones when empty.
        initial_drafter: a drafter folder to start from instead.
    """

    mask_token_id: int
    num_layers: int = 5
    block_size: int = 16
    target_layer_ids: tuple[int, ...] = ()
    layer_types: tuple[str, ...] = ("full_attention",)
    sliding_window: int | None = None
    initial_layers: tuple[int, ...] = ()
    initial_drafter: str | None = None


@dataclass(frozen=True, slots=True)
class OptimConfig:
    """How it is trained.

    Args:
        max_steps: optimiser steps of the whole run.
        blocks_per_step: blocks of a step, at most `anchors_per_document` of one document.
        slots: slots per block, drawn anew each step; lengths below the block size need causal layers. Empty: always
            the block size.
        lr: peak learning rate of matrices (Muon) and norms (AdamW).
        warmup_steps, decay_steps: linear rise at the start, linear fall to zero at the end.
        muon_block_rows: rows orthogonalised together; `None` for whole matrices.
        weight_decay: of matrices, per unit of lr.
        clip_norm: longest gradient.
        loss: "dpace" or "exponential" position weights, with `dpace_alpha` or `decay`.
        draft_vocab_size: commonest response tokens that the loss scores; `None` for all.
        chunk_blocks: blocks whose logits exist at once.
        held_out_documents: documents never trained on, for τ while it trains.
        eval_every, save_every: steps between evaluations, between checkpoints.
        seed: key of all draws.
        dtype: of the drafter, its gradients and the optimiser's state: "float32" or "float64".
    """

    max_steps: int = 1000
    blocks_per_step: int = 128
    anchors_per_document: int = 32
    slots: tuple[int, ...] = ()
    lr: float = 1.5e-3
    warmup_steps: int = 20
    decay_steps: int = 200
    muon_block_rows: int | None = None
    weight_decay: float = 0.0
    clip_norm: float = 1.0
    loss: str = "dpace"
    dpace_alpha: float = 0.5
    decay: float = 4.0
    draft_vocab_size: int | None = None
    chunk_blocks: int = 64
    held_out_documents: int = 64
    eval_every: int = 100
    save_every: int = 100
    seed: int = 0
    dtype: str = "float32"

    def __post_init__(self) -> None:
        _at_least(1, "train", self, "max_steps", "blocks_per_step", "anchors_per_document", "chunk_blocks")
        _at_least(1, "train", self, "held_out_documents", "eval_every", "save_every", "muon_block_rows")
        _at_least(0, "train", self, "warmup_steps", "decay_steps", "weight_decay")
        for name in ("lr", "clip_norm", "decay"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"train.{name}: expected more than 0, got {getattr(self, name)}")
        if self.loss not in LOSSES:
            raise ConfigError(f"train.loss: expected one of {LOSSES}, got {self.loss!r}")
        if not 0 <= self.dpace_alpha <= 1:
            raise ConfigError(f"train.dpace_alpha: expected 0…1, got {self.dpace_alpha}")
        # no bfloat16: the weights are the master copy, and it would lose small steps
        if self.dtype not in ("float32", "float64"):
            raise ConfigError(f"train.dtype: expected float32 or float64, got {self.dtype!r}")


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """A whole recipe.

    Args:
        target: name, hub id, folder or GGUF file of the target.
        out: folder of features, checkpoints and curves.
    """

    drafter: ShapeConfig
    target: str = "smollm2-135m-instruct"
    out: str = "runs/drafter"
    data: DataConfig = field(default_factory=DataConfig)
    regenerate: RegenerateConfig = field(default_factory=RegenerateConfig)
    train: OptimConfig = field(default_factory=OptimConfig)

    @classmethod
    def from_toml(cls, path: Path, overrides: Sequence[str] = ()) -> TrainConfig:
        """Returns the recipe of a file with `section.key=value` overrides (values in TOML syntax, or bare strings).

        Raises:
            ConfigError: an unreadable file, an unknown key, a value of the wrong type or range.
        """
        try:
            raw = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"recipe {path}: cannot be read ({error.strerror})") from error
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"recipe {path}: not TOML ({error})") from error
        for override in overrides:
            _override(raw, override)
        config: TrainConfig = from_table(cls, raw, "recipe")
        return config

    def with_data(self, files: Sequence[Path]) -> TrainConfig:
        """Returns the recipe with these prompt files in place of its own sources."""
        sources = tuple(SourceConfig(str(file)) for file in files)
        return replace(self, data=replace(self.data, folder=".", sources=sources))

    def to_dict(self) -> dict[str, Any]:
        """Returns the recipe as JSON data."""
        return dataclasses.asdict(self)

    def portable(self) -> dict[str, Any]:
        """Returns the recipe as JSON data without the folders of this machine."""
        recipe = self.to_dict()
        del recipe["out"], recipe["data"]["folder"]
        return recipe

    @property
    def contract(self) -> str:
        """Digest of what a resumed run must share with the run it resumes.

        The length of the run may change, and prompts may be added: they come after those that were there.
        """
        fixed = self.portable()
        del fixed["data"]["max_prompts"]
        for free in ("max_steps", "decay_steps", "eval_every", "save_every"):
            del fixed["train"][free]
        return hashlib.sha256(json.dumps(fixed, sort_keys=True).encode()).hexdigest()


def _at_least(low: int, section: str, config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if value is not None and not value >= low:
            raise ConfigError(f"{section}.{name}: expected at least {low}, got {value}")


def _override(raw: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals:
        raise ConfigError(f"override {override!r}: expected section.key=value")
    try:
        value = tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        value = text
    *sections, last = key.split(".")
    for section in sections:
        raw = raw.setdefault(section, {})
        if not isinstance(raw, dict):
            raise ConfigError(f"override {override!r}: {section} is not a section")
    raw[last] = value
