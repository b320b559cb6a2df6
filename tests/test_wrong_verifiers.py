"""The test of the test: verifiers that are wrong in a plausible way must be found by the proof of losslessness."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from paceline.core import sampling
from paceline.core.sampling import Law
from paceline.core.types import Proposal, Verdict
from paceline.core.verification import judge
from paceline.drafter.base import Drafter
from paceline.engine import step as engine_step
from paceline.testing import assert_lossless, plain_texts
from test_losslessness import DRAFTERS, sampled, target, texts_of

said_honestly, show_honestly, choose_honestly = engine_step._said, engine_step._show, Law.choose
noise_honestly, counts_honestly = Law._noise_rows, sampling._counts


def accepts_top_2(patch: pytest.MonkeyPatch) -> None:
    """A draft stands when it is one of the two likeliest tokens."""
    likely: list[list[list[int]]] = []

    def choose(law: Law, logits: torch.Tensor, *row: Any) -> torch.Tensor:
        likely.append(logits.topk(2).indices.tolist())
        return choose_honestly(law, logits, *row)

    def lenient(proposal: Proposal, said: Sequence[int]) -> Verdict:
        rows = zip(proposal.tokens, said, likely[-1], strict=False)
        return judge(proposal, [*(t if t in top else s for t, s, top in rows), said[-1]])

    patch.setattr(Law, "choose", choose)
    patch.setattr(engine_step, "judge", lenient)


def keeps_one_row_more(patch: pytest.MonkeyPatch) -> None:
    """The first refused draft's K/V stay."""

    def greedy(proposal: Proposal, said: Sequence[int]) -> Verdict:
        verdict = judge(proposal, said)
        refused = len(proposal.tokens) > verdict.num_accepted
        return replace(verdict, path=(*verdict.path, verdict.path[-1] + 1)) if refused else verdict

    patch.setattr(engine_step, "judge", greedy)


def keeps_the_next_row(patch: pytest.MonkeyPatch) -> None:
    """The right number of a tree's rows, the last one wrong; only the text can tell."""

    def beside(proposal: Proposal, said: Sequence[int]) -> Verdict:
        verdict = judge(proposal, said)
        refused = len(proposal.tokens) > verdict.num_accepted
        return replace(verdict, path=(*verdict.path[:-1], verdict.path[-1] + 1)) if refused else verdict

    patch.setattr(engine_step, "judge", beside)


def samples_one_position_late(patch: pytest.MonkeyPatch) -> None:
    """Passes of several rows use the randomness of the next position."""

    def late(law: Law, positions: Sequence[int], device: torch.device) -> torch.Tensor:
        return noise_honestly(law, [p + int(len(positions) > 1) for p in positions], device)

    patch.setattr(Law, "_noise_rows", late)


def counts_rows_as_positions(patch: pytest.MonkeyPatch) -> None:
    """A tree's rows use the randomness of a chain."""

    def in_a_row(law: Law, positions: Sequence[int], device: torch.device) -> torch.Tensor:
        return noise_honestly(law, range(positions[0], positions[0] + len(positions)), device)

    patch.setattr(Law, "_noise_rows", in_a_row)


def forgets_the_drafts(patch: pytest.MonkeyPatch) -> None:
    """Penalties count what was committed, not the drafts that a row stands behind."""

    def committed(
        tokens: Sequence[int], proposal: Proposal, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ids, counts = counts_honestly(tokens, proposal, device)
        return ids, counts[:1].expand(len(counts), -1)

    patch.setattr(sampling, "_counts", committed)


def drops_the_bonus_token(patch: pytest.MonkeyPatch) -> None:
    """A step that accepted drafts commits them alone."""

    def short(proposal: Proposal, said: Sequence[int]) -> Verdict:
        verdict = judge(proposal, said)
        return replace(verdict, tokens=verdict.tokens[: max(1, verdict.num_accepted)])

    patch.setattr(engine_step, "judge", short)


def commits_the_refused_draft(patch: pytest.MonkeyPatch) -> None:
    """The first draft that was refused takes the place of the target's own token."""

    def generous(proposal: Proposal, said: Sequence[int]) -> Verdict:
        verdict = judge(proposal, said)
        refused = proposal.tokens[verdict.num_accepted : verdict.num_accepted + 1]
        return replace(verdict, tokens=verdict.tokens[:-1] + refused) if refused else verdict

    patch.setattr(engine_step, "judge", generous)


def takes_trees_for_chains(patch: pytest.MonkeyPatch) -> None:
    """Every node is judged as the child of the one before it."""
    patch.setattr(engine_step, "judge", lambda proposal, said: judge(Proposal.chain(proposal.tokens), said))


def forgets_a_hidden_row(patch: pytest.MonkeyPatch) -> None:
    """The drafter is not shown the last row that was kept."""

    class Forgetful:
        def __init__(self, drafter: Drafter) -> None:
            self.drafter = drafter

        def inject(
            self, contexts: Sequence[Any], hidden: Sequence[torch.Tensor], tokens: Sequence[Sequence[int]]
        ) -> None:
            self.drafter.inject(contexts, [rows[:-1] for rows in hidden], [ids[:-1] for ids in tokens])

    def show(blocks: Any, outputs: Any, verdicts: Any, drafter: Drafter | None) -> None:
        show_honestly(blocks, outputs, verdicts, drafter and Forgetful(drafter))  # type: ignore[arg-type]

    patch.setattr(engine_step, "_show", show)


def mixes_up_a_batch(patch: pytest.MonkeyPatch) -> None:
    """Two sequences of a batch hear each other's tokens."""
    patch.setattr(engine_step, "_said", lambda *step: said_honestly(*step)[::-1])


FAULTS = [
    (accepts_top_2, "random", 5, 0.0),
    (keeps_one_row_more, "always wrong", 61, 0.0),
    (keeps_the_next_row, "trees", 61, 0.0),
    (samples_one_position_late, "oracle", 61, 1.0),
    (counts_rows_as_positions, "trees", 61, 1.0),
    (drops_the_bonus_token, "oracle", 61, 0.0),
    (commits_the_refused_draft, "always wrong", 61, 0.0),
    (takes_trees_for_chains, "siblings", 61, 0.0),
    (forgets_a_hidden_row, "oracle", 61, 0.0),
    (mixes_up_a_batch, "mask", 61, 0.0),
    (forgets_the_drafts, "oracle", 61, 1.0),
]


@pytest.mark.parametrize(
    ("fault", "kind", "vocab_size", "temperature"), FAULTS, ids=[fault.__name__ for fault, *_ in FAULTS]
)
def test_a_wrong_verifier_is_found(
    fault: Callable[[pytest.MonkeyPatch], None],
    kind: str,
    vocab_size: int,
    temperature: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = target(vocab_size)
    made = [
        replace(
            request,
            prompt_ids=tuple(token % vocab_size for token in request.prompt_ids),
            params=replace(request.params, frequency_penalty=2.0 if fault is forgets_the_drafts else 0.0),
        )
        for request in sampled(2, temperature=temperature)
    ]
    texts = texts_of(plain_texts(model, made))

    def prove() -> None:
        drafter = DRAFTERS[kind](model, 6, texts, 0)
        assert_lossless(model, drafter, made, max_sequences=2 if fault is mixes_up_a_batch else 1)

    prove()
    fault(monkeypatch)
    assert texts_of(plain_texts(model, made[:1])) == texts[:1], "the fault must not show in plain decoding"
    with pytest.raises(AssertionError):
        prove()
