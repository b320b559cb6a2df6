"""`bench.arms.streaming`: one answer, however its stream is cut, and what it tells of its verify steps."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from http_jobs import TEXT, free_port, job
from paceline.bench.arms.base import Outcome
from paceline.bench.arms.counters import acceptance_in
from paceline.bench.arms.endpoint import Endpoint, LostConnectionError
from paceline.bench.arms.streaming import EventParser, request_body, stream_chat
from unruly_server import NUM_PROMPT_TOKENS, NUM_TOKENS, PIECES, UnrulyServer, running


@pytest.fixture
def server() -> Iterator[UnrulyServer]:
    with running(UnrulyServer()) as started:
        yield started


def stream(server: UnrulyServer, manner: str, timeout_s: float = 20.0) -> Outcome:
    return stream_chat(
        Endpoint(server.url, None, timeout_s), job(manner), model="m", started=time.perf_counter()
    )


@pytest.mark.parametrize("manner", ["good", "plain-end", "crlf", "bytewise", "slow"])
def test_an_answer_is_read_whole_however_it_is_cut(server: UnrulyServer, manner: str) -> None:
    outcome = stream(server, manner)
    assert outcome.failure is None and outcome.finish_reason == "stop" and outcome.text == TEXT
    assert (outcome.num_prompt_tokens, outcome.num_new_tokens) == (NUM_PROMPT_TOKENS, NUM_TOKENS)
    assert outcome.num_chunks == len(PIECES) and outcome.acceptance is None
    assert outcome.ttft_s is not None and outcome.e2e_s is not None and outcome.max_gap_s is not None
    assert 0 < outcome.ttft_s <= outcome.e2e_s and outcome.max_gap_s <= outcome.e2e_s - outcome.ttft_s


def test_times_begin_with_text_and_end_with_the_finish(server: UnrulyServer) -> None:
    outcome = stream(server, "slow")  # 60 ms before each of: comment, role, 2 texts, comment, 2 texts, finish
    assert outcome.ttft_s is not None and outcome.ttft_s >= 3 * 0.06
    assert outcome.e2e_s is not None and outcome.e2e_s >= 8 * 0.06
    assert outcome.max_gap_s is not None and outcome.max_gap_s >= 0.06
    wordless = stream(server, "wordless")  # the one token was an end of text
    assert wordless.num_new_tokens == 1 and wordless.num_chunks == 0 and wordless.max_gap_s is None
    assert wordless.ttft_s == wordless.e2e_s is not None


@pytest.mark.parametrize(
    ("manner", "expected"),
    [
        ("silent", r"^request silent: .*no answer within 0\.3 s$"),
        ("held", r"^request held: .*no answer within 0\.3 s; 2 chunks of text had come$"),
        (
            "trickle",
            r"^request trickle: the answer was not finished within 0\.3 s; \d chunks? of text had come$",
        ),
    ],
)
def test_waiting_has_an_end(server: UnrulyServer, manner: str, expected: str) -> None:
    outcome = stream(server, manner, timeout_s=0.3)
    assert outcome.failure is not None
    with pytest.raises(AssertionError, match=expected):
        raise AssertionError(outcome.failure)


def test_nobody_there_is_left_to_the_caller() -> None:
    with pytest.raises(LostConnectionError, match=r"cannot be reached.*is it running"):
        stream_chat(Endpoint(f"http://127.0.0.1:{free_port()}"), job("good"), model="m", started=0.0)


def test_events_may_be_cut_anywhere() -> None:
    text = "\ufeff: hi\r\ndata: ü\rdata:🚄\n\nid: 1\ndata\n\r\n: x\n\ndata:  [DONE]\r\n\r\ndata: unfinished"
    expected = ["ü\n🚄", "", " [DONE]"]
    data = text.encode()
    for step in (1, 2, 3, 5, len(data)):
        parser = EventParser()
        found = [e for i in range(0, len(data), step) for e in parser.feed(data[i : i + step])]
        assert found == expected, step


def test_what_is_not_set_is_not_sent() -> None:
    body = request_body(job("good"), "m")
    assert "top_k" not in body and "seed" not in body and body["stream_options"] == {"include_usage": True}
    assert (body["max_tokens"], body["temperature"], body["top_p"]) == (16, 0.0, 1.0) or body[
        "temperature"
    ] == 1.0
    full = request_body(job("good", temperature=0.7, top_k=5, top_p=0.9, seed=0), "m")
    assert (full["temperature"], full["top_k"], full["top_p"], full["seed"]) == (0.7, 5, 0.9, 0)


# Acceptance ----------------------------------------------------------------------------------------------------------

DETAILED = {"per_step_drafted": [7, 7, 3, 7], "per_step_accepted": [2, 0, 3, 2]}
HISTOGRAM = {"acceptance_histogram": [1, 0, 2, 0], "num_draft_tokens": 9, "num_spec_tokens": 3}
SGLANG = {"spec_correct_drafts_histogram": [1, 1], "spec_num_proposed_drafts": 14, "spec_accept_rate": 0.07}


@pytest.mark.parametrize(
    ("chunk", "expected"),
    [
        ({"metrics": {"speculative_decoding": DETAILED}}, ((3, 3, 1), (7, 0, 1), (7, 2, 2))),
        ({"metrics": {"speculative_decoding": HISTOGRAM}}, ((3, 0, 1), (3, 2, 2))),
        ({"metrics": {"speculative_decoding": HISTOGRAM | {"num_draft_tokens": 8}}}, None),  # steps differ
        ({"metrics": {"speculative_decoding": HISTOGRAM | {"num_draft_tokens": 6}}}, None),  # so they do
        ({"metrics": {"speculative_decoding": {"acceptance_histogram": [0, 0], "num_draft_tokens": 0}}}, ()),
        ({"metrics": {"speculative_decoding": DETAILED | {"per_step_accepted": [1]}}}, None),
        ({"metrics": {"speculative_decoding": DETAILED | {"per_step_drafted": ["7"]}}}, None),
        ({"metrics": {"speculative_decoding": None}}, None),
        ({"sglext": {"spec_tokens_details": SGLANG}}, ((7, 0, 1), (7, 1, 1))),
        ({"sglext": {"spec_tokens_details": SGLANG | {"spec_num_proposed_drafts": 13}}}, None),
        ({"sglext": {"spec_tokens_details": {"spec_accept_rate": 0.5}}}, None),
        ({"timings": {"draft_n": 73, "draft_n_accepted": 55}}, None),
        ({}, None),
    ],
)
def test_acceptance_of_one_answer(server: UnrulyServer, chunk: dict[str, Any], expected: Any) -> None:
    assert acceptance_in(chunk) == expected
    server.last_chunk = chunk
    assert stream(server, "good").acceptance == expected
