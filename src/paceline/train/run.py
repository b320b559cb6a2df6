"""One recipe from prompts to weights: regenerate → train → checkpoint. Every stage resumes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoint.store import DrafterCheckpoint
from paceline.core.errors import ConfigError
from paceline.drafter.config import DrafterConfig, default_target_layer_ids
from paceline.drafter.dflash import DFlash
from paceline.engine.runtime import cache_dir, choose_device, machine
from paceline.llm import load_target
from paceline.target.base import Target, TargetSpec
from paceline.target.pull import pull
from paceline.target.text import TextCodec
from paceline.target.weights import Shape, read_tensors
from paceline.train.config import ShapeConfig, TrainConfig
from paceline.train.curves import write_csv, write_png
from paceline.train.data import Prompt, Source, digest, load_prompts
from paceline.train.features import Document, read_shard
from paceline.train.initialise import initialise
from paceline.train.regenerate import RegenerateSettings, regenerate
from paceline.train.trainer import STATE, CurveRow, Progress, Trainer, check_fit

WORK_DTYPE = torch.float32
NUM_SCALE_DOCUMENTS = 8
"""Documents whose hidden states set the scales of a new drafter's norms: a thousand rows or more."""


@dataclass(frozen=True, slots=True)
class TrainEvent:
    """What an observer is told.

    Args:
        stage: "regenerate" or "train".
        done, total: shards, or steps.
        detail: new tokens decoded, or the step's progress.
    """

    stage: str
    done: int
    total: int
    detail: int | Progress | None = None


@dataclass(frozen=True, slots=True)
class TrainResult:
    """What a run came to.

    Args:
        folder: the drafter's folder.
        finished: whether all steps were made.
        row: the last evaluation.
    """

    folder: Path
    finished: bool
    row: CurveRow


Observe = Callable[[TrainEvent], None]


def train(
    config: TrainConfig,
    *,
    observe: Observe = lambda _: None,
    should_stop: Callable[[], bool] = lambda: False,
    resume: bool = True,
    offline: bool = False,
    target_folder: Path | None = None,
) -> TrainResult:
    """Runs a recipe and returns its drafter.

    Shards and state found in `config.out` are continued; without `resume` a state found there is refused.

    Args:
        should_stop: asked after every step; then training ends with state and drafter written.
        target_folder: where the target lies, if it need not be pulled by its name.

    Raises:
        ConfigError: a value that does not fit, or a folder that belongs to another recipe.
        KeyboardInterrupt: asked to stop while the target still answered; whole shards stay.
    """
    out = Path(config.out)
    if not resume and (out / STATE).exists():
        raise ConfigError(f"{out}: holds an earlier run; hint: another `out`, or resume it")
    folder = target_folder or pull(config.target, cache_dir=cache_dir(), offline=offline)
    codec = TextCodec.load(folder)
    prompts = _prompts(config, codec)
    shape = drafter_config(config.drafter, folder)
    check_fit(config.train, shape, len(prompts))  # now, not after hours of answers
    device = choose_device("auto")
    target, _ = load_target(folder, codec, name=config.target, dtype=WORK_DTYPE, device=device)
    documents = _regenerate(config, prompts, target, shape.target_layer_ids, out, observe, should_stop)
    drafter = new_drafter(config.drafter, shape, folder, documents, config.train.seed)
    drafter = drafter.to(device, getattr(torch, config.train.dtype))
    spec, heads = target.spec, target.heads
    weights = heads.embed_weight.to(drafter.fc.weight.dtype), heads.head_weight.to(drafter.fc.weight.dtype)
    del target, heads  # and with them the K/V of all sequences
    trainer = Trainer(drafter, *weights, documents, config.train, out, config.contract)
    trainer.resume()
    describe = _describer(config, spec, prompts, documents)

    def on_step(progress: Progress) -> None:
        if progress.row is not None and progress.step < progress.max_steps:  # the last are written below
            write_outputs(trainer, out, describe)
        observe(TrainEvent("train", progress.step, progress.max_steps, progress))

    trainer.run(on_step, should_stop)
    write_outputs(trainer, out, describe)
    return TrainResult(out / "drafter", trainer.step >= config.train.max_steps, trainer.curve[-1])


def _prompts(config: TrainConfig, codec: TextCodec) -> list[Prompt]:
    data, folder = config.data, Path(config.data.folder)
    if not data.sources:
        raise ConfigError("data.sources: expected at least one prompt file; hint: --data FILE.jsonl")
    if not folder.is_dir():
        raise ConfigError(
            f"data.folder: {folder} is not there; hint: --data FILE.jsonl trains on your own prompts, "
            "--set data.folder=FOLDER says where the recipe's files are"
        )
    sources = [Source(folder / s.file, s.limit, s.categories) for s in data.sources]
    prompts = load_prompts(sources, codec.render_chat, max_tokens=data.max_prompt_tokens, seed=data.seed)
    return prompts[: data.max_prompts]


