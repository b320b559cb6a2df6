"""`bench.exactness.losslessness` end to end on tiny pairs: a wrong verifier meets the check made for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

import verify_pairs
from paceline.bench.exactness.checks import Check
from paceline.bench.exactness.forcing import at_limit, law_of, measure_draws, measure_gaps
from paceline.bench.exactness.losslessness import Settings, draw, law_checks, sampled_checks, verify_pair
from paceline.bench.exactness.recorder import Block, RecordingDrafter, favourites
from paceline.bench.exactness.texts import decode, greedy_requests, sampled_requests
from paceline.core.errors import ConfigError
from paceline.core.params import Grammar, SamplingParams
from paceline.core.sampling import Law
from paceline.core.types import EMPTY_PROPOSAL, Completion, Proposal, Request
from paceline.engine.engine import Engine
from paceline.target.base import VerifyRows
from paceline.testing import BigramDrafter, Memory, run_checked, tiny_target
from test_verify_statistics import nominal
from verify_pairs import TinyPair, prompts, silent

PARAMS = SamplingParams(max_new_tokens=24, temperature=1.0, seed=7, ignore_eos=True)
BUSY = SamplingParams(
    max_new_tokens=30,
    temperature=0.8,
    top_p=0.9,
    top_k=20,
    repetition_penalty=1.3,
    presence_penalty=0.4,
    frequency_penalty=0.2,
    logit_bias={5: 3.0},
    bad_words=((9, 9), (11,)),
    min_new_tokens=4,
    seed=7,
)


def examine(pair: TinyPair, settings: Settings, count: int) -> dict[str, Check]:
    return {check.name: check for check in verify_pair(pair, prompts(count), settings, silent)}


@pytest.mark.parametrize("params", [PARAMS, BUSY], ids=["plain", "every option"])
def test_an_exact_pair_passes(params: SamplingParams) -> None:
    checks = examine(TinyPair(), Settings(params, block_sizes=(2, 4), batch_sizes=(3,)), 10)
    assert {check.status for check in checks.values()} == {"ok"}, checks
    for name in ("plain_control", "identical_texts", "seeded_texts", "invariance"):
        assert checks[name].statistic == 1.0
    num_positions = checks["ties"].details["num_positions"]
    assert checks["ties"].bound == 3 / num_positions
    assert {name for name, check in checks.items() if check.p_value is not None} == {
        "surprise",
        "uniformity",
        "directed",
    }


# Wrong verifiers


def test_accepting_the_second_likeliest_token_is_found_at_temperature_0(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    verify_pairs.accept_top_two(monkeypatch)
    pair = TinyPair(BigramDrafter)
    checks = examine(pair, Settings(replace(PARAMS, temperature=0.0), block_sizes=(2,)), 16)
    assert checks["plain_control"].status == "ok"
    assert [checks[name].status for name in ("ties", "identical_texts", "invariance")] == ["flagged"] * 3
    assert checks["seeded_texts"].status == "not run"
    case, first = checks["ties"].details["flagged"][0], checks["identical_texts"].details["first_divergence"]
    assert case["gap"] > 1000 * case["tolerance"] and case["best"] != case["emitted"]
    assert first["expected"] != first["got"] and not first["is_tie"]
    assert checks["ties"].bound > 3 / checks["ties"].details["num_positions"]


@pytest.mark.parametrize(
    ("wrong", "is_tree"),
    [
        (verify_pairs.forget_the_residual, False),
        (verify_pairs.accept_some_refused, False),
        (verify_pairs.accept_some_refused, True),
    ],
    ids=["no residual", "relaxed", "relaxed tree"],
)
def test_a_leak_of_drafts_is_found_by_the_directed_score(
    wrong: Callable[[pytest.MonkeyPatch], None], is_tree: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong(monkeypatch)
    pair = TinyPair(lambda target: BigramDrafter(target, is_tree=is_tree))
    settings = Settings(PARAMS, batch_size=48)
    checks = {check.name: check for check in sampled_checks(pair, prompts(48), settings, silent)}
    assert checks["directed"].p_value is not None and checks["directed"].p_value < 1e-3
    assert checks["directed"].statistic is not None and checks["directed"].statistic > 0
    assert checks["seeded_ties"].status == checks["seeded_texts"].status == "flagged"


def test_the_report_names_what_was_flagged(monkeypatch: pytest.MonkeyPatch) -> None:
    verify_pairs.accept_some_refused(monkeypatch, 0.5)
    checks = examine(TinyPair(), Settings(PARAMS), 16)
    flagged = {name for name, check in checks.items() if check.status == "flagged"}
    assert flagged >= {"identical_texts", "ties", "seeded_texts", "seeded_ties", "directed", "surprise"}
    assert checks["directed"].p_adjusted is not None and checks["directed"].p_adjusted <= 0.01


# Teacher forcing


@pytest.mark.parametrize("params", [replace(BUSY, temperature=0.0), BUSY], ids=["greedy", "sampled"])
def test_the_engines_own_text_has_no_gaps_and_another_token_has_one(params: SamplingParams) -> None:
    target = tiny_target(max_positions=256)
    request = Request("a", (3, 4, 5), params)
    text = run_checked(Engine(target), [request])["a"].token_ids
    gaps = measure_gaps(target, request, text)
    assert gaps.gap == [0.0] * len(text) and gaps.best == list(text)
    changed = (*text[:9], (text[9] + 1) % 61, *text[10:])
    assert measure_gaps(target, request, changed).flagged[0] == 9
    forbidden = (*text[:9], 11, *text[10:])
    assert measure_gaps(target, request, forbidden).gap[9] == float("inf")
    assert 9 in measure_gaps(target, request, forbidden).flagged


def test_rounding_steps_decide_what_is_a_tie() -> None:
    target, request = tiny_target(), Request("a", (3, 4, 5), SamplingParams(max_new_tokens=4))
    text = run_checked(Engine(target), [request])["a"].token_ids
    changed = (*text[:-1], (text[-1] + 1) % 61)
    strict, loose = (measure_gaps(target, request, changed, steps) for steps in (64.0, 1e18))
    assert strict.flagged == [3] and strict.num_ties == 0
    assert loose.flagged == [] and loose.num_ties == 1


def test_moments_and_ranks_are_those_of_the_law() -> None:
    target = tiny_target()
    request = Request("a", (3, 4, 5), replace(PARAMS, max_new_tokens=1, top_k=5))
    session = target.open(3)
    (output,) = target.verify([VerifyRows(session, (3, 4, 5), EMPTY_PROPOSAL)])
    law = law_of(request, target.spec).log_probs(output.logits[-1:], (3, 4, 5))[0]
    probs, order = law.exp(), law.argsort(descending=True).tolist()
    entropy = float(-(probs[probs > 0] * law[probs > 0]).sum())
    draws = measure_draws(target, request, [order[1]], [order[0]], np.random.default_rng(0))
    assert draws.moments.observed == pytest.approx(-float(law[order[1]]))
    assert draws.moments.expected == pytest.approx(entropy)
    spread = probs[probs > 0] * (-law[probs > 0] - entropy) ** 2
    assert draws.moments.variance == pytest.approx(float(spread.sum()))
    share = np.random.default_rng(0).random(1)[0]
    assert draws.transforms[0] == pytest.approx(float(probs[order[0]] + share * probs[order[1]]))
    assert draws.favourite_probs[0] == pytest.approx(float(probs[order[0]]))
    assert draws.favourite_hits.tolist() == [False]
    impossible = measure_draws(target, request, [order[30]], [None], np.random.default_rng(0))
    assert impossible.num_impossible == 1 and impossible.moments.num_positions == 0
    assert [check.status for check in law_checks(impossible, 0.01)] == [
        "flagged",
        "not run",
        "not run",
        "not run",
    ]


def test_a_token_at_a_filters_limit_is_not_held_against_the_text() -> None:
    target = tiny_target()
    request = Request("a", (3, 4, 5), replace(PARAMS, max_new_tokens=1, top_k=5))
    law = law_of(request, target.spec)
    scores = torch.tensor([[5.0, 4.0, 3.0, 2.0, 1.0, 1.0 - 1e-9, 0.0, -torch.inf]], dtype=torch.float64)
    near = at_limit(law, scores, torch.tensor([1e-6]))
    assert near[0].tolist() == [False, False, False, False, True, True, False, False]
    assert not at_limit(law, scores[:, :5], torch.tensor([1e-6])).any()


# Recorded drafts


def test_favourites_follow_the_emitted_path() -> None:
    text = Completion("a", (1, 2), (10, 11, 12, 20, 21), "", "length")
    tree = Proposal((11, 12, 13, 12, 30), (0, 0, 1, 1, 4))  # the anchor is token 10, position 2
    blocks = [Block(3, tree), Block(5, Proposal.chain((9, 21))), Block(6, Proposal())]
    assert favourites(text, blocks) == [None, 11, 13, 9, None]
    assert favourites(text, [Block(3, Proposal.chain((11, 12, 20, 8, 7)))]) == [None, 11, 12, 20, 8]
    assert favourites(text, []) == [None] * 5


def test_recording_changes_no_text_and_keeps_every_block() -> None:
    pair, requests = TinyPair(BigramDrafter), sampled_requests(prompts(5), PARAMS)
    plain = decode(pair.new_engine(plain=True, max_sequences=2), requests, "", silent)
    engine = pair.new_engine(max_sequences=2, keyed_drafts=False)
    assert engine.drafter is not None
    recorder = engine.drafter = RecordingDrafter(engine.drafter)
    texts = decode(engine, requests, "", silent)
    assert [text.token_ids for text in texts] == [text.token_ids for text in plain]
    for text, blocks in zip(texts, recorder.texts, strict=True):
        assert [block.position for block in blocks] == [step.position for step in text.steps]
        liked = favourites(text, blocks)
        hits = sum(token == emitted for token, emitted in zip(liked, text.token_ids, strict=True))
        assert (
            hits >= sum(step.num_accepted for step in text.steps) - 3
        )  # the last step may hang over the end


def test_drafts_do_not_see_the_draws_that_they_are_tested_against() -> None:
    seen: list[bool] = []

    class Watched(BigramDrafter):
        def draft(
            self,
            anchors: Sequence[int],
            contexts: Sequence[Memory],
            num_draft_tokens: int,
            laws: Sequence[Law] | None = None,
        ) -> list[Proposal]:
            seen.append(laws is not None)
            return super().draft(anchors, contexts, num_draft_tokens)

    pair, requests = TinyPair(Watched), sampled_requests(prompts(2), PARAMS)
    draw(pair, requests, 2, silent)
    assert seen and not any(seen)
    decode(pair.new_engine(), requests, "", silent)
    assert seen[-1], "the check itself must be able to see a keyed draft"


# Settings


def test_seeds_differ_between_prompts_and_samples_share_theirs() -> None:
    requests = sampled_requests(prompts(2), replace(PARAMS, seed=2**63 - 1), 2)
    assert [r.params.seed for r in requests] == [2**63 - 1, 2**63 - 1, 0, 0]
    assert [r.sample_index for r in requests] == [0, 1, 0, 1]
    assert len({r.id for r in requests}) == 4
    assert all(r.params.is_greedy for r in greedy_requests(prompts(2), PARAMS))


def test_settings_refuse_what_cannot_be() -> None:
    for wrong in (
        {"alpha": 0.0},
        {"alpha": 1.0},
        {"batch_sizes": (0,)},
        {"rounding_steps": 0.0},
        {"num_samples": 0},
    ):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            Settings(**wrong)
    with pytest.raises(ConfigError, match="grammar"):
        Settings(SamplingParams(grammar=Grammar("regex", "a")))
    with pytest.raises(ConfigError, match="id of its own"):
        verify_pair(TinyPair(), prompts(1) * 2, Settings(PARAMS), silent)


# False alarms


def test_p_values_of_exact_texts_are_uniform() -> None:
    pair, num_runs, per_run = TinyPair(BigramDrafter), 60, 5
    p_values: dict[str, list[float]] = {}
    for run in range(num_runs):
        requests = sampled_requests(prompts(per_run), replace(PARAMS, seed=1000 * run, max_new_tokens=32))
        for check in law_checks(draw(pair, requests, per_run, silent), 0.01):
            if check.p_value is not None:
                p_values.setdefault(check.name, []).append(check.p_value)
    assert {name: len(values) for name, values in p_values.items()} == dict.fromkeys(
        ("surprise", "uniformity", "directed"), num_runs
    )
    for values in p_values.values():
        nominal(values, 0.1)
