"""Given answers: which tokens the assistant wrote, what is refused with its line, and whose words they are."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from paceline.core.errors import ConfigError
from paceline.core.params import SamplingParams
from paceline.core.types import Request
from paceline.engine.engine import Engine
from paceline.llm import LLM
from paceline.target.text import TextCodec
from paceline.testing import run_checked
from paceline.train.data.answers import load_answers, prefill_answers
from paceline.train.data.authorship import check_own, measure_authorship
from paceline.train.data.features import read_shard
from paceline.train.data.prompts import Prompt, Source, load_prompts
from paceline.train.data.regenerate import RegenerateSettings
from tiny_llm import END, START, TEMPLATE, tiny_llm

TURN = "{% for m in messages %}<|start|>{{ SHOWN }}<|end|>{% endfor %}"
BEGINS = "{% if add_generation_prompt %}<|start|>MORE{% endif %}"
USER, FIRST, AGAIN, SECOND = (
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "and"},
    {"role": "assistant", "content": "no"},
)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return tiny_llm(tmp_path_factory.mktemp("pair"), drafter=False)


def codec_with(llm: LLM, template: str | None) -> TextCodec:
    tokenizer = AutoTokenizer.from_pretrained(llm.folder)
    tokenizer.chat_template = template
    return TextCodec(tokenizer, eos_token_ids=llm.codec.eos_token_ids, digest=llm.codec.digest)


def template(shown: str = "m['content']", more: str = "") -> str:
    return (TURN + BEGINS).replace("SHOWN", shown).replace("MORE", more)


def read(folder: Path, codec: TextCodec, *rows: dict[str, Any], **kwargs: Any) -> list[Prompt]:
    path = folder / "given.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    settings: dict[str, Any] = {"target": "tiny", "max_prompt_tokens": 99, "seed": 0} | kwargs
    return load_answers([Source(path)], codec, **settings)


def words(codec: TextCodec, text: str) -> list[int]:
    return codec._encode("text", text, add_special_tokens=False)


def pieces(codec: TextCodec, prompt: Prompt) -> list[tuple[bool, str]]:
    """Returns the runs of supervised and of other tokens, as text with the marks in it."""
    found: list[tuple[bool, list[int]]] = []
    for token, mine in zip(prompt.token_ids, prompt.supervised, strict=True):
        if not found or found[-1][0] != mine:
            found.append((mine, []))
        found[-1][1].append(token)
    return [(mine, str(codec._tokenizer.decode(ids))) for mine, ids in found]


@pytest.mark.parametrize("chat_template", [TEMPLATE, template()], ids=["always begins", "begins when asked"])
def test_all_answers_of_a_conversation_are_marked(tmp_path: Path, llm: LLM, chat_template: str) -> None:
    codec = codec_with(llm, chat_template)
    (prompt,) = read(
        tmp_path, codec, {"id": "a", "category": "c", "messages": [USER, FIRST, AGAIN, SECOND, USER]}
    )
    assert (prompt.id, prompt.category) == ("a", "c")
    assert pieces(codec, prompt) == [
        (False, f"{START}hi{END}{START}"),
        (True, f"yes{END}"),
        (False, f"{START}and{END}{START}"),
        (True, f"no{END}"),
    ]


def test_answers_shown_otherwise_later_become_documents_of_their_own(tmp_path: Path, llm: LLM) -> None:
    shown = "m['content'] if loop.last or m['role'] == 'user' else m['content'][1:]"
    codec = codec_with(llm, template(shown))
    prompts = read(tmp_path, codec, {"id": "a", "messages": [USER, FIRST, AGAIN, SECOND]})
    assert {p.id: pieces(codec, p) for p in prompts} == {
        "a": [(False, f"{START}hi{END}{START}"), (True, f"yes{END}")],
        "a#2": [(False, f"{START}hi{END}{START}es{END}{START}and{END}{START}"), (True, f"no{END}")],
    }


def test_answers_that_follow_each_other_are_kept_apart(tmp_path: Path, llm: LLM) -> None:
    codec = codec_with(llm, "{% for m in messages %}{{ m['content'] }}<|end|>{% endfor %}")
    prompts = read(tmp_path, codec, {"id": "a", "messages": [USER, FIRST, SECOND]})
    assert {p.id: pieces(codec, p) for p in prompts} == {
        "a": [(False, f"hi{END}"), (True, f"yes{END}")],
        "a#2": [(False, f"hi{END}yes{END}"), (True, f"no{END}")],
    }


def test_token_ids_are_used_as_they_are(tmp_path: Path, llm: LLM) -> None:
    path = tmp_path / "ids.jsonl.gz"
    rows = [{"id": "a", "prompt_ids": [5, 6, 7], "response_ids": [8, 0]}]
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    source = [Source(path)]
    assert load_answers(source, llm.codec, target="tiny", max_prompt_tokens=3, seed=0) == [
        Prompt("a", "", (5, 6, 7, 8, 0), (False, False, False, True, True))
    ]
    assert load_answers(source, llm.codec, target="tiny", max_prompt_tokens=2, seed=0) == []
    assert load_prompts(source, llm.codec.render_chat, max_tokens=3, seed=0) == [Prompt("a", "", (5, 6, 7))]


GOOD = {"messages": [USER, FIRST]}


@pytest.mark.parametrize(
    ("chat_template", "row", "reason"),
    [
        (TEMPLATE, {"messages": [USER]}, "expected a user's message and an assistant's answer"),
        (TEMPLATE, {"prompt": "x"}, "expected a user's message and an assistant's answer"),
        (TEMPLATE, {"messages": [FIRST, USER]}, "expected a user's message and an assistant's answer"),
        (TEMPLATE, {"prompt_ids": [3]}, "response_ids: expected a list of token ids, got None"),
        (TEMPLATE, {"prompt_ids": [], "response_ids": [3]}, "prompt_ids: expected a list of token ids"),
        (TEMPLATE, {"prompt_ids": [1], "response_ids": ["3"]}, "response_ids: expected a list of token ids"),
        (TEMPLATE, {**GOOD, "model": "other/Name"}, "expected answers of 'tiny', got model 'other/Name'"),
        (TEMPLATE, {**GOOD, "target": "other"}, "expected answers of 'tiny', got target 'other'"),
        (TEMPLATE, {"messages": [USER, {"role": "assistant", "content": ""}]}, "got nothing from assistant"),
        (None, GOOD, "has no chat template"),
        ("{{ raise_exception('never') }}", GOOD, "chat template refuses them"),
        (template("m['content'] | upper"), GOOD, "expected the chat template to show the answer 'yes'"),
        (template("m['content'] | trim('s')"), GOOD, "expected the chat template to show the answer 'yes'"),
        (template(more="think"), GOOD, "behind where an answer begins"),
        (
            template("(m['role'] == 'user' and 'u' or 'b') + m['content']", "a"),
            GOOD,
            "where an answer begins",
        ),
    ],
    ids=str,
)
def test_a_row_that_is_no_answer_of_the_target_is_named(
    tmp_path: Path, llm: LLM, chat_template: str | None, row: dict[str, Any], reason: str
) -> None:
    rows = [{"prompt_ids": [5], "response_ids": [6]}, row]
    with pytest.raises(ConfigError, match=rf"given\.jsonl:2: .*{reason}"):
        read(tmp_path, codec_with(llm, chat_template), *rows)


def test_an_author_may_be_named(tmp_path: Path, llm: LLM) -> None:
    assert read(tmp_path, llm.codec, {**GOOD, "model": "someone/Tiny"}, target="/models/tiny.gguf")
    assert read(tmp_path, llm.codec, {**GOOD, "model": "other"}, allow_foreign=True)


# Hidden states and authorship ----------------------------------------------------------------------------------------


def own_words(llm: LLM, temperature: float, count: int = 12) -> list[Prompt]:
    requests = [
        Request(f"{i}", tuple(words(llm.codec, f"{i}?")), SamplingParams(60, temperature=temperature, seed=i))
        for i in range(count)
    ]
    completions = run_checked(Engine(llm.target, max_sequences=count), requests).values()
    return [
        Prompt(
            c.request_id,
            "",
            c.prompt_ids + c.token_ids,
            (False,) * len(c.prompt_ids) + (True,) * len(c.token_ids),
        )
        for c in completions
    ]


def foreign(prompts: Sequence[Prompt], vocab_size: int) -> list[Prompt]:
    return [
        Prompt(
            p.id,
            "",
            tuple((t + 7) % vocab_size if m else t for t, m in zip(p.token_ids, p.supervised, strict=True)),
            p.supervised,
        )
        for p in prompts
    ]


def test_a_reading_says_what_decoding_said(tmp_path: Path, llm: LLM) -> None:
    prompts, settings = own_words(llm, 0.0, 9), RegenerateSettings(prompts_per_shard=5, top_log_probs=3)
    told: list[int] = []
    paths = list(prefill_answers(prompts, llm.target, (0, 1), tmp_path, settings, told.append))
    documents = [d for path in paths for d in read_shard(path)[0]]
    assert sum(told) == sum(len(p.token_ids) for p in prompts)
    for prompt, document in zip(prompts, documents, strict=True):
        assert document.token_ids.tolist() == list(prompt.token_ids)
        assert document.supervised.tolist() == list(prompt.supervised)
        assert document.top_ids is not None
        mine = document.supervised
        assert torch.equal(document.top_ids[mine][:, 0].long(), document.token_ids[mine]), "greedy words"
        assert (document.top_ids[~mine] == -1).all()


def test_authorship_is_measured(llm: LLM) -> None:
    own = own_words(llm, 0.0, 4)
    greedy = measure_authorship(own, llm.target)
    assert greedy.agreement == 1
    assert greedy.num_tokens == sum(sum(p.supervised) for p in own)
    own = own_words(llm, 1.0)
    drawn = measure_authorship(own, llm.target)
    assert greedy.surprise < -0.3
    assert abs(drawn.surprise) < 0.15, "the expectation is 0"
    assert measure_authorship(foreign(own, llm.target.spec.vocab_size), llm.target).surprise > 1


def test_foreign_answers_are_refused_with_the_numbers(llm: LLM) -> None:
    own = own_words(llm, 0.7, 6)
    check_own(own, llm.target)
    with pytest.raises(
        ConfigError, match=r"hardly written by .*% of \d+ tokens .* mean log-probability is -\d"
    ):
        check_own(foreign(own, llm.target.spec.vocab_size), llm.target)
