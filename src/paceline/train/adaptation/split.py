"""Traffic → what a drafter is adapted to and what it is judged on, which share nothing.

A side is chosen by a keyed hash of how a conversation begins, so it depends on no other row: adding rows moves none
from one side to the other, and requests that repeat or continue a conversation stay with it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.core.errors import ConfigError
from paceline.core.prompts import messages_of
from paceline.target.text import TextCodec
from paceline.train.data.prompts import Prompt

MIN_TRAINED, MIN_HELD_OUT = 8, 4
Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Traffic:
    """Prompts of one source, no two the same.

    Args:
        prompts: in the order of their keyed hash.
        begins: for each prompt the hash of how its conversation begins.
        num_rows: rows it was made of.
        num_repeated: rows left out because an earlier one is the same.
        num_long: rows left out because they are too long.
    """

    prompts: tuple[Prompt, ...]
    begins: tuple[float, ...]
    num_rows: int
    num_repeated: int = 0
    num_long: int = 0

    @classmethod
    def read(cls, rows: Sequence[Row], codec: TextCodec, *, max_tokens: int, seed: int) -> Traffic:
        """Returns the prompts of rows (see `core.prompts`) of at most `max_tokens` tokens."""
        found: dict[tuple[int, ...], tuple[float, float, Prompt]] = {}
        num_long = 0
        for row in rows:
            ids, begin = _read(row, codec)
            if len(ids) > max_tokens:
                num_long += 1
            elif ids not in found:
                prompt = Prompt(str(row["id"]), str(row.get("category", "")), ids)
                found[ids] = _place(seed, begin), _place(seed, repr(ids)), prompt
        ordered = sorted(found.values(), key=lambda entry: entry[1])
        return cls(
            tuple(prompt for _, _, prompt in ordered),
            tuple(begin for begin, _, _ in ordered),
            len(rows),
            len(rows) - num_long - len(ordered),
            num_long,
        )

    def split(self, share: float) -> tuple[list[Prompt], list[Prompt]]:
        """Returns the prompts to train on, and about a `share` of all to judge by. Pure.

        Raises:
            ConfigError: too few on either side.
        """
        sides: tuple[list[Prompt], list[Prompt]] = ([], [])
        for prompt, begin in zip(self.prompts, self.begins, strict=True):
            sides[begin < share].append(prompt)
        if len(sides[0]) < MIN_TRAINED or len(sides[1]) < MIN_HELD_OUT:
            raise ConfigError(
                f"data: expected {MIN_TRAINED} different prompts or more to learn from and {MIN_HELD_OUT} to judge by, "
                f"got {len(sides[0])} and {len(sides[1])} of {self.num_rows} rows ({self.num_repeated} repeated, "
                f"{self.num_long} too long; what begins alike stays together); hint: more of your traffic"
            )
        return sides

    def halves(self) -> tuple[list[Prompt], list[Prompt]]:
        """Returns every other prompt of each category, and the others; categories take turns in both. Pure."""
        by_category: dict[str, list[Prompt]] = {}
        for prompt in self.prompts:
            by_category.setdefault(prompt.category, []).append(prompt)
        groups = [by_category[name] for name in sorted(by_category)]
        return _in_turns([g[0::2] for g in groups]), _in_turns([g[1::2] for g in groups])

    def without(self, others: Traffic) -> Traffic:
        """Returns the prompts whose conversations begin like none of the others. Pure."""
        known = set(others.begins)
        kept = [(p, b) for p, b in zip(self.prompts, self.begins, strict=True) if b not in known]
        num_shared = len(self.prompts) - len(kept)
        return Traffic(
            tuple(p for p, _ in kept),
            tuple(b for _, b in kept),
            self.num_rows,
            self.num_repeated + num_shared,
            self.num_long,
        )


def mix(prompts: Sequence[Prompt], general: Sequence[Prompt], share: float) -> list[Prompt]:
    """Returns the prompts with general ones that make a `share` of all, repeated where they are few. Pure."""
    if not general:
        return list(prompts)
    count = round(len(prompts) * share / (1 - share))
    rounds, rest = divmod(count, len(general))
    repeated = [(i, p) for i in range(rounds) for p in general] + [(rounds, p) for p in general[:rest]]
    return [*prompts, *(Prompt(f"general/{i}/{p.id}", p.category, p.token_ids) for i, p in repeated)]


def _read(row: Row, codec: TextCodec) -> tuple[tuple[int, ...], str]:
    """Returns a row's token ids, and how its conversation begins: what the user says first."""
    if "prompt_ids" in row:
        ids = tuple(row["prompt_ids"])
        return ids, codec.decode(ids)
    messages = messages_of(dict(row))
    first = next(message["content"] for message in messages if message["role"] == "user")
    return tuple(codec.render_chat(messages)), first


def _place(seed: int, text: str) -> float:
    """Returns a number in 0…1 that hangs on the text's letters and digits and the seed alone. Pure."""
    plain = " ".join("".join(c if c.isalnum() else " " for c in text.casefold()).split())
    return int.from_bytes(hashlib.sha256(f"{seed}/{plain or text}".encode()).digest()[:8]) / 2**64


def _in_turns(groups: Sequence[Sequence[Prompt]]) -> list[Prompt]:
    def turns() -> Iterator[Prompt]:
        for i in range(max(map(len, groups), default=0)):
            yield from (group[i] for group in groups if i < len(group))

    return list(turns())
