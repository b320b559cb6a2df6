"""What a benchmark shall do and by which rules it decides, from a file or the command line; checked before any work."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from paceline.bench.arms.base import Load
from paceline.core.errors import ConfigError
from paceline.core.tables import from_table

SECRETS = ("api_key",)
"""Options of arms that are never stored."""


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

    def __post_init__(self) -> None:
        _in_range("rules.latency", self, 0.0, None, "ttft_s", "tpot_s", "e2e_s")
        _in_range("rules.latency", self, 0.0, 1.0, "attainment")

    @property
    def is_set(self) -> bool:
        """Whether any limit is asked for."""
        return any(limit is not None for limit in (self.ttft_s, self.tpot_s, self.e2e_s))


@dataclass(frozen=True, slots=True)
class Rules:
    """When speculation is called worth it.

    Args:
        min_speedup: ratio of output speed that the whole traffic must exceed; the boundary between on and off.
        worst_kind: ratio that no kind may fall below, at most `min_speedup`.
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

    def __post_init__(self) -> None:
        _in_range("rules", self, 0.0, None, "min_speedup", "worst_kind", "price_per_hour")
        _in_range("rules", self, 0.5, 0.9999, "confidence")
        _in_range("rules", self, 1, None, "max_memory_bytes", "max_concurrency")
        if self.worst_kind > self.min_speedup:
            raise ConfigError(
                f"rules.worst_kind: expected at most min_speedup ({self.min_speedup:g}), got {self.worst_kind:g}"
            )


@dataclass(frozen=True, slots=True)
class ArmSpec:
    """An arm as a plan names it.

    Args:
        name: unique in the plan.
        kind: which sort of arm, such as "plain", "dflash" or "server".
        options: its own, as text or numbers; unknown ones are refused by the sort of arm.
    """

    name: str
    kind: str
    options: Mapping[str, str | int | float | bool] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Returns the arm that a word such as "dflash,block_size=4,name=short" asks for.

        Without a name it is called by the text itself. Values are TOML where they can be, else text.

        Raises:
            ConfigError: a part behind the kind that is not key=value.
        """
        kind, *parts = text.split(",")
        options: dict[str, str | int | float | bool] = {}
        for part in parts:
            key, equals, value = part.partition("=")
            if not equals or not key.strip():
                raise ConfigError(f"arm {text!r}: expected KIND,key=value,…, got {part!r}")
            options[key.strip()] = _scalar(value.strip())
        name = str(options.pop("name", text.replace(",", " ")))
        return cls(name, kind.strip(), options)


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
        max_s: seconds of measuring; no block is begun that would end later at the pace so far. `None` is no limit.
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
    max_s: float | None = None
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
        for name in ("loads", "temperatures"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise ConfigError(f"{name}: expected at least one, each once; got {list(values)}")
        if not all(0 <= temperature <= 100 for temperature in self.temperatures):
            raise ConfigError(f"temperatures: expected 0…100, got {list(self.temperatures)}")
        _in_range("plan", self, 0.0, 1.0, "top_p")
        _in_range("plan", self, 0.0, None, "max_s")
        _in_range("plan", self, 1, None, "max_new_tokens", "items_per_kind", "num_blocks", "min_blocks")
        _in_range("plan", self, 1, self.num_blocks, "num_starts")
        if self.has_control and self.control in names:
            raise ConfigError(
                f"arms: {self.control!r} is the name of the A/A control; hint: call the arm otherwise"
            )

    @property
    def baseline(self) -> str:
        """Name of the arm that all ratios refer to."""
        return self.arms[0].name

    @property
    def control(self) -> str:
        """Name under which the baseline runs again."""
        return f"{self.baseline} again"

    @classmethod
    def from_toml(cls, path: Path) -> Self:
        """Returns the plan of a file.

        Raises:
            ConfigError: an unreadable file, an unknown key, a value of the wrong type or range.
        """
        try:
            table = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"plan {path}: cannot be read ({error.strerror})") from error
        except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(f"plan {path}: not TOML ({error})") from error
        return cls.from_dict(table, f"plan {path}")

    @classmethod
    def from_dict(cls, table: Mapping[str, Any], where: str = "plan") -> Self:
        """Returns the plan of parsed TOML or JSON; see `from_table`."""
        plan: Self = from_table(cls, table, where)
        return plan

    def to_dict(self) -> dict[str, Any]:
        """Returns the plan as JSON data, without secrets."""
        plan = dataclasses.asdict(self)
        for arm in plan["arms"]:
            arm["options"] = {key: value for key, value in arm["options"].items() if key not in SECRETS}
        return plan


def _in_range(section: str, config: object, low: float, high: float | None, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if value is not None and not (low <= value and (high is None or value <= high)):
            wanted = f"at least {low:g}" if high is None else f"{low:g}…{high:g}"
            raise ConfigError(f"{section}.{name}: expected {wanted}, got {value}")


def _scalar(text: str) -> str | int | float | bool:
    try:
        value = tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        return text
    return value if isinstance(value, (str, int, float, bool)) else text
