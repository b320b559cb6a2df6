"""Who drafts in this step, and how wide: no draft at all where plain decoding is faster.

A budget (`budget.py`) decides what of a draft is worth verifying, but by then the draft is paid for. Here each text
keeps how far its drafts stood, and is drafted for only while that pays on this machine, in the batch as it is. What
drafts may lose is bounded twice: of one text, before it rests; and of tries with texts that rest, together, to a small
share of all time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch

from paceline.core.sampling import Law
from paceline.core.types import EMPTY_PROPOSAL, Proposal
from paceline.drafter.base import Context, Drafter, Forkable
from paceline.drafter.combined import Combined
from paceline.engine.budget import CostBudget, Signed
from paceline.engine.costs import num_branches

OPTIMISM = 0.6
"""How often a node is thought to stand behind its parent, before anything was seen of a pair."""
STRENGTH = 4.0
"""How many drafts a prior counts for."""
TEXT_HALF_LIFE, PAIR_HALF_LIFE = 16.0, 500.0
"""Steps after which a draft counts half: in what is known of one text, and of a pair."""
FIRST_REST, LONGEST_REST = 8, 64
"""Steps without drafting after which a text is tried again."""
MARGIN = 1.02
"""By how much drafting must be thought faster than plain decoding."""
LEASH = 3.0
"""Plain passes that a text's drafts may lose, beyond what they gained before, until it rests; in a batch of B by the
square root of B fewer."""
FIRST_TRIES, TRY_SHARE = 2.0, 0.015
"""What tries may lose: so many plain passes at first, and this share of plain decoding's time."""
MOST_WAITING_ROWS = 256
"""Rows of a text that wait to be shown to the drafter."""


class Yields:
    """How often the node of each rank stood: counts that fade.

    A draft's nodes are ranked as it orders them, so for a chain a rank is a depth, and with its first n nodes verified
    a draft adds as many tokens as of these stand.
    """

    def __init__(self, half_life: float) -> None:
        self._kept = 0.5 ** (1.0 / half_life)
        self._stood: list[float] = []
        self._tried: list[float] = []

    @property
    def is_blank(self) -> bool:
        """Whether nothing was learnt yet."""
        return not self._tried

    def expected(self, prior: Sequence[float]) -> list[float]:
        """Returns the chance of each rank of `prior`; it never rises with the rank. Pure."""
        values = list(prior)
        for rank in range(min(len(values), len(self._tried))):
            weighed = STRENGTH * values[rank] + self._stood[rank]
            values[rank] = weighed / (STRENGTH + self._tried[rank])
        return list(accumulate(values, min))

    def learn(self, stood: Sequence[float]) -> None:
        """Counts one draft: 0 or 1 by rank, or a chance where nobody knows. Mutates: self."""
        self.fade(1)
        missing = [0.0] * (len(stood) - len(self._tried))
        self._stood += missing
        self._tried += missing
        for rank, value in enumerate(stood):
            self._stood[rank] += value
            self._tried[rank] += 1.0

    def fade(self, num_steps: int) -> None:
        """Lets steps pass in which nothing was learnt. Mutates: self."""
        kept = self._kept**num_steps
        self._stood = [kept * count for count in self._stood]
        self._tried = [kept * count for count in self._tried]


@dataclass(slots=True)
class Pair:
    """What is known of a target and a drafter, whatever the text.

    Args:
        yields: of the drafts of all texts.
        branching: runs beyond the first for each node of the newest trees; 0 for chains.
        purse_s: seconds that tries may still lose; `None` before the first step.
    """

    yields: Yields = field(default_factory=lambda: Yields(PAIR_HALF_LIFE))
    branching: float = 0.0
    purse_s: float | None = None

    def earn(self, plain_s: float, try_s: float) -> float:
        """Returns what tries may lose now. Mutates: self.

        Args:
            plain_s: what a plain step takes.
            try_s: what one try takes beyond it, which can be saved for however much it is.
        """
        first_s = FIRST_TRIES * plain_s
        earned_s = first_s if self.purse_s is None else self.purse_s + TRY_SHARE * plain_s
        self.purse_s = min(earned_s, max(first_s, try_s))
        return self.purse_s


