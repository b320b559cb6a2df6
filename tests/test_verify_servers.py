"""`bench.exactness.remote` against real servers on this machine: exact, wrong, old-fashioned, and broken ones."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import pytest

import verify_pairs
from paceline.bench.arms.endpoint import ServerError
from paceline.bench.exactness.checks import Check
from paceline.bench.exactness.client import Server
from paceline.bench.exactness.losslessness import Settings
from paceline.bench.exactness.remote import CONTROL_SEED, verify_servers
from paceline.bench.workloads.prompts import Prompt
from paceline.core.errors import ConfigError
from paceline.core.params import SamplingParams
from paceline.testing import BigramDrafter
from verify_pairs import TinyPair, prompts, silent
from verify_server import TinyServer, Words, running

PARAMS = SamplingParams(max_new_tokens=24, temperature=1.0, seed=3)


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.fixture(scope="module")
def pair() -> TinyPair:
    return TinyPair(BigramDrafter)


def examine(
    pair: TinyPair,
    plain: TinyServer,
    speculative: TinyServer,
    count: int = 8,
    params: SamplingParams = PARAMS,
) -> dict[str, Check]:
    with ExitStack() as stack:
        for server in (plain, speculative):
            stack.enter_context(running(server))
        control, examined = (Server(server.url, Words()) for server in (plain, speculative))
        checks = verify_servers(pair.target, control, examined, prompts(count), Settings(params), silent)
    return {check.name: check for check in checks}


def test_an_exact_server_passes(pair: TinyPair) -> None:
    plain, speculative = TinyServer(pair), TinyServer(pair, plain=False)
    checks = examine(pair, plain, speculative)
    assert {check.status for check in checks.values()} == {"ok"}, checks
    assert checks["identical_texts"].statistic == checks["plain_control"].statistic == 1.0
    assert checks["ties"].details["token_ids"] == "the server's own"
    assert len(plain.bodies) == 3 * 8 and len(speculative.bodies) == 2 * 8
    assert plain.bodies[0]["prompt"] == [3, 4, 5] and plain.bodies[0]["temperature"] == 0.0
    seeds = [{b["seed"] for b in s.bodies if b["temperature"] > 0} for s in (plain, speculative)]
    assert seeds == [{CONTROL_SEED + 3 + i for i in range(8)}, {3 + i for i in range(8)}]


def test_a_wrong_server_is_flagged_and_the_control_is_not(
    pair: TinyPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    verify_pairs.accept_some_refused(monkeypatch, 0.3)
    checks = examine(pair, TinyServer(pair), TinyServer(TinyPair(), plain=False), 16)
    flagged = {name for name, check in checks.items() if check.status == "flagged"}
    assert flagged >= {"identical_texts", "ties", "surprise", "surprise_difference"}
    assert not any(name.startswith("plain") for name in flagged), flagged


def test_another_model_on_both_servers_is_the_controls_affair(pair: TinyPair) -> None:
    params = SamplingParams(max_new_tokens=8)
    checks = examine(pair, TinyServer(pair, offset=1), TinyServer(pair, plain=False, offset=1), 3, params)
    assert checks["plain_ties"].status == checks["ties"].status == "flagged"
    assert checks["identical_texts"].status == "ok"
    assert checks["surprise"].status == "not run" and "temperature" in checks["surprise"].summary


@pytest.mark.parametrize(
    ("knows", "dialect"),
    [(("ids in", "ids out"), "ids in and out"), (("ids in",), "ids in"), ((), "text")],
)
def test_servers_of_every_dialect_are_understood(pair: TinyPair, knows: Sequence[str], dialect: str) -> None:
    server = TinyServer(pair, knows=knows)
    with running(server):
        client = Server(server.url.removesuffix("/v1") + "/", Words())
        replies = [client.complete(prompt, PARAMS) for prompt in prompts(2)]
    assert client.dialect == dialect and client.model == "tiny"
    assert [reply.has_own_ids for reply in replies] == [dialect == "ids in and out"] * 2
    for reply, prompt in zip(replies, prompts(2), strict=True):
        assert reply.request.prompt_ids == prompt.token_ids
        assert Words().decode(reply.completion.token_ids) == reply.completion.text
    assert type(server.bodies[-1]["prompt"]) is (str if dialect == "text" else list)


def test_text_servers_are_tested_at_temperature_0_and_by_difference(pair: TinyPair) -> None:
    plain, speculative = (TinyServer(pair, plain=p, knows=()) for p in (True, False))
    checks = examine(pair, plain, speculative, 4)
    assert checks["ties"].status == "ok" and "encoded again" in checks["ties"].details["token_ids"]
    assert checks["surprise"].status == checks["plain_uniformity"].status == "not run"
    assert checks["surprise_difference"].status == "ok"


def test_a_text_server_needs_prompts_with_text(pair: TinyPair) -> None:
    server = TinyServer(pair, knows=())
    with running(server), pytest.raises(ConfigError, match="'a' has only token ids"):
        Server(server.url, Words()).complete(Prompt("a", (3, 4)), PARAMS)


def test_text_that_is_encoded_again_begins_without_a_begin_token(pair: TinyPair) -> None:
    class Begun(Words):
        def encode(self, text: str) -> list[int]:
            return [1, *super().encode(text)]

    server = TinyServer(pair, knows=("ids in",))
    with running(server):
        reply = Server(server.url, Begun()).complete(prompts(1)[0], PARAMS)
    assert Words().decode(reply.completion.token_ids) == reply.completion.text


# What can go wrong


def test_the_key_is_sent_and_its_absence_is_said(pair: TinyPair) -> None:
    server = TinyServer(pair, key="secret")
    with running(server):
        assert (
            Server(server.url, Words(), api_key="secret").complete(prompts(1)[0], PARAMS).completion.token_ids
        )
        with pytest.raises(ServerError, match=r"HTTP 401 Unauthorized.*wrong key"):
            Server(server.url, Words()).complete(prompts(1)[0], PARAMS)


@pytest.mark.parametrize(
    ("code", "document", "expected"),
    [
        (500, {"error": "out of memory"}, "HTTP 500 .*out of memory"),
        (400, {"error": "no such model"}, "HTTP 400 .*no such model"),
        (200, b"<html>hello</html>", "expected JSON, got <html>hello"),
        (200, {"choices": []}, "a list of 'choices'"),
        (200, [1, 2], "a list of 'choices'"),
        (200, {"choices": [{"text": None}]}, "a completion with a text"),
    ],
)
def test_bad_answers_are_shown(
    pair: TinyPair, code: int, document: Any, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = TinyServer(pair)
    monkeypatch.setattr(server, "answer", lambda body: (code, document))
    with running(server), pytest.raises(ServerError, match=expected):
        Server(server.url, Words()).complete(prompts(1)[0], PARAMS)


def test_silence_and_absence_are_told_apart() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(ServerError, match=r"cannot be reached.*is it running"):
            Server(url, Words(), timeout_s=5)
        listener.listen()
        with pytest.raises(ServerError, match=r"no answer within 0\.2 s"):
            Server(url, Words(), timeout_s=0.2)


def test_addresses_settings_and_tokens_are_checked(pair: TinyPair) -> None:
    for url in ("localhost:8000", "file:///etc/hosts", "http://"):
        with pytest.raises(ConfigError, match="url: expected http"):
            Server(url, Words())
    plain = TinyServer(pair)
    with running(plain):
        server = Server(plain.url, Words())
        for settings, expected in (
            (Settings(PARAMS, batch_sizes=(2,)), "batch_sizes"),
            (Settings(SamplingParams(top_k=3)), "only max_new_tokens, temperature, top_p, seed"),
        ):
            with pytest.raises(ConfigError, match=expected):
                verify_servers(pair.target, server, server, prompts(1), settings, silent)
        with pytest.raises(ConfigError, match="not in the vocabulary of tiny"):
            verify_servers(
                TinyPair(vocab_size=20).target, server, server, prompts(1), Settings(PARAMS), silent
            )
