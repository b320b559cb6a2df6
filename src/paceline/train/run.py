"""One recipe from prompts to weights: answers → training → checkpoint. Every stage resumes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from paceline.checkpoint.store import DrafterCheckpoint
from paceline.core.errors import ConfigError
from paceline.drafter.base import NeuralDrafter
from paceline.drafter.config import NeuralConfig
from paceline.engine.runtime import cache_dir, choose_device, machine
from paceline.llm import load_target
from paceline.target.base import Target, TargetSpec
from paceline.target.pull import pull
from paceline.target.text import TextCodec
from paceline.train.config import TrainConfig
from paceline.train.curves import write_csv, write_pictures
from paceline.train.data.documents import collect, load_rows
from paceline.train.data.features import Document
from paceline.train.data.prompts import Prompt, digest
from paceline.train.parallel import Ranks
from paceline.train.shape import WORK_DTYPE, drafter_config, new_drafter
from paceline.train.trainer import ALONE, STATE, Best, CurveRow, Progress, Trainer, check_fit


@dataclass(frozen=True, slots=True)
class TrainEvent:
    """What an observer is told.

    Args:
        stage: "regenerate" or "train".
        done, total: shards, or steps.
        detail: new tokens decoded (or read, where answers are given), or the step's progress.
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
        finished: whether all steps were made, or patience ended them.
        stopped_early: whether patience ended them.
        row: the last evaluation.
        best: the best one, whose weights are the drafter's.
    """

    folder: Path
    finished: bool
    stopped_early: bool
    row: CurveRow
    best: CurveRow


Observe = Callable[[TrainEvent], None]
Weights = tuple[torch.Tensor, torch.Tensor]
"""The target's embedding and head (V, D)."""


@dataclass(frozen=True, slots=True)
class Setup:
    """A recipe beside the target that it names.

    Args:
        recipe: what is to be done.
        folder: the target's.
        codec: its tokenizer.
        prompts: in the order of training.
        shape: of the drafter to grow.
        device: where all of it computes.
    """

    recipe: TrainConfig
    folder: Path
    codec: TextCodec
    prompts: list[Prompt]
    shape: NeuralConfig
    device: torch.device

    @classmethod
    def open(cls, recipe: TrainConfig, *, offline: bool = False, target_folder: Path | None = None) -> Setup:
        """Returns the setup of a recipe, checked as far as can be before the target answers.

        Args:
            target_folder: where the target lies, if it need not be pulled by its name.

        Raises:
            ConfigError: a value that does not fit.
        """
        folder = target_folder or pull(recipe.target, cache_dir=cache_dir(), offline=offline)
        codec = TextCodec.load(folder)
        prompts = load_rows(recipe, codec)
        shape = drafter_config(recipe, folder)
        check_fit(recipe.train, shape, len(prompts))  # now, not after hours of answers
        return cls(recipe, folder, codec, prompts, shape, choose_device("auto"))

    def load_target(self) -> Target:
        """Returns the target, loaded."""
        target, _ = load_target(
            self.folder,
            self.codec,
            name=self.recipe.target,
            dtype=WORK_DTYPE,
            device=torch.device("cpu")
            if self.recipe.data.shard_target
            else self.device,  # moved layer by layer
            backend="hf" if self.recipe.data.shard_target else "auto",
        )
        return target

    def weights_of(self, target: Target) -> Weights:
        """Returns the target's embedding and head in the dtype of training."""
        dtype, heads = getattr(torch, self.recipe.train.dtype), target.heads
        copy = self.recipe.data.shard_target  # its own will be spread over the processes
        return heads.embed_weight.to(dtype, copy=copy), heads.head_weight.to(dtype, copy=copy)

    def new_trainer(
        self, weights: Weights, documents: Sequence[Document], folder: Path, ranks: Ranks = ALONE
    ) -> Trainer:
        """Returns the trainer of a new drafter, which keeps its state in `folder`."""
        drafter = new_drafter(self.recipe, self.shape, self.folder, documents).to(
            self.device, weights[0].dtype
        )
        return Trainer(drafter, *weights, documents, self.recipe.train, folder, self.recipe.contract, ranks)


