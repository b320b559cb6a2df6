"""Prompt files → prompts, for every measurement of this room; see `core.prompts` for what a row may be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from paceline.core.errors import ConfigError
from paceline.core.prompts import Messages, messages_of, parse_rows


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt.

    Args:
        id: its name in reports.
        token_ids: what the target reads.
        text: the last user message, for servers that take only text; `None` where the file has token ids.
    """

    id: str
    token_ids: tuple[int, ...]
    text: str | None = None


def load_prompts(path: Path, render_chat: Callable[[Messages], list[int]], limit: int | None) -> list[Prompt]:
    """Returns the first `limit` prompts of a JSON-lines file, all of them where it is `None`.

    Raises:
        ConfigError: not text, no prompts, or a row that is none (file and line named).
        OSError: a file that cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: expected UTF-8 text, got other bytes at {error.start}") from error
    rows = list(parse_rows(text, path.stem, str(path)))[:limit]
    if not rows:
        raise ConfigError(f"{path}: expected at least one prompt, got none")
    prompts = []
    for row in rows:
        if "prompt_ids" in row:
            prompts.append(Prompt(str(row["id"]), tuple(row["prompt_ids"])))
        else:
            messages = messages_of(row)
            prompts.append(Prompt(str(row["id"]), tuple(render_chat(messages)), messages[-1]["content"]))
    return prompts
