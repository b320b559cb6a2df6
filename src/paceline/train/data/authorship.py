"""Whose words given answers are: measured, since labels teach a drafter only where the target itself would say them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.core.errors import ConfigError
from paceline.target.base import Target
from paceline.train.data.prefill import TEXTS_TOGETHER, prefill
from paceline.train.data.prompts import Prompt

NUM_MEASURED = 32
"""Conversations that are looked at."""
MOST_SURPRISE = 0.1
"""Nats a token, pooled over the answers that are looked at.

Measured with SmolLM2-135M-Instruct on the first 64 tokens of answers: -1.0 for its own greedy ones and -0.8 for its own
at temperature 0.7 (30 each; at temperature 1 the expectation is 0); 0.2 for another model's sums (7), 0.7 for its chat
(6), 0.4 for human prose (20), 4.4 for bare reference numbers (30). The share of likeliest tokens would not tell them
apart: 98 % and 70 % of its own, 67 % of the other model's sums.
"""


@dataclass(frozen=True, slots=True)
class Authorship:
    """How answers look to a target that may have written them.

    Args:
        num_tokens: how many of them were looked at.
        agreement: share that is the target's likeliest token.
        log_prob: mean log-probability, nats.
        expected_log_prob: what the mean would be of tokens that the target draws there itself at temperature 1.
    """

    num_tokens: int
    agreement: float
    log_prob: float
    expected_log_prob: float

    @property
    def surprise(self) -> float:
        """By how many nats a token the answers surprise the target more than its own words would.

        About zero for words drawn at temperature 1 and below it for cooler ones, however hard the text is.
        """
        return self.expected_log_prob - self.log_prob


def measure_authorship(prompts: Sequence[Prompt], target: Target) -> Authorship:
    """Returns how the answers of conversations look to the target. Mutates: the target's taps."""
    sums = torch.zeros(4, dtype=torch.float64)
    for start in range(0, len(prompts), TEXTS_TOGETHER):
        group = prompts[start : start + TEXTS_TOGETHER]

        def look(number: int, position: int, logits: torch.Tensor, group: Sequence[Prompt] = group) -> None:
            rows = slice(position, position + len(logits))
            mine = torch.tensor(group[number].supervised[rows], device=logits.device)
            ids = torch.tensor(group[number].token_ids[rows], device=logits.device)[mine]
            log_probs = logits[mine].log_softmax(dim=-1)
            own = log_probs.gather(1, ids[:, None])
            agree = log_probs.argmax(dim=-1) == ids
            expected = (log_probs.exp() * log_probs).sum()
            sums.add_(torch.stack([agree.sum() + 0.0, own.sum(), expected, mine.sum() + 0.0]).double().cpu())

        prefill(target, (), [prompt.token_ids for prompt in group], look)
    agreement, log_prob, expected, count = sums.tolist()
    return Authorship(int(count), *(total / max(count, 1) for total in (agreement, log_prob, expected)))


def check_own(prompts: Sequence[Prompt], target: Target) -> Authorship:
    """Returns how the first answers look to the target.

    Raises:
        ConfigError: they surprise it more than words of its own would.
    """
    found = measure_authorship(prompts[:NUM_MEASURED], target)
    if found.surprise > MOST_SURPRISE:
        raise ConfigError(
            f"these answers were hardly written by {target.spec.name}: {found.agreement:.0%} of {found.num_tokens} "
            f"tokens are its likeliest, their mean log-probability is {found.log_prob:.2f}, and words of its own would "
            f"have {found.expected_log_prob:.2f} or more (expected at most {MOST_SURPRISE} below that, got "
            f"{found.surprise:.2f}); hint: data.answers = 'regenerate', or data.allow_foreign = true"
        )
    return found
