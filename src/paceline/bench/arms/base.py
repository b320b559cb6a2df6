"""What is compared: arms, what is known of each, and whether two may be compared at all."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from paceline.core.errors import ConfigError, PacelineError
from paceline.core.params import SamplingParams
from paceline.core.prompts import Messages


class ArmError(PacelineError):
    """An arm that cannot be opened or has died: nothing it should have measured can be had."""


@dataclass(frozen=True, slots=True)
class Load:
    """How requests come: so many at once, one after the other (closed loop), or at a rate of their own (open loop).

    Args:
        concurrency: requests in flight at any time; `None` in an open loop.
        rate_per_s: mean arrivals per second of a Poisson process; `None` in a closed loop and in a replay.
        speed: factor by which a log's own arrivals are hastened in a replay; `None` elsewhere.
    """

    concurrency: int | None = None
    rate_per_s: float | None = None
    speed: float | None = None

    def __post_init__(self) -> None:
        given = [v for v in (self.concurrency, self.rate_per_s, self.speed) if v is not None]
        if len(given) != 1 or not 0 < given[0] < math.inf:
            raise ConfigError(
                f"load: expected one of concurrency, rate_per_s and speed, above 0; got {self.concurrency}, "
                f"{self.rate_per_s} and {self.speed}"
            )

    @property
    def is_open(self) -> bool:
        """Whether requests come whether or not others are finished."""
        return self.concurrency is None

    @property
    def label(self) -> str:
        """Its name in reports and rows."""
        if self.concurrency is not None:
            return f"{self.concurrency} at once"
        return f"{self.rate_per_s:g}/s" if self.rate_per_s is not None else f"replay ×{self.speed:g}"


@dataclass(frozen=True, slots=True)
class Job:
    """A request as an arm gets it.

    Args:
        id: the item's.
        messages: see `Item`.
        params: max_new_tokens, temperature, top_p, top_k and seed; nothing else is set.
        due_s: open loop: when to send it, in seconds after the pass began; 0 in a closed loop.
    """

    id: str
    messages: Messages
    params: SamplingParams
    due_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a job. All times are wall-clock seconds; `None` is what is not known, never a guess.

    Args:
        id: the job's.
        failure: why there is no answer, in words that name the request; `None` where there is one. Then every number
            below but `sent_s` is `None`.
        sent_s: when it was sent (closed loop) or due (open loop), after the pass began. What follows counts from there.
        ttft_s: to the first token (or the first chunk that holds text).
        e2e_s: to the last.
        max_gap_s: longest wait between two chunks, `None` with fewer than two.
        num_chunks: pieces in which the answer came.
        num_prompt_tokens, num_new_tokens: as the engine or the server's usage counts them; never chunks.
        finish_reason: as the arm says it.
        acceptance: verify steps of this answer as (num_drafted, num_accepted, how many such steps), before any cut;
            `None` where the arm does not say, empty where nothing was drafted.
        text: digest of the answer, equal where the answers are.
    """

    id: str
    failure: str | None = None
    sent_s: float = 0.0
    ttft_s: float | None = None
    e2e_s: float | None = None
    max_gap_s: float | None = None
    num_chunks: int | None = None
    num_prompt_tokens: int | None = None
    num_new_tokens: int | None = None
    finish_reason: str | None = None
    acceptance: tuple[tuple[int, int, int], ...] | None = None
    text: str | None = None


@dataclass(frozen=True, slots=True)
class StepTime:
    """Steps of an engine that had the same number of sequences: how many, and what they took in all.

    Args:
        num_sequences: that stepped together.
        num_steps: so many steps.
        total_s, draft_s, verify_s: seconds of all of them: whole steps, and of these drafting and verifying.
        sample_s, inject_s, keep_s: of these the other parts, see `StepRecord`; `None` in runs of versions that did not
            keep them.
        passes: the steps by rows of the target's pass, anchors and drafts of all sequences together: (rows, how many
            such steps, their verify_s, their sample_s); empty where `sample_s` is `None`.
    """

    num_sequences: int
    num_steps: int
    total_s: float
    draft_s: float
    verify_s: float
    sample_s: float | None = None
    inject_s: float | None = None
    keep_s: float | None = None
    passes: tuple[tuple[int, int, float, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Passed:
    """What an arm did with the jobs of one pass.

    Args:
        outcomes: one for each job, in any order.
        wall_s: from the first job sent to the last answer.
        step_times: of a pass of an engine in this process; without steps in which a prompt was read.
        peak_memory_bytes: most memory that the arm's process held during the pass.
        counters: acceptance that a server counted for all requests of the pass together: "num_steps", "num_drafted",
            "num_accepted" and, where it has them, "accepted_0", "accepted_1", … by slot. Empty where it counts none.
        copy_bytes_per_s: what the device copied just before the pass, see `copying`; empty where nobody asked.
        notes: sentences on what should be known of the pass and is not, with the reason.
    """

    outcomes: tuple[Outcome, ...]
    wall_s: float
    step_times: tuple[StepTime, ...] = ()
    peak_memory_bytes: int | None = None
    counters: Mapping[str, float] = field(default_factory=dict)
    copy_bytes_per_s: tuple[float, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What is known of an arm.

    Args:
        basis: everything that must not differ between two arms: engine and its version, target, its weights' digest,
            tokenizer digest, dtype, device, threads, flags. Values are text.
        speculation: what may: kind of drafter, its digest, block size, tree nodes. Empty in plain decoding.
        memory: bytes by name, such as "target_weights", "drafter_weights", "drafter_kv_per_token"; they differ with
            speculation and are its cost.
        reads: bytes of weights that are read from one end to the other in "pass", one pass of the target, and "draft",
            one draft of a drafter that drafts in every step; without what is not known.
    """

    basis: Mapping[str, str]
    speculation: Mapping[str, str] = field(default_factory=dict)
    memory: Mapping[str, int] = field(default_factory=dict)
    reads: Mapping[str, int] = field(default_factory=dict)


def text_digest(ids: Iterable[int]) -> str:
    """Returns the digest of an answer's token ids, an end token included: 16 hex digits, equal where all ids are."""
    return hashlib.sha256(",".join(map(str, ids)).encode("ascii")).hexdigest()[:16]


Done = Callable[[Outcome], None]
"""Told of each outcome as it comes."""


class Arm(Protocol):
    """One way to decode, such as an engine of this process or a server."""

    @property
    def name(self) -> str:
        """What the plan calls it."""

    @property
    def max_concurrency(self) -> int | None:
        """Most requests it works on at once; `None` is no limit of its own. Passes beyond are not planned."""

    def open(self) -> Fingerprint:
        """Makes it ready and returns what is known of it; harmless when open.

        Raises:
            ArmError: it cannot be had, with the reason and the end of its log where it has one.
        """

    def run(self, jobs: Sequence[Job], load: Load, done: Done) -> Passed:
        """Returns what came of the jobs. A job that fails is an outcome; an arm that has died is not.

        Raises:
            ArmError: it died and cannot go on.
            KeyboardInterrupt: after Ctrl-C; the arm is usable afterwards.
        """

    def close(self) -> None:
        """Gives back what it holds; harmless when closed. It can be opened again."""
