"""From a recipe to documents: what is on disk is checked and used, what is missing is made."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist

from paceline.core.errors import ConfigError, UnsupportedTargetError
from paceline.engine.runtime import choose_device
from paceline.target.base import Target, TargetSpec
from paceline.target.text import TextCodec
from paceline.train.config import TrainConfig
from paceline.train.data.answers import load_answers, prefill_answers
from paceline.train.data.authorship import check_own
from paceline.train.data.features import Document, own_share, read_shard, shard_path
from paceline.train.data.prefill import OnlineDocument, OnlineFeatures
from paceline.train.data.prompts import Prompt, Source, load_prompts
from paceline.train.data.regenerate import RegenerateSettings, regenerate

Tell = Callable[[int, int, int | None], None]
"""(shards done, shards in all, tokens just made; `None` where a shard was completed). May raise to stop."""


@runtime_checkable
class Shardable(Protocol):
    """A target that can be spread over processes."""

    def shard(self, device: torch.device) -> None:
        """Spreads the weights over all processes."""


def load_rows(config: TrainConfig, codec: TextCodec) -> list[Prompt]:
    """Returns the prompts, or the answered conversations, that a recipe's sources hold. Needs no target.

    Raises:
        ConfigError: no sources, a file or row that cannot be used (named).
    """
    data, folder = config.data, Path(config.data.folder)
    if not data.sources:
        raise ConfigError("data.sources: expected at least one prompt file; hint: --data FILE.jsonl")
    if not folder.is_dir():
        raise ConfigError(
            f"data.folder: {folder} is not there; hint: --data FILE.jsonl trains on your own prompts, "
            "--set data.folder=FOLDER says where the recipe's files are"
        )
    sources = [Source(folder / s.file, s.limit, s.categories) for s in data.sources]
    if data.answers == "given":
        prompts = load_answers(
            sources,
            codec,
            target=config.target,
            max_prompt_tokens=data.max_prompt_tokens,
            seed=data.seed,
            allow_foreign=data.allow_foreign,
        )
    else:
        prompts = load_prompts(sources, codec.render_chat, max_tokens=data.max_prompt_tokens, seed=data.seed)
    return prompts[: data.max_prompts]


def cache_bytes(
    prompts: Sequence[Prompt], target_layer_ids: Sequence[int], hidden_size: int, config: TrainConfig
) -> int:
    """Returns how many bytes `collect` puts on disk at most: as if every response were as long as it may be. Pure."""
    num_new = 0 if config.data.answers == "given" else config.regenerate.max_new_tokens
    num_tokens = sum(len(prompt.token_ids) + num_new for prompt in prompts)
    hidden = 2 * hidden_size * len(target_layer_ids) if config.data.features == "cached" else 0
    return num_tokens * (4 + 1 + hidden + (4 + 2) * config.regenerate.top_log_probs)


def collect(
    prompts: Sequence[Prompt],
    target: Target,
    target_layer_ids: Sequence[int],
    folder: Path,
    config: TrainConfig,
    tell: Tell = lambda done, total, count: None,
) -> list[Document]:
    """Returns one document for each of `load_rows(config, codec)`, in order; shards found in `folder` are used.

    With `data.features = "cached"` hidden states lie in shards, which are mapped rather than read; with "online" the
    shards hold tokens alone and a document's `hidden` is computed by `target` when it is asked for, a few documents
    at a time where `hidden_of` asks. Both say the same bits. `data.shard_target` spreads the target over the
    processes of the run first; then `hidden_of` must be called equally often in each of them.

    Processes that train together share the work of making shards, and all of them return all documents.

    Args:
        target_layer_ids: layers to tap.
        tell: told of the shards that this process makes.

    Raises:
        ConfigError: texts too long for the target, a cache that would not fit, shards made otherwise, or given
            answers that the target hardly wrote.
        CheckpointError: a shard that is not what was written; it is named.
        UnsupportedTargetError: `data.shard_target` with a target that cannot be sharded.
    """
    data, layer_ids = config.data, tuple(target_layer_ids)
    prompts = _fitted(prompts, target.spec, config)
    is_online = data.features == "online"
    num_shards = -(-len(prompts) // config.regenerate.prompts_per_shard)
    paths = [shard_path(folder, i, has_hidden=not is_online) for i in range(num_shards)]
    _check_room(cache_bytes(prompts, layer_ids, target.spec.hidden_size, config), paths, folder, config)
    if data.shard_target:
        _shard(target, config)
    if data.answers == "given" and not data.allow_foreign:
        check_own(prompts, target)
    _make(prompts, target, () if is_online else layer_ids, folder, config, tell)
    documents = [document for path in paths for document in read_shard(path)[0]]
    if not is_online:
        return documents
    source = OnlineFeatures(target, layer_ids, in_step=data.shard_target)
    return [OnlineDocument(document, source, i) for i, document in enumerate(documents)]


def _make(
    prompts: Sequence[Prompt],
    target: Target,
    layer_ids: tuple[int, ...],
    folder: Path,
    config: TrainConfig,
    tell: Tell,
) -> None:
    """Makes the shards that are missing; comes back when those of all processes are there."""
    settings = RegenerateSettings(**asdict(config.regenerate))
    total, done = len(own_share(-(-len(prompts) // settings.prompts_per_shard))), 0
    make = prefill_answers if config.data.answers == "given" else regenerate

    def on_tokens(count: int) -> None:
        tell(done, total, count)

    made = make(prompts, target, layer_ids, folder, settings, on_tokens)
    for done, _ in enumerate(made, 1):
        tell(done, total, None)
    if dist.is_available() and dist.is_initialized():
        dist.barrier()


def _fitted(prompts: Sequence[Prompt], spec: TargetSpec, config: TrainConfig) -> list[Prompt]:
    """Returns the prompts as far as the target has positions: given answers are cut, others must leave room."""
    for prompt in prompts:
        if max(prompt.token_ids) >= spec.vocab_size:
            raise ConfigError(
                f"row {prompt.id}: token ids must be in 0…{spec.vocab_size - 1}, got {max(prompt.token_ids)}"
            )
    limit, num_new = spec.max_positions, config.regenerate.max_new_tokens
    if config.data.answers == "given":
        return [replace(p, token_ids=p.token_ids[:limit], supervised=p.supervised[:limit]) for p in prompts]
    longest = max(len(p.token_ids) for p in prompts)
    if longest + num_new > limit:
        raise ConfigError(
            f"a prompt of {longest} tokens and regenerate.max_new_tokens {num_new} exceed the "
            f"{limit} positions of {spec.name}; hint: a smaller data.max_prompt_tokens"
        )
    return list(prompts)


def _check_room(size: int, paths: Sequence[Path], folder: Path, config: TrainConfig) -> None:
    """Raises `ConfigError` where a cache of up to `size` bytes is above the recipe's limit or the disk's room."""
    limit, hint = config.data.max_cache_bytes, "hint: fewer prompts (data.max_prompts)"
    if config.data.features == "cached":
        hint += ", fewer taps, or data.features = 'online', which keeps tokens alone"
    if limit is not None and size > limit:
        raise ConfigError(
            f"data.max_cache_bytes: expected at least {size:,}, which {folder} may take, got {limit:,}; {hint}"
        )
    there = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    missing = size - sum(path.stat().st_size for path in paths if path.exists())
    free = shutil.disk_usage(there).free
    if missing > free:
        raise ConfigError(
            f"{folder}: expected room for up to {missing:,} bytes more, the disk has {free:,} free; {hint}"
        )


def _shard(target: Target, config: TrainConfig) -> None:
    if not isinstance(target, Shardable):
        raise UnsupportedTargetError(
            f"data.shard_target: expected a target of the hf runner, got {type(target).__name__}; hint: backend='hf'"
        )
    if config.data.answers != "given" or config.regenerate.top_log_probs:
        raise ConfigError(
            "data.shard_target: expected data.answers = 'given' and no regenerate.top_log_probs with it; hint: let a "
            "serving engine answer"
        )
    target.shard(choose_device("auto"))
