"""`bench.arms.server` and what it stands on, against a real server here that behaves well, badly, or dies."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from http_jobs import TEXT, free_port, job
from paceline.bench.arms import launch
from paceline.bench.arms import server as server_module
from paceline.bench.arms.base import ArmError, Load, Outcome, Passed
from paceline.bench.arms.server import ServerArm, server_arm
from paceline.core.errors import ConfigError
from unruly_server import UnrulyServer, running

SCRIPT = Path(__file__).with_name("unruly_server.py")


@pytest.fixture(autouse=True)
def _surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # of no use
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture
def server() -> Iterator[UnrulyServer]:
    with running(UnrulyServer()) as started:
        yield started


@contextmanager
def opened(arm: ServerArm) -> Iterator[ServerArm]:
    try:
        arm.open()
        yield arm
    finally:
        arm.close()


def passed(arm: ServerArm, manners: Sequence[str], load: Load | None = None) -> Passed:
    jobs = [job(manner, f"{i} {manner}") for i, manner in enumerate(manners)]
    return arm.run(jobs, load or Load(3), lambda outcome: None)


# Passes --------------------------------------------------------------------------------------------------------------


FAILURES = {
    "http-500": r"HTTP 500 Internal Server Error: .*too much\\nfor me",
    "http-429": r"HTTP 429 Too Many Requests: .*too much",
    "unstreamed": r"expected a stream \(text/event-stream\), got application/json: .*all at once",
    "ends": r"the stream ended before a finish_reason; 2 chunks of text had come",
    "no-usage": r"no usage: tokens cannot be counted; the server must honour stream_options\.include_usage",
    "no-json": r'expected JSON in a data line, got \{"choices": \[; 2 chunks of text had come',
    "error-inside": r"the server says: out of memory; 2 chunks",
    "zero": r"the answer has 0 tokens \(finish_reason 'stop'\), so it has no speed",
    "abort": r"the server ended the answer with 'abort'",
    "cut": r"completions: the connection broke \(IncompleteRead.*\); 2 chunks of text had come",
    "reset": r"completions: the connection broke \(.*reset by peer\); 2 chunks of text had come",
}


def test_failures_are_said_and_good_requests_of_the_same_pass_are_unaffected(server: UnrulyServer) -> None:
    manners = [manner for failing in FAILURES for manner in (failing, "good")]
    told: list[Outcome] = []
    with opened(server_arm("arm", "url", {"url": server.url})) as arm:
        jobs = [job(manner, f"{i} {manner}") for i, manner in enumerate(manners)]
        outcomes = {outcome.id: outcome for outcome in arm.run(jobs, Load(4), told.append).outcomes}
    assert outcomes.keys() == {one.id for one in jobs} == {outcome.id for outcome in told}
    for id, outcome in outcomes.items():
        if (manner := id.split()[1]) == "good":
            assert outcome.failure is None and outcome.text == TEXT
        else:
            assert outcome.failure is not None and outcome.failure.startswith(f"request {id}: ")
            with pytest.raises(AssertionError, match=FAILURES[manner]):
                raise AssertionError(outcome.failure)
            assert outcome == Outcome(id, outcome.failure, outcome.sent_s)


def test_counters_of_a_pass(server: UnrulyServer) -> None:
    with opened(server_arm("arm", "url", {"url": server.url})) as arm:
        first, second = passed(arm, ["good"] * 3), passed(arm, ["good"] * 2)
        assert first.counters == {"num_steps": 12, "num_drafted": 36, "num_accepted": 15}
        assert second.counters == {"num_steps": 8, "num_drafted": 24, "num_accepted": 10} and not second.notes
        restarted = passed(arm, ["good", "restarted"], Load(1))
        assert restarted.counters == {} and all(outcome.failure is None for outcome in restarted.outcomes)
        assert "num_steps went from 20 to 0: the server was started again" in restarted.notes[0]
        server.counts = None
        assert passed(arm, ["good"]).counters == {}


def test_never_more_at_once_than_asked_for(server: UnrulyServer) -> None:
    with opened(server_arm("arm", "url", {"url": server.url})) as arm:
        for concurrency in (1, 3):
            server.most_under_way = 0
            passed(arm, ["slow"] * (concurrency + 1), Load(concurrency))
            assert server.most_under_way == concurrency


def test_an_open_loop_counts_from_when_a_request_was_due(server: UnrulyServer) -> None:
    jobs = [job("slow", f"job {i}", due_s=0.2 * i) for i in range(3)]
    with opened(server_arm("arm", "url", {"url": server.url})) as arm:
        result = arm.run(jobs, Load(rate_per_s=5.0), lambda outcome: None)
    sent = {outcome.id: outcome.sent_s for outcome in result.outcomes}
    assert sent == pytest.approx({one.id: one.due_s for one in jobs})
    assert server.most_under_way > 1  # 0.5 s each, 0.2 s apart
    assert all(
        0.18 <= (outcome.ttft_s or 0) <= (outcome.e2e_s or 0) <= result.wall_s for outcome in result.outcomes
    )


def test_fields_model_and_key_are_sent() -> None:
    options: dict[str, str | int] = {
        "model": "mine",
        "api_key": "secret",
        "extra": '{"cache_prompt": false}',
        "max_concurrency": 4,
    }
    with running(UnrulyServer(key="secret")) as server:
        with opened(server_arm("arm", "url", {"url": server.url, **options})) as arm:
            assert arm.max_concurrency == 4 and passed(arm, ["good"]).outcomes[0].failure is None
            assert "secret" not in repr(arm.open()) + repr(arm._settings) + repr(arm._endpoint)
        assert server.bodies[-1]["cache_prompt"] is False and server.bodies[-1]["model"] == "mine"
        with pytest.raises(ArmError, match=r"^arm: .*HTTP 401 Unauthorized: .*wrong key"):
            server_arm("arm", "url", {"url": server.url}).open()


def test_a_server_that_is_gone_is_no_outcome() -> None:
    with running(UnrulyServer()) as server:
        arm = server_arm("arm", "url", {"url": server.url})
        arm.open()
    with pytest.raises(ArmError, match=r"^arm: request \d good: .*cannot be reached.*is it running"):
        passed(arm, ["good"] * 2)
    arm.close()
    with pytest.raises(ArmError, match="expected an open arm"):
        passed(arm, ["good"])
    with pytest.raises(ArmError, match="cannot be reached"):
        arm.open()


# Servers that are started --------------------------------------------------------------------------------------------


def started(*arguments: str, wrap: str = "{}", **options: str | float) -> ServerArm:
    port = free_port()
    command = shlex.join([sys.executable, str(SCRIPT), str(port), *arguments])
    url = f"http://127.0.0.1:{port}"
    return server_arm(
        "arm", "server", {"url": url, "command": wrap.format(command), "startup_timeout_s": 20.0, **options}
    )


def is_gone(arm: ServerArm) -> bool:
    try:
        launch.refuse_if_taken(arm._endpoint.url)
    except ArmError:
        return False
    return True


def test_a_started_server_answers_and_is_gone_after_close() -> None:
    arm = started("loading", "0.4", wrap="sh -c '{} & wait'")  # the server is a child of what is started
    with opened(arm):
        assert arm.open() is arm.open()
        result = passed(arm, ["good"] * 3)
        assert [outcome.failure for outcome in result.outcomes] == [None] * 3
        if sys.platform == "linux":
            assert result.peak_memory_bytes is not None and 5e6 < result.peak_memory_bytes < 1e9
        log = arm._launched.log if arm._launched else Path()
        assert log.read_text() == "serving as loading\n" and not is_gone(arm)
    assert is_gone(arm) and not log.parent.exists()
    arm.close()
    with opened(arm):  # it can be opened again
        assert passed(arm, ["good"]).outcomes[0].failure is None
    assert is_gone(arm)


def test_a_server_that_will_not_stop_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "STOP_S", 0.2)
    own_group = "import subprocess, sys; subprocess.Popen(sys.argv[1:], process_group=0).wait()"
    arm = started("stubborn", wrap=shlex.join([sys.executable, "-c", own_group]) + " {}")
    with opened(arm):
        assert not is_gone(arm)
    assert is_gone(arm)


def test_a_server_that_dies_is_no_outcome() -> None:
    arm = started("healthless", "0", "--dtype", "float32", "--speculative-config", "dflash")
    with opened(arm):
        fingerprint = arm.open()
        assert fingerprint.basis["--dtype"] == "float32" and fingerprint.basis["server"] == "unruly"
        assert fingerprint.speculation == {"--speculative-config": "dflash"}
        expected = r"(?s)^arm: request .*exit code 3; the end of its log, .*serving as healthless$"
        with pytest.raises(ArmError, match=expected):
            passed(arm, ["good", "slow", "die", "slow", "slow", "good"], Load(2))
        assert arm._launched is not None and arm._launched.log.exists()
    with opened(arm):
        assert arm.open() == fingerprint and passed(arm, ["good"]).outcomes[0].failure is None


def test_a_server_that_does_not_start_shows_its_log() -> None:
    with pytest.raises(
        ArmError, match=r"(?s)^arm: the server did not start; .*exit code 7; .*serving as exit$"
    ):
        started("exit", "7").open()
    slow = started("loading", "60", startup_timeout_s=0.6)
    with pytest.raises(
        ArmError, match=r"(?s)not ready within 0\.6 s; the end of its log.*serving as loading"
    ):
        slow.open()
    assert is_gone(slow)
    with pytest.raises(ArmError, match=r"/nowhere/serve: cannot be started \(.*No such file"):
        server_arm("arm", "server", {"url": "http://127.0.0.1:9", "command": "/nowhere/serve it"}).open()


def test_an_address_that_is_taken_is_refused(server: UnrulyServer, tmp_path: Path) -> None:
    command = f"touch {tmp_path / 'started'}"
    with pytest.raises(ArmError, match=r"expected nobody there .* something answers already; hint: stop it"):
        server_arm("arm", "server", {"url": server.url, "command": command}).open()
    assert not (tmp_path / "started").exists()


def test_ctrl_c_leaves_no_server_and_an_arm_that_can_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    arm = started()
    with opened(arm):
        with pytest.raises(KeyboardInterrupt):
            arm.run([job("good", f"{i}") for i in range(6)], Load(2), interrupt)
        assert passed(arm, ["good"]).outcomes[0].failure is None
    assert is_gone(arm)
    monkeypatch.setattr(server_module, "sleep", interrupt)
    arm = started("loading", "60")
    with pytest.raises(KeyboardInterrupt):
        arm.open()
    assert is_gone(arm)


PROGRAM = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background of a shell start without it
from paceline.bench.arms.server import server_arm
arm = server_arm("arm", "server", {"url": sys.argv[1], "command": sys.argv[2]})
arm.open()
print("open", flush=True)
time.sleep(60)
"""


