"""Committed tokens → what is delivered: where a text ends, and the text itself as it becomes certain.

One order decides, token by token: end of text and stop ids, then stop strings, then length. So a stop behind the
last allowed token is no stop, and one on it is. The ending token is delivered; a stop string is not part of the text.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Protocol

from paceline.core.params import SamplingParams


class TextDecoder(Protocol):
    """Turns one sequence's tokens into text as they arrive."""

    def push(self, ids: Many[int]) -> str:
        """Returns the text that is certain after these tokens; never half a character."""

    def flush(self) -> str:
        """Returns what was held back."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """What one step adds to a text.

    Args:
        token_ids: tokens delivered, at least one.
        text: text that became certain.
        finish_reason: "stop" or "length" where the text ends with it.
        stop_reason: the stop string or stop token id that ended it; `None` for the target's own end of text.
    """

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class Output:
    """One text on its way out.

    Args:
        params: the request's parameters.
        ends: token ids that end the text.
        decoder: where text is wanted; stop strings need it.
    """

    def __init__(
        self, params: SamplingParams, ends: frozenset[int], decoder: TextDecoder | None = None
    ) -> None:
        self._params, self._ends, self._decoder = params, ends, decoder
        self._held = ""  # text that may turn out to be the beginning of a stop string
        self.num_tokens = 0
        self.text = ""

    def take(self, tokens: Many[int]) -> Delivery:
        """Returns what of the newly committed tokens is delivered. Mutates: self."""
        pieces: list[str] = []
        for count, token in enumerate(tokens, 1):
            self.num_tokens += 1
            stop = self._decode(token, pieces)
            reason, stop_reason = self._judge(token, stop)
            if reason is not None:
                rest = self._rest()
                if stop is None:  # nothing follows a stop string, whatever else ends the text
                    pieces.append(rest)
                return self._deliver(tokens[:count], pieces, reason, stop_reason)
        return self._deliver(tokens, pieces, None, None)

    def flush(self) -> str:
        """Returns, and adds to the text, what was held back. Mutates: self."""
        rest = self._rest()
        self.text += rest
        return rest

    def _judge(self, token: int, stop: str | None) -> tuple[str | None, int | str | None]:
        """Returns why the text ends with this token, if it does, and what stopped it.

        Args:
            stop: the stop string that the token completes.
        """
        if token in self._ends:
            return "stop", token if token in self._params.stop_token_ids else None
        if stop is not None:
            return "stop", stop
        return ("length" if self.num_tokens >= self._params.max_new_tokens else None), None

    def _decode(self, token: int, pieces: list[str]) -> str | None:
        """Adds the token's certain text to `pieces`; returns the stop string that it completes. Mutates: both."""
        if self._decoder is None:
            return None
        text = self._held + self._decoder.push([token])
        self._held = ""
        if not self._params.stop or self.num_tokens <= self._params.min_new_tokens:
            pieces.append(text)
            return None
        found = [(text.index(stop), stop) for stop in self._params.stop if stop in text]
        if found:
            start, stop = min(found, key=lambda pair: (pair[0], len(pair[1])))
            pieces.append(text[:start])
            return stop
        num_certain = len(text) - _num_waiting(text, self._params.stop)
        pieces.append(text[:num_certain])
        self._held = text[num_certain:]
        return None

    def _rest(self) -> str:
        rest = self._held + (self._decoder.flush() if self._decoder else "")
        self._held = ""
        return rest

    def _deliver(
        self, tokens: Many[int], pieces: list[str], reason: str | None, stop: int | str | None
    ) -> Delivery:
        text = "".join(pieces)
        self.text += text
        return Delivery(tuple(tokens), text, reason, stop)


def _num_waiting(text: str, stops: Many[str]) -> int:
    """Returns the length of the longest end of `text` with which a stop string begins. Pure."""
    longest = min(len(text), max(map(len, stops)) - 1)
    return next((n for n in range(longest, 0, -1) if any(stop.startswith(text[-n:]) for stop in stops)), 0)
