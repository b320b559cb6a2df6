"""Prompts for a diagnosis, and the target's own answers to them with what was tapped on the way."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from paceline.core.errors import ConfigError, RequestError
from paceline.core.params import SamplingParams
from paceline.core.prompts import Messages, messages_of, parse_rows
from paceline.core.types import Request
from paceline.drafter.base import NeuralDrafter
from paceline.engine.engine import Engine
from paceline.target.base import Target
from paceline.target.text import TextCodec
from paceline.train.data.features import FeatureRecorder
from paceline.train.diagnosis.scores import Answer

SYSTEM_PROMPT = "You are a helpful assistant."
MAX_MASKS = 32

Tell = Callable[[str, int, int], None]
"""Told (stage, done, total)."""


@dataclass(frozen=True, slots=True)
class DiagnoseSettings:
    """How much is measured.

    Args:
        num_prompts: prompts that the target answers, taken from each kind in turn.
        max_new_tokens: longest answer.
        max_prompt_tokens: longer prompts are left out.
        anchors_per_answer: anchors of an answer that experiments use.
        num_replayed: answers that are served again.
        num_rerendered: prompts that are answered in other renderings too; 0 leaves that experiment out.
    """

    num_prompts: int = 21
    max_new_tokens: int = 64
    max_prompt_tokens: int = 400
    anchors_per_answer: int = 10
    num_replayed: int = 4
    num_rerendered: int = 6


@dataclass(frozen=True, slots=True)
class Question:
    """One prompt: messages, or token ids as they are."""

    id: str
    kind: str
    messages: Messages | None
    token_ids: tuple[int, ...]


def read_questions(path: Path | None, codec: TextCodec) -> list[Question]:
    """Returns the prompts of a JSON-lines file, rendered for the target; `None` reads those that ship.

    Raises:
        ConfigError: a file that cannot be read or holds no prompt, or a row that is none (file and line named).
    """
    try:
        if path is None:
            path = Path("workload.jsonl")
            text = (resources.files("paceline") / "data" / path.name).read_text(encoding="utf-8")
        else:
            text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); hint: correct its path") from error
    found = [_question(row, codec) for row in parse_rows(text, path.stem, str(path))]
    if not found:
        raise ConfigError(f"{path}: expected at least one prompt, got none")
    return found


def _question(row: Mapping[str, Any], codec: TextCodec) -> Question:
    kind = str(row.get("kind", row.get("category", "")))
    if "prompt_ids" in row:
        return Question(str(row["id"]), kind, None, tuple(row["prompt_ids"]))
    messages = messages_of(row)
    rendered = (
        codec.render_chat(messages) if codec.has_chat_template else codec.encode(messages[-1]["content"])
    )
    return Question(str(row["id"]), kind, messages, tuple(rendered))


def choose(
    questions: Sequence[Question], settings: DiagnoseSettings, max_positions: int
) -> tuple[list[Question], dict[str, int]]:
    """Returns the first of each kind in turn, and how many are left out for their length."""
    longest = min(settings.max_prompt_tokens, max_positions - settings.max_new_tokens)
    by_kind: dict[str, list[Question]] = {}
    for question in questions:
        if 0 < len(question.token_ids) <= longest:
            by_kind.setdefault(question.kind, []).append(question)
    rounds = max(map(len, by_kind.values()), default=0)
    turns = [group[i] for i in range(rounds) for group in by_kind.values() if i < len(group)]
    num_long = len(questions) - len(turns)
    if len(turns) < 2:
        raise ConfigError(
            f"diagnose: expected at least two prompts of at most {longest} tokens, got {len(turns)}; "
            "hint: shorter prompts, or a smaller max_new_tokens"
        )
    left_out = {f"prompt longer than {longest} tokens": num_long} if num_long else {}
    return turns[: settings.num_prompts], left_out


def write_answers(
    target: Target,
    questions: Sequence[Question],
    layers: Sequence[int],
    max_new_tokens: int,
    tell: Tell = lambda stage, done, total: None,
) -> list[Answer]:
    """Returns the target's greedy answers with the outputs of `layers`, decoded plainly and all together."""
    recorder = FeatureRecorder(layers, target.dtype)
    engine = Engine(target, recorder, max_sequences=len(questions))
    params, done = SamplingParams(max_new_tokens=max_new_tokens, temperature=0.0), 0
    try:
        for i, question in enumerate(questions):
            engine.add(Request(str(i), question.token_ids, params))
        while engine.has_work:
            done += sum(len(delta.token_ids) for delta in engine.step())
            tell("answers", done, max_new_tokens * len(questions))
    finally:
        engine.close()
    tell("answers", 1, 1)
    answers = []
    for i, (question, recording) in enumerate(zip(questions, recorder.recordings, strict=True)):
        completion = engine.take_completion(str(i))
        ids = torch.tensor([*completion.prompt_ids, *completion.token_ids])
        rows = torch.cat(recording.rows)[: len(ids) - 1]
        answers.append(
            Answer(question.id, question.kind, ids, len(completion.prompt_ids), tuple(layers), rows)
        )
    return answers


def tapped_layers(drafter: NeuralDrafter, num_layers: int) -> tuple[int, ...]:
    """Returns the drafter's taps and their neighbours, ascending."""
    near = {i + shift for i in drafter.target_layer_ids for shift in (-1, 0, 1)}
    return tuple(sorted(i for i in near if 0 <= i < num_layers))


def rerender(
    target: Target,
    drafter: NeuralDrafter,
    codec: TextCodec,
    questions: Sequence[Question],
    settings: DiagnoseSettings,
) -> dict[str, Sequence[Answer]]:
    """Returns answers to some of the prompts without the chat template, and behind a system prompt."""
    some = [q for q in questions if q.messages is not None][: settings.num_rerendered]
    if len(some) < 2 or not codec.has_chat_template:
        return {}
    texts: dict[str, list[Question]] = {"raw": [], "system": []}
    for question in some:
        assert question.messages is not None
        raw = codec.encode(question.messages[-1]["content"])
        texts["raw"].append(replace(question, token_ids=tuple(raw)))
        if question.messages[0]["role"] != "system":
            try:
                ids = codec.render_chat([{"role": "system", "content": SYSTEM_PROMPT}, *question.messages])
            except RequestError:
                continue  # a template without system prompts
            if tuple(ids) != question.token_ids:
                texts["system"].append(replace(question, token_ids=tuple(ids)))
    length = settings.max_new_tokens // 2
    room = target.spec.max_positions - length
    fitting = {name: [q for q in group if 0 < len(q.token_ids) <= room] for name, group in texts.items()}
    return {
        name: write_answers(target, group, drafter.target_layer_ids, length)
        for name, group in fitting.items()
        if len(group) > 1
    }


def mask_candidates(codec: TextCodec, vocab_size: int) -> list[int]:
    """Returns ids that a mask may have been taken for: ends of text, special tokens, the last row."""
    special = [i for i in range(vocab_size) if codec.is_silent(i)]
    return [*codec.eos_token_ids, *special[:MAX_MASKS], vocab_size - 1]
