"""Training and serving side by side on the same answers: the same features, and the same drafts.

Training reads features that plain decoding left behind and runs `forward_blocks`; serving injects the rows it kept of
verified drafts, rejections in between, and runs `draft`. Whatever lies between the two costs acceptance and shows in no
loss curve, so both are run and compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from paceline.core.acceptance import acceptance_length
from paceline.core.params import SamplingParams
from paceline.core.sampling import Law
from paceline.core.types import EMPTY_PROPOSAL, Completion, Proposal, Request
from paceline.drafter.base import NeuralDrafter
from paceline.engine.engine import Engine
from paceline.target.base import Target, VerifyRows
from paceline.train.diagnosis.scores import Answer, Scorer, Scores, is_teacher_forced

FEATURE_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3}
"""Largest relative difference of a row that is arithmetic; `COARSE` for narrower dtypes."""
TIE_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-2}
"""Margin in logits below which two drafts are a tie that rounding may break."""
COARSE = 0.1
NUM_SHOWN = 8


@dataclass(slots=True)
class Seen:
    """A context of the drafter with everything that passed through it.

    Args:
        context: the drafter's own.
        rows: injected rows.
        drafts: (position of the anchor, drafted tokens) of each step.
    """

    context: Any
    rows: list[torch.Tensor] = field(default_factory=list)
    drafts: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Committed tokens that were injected."""
        return int(self.context.length)


class Witness:
    """A drafter that does what another does and remembers it.

    Args:
        drafter: bound to its target.
    """

    def __init__(self, drafter: NeuralDrafter) -> None:
        self._drafter = drafter
        self.block_size, self.target_layer_ids = drafter.block_size, drafter.target_layer_ids
        self.seen: list[Seen] = []

    def open(self, capacity: int) -> Seen:
        """Returns a watched context; `seen` lists them in admission order."""
        self.seen.append(Seen(self._drafter.open(capacity)))
        return self.seen[-1]

    def inject(
        self, contexts: Sequence[Seen], hidden: Sequence[torch.Tensor], tokens: Sequence[Sequence[int]]
    ) -> None:
        """Remembers the rows and passes them on."""
        for seen, rows in zip(contexts, hidden, strict=True):
            seen.rows.append(rows.detach().cpu().clone())
        self._drafter.inject([seen.context for seen in contexts], hidden, tokens)

    def draft(
        self,
        anchors: Sequence[int],
        contexts: Sequence[Seen],
        num_draft_tokens: int,
        laws: Sequence[Law] | None = None,
    ) -> list[Proposal]:
        """Returns the drafter's own chains and remembers them."""
        own = [seen.context for seen in contexts]
        proposals = self._drafter.draft(anchors, own, num_draft_tokens, laws)
        for seen, proposal in zip(contexts, proposals, strict=True):
            seen.drafts.append((seen.length, tuple(proposal.tokens)))
        return proposals


@dataclass(frozen=True, slots=True)
class Difference:
    """A slot at which serving drafted another token than training would.

    Args:
        answer: whose block it is.
        position: of the anchor.
        slot: counted from 1.
        served, replayed: the two tokens.
        margin: by how much the replayed one beat the next, in logits.
    """

    answer: str
    position: int
    slot: int
    served: int
    replayed: int
    margin: float


@dataclass(frozen=True, slots=True)
class Parity:
    """What the replay found.

    Args:
        agrees: features within `tolerance` and no draft different but for ties.
        num_answers, num_same_text: replayed; of those, with the same tokens as plain decoding.
        num_steps, num_rejections: of serving; steps in which a draft fell.
        num_injections: rows compared.
        served_acceptance_length: τ of serving.
        target_agreement: share of the answers' tokens that one pass over the whole text says too.
        served_difference: largest relative difference between a row that serving injected and the trainer's.
        prefill_difference: the same between one pass over the whole text and the trainer's rows.
        tolerance: for both, by the target's dtype.
        num_drafts, num_ties, num_different: drafted slots compared; those that differ at a tie; those that differ.
        differences: the first of the last.
    """

    agrees: bool
    num_answers: int
    num_same_text: int
    num_steps: int
    num_rejections: int
    num_injections: int
    served_acceptance_length: float | None
    target_agreement: float
    served_difference: float
    prefill_difference: float
    tolerance: float
    num_drafts: int
    num_ties: int
    num_different: int
    differences: tuple[Difference, ...]


