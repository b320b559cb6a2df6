"""How an adaptation spends its time: decided once, from what the first answers and steps took, and stored."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.train.data.prompts import Prompt
from paceline.train.run import TrainEvent
from paceline.train.trainer import Progress

ANSWERS_SHARE, JUDGING_SHARE, MEASURING_SHARE = 0.4, 0.1, 0.1
"""Of the time: what answers to learn from, answers to judge by and measuring may take; the steps get the rest."""

PROMPTS_PER_SHARD, BLOCKS_PER_STEP = 64, 128
JUDGED_PER_SHARD, MAX_JUDGED = 16, 128
WARM_UP_STEPS, MIN_STEPS, MAX_STEPS = 20, 40, 1_000_000
NUM_EVALUATIONS = 6
MIN_MEASURED, MAX_MEASURED = 4, 16
MAX_PASSES = 8
"""Most blocks by the number of answer tokens: beyond, answers are learnt by heart."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How the time is used; what is `None` is not decided yet.

    Args:
        contract: digest of settings, drafter and prompts.
        spent_s: seconds until it was stored.
        num_held_out, num_general: prompts measured by decoding, and `measuring_s` what that takes.
        judged_held_out, judged_general: prompts whose answers judge.
        num_prompts: prompts that the target answers.
        max_steps: length of the training.
    """

    contract: str
    spent_s: float = 0.0
    num_held_out: int | None = None
    num_general: int | None = None
    measuring_s: float = 0.0
    judged_held_out: int | None = None
    judged_general: int | None = None
    num_prompts: int | None = None
    max_steps: int | None = None


class Watch:
    """Looks at a training, times it, and says when it must stop so that the plan can be made.

    Args:
        plan: as far as it is made.
        answers_s: what answers may take.
    """

    def __init__(self, plan: Plan, answers_s: float) -> None:
        self._plan, self._answers_s = plan, answers_s
        self._began = self._answered = time.perf_counter()
        self._asked: float | None = None
        self._stepped: list[float] = []
        self._step = 0
        self.num_shards, self.is_cut = 0, False

    def see(self, event: TrainEvent) -> None:
        """Takes note of an event. Mutates: self."""
        now = time.perf_counter()
        if isinstance(event.detail, Progress):
            self._stepped.append(now)
            self._step = event.done
            return
        if self._asked is None:
            self._asked = self._answered = now
        if event.detail is None:  # a whole shard
            next_s, self._answered, self.num_shards = now - self._answered, now, event.done
            is_over = now + next_s - self._asked > self._answers_s
            self.is_cut = is_over and self._plan.num_prompts is None and event.done < event.total

    @property
    def is_due(self) -> bool:
        """Whether the plan needs a decision now."""
        has_timed = bool(self._stepped) and self._step >= WARM_UP_STEPS
        return self.is_cut or (has_timed and self._plan.max_steps is None)

    def affordable_steps(self, left_s: float, num_tokens: int) -> int:
        """Returns how many steps fit into the time, but no more than the answers can teach.

        Args:
            left_s: seconds left, measuring included.
            num_tokens: of all answers.
        """
        loading_s = (self._asked or self._began) - self._began
        first, last = self._stepped[0], self._stepped[-1]
        opening_s = first - self._answered  # the first evaluation among it
        step_s = (last - first) / (len(self._stepped) - 1) if len(self._stepped) > 1 else opening_s
        reserve_s = 2 * loading_s + (1 + NUM_EVALUATIONS) * opening_s + self._plan.measuring_s
        fitting = self._step + int((left_s - reserve_s) / step_s)
        return max(MIN_STEPS, min(fitting, MAX_PASSES * num_tokens // BLOCKS_PER_STEP))


def affordable(prompts: Sequence[Prompt], cost: Callable[[Sequence[Prompt]], float], budget_s: float) -> int:
    """Returns how many of the first prompts cost at most `budget_s`, within `MIN_MEASURED` and `MAX_MEASURED`."""
    most = min(len(prompts), MAX_MEASURED)
    fitting = [n for n in range(1, most + 1) if cost(prompts[:n]) <= budget_s]
    return max(min(most, MIN_MEASURED), fitting[-1] if fitting else 0)
