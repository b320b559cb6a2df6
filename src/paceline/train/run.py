"""One recipe from prompts to weights: regenerate → train → checkpoint. Every stage resumes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoint.store import DrafterCheckpoint
from paceline.core.errors import ConfigError
from paceline.drafter.config import DrafterConfig, default_target_layer_ids
from paceline.drafter.dflash import DFlash
from paceline.engine.runtime import cache_dir, choose_device, machine
from paceline.llm import load_target
from paceline.target.base import Target
from paceline.target.pull import pull
from paceline.target.text import TextCodec
from paceline.target.weights import Shape, read_tensors
from paceline.train.config import ShapeConfig, TrainConfig
from paceline.train.curves import write_csv, write_png
from paceline.train.data import Prompt, Source, digest, load_prompts
from paceline.train.features import Document, read_shard
from paceline.train.initialise import initialise
from paceline.train.regenerate import RegenerateSettings, regenerate
from paceline.train.trainer import CurveRow, Progress, Trainer

WORK_DTYPE = torch.float32


@dataclass(frozen=True, slots=True)
class TrainEvent:
    """What an observer is told.

    Args:
        stage: "target", "regenerate" or "train".
        done, total: tokens' shards or steps.
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
) -> TrainResult:
    """Runs a recipe and returns its drafter.

    Shards and state found in `config.out` are continued; without `resume` a state found there is refused.

    Raises:
        ConfigError: a value that does not fit, or a folder that belongs to another recipe.
    """
    out = Path(config.out)
    if not resume and (out / "state.pt").exists():
        raise ConfigError(f"{out}: holds an earlier run; hint: another `out`, or resume it")
    folder = pull(config.target, cache_dir=cache_dir(), offline=offline)
    codec = TextCodec.load(folder)
    device = choose_device("auto")
    target, _ = load_target(folder, codec, name=config.target, dtype=WORK_DTYPE, device=device)
    prompts = _prompts(config, codec)
    drafter = new_drafter(config.drafter, folder, config.train.seed)
    documents = _regenerate(config, prompts, target, drafter.target_layer_ids, out, observe, should_stop)
    if should_stop():
        raise KeyboardInterrupt
    heads = target.heads
    drafter = drafter.to(device, getattr(torch, config.train.dtype))
    weights = heads.embed_weight.to(drafter.fc.weight.dtype), heads.head_weight.to(drafter.fc.weight.dtype)
    trainer = Trainer(drafter, *weights, documents, config.train, out, config.contract)
    trainer.resume()
    describe = _describer(config, target, prompts, documents)

    def on_step(progress: Progress) -> None:
        if progress.row is not None:
            write_outputs(trainer, out, describe)
        observe(TrainEvent("train", progress.step, progress.max_steps, progress))

    trainer.run(on_step, should_stop)
    write_outputs(trainer, out, describe)
    return TrainResult(out / "drafter", trainer.step >= config.train.max_steps, trainer.curve[-1])


def _prompts(config: TrainConfig, codec: TextCodec) -> list[Prompt]:
    if not config.data.sources:
        raise ConfigError("data.sources: expected at least one prompt file; hint: --data FILE.jsonl")
    folder = Path(config.data.folder)
    sources = [Source(folder / s.file, s.limit, s.categories) for s in config.data.sources]
    prompts = load_prompts(
        sources, codec.render_chat, max_tokens=config.data.max_prompt_tokens, seed=config.data.seed
    )
    return prompts[: config.data.max_prompts]


def new_drafter(shape: ShapeConfig, folder: Path, seed: int) -> DFlash:
    """Returns a float32 drafter for the target in `folder`: a given one, or one begun from the target's own layers."""
    if shape.initial_drafter is not None:
        return DrafterCheckpoint.load(Path(shape.initial_drafter)).build(WORK_DTYPE)
    spec = Shape.from_config(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    layers = shape.num_layers
    config = DrafterConfig(
        block_size=shape.block_size,
        hidden_size=spec.hidden_size,
        num_layers=layers,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        intermediate_size=spec.intermediate_size,
        vocab_size=spec.vocab_size,
        target_layer_ids=shape.target_layer_ids or default_target_layer_ids(spec.num_layers, layers),
        num_target_layers=spec.num_layers,
        mask_token_id=shape.mask_token_id,
        layer_types=shape.layer_types * layers if len(shape.layer_types) == 1 else shape.layer_types,
        sliding_window=shape.sliding_window,
        rope_theta=spec.rope_theta,
        rms_norm_eps=spec.rms_norm_eps,
        max_positions=spec.max_positions,
    )
    torch.manual_seed(seed)
    drafter = DFlash(config)
    chosen = shape.initial_layers or tuple(range(spec.num_layers - layers, spec.num_layers))
    if len(chosen) != layers or not all(0 <= i < spec.num_layers for i in chosen):
        raise ConfigError(
            f"drafter.initial_layers: expected {layers} layers of the target, got {list(chosen)}"
        )
    initialise(drafter, read_tensors(folder), chosen, seed)
    return drafter


def _regenerate(
    config: TrainConfig,
    prompts: list[Prompt],
    target: Target,
    target_layer_ids: tuple[int, ...],
    out: Path,
    observe: Observe,
    should_stop: Callable[[], bool],
) -> list[Document]:
    made = config.regenerate
    settings = RegenerateSettings(
        max_new_tokens=made.max_new_tokens,
        temperatures=made.temperatures,
        num_sequences=made.num_sequences,
        prompts_per_shard=made.prompts_per_shard,
        seed=made.seed,
    )
    total, done = -(-len(prompts) // settings.prompts_per_shard), 0

    def on_tokens(count: int) -> None:
        observe(TrainEvent("regenerate", done, total, count))
        if should_stop():
            raise KeyboardInterrupt

    documents: list[Document] = []
    for path in regenerate(prompts, target, target_layer_ids, out / "features", settings, on_tokens):
        documents += read_shard(path)[0]
        done += 1
        observe(TrainEvent("regenerate", done, total))
    return documents


Describe = Callable[[Trainer], dict[str, Any]]


def _describer(
    config: TrainConfig, target: Target, prompts: list[Prompt], documents: list[Document]
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
            "target": target.spec.name,
            "tokenizer_digest": target.spec.tokenizer_digest,
            "recipe": config.to_dict(),
            "data": data,
            "num_steps": trainer.step,
            "num_blocks": trainer.num_blocks,
            "train_seconds": round(trainer.seconds),
            "machine": machine(),
            "held_out": {
                "acceptance_length": trainer.curve[-1].acceptance_length,
                "slot_accuracy": list(trainer.curve[-1].slot_accuracy),
            },
        }

    return describe


def write_outputs(trainer: Trainer, out: Path, describe: Describe) -> None:
    """Writes the drafter in bfloat16 with its provenance, and the curve as CSV, JSON and PNG."""
    DrafterCheckpoint.of(trainer.drafter, torch.bfloat16, describe(trainer)).save(out / "drafter")
    write_csv(trainer.curve, out / "curve.csv")
    write_png(trainer.curve, out / "curve.png")
