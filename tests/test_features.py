"""Feature shards, and the regeneration that fills them: whole or refused, resumable, the target's own words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from paceline.checkpoint import store
from paceline.core.errors import CheckpointError, ConfigError
from paceline.core.params import SamplingParams
from paceline.core.types import EMPTY_PROPOSAL, Request
from paceline.target.base import VerifyRows
from paceline.target.native import NativeTarget
from paceline.testing import plain_texts, tiny_target
from paceline.train.data import Prompt
from paceline.train.features import Document, FeatureRecorder, read_shard, write_shard
from paceline.train.regenerate import RegenerateSettings, regenerate

# Feature shards ------------------------------------------------------------------------------------------------------


def some_documents() -> list[Document]:
    rng = torch.Generator().manual_seed(9)
    documents = []
    for num_prompt, length in ((3, 8), (1, 2), (5, 5)):
        hidden = torch.randn(length, 6, generator=rng).bfloat16()
        documents.append(Document(torch.randint(0, 99, (length,), generator=rng), num_prompt, hidden))
    return documents


def assert_same_documents(got: Sequence[Document], expected: Sequence[Document]) -> None:
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one.token_ids, other.token_ids)
        assert one.token_ids.dtype is torch.int64
        assert one.num_prompt_tokens == other.num_prompt_tokens
        assert torch.equal(one.hidden, other.hidden)
        assert one.hidden.dtype is other.hidden.dtype


def test_a_shard_is_its_documents(tmp_path: Path) -> None:
    path, metadata = tmp_path / "a.safetensors", {"prompts": "abc", "temperatures": [0.0, 0.7], "seed": 2**62}
    write_shard(path, some_documents(), metadata)
    documents, found = read_shard(path)
    assert_same_documents(documents, some_documents())
    assert found == metadata
    assert [file.name for file in tmp_path.iterdir()] == ["a.safetensors"]


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99])
def test_a_truncated_shard_is_refused(share: float, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_shard(path, some_documents(), {})
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(CheckpointError, match=r"a\.safetensors: not a whole feature shard.*hint: delete it"):
        read_shard(path)


@pytest.mark.parametrize("bad", [[math.nan], [math.inf], [math.inf, -math.inf]])
def test_a_shard_that_is_not_finite_is_refused(bad: list[float], tmp_path: Path) -> None:
    documents = some_documents()
    documents[0].hidden[2, : len(bad)] = torch.tensor(bad)
    write_shard(tmp_path / "a.safetensors", documents, {})
    with pytest.raises(CheckpointError, match="hidden states are not finite"):
        read_shard(tmp_path / "a.safetensors")


@pytest.mark.parametrize(
    "change",
    [
        {"num_tokens": torch.tensor([8, 2, 4])},
        {"num_tokens": torch.tensor([8, 2])},
        {"num_prompt_tokens": torch.tensor([3, 1])},
        {"hidden": torch.zeros(14, 6)},
        {"token_ids": None},
    ],
    ids=str,
)
def test_a_shard_that_does_not_add_up_is_refused(
    change: dict[str, torch.Tensor | None], tmp_path: Path
) -> None:
    path = tmp_path / "a.safetensors"
    write_shard(path, some_documents(), {})
    tensors = load_file(path) | change
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)
    with pytest.raises(CheckpointError, match="not a whole feature shard"):
        read_shard(path)


@pytest.mark.parametrize("kind", [OSError, SafetensorError])
def test_a_full_disk_leaves_no_half_shard(
    kind: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_half(tensors: object, path: Path, metadata: object = None) -> None:
        Path(path).write_bytes(b"half a shard")
        raise kind("No space left on device")

    monkeypatch.setattr(store, "save_file", write_half)
    with pytest.raises(OSError, match="No space left"):
        write_shard(tmp_path / "a.safetensors", some_documents(), {})
    assert list(tmp_path.iterdir()) == []


def test_a_recorder_copies_what_it_is_shown() -> None:
    recorder = FeatureRecorder((0, 1), dtype=torch.float32)
    first, second = recorder.open(9), recorder.open(9)
    rows = torch.ones(3, 4)
    recorder.inject([first, second], [rows[:1], rows[1:]], [[5], [6, 7]])
    rows.zero_()
    recorder.inject([second], [rows[:1]], [[8]])
    assert (first.length, second.length) == (1, 3)
    assert torch.cat(second.rows).tolist() == [[1.0] * 4, [1.0] * 4, [0.0] * 4]
    assert recorder.recordings == [first, second]
    assert recorder.draft([1, 2], [first, second], 5) == [EMPTY_PROPOSAL] * 2


# Regeneration --------------------------------------------------------------------------------------------------------

TAPS = (0, 1)
SETTINGS = RegenerateSettings(
    max_new_tokens=9, temperatures=(0.0, 0.8), num_sequences=3, prompts_per_shard=4, seed=5
)
PROMPTS = [
    Prompt(f"p{i}", "tiny", tuple((5 * i + 7 * j + 1) % 61 for j in range(1 + i * 5 % 7))) for i in range(10)
]


@pytest.fixture(scope="module")
def target() -> NativeTarget:
    return tiny_target()


def run(folder: Path, target: NativeTarget, made: RegenerateSettings = SETTINGS, **kwargs: Any) -> list[Path]:
    return list(regenerate(PROMPTS, target, TAPS, folder, made, **kwargs))


def test_responses_are_the_targets_own(tmp_path: Path, target: NativeTarget) -> None:
    told: list[int] = []
    paths = run(tmp_path, target, on_tokens=told.append)
    assert [len(read_shard(path)[0]) for path in paths] == [4, 4, 2]
    documents = [document for path in paths for document in read_shard(path)[0]]
    requests = [
        Request(
            prompt.id,
            prompt.token_ids,
            SamplingParams(9, SETTINGS.temperatures[i % 4 % 2], seed=5 + i % 4),
        )
        for i, prompt in enumerate(PROMPTS)
    ]
    for document, plain in zip(documents, plain_texts(target, requests), strict=True):
        assert document.token_ids.tolist() == [*plain.prompt_ids, *plain.token_ids]
        assert document.num_prompt_tokens == len(plain.prompt_ids)
    assert sum(told) == sum(len(d.token_ids) - d.num_prompt_tokens for d in documents)


def test_hidden_states_are_those_of_the_text(tmp_path: Path, target: NativeTarget) -> None:
    documents = read_shard(run(tmp_path, target)[0])[0]
    target.tap(TAPS)
    for document in documents:
        session = target.open(40)
        (output,) = target.verify([VerifyRows(session, document.token_ids.tolist(), EMPTY_PROPOSAL)])
        session.close()
        torch.testing.assert_close(document.hidden[:-1].double(), output.hidden[:-1], rtol=2**-8, atol=1e-9)
        assert document.hidden.dtype is torch.bfloat16
        assert (document.hidden[-1] == 0).all()


def test_an_interrupted_run_ends_with_the_same_files(tmp_path: Path, target: NativeTarget) -> None:
    paths = run(tmp_path, target)
    before = [path.read_bytes() for path in paths]
    times = [path.stat().st_mtime_ns for path in paths]
    paths[1].unlink()
    assert run(tmp_path, target) == paths
    assert [path.read_bytes() for path in paths] == before
    assert [path.stat().st_mtime_ns == t for path, t in zip(paths, times, strict=True)] == [True, False, True]
    half = iter(regenerate(PROMPTS, target, TAPS, tmp_path / "other", SETTINGS))
    next(half)
    half.close()  # type: ignore[attr-defined]
    assert len(list((tmp_path / "other").iterdir())) == 1
    again = run(tmp_path / "other", target)
    assert [path.read_bytes() for path in again] == before


def test_batches_of_another_size_say_the_same(tmp_path: Path, target: NativeTarget) -> None:
    expected = [read_shard(path)[0] for path in run(tmp_path / "three", target)]
    for num_sequences in (1, 8):
        paths = run(tmp_path / str(num_sequences), target, replace(SETTINGS, num_sequences=num_sequences))
        for path, documents in zip(paths, expected, strict=True):
            for got, document in zip(read_shard(path)[0], documents, strict=True):
                assert torch.equal(got.token_ids, document.token_ids)
                torch.testing.assert_close(got.hidden, document.hidden, rtol=2**-7, atol=1e-9)


@pytest.mark.parametrize("change", [{"seed": 6}, {"max_new_tokens": 8}, {"temperatures": (0.0,)}], ids=str)
def test_shards_of_other_settings_are_refused(
    change: dict[str, Any], tmp_path: Path, target: NativeTarget
) -> None:
    run(tmp_path, target)
    with pytest.raises(ConfigError, match="made from other prompts or settings; hint: use another folder"):
        run(tmp_path, target, replace(SETTINGS, **change))


def test_shards_of_other_prompts_or_taps_are_refused(tmp_path: Path, target: NativeTarget) -> None:
    run(tmp_path, target)
    for prompts, taps in ((PROMPTS[1:], TAPS), (PROMPTS, (1,))):
        with pytest.raises(ConfigError, match="made from other prompts or settings"):
            list(regenerate(prompts, target, taps, tmp_path, SETTINGS))


def test_a_damaged_shard_stops_a_run(tmp_path: Path, target: NativeTarget) -> None:
    path = run(tmp_path, target)[1]
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match=r"not a whole feature shard.*hint: delete it and run again"):
        run(tmp_path, target)
