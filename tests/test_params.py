"""What a request may ask: every range, every contradiction, and refusals before any compute."""

from __future__ import annotations

import json
import re
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.errors import ConfigError, RequestError
from paceline.core.params import MAX_TOKEN_ID, Grammar, SamplingParams
from paceline.core.types import Request
from paceline.engine.engine import Engine
from paceline.testing import tiny_target

NAN, INF = float("nan"), float("inf")
WHOLE = {
    "max_new_tokens": (1, 1_000_000),
    "min_new_tokens": (0, 1_000_000),
    "top_k": (0, MAX_TOKEN_ID),
    "n": (1, 128),
    "seed": (0, 2**63 - 1),
    "logprobs": (0, 20),
}
REAL = {
    "temperature": ("[", 0, 100),
    "top_p": ("(", 0, 1),
    "min_p": ("[", 0, 1),
    "repetition_penalty": ("(", 0, 100),
    "presence_penalty": ("[", -2, 2),
    "frequency_penalty": ("[", -2, 2),
}


def alone(name: str, value: Any) -> SamplingParams:
    """Returns parameters with one value, and what it cannot be without."""
    needed: dict[str, dict[str, Any]] = {
        "n": {"temperature": 1.0},
        "min_new_tokens": {"max_new_tokens": 1_000_000},
    }
    return SamplingParams(**{**needed.get(name, {}), name: value})


@pytest.mark.parametrize("name", WHOLE)
def test_whole_numbers_have_a_range(name: str) -> None:
    low, high = WHOLE[name]
    for good in (low, high):
        assert getattr(alone(name, good), name) == good
    for bad in (low - 1, high + 1, 10**400, float(high), True, str(low), NAN, [low]):
        expected = f"{name}: expected an integer in [{low}, {high}], got {repr(bad)[:20]}"
        with pytest.raises(ConfigError, match=re.escape(expected)):
            alone(name, bad)


