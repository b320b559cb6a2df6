"""Feature shards, and the regeneration that fills them: whole or refused, resumable, the target's own words."""

from __future__ import annotations

import json
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
from paceline.train.data.features import ABSENT, Document, FeatureRecorder, read_shard, write_shard
from paceline.train.data.prompts import Prompt
from paceline.train.data.regenerate import RegenerateSettings, regenerate

# Feature shards ------------------------------------------------------------------------------------------------------


def some_documents() -> list[Document]:
    rng = torch.Generator().manual_seed(9)
    documents = []
    for num_prompt, length in ((3, 8), (1, 2), (5, 5)):
        hidden = torch.randn(length, 6, generator=rng).bfloat16()
        ids = torch.randint(0, 99, (length,), generator=rng)
        documents.append(Document(ids, torch.arange(length) >= num_prompt, hidden))
    return documents


def with_tops(documents: Sequence[Document]) -> list[Document]:
    rng = torch.Generator().manual_seed(3)
    made = []
    for document in documents:
        ids = torch.randint(0, 99, (len(document.token_ids), 2), generator=rng, dtype=torch.int32)
        made.append(
            replace(document, top_ids=ids, top_log_probs=-torch.rand(ids.shape, generator=rng).half())
        )
    return made


def assert_same_documents(got: Sequence[Document], expected: Sequence[Document]) -> None:
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one.token_ids, other.token_ids)
        assert one.token_ids.dtype is torch.int64
        assert torch.equal(one.supervised, other.supervised)
        assert torch.equal(one.hidden, other.hidden)
        assert one.hidden.dtype is other.hidden.dtype
        for name in ("top_ids", "top_log_probs"):
            mine, theirs = getattr(one, name), getattr(other, name)
            assert (mine is None) == (theirs is None)
            assert theirs is None or (torch.equal(mine, theirs) and mine.dtype is theirs.dtype)


@pytest.mark.parametrize("tops", [False, True])
def test_a_shard_is_its_documents(tmp_path: Path, tops: bool) -> None:
    expected = with_tops(some_documents()) if tops else some_documents()
    path, metadata = tmp_path / "a.safetensors", {"prompts": "abc", "temperatures": [0.0, 0.7], "seed": 2**62}
    write_shard(path, expected, metadata)
    documents, found = read_shard(path)
    assert_same_documents(documents, expected)
    assert found == metadata
    assert [file.name for file in tmp_path.iterdir()] == ["a.safetensors"]


def test_a_shard_of_tokens_alone(tmp_path: Path) -> None:
    expected = [replace(d, hidden=d.hidden[:, :0]) for d in some_documents()]
    write_shard(tmp_path / "a.safetensors", expected, {})
    assert_same_documents(read_shard(tmp_path / "a.safetensors")[0], expected)


def test_hidden_states_stay_in_the_file(tmp_path: Path) -> None:
    wide = [replace(d, hidden=torch.ones(len(d.token_ids), 10**6).bfloat16()) for d in some_documents()]
    write_shard(tmp_path / "a.safetensors", wide, {})
    before = anonymous_bytes()
    documents = read_shard(tmp_path / "a.safetensors")[0]
    assert sum(float(d.hidden[-1, -1]) for d in documents) == 3
    assert anonymous_bytes() - before < 3_000_000, "30 MB of hidden states were copied into memory"


def anonymous_bytes() -> int:
    """Returns the memory of this process that is backed by no file."""
    status = Path("/proc/self/status")
    if not status.exists():
        pytest.skip("this system does not tell what memory is made of")
    return next(
        1024 * int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("RssAnon")
    )


@pytest.mark.parametrize(
    "tensor", ["token_ids", "supervised", "num_tokens", "hidden", "top_ids", "top_log_probs"]
)
def test_a_flipped_byte_is_refused(tensor: str, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_shard(path, with_tops(some_documents()), {})
    whole = bytearray(path.read_bytes())
    header = 8 + int.from_bytes(whole[:8], "little")
    where = json.loads(whole[8:header])[tensor]["data_offsets"]
    whole[header + sum(where) // 2] ^= 1
    path.write_bytes(whole)
    with pytest.raises(
        CheckpointError, match=r"a\.safetensors: (its tensors are not|not a whole).*hint: delete it"
    ):
        read_shard(path)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99])
