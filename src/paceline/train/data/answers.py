"""Conversations whose answers the target wrote earlier → token ids, and which of them are the target's.

A row holds `messages` with assistant turns, or `prompt_ids` and `response_ids`, which are exact. Which tokens of a
conversation are the assistant's is told by rendering it up to where each answer begins, and to where it ends: what is
new in between is the answer. So any chat template will do, and a document holds what serving would have seen.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from paceline.core.errors import ConfigError, RequestError
from paceline.core.prompts import Row, conversation_of
from paceline.target.base import Target
from paceline.target.text import TextCodec
from paceline.train.data.features import Document, blank_top, fill_shards, identity
from paceline.train.data.prefill import TEXTS_TOGETHER, prefill
from paceline.train.data.prompts import Prompt, Source, chosen_rows, digest, token_ids_of
from paceline.train.data.regenerate import RegenerateSettings


def load_answers(
    sources: Sequence[Source],
    codec: TextCodec,
    *,
    target: str,
    max_prompt_tokens: int,
    seed: int,
    allow_foreign: bool = False,
) -> list[Prompt]:
    """Returns the sources' conversations in one shuffled order, with the answers marked in `Prompt.supervised`.

    A conversation becomes one of them; or several, each with the answers that it shares a rendering with, where the
    template shows earlier answers otherwise than their own turn did (some leave out what was thought). Those with more
    than `max_prompt_tokens` before their first answer are left out.

    Args:
        target: name of the target that shall have written them.
        allow_foreign: take rows that name another author.

    Raises:
        ConfigError: a row without an answer, one that the template refuses or changes, or one that names another
            author (file and line named); no rows left.
    """
    rng = random.Random(seed)
    prompts: list[Prompt] = []
    for row in chosen_rows(sources, rng):
        if not allow_foreign:
            _check_author(row, target)
        for number, text in enumerate([_given(row)] if "prompt_ids" in row else _rendered(row, codec)):
            if text.supervised.index(True) <= max_prompt_tokens:
                name = f"{row['id']}#{number + 1}" if number else str(row["id"])
                prompts.append(
                    Prompt(name, str(row.get("category", "")), tuple(text.ids), tuple(text.supervised))
                )
    rng.shuffle(prompts)
    return prompts


@dataclass(slots=True)
class _Text:
    ids: list[int]
    supervised: list[bool]

    def extend(self, ids: Sequence[int], *, supervised: bool) -> None:
        self.ids += ids
        self.supervised += [supervised] * len(ids)


def _given(row: Row) -> _Text:
    text = _Text([], [])
    text.extend(token_ids_of(row, "prompt_ids"), supervised=False)
    text.extend(token_ids_of(row, "response_ids"), supervised=True)
    return text


def _rendered(row: Row, codec: TextCodec) -> list[_Text]:
    messages = conversation_of(row)
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns or turns[0] == 0:
        raise ConfigError(
            f"{row.place}: expected a user's message and an assistant's answer to it, got "
            f"{[message['role'] for message in messages]}; hint: data.answers = 'regenerate' makes the answers"
        )
    texts = [_Text([], [])]
    for turn in turns:
        before, answer = _answer(row, codec, messages[: turn + 1])
        # room between two answers keeps an end of one from being followed by the other's beginning
        if before[: len(texts[-1].ids)] != texts[-1].ids or len(before) == len(texts[-1].ids):
            texts.append(_Text([], []))
        texts[-1].extend(before[len(texts[-1].ids) :], supervised=False)
        texts[-1].extend(answer, supervised=True)
    return texts


def _answer(row: Row, codec: TextCodec, messages: list[dict[str, str]]) -> tuple[list[int], list[int]]:
    """Returns the tokens before the last message, and those that an assistant wrote to say it: its end included."""
    try:
        before = codec.render_chat(messages[:-1])
        after = codec.render_chat(messages, add_generation_prompt=False)
    except (ConfigError, RequestError) as error:
        raise ConfigError(f"{row.place}: {error}") from error
    answer = after[len(before) :]
    end = next((i for i, token in enumerate(answer, 1) if token in codec.eos_token_ids), len(answer))
    answer = answer[:end]
    said = codec.decode(before + answer)[len(codec.decode(before)) :]
    content = messages[-1]["content"]
    shown = said if answer and answer[-1] in codec.eos_token_ids else said[: len(content)]
    if after[: len(before)] != before or shown != content:
        raise ConfigError(
            f"{row.place}: expected the chat template to show the answer {content!r:.60} as it stands behind "
            f"where an answer begins, got {said!r:.60}; hint: give prompt_ids and response_ids"
        )
    return before, answer


def _check_author(row: Row, target: str) -> None:
    for key in ("model", "target"):
        named = row.get(key)
        if named is not None and _bare(str(named)) != _bare(target):
            raise ConfigError(
                f"{row.place}: expected answers of {target!r}, got {key} {named!r}; hint: data.answers = 'regenerate', "
                "or data.allow_foreign = true"
            )


def _bare(name: str) -> str:
    """Returns a model's name without its owner, folder and file type. Pure."""
    return name.rstrip("/").rpartition("/")[2].lower().removesuffix(".gguf")