@pytest.mark.parametrize("name", REAL)
def test_real_numbers_have_a_range(name: str) -> None:
    bracket, low, high = REAL[name]
    for good in (high, float(high), low + 1e-9, *([low] if bracket == "[" else [])):
        assert getattr(alone(name, good), name) == good
    bad_values = [low - 1e-9, high + 1e-9, NAN, INF, -INF, 10**400, "1", True, None, 1j, [1.0]]
    for bad in [*bad_values, *([low] if bracket == "(" else [])]:
        expected = f"{name}: expected a number in {bracket}{low}, {high}], got {repr(bad)[:20]}"
        with pytest.raises(ConfigError, match=re.escape(expected)):
            alone(name, bad)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"stop_token_ids": (-1,)}, f"stop_token_ids: expected an integer in [0, {MAX_TOKEN_ID}], got -1"),
        ({"stop_token_ids": ("a",)}, "stop_token_ids: expected an integer"),
        ({"stop_token_ids": "ab"}, "stop_token_ids: expected a list, got 'ab'"),
        ({"stop_token_ids": 7}, "stop_token_ids: expected a list, got 7"),
        ({"allowed_token_ids": (1, 2.0)}, "allowed_token_ids: expected an integer"),
        ({"allowed_token_ids": ()}, "allowed_token_ids: expected at least one id, or None for all; got none"),
        ({"bad_words": (1,)}, "bad_words: expected a list, got 1"),
        ({"bad_words": ((1, -2),)}, "bad_words: expected an integer"),
        (
            {"bad_words": ((1,), ())},
            "bad_words: expected at least one token in each sequence, got an empty one",
        ),
        ({"bad_words": "no"}, "bad_words: expected a list, got 'no'"),
        ({"logit_bias": {1: 100.5}}, "logit_bias: expected a number in [-100, 100], got 100.5"),
        ({"logit_bias": {1: NAN}}, "logit_bias: expected a number in [-100, 100], got nan"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias: expected an integer"),
        ({"logit_bias": {"1": 1.0}}, "logit_bias: expected an integer"),
        ({"logit_bias": ((1, 2.0), (1, 3.0))}, "logit_bias: expected each token once, got one twice"),
        ({"logit_bias": (1, 2)}, "logit_bias: expected token id → number, got 1"),
        ({"logit_bias": 3}, "logit_bias: expected a list, got 3"),
        ({"stop": ("",)}, "stop: expected strings of 1…1024 characters, got ''"),
        ({"stop": ("x" * 1025,)}, "stop: expected strings of 1…1024 characters, got 'xxx"),
        ({"stop": "text"}, "stop: expected a list, got 'text'"),
        ({"stop": (b"x",)}, "stop: expected strings"),
        ({"stop": ("x",) * 65}, "stop: expected at most 64 strings, got 65"),
        ({"ignore_eos": 1}, "ignore_eos: expected true or false, got 1"),
        ({"logprobs_mode": "all"}, "logprobs_mode: expected 'raw' or 'processed', got 'all'"),
        ({"grammar": "[a-z]+"}, "grammar: expected a Grammar, got '[a-z]+'"),
        # contradictions
        (
            {"min_new_tokens": 9, "max_new_tokens": 8},
            "min_new_tokens: expected at most max_new_tokens = 8, got 9",
        ),
        ({"n": 2}, "n: expected 1 at temperature 0, where all texts are the same; got 2"),
        ({"n": 2, "temperature": 1e-6}, "n: expected 1 at temperature 0"),
        ({"logprobs_mode": "processed"}, "logprobs_mode: 'processed' needs logprobs, which is not set"),
        (
            {"grammar": Grammar("regex", "a"), "min_new_tokens": 2, "ignore_eos": True, "bad_words": ((1,),)},
            "grammar: cannot be kept together with min_new_tokens, ignore_eos, bad_words, which may forbid",
        ),
        (
            {"grammar": Grammar("regex", "a"), "allowed_token_ids": (1,)},
            "grammar: cannot be kept together with allowed_token_ids",
        ),
    ],
)
def test_values_that_make_no_sense_name_themselves(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        SamplingParams(**values)


def test_a_long_value_is_not_shown_whole() -> None:
    with pytest.raises(ConfigError) as caught:
        SamplingParams(stop=(["x"] * 10_000,))  # type: ignore[arg-type]
    assert len(str(caught.value)) < 200 and "(list)" in str(caught.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Grammar("yaml", "x"), "grammar.kind: expected one of json_schema, regex, lark, got 'yaml'"),  # type: ignore[arg-type]
        (lambda: Grammar("regex", ""), "grammar.source: expected text of 1…1,000,000 characters, got ''"),
        (lambda: Grammar("regex", "x" * 1_000_001), "grammar.source: expected text"),
        (lambda: Grammar("regex", "x", (-1,)), "grammar.after: expected an integer"),
        (lambda: Grammar.json_schema("{"), "grammar: the JSON schema is not JSON"),
    ],
)
def test_grammars_name_what_is_wrong(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        make()


def test_a_schema_may_be_text_or_data() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    assert json.loads(Grammar.json_schema(schema).source) == schema
    assert Grammar.json_schema(json.dumps(schema)) == Grammar.json_schema(schema)
    assert Grammar.json_schema(True, after=[4, 5]) == Grammar("json_schema", "true", (4, 5))


# Data ----------------------------------------------------------------------------------------------------------------


def test_equal_parameters_are_equal_and_hashable() -> None:
    lists = SamplingParams(
        stop=["x"],  # type: ignore[arg-type]
        stop_token_ids=[1, 2],  # type: ignore[arg-type]
        bad_words=[[1, 2], [3]],  # type: ignore[arg-type]
        logit_bias={9: 1, 3: -2},
        allowed_token_ids=range(4),  # type: ignore[arg-type]
    )
    tuples = SamplingParams(
        stop=("x",),
        stop_token_ids=(1, 2),
        bad_words=((1, 2), (3,)),
        logit_bias=((3, -2.0), (9, 1.0)),
        allowed_token_ids=(0, 1, 2, 3),
    )
    assert lists == tuples and hash(lists) == hash(tuples)
    assert lists.bias == ((3, -2.0), (9, 1.0))
    assert replace(lists, seed=3) == replace(tuples, seed=3)


def test_what_json_says() -> None:
    text = """{"max_new_tokens": 9, "temperature": 1, "stop": "END", "logit_bias": {"5": 2, "11": -100},
               "bad_words": [[1, 2]], "grammar": null, "seed": 4, "n": 3, "logprobs": 0}"""
    assert SamplingParams.from_dict(json.loads(text)) == SamplingParams(
        max_new_tokens=9,
        temperature=1.0,
        stop=("END",),
        logit_bias={5: 2.0, 11: -100.0},
        bad_words=((1, 2),),
        seed=4,
        n=3,
        logprobs=0,
    )
    shaped = SamplingParams.from_dict(
        {"grammar": {"kind": "regex", "source": "a+", "after": [7]}, "stop": ["a", "b"]}
    )
    assert shaped.grammar == Grammar("regex", "a+", (7,)) and shaped.stop == ("a", "b")
    assert SamplingParams.from_dict({}) == SamplingParams()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temprature": 1.0}, "sampling parameters: unknown field 'temprature'; did you mean temperature?"),
        ({"max_tokens": 5}, "unknown field 'max_tokens'; did you mean max_new_tokens?"),
        ({"zzz": 5}, "unknown field 'zzz'; known are max_new_tokens, temperature"),
        (
            {"grammar": {"kind": "regex", "sauce": "a"}},
            "grammar: unknown field 'sauce'; did you mean source?",
        ),
        ({"grammar": {"after": [1]}}, "grammar: expected kind and source, got none"),
        ({"grammar": {"kind": "regex"}}, "grammar: expected source, got none"),
        ({"logit_bias": {"x": 1.0}}, "logit_bias: expected an integer"),
        ({"logit_bias": {"5": 1.0, "05": 2.0}}, "logit_bias: expected each token once, got one twice"),
        ({"temperature": 10**400}, "temperature: expected a number in [0, 100]"),
        ({"temperature": None}, "temperature: expected a number in [0, 100], got None"),
        ({"stop": None}, "stop: expected a list, got None"),
    ],
)
def test_nothing_of_a_mapping_is_ignored(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        SamplingParams.from_dict(values)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)


