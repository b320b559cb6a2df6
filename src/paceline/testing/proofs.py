"""The proof that a drafter changes no text, and that the invariant holds on the way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from paceline.core.errors import ConfigError
from paceline.core.types import Completion, Request, TokenDelta
from paceline.drafter.base import Drafter
from paceline.engine.engine import Engine
from paceline.target.base import Target


def run_checked(
    engine: Engine, requests: Sequence[Request], before_step: Callable[[int], None] = lambda _: None
) -> dict[str, Completion]:
    """Decodes requests to their end and returns the completions by id; the invariant is checked after every step.

    Args:
        before_step: told the number of the step to come, from 0; may cancel.

    Raises:
        AssertionError: an invariant does not hold, or deltas and completion disagree.
    """
    delivered: dict[str, list[TokenDelta]] = {request.id: [] for request in requests}
    try:
        for request in requests:
            engine.add(request)
        most = sum(len(request.prompt_ids) + request.params.max_new_tokens for request in requests)
        for number in range(most + 1):
            before_step(number)
            if not engine.has_work:
                break
            for delta in engine.step():
                delivered[delta.request_id].append(delta)
            for sequence in engine.scheduler.running:
                sequence.check()
        assert not engine.has_work, "expected each step to read on in a prompt or to say a token"
    finally:
        engine.close()
    completions = {request.id: engine.take_completion(request.id) for request in requests}
    for name, completion in completions.items():
        _check_account(completion, delivered[name])
    return completions


def _check_account(completion: Completion, deltas: Sequence[TokenDelta]) -> None:
    """Checks that deltas, step records and the completion tell one story."""
    name, count = completion.request_id, len(completion.token_ids)
    assert tuple(t for delta in deltas for t in delta.token_ids) == completion.token_ids, f"{name}: deltas"
    assert sum(step.num_emitted for step in completion.steps) == max(0, count - 1), f"{name}: num_emitted"
    for step in completion.steps:
        assert 0 <= step.num_accepted <= step.num_drafted, f"{name}: {step}"
        assert 1 <= step.num_emitted <= step.num_accepted + 1, f"{name}: {step}"


def plain_texts(target: Target, requests: Sequence[Request]) -> list[Completion]:
    """Returns what the target says to each request, decoded plainly and alone.

    Raises:
        ConfigError: a sampled request without a seed, whose text nobody can repeat.
    """
    for request in requests:
        if request.params.temperature > 0 and request.params.seed is None:
            raise ConfigError(f"request {request.id!r}: expected a seed with temperature above 0, got none")
    alone = [replace(request, block_size=None) for request in requests]
    return [run_checked(Engine(target, max_sequences=1), [r])[r.id] for r in alone]


def whole(completion: Completion) -> tuple[int, ...]:
    """Returns prompt and response in one, as the scripted drafters want it. Pure."""
    return completion.prompt_ids + completion.token_ids


def assert_lossless(
    target: Target,
    drafter: Drafter,
    requests: Sequence[Request],
    *,
    max_sequences: int = 4,
    block_size: int | None = None,
) -> list[Completion]:
    """Returns the speculative completions after comparing them with plain decoding, request by request.

    Args:
        drafter: who guesses.
        requests: with ids of their own; sampled ones need a seed.
        max_sequences: how many step together; fewer than requests means continuous admission.

    Raises:
        AssertionError: a text or finish reason differs, or the invariant breaks after some step.
    """
    plain = plain_texts(target, requests)
    engine = Engine(target, drafter, max_sequences=max_sequences, block_size=block_size)
    completions = run_checked(engine, requests)
    for expected in plain:
        got = completions[expected.request_id]
        name = expected.request_id
        assert got.token_ids == expected.token_ids, (
            f"{name}: plain {expected.token_ids}, speculative {got.token_ids}"
        )
        assert got.finish_reason == expected.finish_reason, f"{name}: {got.finish_reason}"
    return [completions[request.id] for request in requests]
