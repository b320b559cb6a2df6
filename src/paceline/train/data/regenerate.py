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

from paceline.core.params import SamplingParams
from paceline.core.types import Completion, Request
from paceline.engine.engine import Engine
from paceline.target.base import Target
from paceline.train.data.features import (
    Document,
    FeatureRecorder,
    Recording,
    blank_top,
    fill_shards,
    identity,
)
from paceline.train.data.prompts import Prompt, digest


@dataclass(frozen=True, slots=True)
class RegenerateSettings:
    """How responses are made.

    Args:
        max_new_tokens: longest response.
        temperatures: used in turn over the prompts.
        num_sequences: sequences decoded together.
        prompts_per_shard: prompts in a shard.
        seed: key of the sampled responses.
        top_log_probs: likeliest tokens kept at each position of a response, with the target's own log-probabilities.
    """

    max_new_tokens: int = 200
    temperatures: tuple[float, ...] = (0.0,)
    num_sequences: int = 64
    prompts_per_shard: int = 256
    seed: int = 0
    top_log_probs: int = 0


def regenerate(
    prompts: Sequence[Prompt],
    target: Target,
    target_layer_ids: Sequence[int],
    folder: Path,
    settings: RegenerateSettings,
    on_tokens: Callable[[int], None] = lambda _: None,
) -> Iterator[Path]:
    """Yields each shard's path once it is there; shards of an earlier run are kept.

    Args:
        target_layer_ids: layers to tap; with none of them a shard holds tokens and no hidden states.
        on_tokens: told how many tokens were just decoded.

    Raises:
        ConfigError: a shard in `folder` was made from other prompts or settings.
    """

    def describe(part: Sequence[Prompt]) -> dict[str, object]:
        return identity(target, target_layer_ids) | {
            "prompts": digest(part),
            "max_new_tokens": settings.max_new_tokens,
            "temperatures": list(settings.temperatures),
            "seed": settings.seed,
            "top_log_probs": settings.top_log_probs,
        }

    yield from fill_shards(
        folder,
        prompts,
        settings.prompts_per_shard,
        describe,
        lambda part: _documents(part, target, target_layer_ids, settings, on_tokens),
        has_hidden=bool(target_layer_ids),
    )


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
                logprobs=settings.top_log_probs or None,
            )
            engine.add(Request(str(i), part[i].token_ids, params))
        while engine.has_work:
            on_tokens(sum(len(delta.token_ids) for delta in engine.step()))
    finally:
        engine.close()
    recordings = dict(zip(by_length, recorder.recordings, strict=True))
    return [
        _document(engine.take_completion(str(i)), recordings[i], settings.top_log_probs)
        for i in range(len(part))
    ]


def _document(completion: Completion, recording: Recording, num_top: int) -> Document:
    ids = torch.tensor([*completion.prompt_ids, *completion.token_ids])
    rows = torch.cat(recording.rows)[: len(ids) - 1]
    hidden = torch.cat([rows, rows.new_zeros(len(ids) - rows.shape[0], rows.shape[1])])
    supervised = torch.arange(len(ids)) >= len(completion.prompt_ids)
    if not num_top:
        return Document(ids, supervised, hidden)
    top_ids, top_log_probs = blank_top(len(ids), num_top)
    for row, said in enumerate(completion.logprobs or (), len(completion.prompt_ids)):
        for column, (token, log_prob) in enumerate(said.top):
            top_ids[row, column], top_log_probs[row, column] = token, log_prob
    return Document(ids, supervised, hidden, top_ids, top_log_probs)
