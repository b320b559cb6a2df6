"""Workloads: what they refuse, how files become kinds, and the set that ships."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.bench.workloads.workload import Item, Workload, builtin, from_prompt_files
from paceline.core.errors import ConfigError
from paceline.core.prompts import Messages

KINDS = ("code", "code_edit", "math", "tool_calls", "support", "chat", "summary", "long_context")


def _says(text: str, role: str = "user") -> Messages:
    return [{"role": role, "content": text}]


def _write(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


TWO = (Item("a", "chat", _says("Hi")), Item("b", "code", _says("Sort a list")))


def test_digest_is_of_the_items_alone() -> None:
    digest = Workload("one", TWO).digest
    assert Workload("two", TWO, ("a note",)).digest == digest
    assert len(digest) == 64


@pytest.mark.parametrize(
    "other",
    [
        TWO[::-1],
        (replace(TWO[0], id="c"), TWO[1]),
        (replace(TWO[0], kind="math"), TWO[1]),
        (replace(TWO[0], messages=_says("Hi!")), TWO[1]),
        (replace(TWO[0], max_new_tokens=5), TWO[1]),
        (replace(TWO[0], arrival_s=0.5), TWO[1]),
        (replace(TWO[0], num_logged_tokens=5), TWO[1]),
        TWO[:1],
    ],
)
def test_digest_tells_every_change_of_an_item(other: tuple[Item, ...]) -> None:
    assert Workload("one", other).digest != Workload("one", TWO).digest


def test_digest_does_not_depend_on_the_order_of_a_messages_keys() -> None:
    turned: Messages = [{"content": "Hi", "role": "user"}]
    assert Workload("x", (replace(TWO[0], messages=turned), TWO[1])).digest == Workload("x", TWO).digest


def test_kinds_and_counts_come_in_order_of_first_appearance() -> None:
    items = tuple(Item(str(n), kind, _says("x")) for n, kind in enumerate(["z", "a", "z", "b"]))
    workload = Workload("x", items)
    assert workload.kinds == ("z", "a", "b")
    assert list(workload.counts.items()) == [("z", 2), ("a", 1), ("b", 1)]


@pytest.mark.parametrize(
    ("items", "reason"),
    [
        ((), "at least one item, got none"),
        ((TWO[0], TWO[0]), "got 'a' more than once"),
        ((replace(TWO[0], kind=""),), "expected a kind of work"),
        ((replace(TWO[0], messages=[]),), "at least one message"),
        ((replace(TWO[0], messages=_says("Hi", "assistant")),), "got a message from assistant"),
        ((replace(TWO[0], messages=_says("  \n")),), "got nothing from user"),
    ],
)
def test_what_a_workload_refuses(items: tuple[Item, ...], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        Workload("x", items)


def test_only_keeps_order_and_says_so() -> None:
    kept = builtin().only(["math", "code"])
    assert kept.kinds == ("code", "math")
    assert kept.notes == ("only code, math of 8 kinds",)
    assert kept.items == tuple(item for item in builtin().items if item.kind in ("code", "math"))


@pytest.mark.parametrize(
    ("kind", "reason"), [("mahts", "did you mean 'math'"), ("xyz", "code, code_edit, math, .*got 'xyz'$")]
)
def test_an_unknown_kind_is_refused_with_the_known_ones(kind: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        builtin().only(["code", kind])


def test_only_without_kinds_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one item"):
        builtin().only([])


def test_built_in_set() -> None:
    workload = builtin()
    assert workload.kinds == KINDS
    assert min(workload.counts.values()) >= 12
    assert {message["role"] for item in workload.items for message in item.messages} == {
        "system",
        "user",
        "assistant",
    }
    texts = [json.dumps(item.messages) for item in workload.items]
    assert len(set(texts)) == len(texts)
    # The default target has room for 8,192 tokens; prose and code have at least 2.5 characters a token.
    assert max(map(len, texts)) < 10_000


@pytest.mark.slow
def test_built_in_prompts_leave_room_for_an_answer() -> None:
    from paceline.llm import LLM

    llm = LLM()
    lengths = {item.id: len(llm.codec.render_chat(item.messages)) for item in builtin().items}
    assert max(lengths.values()) < 2_500


def test_one_file_is_divided_by_its_categories(tmp_path: Path) -> None:
    path = _write(
        tmp_path / "mix.jsonl", [{"turns": ["a"], "category": "x"}, {"prompt": "b"}, {"messages": _says("c")}]
    )
    workload = from_prompt_files([path])
    assert [item.kind for item in workload.items] == ["x", "mix", "mix"]
    assert [item.messages for item in workload.items] == [_says("a"), _says("b"), _says("c")]
    assert [item.id for item in workload.items] == ["mix-1", "mix-2", "mix-3"]
    assert workload.name == "mix"
    assert from_prompt_files([path], kind_from="file", name="n").kinds == ("mix",)


def test_several_files_are_kinds_themselves(tmp_path: Path) -> None:
    first = _write(tmp_path / "first.jsonl", [{"id": 1, "prompt": "a", "category": "x"}])
    second = _write(tmp_path / "second.jsonl.gz", [{"id": 1, "prompt": "b", "category": "y"}])
    workload = from_prompt_files([first, second])
    assert workload.kinds == ("first", "second")
    assert [item.id for item in workload.items] == ["first/1", "second/1"]
    assert workload.name == "first + second"
    assert from_prompt_files([first, second], kind_from="category").kinds == ("x", "y")


def test_renamed_kinds_become_one(tmp_path: Path) -> None:
    path = _write(tmp_path / "f.jsonl", [{"prompt": "p", "category": c} for c in ("a", "b", "c", "b")])
    renamed = {"a": "ab", "b": "ab"}
    assert from_prompt_files([path], renamed=renamed).counts == {"ab": 3, "c": 1}
    assert from_prompt_files([path], renamed=renamed, limit_per_kind=2).counts == {"ab": 2, "c": 1}
    with pytest.raises(ConfigError, match=r"kinds that occur \(a, b, c\), got d"):
        from_prompt_files([path], renamed={"d": "e"})


@given(st.lists(st.sampled_from("ab"), min_size=1, max_size=40), st.integers(1, 12))
@settings(max_examples=50, deadline=None)
def test_a_limit_spreads_evenly(
    tmp_path_factory: pytest.TempPathFactory, kinds: list[str], limit: int
) -> None:
    path = _write(
        tmp_path_factory.mktemp("even") / "f.jsonl",
        [{"prompt": str(n), "category": k} for n, k in enumerate(kinds)],
    )
    workload = from_prompt_files([path], limit_per_kind=limit)
    for kind, num_rows in Counter(kinds).items():
        rows = [n for n, k in enumerate(kinds) if k == kind]
        ranks = [rows.index(int(i.messages[0]["content"])) for i in workload.items if i.kind == kind]
        gaps = [b - a for a, b in zip(ranks, [*ranks[1:], num_rows], strict=True)]
        assert len(ranks) == min(limit, num_rows)
        assert ranks[0] == 0
        assert max(gaps) - min(gaps) <= 1
    assert bool(workload.notes) == (len(workload.items) < len(kinds))


def test_further_turns_are_noted(tmp_path: Path) -> None:
    path = _write(tmp_path / "f.jsonl", [{"turns": ["a", "b"]}, {"turns": ["c"]}])
    workload = from_prompt_files([path])
    assert workload.notes == ("1 of 2 rows have further turns; only the first is asked",)
    assert workload.items[0].messages == _says("a")


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt_ids": [1, 2]}, "got prompt_ids; servers take messages"),
        ({"turns": []}, "f.jsonl:1: expected a list of turns"),
        ({"turns": "abc"}, "f.jsonl:1: expected a list of turns"),
        ({"turns": None}, "f.jsonl:1: expected a list of turns"),
        ({"prompt": 5}, "f.jsonl:1: expected text"),
        ({"messages": [5]}, "f.jsonl:1: expected messages with role and content"),
        ({"messages": []}, "f.jsonl:1: expected a list of turns"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "parts of text only, got 'image'"),
        ({"messages": _says("x", "wizard")}, "expected roles"),
        ({"prompt": " "}, "got nothing from user"),
        ({"question": "x"}, "f.jsonl:1: expected one of turns"),
    ],
)
def test_a_row_that_is_no_conversation_is_refused(tmp_path: Path, row: dict[str, Any], reason: str) -> None:
    path = _write(tmp_path / "f.jsonl", [row])
    with pytest.raises(ConfigError, match=reason):
        from_prompt_files([path])


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("f.jsonl", "{'prompt': 'é'}".encode("latin-1"), "expected UTF-8 text, got the byte 0xe9"),
        ("f.jsonl", b"", "at least one item"),
        ("f.jsonl.gz", b"no gzip", "expected a gzip file"),
        ("f.jsonl.gz", gzip.compress(b'{"prompt": "x"}')[:-4], "expected a gzip file"),
    ],
)
def test_a_file_that_is_no_text_is_refused(tmp_path: Path, name: str, content: bytes, reason: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=reason):
        from_prompt_files([path])


def test_a_limit_below_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least 1, got 0"):
        from_prompt_files([_write(tmp_path / "f.jsonl", [{"prompt": "x"}])], limit_per_kind=0)


def test_line_separators_inside_strings_do_not_end_a_line(tmp_path: Path) -> None:
    path = tmp_path / "f.jsonl"
    path.write_text('\ufeff{"prompt":\r"a\u2028b"}\r\n{"prompt": "c"}\n', encoding="utf-8", newline="")
    assert [item.messages[0]["content"] for item in from_prompt_files([path]).items] == ["a\u2028b", "c"]
