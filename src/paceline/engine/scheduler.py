"""Which sequences step next: first come, first served, up to a fixed number at once."""

from __future__ import annotations

from collections import deque

from paceline.core.errors import ConfigError
from paceline.core.types import Request
from paceline.engine.sequence import Sequence


class Scheduler:
    """Waiting requests and running sequences.

    Args:
        max_sequences: most sequences that step together, at least 1.
    """

    def __init__(self, max_sequences: int) -> None:
        if max_sequences < 1:
            raise ConfigError(f"max_sequences: expected at least 1, got {max_sequences}")
        self.max_sequences = max_sequences
        self.waiting: deque[Request] = deque()
        self.running: list[Sequence] = []

    @property
    def has_room(self) -> bool:
        """Whether a waiting request may start now."""
        return bool(self.waiting) and len(self.running) < self.max_sequences

    def holds(self, request_id: str) -> bool:
        """Whether a request of this id waits or runs."""
        return any(r.id == request_id for r in self.waiting) or any(
            s.request.id == request_id for s in self.running
        )

    def withdraw(self, request_id: str) -> Request | None:
        """Takes a waiting request back and returns it, or `None` where it does not wait."""
        for request in self.waiting:
            if request.id == request_id:
                self.waiting.remove(request)
                return request
        return None

    def retire(self) -> list[Sequence]:
        """Takes finished sequences out of the running ones and returns them."""
        finished = [s for s in self.running if s.finish_reason is not None]
        self.running = [s for s in self.running if s.finish_reason is None]
        return finished
