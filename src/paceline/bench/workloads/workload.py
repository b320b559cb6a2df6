"""What is asked: requests with their kinds of work, from the built-in set or from files; see `traffic` for logs."""

from __future__ import annotations

import difflib
import gzip
import hashlib
import json
import zlib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from paceline.core.errors import ConfigError
from paceline.core.prompts import Messages, messages_of, parse_rows


@dataclass(frozen=True, slots=True)
class Item:
    """One request of a workload.

    Args:
        id: unique in its workload.
        kind: the kind of work, such as "code"; results are given for each.
        messages: the conversation, ending with a user message.
        max_new_tokens: what the request itself asked for; `None` leaves it to the plan.
        arrival_s: seconds after the workload's first request; `None` where nobody noted it.
        num_logged_tokens: tokens of the answer that a log holds; `None` where it does not say.
    """

    id: str
    kind: str
    messages: Messages
    max_new_tokens: int | None = None
    arrival_s: float | None = None
    num_logged_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests that stand for some traffic.

    Args:
        name: in reports.
        items: at least one.
        notes: what a reader must know of it: lines that were left out and why, what was masked.

    Raises:
        ConfigError: no items, two with one id, one without a kind, or one whose conversation ends with no user message.
    """

    name: str
    items: tuple[Item, ...]
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.items:
            raise ConfigError(
                f"workload {self.name!r}: expected at least one item, got none; name a file that has some"
            )
        repeated = [id for id, num in Counter(item.id for item in self.items).items() if num > 1]
        if repeated:
            raise ConfigError(
                f"workload {self.name!r}: expected ids that differ, got {repeated[0]!r} more than once"
                f" ({len(repeated)} such ids); rename one"
            )
        for item in self.items:
            _check(item)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of work in the order in which they first appear."""
        return tuple(self.counts)

    @property
    def counts(self) -> dict[str, int]:
        """Number of items of each kind, in the order of `kinds`."""
        return dict(Counter(item.kind for item in self.items))

    @property
    def digest(self) -> str:
        """sha256 of the items in their order; name and notes are no part of it."""
        canonical = json.dumps([asdict(item) for item in self.items], sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    def only(self, kinds: Collection[str]) -> Workload:
        """Returns the items of these kinds, with a note of it. Pure.

        Raises:
            ConfigError: a kind that the workload has not, or none at all.
        """
        known = self.kinds
        for kind in kinds:
            if kind not in known:
                near = difflib.get_close_matches(kind, known, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ConfigError(f"kinds: expected some of {', '.join(known)}; got {kind!r}{hint}")
        items = tuple(item for item in self.items if item.kind in kinds)
        note = f"only {', '.join(kind for kind in known if kind in kinds)} of {len(known)} kinds"
        return replace(self, items=items, notes=(*self.notes, note))


def builtin() -> Workload:
    """Returns the set that ships with the package: eight kinds of work, about a dozen prompts each."""
    text = (resources.files("paceline") / "data" / "workload.jsonl").read_text(encoding="utf-8")
    return Workload("built-in", tuple(Item(**row) for row in parse_rows(text, "built-in", "workload.jsonl")))


def from_prompt_files(
    paths: Sequence[Path],
    *,
    kind_from: Literal["file", "category"] | None = None,
    renamed: Mapping[str, str] | None = None,
    limit_per_kind: int | None = None,
    name: str | None = None,
) -> Workload:
    """Returns the prompts of JSON-lines files; see `core.prompts` for what a row may be.

    Args:
        paths: files, each of which may be packed (.gz).
        kind_from: what names a row's kind: the file's stem, or the row's `category` (the stem where it has none).
            `None` takes the category of a single file and the stem of several: one data set divides its rows by
            topic, and several are told apart from each other.
        renamed: kind → the kind to use instead; two kinds under one new name become one.
        limit_per_kind: most items of a kind, spread evenly over its rows, since files are often sorted by topic.
        name: in reports; `None` makes one of the files' stems.

    Raises:
        ConfigError: not UTF-8, no rows, a row that is no conversation (token ids among them: servers take messages),
            or a kind in `renamed` that does not occur.
        OSError: a file that cannot be read.
    """
    if limit_per_kind is not None and limit_per_kind < 1:
        raise ConfigError(f"limit_per_kind: expected at least 1, got {limit_per_kind}")
    by_category = (kind_from or ("category" if len(paths) == 1 else "file")) == "category"
    rows = [(stem_of(path), row) for path in paths for row in _rows(path)]
    ids_clash = len({str(row["id"]) for _, row in rows}) < len(rows) and len(paths) > 1
    items = []
    for stem, row in rows:
        kind = str(row.get("category") or stem) if by_category else stem
        row_id = f"{stem}/{row['id']}" if ids_clash else str(row["id"])
        items.append(Item(row_id, kind, _messages(row)))
    kept = _spread(_rename(items, renamed or {}), limit_per_kind)
    notes = (
        [] if len(kept) == len(rows) else [f"{len(kept)} of {len(rows)} rows, spread evenly over each kind"]
    )
    num_further = sum(len(row.get("turns", ())) > 1 for _, row in rows)
    if num_further:
        notes.append(f"{num_further} of {len(rows)} rows have further turns; only the first is asked")
    return Workload(name or " + ".join(stem_of(path) for path in paths), tuple(kept), tuple(notes))


def read_lines(path: Path) -> Iterator[str]:
    """Yields the lines of a UTF-8 file, packed if its name ends in .gz.

    Raises:
        ConfigError: another encoding, or a packed file that is damaged.
        OSError: a file that cannot be read.
    """
    opened = gzip.open if path.suffix == ".gz" else Path.open
    try:
        # A line ends at "\n" alone: JSON strings may hold other line separators. utf-8-sig skips a byte order mark.
        with opened(path, mode="rt", encoding="utf-8-sig", newline="\n") as file:
            yield from file
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: expected UTF-8 text, got the byte {error.object[error.start]:#04x}; convert the file to UTF-8"
        ) from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ConfigError(
            f"{path}: expected a gzip file, got a damaged one ({error}); pack it again"
        ) from error


def stem_of(path: Path) -> str:
    """Returns the file's name without .gz and the ending before it. Pure."""
    return Path(path.name.removesuffix(".gz")).stem


def _check(item: Item) -> None:
    where = f"item {item.id!r}"
    if not item.kind:
        raise ConfigError(f"{where}: expected a kind of work, got an empty one; name it, such as 'chat'")
    if not item.messages:
        raise ConfigError(
            f"{where}: expected at least one message, got none; give it one or leave the item out"
        )
    last = item.messages[-1]
    if last["role"] != "user" or not last["content"].strip():
        raise ConfigError(
            f"{where}: expected a conversation that ends with what a user says, got "
            f"{'nothing' if last['role'] == 'user' else 'a message'} from {last['role']}; cut it after a user message"
        )


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    yield from parse_rows("".join(read_lines(path)), stem_of(path), str(path))


def _messages(row: dict[str, Any]) -> Messages:
    if "prompt_ids" in row:
        raise ConfigError(
            f"row {row['id']}: expected text, got prompt_ids; servers take messages, so give the text of the prompt"
        )
    return messages_of(row)


def _rename(items: Sequence[Item], renamed: Mapping[str, str]) -> list[Item]:
    unknown = renamed.keys() - {item.kind for item in items}
    if unknown:
        known = ", ".join(dict.fromkeys(item.kind for item in items))
        raise ConfigError(f"renamed: expected kinds that occur ({known}), got {', '.join(sorted(unknown))}")
    return [replace(item, kind=renamed.get(item.kind, item.kind)) for item in items]


def _spread(items: Sequence[Item], limit: int | None) -> list[Item]:
    """Returns at most `limit` items of each kind, at even distances, in the order of the files. Pure."""
    if limit is None:
        return list(items)
    by_kind: dict[str, list[int]] = {}
    for position, item in enumerate(items):
        by_kind.setdefault(item.kind, []).append(position)
    chosen = {
        positions[index * len(positions) // num_taken]
        for positions in by_kind.values()
        if (num_taken := min(limit, len(positions)))
        for index in range(num_taken)
    }
    return [items[position] for position in sorted(chosen)]
