"""What a run would take, measured in a minute before anything of it is written.

The target answers real prompts for a few seconds, then a few real steps are made on made-up documents of the expected
shape; both are multiplied up. What is measured is said beside what follows from it.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from paceline.core.params import SamplingParams
from paceline.core.types import Completion, Request
from paceline.engine.engine import Engine
from paceline.engine.runtime import memory_limit_bytes, peak_memory_bytes, reset_peak_memory
from paceline.target.base import Target
from paceline.train.config import RegenerateConfig
from paceline.train.data.batch import generator
from paceline.train.data.documents import cache_bytes
from paceline.train.data.features import Document, FeatureRecorder
from paceline.train.data.prefill import TEXTS_TOGETHER, prefill
from paceline.train.run import Setup, Weights
from paceline.train.trainer import STATE, Progress

PREFILL_S, DECODE_S = 10.0, 5.0
NUM_STEPS = 3
"""Steps that are made; the first is not timed: it allocates."""


@dataclass(frozen=True, slots=True)
class AnswerRate:
    """How fast the target read and answered a sample of the prompts.

    Args:
        num_sequences: texts that were read, and answers that were then written together.
        num_tokens: tokens that were written.
        num_ended: answers that came to an end.
        mean_answer_tokens: expected length of an answer; the longest allowed where too few ended to say.
        read_tokens_per_s, write_tokens_per_s: of all texts together; nothing is written where answers are given.
    """

    num_sequences: int
    num_tokens: int
    num_ended: int
    mean_answer_tokens: float
    read_tokens_per_s: float
    write_tokens_per_s: float | None


@dataclass(frozen=True, slots=True)
class StepRate:
    """How fast it trained on made-up documents.

    Args:
        num_steps: timed steps.
        step_s, evaluation_s: seconds of a step, of an evaluation.
        state_bytes, drafter_bytes: size of the files as they were written.
    """

    num_steps: int
    step_s: float
    evaluation_s: float
    state_bytes: int
    drafter_bytes: int


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a run from its beginning would take, and what is free.

    Args:
        num_prompts, num_prompt_tokens: after sources, limits and lengths.
        num_answer_tokens: expected tokens of all answers.
        answers_s, training_s: expected seconds of either stage.
        memory_bytes: most memory that the measurement held, on the device that computes; `None` where not known.
        memory_limit_bytes: what could be held there.
        features_bytes: disk that answers and hidden states take at most.
        checkpoints_bytes: disk of state and drafter, twice, since a new one is written beside the old one.
        free_disk_bytes: free where `out` lies.
        answers, steps: what was measured.
    """

    num_prompts: int
    num_prompt_tokens: int
    num_answer_tokens: int
    answers_s: float
    training_s: float
    memory_bytes: int | None
    memory_limit_bytes: int | None
    features_bytes: int
    checkpoints_bytes: int
    free_disk_bytes: int
    answers: AnswerRate
    steps: StepRate

    @property
    def disk_bytes(self) -> int:
        """Expected disk."""
        return self.features_bytes + self.checkpoints_bytes

    @property
    def shortages(self) -> list[str]:
        """What will not suffice, in words; empty where all does."""
        needs = {
            "disk": (self.disk_bytes, self.free_disk_bytes),
            "memory": (self.memory_bytes, self.memory_limit_bytes),
        }
        return [
            f"{name}: {need / 1e9:.1f} GB needed, {free / 1e9:.1f} GB free"
            for name, (need, free) in needs.items()
            if need is not None and free is not None and need > free
        ]


