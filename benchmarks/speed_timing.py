"""What `speed.py` measures with: a clock for our engine, turns, prompts, and ratios with their intervals.

Rates count the tokens of whole steps after the first token over the seconds of these steps, so reading the prompt is no
part of them; whole seconds, prompts included, are kept beside them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from paceline.bench.numbers.intervals import Floats, bootstrap_interval
from paceline.bench.numbers.summary import Interval
from paceline.bench.workloads.workload import from_prompt_files
from paceline.core.params import SamplingParams
from paceline.core.prompts import Messages
from paceline.core.types import Request
from paceline.engine.engine import Engine

CONFIDENCE = 0.95
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Timed:
    """What texts that were decoded together took.

    Args:
        num_tokens, seconds: of the steps after all had their first token.
        num_new_tokens, whole_s: of everything, prompts included.
        num_steps, num_accepted: verified steps and drafts that stood; 0 steps where nobody says.
        texts: new token ids, by prompt.
    """

    num_tokens: int
    seconds: float
    num_new_tokens: int
    whole_s: float
    num_steps: int = 0
    num_accepted: int = 0
    texts: tuple[tuple[int, ...], ...] = ()

    @property
    def sample(self) -> list[float]:
        """The numbers as they are stored, in the order of the fields."""
        return [
            self.num_tokens,
            round(self.seconds, 6),
            self.num_new_tokens,
            round(self.whole_s, 6),
            self.num_steps,
            self.num_accepted,
        ]


def decode(engine: Engine, prompts: Sequence[tuple[int, ...]], params: Sequence[SamplingParams]) -> Timed:
    """Decodes prompts together, to the end. Mutates: the engine, which has no other work."""
    began = time.perf_counter()
    names = [
        name
        for i, (prompt, each) in enumerate(zip(prompts, params, strict=True))
        for name in engine.add(Request(str(i), prompt, each))
    ]
    without, num_tokens, seconds = set(names), 0, 0.0
    while engine.has_work:
        started = time.perf_counter()
        deltas = engine.step()
        elapsed = time.perf_counter() - started
        if not without:
            num_tokens += sum(len(delta.token_ids) for delta in deltas)
            seconds += elapsed
        without -= {delta.request_id for delta in deltas}
    whole_s = time.perf_counter() - began
    done = [engine.take_completion(name) for name in names]
    return Timed(
        num_tokens,
        seconds,
        sum(len(completion.token_ids) for completion in done),
        whole_s,
        sum(len(completion.steps) for completion in done),
        sum(step.num_accepted for completion in done for step in completion.steps),
        tuple(completion.token_ids for completion in done),
    )


def turn(arms: Sequence[T], number: int) -> list[T]:
    """Returns the order of arms in a turn: each is first in turn, and every other round goes backwards. Pure."""
    start = number % len(arms)
    order = [*arms[start:], *arms[:start]]
    return order if (number // len(arms)) % 2 == 0 else order[::-1]


def prompts_of(
    path: Path, count: int, render: Callable[[Messages], list[int]], category: str = ""
) -> list[tuple[int, ...]]:
    """Returns `count` first turns of a file as token ids, spread over it, again from the start where it has fewer.

    Args:
        category: what the rows' categories begin with.
    """
    items = from_prompt_files([path], kind_from="category").items
    items = tuple(item for item in items if item.kind.startswith(category))
    if not items:
        raise SystemExit(f"{path}: expected rows whose category begins with {category!r}, found none")
    stride = max(1, len(items) // count)
    chosen = items[::stride]
    return [tuple(render(chosen[i % len(chosen)].messages)) for i in range(count)]


# Numbers from samples ------------------------------------------------------------------------------------------------

Samples = Sequence[Sequence[float]]
"""`Timed.sample` of one arm, by prompt or by batch; of two arms the same prompts in the same order."""


def rate_ratio(ours: Samples, theirs: Samples) -> Interval | None:
    """Returns our tokens per second over theirs, pooled; `None` where either has no time. Pure."""
    return _ratio(ours, theirs, 0, 1)


def whole_ratio(ours: Samples, theirs: Samples) -> Interval | None:
    """Returns the same of whole seconds, prompts included. Pure."""
    return _ratio(ours, theirs, 2, 3)


def _ratio(ours: Samples, theirs: Samples, tokens: int, seconds: int) -> Interval | None:
    columns = np.array(
        [[a[tokens], a[seconds], b[tokens], b[seconds]] for a, b in zip(ours, theirs, strict=True)],
        dtype=np.float64,
    )
    return pooled(lambda sums: sums[..., 0] / sums[..., 1] / (sums[..., 2] / sums[..., 3]), columns)


def time_ratio(ours: Sequence[float], theirs: Sequence[float]) -> Interval | None:
    """Returns our seconds over theirs, pooled over rounds. Pure."""
    return pooled(lambda sums: sums[..., 0] / sums[..., 1], np.array([ours, theirs], dtype=np.float64).T)


def tokens_a_pass(samples: Samples) -> Interval | None:
    """Returns τ, 1 + accepted / steps, pooled; `None` without steps. Pure."""
    columns = np.array([[sample[4], sample[5]] for sample in samples], dtype=np.float64)
    if not columns[:, 0].sum():
        return None
    return pooled(lambda sums: 1.0 + sums[..., 1] / sums[..., 0], columns, may_be_zero=True)


def rate(samples: Samples) -> float | None:
    """Returns tokens per second, pooled. Pure."""
    seconds = sum(sample[1] for sample in samples)
    return sum(sample[0] for sample in samples) / seconds if seconds else None


def pooled(
    statistic: Callable[[Floats], Floats], columns: Floats, *, may_be_zero: bool = False
) -> Interval | None:
    """Returns a statistic of summed columns (clusters, K) with its paired bootstrap interval. Pure.

    Args:
        may_be_zero: whether a column without anything still has a statistic.
    """
    if not len(columns) or (not may_be_zero and not columns.sum(axis=0).all()):
        return None
    return bootstrap_interval(statistic, columns, CONFIDENCE)


def plain_numbers(interval: Interval | None) -> list[float | None] | None:
    """Returns estimate, low and high for JSON, null for an infinite or unknown end. Pure."""
    if interval is None:
        return None
    ends = (interval.estimate, interval.low, interval.high)
    return [round(end, 4) if math.isfinite(end) else None for end in ends]
