"""Runs made up from known truth: what each arm is worth by kind and load, and how much everything scatters."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from paceline.bench.arms.base import Fingerprint, Load, Outcome, StepTime
from paceline.bench.runs.plan import ArmSpec, Plan
from paceline.bench.runs.rows import PassRecord, Place, Row, Run

Ratio = float | Mapping[str, float] | Callable[[str, Load], float]
NUM_DRAFTS = 7


def saturating(load: Load) -> float:
    """Returns tokens per second of one request: 50 alone, and a server that is full at about 16 at once."""
    return 50.0 / (1.0 + ((load.concurrency or load.rate_per_s or 1.0) - 1.0) / 16.0)


@dataclass(frozen=True)
class Scenario:
    """The truth of a run and its scatter.

    Args:
        ratios: by arm, speed over the baseline's: a number, by kind, or a function of kind and load. The first is the
            baseline, at 1.
        kinds, loads, temperatures, num_blocks, items_per_kind: the design; every arm passes each block twice.
        base_speed: of the baseline, tokens per second of one request at a load.
        spread: sd of the log speed of requests, the same in all arms: it cancels in pairs.
        block_noise: sd of an arm's log ratio between blocks.
        request_noise: sd of a candidate's log ratio between requests of a block.
        pass_noise: sd of the log speed of a request between passes.
        accepted: by arm, chance that the next draft is accepted; arms without one draft nothing.
        failures: by arm, share of requests without an answer.
        diverging: share of a candidate's answers that are not the baseline's.
        has_control, has_records, has_steps: the A/A arm; acceptance by answer (else by pass); step times.
        has_parts: all parts of a step rather than drafting and verifying alone, and copies of memory between passes.
        num_new_tokens: mean length of an answer.
    """

    ratios: Mapping[str, Ratio] = field(default_factory=lambda: {"plain": 1.0, "dflash": 1.5})
    kinds: tuple[str, ...] = ("code", "chat")
    loads: tuple[Load, ...] = (Load(1),)
    temperatures: tuple[float, ...] = (0.0,)
    num_blocks: int = 6
    items_per_kind: int = 2
    base_speed: Callable[[Load], float] = saturating
    spread: float = 0.3
    block_noise: float = 0.02
    request_noise: float = 0.05
    pass_noise: float = 0.02
    accepted: Mapping[str, float] = field(default_factory=lambda: {"dflash": 0.7})
    failures: Mapping[str, float] = field(default_factory=dict)
    diverging: float = 0.0
    has_control: bool = True
    has_records: bool = True
    has_steps: bool = True
    has_parts: bool = False
    num_new_tokens: int = 100
    seed: int = 0

    @property
    def baseline(self) -> str:
        """Name of the first arm."""
        return next(iter(self.ratios))

    @property
    def arms(self) -> tuple[str, ...]:
        """All arms, the A/A control last."""
        return (*self.ratios, *((f"{self.baseline} again",) if self.has_control else ()))

    def ratio(self, arm: str, kind: str, load: Load) -> float:
        """Returns the truth about an arm."""
        known = self.ratios.get(arm, 1.0)
        if isinstance(known, float | int):
            return float(known)
        return known[kind] if isinstance(known, Mapping) else known(kind, load)


def make_run(scenario: Scenario) -> Run:
    """Returns a run whose truth is the scenario's; equal scenarios give equal runs."""
    made = list(_passes(scenario))
    specs = tuple(ArmSpec(name, "synthetic") for name in scenario.ratios)
    plan = Plan(
        specs,
        scenario.loads,
        scenario.temperatures,
        items_per_kind=scenario.items_per_kind,
        num_blocks=scenario.num_blocks,
        has_control=scenario.has_control,
    )
    num_items = scenario.num_blocks * scenario.items_per_kind
    return Run(
        plan=plan.to_dict(),
        workload={
            "name": "synthetic",
            "digest": "0",
            "kinds": dict.fromkeys(scenario.kinds, num_items),
            "notes": [],
        },
        environment={"machine": "none"},
        command="paceline bench",
        started="2026-01-01T00:00:00",
        arms={arm: _fingerprint(arm, scenario) for arm in scenario.arms},
        rows=tuple(row for rows, _ in made for row in rows),
        passes=tuple(record for _, record in made),
    )


def _fingerprint(arm: str, scenario: Scenario) -> Fingerprint:
    drafts = arm in scenario.accepted
    memory = {"target_weights": 500_000_000} | ({"drafter_weights": 50_000_000} if drafts else {})
    reads = {"pass": 400_000_000} | ({"draft": 40_000_000} if drafts else {})
    return Fingerprint(
        {"engine": "synthetic", "dtype": "float32"},
        {"drafter": arm} if drafts else {},
        memory,
        reads if scenario.has_parts else {},
    )


def _passes(scenario: Scenario) -> Iterator[tuple[list[Row], PassRecord]]:
    rng = np.random.default_rng(scenario.seed)
    arms = scenario.arms
    for block in range(scenario.num_blocks):
        items = [
            (kind, f"{kind}-{block}-{i}") for kind in scenario.kinds for i in range(scenario.items_per_kind)
        ]
        effects = {arm: scenario.block_noise * rng.normal() for arm in arms}
        spread = {item: scenario.spread * rng.normal() for _, item in items}
        lengths = {item: int(rng.integers(10, 2 * scenario.num_new_tokens - 9)) for _, item in items}
        own = {(arm, item): scenario.request_noise * rng.normal() for arm in arms for _, item in items}
        turned = arms[block % len(arms) :] + arms[: block % len(arms)]
        for temperature in scenario.temperatures:
            for load in scenario.loads:
                for order, arm in enumerate((*turned, *reversed(turned))):
                    place = Place(block, order, arm, load, temperature)
                    candidate = arm in scenario.ratios and arm != scenario.baseline
                    log_speeds = {
                        item: math.log(scenario.base_speed(load) * scenario.ratio(arm, kind, load))
                        + spread[item]
                        + effects[arm] * (arm != scenario.baseline)
                        + own[arm, item] * candidate
                        + scenario.pass_noise * rng.normal()
                        for kind, item in items
                    }
                    yield _one_pass(scenario, place, items, (log_speeds, lengths), rng)


