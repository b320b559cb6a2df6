"""Prompt files → prompts as token ids.

`core.prompts` says what a row may be; of a conversation the answer to the last user message is regenerated.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.core.errors import ConfigError
from paceline.core.prompts import Messages, messages_of, parse_rows


@dataclass(frozen=True, slots=True)
class Source:
    """A prompt file and which of its rows to use.

    Args:
        path: a JSON-lines file.
        limit: most rows taken, chosen at random by `seed`; `None` takes all.
        categories: only rows whose `category` is one of these; empty takes all.
    """

    path: Path
    limit: int | None = None
    categories: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt as token ids."""

    id: str
    category: str
    token_ids: tuple[int, ...]


def load_prompts(
    sources: Sequence[Source], render_chat: Callable[[Messages], list[int]], *, max_tokens: int, seed: int
) -> list[Prompt]:
    """Returns the sources' prompts in one shuffled order; prompts above `max_tokens` are left out.

    Raises:
        ConfigError: a missing file, a line that is not JSON or has no known key (file and line named), no rows left.
    """
    rng = random.Random(seed)
    prompts: list[Prompt] = []
    for source in sources:
        rows = [
            r for r in _rows(source.path) if not source.categories or r.get("category") in source.categories
        ]
        if not rows:
            raise ConfigError(f"{source.path}: no rows of categories {source.categories or 'any'}")
        rng.shuffle(rows)
        for row in rows[: source.limit]:
            ids = tuple(row["prompt_ids"]) if "prompt_ids" in row else tuple(render_chat(messages_of(row)))
            if len(ids) <= max_tokens:
                prompts.append(Prompt(str(row["id"]), str(row.get("category", "")), ids))
    rng.shuffle(prompts)
    return prompts


def digest(prompts: Sequence[Prompt]) -> str:
    """Returns the sha256 of the prompts' ids and tokens, in order. Pure."""
    state = hashlib.sha256()
    for prompt in prompts:
        state.update(json.dumps([prompt.id, prompt.token_ids]).encode())
    return state.hexdigest()


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"data source {path}: cannot be read ({error.strerror}); hint: correct its path"
        ) from error
    yield from parse_rows(text, path.stem, str(path))
