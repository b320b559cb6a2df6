"""Texts from engines, and how two sets of texts that should be one differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal, Protocol

from paceline.bench.exactness.checks import FLAGGED, OK, Check
from paceline.bench.exactness.forcing import Gaps, measure_gaps
from paceline.bench.exactness.statistics import binomial_bounds, rule_of_three, upper_bound
from paceline.bench.workloads.prompts import Prompt
from paceline.core.params import MAX_SEED, SamplingParams
from paceline.core.types import Completion, Request
from paceline.engine.engine import Engine
from paceline.target.base import Target

Progress = Callable[[str, int, int], None]
"""Told (stage, done, total)."""

MAX_LISTED = 20
"""Cases that a report lists; it counts all."""


class Pair(Protocol):
    """A target and who drafts for it, such as `LLM`."""

    @property
    def target(self) -> Target:
        """The model whose text it is."""

    def new_engine(
        self,
        *,
        plain: bool = False,
        tree_nodes: int | Literal["auto"] | None = "auto",
        max_sequences: int | None = None,
        keyed_drafts: bool = True,
    ) -> Engine:
        """Returns an engine over the pair; see `LLM.new_engine`."""


def greedy_requests(prompts: Sequence[Prompt], params: SamplingParams) -> list[Request]:
    """Returns a request for each prompt at temperature 0, all else as `params` says. Pure."""
    greedy = replace(params, temperature=0.0, n=1)
    return [Request(prompt.id, prompt.token_ids, greedy) for prompt in prompts]


def sampled_requests(
    prompts: Sequence[Prompt], params: SamplingParams, num_samples: int = 1
) -> list[Request]:
    """Returns `num_samples` requests for each prompt, each prompt with a seed of its own. Pure.

    One seed for all would give every text the same noise at one position, and tests of independence would be wrong.
    """
    seed = params.seed or 0
    return [
        Request(
            prompt.id if num_samples == 1 else f"{prompt.id}#{sample}",
            prompt.token_ids,
            replace(params, n=1, seed=(seed + number) % (MAX_SEED + 1)),
            sample_index=sample,
        )
        for number, prompt in enumerate(prompts)
        for sample in range(num_samples)
    ]


def decode(engine: Engine, requests: Sequence[Request], stage: str, progress: Progress) -> list[Completion]:
    """Returns the texts of requests of one text each, in their order. Mutates: the engine, which is closed."""
    num_finished = 0
    progress(stage, 0, len(requests))
    try:
        for request in requests:
            engine.add(request)
        while engine.has_work:
            num_finished += sum(delta.finish_reason is not None for delta in engine.step())
            progress(stage, num_finished, len(requests))
    finally:
        engine.close()
    return [engine.take_completion(request.id) for request in requests]


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where two texts of one request part.

    Args:
        request_id, position: whose texts; index among the new tokens, from 0.
        expected, got: the tokens there, `None` behind an end.
        gap, tolerance: the larger gap of the two tokens from the best one, and what rounding explains.
        is_tie: whether rounding explains both tokens.
    """

    request_id: str
    position: int
    expected: int | None
    got: int | None
    gap: float
    tolerance: float
    is_tie: bool


class Auditor:
    """Measures the gaps of texts, each text once.

    Args:
        target: the plain target.
        rounding_steps: see `forcing.measure_gaps`.
    """

    def __init__(self, target: Target, rounding_steps: float | None = None) -> None:
        self._target, self._rounding_steps = target, rounding_steps
        self._known: dict[tuple[Request, tuple[int, ...]], Gaps] = {}

    def gaps(self, request: Request, text: tuple[int, ...]) -> Gaps:
        """Returns the gaps of a text."""
        if (request, text) not in self._known:
            self._known[request, text] = measure_gaps(self._target, request, text, self._rounding_steps)
        return self._known[request, text]

    def divergence(self, request: Request, expected: Completion, got: Completion) -> Divergence | None:
        """Returns where two texts part, `None` where they are the same."""
        texts = (expected.token_ids, got.token_ids)
        if texts[0] == texts[1]:
            return None
        shorter = min(map(len, texts))
        position = next((i for i in range(shorter) if texts[0][i] != texts[1][i]), shorter)
        tokens = [text[position] if position < len(text) else None for text in texts]
        gaps = [self.gaps(request, text) for text in texts if position < len(text)]
        return Divergence(
            request.id,
            position,
            expected=tokens[0],
            got=tokens[1],
            gap=max(g.gap[position] for g in gaps),
            tolerance=min(g.tolerance[position] for g in gaps),
            is_tie=len(gaps) == 2 and not any(position in g.flagged for g in gaps),
        )


def compare(
    name: str,
    requests: Sequence[Request],
    expected: Sequence[Completion],
    got: Sequence[Completion],
    auditor: Auditor,
) -> Check:
    """Returns the check that two sets of texts are the same; it is flagged where a difference is no near-tie."""
    found = [auditor.divergence(*texts) for texts in zip(requests, expected, got, strict=True)]
    parted = [divergence for divergence in found if divergence is not None]
    num_wrong = sum(not divergence.is_tie for divergence in parted)
    num_identical = len(found) - len(parted)
    summary = f"{num_identical} of {len(found)} texts identical"
    if parted:
        summary += f"; {len(parted) - num_wrong} part at a near-tie, {num_wrong} elsewhere"
    low, high = binomial_bounds(num_identical, len(found))
    first = min(parted, key=lambda divergence: divergence.position, default=None)
    return Check(
        name,
        FLAGGED if num_wrong else OK,
        summary,
        statistic=num_identical / len(found),
        details={
            "num_texts": len(found),
            "num_identical": num_identical,
            "share_identical_95": [low, high],
            "first_divergence": asdict(first) if first else None,
            "divergences": [asdict(divergence) for divergence in parted[:MAX_LISTED]],
        },
    )


def count_flagged(
    name: str, requests: Sequence[Request], texts: Sequence[Completion], auditor: Auditor, progress: Progress
) -> Check:
    """Returns the check that at every position the emitted token is the target's own, near-ties allowed.

    A text that stands there twice is counted once.
    """
    pairs = list(dict.fromkeys((r, text.token_ids) for r, text in zip(requests, texts, strict=True)))
    wrong, largest, num_positions, num_ties = [], 0.0, 0, 0
    for done, (request, text) in enumerate(pairs):
        progress("reading texts", done, len(pairs))
        gaps = auditor.gaps(request, text)
        num_positions += len(text)
        num_ties += gaps.num_ties
        largest = max([largest, *(gap / t for gap, t in zip(gaps.gap, gaps.tolerance, strict=True))])
        wrong += [_case(request, text, gaps, position) for position in gaps.flagged]
    bound = upper_bound(len(wrong), num_positions) if wrong else rule_of_three(num_positions)
    return Check(
        name,
        FLAGGED if wrong else OK,
        f"{len(wrong)} of {num_positions} tokens are not the target's own; {num_ties} near-ties",
        statistic=float(len(wrong)),
        bound=bound,
        details={
            "num_positions": num_positions,
            "num_flagged": len(wrong),
            "num_ties": num_ties,
            "largest_gap_in_tolerances": largest,
            "flagged": wrong[:MAX_LISTED],
        },
    )


def _case(request: Request, text: Sequence[int], gaps: Gaps, position: int) -> dict[str, object]:
    return {
        "request_id": request.id,
        "position": position,
        "emitted": text[position],
        "best": gaps.best[position],
        "gap": gaps.gap[position],
        "tolerance": gaps.tolerance[position],
    }
