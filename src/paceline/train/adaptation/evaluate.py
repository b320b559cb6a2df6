"""What a drafter is worth, by real decoding: τ and tokens per second on prompts, and two drafters compared.

Arms answer each prompt one after the other before the next prompt comes, so drift of the machine meets them alike, and
differences are taken prompt by prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
class Answer:
    """One decoded text and what it took.

    Args:
        kind: its prompt's category.
        token_ids: the text.
        num_steps, num_committed: verify steps, and the tokens these committed before any cut.
        prefill_s, decode_s: seconds to the first token, and after it.
    """

    kind: str
    token_ids: tuple[int, ...]
    num_steps: int
    num_committed: int
    prefill_s: float
    decode_s: float

    @classmethod
    def of(cls, completion: Completion, kind: str) -> Answer:
        """Returns what counts of a completion."""
        committed = sum(step.num_accepted + 1 for step in completion.steps)
        return cls(
            kind,
            completion.token_ids,
            len(completion.steps),
            committed,
            completion.prefill_s,
            completion.decode_s,
        )


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What one way to decode did on a set of prompts."""

    answers: tuple[Answer, ...]

    @property
    def num_steps(self) -> int:
        """Verify steps."""
        return sum(a.num_steps for a in self.answers)

    @property
    def acceptance_length(self) -> float:
        """τ, pooled over all steps; 1 where there were none."""
        return sum(a.num_committed for a in self.answers) / self.num_steps if self.num_steps else 1.0

    @property
    def tokens_per_s(self) -> float:
        """Tokens behind each answer's first, by the seconds they took; as one text among those that ran beside it."""
        seconds = sum(a.decode_s for a in self.answers)
        return sum(len(a.token_ids) - 1 for a in self.answers) / seconds if seconds else 0.0

    @property
    def prefill_s(self) -> float:
        """Seconds to the first tokens of all answers."""
        return sum(a.prefill_s for a in self.answers)

    @property
    def by_kind(self) -> dict[str, float]:
        """τ of each kind of prompt."""
        kinds = dict.fromkeys(a.kind for a in self.answers)
        return {k: Evaluation(tuple(a for a in self.answers if a.kind == k)).acceptance_length for k in kinds}

    def to_dict(self) -> dict[str, Any]:
        """Returns the numbers as JSON data."""
        return {
            "acceptance_length": self.acceptance_length,
            "tokens_per_s": self.tokens_per_s,
            "num_steps": self.num_steps,
            "by_kind": self.by_kind,
        }


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
    tell: Callable[[int], None] = lambda _: None,
) -> dict[str, Evaluation]:
    """Returns what each arm does on the prompts, decoded one at a time and in turns: forwards, then backwards.

    Args:
        arms: how their engines are made.
        tell: told how many prompts all arms have answered.
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
        tell(i + 1)
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
        lengths = [(b.num_committed, b.num_steps, a.num_committed, a.num_steps) for b, a in pairs]
        speeds = [
            (float(len(b.token_ids) - 1), b.decode_s, float(len(a.token_ids) - 1), a.decode_s)
            for b, a in pairs
        ]
        same = sum(b.token_ids == a.token_ids for b, a in pairs)
        return cls(before, after, _ratio(lengths), _ratio(speeds), same)

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
