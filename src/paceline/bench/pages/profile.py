"""Where a step's time goes, as tables and lines of text; see `numbers.profile`."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.bench.numbers.profile import whole_percents
from paceline.bench.numbers.summary import PassTime, Profile, StepParts
from paceline.bench.pages import amounts
from paceline.bench.pages.sections import Table


def steps(profile: Profile) -> Table:
    """Returns the parts of a step in milliseconds, a line for each arm, temperature and number of sequences."""
    rows = [
        (
            s.arm,
            f"{s.temperature:g}",
            str(s.num_sequences),
            f"{s.num_steps:,}",
            *(_ms(ms) for ms in (s.total_ms, *s.parts_ms.values())),
            _of_floor(s.pass_of_floor),
            _of_floor(s.draft_of_floor),
        )
        for s in profile.steps
    ]
    parts = tuple(profile.steps[0].parts_ms) if profile.steps else ()
    columns = ("arm", "T", "at once", "steps", "whole", *parts, "pass of floor", "draft of floor")
    return Table("Where a step's time goes, means in ms", columns, tuple(rows), 3).shown()


def passes(profile: Profile) -> Table:
    """Returns what the target's passes take by their rows."""
    rows = [
        (
            p.arm,
            f"{p.temperature:g}",
            _span(p),
            f"{p.num_passes:,}",
            amounts.number(p.pass_ms),
            amounts.number(p.row_ms),
            _of_floor(p.of_floor),
        )
        for p in profile.passes
    ]
    columns = ("arm", "T", "rows", "passes", "pass, ms", "a row, ms", "of floor")
    return Table(
        "The target's passes by their rows: anchors and drafts together", columns, tuple(rows), 3
    ).shown()


def shares(profile: Profile) -> Iterator[str]:
    """Yields the parts of each step in percent, in lines whose columns stand under each other."""
    several = len({s.temperature for s in profile.steps}) > 1
    names = [f"{s.arm} × {s.num_sequences}" + f", T {s.temperature:g}" * several for s in profile.steps]
    width = max(map(len, names), default=0)
    for name, parts in zip(names, profile.steps, strict=True):
        yield f"{name:<{width}}  {in_words(parts)}"


def in_words(parts: StepParts) -> str:
    """Returns the parts of a step in percent of it, as wide whatever they are."""
    return " · ".join(f"{name} {share:3d} %" for name, share in whole_percents(parts.parts_ms).items())


def sentences(profile: Profile) -> Iterator[str]:
    """Yields what the floor is, and what is not known."""
    if profile.copy is None:
        yield "How fast the machine copies memory was not measured, so there is no floor; hint: --profile."
    else:
        best, median = (
            amounts.size(int(rate))
            for rate in (profile.copy.best_bytes_per_s, profile.copy.median_bytes_per_s)
        )
        yield (
            f"Copies of memory between the passes read and wrote {best}/s at best, {median}/s in the median of "
            f"{profile.copy.num_copies:,}. The floor of a pass is what reading its weights takes at the best rate; "
            "100 % is a pass at its floor."
        )
        for arm, read in profile.read_bytes.items():
            known = [f"{amounts.size(num_bytes)} in a {what}" for what, num_bytes in read.items()]
            unknown = "no floor, as only the native runner knows which weights a pass reads"
            yield f"{arm}: {' and '.join(known) or unknown}."
    if profile.missing:
        yield (
            f"No profile of {', '.join(profile.missing)}: only the engine of this process says where its steps' time "
            "goes, and of its steps those count in which no prompt was read."
        )


def _span(passes: PassTime) -> str:
    low, high = passes.min_rows, passes.max_rows
    return str(high) if low == high else f"{low}–{high}"


def _ms(value: float) -> str:
    """Returns milliseconds to a hundredth at most: what is less is next to nothing of a step."""
    return amounts.number(value) if value >= 1 else f"{value:.2f}"


def _of_floor(share: float | None) -> str:
    return amounts.UNKNOWN if share is None else f"{100 * share:.0f} %"
