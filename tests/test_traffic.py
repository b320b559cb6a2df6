"""The user's own traffic: which lines are replayed, when, as which kind, and what is masked."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paceline.bench.workloads.traffic import MAX_LISTED, load_log
from paceline.bench.workloads.workload import Workload
from paceline.core.errors import ConfigError

ASK = {"role": "user", "content": "Hi"}
CHAT: dict[str, Any] = {"messages": [ASK]}


def _log(folder: Path, lines: Sequence[Any], name: str = "log.jsonl") -> Path:
    """Writes lines: text as it stands, anything else as JSON."""
    path = folder / name
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n"
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def _arrivals(workload: Workload) -> list[float | None]:
    return [item.arrival_s for item in workload.items]


def test_a_log_of_several_shapes(tmp_path: Path) -> None:
    deep = {
        "request": {"body": {"messages": [ASK], "max_tokens": 7}},
        "response": {"usage": {"completion_tokens": 3}},
    }
    path = _log(
        tmp_path,
        [
            {"messages": [{"role": "developer", "content": "Be brief"}, ASK], "max_completion_tokens": 9},
            deep,
            {
                "custom_id": "x",
                "body": json.dumps(CHAT),
                "response": {"body": {"usage": {"completion_tokens": 4}}},
            },
            "",
            {"params": {"prompt": "Once upon"}, "usage": {"completion_tokens": 5}},
            {"input": {"prompt": ["One"]}},
            {"payload": {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, "b"]}]}},
        ],
    )
    workload = load_log(path)
    assert workload.name == "log"
    assert [item.id for item in workload.items] == [f"line-{n}" for n in (1, 2, 3, 5, 6, 7)]
    assert [item.messages[-1]["content"] for item in workload.items] == [
        "Hi",
        "Hi",
        "Hi",
        "Once upon",
        "One",
        "a\nb",
    ]
    assert workload.items[0].messages[0] == {"role": "system", "content": "Be brief"}
    assert [item.max_new_tokens for item in workload.items] == [9, 7, None, None, None, None]
    assert [item.num_logged_tokens for item in workload.items] == [None, 3, 4, 5, None, None]
    assert _arrivals(workload) == [None] * 6
    assert workload.kinds == ("all",)
    assert workload.notes == (
        "6 of 6 lines are used",
        "2 completion requests are asked as one user message each",
    )


PICTURE = {"type": "image_url", "image_url": {"url": "data:"}}
BROKEN = [
    ("{", "not a JSON object"),
    ("[1]", "not a JSON object"),
    ("[" * 100_000, "not a JSON object"),
    ({"model": "m"}, "no messages and no prompt"),
    ({"messages": []}, "messages is not a list with messages in it"),
    ({"messages": {"role": "user"}}, "messages is not a list with messages in it"),
    ({"messages": ["Hi"]}, "a message that is not an object"),
    (
        {"messages": [{"role": "wizard", "content": "x"}]},
        "a role that is none of system, developer, user and assistant",
    ),
    (
        {"messages": [{"role": ["user"], "content": "x"}]},
        "a role that is none of system, developer, user and assistant",
    ),
    ({"messages": [{"role": "user", "content": None}]}, "a message without content"),
    ({"messages": [{"role": "user", "content": []}]}, "a message without content"),
    (
        {"messages": [{"role": "user", "content": [PICTURE]}]},
        "parts that are not text (images, sound, files)",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, PICTURE]}]},
        "parts that are not text",
    ),
    ({"messages": [{"role": "system", "content": "x"}]}, "no user message"),
    ({"messages": [{"role": "user", "content": " \n"}]}, "the last user message is empty"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "text with half characters"),
    ({"messages": [ASK], "tools": [{"type": "function"}]}, "tools, which a plain chat request cannot carry"),
    ({"messages": [ASK], "functions": [{"name": "f"}]}, "tools, which a plain chat request cannot carry"),
    (
        {"messages": [ASK, {"role": "tool", "content": "3"}]},
        "tool calls, which a plain chat request cannot carry",
    ),
    (
        {"messages": [ASK, {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}]},
        "tool calls, which a plain chat request cannot carry",
    ),
    ({"prompt": [1, 2]}, "a prompt that is not one text"),
    ({"prompt": ["a", "b"]}, "a prompt that is not one text"),
    ({"prompt": ""}, "the last user message is empty"),
    ({"messages": [ASK], "max_tokens": 0}, "max_tokens is not a whole number from 1"),
    ({"messages": [ASK], "max_tokens": 1_000_001}, "max_tokens is not a whole number from 1"),
    ({"messages": [ASK], "max_tokens": "9"}, "max_tokens is not a whole number from 1"),
]


@pytest.mark.parametrize(("line", "reason"), BROKEN)
def test_a_line_that_cannot_be_replayed_is_named_with_its_reason(
    tmp_path: Path, line: Any, reason: str
) -> None:
    workload = load_log(_log(tmp_path, [CHAT, line, CHAT]))
    assert [item.id for item in workload.items] == ["line-1", "line-3"]
    assert workload.notes[0] == "2 of 3 lines are used"
    assert workload.notes[1].startswith(f"1 lines left out: {reason}")
    assert workload.notes[2].startswith(f"line 2: {reason}")


def test_a_log_without_a_usable_line_is_refused_with_the_reasons(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no user message \(2\); not a JSON object \(1\)"):
        load_log(_log(tmp_path, [{"messages": [{"role": "system", "content": "x"}]}] * 2 + ["{"]))
    with pytest.raises(ConfigError, match="got an empty file"):
        load_log(_log(tmp_path, []))


def test_all_lines_left_out_are_counted_and_some_listed(tmp_path: Path) -> None:
    notes = load_log(_log(tmp_path, [*["{"] * (MAX_LISTED + 5), CHAT])).notes
    assert f"{MAX_LISTED + 5} lines left out: not a JSON object ({MAX_LISTED + 5})" in notes
    assert sum(note.startswith("line ") for note in notes) == MAX_LISTED
    assert "5 more lines left out are not listed" in notes


def test_reasons_never_quote_the_log(tmp_path: Path) -> None:
    lines = [
        {"messages": [{"role": "hush", "content": "hush"}]},
        '{"hush',
        {"hush": 1},
        {**CHAT, "max_tokens": "hush"},
    ]
    assert "hush" not in " ".join(load_log(_log(tmp_path, [CHAT, *lines])).notes)


def test_what_stands_after_the_last_user_message_is_cut_and_counted(tmp_path: Path) -> None:
    answer = {"role": "assistant", "content": "Hello"}
    workload = load_log(
        _log(tmp_path, [{"messages": [ASK, answer, ASK, answer]}, {"messages": [ASK, answer, ASK]}])
    )
    assert [len(item.messages) for item in workload.items] == [3, 3]
    assert "1 requests are asked without what stands after their last user message" in workload.notes


SAME_TIME = [
    1_900_000_000,
    1_900_000_000.0,
    "1900000000",
    1_900_000_000_000,
    1_900_000_000_000_000,
    1_900_000_000_000_000_000,
    "2030-03-17T17:46:40Z",
    "2030-03-17T17:46:40+00:00",
    "2030-03-17T19:46:40+02:00",
    "2030-03-17 12:16:40.000-05:30",
    "2030-03-17T17:46:40",
]


@pytest.mark.parametrize("time", SAME_TIME)
def test_a_time_may_be_written_in_many_ways(tmp_path: Path, time: object) -> None:
    workload = load_log(_log(tmp_path, [{**CHAT, "time": time}, {**CHAT, "time": 1_899_999_990.5}]))
    assert [item.id for item in workload.items] == ["line-2", "line-1"]
    assert _arrivals(workload) == [0.0, 9.5]


def test_milliseconds_are_told_from_seconds_in_any_year_of_computing(tmp_path: Path) -> None:
    for year in (1974, 1999, 2100):
        second = int(datetime(year, 1, 1, tzinfo=UTC).timestamp())
        lines = [{**CHAT, "time": second}, {**CHAT, "time": (second + 2) * 1000}]
        assert _arrivals(load_log(_log(tmp_path, lines))) == [0, 2]


@pytest.mark.parametrize(
    "key", ["timestamp", "time", "ts", "start_time", "startTime", "created_at", "createdAt", "created"]
)
def test_a_time_has_many_names_and_places(tmp_path: Path, key: str) -> None:
    lines = [
        {**CHAT, key: 1000.0},
        {"request": {**CHAT, key: 1002.0}},
        {"request": CHAT, "response": {key: 1003.0}},
        {"request": {**CHAT, key: 5.0}, key: 1001.0},
    ]
    assert _arrivals(load_log(_log(tmp_path, lines))) == [0.0, 1.0, 2.0, 3.0]


def test_lines_without_a_time_are_left_out_of_a_log_with_times(tmp_path: Path) -> None:
    lines = [
        CHAT,
        {**CHAT, "time": "soon"},
        {**CHAT, "time": -1},
        {**CHAT, "time": 8},
        {**CHAT, "time": 10**400},
    ]
    workload = load_log(_log(tmp_path, lines))
    assert [(item.id, item.arrival_s) for item in workload.items] == [("line-4", 0.0)]
    assert "line 1: no time, in a log that has times" in workload.notes
    assert [note for note in workload.notes if note.endswith("a time that cannot be read")] == [
        f"line {n}: a time that cannot be read" for n in (2, 3, 5)
    ]


def test_a_log_whose_times_cannot_be_read_keeps_its_lines_and_says_so(tmp_path: Path) -> None:
    workload = load_log(_log(tmp_path, [{**CHAT, "time": "soon"}, {**CHAT, "time": True}]))
    assert _arrivals(workload) == [None, None]
    assert "no time of the log can be read; arrivals are unknown" in workload.notes


MOMENTS = st.datetimes(datetime(1980, 1, 1), datetime(2100, 1, 1))
OFFSETS = st.integers(-14 * 60, 14 * 60)


@given(st.lists(st.tuples(MOMENTS, OFFSETS), min_size=1, max_size=12))
@settings(max_examples=60, deadline=None)
def test_arrivals_are_sorted_and_true(
    tmp_path_factory: pytest.TempPathFactory, times: list[tuple[datetime, int]]
) -> None:
    moments = [moment.replace(tzinfo=timezone(timedelta(minutes=offset))) for moment, offset in times]
    path = _log(tmp_path_factory.mktemp("log"), [{**CHAT, "time": moment.isoformat()} for moment in moments])
    arrivals = [item.arrival_s for item in load_log(path).items]
    expected = [(moment - min(moments)).total_seconds() for moment in sorted(moments)]
    assert arrivals == pytest.approx(expected, abs=1e-5)
    assert arrivals[0] == 0


def test_a_limit_keeps_consecutive_arrivals(tmp_path: Path) -> None:
    workload = load_log(_log(tmp_path, [{**CHAT, "time": t} for t in (50, 20, 10, 40, 30)]), limit=3)
    assert [(item.id, item.arrival_s) for item in workload.items] == [
        ("line-3", 0),
        ("line-2", 10),
        ("line-5", 20),
    ]
    assert workload.notes[0] == "3 of 5 lines are used"
    assert "first 3 of 5 requests" in workload.notes[1]
    with pytest.raises(ConfigError, match="limit: expected at least 1, got 0"):
        load_log(_log(tmp_path, [CHAT]), limit=0)


def test_kinds_from_a_field(tmp_path: Path) -> None:
    lines = [{**CHAT, "metadata": {"task": task}} for task in ("faq", 3, None, {"x": 1}, "")] + [CHAT]
    workload = load_log(_log(tmp_path, lines), kind_field="metadata.task")
    assert [item.kind for item in workload.items] == ["faq", "3", "other", "other", "other", "other"]
    with pytest.raises(ConfigError, match=r"kind_field: .*got 'metadata.tsk'"):
        load_log(_log(tmp_path, lines), kind_field="metadata.tsk")


def test_kinds_from_rules_are_told_from_the_last_user_message_in_order(tmp_path: Path) -> None:
    asked = ["sum 1+1 in Python", "sum 1+1", "hello"]
    before = [{"role": "user", "content": "Python"}, {"role": "assistant", "content": "1+1"}]
    lines = [{"messages": [*before, {"role": "user", "content": text}]} for text in asked]
    workload = load_log(_log(tmp_path, lines), rules=[("code", "Python"), ("math", r"\d\+\d")])
    assert [item.kind for item in workload.items] == ["code", "math", "other"]


@pytest.mark.parametrize(
    ("rules", "field", "reason"),
    [
        ([("a", "(")], None, "regular expression for 'a', got '\\('"),
        ([("", "x")], None, "got an empty one"),
        ([("a", "x")], "kind", "expected one of them, got both"),
    ],
)
def test_rules_that_cannot_be_used(
    tmp_path: Path, rules: list[tuple[str, str]], field: str | None, reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        load_log(_log(tmp_path, [CHAT]), rules=rules, kind_field=field)


def test_settings_of_the_log_are_noted(tmp_path: Path) -> None:
    lines = [{**CHAT, "temperature": t} for t in (0.7, 0, 0.7, "x")]
    lines += [
        {**CHAT, "top_p": 0.9, "n": 1, "seed": 0},
        {**CHAT, "stop": ["\n"], "top_p": 0.9, "logprobs": False},
    ]
    notes = load_log(_log(tmp_path, lines)).notes
    assert (
        "temperatures in the log: 0 (1), 0.7 (2), none (2), not a number (1); the plan sets its own" in notes
    )
    assert "set in the log and not replayed: top_p (2), seed (1), stop (1)" in notes


def test_packed_logs_and_other_encodings(tmp_path: Path) -> None:
    assert load_log(_log(tmp_path, [CHAT], "day.jsonl.gz")).name == "day"
    path = tmp_path / "latin.jsonl"
    path.write_bytes('{"prompt": "für"}'.encode("latin-1"))
    with pytest.raises(ConfigError, match="expected UTF-8"):
        load_log(path)


KEYS = st.sampled_from(
    [
        *(
            "messages",
            "role",
            "content",
            "prompt",
            "request",
            "body",
            "response",
            "usage",
            "completion_tokens",
        ),
        *(
            "time",
            "created",
            "max_tokens",
            "tools",
            "temperature",
            "stop",
            "n",
            "type",
            "text",
            "metadata",
            "task",
        ),
    ]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)
TURN = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "system", "assistant", "tool"]) | JSON, "content": JSON}
)
NEAR = st.fixed_dictionaries(
    {"messages": st.lists(TURN, max_size=3) | JSON},
    optional={
        "time": JSON,
        "max_tokens": JSON,
        "temperature": JSON,
        "n": JSON,
        "response": JSON,
        "metadata": JSON,
    },
)


@given(st.lists(NEAR | JSON, max_size=6), st.booleans())
@example([{**CHAT, "temperature": float("nan"), "time": float("inf")}], True)
@settings(max_examples=250, deadline=None)
def test_no_json_breaks_the_reader(
    tmp_path_factory: pytest.TempPathFactory, rows: list[Any], masks: bool
) -> None:
    path = _log(tmp_path_factory.mktemp("log"), rows)
    try:
        workload = load_log(path, kind_field="metadata.task" if masks else None, mask=masks)
    except ConfigError as error:
        assert "expected at least one request" in str(error) or "kind_field" in str(error)
        return
    assert len(workload.digest) == 64
    num_left_out = sum(int(n.split()[0]) for n in workload.notes if " lines left out: " in n)
    assert len(workload.items) + num_left_out == len(rows)


@given(st.binary(max_size=60))
@settings(max_examples=60, deadline=None)
def test_no_bytes_break_the_reader(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.mktemp("log") / "log.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigError):
        load_log(path)


def test_masking_is_counted_and_leaves_the_rest(tmp_path: Path) -> None:
    text = "Write to ann.lee@mail.example.org or bob@x.de, card 4111 1111 1111 1111, from 10.1.2.3."
    lines = [
        {"messages": [{"role": "system", "content": "host 10.0.0.1"}, {"role": "user", "content": text}]}
    ]
    workload = load_log(_log(tmp_path, lines), mask=True)
    assert workload.items[0].messages[1]["content"] == "Write to <email> or <email>, card <card>, from <ip>."
    assert workload.items[0].messages[0]["content"] == "host <ip>"
    assert workload.notes[-1] == "masked by pattern, names and streets are not: <card> 1, <email> 2, <ip> 2"
    assert load_log(_log(tmp_path, lines)).items[0].messages[1]["content"] == text
    assert load_log(_log(tmp_path, [CHAT]), mask=True).notes[-1].endswith("are not: nothing found")


def test_kinds_are_told_before_masking(tmp_path: Path) -> None:
    lines = [{"messages": [{"role": "user", "content": "mail a@b.de"}]}]
    workload = load_log(_log(tmp_path, lines), rules=[("mail", "@")], mask=True)
    assert workload.items[0].kind == "mail"
    assert workload.items[0].messages[0]["content"] == "mail <email>"
