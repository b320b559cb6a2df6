"""From a recipe to a drafter: answers, training, checkpoint; interrupted anywhere, the result is the same."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from paceline.checkpoint.store import DrafterCheckpoint
from paceline.core.acceptance import acceptance_length
from paceline.core.errors import ConfigError
from paceline.core.params import SamplingParams
from paceline.core.types import Request
from paceline.llm import check_pair
from paceline.target.native import NativeTarget
from paceline.target.pull import pull
from paceline.target.text import TextCodec
from paceline.testing import assert_lossless
from paceline.train.config import DataConfig, OptimConfig, RegenerateConfig, ShapeConfig, TrainConfig
from paceline.train.data.features import read_shard
from paceline.train.run import TrainEvent, TrainResult, train
from paceline.train.trainer import Progress
from tiny_gguf import TOKENS, write_gguf

QUESTIONS = ["what is ink", "sing 4", "a king in 4", "string in a ring"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny target with a tokenizer of its own."""
    base = tmp_path_factory.mktemp("target")
    return pull(str(write_gguf(base / "tiny.gguf")), cache_dir=base / "cache")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    path = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": question}) + "\n" for question in 2 * QUESTIONS))
    config = TrainConfig(
        drafter=ShapeConfig(
            mask_token_id=len(TOKENS) - 1,
            num_layers=2,
            block_size=4,
            target_layer_ids=(0, 1),
            layer_types=("sliding_attention",),
            sliding_window=128,
        ),
        target="tiny",
        data=DataConfig(max_prompts=7, max_prompt_tokens=64),
        regenerate=RegenerateConfig(
            max_new_tokens=20, temperatures=(0.0, 0.7), num_sequences=3, prompts_per_shard=3
        ),
        train=OptimConfig(
            max_steps=40,
            blocks_per_step=32,
            anchors_per_document=16,
            slots=(2, 4),
            lr=1e-2,
            warmup_steps=2,
            decay_steps=20,
            held_out_documents=1,
            draft_vocab_size=100,
            eval_every=20,
            save_every=10,
        ),
    )
    return config.with_data([path])


@dataclass(frozen=True)
class Whole:
    """A run that nothing interrupted."""

    result: TrainResult
    checkpoint: DrafterCheckpoint
    events: list[TrainEvent]


