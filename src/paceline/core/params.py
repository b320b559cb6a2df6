"""`SamplingParams`: everything one request may ask of its text, checked before any compute.

An invalid or contradictory value raises `ConfigError` naming the field, its range and what was given. What depends on
the target (ids beyond its vocabulary, its ends of text) is checked by `check_for_target`.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, Self, cast

from paceline.core.errors import ConfigError, RequestError

MAX_SEED = 2**63 - 1
MAX_TOKEN_ID = 2**31 - 1
MAX_LOGPROBS = 20
MAX_STOP_STRINGS, MAX_STOP_LENGTH = 64, 1024
MAX_GRAMMAR_LENGTH = 1_000_000
MAX_SAMPLES = 128
GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: float32 logits have no finer differences to divide by it."""

GRAMMAR_KINDS = ("json_schema", "regex", "lark")


@dataclass(frozen=True, slots=True)
class Grammar:
    """A language that the text must belong to.

    Args:
        kind: "json_schema", "regex" (the whole text matches) or "lark" (a context-free grammar).
        source: the schema as JSON text, the expression, or the grammar.
        after: token ids after which the grammar begins, such as the end of a reasoning part; empty begins at once.
    """

    kind: Literal["json_schema", "regex", "lark"]
    source: str
    after: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in GRAMMAR_KINDS:
            raise ConfigError(f"grammar.kind: expected one of {', '.join(GRAMMAR_KINDS)}, got {self.kind!r}")
        if not isinstance(self.source, str) or not 1 <= len(self.source) <= MAX_GRAMMAR_LENGTH:
            raise ConfigError(
                f"grammar.source: expected text of 1…{MAX_GRAMMAR_LENGTH:,} characters, got {_brief(self.source)}"
            )
        object.__setattr__(self, "after", _token_ids("grammar.after", self.after))

    @classmethod
    def json_schema(cls, schema: str | Mapping[str, Any] | bool, after: Iterable[int] = ()) -> Self:
        """Returns the grammar of all JSON values that a schema allows."""
        text = schema if isinstance(schema, str) else json.dumps(schema)
        try:
            json.loads(text)
        except ValueError as error:
            raise ConfigError(f"grammar: the JSON schema is not JSON ({error})") from error
        return cls("json_schema", text, tuple(after))


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """What one request asks of the text. The order in which filters apply is that of `core.sampling`.

    Args:
        max_new_tokens: upper limit of generated tokens, at least 1.
        temperature: 0 is greedy (the one-hot case of the same law), as is anything below 1e-5; up to 100.
        top_k: only the `top_k` likeliest tokens, ties at the limit included; 0 is off.
        top_p: only the smallest set of likeliest tokens that holds this much probability, (0, 1]; 1 is off.
        min_p: only tokens with at least this share of the likeliest token's probability, [0, 1]; 0 is off.
        repetition_penalty: divides positive and multiplies negative logits of tokens that prompt or text hold,
            (0, 100]; 1 is off.
        presence_penalty, frequency_penalty: subtracted from logits of generated tokens once, and by count, [-2, 2].
        logit_bias: token id → added to its logit, [-100, 100].
        bad_words: token sequences that are never completed.
        allowed_token_ids: only these tokens; `None` allows all.
        stop_token_ids: token ids that end the text, beside the target's own end-of-sequence ids.
        stop: texts that end the text; they are not part of it.
        min_new_tokens: ends of text (EOS, stop ids, stop strings) count only after so many tokens.
        ignore_eos: go on past the target's end-of-sequence ids.
        grammar: the language that the text must belong to.
        n: how many texts; they differ by their sample index. Above 1 needs a temperature.
        seed: key of the request's randomness; the same seed gives the same text with any drafter or batch.
            `None` draws a fresh key.
        logprobs: log-probabilities of the chosen token and of so many likeliest ones, 0…20; `None` gives none.
        logprobs_mode: "raw" reads them from the target's logits, "processed" from what the token was drawn from
            (at temperature 0: after every filter, before the maximum is taken).
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    min_new_tokens: int = 0
    ignore_eos: bool = False
    grammar: Grammar | None = None
    n: int = 1
    seed: int | None = None
    logprobs: int | None = None
    logprobs_mode: Literal["raw", "processed"] = "raw"

    def __post_init__(self) -> None:
        self._check_numbers()
        self._normalise()
        self._check_together()

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Returns the parameters of a mapping, such as parsed JSON; `grammar` may be a mapping of its own.

        Raises:
            ConfigError: an unknown field, with the nearest known one, or an invalid value.
        """
        _refuse_unknown("sampling parameters", values, cls)
        given = dict(values)
        if isinstance(given.get("grammar"), Mapping):
            _refuse_unknown("grammar", given["grammar"], Grammar)
            missing = [name for name in ("kind", "source") if name not in given["grammar"]]
            if missing:
                raise ConfigError(f"grammar: expected {' and '.join(missing)}, got none")
            given["grammar"] = Grammar(**given["grammar"])
        if isinstance(given.get("logit_bias"), Mapping):
            given["logit_bias"] = tuple((_token_key(k), v) for k, v in given["logit_bias"].items())
        if isinstance(given.get("stop"), str):
            given["stop"] = (given["stop"],)
        return cls(**given)

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return self.temperature < GREEDY_BELOW

    @property
    def bias(self) -> tuple[tuple[int, float], ...]:
        """`logit_bias` as pairs, ascending by token."""
        return cast(tuple[tuple[int, float], ...], self.logit_bias)

    def ends(self, eos_token_ids: Iterable[int]) -> frozenset[int]:
        """Returns the token ids that end the text."""
        return frozenset(self.stop_token_ids) | (frozenset() if self.ignore_eos else frozenset(eos_token_ids))

    def check_for_target(self, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        """Checks what only a target can tell.

        Raises:
            RequestError: ids that the target does not have, or filters that could leave no token at all.
        """
        named = {
            "stop_token_ids": self.stop_token_ids,
            "allowed_token_ids": self.allowed_token_ids or (),
            "logit_bias": [token for token, _ in self.bias],
            "bad_words": [token for word in self.bad_words for token in word],
            "grammar.after": self.grammar.after if self.grammar else (),
        }
        for name, ids in named.items():
            unknown = next((token for token in ids if token >= vocab_size), None)
            if unknown is not None:
                raise RequestError(f"{name}: token ids must be in 0…{vocab_size - 1}, got {unknown}")
        self._check_some_token_is_left(vocab_size, self.ends(eos_token_ids))

    def _check_some_token_is_left(self, vocab_size: int, ends: frozenset[int]) -> None:
        """Some allowed token must close no bad word and, where ends must wait, be no end: it is left at every row."""
        forbidden = {word[-1] for word in self.bad_words} | (ends if self.min_new_tokens else set())
        allowed = range(vocab_size) if self.allowed_token_ids is None else self.allowed_token_ids
        if forbidden and all(token in forbidden for token in allowed):
            raise RequestError(
                "allowed_token_ids, bad_words, min_new_tokens: together they could leave no token at all; expected "
                "at least one allowed token that closes no bad word and is no end of text while min_new_tokens holds"
            )

    def _check_numbers(self) -> None:
        _require_int("max_new_tokens", self.max_new_tokens, 1, 1_000_000)
        _require_int("min_new_tokens", self.min_new_tokens, 0, 1_000_000)
        _require_int("top_k", self.top_k, 0, MAX_TOKEN_ID)
        _require_int("n", self.n, 1, MAX_SAMPLES)
        _require_number("temperature", self.temperature, 0.0, 100.0)
        _require_number("top_p", self.top_p, 0.0, 1.0, open_below=True)
        _require_number("min_p", self.min_p, 0.0, 1.0)
        _require_number("repetition_penalty", self.repetition_penalty, 0.0, 100.0, open_below=True)
        _require_number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _require_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.seed is not None:
            _require_int("seed", self.seed, 0, MAX_SEED)
        if self.logprobs is not None:
            _require_int("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.logprobs_mode not in ("raw", "processed"):
            raise ConfigError(f"logprobs_mode: expected 'raw' or 'processed', got {self.logprobs_mode!r}")
        if not isinstance(self.ignore_eos, bool):
            raise ConfigError(f"ignore_eos: expected true or false, got {self.ignore_eos!r}")
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            raise ConfigError(f"grammar: expected a Grammar, got {_brief(self.grammar)}")

    def _normalise(self) -> None:
        """Brings collections to tuples, so that equal parameters are equal and hashable."""
        put = object.__setattr__
        put(self, "stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        if self.allowed_token_ids is not None:
            put(self, "allowed_token_ids", _token_ids("allowed_token_ids", self.allowed_token_ids))
        put(
            self,
            "bad_words",
            tuple(_token_ids("bad_words", word) for word in _items("bad_words", self.bad_words)),
        )
        bias = self.logit_bias.items() if isinstance(self.logit_bias, Mapping) else self.logit_bias
        put(self, "logit_bias", tuple(sorted(_bias(pair) for pair in _items("logit_bias", bias))))
        put(self, "stop", _stop_strings(self.stop))

    def _check_together(self) -> None:
        if self.min_new_tokens > self.max_new_tokens:
            raise ConfigError(
                f"min_new_tokens: expected at most max_new_tokens = {self.max_new_tokens}, got {self.min_new_tokens}"
            )
        if self.allowed_token_ids == ():
            raise ConfigError("allowed_token_ids: expected at least one id, or None for all; got none")
        if () in self.bad_words:
            raise ConfigError("bad_words: expected at least one token in each sequence, got an empty one")
        ids = [token for token, _ in self.bias]
        if len(set(ids)) < len(ids):
            raise ConfigError("logit_bias: expected each token once, got one twice")
        if self.n > 1 and self.is_greedy:
            raise ConfigError(f"n: expected 1 at temperature 0, where all texts are the same; got {self.n}")
        if self.logprobs is None and self.logprobs_mode != "raw":
            raise ConfigError(f"logprobs_mode: {self.logprobs_mode!r} needs logprobs, which is not set")
        if self.grammar is not None:
            clashing = [
                name
                for name, is_set in (
                    ("min_new_tokens", self.min_new_tokens > 0),
                    ("ignore_eos", self.ignore_eos),
                    ("bad_words", bool(self.bad_words)),
                    ("allowed_token_ids", self.allowed_token_ids is not None),
                )
                if is_set
            ]
            if clashing:
                raise ConfigError(
                    f"grammar: cannot be kept together with {', '.join(clashing)}, which may forbid the only token "
                    "that the grammar allows; hint: say it in the grammar"
                )


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}… ({type(value).__name__})"


def _require_int(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"{name}: expected an integer in [{low}, {high}], got {_brief(value)}")


def _require_number(name: str, value: object, low: float, high: float, *, open_below: bool = False) -> None:
    good = isinstance(value, (int, float)) and not isinstance(value, bool)  # no comparison holds for NaN
    if not good or not low <= cast(float, value) <= high or (open_below and value == low):
        bracket = "(" if open_below else "["
        raise ConfigError(f"{name}: expected a number in {bracket}{low:g}, {high:g}], got {_brief(value)}")


def _items(name: str, value: object) -> tuple[Any, ...]:
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise ConfigError(f"{name}: expected a list, got {_brief(value)}")
    return tuple(value)


def _token_ids(name: str, value: object) -> tuple[int, ...]:
    ids = _items(name, value)
    for token in ids:
        _require_int(name, token, 0, MAX_TOKEN_ID)
    return ids


def _bias(pair: object) -> tuple[int, float]:
    if not isinstance(pair, tuple) or len(pair) != 2:
        raise ConfigError(f"logit_bias: expected token id → number, got {_brief(pair)}")
    _require_int("logit_bias", pair[0], 0, MAX_TOKEN_ID)
    _require_number("logit_bias", pair[1], -100.0, 100.0)
    return pair[0], float(pair[1])


def _token_key(key: object) -> object:
    """JSON has only strings for keys."""
    return int(key) if isinstance(key, str) and key.isdecimal() else key


def _stop_strings(value: object) -> tuple[str, ...]:
    strings = _items("stop", value)
    if len(strings) > MAX_STOP_STRINGS:
        raise ConfigError(f"stop: expected at most {MAX_STOP_STRINGS} strings, got {len(strings)}")
    for text in strings:
        if not isinstance(text, str) or not 1 <= len(text) <= MAX_STOP_LENGTH:
            raise ConfigError(f"stop: expected strings of 1…{MAX_STOP_LENGTH} characters, got {_brief(text)}")
    return strings


def _refuse_unknown(what: str, values: Mapping[str, Any], kind: type) -> None:
    known = [f.name for f in fields(kind)]
    for name in values:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            hint = f"; did you mean {near[0]}?" if near else f"; known are {', '.join(known)}"
            raise ConfigError(f"{what}: unknown field {name!r}{hint}")
