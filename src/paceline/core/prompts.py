"""Rows of prompt files: lines of JSON → rows → chat messages. Pure; who reads the file is another matter.

A row is told by its keys: `turns` (list of user turns, the first is used), `messages` or `conversations` (chat
messages), `prompt` (one user message), or `prompt_ids` (token ids, used as they are).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from paceline.core.errors import ConfigError

Messages = list[dict[str, str]]
KEYS = ("turns", "messages", "conversations", "prompt", "prompt_ids")
_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
_SAID_ELSEWHERE = ("tool_calls", "function_call", "reasoning", "reasoning_content", "thinking")
"""Keys under which other formats keep a part of what a message says."""
_TEXT_PARTS = ("text", "input_text", "output_text")


class Row(dict[str, Any]):
    """A row, and where it stands in its file.

    Args:
        fields: the row's keys and values.
        place: file and line, for errors.
    """

    def __init__(self, fields: Mapping[str, Any], place: str) -> None:
        super().__init__(fields)
        self.place = place


def place_of(row: Mapping[str, Any]) -> str:
    """Returns file and line of a row, or its id where it comes from no file. Pure."""
    return row.place if isinstance(row, Row) else f"row {row.get('id')}"


def parse_rows(text: str, name: str, source: str) -> Iterator[Row]:
    """Yields the rows of a file's text, each with an `id`.

    Args:
        text: JSON lines; empty ones are passed over.
        name: what rows without an id are called, a line number behind it.
        source: what errors call the file.

    Raises:
        ConfigError: a line that is not a JSON object or has none of the known keys; file and line are named.
    """
    for number, line in enumerate(text.split("\n"), 1):  # not splitlines: JSON strings may hold U+2028
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{source}:{number}: not a JSON object ({error})") from error
        if not isinstance(row, dict) or not row.keys() & set(KEYS):
            raise ConfigError(
                f"{source}:{number}: expected one of {', '.join(KEYS)}; got "
                f"{sorted(row) if isinstance(row, dict) else type(row).__name__}"
            )
        yield Row({"id": f"{name}-{number}", **row}, f"{source}:{number}")


def messages_of(row: Mapping[str, Any]) -> Messages:
    """Returns the conversation of a row that has no `prompt_ids`, up to its last user message.

    Raises:
        ConfigError: see `conversation_of`; or no user message.
    """
    messages = conversation_of(row)
    while messages and messages[-1]["role"] != "user":
        messages.pop()
    if not messages:
        raise ConfigError(f"{place_of(row)}: expected messages with at least one user, got none")
    return messages


def conversation_of(row: Mapping[str, Any]) -> Messages:
    """Returns the whole conversation of a row that has no `prompt_ids`.

    Raises:
        ConfigError: a role that is none of system, user and assistant, a turn that says nothing, or content that is
            not text; file and line are named.
    """
    if "prompt" in row and "turns" not in row:
        return [_message(row, "user", row["prompt"])]
    turns = row["turns"] if "turns" in row else row.get("messages") or row.get("conversations")
    if not isinstance(turns, list) or not turns:
        raise ConfigError(f"{place_of(row)}: expected a list of turns or messages, got {turns!r:.80}")
    if "turns" in row:
        return [_message(row, "user", turns[0])]
    return [_turn(row, turn) for turn in turns]


def _turn(row: Mapping[str, Any], turn: object) -> dict[str, str]:
    if not isinstance(turn, dict):
        raise ConfigError(f"{place_of(row)}: expected messages with role and content, got {turn!r:.80}")
    apart = [key for key in _SAID_ELSEWHERE if turn.get(key)]
    if apart:
        raise ConfigError(f"{place_of(row)}: expected messages of text alone, got one with {apart[0]}")
    return _message(row, turn.get("role") or turn.get("from"), turn.get("content", turn.get("value")))


def _message(row: Mapping[str, Any], role: object, content: object) -> dict[str, str]:
    known = _ROLES.get(role) if isinstance(role, str) else None
    if known is None:
        raise ConfigError(f"{place_of(row)}: expected roles system, user, assistant, got {role!r}")
    text = _text(row, content)
    if not text.strip() and known != "system":  # an empty system message keeps a template from adding its own
        raise ConfigError(f"{place_of(row)}: expected turns that say something, got nothing from {known}")
    return {"role": known, "content": text}


def _text(row: Mapping[str, Any], content: object) -> str:
    """Returns a text, or the texts of a list of parts `{"type": "text", "text": ...}` in one."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ConfigError(f"{place_of(row)}: expected text or a list of text parts, got {content!r:.80}")
    for part in content:
        named = part if isinstance(part, dict) else {"type": part}
        if named.get("type") not in _TEXT_PARTS or not isinstance(named.get("text"), str):
            raise ConfigError(
                f"{place_of(row)}: expected parts of text only, got {named.get('type')!r:.80}; hint: leave the row out"
            )
    return "".join(part["text"] for part in content)
