"""What a report is made of: checks with their status, and the document around them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from paceline.bench.exactness.statistics import holm

SCHEMA_VERSION = 1
OK, FLAGGED, NOT_RUN = "ok", "flagged", "not run"


@dataclass(frozen=True, slots=True)
class Check:
    """One question and its answer.

    Args:
        name: what is checked.
        status: "ok", "flagged" or "not run".
        summary: the answer in a few words, or the reason why there is none.
        statistic: the number that was tested or counted.
        p_value: of the test alone, `None` where the check is no test.
        p_adjusted: corrected for all tests of the report (Holm); what the status of a test says is read from it.
        bound: upper bound at 95 % on the rate that is counted.
        details: everything else, as JSON data.
    """

    name: str
    status: str
    summary: str
    statistic: float | None = None
    p_value: float | None = None
    p_adjusted: float | None = None
    bound: float | None = None
    details: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def not_run(cls, name: str, reason: str) -> Check:
        """Returns the check that had nothing to look at."""
        return cls(name, NOT_RUN, reason)

    def to_dict(self) -> dict[str, Any]:
        """Returns the check's JSON shape; numbers that JSON does not know become null."""
        plain: dict[str, Any] = _finite(
            {
                "name": self.name,
                "status": self.status,
                "summary": self.summary,
                "statistic": self.statistic,
                "p_value": self.p_value,
                "p_adjusted": self.p_adjusted,
                "bound": self.bound,
                "details": self.details,
            }
        )
        return plain


@dataclass(frozen=True, slots=True)
class Report:
    """All checks of a pair or of two servers.

    Args:
        checks: judged together by `judge`.
        environment: the machine that computed the report.
        pair: what was examined.
        settings: how.
        command: what repeats it, "" where it was not a command.
    """

    checks: tuple[Check, ...]
    environment: dict[str, object]
    pair: dict[str, object]
    settings: dict[str, object]
    command: str = ""

    @property
    def flagged(self) -> list[str]:
        """Names of the flagged checks."""
        return [check.name for check in self.checks if check.status == FLAGGED]

    def to_dict(self) -> dict[str, Any]:
        """Returns the report's JSON shape, versioned by `schema_version`."""
        return {
            "schema_version": SCHEMA_VERSION,
            "command": self.command,
            "flagged": self.flagged,
            "checks": [check.to_dict() for check in self.checks],
            "pair": self.pair,
            "settings": _finite(self.settings),
            "environment": self.environment,
        }


def judge(checks: Sequence[Check], alpha: float) -> tuple[Check, ...]:
    """Returns the checks with p-values corrected for their number, and flagged where they are at most `alpha`. Pure."""
    tests = [i for i, check in enumerate(checks) if check.p_value is not None]
    adjusted = holm([p for check in checks if (p := check.p_value) is not None])
    judged = list(checks)
    for i, p in zip(tests, adjusted, strict=True):
        judged[i] = replace(checks[i], p_adjusted=p, status=FLAGGED if p <= alpha else checks[i].status)
    return tuple(judged)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
