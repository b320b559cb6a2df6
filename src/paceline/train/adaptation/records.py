"""What an adaptation is asked, what it tells while it goes on, and what comes of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.core.errors import ConfigError
from paceline.target.pull import DEFAULT_TARGET
from paceline.train.trainer import Progress


@dataclass(frozen=True, slots=True)
class AdaptConfig:
    """What is adapted, to what, and in which time.

    Args:
        out: folder of everything.
        target: see `LLM`.
        drafter: a drafter folder, or "auto" for the one that ships for the target.
        minutes: in which all of it ends: answers, steps and measurements.
        max_prompts: most prompts to learn from; `None` takes as many as the time allows.
        held_out: share of the traffic that is kept to judge by.
        rehearsal: share of general prompts among those learnt from.
        temperatures: at which answers are written, in turn, and at each of which is measured.
        max_new_tokens: longest answer.
        max_prompt_tokens: longer prompts are left out.
        lr: peak learning rate.
        seed: key of the split and of all draws.
    """

    out: str
    target: str = DEFAULT_TARGET
    drafter: str = "auto"
    minutes: float = 60.0
    max_prompts: int | None = None
    held_out: float = 0.2
    rehearsal: float = 0.25
    temperatures: tuple[float, ...] = (0.0,)
    max_new_tokens: int = 160
    max_prompt_tokens: int = 2048
    lr: float = 6e-4
    seed: int = 0

    def __post_init__(self) -> None:
        checks = {
            "minutes: expected more than 0": self.minutes > 0,
            "max_prompts: expected at least 1": self.max_prompts is None or self.max_prompts >= 1,
            "held_out: expected more than 0 and less than 1": 0 < self.held_out < 1,
            "rehearsal: expected 0 or more and less than 1": 0 <= self.rehearsal < 1,
            "temperatures: expected at least one": len(self.temperatures) > 0,
            "max_new_tokens: expected at least 2": self.max_new_tokens >= 2,
        }
        for expectation, holds in checks.items():
            if not holds:
                raise ConfigError(f"{expectation}, got {getattr(self, expectation.partition(':')[0])}")


@dataclass(frozen=True, slots=True)
class AdaptEvent:
    """What an observer is told.

    Args:
        stage: "judging" and "answers" (in shards), "steps", "foretelling" and "measuring" (in prompts).
        done, total: how far; a total of 0 is not known yet.
        progress: of a step.
    """

    stage: str
    done: int
    total: int
    progress: Progress | None = None


@dataclass(frozen=True, slots=True)
class Adaptation:
    """What came of it.

    Args:
        adopted: whether the new drafter is kept.
        folder: its folder; `None` where it is not.
        report: what report.json holds.
    """

    adopted: bool
    folder: Path | None
    report: dict[str, Any]
