"""What a benchmark shall do and by which rules it decides, from a file or the command line; checked before any work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from paceline.bench.arms import Load
from paceline.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class LatencyTarget:
    """What makes an answer good enough. Limits that are `None` are not asked for.

    Args:
        ttft_s: to the first token.
        tpot_s: seconds a token after the first.
        e2e_s: to the last token.
        attainment: share of requests that must meet all of them.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None
    attainment: float = 0.95

    @property
    def is_set(self) -> bool:
        """Whether any limit is asked for."""
        return any(limit is not None for limit in (self.ttft_s, self.tpot_s, self.e2e_s))


@dataclass(frozen=True, slots=True)
class Rules:
    """When speculation is called worth it.

    Args:
        min_speedup: ratio of output speed that the whole traffic must exceed; the boundary between on and off.
        worst_kind: ratio that no kind may fall below.
        confidence: of every interval and of the decision.
        latency: see `LatencyTarget`.
        max_memory_bytes: most that an arm may hold; `None` is no limit.
        price_per_hour: of the machine, in any currency; `None` leaves costs out.
        max_concurrency: peak of the real load, if known: loads above it do not count for the decision.
    """

    min_speedup: float = 1.05
    worst_kind: float = 0.95
    confidence: float = 0.95
    latency: LatencyTarget = field(default_factory=LatencyTarget)
    max_memory_bytes: int | None = None
    price_per_hour: float | None = None
    max_concurrency: int | None = None


@dataclass(frozen=True, slots=True)
class ArmSpec:
    """An arm as a plan names it.

    Args:
        name: unique in the plan.
        kind: which sort of arm; see `cli` for the list.
        options: its own, as text or numbers; unknown ones are refused by the sort of arm.
    """

    name: str
    kind: str
    options: Mapping[str, str | int | float | bool] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Plan:
    """A whole benchmark.

    Args:
        arms: the first is the baseline.
        loads: each is run with every arm that can.
        temperatures: each likewise.
        top_p: of sampled answers.
        max_new_tokens: limit of answers whose item has none of its own, and cap of those that have.
        items_per_kind: of each kind in each block.
        num_blocks: most blocks; fewer where the decision is clear earlier and `stops_early`.
        min_blocks: before a decision is looked for.
        stops_early: whether it stops when the decision is clear.
        has_control: whether the baseline also runs as an arm of its own (A/A), named "NAME again".
        num_starts: how often arms that can be started are started; blocks are dealt out among the starts.
        is_exclusive: whether only one arm may be open at a time (servers that share an accelerator).
        may_differ: names of fingerprint entries in which arms may differ beside speculation.
        seed: of items, arrivals and answers.
        rules: see `Rules`.
    """

    arms: tuple[ArmSpec, ...]
    loads: tuple[Load, ...] = (Load(1),)
    temperatures: tuple[float, ...] = (0.0,)
    top_p: float = 1.0
    max_new_tokens: int = 128
    items_per_kind: int = 2
    num_blocks: int = 6
    min_blocks: int = 3
    stops_early: bool = True
    has_control: bool = True
    num_starts: int = 1
    is_exclusive: bool = False
    may_differ: tuple[str, ...] = ()
    seed: int = 0
    rules: Rules = field(default_factory=Rules)

    def __post_init__(self) -> None:
        names = [arm.name for arm in self.arms]
        if len(set(names)) < len(names) or not names:
            raise ConfigError(f"arms: expected at least one, each with a name of its own; got {names}")
