"""Log-probabilities: those of plain decoding and of a direct softmax, whatever drafted, one for each token."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from paceline.core.params import SamplingParams
from paceline.core.sampling import Law
from paceline.core.types import EMPTY_PROPOSAL, Completion, Request, TokenDelta, TokenLogprobs
from paceline.drafter.base import Drafter
from paceline.engine import tree
from paceline.engine.engine import Engine
from paceline.target.base import VerifyRows
from paceline.target.native import NativeTarget
from paceline.testing import ConstantDrafter, OracleDrafter, TreeDrafter, tiny_drafter, tiny_target, whole

VOCAB = 61
PROMPTS = ((3, 1, 4), (15, 9), (2, 6, 5, 35))
SHAPES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy, penalised": {"repetition_penalty": 1.4, "frequency_penalty": 0.5, "bad_words": ((3,), (5, 7))},
    "sampled": {"temperature": 1.1},
    "sampled, filtered": {"temperature": 0.8, "top_k": 9, "top_p": 0.9, "presence_penalty": 0.7},
}


@cache
def target() -> NativeTarget:
    return tiny_target(vocab_size=VOCAB, max_positions=64)


def requests(mode: str, shape: str, logprobs: int = 4) -> list[Request]:
    params = SamplingParams(
        max_new_tokens=11,
        seed=5,
        ignore_eos=True,
        logprobs=logprobs,
        logprobs_mode=mode,  # type: ignore[arg-type]
        **SHAPES[shape],
    )
    return [Request(str(i), prompt, params) for i, prompt in enumerate(PROMPTS)]


def decode(
    drafter: Drafter | None, made: Sequence[Request], max_sequences: int = 2
) -> tuple[list[Completion], list[TokenDelta]]:
    engine, deltas = Engine(target(), drafter, max_sequences=max_sequences), []
    for request in made:
        engine.add(request)
    while engine.has_work:
        deltas += engine.step()
    return [engine.take_completion(request.id) for request in made], deltas


def entries(completion: Completion) -> tuple[TokenLogprobs, ...]:
    assert completion.logprobs is not None
    return completion.logprobs


def logits_before(tokens: Sequence[int]) -> torch.Tensor:
    """Returns the target's logits (1, V) behind some tokens."""
    session = target().open(len(tokens))
    (output,) = target().verify([VerifyRows(session, tokens, EMPTY_PROPOSAL, last_row_only=True)])
    session.close()
    return output.logits


def direct(
    mode: str, request: Request, completion: Completion
) -> list[tuple[float, list[tuple[int, float]]]]:
    """Returns chosen and top log-probabilities, one token after the other."""
    tokens, found = whole(completion), []
    for end in range(len(request.prompt_ids), len(tokens)):
        logits = logits_before(tokens[:end])
        if mode == "processed":
            law = Law(request.params, VOCAB, num_prompt_tokens=len(request.prompt_ids))
            logits = law.adjust(logits, tokens[:end])
            logits = logits if request.params.is_greedy else law.shape(logits)
        row = logits[0].tolist()
        total = math.log(sum(math.exp(x - max(row)) for x in row)) + max(row)
        best = sorted(((x - total, token) for token, x in enumerate(row) if x > -math.inf), reverse=True)
        top = [(token, x) for x, token in best[: request.params.logprobs or 0]]
        found.append((row[tokens[end]] - total, top))
    return found


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mode", ["raw", "processed"])
@pytest.mark.parametrize("kind", ["plain", "oracle", "random trees", "dflash", "dflash trees"])
def test_they_are_those_of_a_direct_softmax(mode: str, shape: str, kind: str) -> None:
    made = requests(mode, shape)
    plain, _ = decode(None, made, max_sequences=1)
    texts = [whole(completion) for completion in plain]
    drafter: Drafter | None = {
        "plain": lambda: None,
        "oracle": lambda: OracleDrafter(5, texts),
        "random trees": lambda: TreeDrafter(9, texts, VOCAB),
        "dflash": lambda: tiny_drafter(target(), 4),
        "dflash trees": lambda: tree.TreeDrafter(tiny_drafter(target(), 4), 6),
    }[kind]()  # type: ignore[no-untyped-call]
    completions, deltas = decode(drafter, made)
    for request, expected, got in zip(made, plain, completions, strict=True):
        assert got.token_ids == expected.token_ids
        assert len(entries(got)) == len(got.token_ids)
        streamed = [delta for delta in deltas if delta.request_id == request.id]
        assert tuple(entry for delta in streamed for entry in delta.logprobs) == entries(got)
        assert all(len(delta.logprobs) == len(delta.token_ids) for delta in streamed)
        for entry, token, (logprob, top) in zip(
            entries(got), got.token_ids, direct(mode, request, expected), strict=True
        ):
            assert entry.token_id == token
            assert entry.logprob == pytest.approx(logprob, abs=1e-9)
            assert [token for token, _ in entry.top] == [token for token, _ in top]
            assert [x for _, x in entry.top] == pytest.approx([x for _, x in top], abs=1e-9)


