"""`PrefixCache`: what was read once need not be read again.

A prompt often begins like another: a system prompt, a conversation that goes on, several texts of one request. What
the target and the drafter know of that beginning is copied, from a sequence that runs or from one that ended and was
parked, and only the rest is run.

A copy has the bits of its source, and the source's rows have the bits of a pass over any others where the target keeps
them (the native runner in float32 and float64 on a CPU), so there no text changes. Elsewhere rows differ by their
rounding, and reuse may flip near-ties, as batches already do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from paceline.core.errors import CapacityError, ConfigError
from paceline.drafter.base import Context, Drafter, Forkable
from paceline.target.base import Target, TargetSession

MIN_PREFIX = 32
"""Fewest tokens that are worth a copy; a pass over a few more rows costs hardly more."""

OUT_OF_MEMORY = (CapacityError, MemoryError, RuntimeError)
"""What is raised where memory cannot be had; the last is torch's, which on a CPU has no better name for it."""


class Held(Protocol):
    """A text of which somebody has the K/V: a running sequence, or a parked one's `Memory`."""

    @property
    def tokens(self) -> Sequence[int]:
        """The text; the session and the context hold its first tokens."""

    @property
    def session(self) -> TargetSession:
        """What the target knows of it."""

    @property
    def context(self) -> Context | None:
        """What the drafter knows of it, as much; `None` where nothing is drafted for it."""


@dataclass(frozen=True, slots=True, eq=False)
class Memory:
    """See `Held`."""

    tokens: Sequence[int]
    session: TargetSession
    context: Context | None


class PrefixCache:
    """Opens memory for new texts, and keeps that of ended ones for those that begin alike.

    Args:
        max_tokens: tokens that parked memory may have room for, 0 to park nothing. Each text counts as much as the
            longest so far, since a target may give all of them slots of one length.

    Raises:
        ConfigError: less than none.
    """

    def __init__(self, max_tokens: int = 0) -> None:
        if max_tokens < 0:
            raise ConfigError(f"prefix_tokens: expected at least 0, got {max_tokens}")
        self.max_tokens = max_tokens
        self.parked: list[Memory] = []  # least recently used first
        self._slot_tokens = 1

    @property
    def num_tokens(self) -> int:
        """Tokens that parked memory has room for."""
        return len(self.parked) * self._slot_tokens

    def open(
        self,
        prompt: Sequence[int],
        capacity: int,
        running: Sequence[Held],
        target: Target,
        drafter: Drafter | None,
    ) -> Memory:
        """Returns memory for `capacity` tokens that holds as much of the prompt as anybody has, if that is worth it.

        Parked memory is given back where there is no room otherwise.

        Args:
            drafter: who drafts for it; `None` for nobody.

        Raises:
            CapacityError: there is no room even so.
        """
        self._slot_tokens = max(self._slot_tokens, capacity)
        self._trim()
        while True:
            try:
                forked = self._fork(prompt, capacity, running, target, drafter)
                if forked is not None:
                    return forked
                context = None if drafter is None else drafter.open(capacity)
                return Memory(prompt, target.open(capacity), context)
            except OUT_OF_MEMORY as error:
                if not self._give_back():
                    reason = str(error).partition("\n")[0]
                    raise CapacityError(
                        f"no memory for a text of {capacity} tokens ({reason}); hint: fewer texts at once"
                    ) from error

    def is_being_read(self, prompt: Sequence[int], running: Sequence[Held], drafter: Drafter | None) -> bool:
        """Whether a running sequence is about to read a beginning of this prompt that nobody holds yet."""
        if not _can_fork(drafter):
            return False
        others = [held for held in (*self.parked, *running) if _serves(held, drafter)]
        soon = max((_num_common(prompt, held.tokens) for held in others), default=0)
        now = max((_num_held(prompt, held) for held in others), default=0)
        return soon - now >= MIN_PREFIX

    def park(self, ended: Memory) -> None:
        """Takes over the memory of a text that ended, or closes it where it is of no use. Mutates: self."""
        memory = replace(ended, tokens=ended.tokens[: ended.session.length])
        covering = next((other for other in self.parked if _covers(other, memory)), None)
        if covering is not None:
            self._touch(covering)
        if covering is not None or len(memory.tokens) < MIN_PREFIX or self._slot_tokens > self.max_tokens:
            memory.session.close()
            return
        for covered in [other for other in self.parked if _covers(memory, other)]:
            self._drop(covered)
        self.parked.append(memory)
        self._trim()

    def close(self) -> None:
        """Gives all parked memory back."""
        while self._give_back():
            pass

    def _fork(
        self,
        prompt: Sequence[int],
        capacity: int,
        running: Sequence[Held],
        target: Target,
        drafter: Drafter | None,
    ) -> Memory | None:
        """Returns memory that begins with a copy of the longest beginning, `None` where there is none to be had."""
        others = [held for held in (*self.parked, *running) if _serves(held, drafter)]
        source = max(others, key=lambda held: _num_held(prompt, held), default=None)
        if source is None or (length := _num_held(prompt, source)) < MIN_PREFIX:
            return None
        context = drafter.fork(source.context, length, capacity) if isinstance(drafter, Forkable) else None
        if drafter is not None and context is None:
            return None
        session = target.fork(source.session, length, capacity)  # last, since it must be closed
        if session is None:
            return None
        if isinstance(source, Memory):
            self._touch(source)
        return Memory(prompt, session, context)

    def _touch(self, memory: Memory) -> None:
        self.parked.remove(memory)
        self.parked.append(memory)

    def _trim(self) -> None:
        while self.num_tokens > self.max_tokens:
            self._give_back()

    def _give_back(self) -> bool:
        """Closes what was not used for longest; returns whether there was any."""
        if self.parked:
            self._drop(self.parked[0])
            return True
        return False

    def _drop(self, memory: Memory) -> None:
        self.parked.remove(memory)
        memory.session.close()


def _can_fork(drafter: Drafter | None) -> bool:
    return drafter is None or isinstance(drafter, Forkable)


def _serves(held: Held, drafter: Drafter | None) -> bool:
    """Whether it has what this drafter needs; who drafts nothing takes anybody's."""
    return drafter is None or held.context is not None


def _num_common(prompt: Sequence[int], tokens: Sequence[int]) -> int:
    """Returns how many first tokens are the same; the prompt's last one is always run, to say what follows. Pure."""
    pairs = enumerate(zip(prompt, tokens, strict=False))
    return next((i for i, (ours, theirs) in pairs if ours != theirs), min(len(prompt) - 1, len(tokens)))


def _num_held(prompt: Sequence[int], held: Held) -> int:
    """Returns how many first tokens of the prompt are held."""
    return min(_num_common(prompt, held.tokens), held.session.length)


def _covers(memory: Memory, other: Memory) -> bool:
    """Whether the other is of no more use beside this one."""
    begins_alike = list(memory.tokens[: len(other.tokens)]) == list(other.tokens)
    return begins_alike and (memory.context is not None or other.context is None)
