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
from paceline.core.params import MAX_LOGPROBS
from paceline.core.tables import from_table
from paceline.drafter.config import DFLASH2_FIELDS

ALGORITHMS = ("dflash", "dflash2", "eagle3")
FOREIGN_KEYS = {
    "dflash": DFLASH2_FIELDS,
    "dflash2": (),
    "eagle3": ("mask_token_id", "layer_types", "sliding_window", *DFLASH2_FIELDS),
}
"""Keys of `drafter` that an algorithm does not have."""
LOSSES = ("dpace", "exponential", "uniform")
LABELS = ("tokens", "distribution")
PARTS = ("all", "selector")
ANSWERS, FEATURES = ("regenerate", "given"), ("cached", "online")


@dataclass(frozen=True, slots=True)
class SourceConfig:
    """One prompt file of `data.folder`; see `train.data.prompts.Source`."""

    file: str
    limit: int | None = None
    categories: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _at_least(1, "data.sources", self, "limit")


@dataclass(frozen=True, slots=True)
class DataConfig:
    """What is learnt from.

    Args:
        folder: folder of the files; relative to the working folder.
        sources: files and how much of each.
        max_prompts: prompts kept after shuffling all sources together.
        max_prompt_tokens: longer prompts are left out.
        seed: key of the shuffles.
        answers: "regenerate" lets the target answer; "given" takes answers that the target wrote earlier.
        allow_foreign: take given answers even where the target hardly wrote them.
        features: "cached" keeps hidden states on disk, "online" computes them whenever they are asked for.
        max_cache_bytes: most bytes that `out` may take for answers and hidden states; `None` for what the disk has.
        shard_target: spread the target over the processes of the run, for one that does not fit a single device;
            with online features.
    """

    folder: str = "."
    sources: tuple[SourceConfig, ...] = ()
    max_prompts: int | None = None
    max_prompt_tokens: int = 512
    seed: int = 0
    answers: str = "regenerate"
    allow_foreign: bool = False
    features: str = "cached"
    max_cache_bytes: int | None = None
    shard_target: bool = False

    def __post_init__(self) -> None:
        _at_least(1, "data", self, "max_prompts", "max_prompt_tokens", "max_cache_bytes")
        if self.answers not in ANSWERS:
            raise ConfigError(f"data.answers: expected one of {ANSWERS}, got {self.answers!r}")
        if self.features not in FEATURES:
            raise ConfigError(f"data.features: expected one of {FEATURES}, got {self.features!r}")
        if self.shard_target and self.features != "online":
            raise ConfigError(
                f"data.shard_target: expected data.features = 'online' with it, got {self.features!r}"
            )
        if self.allow_foreign and self.answers != "given":
            raise ConfigError(
                f"data.allow_foreign: expected data.answers = 'given' with it, got {self.answers!r}"
            )


@dataclass(frozen=True, slots=True)
class RegenerateConfig:
    """How the target answers; see `train.data.regenerate.RegenerateSettings`."""

    max_new_tokens: int = 200
    temperatures: tuple[float, ...] = (0.0,)
    num_sequences: int = 64
    prompts_per_shard: int = 512
    seed: int = 0
    top_log_probs: int = 0

    def __post_init__(self) -> None:
        _at_least(1, "regenerate", self, "max_new_tokens", "num_sequences", "prompts_per_shard")
        if not 0 <= self.top_log_probs <= MAX_LOGPROBS:
            raise ConfigError(
                f"regenerate.top_log_probs: expected 0…{MAX_LOGPROBS}, got {self.top_log_probs}"
            )
        if not self.temperatures or not all(0 <= t <= 100 for t in self.temperatures):
            raise ConfigError(
                f"regenerate.temperatures: expected numbers in 0…100, got {list(self.temperatures)}"
            )


