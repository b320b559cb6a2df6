"""Arms over other implementations of a pair (see `oracles`), which get the same prompts and limits as our engine.

They answer one request at a time; an open loop queues. At temperature 0 in float32 their texts are ours; above it each
draws by its own sampler, so a seed repeats a text of the same arm and says nothing about another's. All of them share
one copy of the target, which lives beside ours: the peak of memory that they report holds both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from time import perf_counter, sleep
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from paceline.bench.arms.base import ArmError, Done, Fingerprint, Job, Load, Outcome, Passed, text_digest
from paceline.bench.arms.local import local_arm
from paceline.core.errors import CapacityError, ConfigError, PacelineError, RequestError
from paceline.core.params import SamplingParams
from paceline.engine.runtime import peak_memory_bytes, reset_peak_memory
from paceline.llm import LLM

if TYPE_CHECKING:
    from paceline.bench.arms.oracles import (
        Oracle,  # imported where it is used: transformers' models take seconds
    )

Options = Mapping[str, str | int | float | bool]
REFERENCE_KINDS = ("transformers", "transformers-lookup", "transformers-dflash", "zlab")
_OPTIONS = {"transformers-lookup": {"num_tokens": 10}}
_WITH_DRAFTER = ("transformers-dflash", "zlab")


def reference_arm(name: str, kind: str, options: Options, llm: LLM) -> ReferenceArm:
    """Returns an arm over another implementation of a loaded pair, closed.

    Args:
        name: what the plan calls it.
        kind: "transformers" (plain), "transformers-lookup" (prompt lookup), "transformers-dflash" or "zlab".
        options: of "transformers-lookup" `num_tokens`, most drafts of a step; the others have none.
        llm: the pair; its target's folder, drafter, dtype and device are used. Arms may share it.

    Raises:
        ConfigError: an unknown kind or option, a value out of range, or a DFlash arm without a drafter.
    """
    if kind not in REFERENCE_KINDS:
        raise ConfigError(f"arm {name!r}: expected one of {', '.join(REFERENCE_KINDS)}; got {kind!r}")
    chosen = dict(_OPTIONS.get(kind, {}))
    for option, value in options.items():
        if option not in chosen:
            raise ConfigError(
                f"arm {name!r}: {kind} has the options {', '.join(chosen) or 'none'}; got {option!r}"
            )
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"arm {name!r}: {option}: expected a whole number of at least 1, got {value!r}")
        chosen[option] = value
    if kind in _WITH_DRAFTER and llm.checkpoint is None:
        raise ConfigError(f"arm {name!r}: {kind} needs a drafter; hint: give one, or leave the arm out")
    return ReferenceArm(name, llm, kind, chosen)


class ReferenceArm:
    """Another implementation as an arm.

    Args:
        name: what the plan calls it.
        llm: the pair.
        kind, options: checked; see `reference_arm`.
    """

    max_concurrency: int | None = 1

    def __init__(self, name: str, llm: LLM, kind: str, options: Mapping[str, int]) -> None:
        self.name = name
        self._llm, self._kind, self._options = llm, kind, options
        self._oracle = _oracle(kind, options)
        self._is_open = False

    def open(self) -> Fingerprint:
        """Loads what is not loaded yet and returns what is known of the arm.

        Raises:
            ArmError: a package that is not installed, or that cannot run this pair.
        """
        if not self._is_open:
            target = _take_target(self._llm)
            try:
                self._oracle.open(self._llm, target)
            except BaseException:
                _give_target_back(self._llm)
                raise
            self._is_open = True
        return self._fingerprint()

    def close(self) -> None:
        """Frees the models that no other arm uses."""
        if self._is_open:
            self._is_open = False
            self._oracle.close()
            _give_target_back(self._llm)

    def run(self, jobs: Sequence[Job], load: Load, done: Done) -> Passed:
        """Returns what came of the jobs, one after the other; see `Arm`.

        Raises:
            ArmError: it is not open, or more than one request is wanted at once.
        """
        if not self._is_open or (load.concurrency or 1) > 1:
            raise ArmError(f"{self.name}: expected to be open and to work on one request; got {load.label}")
        counts = reset_peak_memory(self._llm.device)
        outcomes: list[Outcome] = []
        began = perf_counter()
        for job in sorted(jobs, key=lambda job: job.due_s) if load.is_open else jobs:
            if load.is_open:
                sleep(max(0.0, began + job.due_s - perf_counter()))
            outcomes.append(self._answer(job, began, job.due_s if load.is_open else perf_counter() - began))
            done(outcomes[-1])
        wall_s = perf_counter() - began - min((outcome.sent_s for outcome in outcomes), default=0.0)
        peak = peak_memory_bytes(self._llm.device) if counts else None
        return Passed(tuple(outcomes), wall_s, peak_memory_bytes=peak)

    def _answer(self, job: Job, began: float, sent_s: float) -> Outcome:
        try:
            prompt = self._llm.render(job.messages)
            _check(len(prompt), job.params, self._llm)
            with torch.random.fork_rng():
                if job.params.seed is not None:
                    torch.manual_seed(job.params.seed)
                trace = self._oracle.decode(prompt, job.params)
        except PacelineError as error:
            return Outcome(job.id, f"{job.id}: {error}", sent_s)
        except Exception as error:  # another project's code may raise anything
            return Outcome(job.id, f"{job.id}: {self._oracle.engine} failed ({error!r})", sent_s)
        return Outcome(
            id=job.id,
            sent_s=sent_s,
            ttft_s=trace.times[0] - began - sent_s,
            e2e_s=trace.times[-1] - began - sent_s,
            max_gap_s=max((later - sooner for sooner, later in pairwise(trace.times)), default=None),
            num_chunks=len(trace.times),
            num_prompt_tokens=len(prompt),
            num_new_tokens=len(trace.ids),
            finish_reason="stop" if trace.ids[-1] in self._llm.codec.eos_token_ids else "length",
            acceptance=() if self._kind == "transformers" else trace.acceptance,
            text=text_digest(trace.ids),
        )

    def _fingerprint(self) -> Fingerprint:
        """Returns what our own arms say of the pair, with what is theirs in its place."""
        plain = local_arm(self.name, "plain", {}, self._llm).open()
        basis = {**plain.basis, "engine": self._oracle.engine, "backend": "transformers", "exact": "False"}
        if self._kind == "transformers-lookup":
            options = {option: str(value) for option, value in self._options.items()}
            return Fingerprint(basis, {"kind": "lookup", **options}, plain.memory)
        checkpoint = self._llm.checkpoint
        if self._kind not in _WITH_DRAFTER or checkpoint is None:
            return Fingerprint(basis, {}, plain.memory)
        ours = local_arm(self.name, "dflash", {"tree_nodes": 0}, self._llm).open()
        num_weights = sum(tensor.numel() for tensor in checkpoint.tensors.values())  # nobody cuts the head
        return Fingerprint(
            basis,
            {**ours.speculation, "block_size": str(checkpoint.config.block_size)},
            {**ours.memory, "drafter_weights": num_weights * self._llm.dtype.itemsize},
        )


def _oracle(kind: str, options: Mapping[str, int]) -> Oracle:
    from paceline.bench.arms import oracles

    if kind == "zlab":
        return oracles.ZLab()
    if kind == "transformers-dflash":
        return oracles.TransformersDFlash()
    arguments = {f"prompt_lookup_{option}": value for option, value in options.items()}
    return oracles.Transformers(**arguments)


def _check(num_prompt_tokens: int, params: SamplingParams, llm: LLM) -> None:
    """Refuses what our engine would refuse too, and parameters that nobody would keep."""
    known = SamplingParams(
        params.max_new_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        seed=params.seed,
    )
    if params != known:
        raise RequestError(
            "params: other implementations take max_new_tokens, temperature, top_p, top_k and seed only"
        )
    spec = llm.target.spec
    if num_prompt_tokens + params.max_new_tokens > spec.max_positions:
        raise CapacityError(
            f"prompt of {num_prompt_tokens} + max_new_tokens of {params.max_new_tokens} exceed the "
            f"{spec.max_positions} positions of {spec.name}; hint: shorten either"
        )


# The copy of the target that all arms of a pair share -----------------------------------------------------------------


class _Shared:
    """A loaded model and how many arms use it."""

    def __init__(self, model: Any) -> None:
        self.model, self.num_users = model, 0


_targets: WeakKeyDictionary[LLM, _Shared] = WeakKeyDictionary()


def _take_target(llm: LLM) -> Any:
    """Returns transformers' copy of a pair's target, loaded by the first to ask; needs a `_give_target_back`."""
    if llm not in _targets:
        from paceline.bench.arms.oracles import load_target

        _targets[llm] = _Shared(load_target(llm))
    _targets[llm].num_users += 1
    return _targets[llm].model


def _give_target_back(llm: LLM) -> None:
    """Frees the copy with its last user."""
    _targets[llm].num_users -= 1
    if not _targets[llm].num_users:
        del _targets[llm]
