"""Frozen values that travel between the rooms.

One request is data all the way: `Request` → `Proposal` → `Verdict` → `StepRecord` → `TokenDelta` → `Completion`.
"""

from __future__ import annotations

import secrets
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from paceline.core.params import MAX_SEED, SamplingParams


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt and what to do with it.

    Args:
        id: the caller's name for it, unique among the requests an engine holds.
        prompt_ids: token ids, at least one.
        params: see `SamplingParams`.
        block_size: slots per draft block for this request, anchor included; 1 means plain decoding;
            `None` takes the engine's.
        sample_index: which of several texts of one seed this is; see `samples`.
    """

    id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    block_size: int | None = None
    sample_index: int = 0

    def samples(self) -> list[Request]:
        """Returns the `params.n` requests of one text each that this one stands for, ids numbered behind a "#".

        They share one seed; where the request has none, a fresh one is drawn for all.
        """
        if self.params.n == 1:
            return [self]
        seed = secrets.randbelow(MAX_SEED) if self.params.seed is None else self.params.seed
        params = replace(self.params, n=1, seed=seed)
        return [
            replace(self, id=f"{self.id}#{i}", params=params, sample_index=i) for i in range(self.params.n)
        ]


@dataclass(frozen=True, slots=True)
class Proposal:
    """Drafted tokens as a tree: node i is `tokens[i]`, its parent `parents[i]`, with 0 the anchor and i + 1 node i.

    A chain is the tree whose parents are 0, 1, 2, …; no tokens at all is plain decoding. Drafts are deterministic
    guesses (point masses): a guess stands when it equals the token that the target says there.

    Args:
        tokens, parents: of the nodes; parents precede children.
        chances: probability of each node that its whole path stands, as far as the drafter can tell; empty where it
            does not say.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    chances: tuple[float, ...] = ()

    @classmethod
    def chain(cls, tokens: list[int] | tuple[int, ...]) -> Proposal:
        """Returns the chain of `tokens`, each the child of the one before it."""
        return cls(tuple(tokens), tuple(range(len(tokens))))

    def front(self, num_nodes: int) -> Proposal:
        """Returns the first nodes; parents precede children, so any front part is a tree."""
        return Proposal(self.tokens[:num_nodes], self.parents[:num_nodes], self.chances[:num_nodes])

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
        draft_s, verify_s, sample_s, inject_s, keep_s: wall-clock seconds of drafting, of the target's pass, of choosing
            its tokens and judging the drafts (on CUDA the wait for the pass among them), of showing the drafter what
            was kept, and of keeping its K/V; shared by the batch of that step.
        num_sequences: how many sequences shared the step.
    """

    position: int
    num_drafted: int
    num_accepted: int
    num_emitted: int
    draft_s: float = 0.0
    verify_s: float = 0.0
    num_sequences: int = 1
    sample_s: float = 0.0
    inject_s: float = 0.0
    keep_s: float = 0.0


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position, natural logarithm.

    Args:
        token_id, logprob: the token that was emitted there.
        top: the likeliest tokens and their log-probabilities, descending; as many as the request asked for, fewer
            where fewer have any probability.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """One streamed piece of a completion.

    Args:
        request_id: whose piece it is.
        token_ids: tokens delivered by this step (may be empty in the last delta).
        text: text that became certain: never half a character, never what may turn out to be a stop string.
        num_drafted_tokens: how many of `token_ids`, from the front, were accepted drafts.
        step: the step's record, `None` for the token that closes prefill.
        finish_reason: `None` while it goes on, then as in `Completion`.
        logprobs: one entry for each of `token_ids` where the request asked for them.
    """

    request_id: str
    token_ids: tuple[int, ...]
    text: str = ""
    num_drafted_tokens: int = 0
    step: StepRecord | None = None
    finish_reason: str | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished text with its statistics.

    Args:
        request_id: whose it is.
        prompt_ids, token_ids: what went in, what came out.
        text: decoded `token_ids`, special tokens left out, up to before a stop string.
        finish_reason: "stop", "length", "cancelled", or "error" where its grammar led into a dead end or there was no
            memory for it.
        stop_reason: the stop string or stop token id that ended it, or the error; `None` for the target's own end of
            text.
        sample_index: see `Request`.
        logprobs: one entry for each of `token_ids`; `None` where the request did not ask.
        steps: one record per verify step, in order.
        prefill_s, decode_s: seconds from admission to the first token, and after it.
        num_reused_tokens: of the prompt, those whose K/V were copied from a text that begins alike.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    steps: tuple[StepRecord, ...] = ()
    prefill_s: float = 0.0
    decode_s: float = 0.0
    stop_reason: int | str | None = None
    sample_index: int = 0
    logprobs: tuple[TokenLogprobs, ...] | None = None
    num_reused_tokens: int = 0

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
            "num_reused_tokens": self.num_reused_tokens,
            "num_new_tokens": len(self.token_ids),
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
            "sample_index": self.sample_index,
            "logprobs": None if self.logprobs is None else [asdict(entry) for entry in self.logprobs],
            "acceptance_length": self.acceptance_length,
            "num_steps": len(self.steps),
            "prefill_s": self.prefill_s,
            "decode_s": self.decode_s,
            "tokens_per_s": self.tokens_per_s,
        }