@dataclass(frozen=True, slots=True)
class ShapeConfig:
    """The drafter to grow; what is not said comes from `initial_drafter`, else from the target and the defaults.

    Args:
        algorithm: "dflash" (a block in one pass), "dflash2" (with convolutions and a selector) or "eagle3" (token by
            token, one layer, a head of its own).
        mask_token_id: an unused row of the target's embedding; eagle3 has none.
        num_layers, block_size: 5 and 16; eagle3 has one layer, and block_size is its most steps plus one.
        target_layer_ids: tapped layers; spread evenly when empty.
        layer_types, sliding_window: see `DrafterConfig`; one layer type stands for all layers.
        conv_kernel_size, conv_group_size, selector_rank, selector_top_k: of dflash2; 2, 16, 64, 16.
        initial_layers: target layers whose weights the drafter's layers start from; the last ones when empty.
        initial_drafter: a drafter folder to start from instead; dflash2 may start from a dflash one.
    """

    algorithm: str = "dflash"
    mask_token_id: int | None = None
    num_layers: int | None = None
    block_size: int | None = None
    target_layer_ids: tuple[int, ...] = ()
    layer_types: tuple[str, ...] = ()
    sliding_window: int | None = None
    conv_kernel_size: int | None = None
    conv_group_size: int | None = None
    selector_rank: int | None = None
    selector_top_k: int | None = None
    initial_layers: tuple[int, ...] = ()
    initial_drafter: str | None = None

    def __post_init__(self) -> None:
        if self.algorithm not in ALGORITHMS:
            raise ConfigError(f"drafter.algorithm: expected one of {ALGORITHMS}, got {self.algorithm!r}")
        _at_least(1, "drafter", self, "num_layers", *DFLASH2_FIELDS)
        _at_least(2, "drafter", self, "block_size")
        for name in FOREIGN_KEYS[self.algorithm]:
            if getattr(self, name) not in (None, ()):
                raise ConfigError(
                    f"drafter.{name}: expected none with algorithm {self.algorithm!r}, got {getattr(self, name)!r}"
                )
        if self.algorithm == "eagle3" and self.num_layers not in (None, 1):
            raise ConfigError(
                f"drafter.num_layers: expected 1 with algorithm 'eagle3', got {self.num_layers}"
            )
        if self.algorithm != "eagle3" and self.mask_token_id is None and self.initial_drafter is None:
            raise ConfigError(
                f"drafter.mask_token_id: expected an unused token id with algorithm {self.algorithm!r}, got none"
            )


