"""A text's language while blocks are verified: every row is masked as if the drafts before it had been emitted.

A draft that the language forbids is never verified, and neither is what hangs on it. So a step under a grammar says at
each row exactly what plain decoding would have said there, and only the committed tokens move the text on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch

from paceline.core.errors import RequestError
from paceline.core.types import Proposal


class Automaton(Protocol):
    """Where one text stands in its language."""

    @property
    def has_ended(self) -> bool:
        """Whether an end of text was consumed; only ends of text may follow."""

    def mask(self) -> torch.Tensor:
        """Returns which tokens may come next, (V,) bool on the CPU; at the end of the language ends of text only.

        Raises:
            RequestError: no token may come next, or a limit of the language's implementation is reached.
        """

    def advance(self, tokens: Sequence[int]) -> None:
        """Consumes legal tokens, all or none.

        Raises:
            RequestError: one of them is illegal.
        """

    def retreat(self, num_tokens: int) -> None:
        """Takes the last tokens back; also out of a state in which `mask` raised."""


class Delayed:
    """An automaton that lets everything pass until certain tokens have been generated, then is another one.

    The switch may fall anywhere, in the middle of a block too, and is taken back with the tokens that made it.

    Args:
        inner: the language that begins then, at its start.
        after: the token sequence behind which it begins, such as the end of a reasoning part.
    """

    def __init__(self, inner: Automaton, after: Sequence[int]) -> None:
        self._inner, self._after = inner, tuple(after)
        self._everything = torch.ones_like(inner.mask())
        self._passed: list[int] = []  # grows until it ends with `after`
        self._num_inner = 0

    @property
    def has_begun(self) -> bool:
        """Whether the inner language is in force."""
        return tuple(self._passed[len(self._passed) - len(self._after) :]) == self._after

    @property
    def has_ended(self) -> bool:
        """See `Automaton`; an end of text before the switch is for the engine to see."""
        return self._inner.has_ended

    def mask(self) -> torch.Tensor:
        """See `Automaton`."""
        return self._inner.mask() if self.has_begun else self._everything

    def advance(self, tokens: Sequence[int]) -> None:
        """See `Automaton`."""
        num_passed = len(self._passed)
        waiting = list(reversed(tokens))
        while waiting and not self.has_begun:
            self._passed.append(waiting.pop())
        try:
            self._inner.advance(waiting[::-1])
        except RequestError:
            del self._passed[num_passed:]
            raise
        self._num_inner += len(waiting)

    def retreat(self, num_tokens: int) -> None:
        """See `Automaton`."""
        num_inner = min(num_tokens, self._num_inner)
        self._inner.retreat(num_inner)
        self._num_inner -= num_inner
        del self._passed[len(self._passed) - (num_tokens - num_inner) :]


def walk(automaton: Automaton, proposal: Proposal) -> tuple[Proposal, torch.Tensor]:
    """Returns the legal part of a proposal and which tokens may follow each of its rows, (R, V) bool, row 0 the anchor.

    A node that may not follow its parent is left out with all that hangs on it, and so is what hangs on an end of
    text; the others keep their order. One mask is computed per row that is kept. A draft behind which the automaton
    cannot say what may follow is left out too: only the text itself, at row 0, can meet that error.

    Raises:
        RequestError: the automaton cannot say what may follow the text.

    Leaves the automaton where it was.
    """
    children: list[list[int]] = [[] for _ in range(len(proposal.tokens) + 1)]
    for node, parent in enumerate(proposal.parents):
        children[parent].append(node + 1)
    depths, depth = proposal.depths, 0
    masks: dict[int, torch.Tensor] = {}
    pending = [0]
    try:
        while pending:
            row = pending.pop()
            if row > 0:
                automaton.retreat(depth - (depths[row] - 1))
                depth = depths[row] - 1
            try:
                if row > 0:
                    automaton.advance([proposal.tokens[row - 1]])
                    depth += 1
                masks[row] = automaton.mask()
            except RequestError:
                if row == 0:
                    raise
                continue
            if not automaton.has_ended:
                pending += [child for child in children[row] if masks[row][proposal.tokens[child - 1]]]
    finally:
        automaton.retreat(depth)
    rows = sorted(masks)
    return _part(proposal, rows), torch.stack([masks[row] for row in rows])


def _part(proposal: Proposal, rows: list[int]) -> Proposal:
    """Returns the tree of these rows, ascending; each has its parent among them."""
    if len(rows) == len(proposal.tokens) + 1:
        return proposal
    place = {row: i for i, row in enumerate(rows)}
    nodes = [row - 1 for row in rows[1:]]
    return replace(
        proposal,
        tokens=tuple(proposal.tokens[node] for node in nodes),
        parents=tuple(place[proposal.parents[node]] for node in nodes),
        chances=tuple(proposal.chances[node] for node in nodes) if proposal.chances else (),
    )