@pytest.fixture(scope="module")
def whole(recipe: TrainConfig, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    out = tmp_path_factory.mktemp("whole")
    events: list[TrainEvent] = []
    result = train(replace(recipe, out=str(out)), observe=events.append, target_folder=folder)
    return Whole(result, DrafterCheckpoint.load(result.folder), events)


def losses(events: list[TrainEvent]) -> list[float]:
    """Returns the loss of every training step."""
    return [event.detail.loss for event in events if isinstance(event.detail, Progress)]


def after(count: int, stage: str) -> tuple[Callable[[TrainEvent], None], Callable[[], bool]]:
    """Returns an observer and a question that end a run when a stage has told of `count` things."""
    seen: list[TrainEvent] = []

    def observe(event: TrainEvent) -> None:
        if event.stage == stage:
            seen.append(event)

    return observe, lambda: len(seen) >= count


def test_the_drafter_is_learnt_and_changes_no_text(folder: Path, whole: Whole) -> None:
    assert whole.result.finished
    codec = TextCodec.load(folder)
    target = NativeTarget.load(
        folder,
        name="tiny",
        dtype=torch.float64,
        device=torch.device("cpu"),
        tokenizer_digest=codec.digest,
    )
    check_pair(whole.checkpoint, target.spec)
    drafter = whole.checkpoint.build(torch.float64).bind(target.heads)
    requests = [
        Request(question, tuple(codec.render_chat([{"role": "user", "content": question}])), params)
        for question in QUESTIONS
        for params in [SamplingParams(max_new_tokens=20)]
    ]
    completions = assert_lossless(target, drafter, requests)
    length = acceptance_length([step for completion in completions for step in completion.steps])
    assert length is not None
    assert length > 1.5  # 1 is a drafter that is never right


def test_the_run_says_what_it_did(recipe: TrainConfig, whole: Whole) -> None:
    shards = [e for e in whole.events if e.stage == "regenerate" and e.detail is None]
    assert [(e.done, e.total) for e in shards] == [(1, 3), (2, 3), (3, 3)]
    num_tokens = sum(e.detail for e in whole.events if isinstance(e.detail, int))
    out = whole.result.folder.parent
    documents = [d for path in sorted((out / "features").iterdir()) for d in read_shard(path)[0]]
    assert num_tokens == sum(d.num_supervised for d in documents)
    assert [e.done for e in whole.events if e.stage == "train"] == list(range(1, 41))

    said = whole.checkpoint.provenance
    assert said["target"] == "tiny"
    assert said["recipe"]["train"]["lr"] == recipe.train.lr
    assert said["data"]["num_documents"] == 7
    assert said["data"]["num_response_tokens"] == num_tokens
    assert said["num_blocks"] == 40 * 32
    assert (said["algorithm"], said["num_processes"], said["num_steps"]) == ("dflash", 1, 40)
    assert said["machine"]["torch"] == torch.__version__
    curve = list(csv.DictReader((out / "curve.csv").read_text().splitlines()))
    best = max(curve, key=lambda row: float(row["acceptance_length"]))  # the first of equals
    assert said["held_out"]["step"] == whole.result.best.step == int(best["step"])
    assert said["held_out"]["acceptance_length"] == float(best["acceptance_length"])
    assert whole.checkpoint.dtype is torch.bfloat16
    assert [int(row["step"]) for row in curve] == [0, 20, 40] == [0, 20, whole.result.row.step]
    page = (out / "curve.html").read_text(encoding="utf-8")
    assert "Step 40: τ" in page and "sliding_attention" in page


@pytest.mark.parametrize("stage", ["regenerate", "train"])
def test_an_interrupted_run_ends_with_the_same_drafter(
    recipe: TrainConfig, folder: Path, whole: Whole, tmp_path: Path, stage: str
) -> None:
    config = replace(recipe, out=str(tmp_path / "run"))
    observe, should_stop = after(23 if stage == "train" else 30, stage)
    if stage == "regenerate":
        with pytest.raises(KeyboardInterrupt):
            train(config, observe=observe, should_stop=should_stop, target_folder=folder)
        whole_shards = sorted((tmp_path / "run" / "features").iterdir())
        assert 0 < len(whole_shards) < 3
        times = [path.stat().st_mtime_ns for path in whole_shards]
    else:
        result = train(config, observe=observe, should_stop=should_stop, target_folder=folder)
        assert not result.finished
        assert DrafterCheckpoint.load(result.folder).provenance["num_steps"] == 23
    result = train(config, target_folder=folder)
    assert result.finished
    if stage == "regenerate":
        assert [path.stat().st_mtime_ns for path in whole_shards] == times
    checkpoint = DrafterCheckpoint.load(result.folder)
    assert checkpoint.tensors.keys() == whole.checkpoint.tensors.keys()
    assert all(
        torch.equal(tensor, checkpoint.tensors[name]) for name, tensor in whole.checkpoint.tensors.items()
    )
    assert checkpoint.provenance["data"] == whole.checkpoint.provenance["data"]


def test_a_run_may_begin_with_a_drafter(
    recipe: TrainConfig, folder: Path, whole: Whole, tmp_path: Path
) -> None:
    given = replace(recipe.drafter, initial_drafter=str(whole.result.folder))
    short = replace(recipe.train, max_steps=1, decay_steps=0)
    events: list[TrainEvent] = []
    train(
        replace(recipe, drafter=given, train=short, out=str(tmp_path / "run")),
        observe=events.append,
        target_folder=folder,
    )
    assert losses(events)[0] < 0.3 * losses(whole.events)[0]
    other = replace(given, block_size=3, sliding_window=9)
    with pytest.raises(
        ConfigError, match="block_size: expected 3, got 4; sliding_window: expected 9, got 128"
    ):
        train(replace(recipe, drafter=other, out=str(tmp_path / "other")), target_folder=folder)
    other = ShapeConfig(algorithm="eagle3", initial_drafter=str(whole.result.folder))
    with pytest.raises(ConfigError, match="expected algorithm 'eagle3', got 'dflash'"):
        train(replace(recipe, drafter=other, out=str(tmp_path / "other")), target_folder=folder)


def test_an_earlier_run_is_refused_where_none_is_wanted(
    recipe: TrainConfig, folder: Path, whole: Whole
) -> None:
    config = replace(recipe, out=str(whole.result.folder.parent))
    with pytest.raises(ConfigError, match="holds an earlier run; hint"):
        train(config, resume=False, target_folder=folder)


def test_another_recipe_may_not_continue_a_run(recipe: TrainConfig, folder: Path, whole: Whole) -> None:
    out = str(whole.result.folder.parent)
    with pytest.raises(ConfigError, match="belongs to another recipe"):
        train(replace(recipe, out=out, train=replace(recipe.train, lr=1.0)), target_folder=folder)


def test_what_does_not_fit_is_said_before_the_target_answers(
    recipe: TrainConfig, folder: Path, tmp_path: Path
) -> None:
    wrong = {
        "leave none to train on": replace(recipe, train=replace(recipe.train, held_out_documents=7)),
        "train.slots: expected": replace(recipe, train=replace(recipe.train, slots=(5,))),
        "initial_layers: expected 2": replace(
            recipe, drafter=replace(recipe.drafter, initial_layers=(0, 1, 1))
        ),
        "mask_token_id: expected": replace(recipe, drafter=replace(recipe.drafter, mask_token_id=9999)),
        "data.folder: .*absent is not there; hint: --data FILE.jsonl": replace(
            recipe, data=replace(recipe.data, folder=str(tmp_path / "absent"))
        ),
        "data.sources: expected at least one": replace(recipe, data=replace(recipe.data, sources=())),
        "exceed the 128 positions of tiny": replace(
            recipe, regenerate=replace(recipe.regenerate, max_new_tokens=126)
        ),
    }
    for message, config in wrong.items():
        with pytest.raises(ConfigError, match=message):
            train(replace(config, out=str(tmp_path / "run")), target_folder=folder)
        assert not list(tmp_path.rglob("*.safetensors"))
