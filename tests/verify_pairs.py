"""What the tests of `paceline verify` share: a tiny pair, a drafter that guesses well, and verifiers that are wrong."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, Literal

import pytest
import torch

import paceline.engine.step
from paceline.bench.workloads.prompts import Prompt
from paceline.core.sampling import Law
from paceline.core.types import EMPTY_PROPOSAL, Proposal, Verdict
from paceline.drafter.base import Drafter
from paceline.engine.engine import Engine
from paceline.target.base import Target
from paceline.testing import tiny_drafter, tiny_target

BASE = 2**31
"""Two tokens travel from a wrong law to a wrong judge as one number."""


def silent(stage: str, done: int, total: int) -> None:
    """Shows no progress."""


def prompts(count: int) -> list[Prompt]:
    """Returns short prompts, no two alike."""
    return [
        Prompt(f"p{i}", (3 + i % 50, 4 + i // 50, 5), f"{3 + i % 50} {4 + i // 50} 5") for i in range(count)
    ]


class TinyPair:
    """A tiny float64 target and a drafter; what the checks ask of `LLM`."""

    def __init__(self, drafter: Callable[[Target], Drafter] = tiny_drafter, *, vocab_size: int = 61) -> None:
        self.target = tiny_target(vocab_size=vocab_size, max_positions=256)
        self.drafter = drafter(self.target)

    def new_engine(
        self,
        *,
        plain: bool = False,
        tree_nodes: int | Literal["auto"] | None = "auto",
        max_sequences: int | None = None,
        keyed_drafts: bool = True,
    ) -> Engine:
        """Returns an engine over the pair."""
        return Engine(
            self.target,
            None if plain else self.drafter,
            max_sequences=max_sequences or 8,
            keyed_drafts=keyed_drafts,
        )


# Wrong verifiers -----------------------------------------------------------------------------------------------------


def accept_top_two(patch: pytest.MonkeyPatch) -> None:
    """Lets a draft stand when it is one of the target's two likeliest tokens."""

    def second(law: Law, scores_RV: torch.Tensor) -> torch.Tensor:
        return scores_RV.topk(2, dim=-1).indices[:, 1]

    def accepts(child: int, said: int, other: int) -> bool:
        return child in (said, other)

    _install(patch, second, accepts, replaces=False)


def forget_the_residual(patch: pytest.MonkeyPatch) -> None:
    """Draws anew from the whole distribution where a draft was refused, rather than from what is left of it."""
    rng = torch.Generator().manual_seed(5)

    def redraw(law: Law, scores_RV: torch.Tensor) -> torch.Tensor:
        if law.params.is_greedy:
            return scores_RV.argmax(dim=-1)
        return torch.multinomial(law.shape(scores_RV).softmax(dim=-1), 1, generator=rng)[:, 0]

    _install(patch, redraw, lambda child, said, other: child == said, replaces=True)


def accept_some_refused(patch: pytest.MonkeyPatch, share: float = 0.1) -> None:
    """Lets a refused draft stand now and then."""
    rng = random.Random(5)
    _install(
        patch,
        lambda law, scores_RV: scores_RV.argmax(dim=-1),
        lambda child, said, other: child == said or rng.random() < share,
        replaces=False,
    )


def _install(
    patch: pytest.MonkeyPatch,
    other_token: Callable[[Law, torch.Tensor], torch.Tensor],
    accepts: Callable[[int, int, int], bool],
    *,
    replaces: bool,
) -> None:
    """Puts a verifier into the engine that knows a second token for each row.

    Args:
        other_token: the second token of each row, from adjusted logits.
        accepts: whether a draft stands: the draft, the token said, the second token.
        replaces: the second token is emitted where no draft of several was accepted.
    """
    choose = Law.choose

    def choose_both(
        law: Law,
        logits_RV: torch.Tensor,
        tokens: Any,
        proposal: Proposal = EMPTY_PROPOSAL,
        legal_RV: Any = None,
    ) -> torch.Tensor:
        said = choose(law, logits_RV, tokens, proposal, legal_RV)
        return said * BASE + other_token(law, law.adjust(logits_RV, tokens, proposal, legal_RV))

    def judge(proposal: Proposal, said: Sequence[int]) -> Verdict:
        path: list[int] = [0]
        tokens: list[int] = []
        while True:
            row = path[-1]
            token, other = divmod(said[row], BASE)
            children = [node for node, parent in enumerate(proposal.parents) if parent == row]
            chosen = next((c for c in children if accepts(proposal.tokens[c], token, other)), None)
            if chosen is None:
                return Verdict(tuple(path), (*tokens, other if replaces and children else token))
            path.append(chosen + 1)
            tokens.append(proposal.tokens[chosen])

    patch.setattr(Law, "choose", choose_both)
    patch.setattr(paceline.engine.step, "judge", judge)