def test_a_program_that_is_interrupted_takes_its_server_along() -> None:
    arm = started()
    url, command = arm._settings.url, shlex.join(arm._settings.command or ())
    paths = os.pathsep.join(sys.path)
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, url, command],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": paths},
    ) as program:
        assert program.stdout is not None and program.stdout.readline() == b"open\n"
        assert not is_gone(arm)
        program.send_signal(signal.SIGINT)
        assert program.wait(60) != 0
    assert is_gone(arm)


# Options -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "options", "expected"),
    [
        (
            "url",
            {"url": "http://x", "colour": "red"},
            r"^arm 'a', colour: unknown option; expected some of url, model",
        ),
        ("url", {"url": "http://x", "command": "serve"}, "command: unknown option"),
        ("url", {}, "expected the option url of an arm of kind url"),
        ("server", {"url": "http://x"}, "expected the option command of an arm of kind server"),
        ("url", {"url": "x:1"}, "url: expected http://host:port"),
        ("url", {"url": 7}, "url: expected text, got 7"),
        (
            "url",
            {"url": "http://x", "timeout_s": 0},
            "timeout_s: expected a number of seconds above 0, got 0",
        ),
        (
            "url",
            {"url": "http://x", "max_concurrency": 1.5},
            "max_concurrency: expected a whole number above 0",
        ),
        ("url", {"url": "http://x", "max_concurrency": True}, "got True"),
        ("url", {"url": "http://x", "extra": "[1]"}, r"extra: expected a JSON object, got '\[1\]'"),
        ("url", {"url": "http://x", "extra": "{"}, "extra: expected a JSON object"),
        (
            "url",
            {"url": "http://x", "extra": '{"seed": 1, "x": 2}'},
            "expected fields other than .*; got seed$",
        ),
        ("server", {"url": "http://x", "command": "serve 'x"}, "command: expected a command line, got"),
        ("server", {"url": "http://x", "command": " "}, "command: expected a command line, got ' '"),
    ],
)
def test_options_are_checked(kind: str, options: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        server_arm("a", kind, options)


def test_options_arrive() -> None:
    arm = server_arm("a", "url", {"url": "http://x", "timeout_s": 5, "extra": json.dumps({"k": [1]})})
    assert arm._settings.timeout_s == 5.0 and arm._settings.extra == {"k": [1]} and arm.name == "a"
