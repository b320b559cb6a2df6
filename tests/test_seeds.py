"""A seed is a text: whatever drafts, beside whatever else, and each of several texts alone; no seed is fresh chance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch

from paceline.core.errors import ConfigError, RequestError
from paceline.core.noise import gumbel_row
from paceline.core.params import SamplingParams
from paceline.core.sampling import Law
from paceline.core.types import EMPTY_PROPOSAL, Completion, Proposal, Request
from paceline.drafter.base import Drafter
from paceline.engine import tree
from paceline.engine.engine import Engine
from paceline.target.base import VerifyRows
from paceline.target.native import NativeTarget
from paceline.testing import (
    ConstantDrafter,
    Memory,
    OracleDrafter,
    RandomDrafter,
    plain_texts,
    run_checked,
    tiny_drafter,
    tiny_target,
    whole,
)

VOCAB = 61
SAMPLED = SamplingParams(12, temperature=1.0, seed=3, ignore_eos=True)


@cache
def target() -> NativeTarget:
    return tiny_target(vocab_size=VOCAB, max_positions=64)


def decode(drafter: Drafter | None, made: Sequence[Request], **options: bool | int) -> list[Completion]:
    """Returns all completions, those of a request's several texts in a row."""
    engine = Engine(target(), drafter, **options)  # type: ignore[arg-type]
    ids = [name for request in made for name in engine.add(request)]
    while engine.has_work:
        engine.step()
    return [engine.take_completion(name) for name in ids]


def texts(completions: Sequence[Completion]) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in completions]


DRAFTERS: dict[str, Callable[[], Drafter | None]] = {
    "none": lambda: None,
    "blocks of 2": lambda: tiny_drafter(target(), 2),
    "blocks of 6": lambda: tiny_drafter(target(), 6, seed=1),
    "trees of 3": lambda: tree.TreeDrafter(tiny_drafter(target(), 4), 3),
    "trees of 12": lambda: tree.TreeDrafter(tiny_drafter(target(), 4), 12),
    "random": lambda: RandomDrafter(5, VOCAB),
    "one token": lambda: ConstantDrafter(5, 7),
}


@pytest.mark.parametrize("keyed_drafts", [True, False])
@pytest.mark.parametrize("kind", DRAFTERS)
def test_a_seed_is_a_text(kind: str, keyed_drafts: bool) -> None:
    made = [
        Request(str(i), prompt, replace(SAMPLED, seed=i, **shape))  # type: ignore[arg-type]
        for i, (prompt, shape) in enumerate(
            [
                ((3, 1, 4), {}),
                ((3, 1, 4), {"temperature": 0.5, "top_p": 0.8}),
                ((15, 9), {"temperature": 0.0}),
                (
                    (2, 6, 5),
                    {"temperature": 2.0, "repetition_penalty": 1.2, "frequency_penalty": 0.4, "n": 2},
                ),
            ]
        )
    ]
    alone = texts([c for request in made for c in decode(None, [request], max_sequences=1)])
    assert len(set(alone)) == 5
    for max_sequences in (1, 3, 8):
        together = decode(DRAFTERS[kind](), made, max_sequences=max_sequences, keyed_drafts=keyed_drafts)
        assert texts(together) == alone
    assert texts(decode(DRAFTERS[kind](), made[::-1]))[-1] == alone[0]


def test_several_texts_are_the_samples_of_one_seed() -> None:
    request = Request("a", (3, 1, 4), replace(SAMPLED, n=4))
    several = decode(tiny_drafter(target(), 4), [request])
    assert [c.request_id for c in several] == ["a#0", "a#1", "a#2", "a#3"]
    assert [c.sample_index for c in several] == [0, 1, 2, 3]
    assert len(set(texts(several))) == 4
    for i, completion in enumerate(several):
        (single,) = decode(None, [Request("alone", (3, 1, 4), SAMPLED, sample_index=i)])
        assert single.token_ids == completion.token_ids
        assert single.sample_index == single.to_dict()["sample_index"] == i
    (first,) = decode(None, [Request("a", (3, 1, 4), SAMPLED)])
    assert first.token_ids == several[0].token_ids, "one text is the first of several"


def test_samples_share_a_seed_that_is_drawn_where_none_is_given() -> None:
    request = Request("a", (1,), SamplingParams(temperature=1.0, n=3), block_size=2)
    first, second = request.samples(), request.samples()
    assert len({sample.params.seed for sample in first}) == 1
    assert first[0].params.seed != second[0].params.seed
    assert [(s.id, s.sample_index, s.params.n, s.block_size) for s in first] == [
        ("a#0", 0, 1, 2),
        ("a#1", 1, 1, 2),
        ("a#2", 2, 1, 2),
    ]
    lonely = replace(request, params=SamplingParams(temperature=1.0))
    assert lonely.samples() == [lonely]


def test_several_texts_are_queued_all_or_none() -> None:
    engine = Engine(target(), max_sequences=1)
    engine.add(Request("a#1", (1,), SAMPLED))
    with pytest.raises(RequestError, match="'a#1' is already waiting or running"):
        engine.add(Request("a", (1,), replace(SAMPLED, n=3)))
    assert [request.id for request in engine.scheduler.waiting] == ["a#1"]
    assert engine.add(Request("b", (1,), replace(SAMPLED, n=2))) == ["b#0", "b#1"]
    assert engine.cancel("b#0") and not engine.cancel("b")
    assert engine.take_completion("b#0").sample_index == 0
    engine.close()


