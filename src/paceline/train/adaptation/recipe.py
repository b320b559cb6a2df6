"""The recipe of an adaptation: the old drafter trained on, on the answers to the traffic."""

from __future__ import annotations

from pathlib import Path

from paceline.checkpoint.store import DrafterCheckpoint
from paceline.drafter.config import DrafterConfig, Eagle3Config, NeuralConfig
from paceline.train.adaptation.pace import (
    BLOCKS_PER_STEP,
    MAX_STEPS,
    NUM_EVALUATIONS,
    PROMPTS_PER_SHARD,
    WARM_UP_STEPS,
    Plan,
)
from paceline.train.adaptation.records import AdaptConfig
from paceline.train.config import (
    DataConfig,
    OptimConfig,
    RegenerateConfig,
    ShapeConfig,
    SourceConfig,
    TrainConfig,
)
from paceline.train.shape import algorithm_of

PROMPTS = "prompts.jsonl"
NUM_NEW_TOKENS = 512


def recipe(
    config: AdaptConfig, plan: Plan, old: Path, checkpoint: DrafterCheckpoint, num_learnt: int
) -> TrainConfig:
    """Returns the recipe as far as it is planned; what is not planned yet is as long as can be. Pure.

    Args:
        old: folder of the drafter to begin with, `checkpoint` what it holds.
        num_learnt: prompts in `PROMPTS` of the adaptation's folder.
    """
    made, out = checkpoint.config, Path(config.out)
    max_steps = plan.max_steps or MAX_STEPS
    return TrainConfig(
        drafter=ShapeConfig(algorithm=algorithm_of(made), initial_drafter=str(old)),
        target=config.target,
        out=str(out / "training"),
        data=DataConfig(
            folder=str(out),
            sources=(SourceConfig(PROMPTS),),
            max_prompts=plan.num_prompts or num_learnt,
            max_prompt_tokens=config.max_prompt_tokens,
            seed=config.seed,
        ),
        regenerate=RegenerateConfig(
            max_new_tokens=config.max_new_tokens,
            temperatures=config.temperatures,
            num_sequences=PROMPTS_PER_SHARD // 2,  # as one ends the next begins: passes stay wide
            prompts_per_shard=PROMPTS_PER_SHARD,
            seed=config.seed,
        ),
        train=OptimConfig(
            max_steps=max_steps,
            blocks_per_step=BLOCKS_PER_STEP,
            anchors_per_document=BLOCKS_PER_STEP // 4,
            slots=_slots(made),
            lr=config.lr,
            warmup_steps=WARM_UP_STEPS,
            decay_steps=max(0, max_steps - WARM_UP_STEPS),
            muon_block_rows=64,
            draft_vocab_size=_draft_vocab_size(checkpoint),
            held_out_documents=max(1, min(16, num_learnt // 10)),
            eval_every=max(1, max_steps // NUM_EVALUATIONS),
            save_every=max(1, max_steps // NUM_EVALUATIONS),
            seed=config.seed,
        ),
    )


def _slots(config: NeuralConfig) -> tuple[int, ...]:
    """Returns the block lengths to train with: shorter ones cost less, where they are the same function."""
    size = config.block_size
    is_causal = isinstance(config, DrafterConfig) and all(rule.causal for rule in config.layer_rules)
    return (size // 2, size // 2, 3 * size // 4, size) if is_causal and size >= 4 else ()


def _draft_vocab_size(checkpoint: DrafterCheckpoint) -> int | None:
    """Returns how many tokens are scored: those that the drafter knows, and some that only your traffic has."""
    config = checkpoint.config
    if isinstance(config, Eagle3Config):
        return config.draft_vocab_size  # its head has so many rows
    known = checkpoint.token_ids
    return None if known is None else min(len(known) + NUM_NEW_TOKENS, config.vocab_size)