def _one_pass(
    scenario: Scenario,
    place: Place,
    items: list[tuple[str, str]],
    truth: tuple[dict[str, float], dict[str, int]],
    rng: np.random.Generator,
) -> tuple[list[Row], PassRecord]:
    log_speeds, lengths = truth
    rows, busy_s, due_s = [], 0.0, 0.0
    for kind, item in items:
        if place.load.rate_per_s:
            due_s += rng.exponential(1.0 / place.load.rate_per_s)
        e2e_s = lengths[item] / math.exp(log_speeds[item])
        busy_s += e2e_s
        failed = rng.random() < scenario.failures.get(place.arm, 0.0)
        outcome = (
            Outcome(item, f"{item}: connection reset", due_s)
            if failed
            else _outcome(scenario, place, (item, lengths[item], e2e_s, due_s), rng)
        )
        rows.append(Row(place, kind, 256, outcome))
    last = max((row.outcome.sent_s + (row.outcome.e2e_s or 0.0) for row in rows), default=0.0)
    wall_s = last if place.load.is_open else busy_s / (place.load.concurrency or 1)
    answered = [row.outcome for row in rows if row.outcome.failure is None]
    steps = _steps(scenario, place, answered) if scenario.has_steps and answered else ()
    counters, rates = _counters(scenario, answered), (40e9, 50e9) if scenario.has_parts else ()
    return _cut(scenario, rows), PassRecord(place, wall_s, steps, 600_000_000, counters, rates)


def _outcome(
    scenario: Scenario, place: Place, known: tuple[str, int, float, float], rng: np.random.Generator
) -> Outcome:
    item, num_new_tokens, e2e_s, due_s = known
    candidate = place.arm in scenario.ratios and place.arm != scenario.baseline
    other = candidate and rng.random() < scenario.diverging
    return Outcome(
        item,
        sent_s=due_s,
        ttft_s=0.1 * e2e_s,
        e2e_s=e2e_s,
        max_gap_s=0.05 * e2e_s,
        num_chunks=num_new_tokens,
        num_prompt_tokens=50,
        num_new_tokens=num_new_tokens,
        finish_reason="stop",
        acceptance=_acceptance(scenario.accepted.get(place.arm), num_new_tokens, rng),
        text=f"{item}@{place.temperature:g}" + (" of its own" if other else ""),
    )


def _acceptance(
    chance: float | None, num_new_tokens: int, rng: np.random.Generator
) -> tuple[tuple[int, int, int], ...]:
    if chance is None:
        return ()
    steps: dict[int, int] = {}
    left = num_new_tokens
    while left > 0:
        num_accepted = int(min(NUM_DRAFTS, rng.geometric(1.0 - chance) - 1))
        steps[num_accepted] = steps.get(num_accepted, 0) + 1
        left -= num_accepted + 1
    return tuple((NUM_DRAFTS, num_accepted, count) for num_accepted, count in sorted(steps.items()))


def _steps(scenario: Scenario, place: Place, answered: list[Outcome]) -> tuple[StepTime, ...]:
    """Returns steps that add up to the answers' time, a tenth of which goes to the prompt."""
    num_sequences = place.load.concurrency or 1
    drafts = place.arm in scenario.accepted
    num_steps = sum(
        sum(n for *_, n in o.acceptance or ()) if drafts else o.num_new_tokens or 0 for o in answered
    )
    total_s = 0.9 * sum(outcome.e2e_s or 0.0 for outcome in answered) / num_sequences
    num_steps = max(1, num_steps // num_sequences)
    draft_s, verify_s = 0.2 * total_s * drafts, 0.7 * total_s
    if not scenario.has_parts:
        return (StepTime(num_sequences, num_steps, total_s, draft_s, verify_s),)
    small_s, num_rows = 0.02 * total_s, num_sequences * (1 + NUM_DRAFTS * drafts)
    passes = ((num_rows, num_steps, verify_s, small_s),)
    return (
        StepTime(num_sequences, num_steps, total_s, draft_s, verify_s, small_s, small_s, small_s, passes),
    )


def _counters(scenario: Scenario, answered: list[Outcome]) -> dict[str, float]:
    triples = [triple for outcome in answered for triple in outcome.acceptance or ()]
    if scenario.has_records or not triples:
        return {}
    counters = {"num_steps": sum(n for _, _, n in triples), "num_drafted": sum(d * n for d, _, n in triples)}
    counters["num_accepted"] = sum(a * n for _, a, n in triples)
    counters |= {f"accepted_{i}": sum(n for _, a, n in triples if a > i) for i in range(NUM_DRAFTS)}
    return {name: float(count) for name, count in counters.items()}


def _cut(scenario: Scenario, rows: list[Row]) -> list[Row]:
    """Returns the rows, without records of acceptance where nobody keeps them."""
    if scenario.has_records:
        return rows
    return [
        dataclasses.replace(row, outcome=dataclasses.replace(row.outcome, acceptance=None)) for row in rows
    ]
