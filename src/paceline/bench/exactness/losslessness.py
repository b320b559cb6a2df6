"""Is the speculative text of a pair the target's own? Every check that a local pair allows.

At temperature 0 each token can be checked: it is the maximum of the target's logits, or rounding explains why not.
Above it the same holds for this engine, whose draws are keyed by seed and position. The tests of the law need no
key, so they hold for any verifier; they look at texts whose drafts did not see the draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from paceline.bench.exactness.checks import FLAGGED, OK, Check, judge
from paceline.bench.exactness.forcing import ROUNDING_STEPS, Draws, measure_draws
from paceline.bench.exactness.recorder import RecordingDrafter, favourites
from paceline.bench.exactness.statistics import (
    MAX_SKEWNESS,
    directed,
    positions_needed,
    rule_of_three,
    smallest_relaxation,
    surprise,
    uniformity,
    upper_bound,
)
from paceline.bench.exactness.texts import (
    Auditor,
    Pair,
    Progress,
    compare,
    count_flagged,
    decode,
    greedy_requests,
    sampled_requests,
)
from paceline.bench.workloads.prompts import Prompt
from paceline.core.errors import ConfigError
from paceline.core.params import SamplingParams
from paceline.core.types import Completion, Request

NUM_TESTS = 3
"""Tests of the law in a local report; what `directed` can find is stated at the strictest level Holm may ask of it."""

STATED_RELAXATIONS = (0.01, 0.02, 0.05, 0.1)


@dataclass(frozen=True, slots=True)
class Settings:
    """How a pair or two servers are examined.

    Args:
        params: of all texts; its temperature and seed are those of the sampled part, 0 leaves that part out.
        alpha: level of all tests together.
        batch_size: texts that decode together where nothing else is said.
        block_sizes: chains of these many slots must give the same texts.
        batch_sizes: so must batches of these sizes.
        num_samples: sampled texts of each prompt.
        rounding_steps: see `forcing.ROUNDING_STEPS`; `None` takes those of the target's dtype.

    Raises:
        ConfigError: a value outside its range, or a grammar, whose rows cannot be read back.
    """

    params: SamplingParams = field(
        default_factory=lambda: SamplingParams(max_new_tokens=64, temperature=1.0, seed=0)
    )
    alpha: float = 0.01
    batch_size: int = 8
    block_sizes: tuple[int, ...] = ()
    batch_sizes: tuple[int, ...] = ()
    num_samples: int = 1
    rounding_steps: float | None = None

    def __post_init__(self) -> None:
        if not 0.0 < self.alpha < 1.0:
            raise ConfigError(f"alpha: expected a number in (0, 1), got {self.alpha!r}")
        counts = {"batch_size": (self.batch_size,), "num_samples": (self.num_samples,)}
        for name, values in {
            **counts,
            "batch_sizes": self.batch_sizes,
            "block_sizes": self.block_sizes,
        }.items():
            if any(value < 1 for value in values):
                raise ConfigError(f"{name}: expected at least 1, got {min(values)}")
        if self.rounding_steps is not None and self.rounding_steps <= 0:
            raise ConfigError(f"rounding_steps: expected a number above 0, got {self.rounding_steps}")
        if self.params.grammar is not None:
            raise ConfigError("params.grammar: texts under a grammar cannot be verified; hint: leave it out")


def verify_pair(
    pair: Pair, prompts: Sequence[Prompt], settings: Settings, progress: Progress
) -> tuple[Check, ...]:
    """Returns all checks of a local pair, judged together.

    Args:
        pair: with a drafter.
        prompts: at least one.

    Raises:
        ConfigError: no prompts, two of one id, or a block size beyond the drafter's.
        CapacityError: a prompt and its text exceed the target's positions.
    """
    if not prompts or len({prompt.id for prompt in prompts}) < len(prompts):
        raise ConfigError("prompts: expected at least one, and each with an id of its own")
    checks = greedy_checks(pair, prompts, settings, progress)
    checks += sampled_checks(pair, prompts, settings, progress)
    return judge(checks, settings.alpha)


# Temperature 0 -------------------------------------------------------------------------------------------------------


def greedy_checks(
    pair: Pair, prompts: Sequence[Prompt], settings: Settings, progress: Progress
) -> list[Check]:
    """Returns the checks at temperature 0: control, identical texts, ties, invariance."""
    requests, size = greedy_requests(prompts, settings.params), settings.batch_size
    auditor = Auditor(pair.target, settings.rounding_steps)
    plain = decode(pair.new_engine(plain=True, max_sequences=size), requests, "plain", progress)
    control = decode(
        pair.new_engine(plain=True, max_sequences=max(1, size // 2)), requests[::-1], "plain again", progress
    )[::-1]
    drafted = decode(pair.new_engine(max_sequences=size), requests, "speculative", progress)
    ties = count_flagged("ties", requests, drafted, auditor, progress)
    floor = count_flagged("plain", requests, plain, auditor, progress)
    steps = settings.rounding_steps
    ties.details["rounding_steps"] = ROUNDING_STEPS[pair.target.dtype] if steps is None else steps
    ties.details["plain"] = {
        name: floor.details[name] for name in ("num_flagged", "num_ties", "largest_gap_in_tolerances")
    }
    return [
        compare("plain_control", requests, plain, control, auditor),
        compare("identical_texts", requests, plain, drafted, auditor),
        ties,
        _invariance(pair, requests, drafted, settings, auditor, progress),
    ]


def _invariance(
    pair: Pair,
    requests: Sequence[Request],
    drafted: Sequence[Completion],
    settings: Settings,
    auditor: Auditor,
    progress: Progress,
) -> Check:
    """Returns the check that neither block size nor batch size changes a text."""
    parts = []
    for block_size in settings.block_sizes:
        engine = pair.new_engine(tree_nodes=None, max_sequences=settings.batch_size)
        chains = [replace(request, block_size=block_size) for request in requests]
        texts = decode(engine, chains, f"blocks of {block_size}", progress)
        parts.append(compare(f"blocks of {block_size}", requests, drafted, texts, auditor))
    for batch_size in settings.batch_sizes:
        engine = pair.new_engine(max_sequences=batch_size)
        texts = decode(engine, requests, f"batches of {batch_size}", progress)
        parts.append(compare(f"batches of {batch_size}", requests, drafted, texts, auditor))
    if not parts:
        return Check.not_run("invariance", "no block sizes or batch sizes were asked for")
    num_equal = sum(part.statistic == 1.0 for part in parts)
    return Check(
        "invariance",
        FLAGGED if any(part.status == FLAGGED for part in parts) else OK,
        f"the same texts in {num_equal} of {len(parts)} other block and batch sizes",
        statistic=num_equal / len(parts),
        details={part.name: {"summary": part.summary, **part.details} for part in parts},
    )


# Temperature above 0 -------------------------------------------------------------------------------------------------

SAMPLED = ("seeded_texts", "seeded_ties", "possible_tokens", "surprise", "uniformity", "directed")


def sampled_checks(
    pair: Pair, prompts: Sequence[Prompt], settings: Settings, progress: Progress
) -> list[Check]:
    """Returns the checks above temperature 0: seeded texts and ties, then the tests of the law, not yet judged."""
    if settings.params.is_greedy:
        return [Check.not_run(name, "the temperature is 0") for name in SAMPLED]
    requests = sampled_requests(prompts, settings.params, settings.num_samples)
    size, auditor = settings.batch_size, Auditor(pair.target, settings.rounding_steps)
    plain = decode(pair.new_engine(plain=True, max_sequences=size), requests, "plain, sampled", progress)
    drafted = decode(pair.new_engine(max_sequences=size), requests, "speculative, sampled", progress)
    draws = draw(pair, requests, size, progress)
    return [
        compare("seeded_texts", requests, plain, drafted, auditor),
        count_flagged("seeded_ties", requests, drafted, auditor, progress),
        *law_checks(draws, settings.alpha / NUM_TESTS),
    ]


def draw(
    pair: Pair,
    requests: Sequence[Request],
    batch_size: int,
    progress: Progress,
    rng: np.random.Generator | None = None,
) -> Draws:
    """Returns what the target's law says of the pair's speculative texts, drafted without a view of the draws.

    Args:
        requests: sampled, each text with noise of its own; see `texts.sampled_requests`.
        rng: for the randomised ranks; by default one of a fixed seed, so that a report can be repeated.
    """
    engine = pair.new_engine(max_sequences=batch_size, keyed_drafts=False)
    if engine.drafter is None:
        raise ConfigError(
            "drafter: expected one, got none; hint: there is nothing to verify in plain decoding"
        )
    recorder = RecordingDrafter(engine.drafter)
    engine.drafter = recorder
    texts = decode(engine, requests, "speculative, drafts recorded", progress)
    rng, parts = rng or np.random.default_rng(0), []
    for done, (request, text) in enumerate(zip(requests, texts, strict=True)):
        progress("reading draws", done, len(requests))
        liked = favourites(text, recorder.texts[done] if recorder.texts else ())  # none in blocks of one slot
        parts.append(measure_draws(pair.target, request, text.token_ids, liked, rng))
    return Draws.join(parts)


def law_checks(draws: Draws, alpha: float) -> list[Check]:
    """Returns the tests of the law, not yet corrected for their number (see `report.judge`). Pure.

    Args:
        alpha: level at which the power of the directed score is stated.
    """
    return [
        possible_check(draws),
        surprise_check(draws),
        uniformity_check(draws),
        directed_check(draws, alpha),
    ]


def possible_check(draws: Draws) -> Check:
    """Returns the check that no token of probability 0 was emitted. Pure."""
    num_positions, num_wrong = draws.moments.num_positions + draws.num_impossible, draws.num_impossible
    return Check(
        "possible_tokens",
        FLAGGED if num_wrong else OK,
        f"{num_wrong} of {num_positions} tokens have probability 0",
        statistic=float(num_wrong),
        bound=upper_bound(num_wrong, num_positions) if num_wrong else rule_of_three(num_positions),
        details={"num_positions": num_positions, "num_flagged": num_wrong},
    )


def surprise_check(draws: Draws) -> Check:
    """Returns the test of how surprising the texts are. Pure."""
    moments, p_value = draws.moments, surprise(draws.moments)
    if p_value is None:
        return Check.not_run(
            "surprise",
            f"the sum over {moments.num_positions} tokens is too skewed ({moments.skewness:.2g}, at most "
            f"{MAX_SKEWNESS:g}); hint: more tokens",
        )
    return Check(
        "surprise",
        OK,
        f"z = {moments.z:+.2f} over {moments.num_positions} tokens",
        statistic=moments.z,
        p_value=p_value,
        details={
            "num_positions": moments.num_positions,
            "mean": moments.observed / moments.num_positions,
            "expected_mean": moments.expected / moments.num_positions,
            "skewness": moments.skewness,
        },
    )


def uniformity_check(draws: Draws) -> Check:
    """Returns the test of the randomised ranks. Pure."""
    num_positions = len(draws.transforms)
    if not num_positions:
        return Check.not_run("uniformity", "no tokens")
    distance, p_value = uniformity(draws.transforms)
    return Check(
        "uniformity",
        OK,
        f"√n·KS = {distance * num_positions**0.5:.2f} over {num_positions} tokens",
        statistic=distance,
        p_value=p_value,
        details={"num_positions": num_positions},
    )


def directed_check(draws: Draws, alpha: float) -> Check:
    """Returns the test of whether drafts leak into the text, with what it could have found. Pure."""
    probs = draws.favourite_probs
    if not len(probs):
        return Check.not_run("directed", "no token of these texts had a draft")
    score, found = directed(draws.favourite_hits, probs), smallest_relaxation(probs, alpha)
    power = (
        "finds nothing"
        if found is None
        else f"finds {found:.1%} of refused drafts accepted, 4 times out of 5"
    )
    return Check(
        "directed",
        OK,
        f"z = {score.z:+.2f} over {score.num_positions} drafts; {power}",
        statistic=score.z,
        p_value=score.p_value,
        details={
            "num_positions": score.num_positions,
            "num_hits": score.num_hits,
            "num_expected": score.num_expected,
            "excess_share": (score.num_hits - score.num_expected) / score.num_positions,
            "power": 0.8,
            "power_alpha": alpha,
            "smallest_relaxation": found,
            "positions_needed": {f"{r:g}": positions_needed(probs, r, alpha) for r in STATED_RELAXATIONS},
        },
    )
