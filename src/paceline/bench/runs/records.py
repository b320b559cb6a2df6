"""The folder of a run: `run.json` says what was run, `rows.jsonl` holds its requests, one a line.

A pass is in `rows.jsonl` as its rows and a closing line. Without the closing line it was interrupted, and it does not
count: readers pass over such a tail, and a resumed run cuts it off.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from paceline.bench.arms.base import Fingerprint, Load, Outcome, StepTime
from paceline.bench.runs.rows import PassRecord, Place, Row, Run
from paceline.core.errors import ConfigError

SCHEMA_VERSION = 2
READABLE = (1, 2)
"""Versions that are read: 1 knows a step's draft and verify only, no copies of memory and no bytes that arms read."""
HEADER, ROWS = "run.json", "rows.jsonl"
_PLACE = ("block", "order", "arm", "load", "temperature", "start")


def plain(value: Any) -> Any:
    """Returns a value as it is read back from JSON: tuples are lists. Pure."""
    return json.loads(json.dumps(value))


def holds_run(folder: Path) -> bool:
    """Returns whether a run was begun in the folder."""
    return (folder / HEADER).exists() or (folder / ROWS).exists()


def write(run: Run, folder: Path) -> None:
    """Writes everything but rows and passes, atomically: a reader sees what stood there before or all of it."""
    folder.mkdir(parents=True, exist_ok=True)
    header = asdict(replace(run, rows=(), passes=()))
    del header["rows"], header["passes"]
    path = folder / HEADER
    partial = path.with_suffix(".partial")
    try:
        text = json.dumps({"schema_version": SCHEMA_VERSION, **header}, indent=2)
        _write_through(partial, "w", text + "\n")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def append_pass(record: PassRecord, rows: Sequence[Row], folder: Path) -> None:
    """Adds a whole pass; returns once it is on the disk."""
    lines = [
        {"record": "row", **_place(row.place), "kind": row.kind, "max_new_tokens": row.max_new_tokens}
        | asdict(row.outcome)
        for row in rows
    ]
    known = asdict(record)
    del known["place"]
    closing = {"record": "pass", **_place(record.place), **known, "num_rows": len(rows)}
    text = "".join(json.dumps(line, allow_nan=False) + "\n" for line in (*lines, closing))
    _write_through(folder / ROWS, "a", text)


def read_run(folder: Path) -> Run:
    """Returns the run of a folder: its whole passes, and what else is known of it.

    Raises:
        ConfigError: a folder without a run, a run of another schema version, or a line that is broken; a pass that was
            interrupted is no such line.
    """
    path = folder / HEADER
    try:
        header = json.loads(path.read_text(encoding="utf-8"))
        version = header.pop("schema_version")
    except OSError as error:
        raise ConfigError(
            f"{folder}: expected the folder of a run, with {HEADER} in it ({error.strerror})"
        ) from error
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise ConfigError(f"{path}: expected a JSON object with a schema_version") from error
    if version not in READABLE:
        raise ConfigError(
            f"{path}: expected schema_version {' or '.join(map(str, READABLE))}, got {version!r}; hint: read it with "
            "the version of paceline that wrote it"
        )
    rows, passes = _read_rows(folder / ROWS)
    try:
        arms = {name: Fingerprint(**known) for name, known in header.pop("arms").items()}
        lost = tuple(header.pop("lost"))
        return Run(**header, arms=arms, lost=lost, rows=rows, passes=passes)
    except (TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"{path}: not what schema_version {version} says ({error})") from error


def cut_tail(folder: Path) -> None:
    """Cuts off a pass that was interrupted, so that the next one begins behind the last whole pass."""
    path = folder / ROWS
    if path.exists():
        lines = _whole_lines(path)
        with path.open("r+b") as file:
            file.truncate(sum(map(len, lines)))


def _write_through(path: Path, mode: str, text: str) -> None:
    with path.open(mode, encoding="utf-8", newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _place(place: Place) -> dict[str, Any]:
    load = {name: value for name, value in asdict(place.load).items() if value is not None}
    return {**asdict(place), "load": load}


# Reading -------------------------------------------------------------------------------------------------------------


def _whole_lines(path: Path) -> list[bytes]:
    """Returns the lines up to the last closing line, each with its end."""
    lines = path.read_bytes().splitlines(keepends=True)  # of bytes: splits at line ends only
    while lines and not _is_closing(lines[-1]):
        lines.pop()
    return lines


def _is_closing(line: bytes) -> bool:
    try:
        data = json.loads(line)
    except ValueError:
        return False
    return line.endswith(b"\n") and isinstance(data, dict) and data.get("record") == "pass"


def _read_rows(path: Path) -> tuple[tuple[Row, ...], tuple[PassRecord, ...]]:
    if not path.exists():
        return (), ()
    rows: list[Row] = []
    passes: list[PassRecord] = []
    num_before = 0
    for number, line in enumerate(_whole_lines(path), 1):
        try:
            data = json.loads(line)
            if data.pop("record") == "row":
                rows.append(_row(data))
                continue
            expected = data.pop("num_rows")
            passes.append(_pass(data))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(
                f"{path}:{number}: not a row or the end of a pass ({error}); hint: the file was changed behind the "
                "run, or the disk has lost a part; cut it before the first line of that pass and resume"
            ) from error
        if len(rows) - num_before != expected:
            raise ConfigError(
                f"{path}:{number}: expected {expected} rows in the pass that ends here, got {len(rows) - num_before}"
            )
        num_before = len(rows)
    return tuple(rows), tuple(passes)


def _row(data: dict[str, Any]) -> Row:
    place, rest = _split(data)
    kind, max_new_tokens = rest.pop("kind"), rest.pop("max_new_tokens")
    acceptance = rest.pop("acceptance")
    if acceptance is not None:
        acceptance = tuple((drafted, accepted, count) for drafted, accepted, count in acceptance)
    return Row(place, kind, max_new_tokens, Outcome(**rest, acceptance=acceptance))


def _pass(data: dict[str, Any]) -> PassRecord:
    place, rest = _split(data)
    rates = tuple(rest.pop("copy_bytes_per_s", ()))
    return PassRecord(
        place, step_times=tuple(map(_step_time, rest.pop("step_times"))), copy_bytes_per_s=rates, **rest
    )


def _step_time(data: dict[str, Any]) -> StepTime:
    passes = tuple((rows, count, *seconds) for rows, count, *seconds in data.pop("passes", ()))
    return StepTime(**data, passes=passes)


def _split(data: Mapping[str, Any]) -> tuple[Place, dict[str, Any]]:
    at = {name: data[name] for name in _PLACE}
    rest = {name: value for name, value in data.items() if name not in at}
    return Place(**{**at, "load": Load(**at["load"])}), rest