def test_a_truncated_shard_is_refused(share: float, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_shard(path, some_documents(), {})
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(CheckpointError, match=r"a\.safetensors: not a whole feature shard.*hint: delete it"):
        read_shard(path)


@pytest.mark.parametrize("bad", [[math.nan], [math.inf], [math.inf, -math.inf]])
def test_hidden_states_that_are_not_finite_are_refused(bad: list[float], tmp_path: Path) -> None:
    documents = some_documents()
    documents[0].hidden[2, : len(bad)] = torch.tensor(bad)
    with pytest.raises(CheckpointError, match="hidden states are not finite"):
        write_shard(tmp_path / "a.safetensors", documents, {})
    assert not list(tmp_path.iterdir())


def test_a_file_without_a_digest_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_shard(path, some_documents(), {})
    save_file(load_file(path), path)
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
        assert document.supervised.tolist() == [False] * len(plain.prompt_ids) + [True] * len(plain.token_ids)
    assert sum(told) == sum(d.num_supervised for d in documents)


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


@pytest.mark.parametrize(
    "change", [{"seed": 6}, {"max_new_tokens": 8}, {"temperatures": (0.0,)}, {"top_log_probs": 2}], ids=str
)
def test_shards_of_other_settings_are_refused(
    change: dict[str, Any], tmp_path: Path, target: NativeTarget
) -> None:
    run(tmp_path, target)
    (key,) = change
    expected = rf"made from other prompts or settings \({key}: expected .*, got .*\); hint: another `out`"
    with pytest.raises(ConfigError, match=expected):
        run(tmp_path, target, replace(SETTINGS, **change))


def test_shards_of_other_prompts_taps_or_targets_are_refused(tmp_path: Path, target: NativeTarget) -> None:
    run(tmp_path, target)
    other = tiny_target()
    other.spec = replace(other.spec, name="another")
    for prompts, asked, taps, message in (
        (PROMPTS[1:], target, TAPS, "prompts: expected"),
        (PROMPTS, target, (1,), r"target_layer_ids: expected \[1\], got \[0, 1\]"),
        (PROMPTS, other, TAPS, "target: expected 'another', got 'tiny'"),
        (PROMPTS, tiny_target(dtype=torch.float32), TAPS, "target_dtype: expected 'float32', got 'float64'"),
    ):
        with pytest.raises(ConfigError, match=message):
            list(regenerate(prompts, asked, taps, tmp_path, SETTINGS))


def test_what_the_target_said_is_kept(tmp_path: Path, target: NativeTarget) -> None:
    plain = [d for path in run(tmp_path / "plain", target) for d in read_shard(path)[0]]
    paths = run(tmp_path / "top", target, replace(SETTINGS, top_log_probs=5))
    documents = [d for path in paths for d in read_shard(path)[0]]
    for document, other in zip(documents, plain, strict=True):
        assert_same_documents([replace(document, top_ids=None, top_log_probs=None)], [other])
        assert document.top_ids is not None
        assert document.top_log_probs is not None
        session = target.open(40)
        (output,) = target.verify([VerifyRows(session, document.token_ids.tolist(), EMPTY_PROPOSAL)])
        session.close()
        best, ids = output.logits.log_softmax(-1).topk(5)
        mine = document.supervised.nonzero().flatten()
        assert torch.equal(document.top_ids[mine], ids[mine - 1].int())
        torch.testing.assert_close(document.top_log_probs[mine], best[mine - 1].half())
        assert (document.top_ids[~document.supervised] == ABSENT).all()
        assert (document.top_log_probs[~document.supervised] == -math.inf).all()


def test_without_taps_a_shard_holds_tokens_alone(tmp_path: Path, target: NativeTarget) -> None:
    tapped = [d for path in run(tmp_path, target) for d in read_shard(path)[0]]
    paths = list(regenerate(PROMPTS, target, (), tmp_path, SETTINGS))
    assert [path.name for path in paths] == [f"answers-{i:05d}.safetensors" for i in range(3)]
    for document, other in zip([d for path in paths for d in read_shard(path)[0]], tapped, strict=True):
        assert_same_documents([document], [replace(other, hidden=other.hidden[:, :0])])