def estimate(setup: Setup) -> Estimate:
    """Returns what a recipe's run would take, in a minute or so. Writes nothing but a state in a temporary folder."""
    recipe, prompts, device = setup.recipe, setup.prompts, setup.device
    settings, layer_ids = recipe.train, setup.shape.target_layer_ids
    limit = memory_limit_bytes(device)
    reset_peak_memory(device)
    target = setup.load_target()
    rate = (
        _measure_answers(setup, target)
        if recipe.data.answers == "regenerate"
        else _measure_reading(setup, target)
    )
    weights = setup.weights_of(target)
    del target
    num_tokens = sum(len(prompt.token_ids) for prompt in prompts)
    num_answer_tokens = round(len(prompts) * rate.mean_answer_tokens)
    num_prompt_tokens = num_tokens - sum(sum(prompt.supervised) for prompt in prompts)
    documents = _made_up(setup, num_prompt_tokens // len(prompts), max(2, round(rate.mean_answer_tokens)))
    steps = _measure_steps(setup, weights, documents)
    num_evaluations = 1 + -(-settings.max_steps // settings.eval_every)
    training_s = settings.max_steps * steps.step_s + num_evaluations * steps.evaluation_s
    if recipe.data.features == "online":
        num_held_out = settings.held_out_documents
        num_read = settings.max_steps * (len(documents) - num_held_out) + num_evaluations * num_held_out
        training_s += num_read * len(documents[0].token_ids) / rate.read_tokens_per_s
    written_s = num_answer_tokens / rate.write_tokens_per_s if rate.write_tokens_per_s else 0.0
    return Estimate(
        num_prompts=len(prompts),
        num_prompt_tokens=num_prompt_tokens,
        num_answer_tokens=num_answer_tokens,
        answers_s=num_tokens / rate.read_tokens_per_s + written_s,
        training_s=training_s,
        memory_bytes=peak_memory_bytes(device),
        memory_limit_bytes=limit,
        features_bytes=cache_bytes(prompts, layer_ids, setup.shape.hidden_size, recipe),
        checkpoints_bytes=2 * (steps.state_bytes + steps.drafter_bytes),
        free_disk_bytes=shutil.disk_usage(_existing(Path(recipe.out))).free,
        answers=rate,
        steps=steps,
    )


def _existing(folder: Path) -> Path:
    """Returns the folder, or the nearest above it that is there."""
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())


def _measure_answers(setup: Setup, target: Target) -> AnswerRate:
    """Has the target begin as many answers as it can in about `PREFILL_S` seconds, and write them for `DECODE_S`."""
    settings, names = setup.recipe.regenerate, list[str]()
    engine = Engine(
        target, FeatureRecorder(setup.shape.target_layer_ids), max_sequences=settings.num_sequences
    )

    def begin(count: int) -> None:
        """Adds requests until there are `count`, and makes steps until all prompts are read."""
        for i in range(len(names), count):
            names.extend(engine.add(Request(str(i), setup.prompts[i].token_ids, _params(settings, i))))
        engine.step()
        while any(sequence.is_prefilling for sequence in engine.scheduler.running):
            engine.step()

    most = min(settings.num_sequences, len(setup.prompts))
    started, num_written = time.perf_counter(), 0
    try:
        begin(1)  # allocates
        warm = time.perf_counter()
        begin(min(2, most))
        begin(min(most, 2 + int(PREFILL_S / (time.perf_counter() - warm))))
        read = time.perf_counter()
        while engine.has_work and time.perf_counter() < read + DECODE_S:
            num_written += sum(len(delta.token_ids) for delta in engine.step())
        seconds = read - started, time.perf_counter() - read
    finally:
        engine.close()
    completions = [engine.take_completion(name) for name in names]
    return _rate(completions, num_written, seconds, settings.max_new_tokens)


def _measure_reading(setup: Setup, target: Target) -> AnswerRate:
    """Has the target read answered conversations for about `PREFILL_S` seconds."""
    prompts, num_read, num_tokens = setup.prompts, 0, 0
    started = time.perf_counter()
    while num_read < len(prompts) and time.perf_counter() - started < PREFILL_S:
        group = [p.token_ids for p in prompts[num_read : num_read + TEXTS_TOGETHER]]
        prefill(target, setup.shape.target_layer_ids, group)
        num_read, num_tokens = num_read + len(group), num_tokens + sum(map(len, group))
    mean = sum(sum(prompt.supervised) for prompt in prompts) / len(prompts)
    return AnswerRate(num_read, 0, num_read, mean, num_tokens / (time.perf_counter() - started), None)


def _params(settings: RegenerateConfig, index: int) -> SamplingParams:
    temperature = settings.temperatures[index % len(settings.temperatures)]
    return SamplingParams(settings.max_new_tokens, temperature=temperature, seed=settings.seed + index)


def _rate(
    completions: Sequence[Completion], num_written: int, seconds: tuple[float, float], longest: int
) -> AnswerRate:
    """Returns the rates of answers that were begun, and of the tokens written once all had begun.

    Args:
        seconds: of either.
    """
    num_tokens = sum(len(c.token_ids) for c in completions)
    num_ended = sum(c.finish_reason == "stop" for c in completions)
    return AnswerRate(
        num_sequences=len(completions),
        num_tokens=num_tokens,
        num_ended=num_ended,
        mean_answer_tokens=_mean_length(num_ended / max(1, num_tokens), longest),
        read_tokens_per_s=sum(len(c.prompt_ids) for c in completions) / seconds[0],
        write_tokens_per_s=max(1, num_written) / max(seconds[1], 1e-9),
    )


def _mean_length(ending: float, longest: int) -> float:
    """Returns the mean length of answers that end behind any token with probability `ending`, at `longest`. Pure."""
    return (1 - (1 - ending) ** longest) / ending if ending else float(longest)


def _measure_steps(setup: Setup, weights: Weights, documents: list[Document]) -> StepRate:
    settings = replace(setup.recipe.train, max_steps=NUM_STEPS, eval_every=NUM_STEPS, save_every=NUM_STEPS)
    short = replace(setup, recipe=replace(setup.recipe, train=settings))
    seen: list[tuple[float, float]] = []

    def observe(progress: Progress) -> None:
        seen.append((time.perf_counter(), settings.blocks_per_step / progress.blocks_per_s))

    with tempfile.TemporaryDirectory() as scratch:
        trainer = short.new_trainer(weights, documents, Path(scratch))
        trainer.run(observe)
        state_bytes = (Path(scratch) / STATE).stat().st_size
    timed = [step_s for _, step_s in seen[1:]]
    (before, _), (after, last_s) = seen[-2:]  # the last step was evaluated
    return StepRate(
        num_steps=len(timed),
        step_s=sum(timed) / len(timed),
        evaluation_s=max(0.0, after - before - last_s),
        state_bytes=state_bytes,
        drafter_bytes=2 * sum(p.numel() for p in trainer.drafter.parameters()),
    )


def _made_up(setup: Setup, num_prompt: int, num_answer: int) -> list[Document]:
    """Returns as many documents of random tokens and hidden states as a step and an evaluation need."""
    recipe, settings, shape = setup.recipe, setup.recipe.train, setup.shape
    per_document = min(settings.anchors_per_document, num_answer - 1)
    count = settings.held_out_documents + -(-settings.blocks_per_step // per_document)
    length, rng = num_prompt + num_answer, generator(settings.seed)
    width = shape.hidden_size * len(shape.target_layer_ids)
    hidden = torch.randn(length, width, generator=rng).bfloat16()  # one for all: what it says does not matter
    num_tokens = settings.draft_vocab_size or shape.vocab_size
    ids = torch.randint(num_tokens, (count, length), generator=rng)
    supervised = torch.arange(length) >= num_prompt
    num_top = recipe.regenerate.top_log_probs
    if not num_top:
        return [Document(row, supervised, hidden) for row in ids]
    top_ids = torch.randint(num_tokens, (length, num_top), generator=rng).int()
    log_probs = torch.full((length, num_top), -1.0).half()
    return [Document(row, supervised, hidden, top_ids, log_probs) for row in ids]
