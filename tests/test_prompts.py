"""Rows → messages: every shape that is read, and file and line of what is not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paceline.core.errors import ConfigError
from paceline.core.prompts import conversation_of, messages_of, parse_rows


def parse(row: dict[str, Any]) -> dict[str, Any]:
    (_, parsed) = parse_rows('{"prompt": "x"}\n' + json.dumps(row), "f", "f.jsonl")
    return parsed


def test_content_lists_are_joined() -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    messages = messages_of(parse({"messages": [{"role": "user", "content": parts}]}))
    assert messages == [{"role": "user", "content": "one two"}]


def test_a_conversation_is_whole_and_a_prompt_ends_with_its_user() -> None:
    row = parse(
        {
            "messages": [
                {"role": "system", "content": ""},
                {"role": "user", "content": "a"},
                {"from": "gpt", "value": "b"},
            ]
        }
    )
    whole = [
        {"role": "system", "content": ""},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
    ]
    assert conversation_of(row) == whole
    assert messages_of(row) == whole[:2]


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([{"role": "user", "content": ""}], "got nothing from user"),
        ([{"role": "user", "content": None}], "expected text or a list of text parts, got None"),
        ([{"role": "user", "content": []}], "got nothing from user"),
        (
            [{"role": "user", "content": "a"}, {"role": "assistant", "content": " "}],
            "got nothing from assistant",
        ),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            "text only, got 'image_url'",
        ),
        ([{"role": "user", "content": ["text"]}], "text only, got 'text'"),
        ([{"role": "user", "content": 7}], "expected text or a list of text parts, got 7"),
        ([{"role": "tool", "content": "x"}], "expected roles system, user, assistant, got 'tool'"),
        ([{"role": "user"}], "got None"),
        (["x"], "expected messages with role and content"),
        ([{"role": "assistant", "content": "x"}], "at least one user"),
        (
            [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "tool_calls": [1]}],
            "text alone, got one with tool_calls",
        ),
    ],
    ids=str,
)
def test_what_is_no_text_is_refused_with_its_line(messages: list[Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=rf"f\.jsonl:2: .*{reason}"):
        messages_of(parse({"id": "mine", "messages": messages}))
