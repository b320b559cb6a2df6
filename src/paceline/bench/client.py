"""A client for `/v1/completions` of an OpenAI-style server, for whole texts, one request at a time.

Token ids are asked for and sent where the server takes them (vLLM and others do). Which dialect it speaks is found out
with the first request: ids in and out, else ids in, else text.
"""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit

from paceline.bench.prompts import Prompt
from paceline.core.errors import ConfigError, PacelineError
from paceline.core.params import SamplingParams
from paceline.core.types import Completion, Request

DIALECTS = ("ids in and out", "ids in", "text")
REFUSED = (400, 404, 422)
"""HTTP codes with which servers refuse a field or a form that they do not know."""


class ServerError(PacelineError):
    """A server that cannot be reached, refuses, or answers something else than completions."""


class _RefusedError(ServerError):
    """An answer that another dialect may not get."""


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
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ConfigError(f"url: expected http://host:port or https://host, got {url!r}")
        self.url = url.rstrip("/").removesuffix("/v1")
        self._codec, self._api_key, self._timeout_s = codec, api_key, timeout_s
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
            except _RefusedError:
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
        answer = self._ask("/v1/completions", body)
        choice = _first(answer, "choices", self.url)
        text, ids, reason = choice.get("text"), choice.get("token_ids"), choice.get("finish_reason")
        if not isinstance(text, str):
            raise ServerError(f"{self.url}: expected a completion with a text, got {_brief(choice)}")
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
        name = _first(self._ask("/v1/models", None), "data", self.url).get("id")
        if not isinstance(name, str):
            raise ServerError(f"{self.url}: its list of models names none; hint: say which model")
        return name

    def _ask(self, path: str, body: dict[str, Any] | None) -> Any:
        """Returns the JSON answer to a GET, or to a POST where there is a body."""
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self._api_key is not None:
            headers["Authorization"] = f"Bearer {self._api_key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers)
        answer = self._in_words(lambda: _read(request, self._timeout_s), path)
        try:
            return json.loads(answer)
        except ValueError as error:
            raise ServerError(f"{self.url}{path}: expected JSON, got {_brief(answer)}") from error

    def _in_words(self, fetch: Callable[[], bytes], path: str) -> bytes:
        where = f"{self.url}{path}"
        try:
            return fetch()
        except urllib.error.HTTPError as error:
            kind = _RefusedError if error.code in REFUSED and path.endswith("completions") else ServerError
            raise kind(f"{where}: HTTP {error.code} {error.reason}: {_brief(error.read())}") from error
        except TimeoutError as error:
            raise ServerError(f"{where}: no answer within {self._timeout_s:g} s") from error
        except urllib.error.URLError as error:
            if isinstance(error.reason, TimeoutError):
                raise ServerError(f"{where}: no answer within {self._timeout_s:g} s") from error
            raise ServerError(f"{where}: cannot be reached ({error.reason}); hint: is it running?") from error
        except (OSError, http.client.HTTPException) as error:
            raise ServerError(f"{where}: the connection broke ({error or type(error).__name__})") from error


def _read(request: urllib.request.Request, timeout_s: float) -> bytes:
    with urllib.request.urlopen(request, timeout=timeout_s) as answer:
        content: bytes = answer.read()
    return content


def _first(answer: Any, key: str, url: str) -> dict[str, Any]:
    """Returns the first entry of a list in an answer."""
    entries = answer.get(key) if isinstance(answer, dict) else None
    if not isinstance(entries, list) or not entries or not isinstance(entries[0], dict):
        raise ServerError(f"{url}: expected an object with a list of {key!r}, got {_brief(answer)}")
    first: dict[str, Any] = entries[0]
    return first


def _brief(value: object) -> str:
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
    text = " ".join(text.split())
    return text if len(text) <= 300 else text[:299] + "…"
