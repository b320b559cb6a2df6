"""Committed tokens → deltas: end of text, length, incremental text."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Protocol

from paceline.core.types import SamplingParams


class TextDecoder(Protocol):
    """Turns one sequence's tokens into text as they arrive."""

    def push(self, ids: Many[int]) -> str:
        """Returns the text that is certain after these tokens; never half a character."""

    def flush(self) -> str:
        """Returns what was held back."""


def cut(
    tokens: Many[int], params: SamplingParams, num_delivered: int, eos_token_ids: Many[int]
) -> tuple[list[int], str | None]:
    """Returns which of the newly committed tokens are delivered, and why the text ends, if it does.

    Order: end-of-sequence and stop ids, then length. The ending token itself is delivered.

    Args:
        tokens: newly committed tokens, in order.
        params: the request's parameters.
        num_delivered: tokens delivered before.
        eos_token_ids: the target's own ends of text.

    Pure.
    """
    ends = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos_token_ids))
    delivered: list[int] = []
    for token in tokens:
        delivered.append(token)
        if token in ends:
            return delivered, "stop"
        if num_delivered + len(delivered) >= params.max_new_tokens:
            return delivered, "length"
    return delivered, None
