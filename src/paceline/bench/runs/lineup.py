"""The arms of a run: what they are, whether they may be compared, which are open, and whether they are warm."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from paceline.bench.arms.base import Arm, Fingerprint, Job, Load
from paceline.core.errors import ConfigError
from paceline.core.params import SamplingParams

WARM_UP_ROUNDS, WARM_UP_TOKENS, WARM_UP_CHANGE = 5, 32, 0.1
WARM_UP_BURST = 8
"""Jobs of a round before an open loop, all at once: whatever batches it will meet lie below or not far above."""
WARM_UP_TEXTS = (
    "Write a Python function that returns the median of a list of numbers.",
    "Explain in a few sentences why the sky is blue.",
    "A train covers 120 km in 90 minutes. How fast is it in km/h? Think step by step.",
    "Tell a short story about a lighthouse keeper who finds a letter.",
)


def check_comparable(fingerprints: Mapping[str, Fingerprint], may_differ: Collection[str]) -> None:
    """Refuses arms that differ from the first in more than speculation and what was allowed. Pure.

    Raises:
        ConfigError: what differs and how, or an entry of `may_differ` that no arm has.
    """
    baseline, *others = fingerprints
    known = {entry for fingerprint in fingerprints.values() for entry in fingerprint.basis}
    unknown = [entry for entry in may_differ if entry not in known]
    if unknown:
        raise ConfigError(
            f"may_differ: expected some of {', '.join(sorted(known))}; got {', '.join(unknown)}"
        )
    found = [
        f"{entry} is {ours} in {baseline!r} and {theirs} in {name!r}"
        for name in others
        for entry, ours, theirs in _differences(fingerprints[baseline].basis, fingerprints[name].basis)
        if entry not in may_differ
    ]
    if found:
        raise ConfigError(
            "arms: expected them to differ in speculation only, as any ratio would mix in what else differs; got: "
            f"{'; '.join(found)}; hint: make them equal, or allow it by name in may_differ"
        )


def _differences(ours: Mapping[str, str], theirs: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    for entry in {**ours, **theirs}:
        mine, other = (repr(side[entry]) if entry in side else "not there" for side in (ours, theirs))
        if mine != other:
            yield entry, mine, other


class Lineup:
    """Arms by name, each opened when it is needed.

    Args:
        arms: in the plan's order.
        is_exclusive: whether only one may be open at a time.
        fingerprints: of an earlier part of the run; an arm that is another thing now is refused.
        num_openings: of an earlier part of the run, by name.
    """

    def __init__(
        self,
        arms: Sequence[Arm],
        is_exclusive: bool,
        fingerprints: Mapping[str, Fingerprint],
        num_openings: Mapping[str, int],
    ) -> None:
        self._arms = {arm.name: arm for arm in arms}
        self._is_exclusive = is_exclusive
        self._known = dict(fingerprints)
        self._num_openings = dict(num_openings)
        self._open: set[str] = set()
        self._warm: set[tuple[str, Load]] = set()

    @property
    def fingerprints(self) -> dict[str, Fingerprint]:
        """Of all arms that have been open, in the plan's order."""
        return {name: self._known[name] for name in self._arms if name in self._known}

    def is_open(self, name: str) -> bool:
        """Returns whether the arm is ready."""
        return name in self._open

    def start(self, name: str) -> int:
        """Returns how often the arm had been opened before it was opened last."""
        return self._num_openings[name] - 1

    def open(self, name: str) -> Arm:
        """Returns the arm, ready; closes the others where only one may be open.

        Raises:
            ArmError: it cannot be had.
            ConfigError: it is not what it was when it was opened first.
        """
        arm = self._arms[name]
        if name in self._open:
            return arm
        if self._is_exclusive:
            self.close()
        fingerprint = arm.open()
        self._open.add(name)
        self._num_openings[name] = self._num_openings.get(name, 0) + 1
        before = self._known.setdefault(name, fingerprint)
        changed = [
            f"{entry} was {was} and is {now}"
            for ours, theirs in (
                (before.basis, fingerprint.basis),
                (before.speculation, fingerprint.speculation),
            )
            for entry, was, now in _differences(ours, theirs)
        ]
        if changed:
            raise ConfigError(
                f"arm {name!r}: expected what it was when the run began, got another: {'; '.join(changed)}; "
                "hint: bring it back to that, or begin a new run in another folder"
            )
        return arm

    def close(self, name: str | None = None) -> None:
        """Closes one arm, or all; what is opened again is cold."""
        for closing in list(self._open) if name is None else [name]:
            self._open.discard(closing)
            self._warm = {(warm, load) for warm, load in self._warm if warm != closing}
            self._arms[closing].close()

    def is_warm(self, name: str, load: Load) -> bool:
        """Returns whether the arm was warmed up for the load since it was opened."""
        return (name, load) in self._warm

    def warm_up(self, name: str, load: Load, params: SamplingParams) -> str | None:
        """Runs rounds of short jobs until the time per token settles; returns a sentence on those that failed."""
        self._warm.add((name, load))
        num_jobs = load.concurrency or WARM_UP_BURST
        failures, num_sent, before = [], 0, None
        for _ in range(WARM_UP_ROUNDS):
            passed = self._arms[name].run(_warm_up_jobs(num_jobs, params), load, lambda outcome: None)
            num_sent += num_jobs
            failures += [outcome.failure for outcome in passed.outcomes if outcome.failure is not None]
            num_tokens = sum(outcome.num_new_tokens or 0 for outcome in passed.outcomes)
            if not num_tokens:  # nothing to time
                break
            pace = passed.wall_s / num_tokens
            if before is not None and abs(pace - before) < WARM_UP_CHANGE * before:
                break
            before = pace
        if not failures:
            return None
        failed = f"{len(failures)} of {num_sent} warm-up requests failed"
        return f"{name!r}, {load.label}: {failed}; the first: {failures[0]}"


def _warm_up_jobs(num_jobs: int, params: SamplingParams) -> list[Job]:
    return [
        Job(f"warm-up-{i}", [{"role": "user", "content": WARM_UP_TEXTS[i % len(WARM_UP_TEXTS)]}], params)
        for i in range(num_jobs)
    ]