def test_a_filter_shows_in_processed_ones_only() -> None:
    filtered = {"temperature": 1.0, "top_k": 2, "logit_bias": {7: 100.0}}
    for mode, num_top in (("raw", 4), ("processed", 2)):
        params = SamplingParams(6, seed=1, logprobs=4, logprobs_mode=mode, ignore_eos=True, **filtered)  # type: ignore[arg-type]
        ((completion,), _) = decode(None, [Request("a", (1, 2), params)])
        assert completion.token_ids == (7,) * 6
        for entry in entries(completion):
            assert len(entry.top) == num_top, "what has no probability is left out"
            assert (entry.logprob > -1e-9) == (mode == "processed")
            assert all(math.isfinite(x) for _, x in entry.top)


def test_at_temperature_zero_processed_ones_come_before_the_maximum_is_taken() -> None:
    (request,) = requests("processed", "greedy", logprobs=1)[:1]
    ((completion,), _) = decode(None, [request])
    for entry in entries(completion):
        assert entry.top == ((entry.token_id, entry.logprob),)
        assert entry.logprob < -1e-6


@pytest.mark.parametrize("values", [{"stop_token_ids": (17,)}, {"max_new_tokens": 3}])
def test_there_are_never_more_than_tokens(values: dict[str, Any]) -> None:
    """The text ends inside a block whose drafts stand beyond the end."""
    (request,) = requests("raw", "greedy", logprobs=2)[:1]
    ((text,), _) = decode(None, [request])
    known = text.token_ids
    if "stop_token_ids" in values:
        values = {"stop_token_ids": (known[3],)}
    ended = replace(request, params=replace(request.params, **values))
    ((completion,), deltas) = decode(OracleDrafter(9, [whole(text)]), [ended])
    end = known.index(known[3]) + 1 if "stop_token_ids" in values else 3
    assert completion.token_ids == known[:end]
    for entry, expected in zip(entries(completion), entries(text)[:end], strict=True):
        assert entry.token_id == expected.token_id
        assert entry.logprob == pytest.approx(expected.logprob, abs=1e-9)
    assert sum(len(delta.logprobs) for delta in deltas) == end


def test_a_cancelled_text_has_its_own() -> None:
    engine = Engine(target(), ConstantDrafter(4, 7))
    engine.add(requests("raw", "greedy")[0])
    engine.step()
    engine.cancel("0")
    completion = engine.take_completion("0")
    assert len(entries(completion)) == len(completion.token_ids) > 0
    engine.add(requests("raw", "greedy")[0])
    engine.cancel("0")  # while it waits
    assert engine.take_completion("0").token_ids == ()


def test_who_does_not_ask_gets_none() -> None:
    ((completion,), deltas) = decode(tiny_drafter(target(), 4), [Request("a", (1, 2), SamplingParams(5))])
    assert completion.logprobs is None and completion.to_dict()["logprobs"] is None
    assert all(delta.logprobs == () for delta in deltas)


def test_zero_gives_the_chosen_token_alone() -> None:
    (completion, *_), _ = decode(None, requests("raw", "sampled", logprobs=0))
    assert all(entry.top == () and entry.logprob < 0 for entry in entries(completion))


def test_a_small_vocabulary_has_fewer_than_asked() -> None:
    model = tiny_target(vocab_size=5, num_layers=1)
    engine = Engine(model)
    engine.add(Request("a", (1,), SamplingParams(2, logprobs=20, ignore_eos=True)))
    while engine.has_work:
        engine.step()
    for entry in entries(engine.take_completion("a")):
        assert sorted(token for token, _ in entry.top) == [0, 1, 2, 3, 4]
        assert sum(math.exp(x) for _, x in entry.top) == pytest.approx(1.0)


def test_their_shape_in_json() -> None:
    (completion, *_), _ = decode(None, requests("raw", "greedy", logprobs=2))
    written = json.loads(json.dumps(completion.to_dict(), allow_nan=False))["logprobs"]
    assert len(written) == 11
    first = entries(completion)[0]
    assert written[0] == {
        "token_id": first.token_id,
        "logprob": first.logprob,
        "top": [list(pair) for pair in first.top],
    }
