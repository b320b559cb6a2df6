"""Prefill, and the step: draft → verify → commit. Plain decoding is the same step with empty proposals.

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
from paceline.engine.grammar import walk
from paceline.engine.proposals import fitted
from paceline.engine.sequence import Sequence
from paceline.target.base import Target, TargetOutput, VerifyRows

PREFILL_ROWS = 512
"""Longest piece of a prompt that runs at once; bounds activations, not the result."""


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """One sequence's part of a step.

    Args:
        sequence: whose it is.
        proposal: what was drafted, without what the grammar forbids.
        legal: which tokens the grammar allows at each row, (R, V); `None` without a grammar.
    """

    sequence: Sequence
    proposal: Proposal
    legal: torch.Tensor | None

    @classmethod
    def of(cls, sequence: Sequence, proposal: Proposal) -> Block:
        """Returns the block of a draft, walked by the sequence's grammar if it has one."""
        legal = None
        if sequence.automaton is not None:
            proposal, legal = walk(sequence.automaton, proposal)
        return cls(sequence, proposal, legal)


def prefill(sequence: Sequence, target: Target, drafter: Drafter | None) -> None:
    """Runs the prompt and commits the target's first token, which becomes the anchor.

    Mutates: the sequence's session, context and tokens.
    """
    prompt = sequence.tokens
    for start in range(0, len(prompt), PREFILL_ROWS):
        piece = prompt[start : start + PREFILL_ROWS]
        (output,) = target.verify([VerifyRows(sequence.session, piece, EMPTY_PROPOSAL, last_row_only=True)])
        sequence.session.keep(range(len(piece)))
        _inject([sequence], [output.hidden], [piece], drafter)
    block = Block.of(sequence, EMPTY_PROPOSAL)
    (said,) = _said([block], [output])
    _advance(block, output, judge(EMPTY_PROPOSAL, said))


def step(
    sequences: Many[Sequence], target: Target, drafter: Drafter | None, *, keyed_drafts: bool = True
) -> list[tuple[Sequence, Verdict]]:
    """Advances every sequence by one verified block and returns the verdicts, in order.

    A sequence whose grammar cannot go on is closed with finish reason "error" and has no verdict.

    Args:
        keyed_drafts: let the drafter see the sequences' own noise, so that it guesses the drawn token rather than the
            likeliest one.

    Mutates: the sequences' tokens, steps, sessions and contexts. Afterwards the invariant holds for each.
    """
    started = time.perf_counter()
    blocks = _draft(sequences, target.spec.vocab_size, drafter, keyed_drafts)
    if not blocks:
        return []
    drafted = time.perf_counter()
    outputs = target.verify([VerifyRows(b.sequence.session, [b.sequence.anchor], b.proposal) for b in blocks])
    verdicts = [judge(b.proposal, said) for b, said in zip(blocks, _said(blocks, outputs), strict=True)]
    verified = time.perf_counter()
    _commit(blocks, outputs, verdicts, drafter)
    for block, verdict in zip(blocks, verdicts, strict=True):
        block.sequence.steps.append(
            StepRecord(
                position=len(block.sequence.tokens) - len(verdict.tokens),
                num_drafted=len(block.proposal.tokens),
                num_accepted=verdict.num_accepted,
                num_emitted=len(verdict.tokens),
                draft_s=drafted - started,
                verify_s=verified - drafted,
                num_sequences=len(sequences),
            )
        )
    return [(block.sequence, verdict) for block, verdict in zip(blocks, verdicts, strict=True)]


def _draft(
    sequences: Many[Sequence], vocab_size: int, drafter: Drafter | None, keyed_drafts: bool
) -> list[Block]:
    """Returns a block for each sequence that can go on, with as many drafts as its session has room for."""
    wanted = [_num_draft_tokens(s) if drafter else 0 for s in sequences]
    speculating = [s for s, k in zip(sequences, wanted, strict=True) if k]
    if drafter is None or not speculating:
        return _blocks(sequences, [EMPTY_PROPOSAL] * len(sequences))
    contexts = [s.context for s in speculating if s.context is not None]
    laws = [s.law for s in speculating] if keyed_drafts else None
    drafts = iter(drafter.draft([s.anchor for s in speculating], contexts, max(wanted), laws))
    return _blocks(sequences, [fitted(next(drafts), k, vocab_size) if k else EMPTY_PROPOSAL for k in wanted])


def _blocks(sequences: Many[Sequence], proposals: Many[Proposal]) -> list[Block]:
    blocks = []
    for sequence, proposal in zip(sequences, proposals, strict=True):
        try:
            blocks.append(Block.of(sequence, proposal))
        except RequestError as error:  # a dead end of the grammar, or a limit of its library: this text alone
            sequence.stop_reason = str(error)
            sequence.close("error")
    return blocks


def _num_draft_tokens(sequence: Sequence) -> int:
    return max(0, min(sequence.block_size - 1, sequence.session.capacity - sequence.session.length - 1))


def _said(blocks: Many[Block], outputs: Many[TargetOutput]) -> list[list[int]]:
    """Returns the token the target says at each row, by each request's law. The step's one host sync."""
    chosen = [
        b.sequence.law.choose(o.logits, b.sequence.tokens, b.proposal, b.legal)
        for b, o in zip(blocks, outputs, strict=True)
    ]
    counts = [len(c) for c in chosen]
    flat = iter(torch.cat(chosen).tolist())
    return [[next(flat) for _ in range(count)] for count in counts]


def _commit(
    blocks: Many[Block], outputs: Many[TargetOutput], verdicts: Many[Verdict], drafter: Drafter | None
) -> None:
    """Keeps exactly the accepted rows: the drafter's injected hidden states, the tokens, the target's K/V.

    What may fail comes first, so that a step that failed can be repeated.
    """
    kept = [
        o.hidden[: len(v.path)] if v.path[-1] == len(v.path) - 1 else o.hidden[list(v.path)]
        for o, v in zip(outputs, verdicts, strict=True)
    ]
    tokens = [[b.sequence.anchor, *v.tokens[:-1]] for b, v in zip(blocks, verdicts, strict=True)]
    _inject([b.sequence for b in blocks], kept, tokens, drafter)
    for block, output, verdict in zip(blocks, outputs, verdicts, strict=True):
        _advance(block, output, verdict)
        block.sequence.session.keep(verdict.path)


def _advance(block: Block, output: TargetOutput, verdict: Verdict) -> None:
    """Adds a verdict's tokens to its sequence. Mutates: the sequence's tokens, log-probabilities and automaton."""
    sequence = block.sequence
    if sequence.request.params.logprobs is not None:
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


def _inject(
    sequences: Many[Sequence], hidden: Many[torch.Tensor], tokens: Many[list[int]], drafter: Drafter | None
) -> None:
    """Shows the drafter the kept rows of those it drafts for. Mutates: their contexts."""
    kept = [part for part in zip(sequences, hidden, tokens, strict=True) if part[0].context is not None]
    if drafter is not None and kept:
        drafter.inject(
            [s.context for s, _, _ in kept], [rows for _, rows, _ in kept], [ids for _, _, ids in kept]
        )
