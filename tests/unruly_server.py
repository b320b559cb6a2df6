"""A server of streamed chat completions that misbehaves as each request asks it to; needs the standard library only.

The last word of the last message says how: see `MANNERS`. As a program it listens on the port of its first argument:

    python unruly_server.py PORT [exit CODE | stubborn | loading SECONDS | healthless] [ignored …]
"""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PIECES = ("Grüße ", "aus ", "dem ", "🚄.")
NUM_TOKENS, NUM_PROMPT_TOKENS = 9, 21
MANNERS = (
    "good", "plain-end", "crlf", "bytewise", "slow", "held", "silent", "trickle", "ends", "cut", "no-usage", "no-json",
    "error-inside", "http-500", "http-429", "unstreamed", "zero", "wordless", "abort", "restarted", "reset", "die",
)  # fmt: skip


class UnrulyServer(ThreadingHTTPServer):
    """See the module.

    Args:
        port: 0 takes a free one.
        key: the bearer token it asks for.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, port: int = 0, *, key: str | None = None) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.key = key
        self.bodies: list[dict[str, Any]] = []
        self.pages: dict[str, Any] = {
            "/health": {},
            "/v1/models": {"data": [{"id": "m", "owned_by": "unruly"}]},
        }
        self.last_chunk: dict[str, Any] = {}
        self.counts: list[int] | None = [0, 0, 0]
        self.lock, self.released = threading.Lock(), threading.Event()
        self.num_under_way = self.most_under_way = 0
        self.ready_at = 0.0

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def metrics(self) -> str:
        """Returns its page of metrics, in vLLM's manner."""
        names = ("drafts", "draft_tokens", "accepted_tokens")
        return "".join(
            f'vllm:spec_decode_num_{name}_total{{engine="0"}} {count}\n'
            for name, count in zip(names, self.counts or (), strict=True)
        )

    def count_steps(self, *, is_restarted: bool) -> None:
        """Counts what one answer took, or begins again from zero."""
        with self.lock:
            if self.counts is not None:
                more = zip(self.counts, (4, 12, 5), strict=True)
                self.counts = [0, 0, 0] if is_restarted else [old + new for old, new in more]

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Counts a request as being under way."""
        with self.lock:
            self.num_under_way += 1
            self.most_under_way = max(self.most_under_way, self.num_under_way)
        try:
            yield
        finally:
            with self.lock:
                self.num_under_way -= 1

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing: clients that hang up are part of the tests."""


class Handler(BaseHTTPRequestHandler):
    """The paths of an `UnrulyServer`."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: UnrulyServer

    def do_GET(self) -> None:
        """Answers with one of the pages."""
        if time.monotonic() < self.server.ready_at:
            self._send(503, {"error": {"message": "loading"}})
        elif self.path == "/metrics" and self.server.counts is not None:
            self._send(200, self.server.metrics(), "text/plain")
        elif self.path in self.server.pages:
            page = self.server.pages[self.path]
            self._send(200, page, "text/plain" if isinstance(page, str) else "application/json")
        else:
            self._send(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        """Answers a chat completion as its message asks."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        if self.server.key and self.headers["Authorization"] != f"Bearer {self.server.key}":
            return self._send(401, {"error": {"message": "wrong key"}})
        manner = body["messages"][-1]["content"].split()[-1]
        with self.server.counting():
            if not body.get("stream"):
                self._send(200, {"choices": [], "usage": usage(1)})
            elif manner in ("http-500", "http-429"):
                self._send(int(manner[-3:]), {"error": {"message": "too much\nfor me"}})
            elif manner == "unstreamed":
                self._send(200, {"choices": [{"message": {"content": "all at once"}}]})
            else:
                self._stream(manner)
        return None

    def _stream(self, manner: str) -> None:
        server = self.server
        if manner == "silent":
            server.released.wait(30)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        server.count_steps(is_restarted=manner == "restarted")
        for event in self._events(manner):
            if not self._write(event, manner):
                return
        self.wfile.write(b"0\r\n\r\n")

    def _write(self, event: str, manner: str) -> bool:
        """Writes an event, or does what the manner asks in its place; returns whether the stream goes on."""
        if event == "!":
            if manner == "die":
                os._exit(3)
            if manner == "reset":
                time.sleep(0.1)  # what was sent has arrived
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                os.close(self.connection.detach())  # without lingering: a reset
            if manner in ("held", "silent"):
                self.server.released.wait(30)
                return True
            self.close_connection = True
            if manner == "ends":
                self.wfile.write(b"0\r\n\r\n")
            return False
        if manner in ("slow", "trickle"):
            time.sleep(0.06)
        data = event.encode()
        if manner in ("crlf", "bytewise"):
            data = data.replace(b"\n", b"\r\n")
        for part in [bytes([byte]) for byte in data] if manner == "bytewise" else [data]:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
        return True

    def _events(self, manner: str) -> Iterator[str]:
        """Yields what is streamed; "!" is where the manner strikes."""
        num_tokens = {"zero": 0, "wordless": 1}.get(manner, NUM_TOKENS)
        yield ": keep-alive\n\n"
        yield sse({"role": "assistant", "content": ""})
        for number, piece in enumerate(PIECES * (5 if manner == "trickle" else 1) if num_tokens > 1 else ()):
            if number == 2:
                yield ": keep-alive\n\n"
                yield from mischief(manner)
            yield sse({"reasoning_content" if number == 0 else "content": piece})
        yield sse({}, "abort" if manner == "abort" else "stop")
        if manner != "no-usage":
            yield f"data: {json.dumps({'choices': [], 'usage': usage(num_tokens), **self.server.last_chunk})}\n\n"
        if manner != "plain-end":
            yield "data: [DONE]\n\n"

    def _send(self, code: int, document: Any, kind: str = "application/json") -> None:
        data = (document if isinstance(document, str) else json.dumps(document)).encode()
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:  # the base class's name
        """Writes nothing."""


def mischief(manner: str) -> Iterator[str]:
    """Yields what an ill-mannered stream holds in its middle."""
    if manner == "no-json":
        yield 'data: {"choices": [\n\n'
    elif manner == "error-inside":
        yield 'data: {"error": {"message": "out of memory", "code": 500}}\n\n'
    elif manner in ("ends", "cut", "reset", "die", "held"):
        yield "!"


def sse(delta: dict[str, Any], finish_reason: str | None = None) -> str:
    """Returns an event with one chunk, its JSON over two lines of data."""
    chunk = {"choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}], "usage": None}
    text = json.dumps(chunk, ensure_ascii=False).replace('"usage"', '\ndata: "usage"')
    return f"event: message\ndata: {text}\n\n"


def usage(num_tokens: int) -> dict[str, int]:
    """Returns an answer's usage."""
    return {"prompt_tokens": NUM_PROMPT_TOKENS, "completion_tokens": num_tokens}


@contextmanager
def running(server: UnrulyServer) -> Iterator[UnrulyServer]:
    """Serves in a thread until the block ends."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.released.set()
        server.shutdown()
        server.server_close()
        thread.join()


def main(port: str, manner: str = "usual", value: str = "0", *_: str) -> None:
    """Serves until it is killed."""
    sys.stdout.write(f"serving as {manner}\n")
    sys.stdout.flush()
    if manner == "exit":
        sys.exit(int(value))
    if manner == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    server = UnrulyServer(int(port))
    server.ready_at = time.monotonic() + (float(value) if manner == "loading" else 0.0)
    if manner == "healthless":
        del server.pages["/health"]
    server.serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
