"""Where a text ends and what of it is shown: against a reference that decodes everything after every token.

The fake tokenizer is byte-level: a token is a piece of UTF-8 that may begin or end inside a character. The reference
knows no streaming; the output must say the same however the tokens are cut into blocks.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from paceline.core.params import SamplingParams
from paceline.engine.output import Delivery, Output
from paceline.target.pull import DEFAULT_TARGET, pull
from paceline.target.text import IncrementalDecoder, TextCodec

PIECES: tuple[bytes, ...] = (
    *(letter.encode() for letter in ("a", "b", "ab", "ba", "aab", "é", "€", "a€", "😀", "\n\n")),
    b"\xc3",
    b"\xa9",
    b"\xe2",
    b"\x82",
    b"\xac",
    b"\xac" + b"ab",
    b"a\xe2\x82",
    b"b\xf0\x9f\x98",
    b"\x80",
    b"",
)
EOS = len(PIECES) - 1
"""The silent token; the others that are declared ends have a text."""


def certain(tokens: Sequence[int]) -> str:
    """Returns the text of tokens without a character that may still be completed."""
    data = b"".join(PIECES[token] for token in tokens)
    for waiting in (1, 2, 3):
        tail = data[-waiting:]
        is_start = len(tail) == waiting and tail[0] >= 0xC0 and all(0x80 <= byte < 0xC0 for byte in tail[1:])
        length = 2 if tail[:1] < b"\xe0" else 3 if tail[:1] < b"\xf0" else 4
        if is_start and waiting < length:
            return data[:-waiting].decode(errors="replace")
    return data.decode(errors="replace")


class ByteDecoder:
    """A decoder of `PIECES`, as plain as can be: everything again at every token."""

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._shown = ""

    def push(self, ids: Sequence[int]) -> str:
        self._ids += ids
        text = certain(self._ids)
        assert text.startswith(self._shown)
        piece, self._shown = text[len(self._shown) :], text
        return piece

    def flush(self) -> str:
        rest = b"".join(PIECES[i] for i in self._ids).decode(errors="replace")[len(self._shown) :]
        self._ids, self._shown = [], ""
        return rest


def expected(
    params: SamplingParams, ends: frozenset[int], tokens: Sequence[int]
) -> tuple[int, str, str | None, int | str | None]:
    """Returns how many tokens are delivered, their text, and why it ends there, by looking at everything each time."""
    for count in range(1, len(tokens) + 1):
        text, token = certain(tokens[:count]), tokens[count - 1]
        everything = b"".join(PIECES[t] for t in tokens[:count]).decode(errors="replace")
        start = len(certain(tokens[: min(count, params.min_new_tokens)]))
        found = sorted(
            (text.index(stop, start), len(stop), stop) for stop in params.stop if stop in text[start:]
        )
        shown = text[: found[0][0]] if found else everything
        if token in ends:
            return count, shown, "stop", token if token in params.stop_token_ids else None
        if found:
            return count, shown, "stop", found[0][2]
        if count == params.max_new_tokens:
            return count, shown, "length", None
    return len(tokens), b"".join(PIECES[t] for t in tokens).decode(errors="replace"), None, None


def blocks_of(tokens: Sequence[int], cuts: Sequence[int]) -> list[list[int]]:
    edges = [0, *sorted({cut for cut in cuts if 0 < cut < len(tokens)}), len(tokens)]
    return [list(tokens[a:b]) for a, b in itertools.pairwise(edges)]


def deliver(output: Output, blocks: Sequence[Sequence[int]]) -> list[Delivery]:
    """Returns the deliveries up to the end of the text; blocks behind it are not even looked at."""
    deliveries = []
    for block in blocks:
        deliveries.append(output.take(block))
        if deliveries[-1].finish_reason is not None:
            break
    return deliveries


STOPS = st.lists(
    st.sampled_from(
        ["a", "b", "ab", "ba", "aa", "abab", "aabb", "bab", "é", "€", "€a", "b😀", "\n\n", "😀😀", "é€ab"]
    ),
    max_size=3,
    unique=True,
).map(tuple)


@settings(deadline=None, max_examples=600)
@given(
    tokens=st.lists(st.integers(0, EOS), min_size=1, max_size=14),
    stop=STOPS,
    cuts=st.lists(st.integers(1, 13), max_size=6),
    limits=st.tuples(st.integers(1, 14), st.integers(0, 6)).filter(lambda pair: pair[1] <= pair[0]),
    stop_ids=st.lists(st.integers(0, EOS), max_size=2).map(tuple),
    ignore_eos=st.booleans(),
)
def test_a_text_ends_where_the_whole_says(
    tokens: list[int],
    stop: tuple[str, ...],
    cuts: list[int],
    limits: tuple[int, int],
    stop_ids: tuple[int, ...],
    ignore_eos: bool,
) -> None:
    params = SamplingParams(
        max_new_tokens=limits[0],
        min_new_tokens=limits[1],
        stop=stop,
        stop_token_ids=stop_ids,
        ignore_eos=ignore_eos,
    )
    ends = params.ends((EOS,))
    assume(not ends & set(tokens[: params.min_new_tokens]))  # the law draws no such token
    count, text, reason, stopped_by = expected(params, ends, tokens)
    output = Output(params, ends, ByteDecoder())
    shown = ""
    for delivery in deliver(output, blocks_of(tokens, cuts)):
        shown += delivery.text
        assert text.startswith(shown), "what was shown must stay"
        assert delivery.token_ids
    assert (delivery.finish_reason, delivery.stop_reason) == (reason, stopped_by)
    assert output.num_tokens == count
    if reason is None:
        shown += output.flush()
    assert shown == output.text == text
    assert output.flush() == "", "nothing is shown twice"


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.integers(0, EOS), min_size=1, max_size=12), STOPS, st.lists(st.integers(1, 11), max_size=6)
)
def test_every_split_delivers_the_same(tokens: list[int], stop: tuple[str, ...], cuts: list[int]) -> None:
    params = SamplingParams(max_new_tokens=10, stop=stop)
    results = set()
    for blocks in (blocks_of(tokens, cuts), [[token] for token in tokens], [tokens]):
        deliveries = deliver(Output(params, params.ends((EOS,)), ByteDecoder()), blocks)
        delivered = tuple(token for delivery in deliveries for token in delivery.token_ids)
        text = "".join(delivery.text for delivery in deliveries)
        results.add((delivered, text, deliveries[-1].finish_reason, deliveries[-1].stop_reason))
    assert len(results) == 1


def spell(text: str) -> list[int]:
    """Returns one token for each character of a text in the alphabet of `PIECES`."""
    return [PIECES.index(character.encode()) for character in text]


@pytest.mark.parametrize(
    ("stops", "text", "shown"),
    [
        (("abab",), "aababb", ["", "a", "", "", ""]),  # after the false start at 0 the true one begins at 1
        (("aab",), "aaab", ["", "", "a", ""]),
        (("ab", "b"), "aab", ["", "a", ""]),  # both are complete at once; the one that begins first counts
        (("abb", "ab"), "ab", ["", ""]),
        (("bba",), "abbb", ["a", "", "", "b"]),  # the last two still may begin it
        (("€€",), "a€b€", ["a", "", "€b", ""]),
    ],
)
def test_what_may_become_a_stop_string_waits(stops: tuple[str, ...], text: str, shown: list[str]) -> None:
    output = Output(SamplingParams(stop=stops), frozenset(), ByteDecoder())
    deliveries = deliver(output, [[token] for token in spell(text)])
    assert [delivery.text for delivery in deliveries] == shown[: len(deliveries)]
    assert len(deliveries) == len(shown)


def test_of_stop_strings_that_begin_together_the_shorter_is_named() -> None:
    output = Output(SamplingParams(stop=("ab", "a")), frozenset(), ByteDecoder())
    assert output.take([PIECES.index(b"ab")]).stop_reason == "a"


def test_a_stop_string_across_characters_of_several_tokens() -> None:
    tokens = [*spell("a"), *(PIECES.index(byte) for byte in (b"\xe2", b"\x82", b"\xac")), *spell("b")]
    for size in (1, 2, 3, 5):
        output = Output(SamplingParams(stop=("a€b",)), frozenset(), ByteDecoder())
        deliveries = deliver(output, [tokens[i : i + size] for i in range(0, 5, size)])
        assert (output.text, deliveries[-1].stop_reason, output.num_tokens) == ("", "a€b", 5)


def test_half_a_character_is_shown_at_the_end_and_not_before() -> None:
    tokens = [*spell("a"), PIECES.index(b"\xe2"), PIECES.index(b"\x82")]
    output = Output(SamplingParams(max_new_tokens=3), frozenset(), ByteDecoder())
    assert [output.take([token]).text for token in tokens] == ["a", "", "�"]
    cancelled = Output(SamplingParams(), frozenset(), ByteDecoder())
    assert cancelled.take(tokens).text == "a"
    assert (cancelled.flush(), cancelled.text) == ("�", "a�")


def test_nothing_follows_a_stop_string_whatever_else_ends_the_text() -> None:
    """The token that completes it is a declared end too, and half a character hangs on it."""
    token = PIECES.index(b"b\xf0\x9f\x98")
    params = SamplingParams(stop=("ab",), stop_token_ids=(token,))
    output = Output(params, params.ends(()), ByteDecoder())
    delivery = output.take([*spell("ba"), token])
    assert (delivery.text, delivery.finish_reason, delivery.stop_reason) == ("b", "stop", token)


@pytest.mark.parametrize(
    ("params", "delivered", "reason", "stopped_by", "text"),
    [
        ({"max_new_tokens": 9}, 4, None, None, "abab"),
        ({"max_new_tokens": 4}, 4, "length", None, "abab"),
        ({"max_new_tokens": 2}, 2, "length", None, "ab"),
        ({"stop": ("ba",), "max_new_tokens": 2}, 2, "length", None, "ab"),  # behind the budget it is no stop
        ({"stop": ("ba",), "max_new_tokens": 3}, 3, "stop", "ba", "a"),  # on it, it is
        ({"stop": ("ba",)}, 3, "stop", "ba", "a"),
        ({"stop": ("ab",), "min_new_tokens": 1}, 4, "stop", "ab", "ab"),  # the first began too early
        ({"stop": ("ab",), "min_new_tokens": 2}, 4, "stop", "ab", "ab"),
        ({"stop": ("a",), "min_new_tokens": 1}, 3, "stop", "a", "ab"),
        ({"stop": ("ba",), "min_new_tokens": 2}, 4, None, None, "abab"),
        ({"stop_token_ids": (1,)}, 2, "stop", 1, "ab"),
        ({"stop_token_ids": (1,), "max_new_tokens": 2}, 2, "stop", 1, "ab"),
        ({"stop_token_ids": (1,), "max_new_tokens": 1}, 1, "length", None, "a"),
        ({"stop_token_ids": (1,), "stop": ("ab",)}, 2, "stop", 1, ""),  # the id is asked first
    ],
)
def test_which_end_comes_first(
    params: dict[str, Any], delivered: int, reason: str | None, stopped_by: int | str | None, text: str
) -> None:
    made = SamplingParams(**params)
    output = Output(made, made.ends(()), ByteDecoder())
    delivery = output.take(spell("abab"))
    output.flush()
    assert (len(delivery.token_ids), delivery.finish_reason, delivery.stop_reason) == (
        delivered,
        reason,
        stopped_by,
    )
    assert output.text == text


@pytest.mark.parametrize(
    ("blocks", "params", "expected"),
    [
        ([[5, 6]], {}, ([5, 6], None)),
        ([[5, 2, 6]], {}, ([5, 2], "stop")),
        ([[5, 2, 6]], {"ignore_eos": True}, ([5, 2, 6], None)),
        ([[5, 2, 6]], {"ignore_eos": True, "stop_token_ids": (6,)}, ([5, 2, 6], "stop")),
        ([[5, 2, 6]], {"ignore_eos": True, "stop_token_ids": (2,)}, ([5, 2], "stop")),
        ([[5, 2, 6]], {"stop_token_ids": (5,)}, ([5], "stop")),
        ([[5, 6, 7]], {"max_new_tokens": 2}, ([5, 6], "length")),
        ([[1, 1, 1], [1, 1, 1], [1], [5, 6, 7]], {"max_new_tokens": 9}, ([1] * 7 + [5, 6], "length")),
        ([[5, 2]], {"max_new_tokens": 2}, ([5, 2], "stop")),  # both at once: the text did end
        ([[2]], {"max_new_tokens": 1}, ([2], "stop")),
        ([[5, 6, 2]], {"max_new_tokens": 2}, ([5, 6], "length")),
    ],
)
def test_tokens_end_without_text_too(
    blocks: list[list[int]], params: dict[str, Any], expected: tuple[list[int], str | None]
) -> None:
    made = SamplingParams(**params)
    output = Output(made, made.ends((2,)))
    deliveries = deliver(output, blocks)
    tokens = [token for delivery in deliveries for token in delivery.token_ids]
    assert (tokens, deliveries[-1].finish_reason) == expected
    assert output.text == "" == output.flush()


# The real tokenizer --------------------------------------------------------------------------------------------------


@cache
def codec() -> TextCodec:
    return TextCodec.load(pull(DEFAULT_TARGET))


TEXT = "Ĝis la revido! 🙂 Ünïcödé… 漢字 and 👩‍👩‍👧 – naïve café\n\nThe end."


@pytest.mark.slow
@pytest.mark.parametrize(
    "stop", ["revido", "🙂", "ïcö", "漢字", "👩‍👧", "\n\n", "café\n", "nd.", "d", "never"]
)
def test_real_characters_of_several_tokens(stop: str) -> None:
    ids = codec().encode(TEXT)
    assert len(ids) > len(TEXT) * 0.6, "characters of several tokens are the point"
    results = set()
    for size in (1, 2, 3, 7, len(ids)):
        output = Output(SamplingParams(stop=(stop,)), frozenset(), IncrementalDecoder(codec()))
        deliveries = deliver(output, [ids[i : i + size] for i in range(0, len(ids), size)])
        rest = "" if deliveries[-1].finish_reason else output.flush()
        assert "".join(delivery.text for delivery in deliveries) + rest == output.text
        results.add((output.num_tokens, output.text, deliveries[-1].stop_reason))
    ((num_tokens, text, reason),) = results
    assert text == TEXT.partition(stop)[0]
    assert reason == (stop if stop in TEXT else None)
    needed = next((n for n in range(len(ids)) if stop in codec().decode(ids[:n])), len(ids))
    assert num_tokens == needed
