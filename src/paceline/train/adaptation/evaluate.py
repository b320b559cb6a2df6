"""What a drafter is worth, by real decoding: τ and tokens per second on prompts, and two drafters compared.

Arms answer each prompt one after the other before the next prompt comes, so drift of the machine meets them alike, and
differences are taken prompt by prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from paceline.core.params import SamplingParams
from paceline.core.types import Completion, Request
from paceline.engine.engine import Engine
from paceline.train.data.prompts import Prompt

NUM_DRAWS = 2000
CONFIDENCE = 0.95
WARM_UP_TOKENS = 8
NewEngine = Callable[[], Engine]


@dataclass(frozen=True, slots=True)
class Steps:
    """What verify steps committed of one text.

    Args:
        kind: its prompt's category.
        num_steps, num_committed: verify steps, and the tokens these committed before any cut.
    """

    kind: str
    num_steps: int
    num_committed: int


@dataclass(frozen=True, slots=True)
class Answer(Steps):
    """One decoded text and what it took.

    Args:
        token_ids: the text.
        prefill_s, decode_s: seconds to the first token, and after it.
    """

    token_ids: tuple[int, ...]
    prefill_s: float
    decode_s: float

    @classmethod
    def of(cls, completion: Completion, kind: str) -> Answer:
        """Returns what counts of a completion."""
        return cls(
            kind,
            len(completion.steps),
            sum(step.num_accepted + 1 for step in completion.steps),
            completion.token_ids,
            completion.prefill_s,
            completion.decode_s,
        )


def acceptance_length(texts: Iterable[Steps]) -> float:
    """Returns τ, pooled over all steps; 1 where there were none. Pure."""
    texts = tuple(texts)
    num_steps = sum(t.num_steps for t in texts)
    return sum(t.num_committed for t in texts) / num_steps if num_steps else 1.0


def acceptance(texts: Sequence[Steps]) -> dict[str, Any]:
    """Returns what was accepted as JSON data: τ, of how many steps, and τ of each kind of prompt. Pure."""
    kinds = dict.fromkeys(t.kind for t in texts)
    return {
        "acceptance_length": acceptance_length(texts),
        "num_steps": sum(t.num_steps for t in texts),
        "by_kind": {k: acceptance_length(t for t in texts if t.kind == k) for k in kinds},
    }


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What one way to decode did on a set of prompts."""

    answers: tuple[Answer, ...]

    @property
    def tokens_per_s(self) -> float:
        """Tokens behind each answer's first, by the seconds they took; as one text among those that ran beside it."""
        seconds = sum(a.decode_s for a in self.answers)
        return sum(len(a.token_ids) - 1 for a in self.answers) / seconds if seconds else 0.0

    @property
    def prefill_s(self) -> float:
        """Seconds to the first tokens of all answers."""
        return sum(a.prefill_s for a in self.answers)

    def to_dict(self) -> dict[str, Any]:
        """Returns the numbers as JSON data."""
        return {**acceptance(self.answers), "tokens_per_s": self.tokens_per_s}


def decode(
    new_engine: NewEngine,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
) -> Evaluation:
    """Returns what an engine does on prompts, as many at once as it takes.

    Args:
        new_engine: makes the engine; it is closed here.
        seed: of sampled texts; a prompt's text hangs on it and on the prompt's place alone, not on the drafter.
    """
    engine = new_engine()
    try:
        for i, prompt in enumerate(prompts):
            params = SamplingParams(max_new_tokens=max_new_tokens, temperature=temperature, seed=seed + i)
            engine.add(Request(str(i), prompt.token_ids, params))
        while engine.has_work:
            engine.step()
    finally:
        engine.close()
    return Evaluation(
        tuple(Answer.of(engine.take_completion(str(i)), p.category) for i, p in enumerate(prompts))
    )


def evaluate(
    arms: Mapping[str, NewEngine],
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    tell: Callable[[], None] = lambda: None,
) -> dict[str, Evaluation]:
    """Returns what each arm does on the prompts, decoded one at a time and in turns: forwards, then backwards.

    Args:
        arms: how their engines are made.
        tell: called behind each prompt that all arms have answered.
    """
    answers: dict[str, list[Answer]] = {name: [] for name in arms}
    for name in arms:  # first passes prepare buffers
        decode(arms[name], prompts[:1], max_new_tokens=WARM_UP_TOKENS, temperature=temperature)
    for i, prompt in enumerate(prompts):
        for name in list(arms) if i % 2 == 0 else list(arms)[::-1]:
            found = decode(
                arms[name], [prompt], max_new_tokens=max_new_tokens, temperature=temperature, seed=i
            )
            answers[name] += found.answers
        tell()
    return {name: Evaluation(tuple(found)) for name, found in answers.items()}


@dataclass(frozen=True, slots=True)
class Ratio:
    """A ratio of pooled rates, and the interval that prompts drawn anew would give it."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """A drafter after against the drafter before, on the same prompts.

    Args:
        before, after: what each did.
        acceptance_length, tokens_per_s: ratios after / before.
        num_identical: prompts with the same text.
    """

    before: Evaluation
    after: Evaluation
    acceptance_length: Ratio
    tokens_per_s: Ratio
    num_identical: int

    @classmethod
    def of(cls, before: Evaluation, after: Evaluation) -> Comparison:
        """Returns the comparison of two evaluations of the same prompts, in the same order. Pure."""
        pairs = list(zip(before.answers, after.answers, strict=True))
        speeds = [
            (float(len(b.token_ids) - 1), b.decode_s, float(len(a.token_ids) - 1), a.decode_s)
            for b, a in pairs
        ]
        same = sum(b.token_ids == a.token_ids for b, a in pairs)
        lengths = acceptance_length_ratio(before.answers, after.answers)
        return cls(before, after, lengths, _ratio(speeds), same)

    def to_dict(self) -> dict[str, Any]:
        """Returns the comparison as JSON data."""
        return {
            "num_prompts": len(self.before.answers),
            "num_identical": self.num_identical,
            "before": self.before.to_dict(),
            "after": self.after.to_dict(),
            "acceptance_length_ratio": asdict(self.acceptance_length),
            "tokens_per_s_ratio": asdict(self.tokens_per_s),
        }


def acceptance_length_ratio(before: Sequence[Steps], after: Sequence[Steps]) -> Ratio:
    """Returns τ after / τ before, of the same prompts in the same order. Pure."""
    pairs = zip(before, after, strict=True)
    return _ratio([(b.num_committed, b.num_steps, a.num_committed, a.num_steps) for b, a in pairs])


def _ratio(rows: Sequence[tuple[float, float, float, float]]) -> Ratio:
    """Returns (Σ c / Σ d) / (Σ a / Σ b) of rows (a, b, c, d) and its bootstrap interval; 1 where nothing counts.

    Source: percentile bootstrap of pairs (Davison and Hinkley, Bootstrap Methods and their Application, 1997, §5.3).
    """
    values = torch.tensor(rows, dtype=torch.float64).reshape(-1, 4)
    if not bool((values.sum(0) > 0).all()):
        return Ratio(1.0, 1.0, 1.0)
    drawn = torch.randint(len(values), (NUM_DRAWS, len(values)), generator=torch.Generator().manual_seed(0))
    sums = torch.cat([values.sum(0)[None], values[drawn].sum(1)])
    ratios = (sums[:, 2] / sums[:, 3]) / (sums[:, 0] / sums[:, 1])
    ratios = torch.where(ratios.isfinite(), ratios, 1.0)
    tail = (1 - CONFIDENCE) / 2
    low, high = ratios[1:].quantile(torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
    return Ratio(float(ratios[0]), low, high)
