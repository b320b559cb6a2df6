"""The step: draft → verify → commit. Plain decoding is the same step with empty proposals, and so is reading a prompt.

A step is one pass of the target over a part of each sequence: of a running one its anchor and the drafts behind it, of
one whose prompt is being read the next piece, behind which nothing is drafted and only the last piece says a token.

Where a block ends is decided in one order: the target verifies the block, whose draft the grammar has trimmed and whose
rows it has masked; of the accepted path K/V and hidden rows are kept and the grammar advances; then `output.py` cuts at
ends of text and stop ids, at stop strings, at the length, and what is left is delivered and counted.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence as Many
from dataclasses import dataclass

import torch

from paceline.core.errors import RequestError
from paceline.core.types import EMPTY_PROPOSAL, Proposal, StepRecord, TokenLogprobs, Verdict
from paceline.core.verification import judge
from paceline.drafter.base import Drafter
from paceline.engine.budget import Budget
from paceline.engine.grammar import walk
from paceline.engine.proposals import fitted
from paceline.engine.sequence import Sequence
from paceline.target.base import Target, TargetOutput, VerifyRows

PREFILL_ROWS = 512
"""Most prompt tokens of a step that runs nothing else; bounds activations, not the result."""
PREFILL_ROWS_BESIDE = 64
"""Most prompt tokens of a step beside running texts, which wait for them. So many rows cost about as much as a few
blocks of drafts, and win most of what reading the weights once for many rows can."""

SILENCE = Verdict(path=(0,), tokens=())
"""Of a piece of a prompt that goes on: all of it is kept, and nothing is said."""


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """One sequence's part of a step.

    Args:
        sequence: whose it is.
        tokens: the anchor alone, or a piece of the prompt.
        is_prompt: the latter.
        speaks: whether what follows them is the text; not behind a piece of a prompt that goes on.
        proposal: what was drafted, without what the grammar forbids.
        legal: which tokens the grammar allows at each row, (R, V); `None` without a grammar.
    """

    sequence: Sequence
    tokens: list[int]
    is_prompt: bool
    speaks: bool
    proposal: Proposal
    legal: torch.Tensor | None

    @classmethod
    def of(cls, sequence: Sequence, num_tokens: int, proposal: Proposal) -> Block:
        """Returns the block of the next tokens and a draft, walked by the sequence's grammar if it has one."""
        pending = sequence.pending
        speaks, legal = num_tokens == len(pending), None
        if sequence.automaton is not None and speaks:
            proposal, legal = walk(sequence.automaton, proposal)
        return cls(sequence, pending[:num_tokens], sequence.is_prefilling, speaks, proposal, legal)

    @property
    def rows(self) -> VerifyRows:
        """What the target runs."""
        return VerifyRows(self.sequence.session, self.tokens, self.proposal, last_row_only=self.is_prompt)

    def kept(self, verdict: Verdict) -> list[int]:
        """Returns the rows that stay: those of the tokens, and the accepted drafts'."""
        root = len(self.tokens) - 1
        return [*range(root), *(root + row for row in verdict.path)]


def step(
    sequences: Many[Sequence],
    target: Target,
    drafter: Drafter | None,
    *,
    budget: Budget | None = None,
    keyed_drafts: bool = True,
) -> list[tuple[Sequence, Verdict]]:
    """Advances every running sequence by one verified block, and reads on in the prompts of the others.

    Returns the verdicts of those that said something: running ones first, then those whose prompts have ended. A
    sequence whose grammar cannot go on is ended with finish reason "error" and has no verdict.

    Args:
        budget: which of the drafted nodes are worth verifying; `None` verifies all.
        keyed_drafts: let the drafter see the sequences' own noise, so that it guesses the drawn token rather than the
            likeliest one.

    Mutates: the sequences' tokens, steps, sessions and contexts. Afterwards the invariant holds for each.
    """
    laps = Laps()
    running = [s for s in sequences if not s.is_prefilling]
    proposals = _draft(running, target.spec.vocab_size, drafter, keyed_drafts)
    if budget is not None:
        proposals = budget.cut(proposals)
    drafts = _blocks([(s, 1, p) for s, p in zip(running, proposals, strict=True)])
    blocks = drafts + _blocks(
        _pieces(sequences, PREFILL_ROWS_BESIDE if drafts else PREFILL_ROWS, target.max_part_rows)
    )
    if not blocks:
        return []
    draft_s = laps.lap()
    outputs = target.verify([block.rows for block in blocks])
    verify_s = laps.lap()
    verdicts = _judged(blocks, outputs)
    sample_s = laps.lap()
    _show(blocks, outputs, verdicts, drafter)
    inject_s = laps.lap()
    for block, output, verdict in zip(blocks, outputs, verdicts, strict=True):
        _advance(block, output, verdict)
        block.sequence.session.keep(block.kept(verdict))
    keep_s = laps.lap()
    if budget is not None:
        budget.learn([b.proposal for b in drafts], verdicts[: len(drafts)])
    for block, verdict in zip(drafts, verdicts, strict=False):
        block.sequence.steps.append(
            StepRecord(
                position=len(block.sequence.tokens) - len(verdict.tokens),
                num_drafted=len(block.proposal.tokens),
                num_accepted=verdict.num_accepted,
                num_emitted=len(verdict.tokens),
                draft_s=draft_s,
                verify_s=verify_s,
                num_sequences=len(drafts),
                sample_s=sample_s,
                inject_s=inject_s,
                keep_s=keep_s,
            )
        )
    return [(b.sequence, verdict) for b, verdict in zip(blocks, verdicts, strict=True) if b.speaks]