@dataclass(slots=True, eq=False)
class Pace:
    """What is known of one text: the author of its drafts.

    Args:
        context: the drafter's.
        pair: see `Pair`.
        yields: of its own drafts.
        hidden, tokens: committed rows that the drafter has not been shown yet.
        rest, next_rest: steps before it is tried again; how many it will be the next time.
        crowd: sequences of the step in which it began to rest.
        is_out: whether it rests, or has not gained anything since.
        is_due: whether it has rested, so that it may be tried.
        has_gained: whether its newest draft saved time: then it may draft again, whatever is thought of it.
        is_try: whether its draft is one that the pair's purse pays for.
        is_probe: whether its draft is made though it is not thought to pay.
        lost_s, leash_s: what its drafts have lost since they last were ahead, and how much that may become.
        chances: of the nodes of its draft.
    """

    context: Any
    pair: Pair
    yields: Yields = field(default_factory=lambda: Yields(TEXT_HALF_LIFE))
    hidden: list[torch.Tensor] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    rest: int = 0
    next_rest: int = FIRST_REST
    crowd: int = 1
    is_out: bool = False
    is_due: bool = False
    has_gained: bool = False
    is_try: bool = False
    is_probe: bool = False
    lost_s: float = 0.0
    leash_s: float = 0.0
    chances: Sequence[float] = ()

    @property
    def length(self) -> int:
        """Committed tokens, shown to the drafter or not."""
        length: int = self.context.length
        return length + len(self.tokens)

    def expect(self, chances: Sequence[float]) -> None:
        """See `Author`."""
        self.chances = chances

    def settle(self, stood: Sequence[bool], gain_s: float) -> None:
        """See `Author`. Of nodes that were cut away it takes the chance for the outcome. Mutates: the pair too."""
        outcome = [*map(float, stood), *self.chances[len(stood) :]]
        self.yields.learn(outcome)
        self.pair.yields.learn(outcome)
        self.has_gained, self.is_due = gain_s > 0, False
        if self.has_gained:
            self.next_rest, self.is_out = FIRST_REST, False
        if self.is_try and not self.has_gained:
            assert self.pair.purse_s is not None, "a try was paid for"
            self.pair.purse_s += gain_s
            return
        self.lost_s = max(0.0, self.lost_s - gain_s)
        if self.lost_s > self.leash_s:
            self.lost_s, self.is_out = self.leash_s, True

    def rests(self, num_sequences: int) -> bool:
        """Returns whether it sits this step out; not any longer where the batch has halved. Mutates: self."""
        if self.rest and 2 * num_sequences <= self.crowd:
            self.rest, self.is_out = 0, False
        if not self.rest:
            return False
        self.rest -= 1
        self.is_due = self.rest == 0
        return True

    def begin_rest(self, num_sequences: int) -> None:
        """Lets it sit out the coming steps, in which what it knows fades. Mutates: self."""
        self.rest, self.crowd, self.is_out = self.next_rest, num_sequences, True
        self.next_rest = min(2 * self.next_rest, LONGEST_REST)
        self.yields.fade(self.rest)


