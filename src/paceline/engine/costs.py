"""What a pass of the target and a draft take on this machine: measured once, kept in a file, interpolated.

The seconds decide how much is drafted and verified (`budget.py`, `pacing.py`). They are measured rather than modelled,
since where rows stop being free differs by machine, dtype and model.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from paceline.core.errors import ConfigError, UnsupportedTargetError
from paceline.core.types import EMPTY_PROPOSAL, Proposal
from paceline.drafter.base import Drafter, NeuralDrafter
from paceline.engine.runtime import machine
from paceline.engine.tree import TreeDrafter
from paceline.target.base import Target, TargetSession, VerifyRows

WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
NUM_SEQUENCES = 8
SHORT, LONG, LONG_ROWS = 32, 384, 16
"""Tokens of context, and rows of a pass behind them, between which attention's costs are measured."""
TREE = Proposal((7,) * 7, (0, 1, 2, 3, 0, 1, 2))
"""Three branches beside a path of four nodes."""
REPETITIONS, ENOUGH_S = 4, 8.0
"""How often each case is run; fewer where the target is so slow that this takes longer."""
NUM_KEPT = 2
"""Rows of a step that are shown to a drafter before it drafts."""
MAX_AGE_S = 30 * 24 * 3600.0
Points = tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class PassCosts:
    """Seconds of passes and drafts. All whole steps: choosing the tokens and showing the drafter its rows belong to it.

    Args:
        rows: (rows of a pass over one short text, seconds), both rising.
        drafts: by number of sequences (rising): that number, then (draft slots, seconds), rising. Empty without a
            drafter.
        sequence_s: of each sequence beyond the first, its rows aside.
        context_s, context_row_s: attention: of each token of context; of each such token for every row beyond the
            first of its sequence.
        run_s: of each run of an exact tree beyond the first (see `target.plan.walk`), its rows aside.
        padding: what an empty place costs, as a share of a row, where a pass is padded to its widest sequence, 0…1.
        origin: where the numbers are from, in words.

    Raises:
        ConfigError: numbers that are none, or do not rise.
    """

    rows: Points
    drafts: tuple[tuple[float, Points], ...] = ()
    sequence_s: float = 0.0
    context_s: float = 0.0
    context_row_s: float = 0.0
    run_s: float = 0.0
    padding: float = 0.0
    origin: str = "given"

    def __post_init__(self) -> None:
        for name, points in [("rows", self.rows), *(("drafts", points) for _, points in self.drafts)]:
            falls = any(a >= b or s > t for (a, s), (b, t) in pairwise(points))
            if not points or falls or not all(0 < x < math.inf for point in points for x in point):
                raise ConfigError(
                    f"{name}: expected rising (count, seconds) above 0, at least one, got {points}"
                )
        numbers = [n for n, _ in self.drafts]
        if any(a >= b for a, b in pairwise(numbers)):
            raise ConfigError(f"drafts: expected rising numbers of sequences, got {numbers}")
        for name in ("sequence_s", "context_s", "context_row_s", "run_s", "padding"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ConfigError(f"{name}: expected at least 0, got {value}")

    def verify_s(
        self,
        num_rows: int,
        num_sequences: int,
        num_context_tokens: float = 0,
        num_runs: float = 0,
        width: int = 0,
    ) -> float:
        """Returns the seconds of a pass. Pure.

        Args:
            num_rows: of all sequences together, anchors included.
            num_sequences: that share it, at least 1.
            num_context_tokens: held of all of them.
            num_runs: of exact trees, beyond the first run of each.
            width: rows of the widest sequence.
        """
        empty = max(0, width * num_sequences - num_rows)
        beyond = (num_rows - num_sequences) / num_sequences
        return (
            _between(self.rows, num_rows + self.padding * empty)
            + self.sequence_s * (num_sequences - 1)
            + (self.context_s + self.context_row_s * beyond) * num_context_tokens
            + self.run_s * num_runs
        )

    def draft_s(self, num_sequences: int, num_slots: int) -> float:
        """Returns the seconds of drafting for so many sequences, what they have just said shown first. Pure."""
        if not num_sequences or not self.drafts:
            return 0.0
        return _between([(n, _between(points, num_slots)) for n, points in self.drafts], num_sequences)


def _between(points: Sequence[tuple[float, float]], x: float) -> float:
    """Returns the value at x: of the first point before it, on the last line behind the last one. Pure."""
    if len(points) == 1 or x <= points[0][0]:
        return points[0][1]
    i = min(bisect_right(points, (x, math.inf)), len(points) - 1)
    (a, s), (b, t) = points[i - 1], points[i]
    return s + (t - s) * (x - a) / (b - a)


# Measuring -----------------------------------------------------------------------------------------------------------

Runs = dict[tuple[Any, ...], Callable[[], object]]


def measure_costs(target: Target, drafter: Drafter | None = None) -> PassCosts:
    """Returns what passes of the target and drafts of the drafter take here, in a few seconds.

    All cases take turns, and of each the fastest counts: what else the machine does at that time only adds.

    Args:
        drafter: with weights, as it will draft (`TreeDrafter` for trees); `None` measures the target alone.
    """
    target.tap(drafter.target_layer_ids if drafter is not None else ())
    room = target.spec.max_positions
    long = min(LONG, room - LONG_ROWS)
    capacity = min(max(long + LONG_ROWS, SHORT + WIDTHS[-1]), room)
    sessions = [target.open(capacity) for _ in range(NUM_SEQUENCES)]
    try:
        shown = [_read(target, session, SHORT) for session in sessions]
        runs = _verify_runs(target, sessions)
        if drafter is not None:
            runs |= _draft_runs(drafter, shown)
        times = _fastest(runs)
        if long > SHORT:
            _read(target, sessions[0], long - SHORT)
            times |= _fastest(
                {
                    (name, width): _verify_run(target, [session], [width])
                    for name, session in (("long", sessions[0]), ("short", sessions[1]))
                    for width in (1, LONG_ROWS)
                }
            )
    finally:
        for session in sessions:
            session.close()
    return _costs_of(times, long - SHORT)


def _read(target: Target, session: TargetSession, count: int) -> Any:
    """Returns the hidden rows of a text of `count` tokens. Mutates: session, which then holds them."""
    ids = [i % target.spec.vocab_size for i in range(7, 7 + count)]
    (output,) = target.verify([VerifyRows(session, ids, EMPTY_PROPOSAL, last_row_only=True)])
    session.keep(range(count))
    return output.hidden


def _verify_runs(target: Target, sessions: Sequence[TargetSession]) -> Runs:
    """Returns passes over one chain of each width, over many short chains, over uneven ones, and over a tree."""
    lone = sessions[0]
    widths = [width for width in WIDTHS if SHORT + width <= lone.capacity]
    runs: Runs = {("rows", width): _verify_run(target, [lone], [width]) for width in widths}
    runs["sequences",] = _verify_run(target, sessions, [1] * NUM_SEQUENCES)
    runs["uneven",] = _verify_run(target, sessions, [8] + [1] * (NUM_SEQUENCES - 1))
    runs["even",] = _verify_run(target, sessions, [8] * NUM_SEQUENCES)
    tree = _verify_run(target, [lone], [TREE])
    try:
        tree()
    except UnsupportedTargetError:
        return runs
    return runs | {("tree",): tree}


def _verify_run(
    target: Target, sessions: Sequence[TargetSession], drafts: Sequence[int | Proposal]
) -> Callable[[], object]:
    """Returns a pass over a chain of so many rows, or over a tree, of each session; nothing of it is kept."""
    token = 7 % target.spec.vocab_size
    proposals = [Proposal.chain([token] * (d - 1)) if isinstance(d, int) else d for d in drafts]
    parts = [VerifyRows(s, [token], p) for s, p in zip(sessions, proposals, strict=True)]

    def run() -> int:
        said = [output.logits.argmax(dim=-1) for output in target.verify(parts)]
        return sum(int(tokens[-1]) for tokens in said)  # waits for the device

    return run


def _draft_runs(drafter: Drafter, shown: Sequence[Any]) -> Runs:
    """Returns drafts of several widths for one sequence and for many, each shown a few rows before."""
    most = drafter.block_size - 1
    slots = sorted({min(2, most), min(4, most), most})
    counts = (1, len(shown))
    capacity = SHORT + NUM_KEPT * REPETITIONS * len(slots) * len(counts)
    contexts = [drafter.open(capacity) for _ in shown]
    drafter.inject(contexts, list(shown), [[7] * SHORT] * len(shown))

    def draft(count: int, width: int) -> Callable[[], object]:
        def run() -> object:
            rows = [hidden[:NUM_KEPT] for hidden in shown[:count]]
            drafter.inject(contexts[:count], rows, [[7] * NUM_KEPT] * count)
            return drafter.draft([7] * count, contexts[:count], width)

        return run

    return {("draft", count, width): draft(count, width) for count in counts for width in slots}


def _fastest(runs: Runs) -> dict[tuple[Any, ...], float]:
    best = dict.fromkeys(runs, math.inf)
    began = time.perf_counter()
    for _ in range(REPETITIONS):
        for name, run in runs.items():
            started = time.perf_counter()
            run()
            best[name] = min(best[name], time.perf_counter() - started)
        if time.perf_counter() - began > ENOUGH_S:
            break
    return best


def _costs_of(times: dict[tuple[Any, ...], float], num_added: int) -> PassCosts:
    """Returns the costs that explain the times; noise that would make more rows cheaper is levelled out.

    Args:
        times: by case.
        num_added: tokens of context between "short" and "long".
    """
    rows = _rising((name[1], s) for name, s in times.items() if name[0] == "rows")
    drafts: dict[int, list[tuple[float, float]]] = {}
    for name, seconds in times.items():
        if name[0] == "draft":
            drafts.setdefault(name[1], []).append((name[2], seconds))
    costs = PassCosts(
        rows=rows,
        drafts=tuple((count, _rising(points)) for count, points in sorted(drafts.items())),
        sequence_s=max(0.0, times["sequences",] - _between(rows, NUM_SEQUENCES)) / (NUM_SEQUENCES - 1),
        origin="measured just now",
    )
    uneven_rows = 8 + NUM_SEQUENCES - 1
    if times["even",] > (dense := costs.verify_s(uneven_rows, NUM_SEQUENCES)):
        padding = (times["uneven",] - dense) / (times["even",] - dense)
        costs = replace(costs, padding=min(max(padding, 0.0), 1.0))
    if ("tree",) in times:
        num_runs = num_branches(TREE)
        beyond = times["tree",] - _between(rows, 1 + len(TREE.tokens))
        costs = replace(costs, run_s=max(0.0, beyond) / num_runs)
    if ("long", 1) in times:
        lone, many = ((times["long", w] - times["short", w]) / num_added for w in (1, LONG_ROWS))
        by_row = max(0.0, many - max(0.0, lone)) / (LONG_ROWS - 1)
        costs = replace(costs, context_s=max(0.0, lone), context_row_s=by_row)
    return costs


def _rising(points: Any) -> Points:
    counts, seconds = zip(*sorted(points), strict=True)
    return tuple(zip(counts, accumulate(seconds, max), strict=True))


def num_branches(proposal: Proposal) -> int:
    """Returns how many runs beyond the first a tree is walked in: its leaves − 1, none for a chain. Pure."""
    return len(proposal.parents) - len(set(proposal.parents))


# Keeping -------------------------------------------------------------------------------------------------------------


def load_costs(
    folder: Path,
    target: Target,
    drafter: Drafter | None = None,
    *,
    max_age_s: float = MAX_AGE_S,
    tell: Callable[[], None] = lambda: None,
) -> PassCosts:
    """Returns the costs of a pair from its file, measured and written where there is none that holds.

    A file of another machine, torch, number of threads, dtype or pair does not hold, nor one that is too old or
    damaged. `PassCosts.origin` says what was done and why. A folder that cannot be written is no error.

    Args:
        folder: for small files; made where it is missing.
        drafter: see `measure_costs`.
        max_age_s: age from which a file is stale.
        tell: called before anything is measured.
    """
    here, pair = _here(), _pair(target, drafter)
    path, key = folder / _file_name(pair), here | pair
    try:
        return _read_costs(path, key, max_age_s)
    except FileNotFoundError:
        reason = "there was no file yet"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = str(error) if isinstance(error, ConfigError) else f"{path} was damaged ({error!r})"
    tell()
    costs = measure_costs(target, drafter)
    value = {name: x for name, x in asdict(costs).items() if name != "origin"}
    try:
        _write(path, json.dumps({"key": key, "measured_at": time.time(), "costs": value}, indent=1) + "\n")
    except OSError as error:
        reason += f"; it could not be kept ({error})"
    return replace(costs, origin=f"measured just now, since {reason}")


def _read_costs(path: Path, key: dict[str, str], max_age_s: float) -> PassCosts:
    """Returns the costs in a file.

    Raises:
        ConfigError: measured elsewhere, or too long ago.
        OSError, ValueError, KeyError, TypeError, AttributeError: no file, or a damaged one.
    """
    stored = json.loads(path.read_text(encoding="utf-8"))
    theirs, measured_at, values = stored["key"], float(stored["measured_at"]), stored["costs"]
    differing = [f"{name}: {theirs.get(name)!r}, here {ours!r}" for name, ours in key.items()]
    differing = [
        text for text, (name, ours) in zip(differing, key.items(), strict=True) if theirs.get(name) != ours
    ]
    if differing:
        raise ConfigError(f"{path} was measured elsewhere ({'; '.join(differing)})")
    age_s = time.time() - measured_at
    if not 0 <= age_s <= max_age_s:
        raise ConfigError(f"{path} was {age_s / 86400:.0f} days old")
    expected = {f.name for f in fields(PassCosts)} - {"origin"}
    if set(values) != expected:
        raise ValueError(f"fields {sorted(values)}")
    try:
        return PassCosts(**{name: _tuples(x) for name, x in values.items()}, origin=f"read from {path}")
    except ConfigError as error:
        raise ValueError(str(error)) from error


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _write(path: Path, text: str) -> None:
    """Writes a file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _here() -> dict[str, str]:
    return {name: str(value) for name, value in machine().items()}


def _pair(target: Target, drafter: Drafter | None) -> dict[str, str]:
    """Returns what the costs depend on beside the machine, in words."""
    return {
        "dtype": str(target.dtype),
        "device": str(target.device),
        "runner": f"{type(target).__name__}, exact {getattr(target, 'exact', None)}",
        "target": target.spec.name,
        "sizes": str(asdict(target.spec)),
        "drafter": _named(drafter),
        "drafter_sizes": _sizes(drafter),
    }


def _named(drafter: Drafter | None) -> str:
    if isinstance(drafter, TreeDrafter):
        return f"{_named(drafter.drafter)}-{drafter.num_nodes}-nodes"
    return "none" if drafter is None else type(drafter).__name__


def _sizes(drafter: Drafter | None) -> str:
    """Returns what a drafter's speed depends on: sizes, not what the weights say."""
    inner = drafter.drafter if isinstance(drafter, TreeDrafter) else drafter
    if isinstance(inner, NeuralDrafter):
        rows = inner.learned_ids
        return f"{inner.config}, {'all' if rows is None else len(rows)} tokens"
    return str(getattr(drafter, "block_size", None))


def _file_name(pair: dict[str, str]) -> str:
    """Returns a name of its own for each pair, with words in it for those who look."""
    digest = hashlib.sha256(json.dumps(pair, sort_keys=True).encode()).hexdigest()[:12]
    words = f"{Path(pair['target']).name}--{pair['drafter']}"
    return "".join(c if c.isalnum() or c in "-._" else "-" for c in words)[-80:] + f"-{digest}.json"
