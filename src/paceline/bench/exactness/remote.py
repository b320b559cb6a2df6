"""Is the text of a speculating server its target's own? Checks over two servers, with a local copy of the target.

The plain server is the control of everything: what it does not pass itself says nothing about speculation. The local
copy reads all texts (teacher forcing); it should have the servers' weights and, as near as can be, their arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import torch

from paceline.bench.exactness.checks import Check, judge
from paceline.bench.exactness.client import Reply, Server
from paceline.bench.exactness.forcing import ROUNDING_STEPS, Draws, measure_draws
from paceline.bench.exactness.losslessness import (
    Settings,
    possible_check,
    surprise_check,
    uniformity_check,
)
from paceline.bench.exactness.statistics import difference
from paceline.bench.exactness.texts import Auditor, Progress, compare, count_flagged
from paceline.bench.workloads.prompts import Prompt
from paceline.core.errors import ConfigError
from paceline.core.params import MAX_SEED, SamplingParams
from paceline.target.base import Target

BFLOAT16_STEPS = 6.0
"""In bfloat16 two implementations of one 30-layer model were seen to differ by so many steps of a logit."""

CONTROL_SEED = 1_000_003
"""Added to the plain server's seeds, so that the two servers draw independently."""


def verify_servers(
    target: Target,
    plain: Server,
    speculative: Server,
    prompts: Sequence[Prompt],
    settings: Settings,
    progress: Progress,
) -> tuple[Check, ...]:
    """Returns all checks of two servers, judged together.

    Args:
        target: the local copy.
        plain: a server of the same model without speculation.
        speculative: the server in question.
        settings: block sizes and batch sizes are the servers' own affair and must be empty.

    Raises:
        ConfigError: no prompts, settings that cannot be sent, or tokens that the target does not have.
        ServerError: a server that cannot be reached, refuses, or answers something else.
    """
    _check(prompts, settings)
    checks = _greedy(target, plain, speculative, prompts, settings, progress)
    checks += _sampled(target, plain, speculative, prompts, settings, progress)
    return judge(checks, settings.alpha)


def steps_between_servers(dtype: torch.dtype) -> float:
    """Returns the rounding steps between a server and a local copy in the server's arithmetic."""
    return max(BFLOAT16_STEPS, ROUNDING_STEPS[dtype])


def _check(prompts: Sequence[Prompt], settings: Settings) -> None:
    if not prompts or len({prompt.id for prompt in prompts}) < len(prompts):
        raise ConfigError("prompts: expected at least one, and each with an id of its own")
    if settings.block_sizes or settings.batch_sizes:
        raise ConfigError("block_sizes, batch_sizes: a server's own; hint: leave them out")
    sent = ("max_new_tokens", "temperature", "top_p", "seed")
    others = replace(settings.params, **{name: getattr(SamplingParams(), name) for name in sent})
    if others != SamplingParams():
        raise ConfigError(f"params: only {', '.join(sent)} are sent to servers, got {settings.params}")


def _greedy(
    target: Target,
    plain: Server,
    speculative: Server,
    prompts: Sequence[Prompt],
    settings: Settings,
    progress: Progress,
) -> list[Check]:
    greedy = replace(settings.params, temperature=0.0)
    ask = _asker([(prompt, greedy) for prompt in prompts], target, settings.batch_size, progress)
    expected, drafted = ask(plain, "plain server"), ask(speculative, "speculative server")
    again = ask(plain, "plain server again", one_by_one=True)
    requests, steps = [reply.request for reply in expected], settings.rounding_steps
    auditor = Auditor(target, steps_between_servers(target.dtype) if steps is None else steps)
    texts, control, own = ([r.completion for r in replies] for replies in (drafted, again, expected))
    checks = [
        compare("plain_control", requests, own, control, auditor),
        compare("identical_texts", requests, own, texts, auditor),
        count_flagged("plain_ties", requests, own, auditor, progress),
        count_flagged("ties", requests, texts, auditor, progress),
    ]
    for check, replies in zip(checks, (again, drafted, expected, drafted), strict=True):
        check.details["token_ids"] = _source(replies)
    return checks


def _sampled(
    target: Target,
    plain: Server,
    speculative: Server,
    prompts: Sequence[Prompt],
    settings: Settings,
    progress: Progress,
) -> list[Check]:
    """Returns the tests of the law, for both servers and for their difference."""
    names = ("possible_tokens", "surprise", "uniformity")
    if settings.params.is_greedy:
        return [
            Check.not_run(name, "the temperature is 0")
            for name in (*(f"plain_{n}" for n in names), *names, "surprise_difference")
        ]
    checks, scores = [], []
    rng = np.random.default_rng(0)
    for prefix, server, shift in (("plain_", plain, CONTROL_SEED), ("", speculative, 0)):
        asked = [
            (prompt, replace(settings.params, seed=((settings.params.seed or 0) + shift + i) % MAX_SEED))
            for i, prompt in enumerate(prompts)
        ]
        replies = _asker(asked, target, settings.batch_size, progress)(server, f"{prefix}sampled".strip("_"))
        draws = _read_draws(target, replies, rng, progress)
        scores.append(draws.moments.z)
        found = (possible_check(draws), surprise_check(draws), uniformity_check(draws))
        checks += [_named(check, prefix, replies) for check in found]
    reply_z, control_z = scores[1], scores[0]
    checks.append(
        Check(
            "surprise_difference",
            "ok",
            f"z = {reply_z:+.2f}, plain server {control_z:+.2f}",
            statistic=reply_z - control_z,
            p_value=difference(reply_z, control_z),
        )
    )
    return checks


def _named(check: Check, prefix: str, replies: Sequence[Reply]) -> Check:
    """Returns a check under its server's name; without the server's own ids it says nothing alone."""
    name = prefix + check.name
    if not all(reply.has_own_ids for reply in replies):
        return Check.not_run(name, "the server gives no token ids, and sampled text encodes to others")
    return replace(check, name=name)


def _source(replies: Sequence[Reply]) -> str:
    own = all(reply.has_own_ids for reply in replies)
    return "the server's own" if own else "its text, encoded again"


def _read_draws(
    target: Target, replies: Sequence[Reply], rng: np.random.Generator, progress: Progress
) -> Draws:
    parts = []
    for done, reply in enumerate(replies):
        progress("reading draws", done, len(replies))
        text = reply.completion.token_ids
        parts.append(measure_draws(target, reply.request, text, [None] * len(text), rng))
    return Draws.join(parts)


def _asker(
    asked: Sequence[tuple[Prompt, SamplingParams]], target: Target, num_together: int, progress: Progress
) -> Callable[..., list[Reply]]:
    """Returns a function that gets the answers of a server, many at once or one by one."""

    def ask(server: Server, stage: str, *, one_by_one: bool = False) -> list[Reply]:
        progress(stage, 0, len(asked))
        replies = [server.complete(*asked[0])]  # alone, since it finds out what the server takes
        with ThreadPoolExecutor(1 if one_by_one else num_together) as pool:
            for reply in pool.map(lambda pair: server.complete(*pair), asked[1:]):
                replies.append(reply)
                progress(stage, len(replies), len(asked))
        for reply in replies:
            _check_ids(reply, target, server)
        return replies

    return ask


def _check_ids(reply: Reply, target: Target, server: Server) -> None:
    largest = max((*reply.request.prompt_ids, *reply.completion.token_ids))
    if largest >= target.spec.vocab_size:
        raise ConfigError(
            f"{server.url}: token {largest} is not in the vocabulary of {target.spec.name} "
            f"({target.spec.vocab_size}); hint: name the servers' own model as target"
        )
