"""Where a step's time goes, and how far a pass is from the time that reading its weights takes. Pure.

The yardstick is the best rate at which this machine copied memory between the passes. Copying writes as much as it
reads, so a pass that does nothing but read can be a little faster than its floor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from paceline.bench.arms.base import Fingerprint, StepTime
from paceline.bench.numbers.summary import CopyRate, PassTime, Profile, StepParts
from paceline.bench.runs.rows import Run

Times = Mapping[tuple[str, float], Sequence[StepTime]]
"""Steps by arm and temperature."""


def profile(run: Run) -> Profile | None:
    """Returns where the time of each arm's steps went; `None` where no arm kept all parts of them.

    The A/A control is left out.
    """
    names = [name for name in run.arms if name != f"{next(iter(run.arms))} again"]
    times: dict[tuple[str, float], list[StepTime]] = {}
    for name in names:
        for record in run.passes:
            known = [t for t in record.step_times if t.num_steps and t.sample_s is not None]
            if record.place.arm == name and known:
                times.setdefault((name, record.place.temperature), []).extend(known)
    if not times:
        return None
    profiled = {name for name, _ in times}
    rates = [rate for record in run.passes for rate in record.copy_bytes_per_s]
    copy = CopyRate(max(rates), median(rates), len(rates)) if rates else None
    return Profile(
        steps=tuple(_steps(times, run.arms, copy)),
        passes=tuple(_passes(times, run.arms, copy)),
        copy=copy,
        read_bytes={name: dict(run.arms[name].reads) for name in names if name in profiled},
        missing=tuple(name for name in names if name not in profiled),
    )


def whole_percents(parts: Mapping[str, float]) -> dict[str, int]:
    """Returns shares in whole percents that add up to 100: what rounding leaves goes to the largest remainders."""
    total = sum(parts.values())
    exact = {name: 100.0 * part / total for name, part in parts.items()}
    whole = {name: int(share) for name, share in exact.items()}
    by_rest = sorted(exact, key=lambda name: whole[name] - exact[name])
    for name in by_rest[: 100 - sum(whole.values())]:
        whole[name] += 1
    return whole


def _steps(times: Times, arms: Mapping[str, Fingerprint], copy: CopyRate | None) -> Iterator[StepParts]:
    for (arm, temperature), found in times.items():
        for size in sorted({time.num_sequences for time in found}):
            same = [time for time in found if time.num_sequences == size]
            count = sum(time.num_steps for time in same)
            total, draft, verify, sample, inject, keep = (
                1e3 * sum(getattr(time, name) or 0.0 for time in same) / count
                for name in ("total_s", "draft_s", "verify_s", "sample_s", "inject_s", "keep_s")
            )
            pass_ms = verify + sample if _waits_in_sampling(arms[arm]) else verify
            yield StepParts(
                arm=arm,
                temperature=temperature,
                num_sequences=size,
                num_steps=count,
                total_ms=total,
                draft_ms=draft,
                verify_ms=verify,
                sample_ms=sample,
                inject_ms=inject,
                keep_ms=keep,
                host_ms=max(0.0, total - (draft + verify + sample + inject + keep)),  # rounding may go below
                pass_of_floor=_of_floor(arms[arm].reads.get("pass"), pass_ms, copy),
                draft_of_floor=_of_floor(arms[arm].reads.get("draft"), draft, copy),
            )


def _passes(times: Times, arms: Mapping[str, Fingerprint], copy: CopyRate | None) -> Iterator[PassTime]:
    for (arm, temperature), found in times.items():
        waits = _waits_in_sampling(arms[arm])
        sums: dict[int, tuple[int, int, float]] = {}  # passes, their rows, their seconds
        for rows, count, verify_s, sample_s in (known for time in found for known in time.passes):
            top = 1 << (rows - 1).bit_length()
            passes, num_rows, seconds = sums.get(top, (0, 0, 0.0))
            seconds += verify_s + (sample_s if waits else 0.0)
            sums[top] = (passes + count, num_rows + rows * count, seconds)
        for top, (passes, num_rows, seconds) in sorted(sums.items()):
            pass_ms, row_ms = 1e3 * seconds / passes, 1e3 * seconds / num_rows
            share = _of_floor(arms[arm].reads.get("pass"), pass_ms, copy)
            mean = num_rows / passes
            yield PassTime(arm, temperature, top // 2 + 1, top, passes, mean, pass_ms, row_ms, share)


def _waits_in_sampling(fingerprint: Fingerprint) -> bool:
    """Whether a pass goes on while the host is past it, so that the host waits for it where it samples."""
    return not fingerprint.basis.get("device", "cpu").startswith("cpu")


def _of_floor(num_bytes: int | None, ms: float, copy: CopyRate | None) -> float | None:
    """Returns what reading takes at the best rate over what was taken."""
    if num_bytes is None or copy is None or not ms:
        return None
    return 1e3 * num_bytes / copy.best_bytes_per_s / ms
