"""The stored result of `speed.py`: parts that are measured one by one, each with its environment."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

RESULT = Path(__file__).resolve().parent / "results" / "speed.json"
PARTS = ("plain", "rows", "pairs", "engines", "cells", "growth")

Row = dict[str, Any]
"""What was measured at one place; says where it is in the fields that `KEYS` names for its part."""

KEYS: dict[str, tuple[str, ...]] = {
    "plain": (),
    "rows": ("kind", "num_rows"),
    "pairs": ("set", "temperature", "batch"),
    "engines": (),
    "cells": ("kind", "batch", "temperature"),
    "growth": ("axis", "value"),
}
PIECEWISE = ("pairs", "cells", "growth")
"""Parts that may be measured in pieces."""


_FOLDERS = re.compile(r"(?<![\w.:/])/(?:[^\s/'\"]+/)*")


class MixedPartError(ValueError):
    """Pieces that would not have been measured alike."""


def stored(path: Path = RESULT) -> dict[str, Any]:
    """Returns the stored result; one without parts where nothing was measured yet."""
    result: dict[str, Any] = {"parts": {}}
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else result


def merged(result: Mapping[str, Any], name: str, found: Mapping[str, Any], fresh: bool) -> dict[str, Any]:
    """Returns the result with what was found of a part; the other parts stay as they are. Pure.

    A part in pieces keeps its rows of other places, if machine and settings were the same.

    Args:
        found: of the part: `command`, `date`, `environment`, `settings` and `rows`.
        fresh: drop what was stored of the part.

    Raises:
        MixedPartError: earlier pieces had another environment or other settings.
    """
    part = dict(found)
    earlier = result["parts"].get(name)
    if earlier is not None and name in PIECEWISE and not fresh:
        for what in ("environment", "settings"):
            if earlier[what] != part[what]:
                raise MixedPartError(
                    f"{name}: expected the {what} of the pieces that are stored, {earlier[what]}; got {part[what]}; "
                    "hint: --fresh drops them"
                )
        part["rows"] = merged_rows(earlier["rows"], part["rows"], KEYS[name])
    parts = {**result["parts"], name: part}
    return {**result, "parts": {each: parts[each] for each in PARTS if each in parts}}


def merged_rows(earlier: Sequence[Row], found: Sequence[Row], keys: Sequence[str]) -> list[Row]:
    """Returns rows by place, the found ones instead of earlier ones of the same place, new places last. Pure."""
    rows = {tuple(row[key] for key in keys): row for row in (*earlier, *found)}
    return list(rows.values())


def store(path: Path, name: str, found: Mapping[str, Any], fresh: bool) -> None:
    """Adds what was found of a part to a result file, atomically. See `merged`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    result = merged(stored(path), name, found, fresh)
    write_text(path, json.dumps(result, indent=1) + "\n")


def without_folders(text: str) -> str:
    """Returns a text with absolute paths cut to their last name: where things lie is this machine's affair. Pure."""
    return _FOLDERS.sub("", text)


def write_text(path: Path, text: str) -> None:
    """Replaces a file atomically."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