def replay(target: Target, drafter: NeuralDrafter, scorer: Scorer, answers: Sequence[Answer]) -> Parity:
    """Serves the answers' prompts again, all together, and compares with what training would see and say.

    Args:
        drafter: bound to the target.
    """
    completions, seen = _serve(target, drafter, answers)
    tolerance = FEATURE_TOLERANCE.get(target.dtype, COARSE)
    tie = TIE_TOLERANCE.get(target.dtype, COARSE)
    served, compared, slots, found = 0.0, 0, 0, list[Difference]()
    for answer, completion, watched in zip(answers, completions, seen, strict=True):
        shared = _num_shared(answer, completion)
        rows = torch.cat(watched.rows)[: shared - 1]
        own = answer.taps(drafter.target_layer_ids)[: len(rows)]
        served = max(served, _difference(own, rows))
        compared += len(rows)
        num, different = _compare_drafts(drafter, scorer, answer, watched, shared)
        slots, found = slots + num, found + different
    passes = [_one_pass(target, drafter, answer) for answer in answers]
    prefilled = max(worst for worst, _, _ in passes)
    steps = [step for completion in completions for step in completion.steps]
    wrong = [d for d in found if d.margin > tie]
    return Parity(
        agrees=max(served, prefilled) <= tolerance and not wrong,
        num_answers=len(answers),
        num_same_text=sum(_is_same(a, c) for a, c in zip(answers, completions, strict=True)),
        num_steps=len(steps),
        num_rejections=sum(step.num_accepted < step.num_drafted for step in steps),
        num_injections=compared,
        served_acceptance_length=acceptance_length(steps),
        target_agreement=sum(right for _, right, _ in passes) / max(1, sum(num for _, _, num in passes)),
        served_difference=served,
        prefill_difference=prefilled,
        tolerance=tolerance,
        num_drafts=slots,
        num_ties=len(found) - len(wrong),
        num_different=len(wrong),
        differences=tuple(wrong[:NUM_SHOWN]),
    )


def _serve(
    target: Target, drafter: NeuralDrafter, answers: Sequence[Answer]
) -> tuple[list[Completion], list[Seen]]:
    witness = Witness(drafter)
    engine = Engine(target, witness, max_sequences=len(answers))
    try:
        for i, answer in enumerate(answers):
            length = answer.num_prompt_tokens
            params = SamplingParams(max_new_tokens=len(answer.token_ids) - length, temperature=0.0)
            engine.add(Request(str(i), tuple(answer.token_ids[:length].tolist()), params))
        while engine.has_work:
            engine.step()
    finally:
        engine.close()
    return [engine.take_completion(str(i)) for i in range(len(answers))], witness.seen


def _is_same(answer: Answer, completion: Completion) -> bool:
    return completion.prompt_ids + completion.token_ids == tuple(answer.token_ids.tolist())


def _num_shared(answer: Answer, completion: Completion) -> int:
    """Returns how many leading tokens two texts share."""
    ours, theirs = answer.token_ids.tolist(), completion.prompt_ids + completion.token_ids
    pairs = enumerate(zip(ours, theirs, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(ours), len(theirs)))


def _difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Returns the largest ‖a − b‖ / ‖a‖ over rows."""
    if not len(ours):
        return 0.0
    a, b = ours.double(), theirs.double()
    return float(((a - b).norm(dim=-1) / a.norm(dim=-1).clamp(min=1e-12)).max())


def _one_pass(target: Target, drafter: NeuralDrafter, answer: Answer) -> tuple[float, int, int]:
    """Returns one whole pass's difference from the trainer's rows, and how many answer tokens it says of how many."""
    tokens, start = answer.token_ids.tolist(), answer.num_prompt_tokens
    target.tap(drafter.target_layer_ids)
    session = target.open(len(tokens))
    try:
        (output,) = target.verify([VerifyRows(session, tokens[:-1], EMPTY_PROPOSAL)])
    finally:
        session.close()
    said = output.logits[start - 1 :].argmax(dim=-1).cpu()
    right = int((said == answer.token_ids[start:]).sum())
    difference = _difference(answer.taps(drafter.target_layer_ids), output.hidden.cpu())
    return difference, right, len(said)


def _compare_drafts(
    drafter: NeuralDrafter, scorer: Scorer, answer: Answer, watched: Seen, shared: int
) -> tuple[int, list[Difference]]:
    """Returns how many drafted slots were compared, and where they differ, ties included."""
    possible = set(answer.anchors(drafter.block_size - 1).tolist())
    drafts = {p: tokens for p, tokens in watched.drafts if p in possible and p < shared}
    if not drafts:
        return 0, []
    anchors = torch.tensor(sorted(drafts))
    scores = scorer.score(drafter, answer, anchors)
    num, found = 0, list[Difference]()
    for row, position in enumerate(anchors.tolist()):
        served = drafts[position]
        width = min(len(served), _num_comparable(drafter, scores, row))
        num += width
        replayed, margins = scores.chosen[row].tolist(), scores.margin[row].tolist()
        slot = next((k for k in range(width) if served[k] != replayed[k]), None)
        if slot is not None:  # later slots may follow from the first
            found.append(
                Difference(answer.id, position, slot + 1, served[slot], replayed[slot], margins[slot])
            )
    return num, found


def _num_comparable(drafter: NeuralDrafter, scores: Scores, row: int) -> int:
    """Returns up to which slot both were told the same tokens: a teacher stops agreeing behind the first error."""
    width = scores.labels.shape[1]
    return min(width, int(scores.accepted[row]) + 1) if is_teacher_forced(drafter) else width
