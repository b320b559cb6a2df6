"""Logs of OpenAI-style requests, one JSON object a line → the user's own traffic as a workload.

A line holds a chat request (`messages`) or a completion request (`prompt` as text), itself or below `request`, `body`,
`params`, `input`, `payload` or `kwargs`; beside it, where the log has them, a time and the response with its `usage`.
Whatever cannot be sent again as plain chat is left out, counted, and named by its line. Reasons never quote the log.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from paceline.bench.workloads.masking import mask as mask_text
from paceline.bench.workloads.workload import Item, Workload, read_lines, stem_of
from paceline.core.errors import ConfigError
from paceline.core.prompts import Messages

OTHER, ALL = "other", "all"
"""Kinds of requests that no rule names, and of all requests where nothing divides them."""

MAX_LISTED = 20
"""Lines left out that the notes name; all are counted."""

_NESTS = ("request", "body", "params", "input", "payload", "kwargs")
_ANSWERS = ("response", "output", "result", "body")
_TIMES = ("timestamp", "time", "ts", "start_time", "startTime", "created_at", "createdAt", "created")
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_NEUTRAL: Mapping[str, object] = {
    "top_p": 1,
    "top_k": None,
    "min_p": 0,
    "seed": None,
    "stop": [],
    "n": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "logit_bias": {},
    "logprobs": False,
    "response_format": {"type": "text"},
}
"""Settings that are not replayed, each with the value that changes nothing."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class _UnusableError(Exception):
    """A line that cannot be replayed; the message is the reason."""


@dataclass(frozen=True, slots=True)
class _Line:
    """What a line says."""

    number: int
    item: Item
    request: Mapping[str, Any]
    time_s: float | None
    says_time: bool
    is_cut: bool


def load_log(
    path: Path,
    *,
    kind_field: str | None = None,
    rules: Sequence[tuple[str, str]] = (),
    mask: bool = False,
    limit: int | None = None,
) -> Workload:
    """Returns the requests of a log, in order of arrival, with notes of all that was left out or changed.

    Times are epoch seconds (or milliseconds, micro- or nanoseconds, told by their size) or ISO 8601; one without an
    offset is read as UTC. Small numbers, of a clock that began with the log, are seconds too. If any line has a time,
    lines without are left out.

    Args:
        path: JSON lines in UTF-8, packed if the name ends in .gz.
        kind_field: dotted path to the kind of a line, such as "metadata.task"; lines without it are "other".
        rules: (kind, regular expression), the first that is found in the last user message names the kind, and
            "other" is the rest. Without rules and `kind_field` every request is of the kind "all".
        mask: whether personal data is replaced; see `masking.mask`. Kinds are told before.
        limit: only the first so many, in order of arrival. They are consecutive, so that the spaces between arrivals
            stay what they were.

    Raises:
        ConfigError: no line that can be replayed, another encoding, both `kind_field` and `rules`, a rule that is no
            regular expression, a `kind_field` that no line has.
        OSError: a file that cannot be read.
    """
    if limit is not None and limit < 1:
        raise ConfigError(f"limit: expected at least 1, got {limit}")
    kind_of = _classifier(kind_field, rules)
    lines, reasons = _read(path, kind_of)
    has_times = any(line.time_s is not None for line in lines)
    if has_times:
        lines, untimed = _arrange(lines)
        reasons = sorted([*reasons, *untimed])
    if not lines:
        raise ConfigError(
            f"{path}: expected at least one request that can be replayed, got "
            f"{_count(reasons) or 'an empty file'}; a line is a JSON object with messages, itself or below 'request'"
        )
    if kind_field and all(line.item.kind == OTHER for line in lines):
        raise ConfigError(
            f"kind_field: expected a field that some line of {path} has, got {kind_field!r}; "
            "give its path from the line's start, such as metadata.task"
        )
    kept = lines[:limit]
    items = tuple(line.item for line in kept)
    notes = [*_notes_of_reading(lines, kept, reasons), *_notes_of_requests(kept, has_times)]
    if mask:
        items, note = _masked(items)
        notes.append(note)
    return Workload(stem_of(path), items, tuple(notes))


def _read(
    path: Path, kind_of: Callable[[Mapping[str, Any], str], str]
) -> tuple[list[_Line], list[tuple[int, str]]]:
    """Returns the lines that can be replayed, and (line number, reason) of the others."""
    lines, reasons = [], []
    for number, text in enumerate(read_lines(path), 1):
        if not text.strip():
            continue
        try:
            lines.append(_parse(number, text, kind_of))
        except _UnusableError as error:
            reasons.append((number, str(error)))
    return lines, reasons