class Laps:
    """A stop watch: each lap begins where the one before it ended."""

    def __init__(self) -> None:
        self._last = time.perf_counter()

    def lap(self) -> float:
        """Returns the seconds since the last lap. Mutates: self."""
        last, self._last = self._last, time.perf_counter()
        return self._last - last


def _draft(
    sequences: Many[Sequence], vocab_size: int, drafter: Drafter | None, keyed_drafts: bool
) -> list[Proposal]:
    """Returns a proposal for each sequence, with as many drafts as its session has room for."""
    wanted = [_num_draft_tokens(s) if drafter else 0 for s in sequences]
    speculating = [s for s, k in zip(sequences, wanted, strict=True) if k]
    if drafter is None or not speculating:
        return [EMPTY_PROPOSAL] * len(sequences)
    contexts = [s.context for s in speculating if s.context is not None]
    laws = [s.law for s in speculating] if keyed_drafts else None
    drafts = iter(drafter.draft([s.anchor for s in speculating], contexts, max(wanted), laws))
    return [fitted(next(drafts), k, vocab_size) if k else EMPTY_PROPOSAL for k in wanted]


def _pieces(
    sequences: Many[Sequence], num_rows: int, longest: int | None
) -> list[tuple[Sequence, int, Proposal]]:
    """Returns how much of whose prompt is read now: `num_rows` tokens together, first come first served.

    Args:
        longest: most tokens of one prompt, so that its bits do not depend on who runs beside it.
    """
    pieces = []
    for sequence in sequences:
        most = num_rows if longest is None else min(num_rows, longest)
        num_tokens = min(most, len(sequence.pending)) if sequence.is_prefilling else 0
        if num_tokens:
            pieces.append((sequence, num_tokens, EMPTY_PROPOSAL))
        num_rows -= num_tokens
    return pieces


def _blocks(parts: Many[tuple[Sequence, int, Proposal]]) -> list[Block]:
    """Returns the block of each part (see `Block.of`) whose sequence can go on."""
    blocks = []
    for sequence, num_tokens, proposal in parts:
        try:
            blocks.append(Block.of(sequence, num_tokens, proposal))
        except RequestError as error:  # a dead end of the grammar, or a limit of its library: this text alone
            sequence.end("error", str(error))
    return blocks


def _num_draft_tokens(sequence: Sequence) -> int:
    return max(0, min(sequence.block_size - 1, sequence.session.capacity - sequence.session.length - 1))


def _judged(blocks: Many[Block], outputs: Many[TargetOutput]) -> list[Verdict]:
    """Returns what stands of each block."""
    speaking = [(b, o) for b, o in zip(blocks, outputs, strict=True) if b.speaks]
    said = iter(_said(*zip(*speaking, strict=True))) if speaking else iter(())
    return [judge(b.proposal, next(said)) if b.speaks else SILENCE for b in blocks]


def _said(blocks: Many[Block], outputs: Many[TargetOutput]) -> list[list[int]]:
    """Returns the token the target says at each row, by each request's law. The step's one host sync."""
    chosen = [
        b.sequence.law.choose(o.logits, b.sequence.tokens, b.proposal, b.legal)
        for b, o in zip(blocks, outputs, strict=True)
    ]
    counts = [len(c) for c in chosen]
    flat = iter(torch.cat(chosen).tolist())
    return [[next(flat) for _ in range(count)] for count in counts]


def _show(
    blocks: Many[Block], outputs: Many[TargetOutput], verdicts: Many[Verdict], drafter: Drafter | None
) -> None:
    """Shows the drafter exactly the accepted rows. Mutates: contexts.

    It may fail, so it comes before tokens and K/V: a step that failed can be repeated.
    """
    shown = [
        (b.sequence.context, _rows(o.hidden, b.kept(v)), [*b.tokens, *v.tokens[:-1]])
        for b, o, v in zip(blocks, outputs, verdicts, strict=True)
        if b.sequence.context is not None
    ]
    if drafter is not None and shown:
        contexts, hidden, tokens = zip(*shown, strict=True)
        drafter.inject(contexts, hidden, tokens)


def _rows(hidden: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """Returns these rows, without a copy where they are the first ones."""
    return hidden[: len(rows)] if rows[-1] == len(rows) - 1 else hidden[rows]


def _advance(block: Block, output: TargetOutput, verdict: Verdict) -> None:
    """Adds a verdict's tokens to its sequence. Mutates: the sequence's tokens, log-probabilities and automaton."""
    sequence = block.sequence
    if sequence.request.params.logprobs is not None and verdict.tokens:
        sequence.logprobs += _logprobs(block, output, verdict)
    sequence.tokens.extend(verdict.tokens)
    sequence.law.forget_before(len(sequence.tokens))
    if sequence.automaton is not None:
        sequence.automaton.advance(verdict.tokens)


def _logprobs(block: Block, output: TargetOutput, verdict: Verdict) -> list[TokenLogprobs]:
    """Returns the log-probabilities of a verdict's tokens, read from the rows that said them."""
    params, sequence = block.sequence.request.params, block.sequence
    if params.logprobs_mode == "raw":
        log_probs = output.logits.double().log_softmax(dim=-1)
    else:
        log_probs = sequence.law.log_probs(output.logits, sequence.tokens, block.proposal, block.legal)
    rows = log_probs[list(verdict.path)]
    best, ids = rows.topk(min(params.logprobs or 0, rows.shape[-1]), dim=-1)
    own = rows.gather(1, torch.tensor(verdict.tokens, device=rows.device)[:, None])
    values, tokens = torch.cat([own, best], dim=1).tolist(), ids.tolist()
    return [
        TokenLogprobs(
            token, chosen, tuple((i, x) for i, x in zip(top, likeliest, strict=True) if x > -math.inf)
        )
        for token, (chosen, *likeliest), top in zip(verdict.tokens, values, tokens, strict=True)
    ]
