"""`Sequence`: the single mutable object of a request.

The invariant, n being the number of committed tokens (prompt included), the last of which is the anchor:
between steps `session.length == context.length == n - 1`. While the prompt is still being read there is no anchor yet,
n is the length of the prompt, and `session.length == context.length < n`.
"""

from __future__ import annotations

import time
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
        num_reused_tokens: of the prompt, those that another sequence had read.
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
    num_reused_tokens: int = 0
    automaton: Automaton | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prefill_s: float = 0.0
    decode_s: float = 0.0
    admitted_at: float = field(default_factory=time.perf_counter)

    @property
    def is_prefilling(self) -> bool:
        """Whether its prompt is still being read, so that nothing was said yet."""
        return len(self.tokens) == len(self.request.prompt_ids)

    @property
    def pending(self) -> list[int]:
        """Committed tokens whose K/V exist nowhere yet: what is left of the prompt, then the anchor alone."""
        return self.tokens[self.session.length :]

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
        held, expected = self.session.length, len(self.tokens) - 1
        assert held <= expected if self.is_prefilling else held == expected, (held, expected)
        assert self.context is None or self.context.length == held, (self.context.length, held)

    def end(self, reason: str, stop_reason: int | str | None = None) -> None:
        """Ends the sequence; whoever takes it out of the running ones gives its memory back."""
        self.finish_reason, self.stop_reason = reason, stop_reason

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
            num_reused_tokens=self.num_reused_tokens,
        )


def room(num_prompt_tokens: int, max_new_tokens: int, block_size: int, max_positions: int) -> int:
    """Returns the rows a sequence needs: its tokens and one block hanging over the end, within the target's limit."""
    return min(num_prompt_tokens + max_new_tokens + block_size - 1, max_positions)
