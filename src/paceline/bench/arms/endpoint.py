"""One server's address: what is asked there, and what goes wrong there in words that name the address."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from paceline.core.errors import ConfigError, PacelineError

REFUSED = (400, 404, 422)
"""HTTP codes with which servers refuse a field, a form or a path that they do not know."""

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Proxies stand between machines: a server on this one is asked without, whatever the environment says."""


class ServerError(PacelineError):
    """A server that cannot be reached, refuses, or answers something else than it was asked for."""


class RefusedError(ServerError):
    """A server that says that it does not know a field, a form or a path."""


class LostConnectionError(ServerError):
    """Nobody listens at the address, or the connection broke: the server may be gone."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server's address.

    Args:
        url: with or without the closing "/v1"; kept without.
        api_key: sent as bearer token.
        timeout_s: longest wait for an answer, and for each further byte of it.

    Raises:
        ConfigError: an address that is none.
    """

    url: str
    api_key: str | None = field(default=None, repr=False)
    timeout_s: float = 300.0

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ConfigError(f"url: expected http://host:port or https://host, got {self.url!r}")
        object.__setattr__(self, "url", self.url.rstrip("/").removesuffix("/v1"))

    def open(self, path: str, body: dict[str, Any] | None = None) -> http.client.HTTPResponse:
        """Returns the answer to a GET, or to a POST where there is a body; nothing of its content is read.

        Each request has a connection of its own.

        Raises:
            ServerError: see `in_words`.
        """
        headers = {"Content-Type": "application/json", "Accept": "*/*"}
        if self.api_key is not None:
            headers["Authorization"] = f"Bearer {self.api_key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers)
        send = _DIRECT.open if urlsplit(self.url).hostname in _LOOPBACK else urllib.request.urlopen
        with self.in_words(path):
            answer: http.client.HTTPResponse = send(request, timeout=self.timeout_s)
            return answer

    def read(self, path: str, body: dict[str, Any] | None = None) -> bytes:
        """Returns the whole content of an answer.

        Raises:
            ServerError: see `in_words`.
        """
        with self.open(path, body) as answer, self.in_words(path):
            return answer.read()

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Returns the JSON value that a server answers.

        Raises:
            ServerError: see `in_words`; or the answer is no JSON.
        """
        answer = self.read(path, body)
        try:
            return json.loads(answer)
        except ValueError as error:
            raise ServerError(f"{self.url}{path}: expected JSON, got {brief(answer)}") from error

    @contextmanager
    def in_words(self, path: str) -> Iterator[None]:
        """Turns what sending and reading raise into sentences.

        Raises:
            RefusedError: HTTP 400, 404 and 422, with the server's own words.
            LostConnectionError: nobody listens, or the connection broke.
            ServerError: any other HTTP error, or no answer in time.
        """
        where = f"{self.url}{path}"
        try:
            yield
        except urllib.error.HTTPError as error:
            kind = RefusedError if error.code in REFUSED else ServerError
            raise kind(f"{where}: HTTP {error.code} {error.reason}: {brief(_content(error))}") from error
        except TimeoutError as error:
            raise ServerError(f"{where}: no answer within {self.timeout_s:g} s") from error
        except urllib.error.URLError as error:
            if isinstance(error.reason, TimeoutError):
                raise ServerError(f"{where}: no answer within {self.timeout_s:g} s") from error
            sentence = f"{where}: cannot be reached ({error.reason}); hint: is it running?"
            raise LostConnectionError(sentence) from error
        except (OSError, http.client.HTTPException) as error:
            sentence = f"{where}: the connection broke ({str(error) or type(error).__name__})"
            raise LostConnectionError(sentence) from error


def first_entry(answer: Any, key: str, url: str) -> dict[str, Any]:
    """Returns the first entry of a list in an answer.

    Raises:
        ServerError: there is no such list, or it holds no object.
    """
    entries = answer.get(key) if isinstance(answer, dict) else None
    if not isinstance(entries, list) or not entries or not isinstance(entries[0], dict):
        raise ServerError(f"{url}: expected an object with a list of {key!r}, got {brief(answer)}")
    first: dict[str, Any] = entries[0]
    return first


def brief(value: object) -> str:
    """Returns the beginning of a value's text, on one line of at most 300 characters."""
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
    text = " ".join(text.split())
    return text if len(text) <= 300 else text[:299] + "…"


def _content(error: urllib.error.HTTPError) -> bytes:
    """Returns the beginning of what a server says to an error; nothing where that cannot be read either."""
    with suppress(OSError, http.client.HTTPException), error:
        return error.read(4096)
    return b""