class Paced:
    """Drafts with another drafter for those texts, and as wide, as is thought to pay.

    Rows that were injected wait until their text is drafted for, and are shown to the drafter together.

    Args:
        drafter: with weights: chains, or a `TreeDrafter`.
        budget: the one that the engine's steps take, or nobody learns what stood.
    """

    def __init__(self, drafter: Drafter, budget: CostBudget) -> None:
        self.drafter, self.budget = drafter, budget
        self._pair = Pair()

    @property
    def block_size(self) -> int:
        """The inner drafter's."""
        return self.drafter.block_size

    @property
    def target_layer_ids(self) -> tuple[int, ...]:
        """The inner drafter's."""
        return self.drafter.target_layer_ids

    def open(self, capacity: int) -> Pace:
        """Returns an empty context."""
        return self._paced(self.drafter.open(capacity))

    def fork(self, context: Pace, length: int, capacity: int) -> Context | None:
        """Returns a copy of what a context knows of its first tokens (see `Forkable`); its pace is its own."""
        if not isinstance(self.drafter, Forkable):
            return None
        if length > context.context.length:
            self._catch_up([context])
        inner = self.drafter.fork(context.context, length, capacity)
        return None if inner is None else self._paced(inner)

    def _paced(self, context: Context) -> Pace:
        """Returns the pace of a context; of a pair of which nothing is known it may be tried at once."""
        return Pace(context, self._pair, is_due=self._pair.yields.is_blank)

    def inject(
        self, contexts: Sequence[Pace], hidden: Sequence[torch.Tensor], tokens: Sequence[Sequence[int]]
    ) -> None:
        """Keeps rows until they are wanted. Mutates: the contexts.

        What may fail comes first: a context that has too many waiting is brought up to date before it takes more.
        """
        parts = list(zip(contexts, hidden, tokens, strict=True))
        self._catch_up([pace for pace, _, ids in parts if len(pace.tokens) + len(ids) > MOST_WAITING_ROWS])
        copies = [rows.clone() for rows in hidden]  # the pass's own tensors may be large, or written again
        for pace, rows, ids in zip(contexts, copies, tokens, strict=True):
            pace.hidden.append(rows)
            pace.tokens.extend(ids)

    def draft(
        self,
        anchors: Sequence[int],
        contexts: Sequence[Pace],
        num_draft_tokens: int,
        laws: Sequence[Law] | None = None,
    ) -> list[Proposal]:
        """Returns a proposal behind each anchor, none where plain decoding is thought faster. Mutates: the paces."""
        chosen, width = self._choose(contexts, num_draft_tokens)
        proposals: list[Proposal] = [EMPTY_PROPOSAL] * len(contexts)
        if not chosen:
            return proposals
        paces = [contexts[n] for n in chosen]
        self._catch_up(paces)
        drafts = self.drafter.draft(
            [anchors[n] for n in chosen],
            [pace.context for pace in paces],
            width,
            None if laws is None else [laws[n] for n in chosen],
        )
        for n, pace, draft in zip(chosen, paces, drafts, strict=True):
            proposals[n] = Signed(draft.tokens, draft.parents, draft.chances, author=pace)
        num_nodes = sum(len(draft.tokens) for draft in drafts)
        self._pair.branching = sum(map(num_branches, drafts)) / max(1, num_nodes)
        return proposals

    def _choose(self, contexts: Sequence[Pace], num_draft_tokens: int) -> tuple[list[int], int]:
        """Returns for whom to draft, and how wide. Mutates: the paces, and what tries may lose."""
        count = max(len(contexts), self.budget.num_sequences)
        plain_s = self._step_s(0, 0, count, 0.0)
        purse_s = self._pair.earn(plain_s, self._step_s(1, num_draft_tokens, count, 0.0) - plain_s)
        ready = [n for n, pace in enumerate(contexts) if not pace.rests(count)]
        trusted = [(n, contexts[n]) for n in ready if not contexts[n].is_out]
        paying, width = self._paying(trusted, count, num_draft_tokens)
        probes, tries = list[int](), list[int]()
        for n in ready:
            pace = contexts[n]
            pace.leash_s = LEASH * plain_s / math.sqrt(count)
            if n in paying:
                continue
            if pace.has_gained:
                probes.append(n)
            elif not pace.is_due:
                pace.begin_rest(count)
            elif self._step_s(len(tries) + 1, num_draft_tokens, count, 0.0) - plain_s <= purse_s:
                tries.append(n)
        chosen = sorted([*paying, *probes, *tries])
        for n in chosen:
            contexts[n].is_try, contexts[n].is_probe = n in tries, n not in paying
        return chosen, self._widest(len(chosen), width or min(2, num_draft_tokens), num_draft_tokens)

    def _paying(
        self, ready: Sequence[tuple[int, Pace]], num_sequences: int, num_draft_tokens: int
    ) -> tuple[set[int], int]:
        """Returns for whom and how wide to draft so that expected tokens per second, of the whole batch, are most.

        Those whose drafts stand best come first. Nobody, and width 0, where that is not faster than plain decoding.
        """
        if not ready:
            return set(), 0
        prior = self._pair.yields.expected([OPTIMISM ** (rank + 1) for rank in range(num_draft_tokens)])
        sums = [(list(accumulate(pace.yields.expected(prior))), n) for n, pace in ready]
        sums.sort(key=lambda entry: -entry[0][-1])
        context = num_sequences * sum(pace.length for _, pace in ready) / len(ready)
        best = MARGIN * num_sequences / self._step_s(0, 0, num_sequences, context)
        paying, chosen_width = 0, 0
        for width in _steps(num_draft_tokens):
            totals = list(accumulate(total[width - 1] for total, _ in sums))
            for count in _steps(len(sums)):
                rate = (num_sequences + totals[count - 1]) / self._step_s(
                    count, width, num_sequences, context
                )
                if rate > best:
                    best, paying, chosen_width = rate, count, width
        return {n for _, n in sums[:paying]}, chosen_width

    def _step_s(self, num_drafting: int, width: int, num_sequences: int, num_context_tokens: float) -> float:
        """Returns the seconds of a step in which some sequences draft and verify `width` nodes each."""
        costs, num_nodes = self.budget.costs, num_drafting * width
        pass_s = costs.verify_s(
            num_sequences + num_nodes,
            num_sequences,
            num_context_tokens,
            self._pair.branching * num_nodes,
            width + 1,
        )
        return costs.draft_s(num_drafting, width) + pass_s

    def _widest(self, num_drafting: int, width: int, num_draft_tokens: int) -> int:
        """Returns the largest width whose draft costs no more than that of `width`: the budget can choose then."""
        limit = MARGIN * self.budget.costs.draft_s(num_drafting, width)
        wider = [w for w in _steps(num_draft_tokens) if w > width]
        return max([width, *(w for w in wider if self.budget.costs.draft_s(num_drafting, w) <= limit)])

    def _catch_up(self, paces: Sequence[Pace]) -> None:
        """Shows the drafter the rows that wait. Mutates: the paces, once it has taken all of them."""
        behind = [pace for pace in paces if pace.tokens]
        if not behind:
            return
        rows = [torch.cat(pace.hidden) for pace in behind]
        self.drafter.inject([pace.context for pace in behind], rows, [pace.tokens for pace in behind])
        for pace in behind:
            pace.hidden, pace.tokens = [], []


def _steps(most: int) -> list[int]:
    """Returns the counts 1…`most` that are looked at: all small ones, and of larger ones a few. Pure."""
    return sorted({n for n in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64) if n < most} | {most})


def budget_of(drafter: Drafter | None) -> CostBudget | None:
    """Returns the budget that the steps of a paced drafter must take, alone or beside lookup. Pure."""
    inner = drafter.drafter if isinstance(drafter, Combined) else drafter
    return inner.budget if isinstance(inner, Paced) else None
