"""Prompts → the target's own responses with tapped hidden states, shard by shard, resumable.

A drafter must learn what the target says, so the target says it: responses are decoded in large batches and the
hidden states are tapped in the same pass. Every shard is a pure function of its prompts and the settings (sampling
is keyed by the index within the shard), so an interrupted run goes on with the first missing shard and ends with the
same files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from paceline.core.errors import ConfigError
from paceline.core.params import SamplingParams
from paceline.core.types import Completion, Request
from paceline.engine.engine import Engine
from paceline.target.base import Target
from paceline.train.data import Prompt, digest
from paceline.train.features import Document, FeatureRecorder, Recording, read_shard, write_shard


@dataclass(frozen=True, slots=True)
class RegenerateSettings:
    """How responses are made.

    Args:
        max_new_tokens: longest response.
        temperatures: used in turn over the prompts.
        num_sequences: sequences decoded together.
        prompts_per_shard: prompts in a shard.
        seed: key of the sampled responses.
    """

    max_new_tokens: int = 200
    temperatures: tuple[float, ...] = (0.0,)
    num_sequences: int = 64
    prompts_per_shard: int = 256
    seed: int = 0


def shard_paths(folder: Path, num_prompts: int, settings: RegenerateSettings) -> list[Path]:
    """Returns the paths of all shards of a run, present or not. Pure."""
    count = -(-num_prompts // settings.prompts_per_shard)
    return [folder / f"features-{i:05d}.safetensors" for i in range(count)]


def regenerate(
    prompts: Sequence[Prompt],
    target: Target,
    target_layer_ids: Sequence[int],
    folder: Path,
    settings: RegenerateSettings,
    on_tokens: Callable[[int], None] = lambda _: None,
) -> Iterator[Path]:
    """Yields each shard's path once it is complete; complete shards of an earlier run are checked and kept.

    Args:
        on_tokens: told how many tokens were just decoded.

    Raises:
        ConfigError: a shard in `folder` was made from other prompts or settings.
    """
    folder.mkdir(parents=True, exist_ok=True)
    size = settings.prompts_per_shard
    for index, path in enumerate(shard_paths(folder, len(prompts), settings)):
        part = prompts[index * size : (index + 1) * size]
        identity = _identity(part, target, target_layer_ids, settings)
        if path.exists():
            _, found = read_shard(path)
            if found != identity:
                raise ConfigError(f"{path}: made from other prompts or settings; hint: use another folder")
        else:
            write_shard(path, _documents(part, target, target_layer_ids, settings, on_tokens), identity)
        yield path


def _identity(
    part: Sequence[Prompt], target: Target, target_layer_ids: Sequence[int], settings: RegenerateSettings
) -> dict[str, object]:
    return {
        "prompts": digest(part),
        "target": target.spec.name,
        "target_layer_ids": list(target_layer_ids),
        "max_new_tokens": settings.max_new_tokens,
        "temperatures": list(settings.temperatures),
        "seed": settings.seed,
    }


def _documents(
    part: Sequence[Prompt],
    target: Target,
    target_layer_ids: Sequence[int],
    settings: RegenerateSettings,
    on_tokens: Callable[[int], None],
) -> list[Document]:
    recorder = FeatureRecorder(target_layer_ids)
    engine = Engine(target, recorder, max_sequences=settings.num_sequences)
    by_length = sorted(
        range(len(part)), key=lambda i: len(part[i].token_ids)
    )  # neighbours pad each other least
    try:
        for i in by_length:
            params = SamplingParams(
                max_new_tokens=settings.max_new_tokens,
                temperature=settings.temperatures[i % len(settings.temperatures)],
                seed=settings.seed + i,
            )
            engine.add(Request(str(i), part[i].token_ids, params))
        while engine.has_work:
            on_tokens(sum(len(delta.token_ids) for delta in engine.step()))
    finally:
        engine.close()
    recordings = dict(zip(by_length, recorder.recordings, strict=True))
    return [_document(engine.take_completion(str(i)), recordings[i]) for i in range(len(part))]


def _document(completion: Completion, recording: Recording) -> Document:
    ids = torch.tensor([*completion.prompt_ids, *completion.token_ids])
    rows = torch.cat(recording.rows)[: len(ids) - 1]
    hidden = torch.cat([rows, rows.new_zeros(len(ids) - rows.shape[0], rows.shape[1])])
    return Document(ids, len(completion.prompt_ids), hidden)
