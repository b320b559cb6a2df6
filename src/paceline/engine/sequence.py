"""`Sequence`: the single mutable object of a request.

The invariant, n being the number of committed tokens (prompt included), the last of which is the anchor:
between steps `session.length == context.length == n - 1`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.core.sampling import Law
from paceline.core.types import Completion, Request, StepRecord, TokenLogprobs
from paceline.drafter.base import Context
from paceline.engine.grammar import Automaton
from paceline.engine.output import Output
from paceline.target.base import TargetSession


@dataclass(slots=True, eq=False)
class Sequence:
    """A request on its way.

    Args:
        request: what was asked.
        law: how its tokens are drawn.
        output: what was delivered of it.
        block_size: slots per block, 1 for plain decoding.
        tokens: committed tokens, prompt included; the last is the anchor.
        session, context: the target's and the drafter's memory of it; context is `None` without a drafter.
        automaton: where the text stands in its grammar, if it has one.
        logprobs: one entry for each new token, where the request asks for them.
    """

    request: Request
    law: Law
    output: Output
    block_size: int
    tokens: list[int]
    session: TargetSession
    context: Context | None = None
    automaton: Automaton | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prefill_s: float = 0.0
    decode_s: float = 0.0

    @property
    def anchor(self) -> int:
        """The newest committed token, whose K/V exists nowhere yet."""
        return self.tokens[-1]

    @property
    def new_tokens(self) -> list[int]:
        """Delivered tokens."""
        start = len(self.request.prompt_ids)
        return self.tokens[start : start + self.output.num_tokens]

    def check(self) -> None:
        """Raises AssertionError where the invariant does not hold."""
        expected = len(self.tokens) - 1
        assert self.session.length == expected, (self.session.length, expected)
        assert self.context is None or self.context.length == expected, (self.context.length, expected)

    def close(self, reason: str) -> None:
        """Ends the sequence and gives its memory back; harmless when repeated."""
        if self.finish_reason is None:
            self.finish_reason = reason
        self.session.close()
        self.context = None

    def completion(self) -> Completion:
        """Returns what it came to."""
        return Completion(
            request_id=self.request.id,
            prompt_ids=self.request.prompt_ids,
            token_ids=tuple(self.new_tokens),
            text=self.output.text,
            finish_reason=self.finish_reason or "cancelled",
            stop_reason=self.stop_reason,
            sample_index=self.request.sample_index,
            logprobs=tuple(self.logprobs[: self.output.num_tokens])
            if self.request.params.logprobs is not None
            else None,
            steps=tuple(self.steps),
            prefill_s=self.prefill_s,
            decode_s=self.decode_s,
        )


def room(num_prompt_tokens: int, max_new_tokens: int, block_size: int, max_positions: int) -> int:
    """Returns the rows a sequence needs: its tokens and one block hanging over the end, within the target's limit."""
    return min(num_prompt_tokens + max_new_tokens + block_size - 1, max_positions)
