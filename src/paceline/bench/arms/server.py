"""Arms that are servers: one that is there already (kind "url"), or one that is started from a command ("server")."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import monotonic, perf_counter, sleep
from typing import Any

from paceline.bench.arms.base import ArmError, Done, Fingerprint, Job, Load, Outcome, Passed
from paceline.bench.arms.counters import difference, settled_counters
from paceline.bench.arms.endpoint import Endpoint, LostConnectionError, RefusedError, ServerError, first_entry
from paceline.bench.arms.identity import describe, split_flags
from paceline.bench.arms.launch import Launched, refuse_if_taken
from paceline.bench.arms.streaming import failed, request_body, stream_chat
from paceline.bench.runs.load import drive
from paceline.core.errors import ConfigError
from paceline.core.params import SamplingParams

ASK_S = 10.0
"""Longest wait for what is not an answer to a job: lists, versions, counters, health."""
MODELS = "/v1/models"

Options = Mapping[str, str | int | float | bool]

SERVER_KINDS = ("url", "server")
URL_OPTIONS: dict[str, type] = {
    "url": str,
    "model": str,
    "api_key": str,
    "timeout_s": float,
    "extra": str,
    "max_concurrency": int,
}
SERVER_OPTIONS: dict[str, type] = URL_OPTIONS | {
    "command": str,
    "startup_timeout_s": float,
    "health_path": str,
}


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """How a server is asked and, with a command, started.

    Args:
        url: its address, with or without "/v1".
        model: as the server calls it; `None` takes the first of its list.
        api_key: sent as bearer token.
        timeout_s: longest wait for one answer.
        extra: further fields of each request, such as `{"cache_prompt": false}` for llama.cpp, or
            `{"return_spec_tokens_details": true}` for acceptance per request from SGLang.
        max_concurrency: see `Arm`.
        command: what starts it, in words; it stays in the foreground. Environment variables can be set by starting
            with `env NAME=VALUE`. `None` where the server runs already.
        startup_timeout_s: longest wait until it is ready.
        health_path: answers with success when it is ready. Where there is no such path, the list of models does.
    """

    url: str
    model: str | None = None
    api_key: str | None = field(default=None, repr=False)
    timeout_s: float = 300.0
    extra: Mapping[str, Any] = field(default_factory=dict)
    max_concurrency: int | None = None
    command: tuple[str, ...] | None = None
    startup_timeout_s: float = 600.0
    health_path: str = "/health"


def server_arm(name: str, kind: str, options: Options) -> ServerArm:
    """Returns an arm of kind "url" or "server"; see `ServerSettings` for its options, `extra` being JSON text.

    Raises:
        ConfigError: an option that is unknown, missing or out of range.
    """
    known = SERVER_OPTIONS if kind == "server" else URL_OPTIONS
    values = {option: _checked(f"arm {name!r}, {option}", value, known.get(option), known)
              for option, value in options.items()}  # fmt: skip
    required = ("url", "command") if kind == "server" else ("url",)
    missing = [option for option in required if option not in values]
    if missing:
        raise ConfigError(f"arm {name!r}: expected the option {missing[0]} of an arm of kind {kind}")
    if "extra" in values:
        values["extra"] = _extra(f"arm {name!r}, extra", values["extra"])
    if "command" in values:
        values["command"] = _words(f"arm {name!r}, command", values["command"])
    return ServerArm(name, ServerSettings(**values))


class ServerArm:
    """A server as an arm; see `Arm`.

    Args:
        name: what the plan calls it.
        settings: see `ServerSettings`.

    Raises:
        ConfigError: an address that is none.
    """

    def __init__(self, name: str, settings: ServerSettings) -> None:
        self.name, self.max_concurrency = name, settings.max_concurrency
        self._settings = settings
        self._endpoint = Endpoint(settings.url, settings.api_key, settings.timeout_s)
        self._quick = replace(self._endpoint, timeout_s=min(ASK_S, settings.timeout_s))
        self._launched: Launched | None = None
        self._model = ""
        self._fingerprint: Fingerprint | None = None

    def open(self) -> Fingerprint:
        """Starts the server if it is to be started, and returns what is known of it; harmless when open.

        Raises:
            ArmError: something else listens at its address; it does not start, is not ready in time, or does not answer
                as a server of chat completions does.
        """
        if self._fingerprint is not None:
            return self._fingerprint
        try:
            if self._settings.command is not None:
                refuse_if_taken(self._endpoint.url)
                self._launched = Launched(self._settings.command)
                self._wait_until_ready(self._launched)
            self._fingerprint = self._identify()
        except ServerError as error:
            failure = self._dead(str(error))
            self.close()
            raise failure from error
        except BaseException:
            self.close()
            raise
        return self._fingerprint

    def run(self, jobs: Sequence[Job], load: Load, done: Done) -> Passed:
        """Returns what came of the jobs; see `Arm`. Counters are the server's own, between before and after.

        Raises:
            ArmError: the arm is not open, or the server is gone.
        """
        if self._fingerprint is None:
            raise ArmError(f"{self.name}: expected an open arm, got a closed one")

        def complete(job: Job, began: float) -> Outcome:
            started = began + job.due_s if load.is_open else perf_counter()
            return replace(self._answer(job, started), sent_s=started - began)

        notes: list[str] = []
        before = self._counted(notes)
        if self._launched is not None:
            self._launched.reset_peak()
        began = perf_counter()
        outcomes = drive(jobs, load, complete, done)
        wall_s = perf_counter() - began
        peak = self._launched.peak_memory_bytes() if self._launched is not None else None
        counters = self._difference(before, self._counted(notes), notes)
        return Passed(outcomes, wall_s, peak_memory_bytes=peak, counters=counters, notes=tuple(notes))

    def close(self) -> None:
        """Stops the server if this arm started it; harmless when closed."""
        launched, self._launched, self._fingerprint = self._launched, None, None
        if launched is not None:
            launched.stop()

    def _answer(self, job: Job, started: float) -> Outcome:
        """Returns what came of a job, unless the server is gone."""
        try:
            return stream_chat(
                self._endpoint, job, model=self._model, started=started, extra=self._settings.extra
            )
        except LostConnectionError as error:
            try:
                self._quick.read(MODELS)
            except LostConnectionError:
                raise self._dead(f"request {job.id}: {error}") from error
            except ServerError:  # it answers, whatever it says
                pass
            return failed(job, error)

    def _dead(self, reason: str) -> ArmError:
        """Returns the error of a server that is gone, with its exit code and the end of its log where it has them."""
        if self._launched is None:
            return ArmError(f"{self.name}: {reason}")
        code = self._launched.exit_code(within_s=1.0)  # it may be about to end
        ended = "" if code is None else f"; its process ended with exit code {code}"
        return ArmError(f"{self.name}: {reason}{ended}; {self._launched.last_words()}")

    def _wait_until_ready(self, launched: Launched) -> None:
        """Returns when the started server answers.

        Raises:
            ArmError: it ended before, or took too long.
        """
        deadline = monotonic() + self._settings.startup_timeout_s
        while not self._is_ready():
            if launched.exit_code() is not None:
                raise self._dead("the server did not start")
            if monotonic() > deadline:
                raise self._dead(f"the server was not ready within {self._settings.startup_timeout_s:g} s")
            sleep(0.1)

    def _is_ready(self) -> bool:
        try:
            try:
                self._quick.read(self._settings.health_path)
            except RefusedError:
                self._quick.read(MODELS)
        except ServerError:
            return False
        return True

    def _identify(self) -> Fingerprint:
        """Returns what is known of the server; finds out the model's name on the way."""
        entry = self._entry()
        self._model = self._settings.model or str(entry["id"])
        # the probe is a first answer, and may take as long as one
        basis, speculation = describe(self._endpoint, self._model, entry)
        flags, speculation_flags = split_flags(self._settings.command or ())
        basis |= flags if self._settings.command else {}
        if self._settings.extra:
            basis["extra"] = json.dumps(dict(self._settings.extra), sort_keys=True)
        return Fingerprint(basis, speculation | speculation_flags)

    def _entry(self) -> dict[str, Any]:
        """Returns the model's entry in the server's list; empty where a model is named and is not in it."""
        name = self._settings.model
        try:
            answer = self._quick.ask(MODELS)
            first = first_entry(answer, "data", self._endpoint.url)
        except RefusedError:
            if name is None:
                raise
            return {}
        if name is None:
            if not isinstance(first.get("id"), str):
                raise ServerError(
                    f"{self._endpoint.url}: its list of models names none; hint: say which model"
                )
            return first
        entries = (entry for entry in answer["data"] if isinstance(entry, dict))
        return next((entry for entry in entries if entry.get("id") == name), {})

    def _counted(self, notes: list[str]) -> dict[str, float] | None:
        try:
            return settled_counters(self._quick)
        except ServerError as error:
            notes.append(f"{self.name}: no counters of acceptance: {error}")
            return None

    def _difference(
        self, before: dict[str, float] | None, after: dict[str, float] | None, notes: list[str]
    ) -> dict[str, float]:
        try:
            return difference(before, after)
        except ServerError as error:
            notes.append(f"{self.name}: no counters of acceptance: {error}")
            return {}


