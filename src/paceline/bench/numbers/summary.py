"""Shapes of what is computed from a run's rows: intervals, cells, curves, decisions. Frozen values; see `metrics`."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.bench.arms.base import Load


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with its interval; its confidence stands where it is used.

    Args:
        estimate, low, high: low ≤ estimate ≤ high; infinite ends where the data say nothing.
    """

    estimate: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Percentiles:
    """p50, p90 and p99 of a quantity over requests, in its unit."""

    p50: Interval
    p90: Interval
    p99: Interval


@dataclass(frozen=True, slots=True)
class Acceptance:
    """How drafts fared.

    Args:
        length: τ = 1 + accepted / verify steps, pooled, before any cut by end or length.
        rate: by slot, P(accepted | all before accepted).
        survival: by slot, P(accepted).
        histogram: steps by number of accepted drafts.
        source: "requests" where each answer has its own record, "counters" where a server counts all together.
    """

    length: Interval
    rate: tuple[float, ...]
    survival: tuple[float, ...]
    histogram: tuple[int, ...]
    source: str


@dataclass(frozen=True, slots=True)
class Cell:
    """One arm at one load and temperature, over all requests or over those of one kind.

    Args:
        arm, load, temperature: which.
        kind: `None` is all kinds together, in the workload's own mixture.
        num_requests, num_failures: sent, and of these without an answer.
        ratio: output speed over the baseline's, geometric mean of paired ratios; `None` for the baseline itself, and
            where no request was answered by both.
        tokens_per_s: all output tokens over the passes' wall time; `None` for a single kind.
        tokens_per_s_per_user: median over requests of 1 / TPOT.
        ttft_s, tpot_s, e2e_s, max_gap_s: over requests.
        good_share: share of requests that meet the latency target, failures counting as not met; `None` without one.
        acceptance: `None` where the arm does not say or drafts nothing.
        num_compared, num_identical: answers that the baseline gave too, and of these equal ones.
        length_p_value: of a two-sample test that answers are as long as the baseline's; `None` for the baseline.
        steps: draft, verify and whole-step milliseconds by number of sequences:
            (num_sequences, num_steps, total_ms, draft_ms, verify_ms) means; empty where unknown, or for a single kind.
    """

    arm: str
    load: Load
    temperature: float
    kind: str | None
    num_requests: int
    num_failures: int
    ratio: Interval | None = None
    tokens_per_s: Interval | None = None
    tokens_per_s_per_user: Interval | None = None
    ttft_s: Percentiles | None = None
    tpot_s: Percentiles | None = None
    e2e_s: Percentiles | None = None
    max_gap_s: Percentiles | None = None
    good_share: Interval | None = None
    acceptance: Acceptance | None = None
    num_compared: int = 0
    num_identical: int = 0
    length_p_value: float | None = None
    steps: tuple[tuple[int, int, float, float, float], ...] = ()


@dataclass(frozen=True, slots=True)
class BreakEven:
    """What acceptance an arm needs at a batch size, from measured step times, and what it has.

    Args:
        arm, temperature, num_sequences: which.
        plain_ms, draft_ms, verify_ms, total_ms: mean times of the baseline's step and of the arm's.
        needed: τ above which drafting pays: total_ms / plain_ms.
        needed_parts: the same without what is neither drafting nor verifying: (verify_ms + draft_ms) / plain_ms.
        acceptance_length: what the arm has there.
    """

    arm: str
    temperature: float
    num_sequences: int
    plain_ms: float
    draft_ms: float
    verify_ms: float
    total_ms: float
    needed: float
    needed_parts: float
    acceptance_length: float


@dataclass(frozen=True, slots=True)
class StepParts:
    """Where the time of an arm's steps of one number of sequences goes, as means over steps that read no prompt.

    Args:
        arm, temperature, num_sequences: which.
        num_steps: so many.
        total_ms: a whole step; the parts add up to it.
        draft_ms, verify_ms, sample_ms, inject_ms, keep_ms: see `StepRecord`.
        host_ms: all the rest, such as scheduling, delivery and the decoding of text.
        pass_of_floor, draft_of_floor: what reading the weights of a pass or draft takes at the best copy rate, over
            what the pass or draft takes; `None` where either is not known. See `PassTime` for what a pass is.
    """

    arm: str
    temperature: float
    num_sequences: int
    num_steps: int
    total_ms: float
    draft_ms: float
    verify_ms: float
    sample_ms: float
    inject_ms: float
    keep_ms: float
    host_ms: float
    pass_of_floor: float | None = None
    draft_of_floor: float | None = None

    @property
    def parts_ms(self) -> dict[str, float]:
        """The parts by name, the largest of plain decoding first."""
        names = ("verify", "draft", "sample", "inject", "keep", "host")
        return {name: getattr(self, f"{name}_ms") for name in names}