@settings(deadline=None, max_examples=400)
@given(st.dictionaries(st.sampled_from([f.name for f in fields(SamplingParams)]), json_values, max_size=3))
def test_json_gives_parameters_or_a_config_error(values: dict[str, Any]) -> None:
    try:
        params = SamplingParams.from_dict(values)
    except ConfigError:
        return
    assert hash(params) == hash(replace(params))


# What only a target can tell -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"stop_token_ids": (61,)}, "stop_token_ids: token ids must be in 0…60, got 61"),
        ({"allowed_token_ids": (3, 99)}, "allowed_token_ids: token ids must be in 0…60, got 99"),
        ({"logit_bias": {3: 1.0, 61: 1.0}}, "logit_bias: token ids must be in 0…60, got 61"),
        ({"bad_words": ((61, 3),)}, "bad_words: token ids must be in 0…60, got 61"),
        ({"grammar": Grammar("regex", "a", (61,))}, "grammar.after: token ids must be in 0…60, got 61"),
        ({"allowed_token_ids": (5,), "bad_words": ((4, 5),)}, "together they could leave no token at all"),
        ({"allowed_token_ids": (2,), "min_new_tokens": 1}, "together they could leave no token at all"),
        (
            {
                "allowed_token_ids": (2, 5, 9),
                "min_new_tokens": 1,
                "stop_token_ids": (5,),
                "bad_words": ((9,),),
            },
            "together they could leave no token at all",
        ),
        ({"bad_words": tuple((token,) for token in range(61))}, "together they could leave no token at all"),
    ],
)
def test_what_a_target_cannot_do_is_refused_before_any_compute(values: dict[str, Any], message: str) -> None:
    target = tiny_target()
    target.verify = None  # type: ignore[assignment, method-assign]  # any use of it would raise
    engine = Engine(target, new_decoder=None)
    with pytest.raises(RequestError, match=re.escape(message)):
        engine.add(Request("a", (1, 2), SamplingParams(**values)))
    assert not engine.has_work


@pytest.mark.parametrize(
    "values",
    [
        {"allowed_token_ids": (2,)},  # the end of text alone
        {"allowed_token_ids": (2, 5), "min_new_tokens": 3},
        {"allowed_token_ids": (2,), "min_new_tokens": 3, "ignore_eos": True},  # then it is no end
        {"bad_words": tuple((token,) for token in range(60))},
        {"stop_token_ids": (60,), "logit_bias": {60: -100.0}},
    ],
)
def test_what_a_target_can_do_is_not_refused(values: dict[str, Any]) -> None:
    SamplingParams(**values).check_for_target(61, (2,))


def test_ends_are_the_targets_and_the_requests() -> None:
    assert SamplingParams(stop_token_ids=(5,)).ends((2, 3)) == {2, 3, 5}
    assert SamplingParams(stop_token_ids=(5, 2), ignore_eos=True).ends((2, 3)) == {2, 5}


def test_stop_strings_and_grammars_need_an_engine_that_knows_text() -> None:
    engine = Engine(tiny_target())
    with pytest.raises(RequestError, match="stop: stop strings need text"):
        engine.add(Request("a", (1,), SamplingParams(9, stop=("x",))))
    with pytest.raises(RequestError, match="grammar: this engine compiles no grammars"):
        engine.add(Request("a", (1,), SamplingParams(9, grammar=Grammar("regex", "a"))))
    assert not engine.has_work
