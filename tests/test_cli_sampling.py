"""How the command line shapes a text: every flag reaches the request, several answers, and what they look like."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from cli_runs import one_target, run, save_drafter
from paceline.core.params import Grammar, SamplingParams
from paceline.core.types import Completion
from paceline.llm import LLM

QUESTION = "What is the capital of France?"


@pytest.fixture(autouse=True, scope="module")
def _one_target() -> Iterator[None]:
    with one_target():
        yield


@pytest.fixture(scope="module")
def llm(_one_target: None) -> LLM:
    return LLM(drafter=None)


FLAGS: list[tuple[str, dict[str, Any]]] = [
    ("", {}),
    ("--temperature 0.7", {"temperature": 0.7}),
    ("--top-k 5", {"top_k": 5}),
    ("--top-p 0.5", {"top_p": 0.5}),
    ("--min-p 0.1", {"min_p": 0.1}),
    ("--repetition-penalty 1.2", {"repetition_penalty": 1.2}),
    ("--presence-penalty -0.5", {"presence_penalty": -0.5}),
    ("--frequency-penalty 0.25", {"frequency_penalty": 0.25}),
    ("--logit-bias 17=-5 --logit-bias 3=1.5", {"logit_bias": {17: -5.0, 3: 1.5}}),
    ("--allowed-token-id 2 --allowed-token-id 9", {"allowed_token_ids": (2, 9)}),
    ("--stop one --stop two", {"stop": ("one", "two")}),
    ("--stop-token-id 7", {"stop_token_ids": (7,)}),
    ("--ignore-eos", {"ignore_eos": True}),
    ("--min-new-tokens 2", {"min_new_tokens": 2}),
    ("--max-new-tokens 9", {"max_new_tokens": 9}),
    ("--seed 4", {"seed": 4}),
    ("--logprobs 3 --json", {"logprobs": 3}),
    ("--logprobs 0 --logprobs-mode processed --json", {"logprobs": 0, "logprobs_mode": "processed"}),
    ("--json-schema {}", {"grammar": Grammar("json_schema", "{}")}),
    ("--json-schema schema.json", {"grammar": Grammar("json_schema", "true")}),
    ("--regex a+", {"grammar": Grammar("regex", "a+")}),
    ("--grammar rules.lark", {"grammar": Grammar("lark", 'start: "ä"')}),
]


@pytest.fixture
def asked(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[SamplingParams]:
    """What the commands ask of the target, which gives one ready answer."""
    (tmp_path / "schema.json").write_text("true", encoding="utf-8")
    (tmp_path / "rules.lark").write_text('start: "ä"', encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    asked: list[SamplingParams] = []

    def note_down(
        llm: LLM, prompt_ids: list[int], params: SamplingParams, **options: Any
    ) -> list[Completion]:
        asked.append(params)
        return [Completion("r", tuple(prompt_ids), (1,), "text", "length")] * params.n

    for command in ("generate", "chat"):
        monkeypatch.setattr(f"paceline.cli.{command}.open_pair", lambda pair: llm)
    monkeypatch.setattr("paceline.cli.generate.complete_all", note_down)
    monkeypatch.setattr("paceline.cli.chat.complete", lambda *a, **o: note_down(*a, **o)[0])
    return asked


def test_flags_of_all_parameters_are_tried() -> None:
    tried = {name for _, expected in FLAGS for name in expected} | {"n", "bad_words"}
    assert tried == {field.name for field in fields(SamplingParams)}


@pytest.mark.parametrize(("flags", "expected"), FLAGS, ids=lambda value: str(value)[:40])
def test_flags_reach_the_request(
    flags: str,
    expected: dict[str, Any],
    asked: list[SamplingParams],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hi\n"))
    for command in ("generate Hi", "chat"):
        done = run(capsys, *command.split(), *flags.split())
        assert done.code == 0, done.err
    assert asked == [
        SamplingParams(**{"max_new_tokens": 256, **expected}),
        SamplingParams(**{"max_new_tokens": 512, **expected}),
    ]


def test_bad_words_are_spelled_by_the_target(
    asked: list[SamplingParams], llm: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    run(capsys, "generate", "Hi", "--bad-word", " Paris", "--bad-word", "\n")
    texts = ["Paris", " Paris", "\n", " \n"]
    assert [llm.codec.decode(word) for word in asked[0].bad_words] == texts
    assert llm.codec.encode_word("Paris") == llm.codec.encode_word(" Paris")


def test_a_bad_word_is_not_written(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("generate", QUESTION, "--drafter", "none", "--max-new-tokens", 2)
    first = run(capsys, *arguments).out.split()[0]
    done = run(capsys, *arguments, "--bad-word", first)
    assert done.code == 0 and done.out and first not in done.out.split()


def test_a_grammar_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drafter = save_drafter(tmp_path / "random")
    done = run(capsys, "generate", QUESTION, "--drafter", drafter, "--regex", "(Rome|Oslo)!")
    assert done.out in ("Rome!", "Oslo!")


# Several answers


SAMPLED = ("--drafter", "none", "--temperature", "1", "--seed", "1", "--max-new-tokens", "4", "--n", "2")


def test_several_answers_one_after_the_other(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    params = SamplingParams(temperature=1, seed=1, max_new_tokens=4, n=2)
    first, second = llm.generate([llm.render(QUESTION)], params)
    done = run(capsys, "generate", QUESTION, *SAMPLED)
    assert (done.code, done.out) == (0, f"{first.text}\n{second.text}\n")
    assert re.findall(r"^(\d/\d) · 4 tokens", done.err, re.MULTILINE) == ["1/2", "2/2"]
    document = json.loads(run(capsys, "generate", QUESTION, *SAMPLED, "--json", "--logprobs", 1).out)
    assert [row["text"] for row in document["completions"]] == [first.text, second.text]
    assert [len(row["logprobs"]) for row in document["completions"]] == [4, 4]
    assert document["pair"]["drafter"] is None