@dataclass(frozen=True, slots=True)
class PassTime:
    """What the target's passes of an arm take, by their rows: anchors and drafts of all sequences of a step.

    Args:
        arm, temperature: which.
        min_rows, max_rows: the passes that are taken together: 1, 2, 3–4, 5–8, …
        num_passes: so many.
        mean_rows: of them.
        pass_ms: mean time, verifying; where a device computes while its host goes on, sampling too, as the host waits
            for the pass there.
        row_ms: the same for each row.
        of_floor: see `StepParts`.
    """

    arm: str
    temperature: float
    min_rows: int
    max_rows: int
    num_passes: int
    mean_rows: float
    pass_ms: float
    row_ms: float
    of_floor: float | None = None


@dataclass(frozen=True, slots=True)
class CopyRate:
    """How fast the machine copied memory between the passes, in bytes per second, read and written ones together."""

    best_bytes_per_s: float
    median_bytes_per_s: float
    num_copies: int


@dataclass(frozen=True, slots=True)
class Profile:
    """Where the time of steps goes, of each arm whose engine ran in this process.

    Args:
        steps, passes: by arm, temperature, and number of sequences or rows.
        copy: `None` where it was not measured; then nothing has a floor.
        read_bytes: by arm, what one pass and one draft read; see `Fingerprint`.
        missing: arms of which nothing is known, such as servers.
    """

    steps: tuple[StepParts, ...]
    passes: tuple[PassTime, ...]
    copy: CopyRate | None
    read_bytes: dict[str, dict[str, int]]
    missing: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Frontier:
    """Throughput against interactivity of one arm: one point a closed load, in the order of loads.

    Args:
        points: (load label, tok/s per user, tok/s of all).
        at_equal_interactivity: largest throughput ratio to the baseline at the same tok/s per user, with that tok/s per
            user; `None` where the two curves share no range.
        at_equal_throughput: largest ratio of tok/s per user at the same throughput, with that throughput.
    """

    arm: str
    temperature: float
    points: tuple[tuple[str, float, float], ...]
    at_equal_interactivity: tuple[float, float] | None = None
    at_equal_throughput: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class Capacity:
    """The highest load at which an arm meets the latency target.

    Args:
        unit: "at once" or "requests/s".
        load: with its interval, `None` where the target is missed at the lowest load that was run.
        is_censored: whether the target is still met at the highest load that was run: the capacity is at least that.
        ratio: to the baseline's capacity, `None` where either is unknown or censored.
        good_tokens_per_s: output tokens per second of good answers at that load.
    """

    arm: str
    temperature: float
    unit: str
    load: Interval | None
    is_censored: bool
    ratio: Interval | None
    good_tokens_per_s: float | None


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether to use an arm instead of the baseline.

    Args:
        arm: the candidate.
        verdict: "on", "off", "on below", "on for", "cannot tell".
        sentence: the verdict in words, with its numbers.
        below: concurrency (or rate) below which it is on; `None` otherwise.
        kinds: for which it is on; empty otherwise.
        reasons: the rules that decided, one sentence each, with numbers and intervals.
        table: the one-page verdict: (item, number, interval, rule, "pass", "fail" or "unknown").
        more_blocks: estimated further blocks for a clear answer; `None` where it is clear or more would not help.
        more_s: the same in seconds of this run's pace.
    """

    arm: str
    verdict: str
    sentence: str
    below: float | None = None
    kinds: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    table: tuple[tuple[str, str, str, str, str], ...] = ()
    more_blocks: int | None = None
    more_s: float | None = None


@dataclass(frozen=True, slots=True)
class Summary:
    """Everything a report says, computed from a `Run` alone.

    Args:
        baseline: name of the arm that all ratios refer to.
        cells: every arm but the control × load × temperature, all kinds first and then each kind.
        break_even, frontiers, capacities: see there; empty where they cannot be had.
        crossovers: by arm and temperature, the closed load at which the ratio falls through 1 (interpolated on the log
            of the load), with its interval; an arm that never does is not listed.
        control: A/A: the ratio of "baseline again" to the baseline, as cells of kind `None`.
        decisions: one for each candidate arm, best first.
        failures: (arm, load label, reason, count, an example's request id).
        costs: price per million good tokens by (arm, load label, temperature); empty without a price.
        excluded: arms that were not compared, with the reason.
        profile: `None` where no arm's steps were timed in all their parts.
    """

    baseline: str
    cells: tuple[Cell, ...]
    break_even: tuple[BreakEven, ...] = ()
    frontiers: tuple[Frontier, ...] = ()
    capacities: tuple[Capacity, ...] = ()
    crossovers: tuple[tuple[str, float, Interval], ...] = ()
    control: tuple[Cell, ...] = ()
    decisions: tuple[Decision, ...] = ()
    failures: tuple[tuple[str, str, str, int, str], ...] = ()
    costs: tuple[tuple[str, str, float, Interval], ...] = field(default_factory=tuple)
    excluded: tuple[tuple[str, str], ...] = ()
    profile: Profile | None = None