def test_no_seed_is_fresh_chance() -> None:
    """For two requests at once, and for the same request again."""
    made = [Request(name, (3, 1, 4), replace(SAMPLED, seed=None, temperature=3.0)) for name in ("a", "b")]
    drafter = tiny_drafter(target(), 4)
    engine = Engine(target(), drafter)
    found = texts(list(run_checked(engine, made).values()))
    found += texts(list(run_checked(engine, made).values()))
    found += texts(decode(drafter, [replace(made[0], params=replace(made[0].params, n=3))]))
    assert len(set(found)) == 7


# Drafts that know the noise ------------------------------------------------------------------------------------------


class Twin(OracleDrafter):
    """Knows the target's logits all along the known text, and guesses from them as a drafter guesses from its own."""

    blur = 0.0

    def draft(
        self,
        anchors: Sequence[int],
        contexts: Sequence[Memory],
        num_draft_tokens: int,
        laws: Sequence[Law] | None = None,
    ) -> list[Proposal]:
        return [
            self._guess(memory, num_draft_tokens, laws[i] if laws else None)
            for i, memory in enumerate(contexts)
        ]

    def _guess(self, memory: Memory, num_draft_tokens: int, law: Law | None) -> Proposal:
        text = self._texts[memory.number]
        session = target().open(len(text))
        (output,) = target().verify([VerifyRows(session, text, EMPTY_PROPOSAL)])
        session.close()
        logits = output.logits[memory.length :][:num_draft_tokens]
        noise = torch.randn(logits.shape, generator=torch.Generator().manual_seed(memory.length))
        logits = logits + self.blur * noise
        guesses = logits if law is None else law.perturb(logits, memory.length + 1)
        return Proposal.chain(guesses.argmax(dim=-1).tolist())


def acceptance(completions: Sequence[Completion]) -> float:
    """Returns the share of drafts that stood, of those whose place the text reached."""
    steps = [step for completion in completions for step in completion.steps]
    return sum(s.num_accepted for s in steps) / sum(min(s.num_accepted + 1, s.num_drafted) for s in steps)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
def test_a_perfect_drafter_that_knows_the_noise_is_always_right(temperature: float) -> None:
    params = replace(SAMPLED, max_new_tokens=25, temperature=temperature)
    made = [Request(str(i), (3, 1, i), replace(params, seed=i)) for i in range(6)]
    plain = plain_texts(target(), made)
    known = [(*whole(completion), 0, 0, 0, 0, 0) for completion in plain]
    keyed = decode(Twin(5, known), made)
    blind = decode(Twin(5, known), made, keyed_drafts=False)
    assert texts(keyed) == texts(blind) == texts(plain)
    steps = [step for completion in keyed for step in completion.steps]
    assert all(step.num_accepted == step.num_drafted == 4 for step in steps)
    assert acceptance(keyed) == 1.0
    assert 0.0 < acceptance(blind) < 0.9


def test_the_noise_helps_a_drafter_that_is_only_near() -> None:
    """Logits that are a little off: still more drafts stand than with the right ones and no noise."""

    made = [Request(str(i), (3, 1, i), replace(SAMPLED, max_new_tokens=25, seed=i)) for i in range(6)]
    known = [(*whole(completion), 0, 0, 0, 0, 0) for completion in plain_texts(target(), made)]
    near = Twin(5, known)
    near.blur = 0.3
    blind = decode(Twin(5, known), made, keyed_drafts=False)
    assert acceptance(decode(near, made)) > acceptance(blind)


@pytest.mark.parametrize("reduced", [False, True])
def test_a_block_drafter_adds_the_noise_of_the_positions_it_drafts(reduced: bool) -> None:
    """Each sequence of a batch by its own law, a greedy one beside a sampled one."""
    drafter, ids = tiny_drafter(target(), 5), torch.arange(0, VOCAB, 3)
    if reduced:
        drafter.bind(target().heads, ids)
    contexts = [drafter.open(32), drafter.open(32)]
    rng = torch.Generator().manual_seed(0)
    hidden = [torch.randn(n, 2 * target().spec.hidden_size, generator=rng).double() for n in (9, 4)]
    drafter.inject(contexts, hidden)
    sampled = Law(replace(SAMPLED, temperature=1.4), VOCAB, seed=8, sample_index=2)
    laws = [sampled, Law(SamplingParams(), VOCAB)]
    logits = drafter.draft_logits([1, 2], contexts, 4)
    noise = torch.stack([gumbel_row(8, 2, position, VOCAB) for position in (10, 11, 12, 13)])
    noisy = torch.stack([logits[0] / 1.4 + (noise[:, ids] if reduced else noise), logits[1]])
    expected = noisy.argmax(dim=-1)
    expected = ids[expected] if reduced else expected
    assert expected.tolist() != drafter.draft_logits([1, 2], contexts, 4).argmax(dim=-1).tolist()
    drafts = drafter.draft([1, 2], contexts, 4, laws)
    assert [list(proposal.tokens) for proposal in drafts] == expected.tolist()
    log_probs, best = drafter.candidates([1, 2], contexts, 4, 99, laws)
    assert best[:, :, 0].tolist() == expected.tolist()
    torch.testing.assert_close(log_probs, noisy.log_softmax(-1).sort(descending=True).values)


def test_a_wrong_block_size_of_a_sample_is_refused_once() -> None:
    with pytest.raises(ConfigError, match="block_size: expected 1…4"):
        Engine(target(), ConstantDrafter(4, 7)).add(Request("a", (1,), replace(SAMPLED, n=2), block_size=9))
