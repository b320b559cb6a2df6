"""Frozen values that travel between the rooms.

One request is data all the way: `Request` → `Proposal` → `Verdict` → `StepRecord` → `TokenDelta` → `Completion`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from paceline.core.errors import ConfigError

MAX_SEED = 2**63 - 1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """What one request asks of the text; invalid values raise `ConfigError` naming value and range.

    Args:
        max_new_tokens: upper limit of generated tokens, at least 1.
        temperature: 0 is greedy (the one-hot case of the same law); otherwise up to 100.
        seed: key of the request's randomness; the same seed gives the same text with any drafter or batch.
            `None` draws a fresh key.
        stop_token_ids: token ids that end the text, beside the target's own end-of-sequence ids.
        ignore_eos: go on past the target's end-of-sequence ids.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        _require_int("max_new_tokens", self.max_new_tokens, 1, 1_000_000)
        if isinstance(self.temperature, bool) or not isinstance(self.temperature, (int, float)):
            raise ConfigError(f"temperature: expected a number in [0, 100], got {self.temperature!r}")
        if not (math.isfinite(self.temperature) and 0.0 <= self.temperature <= 100.0):
            raise ConfigError(f"temperature: expected a number in [0, 100], got {self.temperature!r}")
        if self.seed is not None:
            _require_int("seed", self.seed, 0, MAX_SEED)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        for token in self.stop_token_ids:
            _require_int("stop_token_ids", token, 0, 2**31 - 1)
        if not isinstance(self.ignore_eos, bool):
            raise ConfigError(f"ignore_eos: expected true or false, got {self.ignore_eos!r}")


def _require_int(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"{name}: expected an integer in [{low}, {high}], got {value!r}")


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt and what to do with it.

    Args:
        id: the caller's name for it, unique among the requests an engine holds.
        prompt_ids: token ids, at least one.
        params: see `SamplingParams`.
        block_size: slots per draft block for this request, anchor included; 1 means plain decoding;
            `None` takes the engine's.
    """

    id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    block_size: int | None = None


@dataclass(frozen=True, slots=True)
class Proposal:
    """Drafted tokens as a tree: node i is `tokens[i]`, its parent `parents[i]`, with 0 the anchor and i + 1 node i.

    A chain is the tree whose parents are 0, 1, 2, …; no tokens at all is plain decoding. Drafts are deterministic
    guesses (point masses): a guess stands when it equals the token that the target says there.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()

    @classmethod
    def chain(cls, tokens: list[int] | tuple[int, ...]) -> Proposal:
        """Returns the chain of `tokens`, each the child of the one before it."""
        return cls(tuple(tokens), tuple(range(len(tokens))))

    @property
    def depths(self) -> tuple[int, ...]:
        """Depth of every row: 0 for the anchor, then of each node. A row predicts the position after its depth."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    @property
    def is_chain(self) -> bool:
        """Whether each node is the child of the one before it."""
        return self.parents == tuple(range(len(self.tokens)))


EMPTY_PROPOSAL = Proposal()


@dataclass(frozen=True, slots=True)
class Verdict:
    """Which drafts stand.

    Args:
        path: rows of the verified pass that are kept: 0 (the anchor), then the accepted nodes' rows, root first.
        tokens: the committed tokens: the accepted drafts, then the target's own next token (the bonus token).
    """

    path: tuple[int, ...]
    tokens: tuple[int, ...]

    @property
    def num_accepted(self) -> int:
        """Accepted drafts, 0…K."""
        return len(self.tokens) - 1

    @property
    def bonus_token(self) -> int:
        """The target's own token that closes the step and becomes the next anchor."""
        return self.tokens[-1]


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What one verify step did; every number in every report derives from these.

    Args:
        position: absolute position of the first token the step committed.
        num_drafted: drafted tokens that were verified.
        num_accepted: drafts that stood, before any cut by end of text or length.
        num_emitted: tokens delivered, after that cut.
        draft_s: wall-clock seconds of drafting, shared by the batch of that step.
        verify_s: wall-clock seconds of the target's pass and the verdict, shared by the batch of that step.
        num_sequences: how many sequences shared the step.
    """

    position: int
    num_drafted: int
    num_accepted: int
    num_emitted: int
    draft_s: float = 0.0
    verify_s: float = 0.0
    num_sequences: int = 1


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """One streamed piece of a completion.

    Args:
        request_id: whose piece it is.
        token_ids: tokens delivered by this step (may be empty in the last delta).
        text: their text; never half a character.
        num_drafted_tokens: how many of `token_ids`, from the front, were accepted drafts.
        step: the step's record, `None` for the token that closes prefill.
        finish_reason: `None` while it goes on, then "stop", "length" or "cancelled".
    """

    request_id: str
    token_ids: tuple[int, ...]
    text: str = ""
    num_drafted_tokens: int = 0
    step: StepRecord | None = None
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished text with its statistics.

    Args:
        request_id: whose it is.
        prompt_ids, token_ids: what went in, what came out.
        text: decoded `token_ids`, special tokens left out.
        finish_reason: "stop", "length" or "cancelled".
        steps: one record per verify step, in order.
        prefill_s, decode_s: seconds to the first token, and after it.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    steps: tuple[StepRecord, ...] = ()
    prefill_s: float = 0.0
    decode_s: float = 0.0

    @property
    def acceptance_length(self) -> float | None:
        """τ of this text, or `None` where no step was verified."""
        from paceline.core.acceptance import acceptance_length

        return acceptance_length(self.steps)

    @property
    def tokens_per_s(self) -> float | None:
        """Decoded tokens per second after the first token, or `None` where there is none."""
        num_tokens = len(self.token_ids) - 1
        return num_tokens / self.decode_s if num_tokens > 0 and self.decode_s > 0 else None

    def to_dict(self) -> dict[str, Any]:
        """Returns the JSON shape of `--json` outputs."""
        return {
            "id": self.request_id,
            "text": self.text,
            "token_ids": list(self.token_ids),
            "num_prompt_tokens": len(self.prompt_ids),
            "num_new_tokens": len(self.token_ids),
            "finish_reason": self.finish_reason,
            "acceptance_length": self.acceptance_length,
            "num_steps": len(self.steps),
            "prefill_s": self.prefill_s,
            "decode_s": self.decode_s,
            "tokens_per_s": self.tokens_per_s,
        }
