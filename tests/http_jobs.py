"""Jobs for an `UnrulyServer`, what a good answer to them is, and an address where nobody listens."""

from __future__ import annotations

import hashlib
import socket
from typing import Any

from paceline.bench.arms.base import Job
from paceline.core.params import SamplingParams
from unruly_server import PIECES

TEXT = hashlib.sha256("".join(PIECES).encode()).hexdigest()[:16]


def job(manner: str, id: str | None = None, due_s: float = 0.0, **params: Any) -> Job:
    messages = [{"role": "user", "content": f"be {manner}"}]
    return Job(id or manner, messages, SamplingParams(16, **params), due_s)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
