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
from dataclasses import dataclass
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
from paceline.bench.arms.drafting import Drafting, Options, drafting
from paceline.core.errors import (
    CapacityError,
    CheckpointError,
    ConfigError,
    IncompatiblePairError,
    PacelineError,
    RequestError,
)
from paceline.core.types import Request
from paceline.engine.engine import Engine
from paceline.engine.runtime import peak_memory_bytes, reset_peak_memory
from paceline.llm import LLM
from paceline.target.folder import sha256_of
from paceline.target.native import NativeTarget
from paceline.target.weights import read_tensors


def local_arm(name: str, kind: str, options: Options, llm: LLM) -> EngineArm:
    """Returns an arm over a loaded pair, closed.

    Args:
        name: what the plan calls it.
        kind: "plain"; "dflash", the pair's own drafter, of whatever variant; "drafter", one from a folder; "lookup"; or
            "combined", lookup together with the pair's own.
        options: of "drafter" `path`, the folder. Else whole numbers: `block_size` and `tree_nodes` (0 for chains), both
            as the pair drafts unless given, and those of `PromptLookup`.
        llm: the pair; arms may share it.

    Raises:
        ConfigError: an unknown kind or option, a value that makes no engine, or no drafter where the kind needs one.
        CheckpointError, IncompatiblePairError: the folder holds no drafter, or one for another target.
    """
    try:
        return EngineArm(name, llm, drafting(kind, options, llm))
    except (ConfigError, CheckpointError, IncompatiblePairError) as error:
        raise type(error)(f"arm {name!r}: {error}") from error


class EngineArm:
    """Decodes with an engine of this process, a new one for each pass.

    Args:
        name: what the plan calls it.
        llm: the pair.
        drafting: who drafts; `None` decodes plainly.

    Raises:
        ConfigError: a block size that the drafter does not have.
    """

    max_concurrency: int | None = None

    def __init__(self, name: str, llm: LLM, drafting: Drafting | None) -> None:
        self.name = name
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
        memory, who = _target_memory(self._llm), self._drafting
        if who is None:
            return Fingerprint(_basis(self._llm), {}, memory)
        if who.weights is not None:
            memory |= who.weights.memory(self._llm.dtype.itemsize)
        return Fingerprint(_basis(self._llm), who.speculation(self._block_size), memory)

    def run(self, jobs: Sequence[Job], load: Load, done: Done) -> Passed:
        """Returns what came of the jobs; see `Arm`.

        A closed loop steps `load.concurrency` sequences together, an open loop at most as many as the pair allows:
        what comes beyond waits, and its times count from when it was due. Pieces that one step made come together.

        Raises:
            ArmError: a step failed, such as for lack of memory.
        """
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


@dataclass(slots=True)
class _Times:
    """Steps of one number of sequences, so far."""

    num_steps: int = 0
    total_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0

    def sum(self, num_sequences: int) -> StepTime:
        """Returns them as a record."""
        return StepTime(num_sequences, self.num_steps, self.total_s, self.draft_s, self.verify_s)


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
        reads_prompts, started = self._engine.scheduler.has_room, time.perf_counter()
        try:
            deltas = self._engine.step()
        except (PacelineError, RuntimeError, MemoryError) as error:
            raise _StepError from error
        now, elapsed = self._now(), time.perf_counter() - started
        record = next((delta.step for delta in deltas if delta.step is not None), None)
        if record is not None and not reads_prompts:
            times = self.times.setdefault(record.num_sequences, _Times())
            times.num_steps += 1
            times.total_s += elapsed
            times.draft_s += record.draft_s  # one batch shares them, so one record says them for all
            times.verify_s += record.verify_s
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


def _target_memory(llm: LLM) -> dict[str, int]:
    """Returns bytes of the target's parameters and of its K/V; a runner may hold packed copies beside them."""
    size = llm.dtype.itemsize
    memory = {"target_weights": size * sum(t.numel() for t in read_tensors(llm.folder).values())}
    if isinstance(llm.target, NativeTarget):  # other runners' K/V depend on the architecture
        shape = llm.target.shape
        memory["target_kv_per_token"] = 2 * size * shape.num_layers * shape.num_kv_heads * shape.head_dim
    return memory


def _weights_digest(folder: Path) -> str:
    """Returns the sha256 of a folder's weights: the file's own, or with several files that of their digests."""
    stats = [(path, path.stat()) for path in sorted(folder.glob("*.safetensors"))]
    digests = [_file_digest(path, stat.st_size, stat.st_mtime_ns) for path, stat in stats]
    return digests[0] if len(digests) == 1 else hashlib.sha256(" ".join(digests).encode()).hexdigest()


@cache
def _file_digest(path: Path, num_bytes: int, modified_ns: int) -> str:
    """Returns the sha256 of a file, read again only where it has changed."""
    return sha256_of(path)