def _checked(where: str, value: object, kind: type | None, known: Mapping[str, type]) -> Any:
    """Returns an option's value in its own type."""
    if kind is None:
        raise ConfigError(f"{where}: unknown option; expected some of {', '.join(known)}")
    if kind is str:
        if not isinstance(value, str) or not value:
            raise ConfigError(f"{where}: expected text, got {value!r}")
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0 or kind(value) != value:
        expected = "a whole number" if kind is int else "a number of seconds"
        raise ConfigError(f"{where}: expected {expected} above 0, got {value!r}")
    return kind(value)


def _extra(where: str, text: str) -> dict[str, Any]:
    try:
        extra = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{where}: expected a JSON object, got {text!r} ({error})") from error
    if not isinstance(extra, dict):
        raise ConfigError(f"{where}: expected a JSON object, got {text!r}")
    own = request_body(Job("", [], SamplingParams(1, top_k=1, seed=0)), "")
    taken = sorted(own.keys() & extra.keys())
    if taken:
        raise ConfigError(f"{where}: expected fields other than {', '.join(own)}; got {', '.join(taken)}")
    return extra


def _words(where: str, command: str) -> tuple[str, ...]:
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ConfigError(f"{where}: expected a command line, got {command!r} ({error})") from error
    if not words:
        raise ConfigError(f"{where}: expected a command line, got {command!r}")
    return tuple(words)
