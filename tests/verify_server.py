"""A server of tiny texts on this machine, in the manner of OpenAI's completions, with a real engine behind it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from paceline.core.params import SamplingParams
from paceline.core.types import Request
from verify_pairs import TinyPair


class Words:
    """The tokenizer of tiny targets: token 7 is the word "7"."""

    def encode(self, text: str) -> list[int]:
        """Returns the numbers."""
        return [int(word) for word in text.split()]

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the words."""
        return " ".join(map(str, ids))


class TinyServer(ThreadingHTTPServer):
    """Answers with a pair's texts.

    Args:
        pair: who decodes.
        plain: without the drafter.
        knows: which of "ids in" and "ids out" it understands; fields that it does not know are refused.
        key: the bearer token it asks for.
        offset: added to every token, modulo the vocabulary: another model.
    """

    def __init__(
        self,
        pair: TinyPair,
        *,
        plain: bool = True,
        knows: Sequence[str] = ("ids in", "ids out"),
        key: str | None = None,
        offset: int = 0,
    ) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.pair, self.plain, self.knows, self.key, self.offset = pair, plain, knows, key, offset
        self.bodies: list[dict[str, Any]] = []
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def answer(self, body: dict[str, Any]) -> tuple[int, Any]:
        """Returns the HTTP code and the JSON answer to a completion request."""
        if isinstance(body["prompt"], list) and "ids in" not in self.knows:
            return 400, {"error": {"message": "prompt: expected a string"}}
        if "return_token_ids" in body and "ids out" not in self.knows:
            return 422, {"error": {"message": "return_token_ids: unknown field"}}
        prompt = Words().encode(body["prompt"]) if isinstance(body["prompt"], str) else body["prompt"]
        params = SamplingParams(body["max_tokens"], temperature=body["temperature"], seed=body["seed"])
        with self.lock:
            engine = self.pair.new_engine(plain=self.plain, keyed_drafts=False)
            engine.add(Request("r", tuple(prompt), params))
            while engine.has_work:
                engine.step()
            text = engine.take_completion("r")
        ids = [(token + self.offset) % self.pair.target.spec.vocab_size for token in text.token_ids]
        own = {"token_ids": ids} if "return_token_ids" in body else {}
        return 200, {"choices": [{"text": Words().decode(ids), "finish_reason": text.finish_reason, **own}]}


class Handler(BaseHTTPRequestHandler):
    """The two paths of a `TinyServer`."""

    server: TinyServer

    def do_GET(self) -> None:
        """Lists the one model."""
        self._send(200, {"data": [{"id": "tiny"}]})

    def do_POST(self) -> None:
        """Answers a completion request."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        if self.server.key and self.headers["Authorization"] != f"Bearer {self.server.key}":
            self._send(401, {"error": "wrong key"})
        else:
            self._send(*self.server.answer(body))

    def _send(self, code: int, document: Any) -> None:
        data = json.dumps(document).encode() if not isinstance(document, bytes) else document
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:  # the base class's name
        """Writes nothing."""


@contextmanager
def running(server: ThreadingHTTPServer) -> Iterator[None]:
    """Serves in a thread until the block ends."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