@dataclass(frozen=True, slots=True)
class OptimConfig:
    """How it is trained.

    Args:
        max_steps: optimiser steps of the whole run.
        blocks_per_step: blocks of a step, at most `anchors_per_document` of one document.
        accumulation_steps: parts into which a step's documents are split to save memory; the step stays the same but
            for rounding.
        slots: slots per block, drawn anew each step; lengths below the block size need causal layers. Empty: always
            the block size.
        lr: peak learning rate of matrices (Muon) and norms (AdamW).
        warmup_steps, decay_steps: linear rise at the start, linear fall to zero at the end.
        muon_block_rows: rows orthogonalised together; `None` for whole matrices.
        weight_decay: of matrices, per unit of lr.
        clip_norm: longest gradient.
        loss: position weights: "dpace" (with `dpace_alpha`), "exponential" (with `decay`) or "uniform".
        labels: "tokens" (what the target said) or "distribution" (also what else it might have said: needs
            `regenerate.top_log_probs`).
        selector_weight: share of the candidate selector's loss; of dflash2.
        parts: "all", or of dflash2 "selector": its block stays what it is, so steps cost half.
        draft_vocab_size: commonest response tokens that the loss scores; `None` for all.
        chunk_blocks: blocks whose logits exist at once.
        held_out_documents: documents never trained on, for τ while it trains.
        eval_every, save_every: steps between evaluations, between checkpoints.
        patience: evaluations in a row without a better held-out τ after which training ends early; `None` never. With
            or without it, the weights of the best evaluation are those that are kept.
        seed: key of all draws.
        dtype: of the drafter, its gradients and the optimiser's state: "float32" or "float64".
        compute_dtype: "bfloat16" multiplies matrices in bfloat16 and keeps the rest in `dtype`; "" is `dtype`.
    """

    max_steps: int = 1000
    blocks_per_step: int = 128
    accumulation_steps: int = 1
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
    labels: str = "tokens"
    selector_weight: float = 1.0
    parts: str = "all"
    draft_vocab_size: int | None = None
    chunk_blocks: int = 64
    held_out_documents: int = 64
    eval_every: int = 100
    save_every: int = 100
    patience: int | None = None
    seed: int = 0
    dtype: str = "float32"
    compute_dtype: str = ""

    def __post_init__(self) -> None:
        _at_least(1, "train", self, "max_steps", "blocks_per_step", "anchors_per_document", "chunk_blocks")
        _at_least(1, "train", self, "held_out_documents", "eval_every", "save_every", "muon_block_rows")
        _at_least(1, "train", self, "accumulation_steps", "patience")
        _at_least(0, "train", self, "warmup_steps", "decay_steps", "weight_decay")
        for name in ("lr", "clip_norm", "decay"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"train.{name}: expected more than 0, got {getattr(self, name)}")
        choices = {"loss": LOSSES, "labels": LABELS, "parts": PARTS, "compute_dtype": ("", "bfloat16")}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ConfigError(f"train.{name}: expected one of {allowed}, got {getattr(self, name)!r}")
        if not 0 <= self.selector_weight < math.inf:
            raise ConfigError(f"train.selector_weight: expected at least 0, got {self.selector_weight}")
        documents = -(-self.blocks_per_step // self.anchors_per_document)
        if self.accumulation_steps > documents:
            raise ConfigError(
                f"train.accumulation_steps: expected at most {documents}, the documents of a step "
                f"(blocks_per_step / anchors_per_document), got {self.accumulation_steps}"
            )
        if not 0 <= self.dpace_alpha <= 1:
            raise ConfigError(f"train.dpace_alpha: expected 0…1, got {self.dpace_alpha}")
        # no bfloat16: the weights are the master copy, and it would lose small steps
        if self.dtype not in ("float32", "float64"):
            raise ConfigError(f"train.dtype: expected float32 or float64, got {self.dtype!r}")
        if self.compute_dtype and self.dtype != "float32":
            raise ConfigError(
                f"train.compute_dtype: {self.compute_dtype!r} needs dtype 'float32', got {self.dtype!r}"
            )


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

    def __post_init__(self) -> None:
        algorithm, train = self.drafter.algorithm, self.train
        if algorithm != "dflash2" and train.selector_weight != OptimConfig().selector_weight:
            raise ConfigError(
                f"train.selector_weight: expected none with algorithm {algorithm!r}, which has no selector, "
                f"got {train.selector_weight}"
            )
        if algorithm != "dflash2" and train.parts == "selector":
            raise ConfigError(f"train.parts: expected 'all' with algorithm {algorithm!r}, got 'selector'")
        if train.labels == "distribution" and self.regenerate.top_log_probs == 0:
            raise ConfigError(
                "regenerate.top_log_probs: expected at least 1 with train.labels 'distribution', got 0"
            )

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
        if self.drafter.initial_drafter is not None:
            recipe["drafter"]["initial_drafter"] = Path(self.drafter.initial_drafter).name
        return recipe

    @property
    def contract(self) -> str:
        """Digest of what a resumed run must share with the run it resumes.

        The length of the run may change, and prompts may be added: they come after those that were there.
        """
        fixed = self.portable()
        for free in ("max_prompts", "features", "max_cache_bytes", "shard_target"):
            del fixed["data"][free]
        for free in ("max_steps", "decay_steps", "eval_every", "save_every", "patience"):
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