def drafter_config(shape: ShapeConfig, folder: Path) -> DrafterConfig:
    """Returns the config of the drafter that a recipe wants for the target in `folder`.

    Raises:
        ConfigError: a value out of range, or a given drafter of another shape.
    """
    spec = Shape.from_config(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    if shape.initial_drafter is not None:
        return _given_config(shape, spec, Path(shape.initial_drafter))
    chosen = _initial_layers(shape, spec.num_layers)
    if len(chosen) != shape.num_layers or not all(0 <= i < spec.num_layers for i in chosen):
        raise ConfigError(
            f"drafter.initial_layers: expected {shape.num_layers} of the target's layers 0…{spec.num_layers - 1}, "
            f"got {list(chosen)}"
        )
    return DrafterConfig(
        block_size=shape.block_size,
        hidden_size=spec.hidden_size,
        num_layers=shape.num_layers,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        intermediate_size=spec.intermediate_size,
        vocab_size=spec.vocab_size,
        target_layer_ids=shape.target_layer_ids
        or default_target_layer_ids(spec.num_layers, shape.num_layers),
        num_target_layers=spec.num_layers,
        mask_token_id=shape.mask_token_id,
        layer_types=_layer_types(shape),
        sliding_window=shape.sliding_window,
        rope_theta=spec.rope_theta,
        rms_norm_eps=spec.rms_norm_eps,
        max_positions=spec.max_positions,
    )


def new_drafter(
    shape: ShapeConfig, config: DrafterConfig, folder: Path, documents: list[Document], seed: int
) -> DFlash:
    """Returns a float32 drafter for the target in `folder`: a given one, or one begun from the target's own layers."""
    if shape.initial_drafter is not None:
        return DrafterCheckpoint.load(Path(shape.initial_drafter)).build(WORK_DTYPE)
    torch.manual_seed(seed)
    drafter = DFlash(config)
    rows = torch.cat([d.hidden[:-1] for d in documents[:NUM_SCALE_DOCUMENTS]])
    initialise(drafter, read_tensors(folder), _initial_layers(shape, config.num_target_layers), rows, seed)
    return drafter


def _initial_layers(shape: ShapeConfig, depth: int) -> tuple[int, ...]:
    return shape.initial_layers or tuple(range(depth - shape.num_layers, depth))


def _given_config(shape: ShapeConfig, spec: Shape, folder: Path) -> DrafterConfig:
    """Returns the config of the drafter in `folder`, which must be what recipe and target say."""
    config = DrafterCheckpoint.load(folder).config
    expected = {
        "hidden_size": spec.hidden_size,
        "vocab_size": spec.vocab_size,
        "num_target_layers": spec.num_layers,
        "mask_token_id": shape.mask_token_id,
        "num_layers": shape.num_layers,
        "block_size": shape.block_size,
        "target_layer_ids": shape.target_layer_ids or config.target_layer_ids,
        "layer_types": _layer_types(shape),
        "sliding_window": shape.sliding_window,
    }
    found = {name: getattr(config, name) for name in expected}
    wrong = [f"{n}: expected {expected[n]}, got {found[n]}" for n in expected if expected[n] != found[n]]
    if wrong:
        raise ConfigError(
            f"drafter.initial_drafter {folder} does not fit recipe and target: {'; '.join(wrong)}"
        )
    return config


def _layer_types(shape: ShapeConfig) -> tuple[str, ...]:
    return shape.layer_types * shape.num_layers if len(shape.layer_types) == 1 else shape.layer_types


def _regenerate(
    config: TrainConfig,
    prompts: list[Prompt],
    target: Target,
    target_layer_ids: tuple[int, ...],
    out: Path,
    observe: Observe,
    should_stop: Callable[[], bool],
) -> list[Document]:
    settings = RegenerateSettings(**asdict(config.regenerate))
    longest, limit = max(len(p.token_ids) for p in prompts), target.spec.max_positions
    if longest + settings.max_new_tokens > limit:
        raise ConfigError(
            f"a prompt of {longest} tokens and regenerate.max_new_tokens {settings.max_new_tokens} exceed the "
            f"{limit} positions of {target.spec.name}; hint: a smaller data.max_prompt_tokens"
        )
    total, done = -(-len(prompts) // settings.prompts_per_shard), 0

    def tell(count: int | None) -> None:
        observe(TrainEvent("regenerate", done, total, count))
        if should_stop():
            raise KeyboardInterrupt

    documents: list[Document] = []
    for path in regenerate(prompts, target, target_layer_ids, out / "features", settings, tell):
        documents += read_shard(path)[0]
        done += 1
        tell(None)
    return documents


Describe = Callable[[Trainer], dict[str, Any]]


def _describer(
    config: TrainConfig, spec: TargetSpec, prompts: list[Prompt], documents: list[Document]
) -> Describe:
    responses = hashlib.sha256()
    for document in documents:
        responses.update(document.token_ids.int().numpy().tobytes())
    data = {
        "prompts": digest(prompts),
        "responses": responses.hexdigest(),
        "num_documents": len(documents),
        "num_response_tokens": sum(len(d.token_ids) - d.num_prompt_tokens for d in documents),
    }

    def describe(trainer: Trainer) -> dict[str, Any]:
        return {
            "target": spec.name,
            "tokenizer_digest": spec.tokenizer_digest,
            "recipe": config.portable(),
            "data": data,
            "num_steps": trainer.step,
            "num_blocks": trainer.num_blocks,
            "train_seconds": round(trainer.seconds),
            "machine": machine(),
            "held_out": {
                "step": trainer.curve[-1].step,
                "acceptance_length": trainer.curve[-1].acceptance_length,
                "slot_accuracy": list(trainer.curve[-1].slot_accuracy),
            },
        }

    return describe


def write_outputs(trainer: Trainer, out: Path, describe: Describe) -> None:
    """Writes the drafter in bfloat16 with its provenance, and the curve as CSV and PNG."""
    DrafterCheckpoint.of(trainer.drafter, torch.bfloat16, describe(trainer), trainer.token_ids).save(
        out / "drafter"
    )
    write_csv(trainer.curve, out / "curve.csv")
    write_png(trainer.curve, out / "curve.png")
