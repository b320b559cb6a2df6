"""Rows of prompt files: lines of JSON → rows → chat messages. Pure; who reads the file is another matter.

A row is told by its keys: `turns` (list of user turns, the first is used), `messages` or `conversations` (chat
messages, up to the last user message), `prompt` (one user message), or `prompt_ids` (token ids, used as they are).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from paceline.core.errors import ConfigError

Messages = list[dict[str, str]]
KEYS = ("turns", "messages", "conversations", "prompt", "prompt_ids")
_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}


def parse_rows(text: str, name: str, source: str) -> Iterator[dict[str, Any]]:
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
        yield {"id": f"{name}-{number}", **row}


def messages_of(row: dict[str, Any]) -> Messages:
    """Returns the conversation of a row that has no `prompt_ids`, ending with a user message.

    Raises:
        ConfigError: a role that is none of system, user and assistant, or no user message.
    """
    if "turns" in row:
        return [{"role": "user", "content": str(row["turns"][0])}]
    if "prompt" in row:
        return [{"role": "user", "content": str(row["prompt"])}]
    turns = row.get("messages") or row["conversations"]
    messages = [
        {
            "role": _ROLES.get(turn.get("role") or turn.get("from"), "?"),
            "content": str(turn.get("content") or turn.get("value") or ""),
        }
        for turn in turns
    ]
    if any(m["role"] == "?" for m in messages) or not any(m["role"] == "user" for m in messages):
        raise ConfigError(f"row {row['id']}: expected roles system, user, assistant with at least one user")
    while messages[-1]["role"] != "user":
        messages.pop()
    return messages
