"""A client for `/v1/completions` of an OpenAI-style server, for whole texts, one request at a time.

Token ids are asked for and sent where the server takes them (vLLM and others do). Which dialect it speaks is found out
with the first request: ids in and out, else ids in, else text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from paceline.bench.arms.endpoint import Endpoint, RefusedError, ServerError, brief, first_entry
from paceline.bench.workloads.prompts import Prompt
from paceline.core.errors import ConfigError
from paceline.core.params import SamplingParams
from paceline.core.types import Completion, Request

DIALECTS = ("ids in and out", "ids in", "text")


class Codec(Protocol):
    """The tokenizer of the local copy, such as `TextCodec`."""

    def encode(self, text: str) -> list[int]:
        """Returns the ids of plain text, with the tokens that the tokenizer puts before it."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A server's text.

    Args:
        request: what stands for it locally: the prompt's ids as the server read them, and the parameters.
        completion: the text with its ids.
        has_own_ids: whether the ids are the server's, not its text encoded again.
    """

    request: Request
    completion: Completion
    has_own_ids: bool


class Server:
    """One server and one model of it.

    Args:
        url: its address, with or without the closing "/v1".
        codec: of the local copy of the target.
        model: as the server calls it; `None` takes the first of its list.
        api_key: sent as bearer token.
        timeout_s: longest wait for one answer.

    Raises:
        ConfigError: an address that is none.
        ServerError: the list of models cannot be had.
    """

    def __init__(
        self,
        url: str,
        codec: Codec,
        *,
        model: str | None = None,
        api_key: str | None = None,
        timeout_s: float = 300.0,
    ) -> None:
        self._endpoint, self._codec = Endpoint(url, api_key, timeout_s), codec
        self.url = self._endpoint.url
        self.dialect: str | None = None
        self.model = model or self._first_model()

    def complete(self, prompt: Prompt, params: SamplingParams) -> Reply:
        """Returns the server's text.

        Args:
            params: temperature, top_p, seed and max_new_tokens are sent.

        Raises:
            ServerError: see `ServerError`; the message holds the server's own words.
            ConfigError: the server takes only text, and the prompt has only ids.
        """
        if self.dialect is not None:
            return self._complete(prompt, params, self.dialect)
        for dialect in DIALECTS[:-1]:
            try:
                reply = self._complete(prompt, params, dialect)
            except RefusedError:
                continue
            self.dialect = dialect if reply.has_own_ids else "ids in"
            return reply
        reply = self._complete(prompt, params, "text")
        self.dialect = "text"
        return reply

    def _complete(self, prompt: Prompt, params: SamplingParams, dialect: str) -> Reply:
        if dialect == "text" and prompt.text is None:
            raise ConfigError(
                f"{self.url} takes prompts as text only, and prompt {prompt.id!r} has only token ids"
            )
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": prompt.text if dialect == "text" else list(prompt.token_ids),
            "max_tokens": params.max_new_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "seed": params.seed or 0,
        }
        if dialect == "ids in and out":
            body["return_token_ids"] = True
        answer = self._endpoint.ask("/v1/completions", body)
        choice = first_entry(answer, "choices", self.url)
        text, ids, reason = choice.get("text"), choice.get("token_ids"), choice.get("finish_reason")
        if not isinstance(text, str):
            raise ServerError(f"{self.url}: expected a completion with a text, got {brief(choice)}")
        sent = tuple(self._codec.encode(str(prompt.text))) if dialect == "text" else prompt.token_ids
        has_own_ids = isinstance(ids, list) and all(type(token) is int and token >= 0 for token in ids)
        tokens = tuple(ids) if isinstance(ids, list) and has_own_ids else self._encoded_again(text)
        completion = Completion(prompt.id, sent, tokens, text, str(reason))
        return Reply(Request(prompt.id, sent, params), completion, has_own_ids)

    def _encoded_again(self, text: str) -> tuple[int, ...]:
        """Returns the ids of a text that continues another: without what the tokenizer puts before each."""
        before, ids = self._codec.encode(""), self._codec.encode(text)
        return tuple(ids[len(before) :] if ids[: len(before)] == before else ids)

    def _first_model(self) -> str:
        name = first_entry(self._endpoint.ask("/v1/models"), "data", self.url).get("id")
        if not isinstance(name, str):
            raise ServerError(f"{self.url}: its list of models names none; hint: say which model")
        return name