def _parse(number: int, text: str, kind_of: Callable[[Mapping[str, Any], str], str]) -> _Line:
    row = _object(text)
    if row is None:
        raise _UnusableError("not a JSON object")
    request = _request_in(row)
    if request is None:
        raise _UnusableError("no messages and no prompt")
    if request.get("tools") or request.get("functions"):
        raise _UnusableError("tools, which a plain chat request cannot carry")
    messages = _messages(request)
    asked = [turn for turn, message in enumerate(messages, 1) if message["role"] == "user"]
    if not asked:
        raise _UnusableError("no user message")
    conversation = messages[: asked[-1]]
    if not conversation[-1]["content"].strip():
        raise _UnusableError("the last user message is empty")
    time_s, says_time = _time_of(row, request)
    item = Item(
        f"line-{number}",
        kind_of(row, conversation[-1]["content"]),
        conversation,
        max_new_tokens=_limit_of(request),
        num_logged_tokens=_answer_length(row),
    )
    return _Line(number, item, request, time_s, says_time, len(conversation) < len(messages))


def _object(value: object) -> Mapping[str, Any] | None:
    """Returns a JSON object, also one that was logged as text; `None` for anything else."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return None
    return value if isinstance(value, dict) else None


def _request_in(row: Mapping[str, Any], depth: int = 3) -> Mapping[str, Any] | None:
    if "messages" in row or "prompt" in row:
        return row
    for key in _NESTS if depth else ():
        inner = _object(row.get(key))
        if inner is not None and (found := _request_in(inner, depth - 1)) is not None:
            return found
    return None


def _messages(request: Mapping[str, Any]) -> Messages:
    if "messages" in request:
        turns = request["messages"]
        if not isinstance(turns, list) or not turns:
            raise _UnusableError("messages is not a list with messages in it")
        messages = [_message(turn) for turn in turns]
    else:
        prompt = request["prompt"]
        if isinstance(prompt, list) and len(prompt) == 1:
            prompt = prompt[0]
        if not isinstance(prompt, str):
            raise _UnusableError("a prompt that is not one text (token ids or several prompts)")
        messages = [{"role": "user", "content": prompt}]
    if any(_has_half_characters(message["content"]) for message in messages):
        raise _UnusableError("text with half characters (lone surrogates)")
    return messages


def _message(turn: object) -> dict[str, str]:
    if not isinstance(turn, dict):
        raise _UnusableError("a message that is not an object")
    role = turn.get("role")
    if role in ("tool", "function") or turn.get("tool_calls") or turn.get("function_call"):
        raise _UnusableError("tool calls, which a plain chat request cannot carry")
    if not isinstance(role, str) or role not in _ROLES:
        raise _UnusableError("a role that is none of system, developer, user and assistant")
    return {"role": _ROLES[role], "content": _content(turn.get("content"))}


def _content(content: object) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise _UnusableError("a message without content")
    texts = [part.get("text") if isinstance(part, dict) else part for part in content]
    if not all(isinstance(text, str) for text in texts):
        raise _UnusableError("parts that are not text (images, sound, files)")
    return "\n".join(map(str, texts))


def _has_half_characters(text: str) -> bool:
    return any("\ud800" <= letter <= "\udfff" for letter in text)


def _limit_of(request: Mapping[str, Any]) -> int | None:
    limits = [request[key] for key in ("max_completion_tokens", "max_tokens") if request.get(key) is not None]
    if not limits:
        return None
    if not _is_count(limits[0]):
        raise _UnusableError("max_tokens is not a whole number from 1 to 1000000")
    return int(limits[0])


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 1_000_000


def _answer_length(row: Mapping[str, Any], depth: int = 2) -> int | None:
    usage = _object(row.get("usage"))
    if usage is not None and _is_count(usage.get("completion_tokens")):
        return int(usage["completion_tokens"])
    for key in _ANSWERS if depth else ():
        inner = _object(row.get(key))
        if inner is not None and (length := _answer_length(inner, depth - 1)) is not None:
            return length
    return None


def _time_of(row: Mapping[str, Any], request: Mapping[str, Any]) -> tuple[float | None, bool]:
    """Returns the line's time in seconds and whether it says any; a response's own time is the last resort."""
    said = [
        holder[key]
        for holder in (row, request, _object(row.get("response")) or {})
        for key in _TIMES
        if holder.get(key) is not None
    ]
    return next((time_s for value in said if (time_s := _seconds(value)) is not None), None), bool(said)


def _seconds(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    except ValueError:
        return _iso_seconds(str(value))
    if not math.isfinite(number) or number < 0:
        return None
    scale = next((scale for start, scale in ((1e17, 1e9), (1e14, 1e6), (1e11, 1e3)) if number >= start), 1.0)
    return number / scale


def _iso_seconds(text: str) -> float | None:
    try:
        moment = datetime.fromisoformat(text.strip())
        return ((moment if moment.tzinfo else moment.replace(tzinfo=UTC)) - _EPOCH).total_seconds()
    except (ValueError, OverflowError):
        return None


def _arrange(lines: Sequence[_Line]) -> tuple[list[_Line], list[tuple[int, str]]]:
    """Returns the lines in order of arrival, counted from the first, and those that have no time. Pure."""
    timed = sorted(
        ((line.time_s, line) for line in lines if line.time_s is not None), key=lambda pair: pair[0]
    )
    start = timed[0][0]
    arranged = [replace(line, item=replace(line.item, arrival_s=time_s - start)) for time_s, line in timed]
    untimed = [
        (line.number, "a time that cannot be read" if line.says_time else "no time, in a log that has times")
        for line in lines
        if line.time_s is None
    ]
    return arranged, untimed


def _classifier(
    kind_field: str | None, rules: Sequence[tuple[str, str]]
) -> Callable[[Mapping[str, Any], str], str]:
    if kind_field and rules:
        raise ConfigError("kind_field, rules: expected one of them, got both; leave one out")
    if kind_field:
        return lambda row, _: _field(row, kind_field.split("."))
    if not rules:
        return lambda *_: ALL
    patterns = [(kind, _compiled(kind, pattern)) for kind, pattern in rules]
    return lambda _, text: next((kind for kind, pattern in patterns if pattern.search(text)), OTHER)


def _compiled(kind: str, pattern: str) -> re.Pattern[str]:
    if not kind:
        raise ConfigError(f"rules: expected a kind for {pattern!r}, got an empty one; name it")
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ConfigError(
            f"rules: expected a regular expression for {kind!r}, got {pattern!r} ({error}); correct it"
        ) from error


def _field(row: Mapping[str, Any], path: Sequence[str]) -> str:
    value: object = row
    for key in path:
        value = (_object(value) or {}).get(key)
    if isinstance(value, (bool, int, float)) or (isinstance(value, str) and not _has_half_characters(value)):
        return str(value) or OTHER
    return OTHER


def _notes_of_reading(
    lines: Sequence[_Line], kept: Sequence[_Line], reasons: Sequence[tuple[int, str]]
) -> Iterator[str]:
    yield f"{len(kept)} of {len(lines) + len(reasons)} lines are used"
    if len(kept) < len(lines):
        yield f"the first {len(kept)} of {len(lines)} requests that can be replayed; the rest is beyond the limit"
    if reasons:
        yield f"{len(reasons)} lines left out: {_count(reasons)}"
        yield from (f"line {number}: {reason}" for number, reason in reasons[:MAX_LISTED])
        if len(reasons) > MAX_LISTED:
            yield f"{len(reasons) - MAX_LISTED} more lines left out are not listed"


def _count(reasons: Sequence[tuple[int, str]]) -> str:
    return "; ".join(
        f"{reason} ({num})" for reason, num in Counter(reason for _, reason in reasons).most_common()
    )


def _notes_of_requests(kept: Sequence[_Line], has_times: bool) -> Iterator[str]:
    if not has_times and any(line.says_time for line in kept):
        yield "no time of the log can be read; arrivals are unknown"
    num_cut = sum(line.is_cut for line in kept)
    if num_cut:
        yield f"{num_cut} requests are asked without what stands after their last user message"
    num_prompts = sum("messages" not in line.request for line in kept)
    if num_prompts:
        yield f"{num_prompts} completion requests are asked as one user message each"
    temperatures = Counter(_shown(line.request.get("temperature")) for line in kept)
    if temperatures.keys() != {"none"}:
        listed = ", ".join(f"{value} ({num})" for value, num in sorted(temperatures.items()))
        yield f"temperatures in the log: {listed}; the plan sets its own"
    settings = Counter(
        key
        for line in kept
        for key, neutral in _NEUTRAL.items()
        if line.request.get(key) not in (None, neutral)
    )
    if settings:
        yield "set in the log and not replayed: " + ", ".join(
            f"{key} ({num})" for key, num in settings.items()
        )


def _shown(value: object) -> str:
    if value is None:
        return "none"
    return f"{value:g}" if isinstance(value, (int, float)) and abs(value) < 1e9 else "not a number"


def _masked(items: Sequence[Item]) -> tuple[tuple[Item, ...], str]:
    found: Counter[str] = Counter()
    masked = []
    for item in items:
        messages = []
        for message in item.messages:
            content, sorts = mask_text(message["content"])
            found += sorts
            messages.append({**message, "content": content})
        masked.append(replace(item, messages=messages))
    counts = ", ".join(f"{sort} {num}" for sort, num in sorted(found.items())) or "nothing found"
    return tuple(masked), f"masked by pattern, names and streets are not: {counts}"