def train(
    config: TrainConfig,
    *,
    observe: Observe = lambda _: None,
    should_stop: Callable[[], bool] = lambda: False,
    resume: bool = True,
    offline: bool = False,
    target_folder: Path | None = None,
    ranks: Ranks = ALONE,
) -> TrainResult:
    """Runs a recipe and returns its drafter.

    Shards and state found in `config.out` are continued; without `resume` a state found there is refused.

    Args:
        should_stop: asked after every step; then training ends with state and drafter written.
        target_folder: where the target lies, if it need not be pulled by its name.
        ranks: the processes that train together: they share answers and steps, the first writes state and drafter.

    Raises:
        ConfigError: a value that does not fit, or a folder that belongs to another recipe.
        KeyboardInterrupt: asked to stop while the target still answered; whole shards stay.
    """
    out = Path(config.out)
    if not resume and (out / STATE).exists():
        raise ConfigError(f"{out}: holds an earlier run; hint: another `out`, or resume it")
    setup = Setup.open(config, offline=offline, target_folder=target_folder)
    target = setup.load_target()
    spec, weights = target.spec, setup.weights_of(target)
    documents = _answers(setup, target, observe, should_stop)
    del target  # and with it the K/V of all sequences, unless documents ask it for hidden states
    trainer = setup.new_trainer(weights, documents, out, ranks)
    trainer.resume()
    describe = _describer(setup, spec, documents, ranks)

    def on_step(progress: Progress) -> None:
        if progress.row is not None and progress.step < progress.max_steps:  # the last are written below
            write_outputs(trainer, out, describe)
        observe(TrainEvent("train", progress.step, progress.max_steps, progress))

    trainer.run(on_step, should_stop)
    write_outputs(trainer, out, describe)
    stopped_early = trainer.step < config.train.max_steps and trainer.is_exhausted
    finished = trainer.step >= config.train.max_steps or stopped_early
    return TrainResult(out / "drafter", finished, stopped_early, trainer.curve[-1], _best(trainer).row)


def _answers(
    setup: Setup, target: Target, observe: Observe, should_stop: Callable[[], bool]
) -> list[Document]:
    """Returns the documents; what is on disk of them is used, the rest is made."""

    def tell(done: int, total: int, count: int | None) -> None:
        observe(TrainEvent("regenerate", done, total, count))
        if should_stop():
            raise KeyboardInterrupt

    recipe = setup.recipe
    folder = Path(recipe.out) / "features"
    return collect(setup.prompts, target, setup.shape.target_layer_ids, folder, recipe, tell)


Describe = Callable[[Trainer], dict[str, Any]]


def _describer(setup: Setup, spec: TargetSpec, documents: Sequence[Document], ranks: Ranks) -> Describe:
    """Returns what gives a drafter's provenance."""
    responses, num_response_tokens = hashlib.sha256(), 0
    for document in documents:
        responses.update(document.token_ids.int().numpy().tobytes())
        num_response_tokens += document.num_supervised
    data = {
        "prompts": digest(setup.prompts),
        "responses": responses.hexdigest(),
        "num_documents": len(documents),
        "num_response_tokens": num_response_tokens,
    }

    initial = setup.recipe.drafter.initial_drafter
    begun_from = {} if initial is None else {"begun_from": DrafterCheckpoint.load(Path(initial)).provenance}

    def describe(trainer: Trainer) -> dict[str, Any]:
        row = _best(trainer).row
        return {
            "algorithm": setup.recipe.drafter.algorithm,
            "target": spec.name,
            "tokenizer_digest": spec.tokenizer_digest,
            "recipe": setup.recipe.portable(),
            "data": data,
            "num_steps": trainer.step,
            "num_blocks": trainer.num_blocks,
            "train_seconds": round(trainer.seconds),
            "num_processes": ranks.world_size,
            "machine": machine(),
            "held_out": {
                "step": row.step,
                "acceptance_length": row.acceptance_length,
                "slot_accuracy": list(row.slot_accuracy),
            },
            **begun_from,
        }

    return describe


def write_outputs(trainer: Trainer, out: Path, describe: Describe) -> None:
    """Writes the best drafter in bfloat16 with its provenance, and the curve; in the first of several processes."""
    if not trainer.ranks.is_first:
        return
    provenance, best = describe(trainer), _best(trainer)
    DrafterCheckpoint.of(_best_drafter(trainer), torch.bfloat16, provenance, trainer.token_ids).save(
        out / "drafter"
    )
    write_csv(trainer.curve, out / "curve.csv")
    write_pictures(trainer.curve, best.row, provenance["recipe"], out)


def _best(trainer: Trainer) -> Best:
    assert trainer.best is not None  # `Trainer.run` evaluates before its first step
    return trainer.best


def _best_drafter(trainer: Trainer) -> NeuralDrafter:
    """Returns a drafter with the best weights; the one in training goes on with its own."""
    with torch.device("meta"):  # nothing to fill at random, no random numbers drawn
        drafter = cast(Any, type(trainer.drafter))(trainer.drafter.config)
    drafter.load_state_dict(_best(trainer).weights, assign=True)
    return cast(NeuralDrafter, drafter)
