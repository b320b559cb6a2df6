"""What is asked: requests with their kinds of work, from the built-in set or from files; see `traffic` for logs."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.core.prompts import Messages


@dataclass(frozen=True, slots=True)
class Item:
    """One request of a workload.

    Args:
        id: unique in its workload.
        kind: the kind of work, such as "code"; results are given for each.
        messages: the conversation, ending with a user message.
        max_new_tokens: what the request itself asked for; `None` leaves it to the plan.
        arrival_s: seconds after the workload's first request; `None` where nobody noted it.
        num_logged_tokens: tokens of the answer that a log holds; `None` where it does not say.
    """

    id: str
    kind: str
    messages: Messages
    max_new_tokens: int | None = None
    arrival_s: float | None = None
    num_logged_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests that stand for some traffic.

    Args:
        name: in reports.
        items: at least one.
        notes: what a reader must know of it: lines that were left out and why, what was masked.
    """

    name: str
    items: tuple[Item, ...]
    notes: tuple[str, ...] = ()