# Hidden states -------------------------------------------------------------------------------------------------------


def prefill_answers(
    prompts: Sequence[Prompt],
    target: Target,
    target_layer_ids: Sequence[int],
    folder: Path,
    settings: RegenerateSettings,
    on_tokens: Callable[[int], None] = lambda _: None,
) -> Iterator[Path]:
    """Yields each shard's path once it is there, as `regenerate` does, of conversations that are answered already.

    Args:
        settings: `prompts_per_shard` and `top_log_probs` are used.
        on_tokens: told how many tokens were just read.

    Raises:
        ConfigError: a shard in `folder` was made from other answers or settings.
    """

    def describe(part: Sequence[Prompt]) -> dict[str, object]:
        return identity(target, target_layer_ids) | {
            "answers": digest(part),
            "top_log_probs": settings.top_log_probs,
        }

    def make(part: Sequence[Prompt]) -> list[Document]:
        documents = []
        for start in range(0, len(part), TEXTS_TOGETHER):
            documents += _read(
                part[start : start + TEXTS_TOGETHER], target, target_layer_ids, settings.top_log_probs
            )
            on_tokens(sum(len(d.token_ids) for d in documents[start:]))
        return documents

    yield from fill_shards(
        folder, prompts, settings.prompts_per_shard, describe, make, has_hidden=bool(target_layer_ids)
    )


def _read(
    prompts: Sequence[Prompt], target: Target, target_layer_ids: Sequence[int], num_top: int
) -> list[Document]:
    texts = [prompt.token_ids for prompt in prompts]
    masks = [torch.tensor(prompt.supervised) for prompt in prompts]
    if not target_layer_ids and not num_top:
        blank = [torch.zeros(len(text), 0, dtype=torch.bfloat16) for text in texts]
        return [Document(torch.tensor(t), m, h) for t, m, h in zip(texts, masks, blank, strict=True)]
    tops = [blank_top(len(text), num_top) for text in texts]

    def look(number: int, position: int, logits: torch.Tensor) -> None:
        best, ids = logits.double().log_softmax(dim=-1).topk(num_top, dim=-1)
        rows = slice(position, position + len(logits))
        mine = masks[number][rows]
        tops[number][0][rows][mine] = ids.int().cpu()[mine]
        tops[number][1][rows][mine] = best.half().cpu()[mine]

    hidden = prefill(target, target_layer_ids, texts, look if num_top else None)
    return [
        Document(torch.tensor(t), m, h, *(top if num_top else ()))
        for t, m, h, top in zip(texts, masks, hidden, tops, strict=True)
    ]
