"""Arms of this process: the engine over one loaded pair, plain or with someone who drafts: the pair's own drafter,
another one, prompt lookup, or lookup and the pair's own together.

All arms share the pair, so they differ in who drafts and in nothing else. They also share its memory: the peak of any
of them holds the weights of every drafter; a fingerprint's `memory` says what belongs to whom.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import torch

from paceline import __version__
from paceline.bench.arms.base import (
    ArmError,
    Done,
    Fingerprint,
    Job,
    Load,
    Outcome,
    Passed,
    StepTime,
    text_digest,
)
from paceline.bench.arms.copying import copy_rates
from paceline.bench.arms.drafting import Drafting, Options, drafting
from paceline.core.errors import (
    CapacityError,
    CheckpointError,
    ConfigError,
    IncompatiblePairError,
    PacelineError,
    RequestError,
)
from paceline.core.types import Request, StepRecord
from paceline.engine.engine import Engine
from paceline.engine.runtime import peak_memory_bytes, reset_peak_memory
from paceline.llm import LLM
from paceline.target.folder import sha256_of
from paceline.target.native import NativeTarget
from paceline.target.weights import read_tensors


def local_arm(
    name: str, kind: str, options: Options, llm: LLM, *, measures_copies: bool = False
) -> EngineArm:
    """Returns an arm over a loaded pair, closed.

    Args:
        name: what the plan calls it.
        kind: "plain"; "dflash", the pair's own drafter, of whatever variant; "drafter", one from a folder; "lookup"; or
            "combined", lookup together with the pair's own.
        options: of "drafter" `path`, the folder. Else whole numbers: `block_size` and `tree_nodes` (0 for chains), both
            as the pair drafts unless given, and those of `PromptLookup`.
        llm: the pair; arms may share it.
        measures_copies: see `EngineArm`.

    Raises:
        ConfigError: an unknown kind or option, a value that makes no engine, or no drafter where the kind needs one.
        CheckpointError, IncompatiblePairError: the folder holds no drafter, or one for another target.
    """
    try:
        return EngineArm(name, llm, drafting(kind, options, llm), measures_copies=measures_copies)
    except (ConfigError, CheckpointError, IncompatiblePairError) as error:
        raise type(error)(f"arm {name!r}: {error}") from error


class EngineArm:
    """Decodes with an engine of this process, a new one for each pass.

    Args:
        name: what the plan calls it.
        llm: the pair.
        drafting: who drafts; `None` decodes plainly.
        measures_copies: before each pass, how fast the device copies memory.

    Raises:
        ConfigError: a block size that the drafter does not have.
    """

    max_concurrency: int | None = None

    def __init__(
        self, name: str, llm: LLM, drafting: Drafting | None, *, measures_copies: bool = False
    ) -> None:
        self.name, self._measures_copies = name, measures_copies
        self._llm, self._drafting = llm, drafting
        self._block_size = self._new_engine(1).block_size  # refuses one that the drafter does not have

    def _new_engine(self, max_sequences: int) -> Engine:
        if self._drafting is None:
            return self._llm.new_engine(plain=True, max_sequences=max_sequences)
        return self._llm.new_engine(
            drafter=self._drafting.drafter,
            block_size=self._drafting.block_size,
            max_sequences=max_sequences,
        )

    def open(self) -> Fingerprint:
        """Returns what is known of the arm; the pair is loaded already.

        Raises:
            ArmError: the target has no chat template, so no job can be put to it.
        """
        if not self._llm.codec.has_chat_template:
            raise ArmError(
                f"{self.name}: {self._llm.target.spec.name} has no chat template; hint: an instruct model"
            )
        (memory, reads), who = _target_sizes(self._llm), self._drafting
        if who is None:
            return Fingerprint(_basis(self._llm), {}, memory, reads)
        size = self._llm.dtype.itemsize
        if who.weights is not None:
            memory |= who.weights.memory(size)
        if (num_read := who.num_read(self._block_size)) is not None:
            reads["draft"] = size * num_read
        return Fingerprint(_basis(self._llm), who.speculation(self._block_size), memory, reads)

    def run(self, jobs: Sequence[Job], load: Load, done: Done) -> Passed:
        """Returns what came of the jobs; see `Arm`.

        A closed loop steps `load.concurrency` sequences together, an open loop at most as many as the pair allows:
        what comes beyond waits, and its times count from when it was due. Pieces that one step made come together.

        Raises:
            ArmError: a step failed, such as for lack of memory.
        """
        rates = copy_rates(self._llm.device) if self._measures_copies else ()
        engine = self._new_engine(load.concurrency or self._llm.max_sequences)
        counts = reset_peak_memory(self._llm.device)
        current = _Pass(self._llm, engine, jobs, load, done)
        try:
            current.run()
        except _StepError as error:
            raise ArmError(f"{self.name}: a step failed ({error.__cause__})") from error.__cause__
        finally:
            engine.close()
        return Passed(
            tuple(current.outcomes),
            current.wall_s,
            tuple(times.sum(number) for number, times in sorted(current.times.items())),
            peak_memory_bytes(self._llm.device) if counts else None,
            copy_bytes_per_s=rates,
        )

    def close(self) -> None:
        """Does nothing: the pair belongs to whoever loaded it."""


# One pass ------------------------------------------------------------------------------------------------------------


class _StepError(Exception):
    """A step raised what its cause says."""


@dataclass(slots=True, eq=False)
class _Flight:
    """A job on its way and when its pieces came, in seconds after the pass began."""

    job: Job
    sent_s: float
    num_chunks: int = 0
    first_s: float | None = None
    last_s: float = 0.0
    max_gap_s: float | None = None

    def see(self, now: float) -> None:
        """Notes a piece that holds tokens. Mutates: self."""
        if self.first_s is None:
            self.first_s = now
        else:
            self.max_gap_s = max(self.max_gap_s or 0.0, now - self.last_s)
        self.last_s = now
        self.num_chunks += 1


_PARTS = ("draft_s", "verify_s", "sample_s", "inject_s", "keep_s")


@dataclass(slots=True)
class _Times:
    """Steps of one number of sequences, so far."""

    num_steps: int = 0
    total_s: float = 0.0
    parts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_PARTS, 0.0))
    passes: dict[int, tuple[int, float, float]] = field(default_factory=dict)

    def add(self, total_s: float, record: StepRecord, num_rows: int) -> None:
        """Counts a step.

        Args:
            record: of any of its sequences: they share the times.
            num_rows: of the target's pass.

        Mutates: self.
        """
        self.num_steps += 1
        self.total_s += total_s
        for part in _PARTS:
            self.parts[part] += getattr(record, part)
        count, verify_s, sample_s = self.passes.get(num_rows, (0, 0.0, 0.0))
        self.passes[num_rows] = (count + 1, verify_s + record.verify_s, sample_s + record.sample_s)

    def sum(self, num_sequences: int) -> StepTime:
        """Returns them as a record."""
        passes = tuple((num_rows, *known) for num_rows, known in sorted(self.passes.items()))
        return StepTime(num_sequences, self.num_steps, self.total_s, **self.parts, passes=passes)


class _Pass:
    """Sends jobs into an engine and notes what comes out, and when."""

    def __init__(self, llm: LLM, engine: Engine, jobs: Sequence[Job], load: Load, done: Done) -> None:
        self._llm, self._engine, self._load, self._done = llm, engine, load, done
        self._waiting = deque(sorted(jobs, key=lambda job: job.due_s) if load.is_open else jobs)
        self._flights: dict[str, _Flight] = {}
        self._began = time.perf_counter()
        self._ended_s = 0.0
        self.outcomes: list[Outcome] = []
        self.times: dict[int, _Times] = {}

    @property
    def wall_s(self) -> float:
        """Seconds from the first job sent to the last outcome."""
        return self._ended_s - min((outcome.sent_s for outcome in self.outcomes), default=0.0)

    def run(self) -> None:
        """Works until every job has its outcome. Mutates: self, the engine."""
        while self._waiting or self._flights:
            while self._waiting and self._is_due(self._waiting[0]):
                self._send(self._waiting.popleft())
            if self._flights:
                self._step()
            elif self._waiting:
                time.sleep(max(0.0, self._waiting[0].due_s - self._now()))

    def _now(self) -> float:
        return time.perf_counter() - self._began

    def _is_due(self, job: Job) -> bool:
        if self._load.concurrency is None:
            return job.due_s <= self._now()
        return len(self._flights) < self._load.concurrency

    def _send(self, job: Job) -> None:
        flight = _Flight(job, job.due_s if self._load.is_open else self._now())
        try:
            self._engine.add(Request(job.id, tuple(self._llm.render(job.messages)), job.params))
        except (RequestError, CapacityError) as error:
            self._finish(Outcome(job.id, f"{job.id}: {error}", flight.sent_s))
        else:
            self._flights[job.id] = flight

    def _step(self) -> None:
        scheduler = self._engine.scheduler
        reads_prompts = scheduler.has_room or any(sequence.is_prefilling for sequence in scheduler.running)
        started = time.perf_counter()
        try:
            deltas = self._engine.step()
        except (PacelineError, RuntimeError, MemoryError) as error:
            raise _StepError from error
        now, elapsed = self._now(), time.perf_counter() - started
        records = [delta.step for delta in deltas if delta.step is not None]
        if records and not reads_prompts:
            times = self.times.setdefault(records[0].num_sequences, _Times())
            times.add(elapsed, records[0], sum(1 + record.num_drafted for record in records))
        for delta in deltas:
            if delta.token_ids:
                self._flights[delta.request_id].see(now)
        for delta in deltas:
            if delta.finish_reason is not None:
                self._finish(self._outcome(self._flights.pop(delta.request_id), now))

    def _outcome(self, flight: _Flight, now: float) -> Outcome:
        completion = self._engine.take_completion(flight.job.id)
        name, sent_s = flight.job.id, flight.sent_s
        if completion.finish_reason not in ("stop", "length"):
            reason = completion.stop_reason or completion.finish_reason
            return Outcome(name, f"{name}: ended without an answer ({reason})", sent_s)
        steps = completion.steps if self._engine.drafter is not None else ()
        counts = Counter((step.num_drafted, step.num_accepted) for step in steps)
        return Outcome(
            id=name,
            sent_s=sent_s,
            ttft_s=None if flight.first_s is None else flight.first_s - sent_s,
            e2e_s=now - sent_s,
            max_gap_s=flight.max_gap_s,
            num_chunks=flight.num_chunks,
            num_prompt_tokens=len(completion.prompt_ids),
            num_new_tokens=len(completion.token_ids),
            finish_reason=completion.finish_reason,
            acceptance=tuple((*step, count) for step, count in sorted(counts.items())),
            text=text_digest(completion.token_ids),
        )

    def _finish(self, outcome: Outcome) -> None:
        self._ended_s = self._now()
        self.outcomes.append(outcome)
        self._done(outcome)


# Fingerprints --------------------------------------------------------------------------------------------------------


def _basis(llm: LLM) -> dict[str, str]:
    """Returns what all arms over a pair have alike."""
    return {
        "engine": f"paceline {__version__}",
        "target": llm.target.spec.name,
        "target_digest": _weights_digest(llm.folder),
        "tokenizer_digest": llm.codec.digest,
        "dtype": str(llm.dtype).removeprefix("torch."),
        "device": str(llm.device),
        "backend": llm.backend,
        "num_threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "exact": str(llm.exact),
    }


def _target_sizes(llm: LLM) -> tuple[dict[str, int], dict[str, int]]:
    """Returns bytes of the target's parameters and K/V, and of the weights that a pass reads; see `Fingerprint`.

    A runner may hold packed copies beside them. What other runners' passes read and keep depends on the architecture.
    """
    size, numbers = llm.dtype.itemsize, {name: t.numel() for name, t in read_tensors(llm.folder).items()}
    memory = {"target_weights": size * sum(numbers.values())}
    if not isinstance(llm.target, NativeTarget):
        return memory, {}
    shape = llm.target.shape
    memory["target_kv_per_token"] = 2 * size * shape.num_layers * shape.num_kv_heads * shape.head_dim
    layers = sum(count for name, count in numbers.items() if not name.endswith(_NOT_READ))
    return memory, {"pass": size * (layers + llm.target.head_weight.numel())}  # the head, be it the embedding


_NOT_READ = ("embed_tokens.weight", "lm_head.weight", "rotary_emb.inv_freq")
"""Tensors that no pass reads as they are: rows of an embedding are looked up, and a head may be tied to it."""


def _weights_digest(folder: Path) -> str:
    """Returns the sha256 of a folder's weights: the file's own, or with several files that of their digests."""
    stats = [(path, path.stat()) for path in sorted(folder.glob("*.safetensors"))]
    digests = [_file_digest(path, stat.st_size, stat.st_mtime_ns) for path, stat in stats]
    return digests[0] if len(digests) == 1 else hashlib.sha256(" ".join(digests).encode()).hexdigest()


@cache
def _file_digest(path: Path, num_bytes: int, modified_ns: int) -> str:
    """Returns the sha256 of a file, read again only where it has changed."""
    return sha256_of(path)
