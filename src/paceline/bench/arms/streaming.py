"""A streaming client for `/v1/chat/completions`: one request, and when each piece of its answer came.

Times are taken when a piece arrives; tokens are counted by the server's usage only, since one piece may hold several.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from time import perf_counter
from typing import Any

from paceline.bench.arms.base import Job, Outcome
from paceline.bench.arms.counters import Acceptance, acceptance_in
from paceline.bench.arms.endpoint import Endpoint, LostConnectionError, ServerError, brief

PATH = "/v1/chat/completions"
TEXT_FIELDS = (("reasoning_content", "reasoning"), ("content",))
"""Fields of a delta that hold text; of those in one group the first that is there counts, the others repeat it."""

_ABORTED = ("abort", "error")
_LINE_END = re.compile(rb"\r\n|\n|\r")


def stream_chat(
    endpoint: Endpoint, job: Job, *, model: str, started: float, extra: Mapping[str, Any] | None = None
) -> Outcome:
    """Returns what came of a job; a request without an answer is an outcome with `failure`, not an exception.

    Args:
        started: `perf_counter` value from which times count; `sent_s` is left to the caller.
        extra: further fields of the request's body.

    Raises:
        LostConnectionError: nobody listens, or the connection broke. Whether the server has died only the caller can
            tell; if not, `failed` makes an outcome of it.
    """
    try:
        return _receive(endpoint, {**request_body(job, model), **(extra or {})}).outcome(job.id, started)
    except LostConnectionError:
        raise
    except ServerError as error:
        return failed(job, error)


def failed(job: Job, error: ServerError) -> Outcome:
    """Returns the outcome of a job that has no answer; pure."""
    return Outcome(job.id, failure=f"request {job.id}: {error}")


def request_body(job: Job, model: str) -> dict[str, Any]:
    """Returns the JSON body of a job's request; pure. A filter or a seed that is not set is not sent."""
    params = job.params
    body: dict[str, Any] = {
        "model": model,
        "messages": job.messages,
        "max_tokens": params.max_new_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if params.top_k:
        body["top_k"] = params.top_k
    if params.seed is not None:
        body["seed"] = params.seed
    return body


class EventParser:
    """Server-sent events out of pieces that may be cut anywhere, inside a line end or a character too.

    Source: the "Server-sent events" section of the HTML standard; of the fields, only `data` is of use here.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._is_after_cr = False
        self._data: list[str] = []

    def feed(self, piece: bytes) -> Iterator[str]:
        """Yields the data of every event that ends in this piece."""
        if not piece:
            return
        if self._is_after_cr:
            piece = piece.removeprefix(b"\n")
        self._is_after_cr = piece.endswith(b"\r") if piece else False
        *lines, self._rest = _LINE_END.split(self._rest + piece)
        for line in lines:
            name, _, value = line.decode("utf-8", "replace").removeprefix("\ufeff").partition(":")
            if not line and self._data:
                data, self._data = "\n".join(self._data), []
                yield data
            elif name == "data":
                self._data.append(value.removeprefix(" "))


@dataclass(slots=True)
class _Answer:
    """What has come of an answer so far."""

    times: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    finished: float | None = None
    usage: dict[str, Any] | None = None
    acceptance: Acceptance | None = None
    is_done: bool = False

    def take(self, data: str, now: float) -> None:
        """Adds one event that came at a time.

        Raises:
            ServerError: it is no JSON object, or it says that something went wrong.
        """
        if data.strip() == "[DONE]":
            self.is_done = True
            return
        event = _parsed(data)
        pieces = [text for choice in _objects(event.get("choices")) for text in self._read(choice, now)]
        if pieces:
            self.times.append(now)
            self.texts += pieces
        usage = event.get("usage")  # null in all chunks but the last
        self.usage = usage if isinstance(usage, dict) else self.usage
        told = acceptance_in(event)
        self.acceptance = self.acceptance if told is None else told

    def _read(self, choice: dict[str, Any], now: float) -> Iterator[str]:
        """Yields the texts in a choice and notes why it ends."""
        if choice.get("finish_reason") is not None:
            self.finish_reason, self.finished = str(choice["finish_reason"]), now
        delta = choice.get("delta")
        delta = delta if isinstance(delta, dict) else {}
        for names in TEXT_FIELDS:
            texts = [delta[name] for name in names if isinstance(delta.get(name), str) and delta[name]]
            yield from texts[:1]

    @property
    def so_far(self) -> str:
        """How much had come, for sentences."""
        return f"{len(self.times)} {'chunk' if len(self.times) == 1 else 'chunks'} of text had come"

    def outcome(self, id: str, started: float) -> Outcome:
        """Returns the outcome of an answer that has ended.

        Raises:
            ServerError: it was cut off, or its tokens are not counted or none.
        """
        prompt_tokens, new_tokens = self._counted()
        # the finish may be a token of its own, such as an end of sequence
        last = max([*self.times[-1:], self.finished or 0.0])
        gaps = [later - earlier for earlier, later in pairwise(self.times)]
        return Outcome(
            id,
            ttft_s=(self.times[0] if self.times else last) - started,
            e2e_s=last - started,
            max_gap_s=max(gaps, default=None),
            num_chunks=len(self.times),
            num_prompt_tokens=prompt_tokens,
            num_new_tokens=new_tokens,
            finish_reason=self.finish_reason,
            acceptance=self.acceptance,
            text=hashlib.sha256("".join(self.texts).encode()).hexdigest()[:16],
        )

    def _counted(self) -> tuple[int | None, int]:
        """Returns the tokens of prompt and answer, once it is sure that the answer is whole."""
        if self.finished is None:
            raise ServerError(f"the stream ended before a finish_reason; {self.so_far}")
        if self.finish_reason in _ABORTED:
            raise ServerError(f"the server ended the answer with {self.finish_reason!r}; {self.so_far}")
        prompt_tokens, new_tokens = (
            (self.usage or {}).get(name) for name in ("prompt_tokens", "completion_tokens")
        )
        if type(new_tokens) is not int:
            cut = "" if self.is_done else " (the stream ended without [DONE])"
            raise ServerError(
                f"no usage: tokens cannot be counted{cut}; the server must honour stream_options.include_usage"
            )
        if new_tokens < 1:
            raise ServerError(
                f"the answer has 0 tokens (finish_reason {self.finish_reason!r}), so it has no speed"
            )
        return prompt_tokens if type(prompt_tokens) is int else None, new_tokens


def _receive(endpoint: Endpoint, body: dict[str, Any]) -> _Answer:
    """Returns the answer to a request, read to the end of its stream."""
    answer, parser = _Answer(), EventParser()
    deadline = perf_counter() + endpoint.timeout_s
    with endpoint.open(PATH, body) as response:
        kind = response.headers.get_content_type()
        if kind != "text/event-stream":
            with endpoint.in_words(PATH):
                content = response.read(4096)
            raise ServerError(f"expected a stream (text/event-stream), got {kind}: {brief(content)}")
        try:
            while not answer.is_done:
                with endpoint.in_words(PATH):
                    piece = response.read1(65536)
                now = perf_counter()
                if not piece:
                    break
                if now > deadline:
                    raise ServerError(f"the answer was not finished within {endpoint.timeout_s:g} s")
                for data in parser.feed(piece):
                    answer.take(data, now)
        except ServerError as error:
            raise type(error)(f"{error}; {answer.so_far}") from error
    return answer


def _parsed(data: str) -> dict[str, Any]:
    try:
        event = json.loads(data)
    except ValueError as cause:
        raise ServerError(f"expected JSON in a data line, got {brief(data)}") from cause
    if not isinstance(event, dict):
        raise ServerError(f"expected a JSON object in a data line, got {brief(data)}")
    if error := event.get("error"):
        words = error.get("message") if isinstance(error, dict) else None
        raise ServerError(f"the server says: {brief(words or error)}")
    return event


def _objects(value: object) -> list[dict[str, Any]]:
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []
