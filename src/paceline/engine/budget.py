"""How many drafted nodes are worth verifying now: as many as the text grows fastest with.

The target says the token at every position, whatever was drafted, so a budget changes the wait and never the text
(docs/budget.md).

Source: the objective, tokens expected over seconds of the step, is that of CaDDTree (arXiv 2606.01813) and of DSpark
(arXiv 2607.05147) §3.2. Deviations: all fronts are compared, since no draw of the target depends on the drafts; chances
are corrected by what came of earlier ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Protocol

from paceline.core.types import Proposal, Verdict
from paceline.engine.costs import PassCosts, num_branches

STRENGTH = 20.0
"""How many observations a stated chance counts for."""
HALF_LIFE_NODES = 4000.0
COPY_CHANCE = 0.7
"""Of a node without a stated chance that it stands behind its parent, before any was seen."""
NUM_BINS = 16


class Budget(Protocol):
    """Decides from what was known before the target's pass."""

    def cut(self, proposals: Sequence[Proposal]) -> list[Proposal]:
        """Returns the front of each proposal that is worth its rows."""

    def learn(self, proposals: Sequence[Proposal], verdicts: Sequence[Verdict]) -> None:
        """Takes note of what stood. Mutates: self."""


class Author(Protocol):
    """Whoever wants to know what comes of a draft."""

    @property
    def length(self) -> int:
        """Committed tokens before the draft's anchor."""

    @property
    def is_probe(self) -> bool:
        """Whether it drafts to find out, so that its stated chances are taken as they are."""

    def expect(self, chances: Sequence[float]) -> None:
        """Is told how likely the nodes are thought to stand, those that are cut away too. Mutates: self."""

    def settle(self, stood: Sequence[bool], gain_s: float) -> None:
        """Is told which of the verified nodes stood, and the seconds that the draft saved or lost. Mutates: self."""


@dataclass(frozen=True, slots=True)
class Signed(Proposal):
    """A proposal that says whose it is, and whose fronts do too.

    Args:
        author: who drafted it.
    """

    author: Author | None = None

    def front(self, num_nodes: int) -> Proposal:
        """See `Proposal.front`."""
        return replace(
            self,
            tokens=self.tokens[:num_nodes],
            parents=self.parents[:num_nodes],
            chances=self.chances[:num_nodes],
        )


class Calibration:
    """What stated chances have meant so far: how often a node stood whose parent did, by chance and depth.

    A count begins as if `STRENGTH` nodes had stood as often as stated, and is slowly forgotten. Nodes without a stated
    chance are counted by depth alone.
    """

    def __init__(self) -> None:
        self._cells: dict[tuple[int, int], list[float]] = {}  # stood, tried

    def chances(self, proposal: Proposal) -> list[float]:
        """Returns of each node the chance that its path stands; it never rises from one node to the next."""
        paths = [1.0]
        for parent, (stated, cell) in zip(proposal.parents, self._stated(proposal), strict=True):
            stood, tried = self._cells.get(cell, (0.0, 0.0))
            paths.append(paths[parent] * (STRENGTH * stated + stood) / (STRENGTH + tried))
        return list(accumulate(paths[1:], min))

    def learn(self, proposal: Proposal, path: Sequence[int]) -> None:
        """Counts the nodes whose parents stood. Mutates: self.

        Args:
            proposal: as it was verified.
            path: rows that stood, the anchor's first.
        """
        stood = set(path)
        tried = [
            (cell, node + 1 in stood)
            for node, (_, cell) in enumerate(self._stated(proposal))
            if proposal.parents[node] in stood
        ]
        kept = 0.5 ** (len(tried) / HALF_LIFE_NODES)
        for counts in self._cells.values():
            counts[:] = (kept * counts[0], kept * counts[1])
        for cell, stands in tried:
            counts = self._cells.setdefault(cell, [0.0, 0.0])
            counts[:] = (counts[0] + stands, counts[1] + 1)

    def _stated(self, proposal: Proposal) -> list[tuple[float, tuple[int, int]]]:
        """Returns of each node its stated chance behind its parent, and the cell in which it is counted."""
        depths, paths = proposal.depths, (1.0, *proposal.chances)
        stated = []
        for node, parent in enumerate(proposal.parents):
            depth = min(depths[node + 1].bit_length(), 4)  # 1, 2…3, 4…7, 8 and deeper
            if not proposal.chances:
                stated.append((COPY_CHANCE, (depth, -1)))
                continue
            above, path = paths[parent], paths[node + 1]
            chance = path / above if 0 < path < above else float(path > 0)  # no number: it stands nowhere
            stated.append((chance, (depth, min(int(chance * NUM_BINS), NUM_BINS - 1))))
        return stated


def at_its_word(proposal: Proposal) -> list[float]:
    """Returns the stated chances, whatever came of earlier ones; made not to rise from one node to the next. Pure."""
    stated = proposal.chances or [COPY_CHANCE**depth for depth in proposal.depths[1:]]
    return list(accumulate(stated, min))


