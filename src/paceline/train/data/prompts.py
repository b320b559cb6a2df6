"""Prompt files → prompts as token ids.

`core.prompts` says what a row may be; of a conversation the answer to the last user message is regenerated. Rows
whose answers are given are read in `answers.py`.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import random
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.core.errors import ConfigError, RequestError
from paceline.core.prompts import Messages, Row, messages_of, parse_rows, place_of


@dataclass(frozen=True, slots=True)
class Source:
    """A prompt file and which of its rows to use.

    Args:
        path: a JSON-lines file, packed if its name ends in .gz.
        limit: most rows taken, chosen at random by `seed`; `None` takes all.
        categories: only rows whose `category` is one of these; empty takes all.
    """

    path: Path
    limit: int | None = None
    categories: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt as token ids; or, where `supervised` is given, a conversation that needs no answer any more.

    Args:
        id, category: as its file says.
        token_ids: all of it.
        supervised: for each token whether the target wrote it; empty where the target is yet to answer.
    """

    id: str
    category: str
    token_ids: tuple[int, ...]
    supervised: tuple[bool, ...] = ()


def load_prompts(
    sources: Sequence[Source], render_chat: Callable[[Messages], list[int]], *, max_tokens: int, seed: int
) -> list[Prompt]:
    """Returns the sources' prompts in one shuffled order; prompts above `max_tokens` are left out.

    Raises:
        ConfigError: a file that cannot be read, a row that is none or that the chat template refuses (file and line
            named), no rows left.
    """
    rng = random.Random(seed)
    prompts: list[Prompt] = []
    for row in chosen_rows(sources, rng):
        ids = token_ids_of(row, "prompt_ids") if "prompt_ids" in row else _rendered(row, render_chat)
        if len(ids) <= max_tokens:
            prompts.append(Prompt(str(row["id"]), str(row.get("category", "")), ids))
    rng.shuffle(prompts)
    return prompts


def digest(prompts: Sequence[Prompt]) -> str:
    """Returns the sha256 of the prompts' ids and tokens, in order, and of which tokens are supervised. Pure."""
    state = hashlib.sha256()
    for prompt in prompts:
        given = [prompt.supervised] if prompt.supervised else []
        state.update(json.dumps([prompt.id, prompt.token_ids, *given]).encode())
    return state.hexdigest()


def chosen_rows(sources: Sequence[Source], rng: random.Random) -> Iterator[Row]:
    """Yields the rows that the sources ask for, each source shuffled. Mutates: the generator.

    Raises:
        ConfigError: a file that cannot be read, a line that is no row, or no rows of the categories.
    """
    for source in sources:
        rows = [
            r for r in _rows(source.path) if not source.categories or r.get("category") in source.categories
        ]
        if not rows:
            raise ConfigError(f"{source.path}: no rows of categories {source.categories or 'any'}")
        rng.shuffle(rows)
        yield from rows[: source.limit]


def token_ids_of(row: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """Returns a row's token ids.

    Raises:
        ConfigError: not a list of token ids, or an empty one; file and line are named.
    """
    ids = row.get(key)
    if not isinstance(ids, list) or not ids or not all(type(i) is int and i >= 0 for i in ids):
        raise ConfigError(f"{place_of(row)}: {key}: expected a list of token ids, got {ids!r:.80}")
    return tuple(ids)


def _rendered(row: Row, render_chat: Callable[[Messages], list[int]]) -> tuple[int, ...]:
    messages = messages_of(row)
    try:
        return tuple(render_chat(messages))
    except (ConfigError, RequestError) as error:
        raise ConfigError(f"{row.place}: {error}") from error


def _rows(path: Path) -> Iterator[Row]:
    unpacked = path.name.removesuffix(".gz")
    try:
        data = path.read_bytes()
        text = (data if unpacked == path.name else gzip.decompress(data)).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: expected UTF-8 text, got other bytes at {error.start}") from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ConfigError(
            f"data source {path}: expected a gzip file, got a damaged one ({error}); hint: pack it again"
        ) from error
    except OSError as error:
        raise ConfigError(
            f"data source {path}: cannot be read ({error.strerror}); hint: correct its path"
        ) from error
    yield from parse_rows(text, Path(unpacked).stem, str(path))
