"""Rotary settings of a flat config: engines know one dialect or the other and fall back silently, so both are used."""

from __future__ import annotations

from typing import Any

from paceline.core.errors import ConfigError


def rope_theta(raw: dict[str, Any]) -> float:
    """Returns the base of the rotary angles, from `rope_parameters` or from top level. Pure.

    Raises:
        ConfigError: found in neither, or angles that are scaled.
    """
    parameters = raw.get("rope_parameters") or {}
    scaling = parameters or raw.get("rope_scaling") or {}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind != "default":
        raise ConfigError(f"rope: expected the default type, got {kind!r}")
    theta = parameters.get("rope_theta") or raw.get("rope_theta")
    if theta is None:
        raise ConfigError("rope_theta: expected in rope_parameters or at top level, found in neither")
    return float(theta)


def rope_to_json(theta: float) -> dict[str, Any]:
    """Returns the keys that both dialects read. Pure."""
    return {
        "rope_parameters": {"rope_theta": theta, "rope_type": "default"},
        "rope_scaling": None,
        "rope_theta": theta,
    }
