"""Prefill, and the step: draft → verify → commit. Plain decoding is the same step with empty proposals."""

from __future__ import annotations

import time
from collections.abc import Sequence as Many

import torch

from paceline.core.sampling import choose_tokens
from paceline.core.types import EMPTY_PROPOSAL, Proposal, StepRecord, Verdict
from paceline.core.verification import judge
from paceline.drafter.base import Drafter
from paceline.engine.sequence import Sequence
from paceline.target.base import Target, TargetOutput, VerifyRows

PREFILL_ROWS = 512
"""Longest piece of a prompt that runs at once; bounds activations, not the result."""


def prefill(sequence: Sequence, target: Target, drafter: Drafter | None) -> None:
    """Runs the prompt and commits the target's first token, which becomes the anchor.

    Mutates: the sequence's session, context and tokens.
    """
    prompt = sequence.tokens
    for start in range(0, len(prompt), PREFILL_ROWS):
        piece = prompt[start : start + PREFILL_ROWS]
        (output,) = target.verify([VerifyRows(sequence.session, piece, EMPTY_PROPOSAL, last_row_only=True)])
        sequence.session.keep(range(len(piece)))
        _inject([sequence], [output.hidden], drafter)
    (first,) = _said([sequence], [EMPTY_PROPOSAL], [output])
    prompt.append(first[0])


def step(sequences: Many[Sequence], target: Target, drafter: Drafter | None) -> list[Verdict]:
    """Advances every sequence by one verified block and returns the verdicts, in order.

    Mutates: the sequences' tokens, steps, sessions and contexts. Afterwards the invariant holds for each.
    """
    started = time.perf_counter()
    proposals = _draft(sequences, target, drafter)
    drafted = time.perf_counter()
    parts = [VerifyRows(s.session, [s.anchor], p) for s, p in zip(sequences, proposals, strict=True)]
    outputs = target.verify(parts)
    verdicts = [
        judge(p, said) for p, said in zip(proposals, _said(sequences, proposals, outputs), strict=True)
    ]
    verified = time.perf_counter()
    _commit(sequences, verdicts, outputs, drafter)
    for sequence, proposal, verdict in zip(sequences, proposals, verdicts, strict=True):
        sequence.steps.append(
            StepRecord(
                position=len(sequence.tokens) - len(verdict.tokens),
                num_drafted=len(proposal.tokens),
                num_accepted=verdict.num_accepted,
                num_emitted=len(verdict.tokens),
                draft_s=drafted - started,
                verify_s=verified - drafted,
                num_sequences=len(sequences),
            )
        )
    return verdicts


def _draft(sequences: Many[Sequence], target: Target, drafter: Drafter | None) -> list[Proposal]:
    """Returns a proposal for each sequence: its block's drafts, as far as the session has room for them."""
    wanted = [_num_draft_tokens(s) if drafter else 0 for s in sequences]
    speculating = [s for s, k in zip(sequences, wanted, strict=True) if k]
    if drafter is None or not speculating:
        return [EMPTY_PROPOSAL] * len(sequences)
    contexts = [s.context for s in speculating if s.context is not None]
    drafts = iter(drafter.draft([s.anchor for s in speculating], contexts, max(wanted)))
    return [_trim(next(drafts), k) if k else EMPTY_PROPOSAL for k in wanted]


def _num_draft_tokens(sequence: Sequence) -> int:
    return max(0, min(sequence.block_size - 1, sequence.session.capacity - sequence.session.length - 1))


def _trim(proposal: Proposal, num_nodes: int) -> Proposal:
    """Returns the first nodes of a proposal; parents precede children, so any front part is a tree."""
    return Proposal(proposal.tokens[:num_nodes], proposal.parents[:num_nodes])


def _said(
    sequences: Many[Sequence], proposals: Many[Proposal], outputs: Many[TargetOutput]
) -> list[list[int]]:
    """Returns the token the target says at each row, by each request's law. The step's one host sync."""
    chosen = [
        choose_tokens(o.logits, s.request.params, s.seed, [len(s.tokens) + depth for depth in p.depths])
        for s, p, o in zip(sequences, proposals, outputs, strict=True)
    ]
    counts = [len(c) for c in chosen]
    flat = iter(torch.cat(chosen).tolist())
    return [[next(flat) for _ in range(count)] for count in counts]


def _commit(
    sequences: Many[Sequence], verdicts: Many[Verdict], outputs: Many[TargetOutput], drafter: Drafter | None
) -> None:
    """Keeps exactly the accepted rows: the target's K/V, the drafter's injected hidden states, the tokens."""
    for sequence, verdict in zip(sequences, verdicts, strict=True):
        sequence.session.keep(verdict.path)
        sequence.tokens.extend(verdict.tokens)
    kept = [
        o.hidden[: len(v.path)] if v.path[-1] == len(v.path) - 1 else o.hidden[list(v.path)]
        for o, v in zip(outputs, verdicts, strict=True)
    ]
    _inject(sequences, kept, drafter)


def _inject(sequences: Many[Sequence], hidden: Many[torch.Tensor], drafter: Drafter | None) -> None:
    pairs = [(s.context, h) for s, h in zip(sequences, hidden, strict=True) if s.context is not None]
    if drafter is not None and pairs:
        drafter.inject([context for context, _ in pairs], [rows for _, rows in pairs])