class CostBudget:
    """Verifies the nodes, over all sequences of a step, with which tokens per second are most.

    Args:
        costs: of the pair, on this machine.
    """

    def __init__(self, costs: PassCosts) -> None:
        self.costs = costs
        self.calibration = Calibration()
        self.num_sequences = 0
        """Of the last step."""
        self._draft_s = 0.0
        self._num_drafting = 0
        self._num_context_tokens = 0.0

    def cut(self, proposals: Sequence[Proposal]) -> list[Proposal]:
        """Returns the best front of each proposal (see `best_fronts`). Mutates: what it knows of this step."""
        if not proposals:
            return []
        drafting = [p for p in proposals if p.chances or isinstance(p, Signed)]
        self.num_sequences, self._num_drafting = len(proposals), len(drafting)
        self._draft_s = self.costs.draft_s(len(drafting), max((len(p.tokens) for p in drafting), default=0))
        lengths = [p.author.length for p in proposals if isinstance(p, Signed) and p.author is not None]
        self._num_context_tokens = len(proposals) * sum(lengths) / len(lengths) if lengths else 0.0
        counts = best_fronts(
            proposals, [self._chances(p) for p in proposals], self._step_s, self.costs.padding
        )
        return [p if n == len(p.tokens) else p.front(n) for p, n in zip(proposals, counts, strict=True)]

    def learn(self, proposals: Sequence[Proposal], verdicts: Sequence[Verdict]) -> None:
        """Calibrates, and tells authors what came of their drafts. Mutates: self and the authors."""
        if not proposals:
            return
        for proposal, verdict in zip(proposals, verdicts, strict=True):
            self.calibration.learn(proposal, verdict.path)
        num_nodes = sum(len(p.tokens) for p in proposals)
        width = 1 + max((len(p.tokens) for p in proposals), default=0)
        num_runs = sum(map(num_branches, proposals))
        plain_s = self._verify_s(len(proposals), 0, 1, 0)
        extra_s = self._verify_s(len(proposals), num_nodes, width, num_runs) - plain_s
        for proposal, verdict in zip(proposals, verdicts, strict=True):
            if isinstance(proposal, Signed) and proposal.author is not None:
                share = len(proposal.tokens) / num_nodes if num_nodes else 0.0
                lost_s = self._draft_s / self._num_drafting + share * extra_s
                gain_s = verdict.num_accepted * plain_s / len(proposals) - lost_s
                stood = set(verdict.path)
                proposal.author.settle([row + 1 in stood for row in range(len(proposal.tokens))], gain_s)

    def _chances(self, proposal: Proposal) -> Sequence[float]:
        """Returns chances of the nodes, and tells them to the author."""
        calibrated = self.calibration.chances(proposal)
        if not isinstance(proposal, Signed) or proposal.author is None:
            return calibrated
        proposal.author.expect(calibrated)
        return at_its_word(proposal) if proposal.author.is_probe else calibrated

    def _step_s(self, num_nodes: int, width: int, num_runs: int) -> float:
        return self._draft_s + self._verify_s(self.num_sequences, num_nodes, width, num_runs)

    def _verify_s(self, num_sequences: int, num_nodes: int, width: int, num_runs: int) -> float:
        num_rows = num_sequences + num_nodes
        return self.costs.verify_s(num_rows, num_sequences, self._num_context_tokens, num_runs, width)


def best_fronts(
    proposals: Sequence[Proposal],
    chances: Sequence[Sequence[float]],
    step_s: Callable[[int, int, int], float],
    padding: float = 0.0,
) -> list[int]:
    """Returns how many nodes of each proposal to verify so that expected tokens over seconds are most.

    Of equals it is the fewest. Nodes are taken in order of their chance. Where a pass is padded, nodes are nearly free
    within the width of the widest sequence, so each width is looked at by itself.

    Args:
        proposals: of all sequences of the step, empty ones too.
        chances: of their nodes that the path stands, never rising within one proposal.
        step_s: nodes, rows of the widest sequence and further runs ↦ seconds of the step; falling in none.
        padding: see `PassCosts`.

    Pure.
    """
    order = sorted((-chance, n, node) for n, row in enumerate(chances) for node, chance in enumerate(row))
    longest = max(map(len, chances), default=0)
    is_padded = padding > 0 and len(proposals) > 1
    branches = [_branching(p) for p in proposals]
    best, best_rate = list[tuple[float, int, int]](), len(proposals) / step_s(0, 1, 0) if order else 0.0
    for cap in range(1, longest + 1) if is_padded else (longest,):
        nodes = [node for node in order if node[2] < cap]
        tokens, width, num_runs = float(len(proposals)), 1, 0
        for count, (minus_chance, n, node) in enumerate(nodes, start=1):
            tokens -= minus_chance
            width, num_runs = max(width, node + 2), num_runs + branches[n][node]
            seconds = step_s(count, width, num_runs)
            if tokens > best_rate * seconds:
                best, best_rate = nodes[:count], tokens / seconds
            if tokens - minus_chance * (len(nodes) - count) <= best_rate * seconds:
                break  # not even if all that follow were as likely, and free
    counts = [0] * len(proposals)
    for _, n, _ in best:
        counts[n] += 1
    return counts


def _branching(proposal: Proposal) -> list[bool]:
    """Returns of each node whether it begins a run: its parent has a child before it."""
    seen = set[int]()
    begins = []
    for parent in proposal.parents:
        begins.append(parent in seen)
        seen.add(parent)
    return begins
