"""From a recipe to documents: online is cached, a cache that does not fit is refused, and shards are checked."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.core.errors import CheckpointError, ConfigError, UnsupportedTargetError
from paceline.core.types import EMPTY_PROPOSAL
from paceline.llm import LLM
from paceline.target.base import TargetOutput, VerifyRows
from paceline.target.native import NativeTarget
from paceline.testing import tiny_target
from paceline.train.config import DataConfig, RegenerateConfig, ShapeConfig, SourceConfig, TrainConfig
from paceline.train.data.batch import BlockSampler, Cursor, DraftVocabulary
from paceline.train.data.documents import cache_bytes, collect, load_rows
from paceline.train.data.features import Document
from paceline.train.data.prefill import TEXTS_TOGETHER, OnlineDocument, hidden_of, prefill
from paceline.train.data.prompts import Prompt
from tiny_llm import tiny_llm

TAPS = (0, 1)
PROMPTS = [
    Prompt(f"p{i}", "", tuple((5 * i + 7 * j + 1) % 61 for j in range(1 + i * 5 % 7))) for i in range(20)
]
ANSWERED = [
    replace(
        p,
        token_ids=(*p.token_ids, 5, 9, *p.token_ids),
        supervised=(False,) * len(p.token_ids) + (True,) * (2 + len(p.token_ids)),
    )
    for p in PROMPTS
]


class CountingTarget(NativeTarget):
    """Counts the rows that it runs."""

    num_rows = 0

    def verify(self, batch: Sequence[VerifyRows]) -> list[TargetOutput]:
        """Runs and counts."""
        self.num_rows += sum(part.num_rows for part in batch)
        return super().verify(batch)


@pytest.fixture
def target() -> CountingTarget:
    made = tiny_target()
    made.__class__ = CountingTarget
    assert isinstance(made, CountingTarget)
    return made


def recipe(num_top: int = 0, **data: Any) -> TrainConfig:
    return TrainConfig(
        drafter=ShapeConfig(mask_token_id=3),
        data=DataConfig(**data),
        regenerate=RegenerateConfig(
            max_new_tokens=12, num_sequences=4, prompts_per_shard=6, top_log_probs=num_top
        ),
    )


GIVEN: dict[str, Any] = {"answers": "given", "allow_foreign": True}


def assert_same(got: Sequence[Document], expected: Sequence[Document]) -> None:
    for one, other in zip(got, expected, strict=True):
        for name in ("token_ids", "supervised", "hidden", "top_ids", "top_log_probs"):
            mine, theirs = getattr(one, name), getattr(other, name)
            assert (mine is None) == (theirs is None), name
            assert theirs is None or (mine.dtype is theirs.dtype and torch.equal(mine, theirs)), name


@pytest.mark.parametrize("answers", ["regenerate", "given"])
@pytest.mark.parametrize("num_top", [0, 3])
def test_online_documents_are_the_cached_ones(
    answers: str, num_top: int, target: CountingTarget, tmp_path: Path
) -> None:
    data: dict[str, Any] = GIVEN if answers == "given" else {}
    prompts = ANSWERED if answers == "given" else PROMPTS
    cached = collect(prompts, target, TAPS, tmp_path, recipe(num_top, **data))
    online = collect(prompts, target, TAPS, tmp_path, recipe(num_top, features="online", **data))
    names = Counter(path.name.partition("-")[0] for path in tmp_path.iterdir())
    assert names == {"features": 4, "answers": 4}
    assert not any(isinstance(d, OnlineDocument) for d in cached)
    assert_same(online, cached)
    assert all(
        torch.equal(a, b)
        for a, b in zip(hidden_of(online, online[0]), hidden_of(cached, cached[0]), strict=True)
    )
    assert max(path.stat().st_size for path in tmp_path.glob("answers-*")) < 2500 + 6 * 40 * (5 + 6 * num_top)


def test_batches_of_online_documents_are_those_of_cached_ones(target: CountingTarget, tmp_path: Path) -> None:
    drawn = []
    for features in ("cached", "online"):
        documents = collect(PROMPTS, target, TAPS, tmp_path, recipe(features=features))
        vocabulary = DraftVocabulary.covering(documents, 61, None)
        sampler = BlockSampler(
            documents, torch.zeros(1), vocabulary, blocks_per_step=40, anchors_per_document=3, seed=0
        )
        drawn.append([sampler.next(Cursor(index=5 * step), step, 4)[0] for step in range(3)])
    for cached, online in zip(*drawn, strict=True):
        assert torch.equal(cached.labels, online.labels)
        for one, other in zip(cached.documents, online.documents, strict=True):
            assert torch.equal(one.hidden, other.hidden)


def test_online_features_are_computed_when_asked_for_and_few_are_kept(
    target: CountingTarget, tmp_path: Path
) -> None:
    documents = collect(ANSWERED, target, TAPS, tmp_path, recipe(features="online", **GIVEN))
    assert target.num_rows == 0, "tokens that are known need no target"
    sampler = BlockSampler(
        documents,
        torch.zeros(1),
        DraftVocabulary.covering(documents, 61, None),
        blocks_per_step=2,
        anchors_per_document=2,
        seed=0,
    )
    assert target.num_rows == 0, "nobody asked for hidden states"
    sampler.next(Cursor(), 0, 3)
    (first,) = hidden_of(documents[:1], documents[0])
    rows = target.num_rows
    assert torch.equal(documents[0].hidden, first)
    assert target.num_rows == rows, "just computed"
    assert len(hidden_of(documents[:1] * 3, documents[0])) == 3
    hidden_of(documents[1 : 2 + TEXTS_TOGETHER], documents[0])
    rows = target.num_rows
    assert torch.equal(documents[0].hidden, first)
    assert target.num_rows == rows + len(documents[0].token_ids) - 1, "forgotten"


@pytest.mark.parametrize("rows_of_a_pass", [16, 512])
def test_texts_that_are_read_together_do_not_mix(
    rows_of_a_pass: int, target: CountingTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.train.data.prefill.PREFILL_ROWS", rows_of_a_pass)
    texts = [[(11 * n + 3 * t + n * t) % 61 for t in range(2 + 9 * n)] for n in range(5)]
    seen: dict[tuple[int, int], torch.Tensor] = {}

    def look(number: int, position: int, logits: torch.Tensor) -> None:
        seen.update({(number, position + i): row for i, row in enumerate(logits)})

    together = prefill(target, TAPS, texts, look)
    for n, (text, hidden) in enumerate(zip(texts, together, strict=True)):
        session = target.open(len(text))
        (alone,) = target.verify([VerifyRows(session, text, EMPTY_PROPOSAL)])
        session.close()
        assert hidden.shape == (len(text), 64)
        torch.testing.assert_close(hidden[:-1].double(), alone.hidden[:-1], rtol=2**-8, atol=1e-9)
        assert (hidden[-1] == 0).all()
        said = torch.stack([seen.pop((n, position)) for position in range(1, len(text))])
        torch.testing.assert_close(said, alone.logits[:-1])
    assert not seen


def test_the_estimate_bounds_what_is_written(target: CountingTarget, tmp_path: Path) -> None:
    for number, (prompts, config) in enumerate(
        [
            (PROMPTS, recipe()),
            (PROMPTS, recipe(3, features="online")),
            (ANSWERED, recipe(3, **GIVEN)),
            (ANSWERED, recipe(features="online", **GIVEN)),
        ]
    ):
        folder = tmp_path / str(number)
        collect(prompts, target, TAPS, folder, config)
        size = sum(path.stat().st_size for path in folder.iterdir())
        headers = 4 * 2000  # names, shapes, digests
        estimate = cache_bytes(prompts, TAPS, target.spec.hidden_size, config)
        assert size - headers <= estimate
        assert config.data.answers != "given" or size >= estimate


def test_a_cache_above_its_limit_is_refused_before_work_begins(
    target: CountingTarget, tmp_path: Path
) -> None:
    size = cache_bytes(PROMPTS, TAPS, target.spec.hidden_size, recipe())
    with pytest.raises(
        ConfigError, match=rf"max_cache_bytes: expected at least {size:,}.*features = 'online'"
    ):
        collect(PROMPTS, target, TAPS, tmp_path / "run", recipe(max_cache_bytes=size - 1))
    assert target.num_rows == 0
    assert not list(tmp_path.iterdir())
    collect(PROMPTS, target, TAPS, tmp_path / "run", recipe(max_cache_bytes=size))


def test_a_disk_without_room_is_refused_before_work_begins(
    target: CountingTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = cache_bytes(PROMPTS, TAPS, target.spec.hidden_size, recipe())
    free = [size - 1]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free[0]))
    with pytest.raises(
        ConfigError, match=rf"room for up to {size:,} bytes more, the disk has {size - 1:,} free"
    ):
        collect(PROMPTS, target, TAPS, tmp_path / "run", recipe())
    assert target.num_rows == 0
    free[0] = size
    collect(PROMPTS, target, TAPS, tmp_path / "run", recipe())
    free[0] = size // 2  # what is there already needs no room
    collect(PROMPTS, target, TAPS, tmp_path / "run", recipe())


def test_shards_are_told_of_kept_and_checked(target: CountingTarget, tmp_path: Path) -> None:
    told: list[tuple[int, int, int | None]] = []

    def tell(done: int, total: int, count: int | None) -> None:
        told.append((done, total, count))

    documents = collect(PROMPTS, target, TAPS, tmp_path, recipe(), tell)
    assert [(done, total) for done, total, count in told if count is None] == [(n, 4) for n in (1, 2, 3, 4)]
    assert sum(count or 0 for *_, count in told) == sum(d.num_supervised for d in documents)
    rows = target.num_rows
    assert_same(collect(PROMPTS, target, TAPS, tmp_path, recipe()), documents)
    assert target.num_rows == rows
    spoilt = tmp_path / "features-00002.safetensors"
    content = bytearray(spoilt.read_bytes())
    content[-9] ^= 4
    spoilt.unlink()  # documents that were read stay with the file that they are mapped to
    spoilt.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"features-00002\.safetensors: its tensors are not those"):
        collect(PROMPTS, target, TAPS, tmp_path, recipe())
    spoilt.unlink()
    assert_same(collect(PROMPTS, target, TAPS, tmp_path, recipe()), documents)


def test_texts_that_do_not_fit_the_target(target: CountingTarget, tmp_path: Path) -> None:
    long = Prompt("long", "", (5,) * 117)
    with pytest.raises(ConfigError, match=r"a prompt of 117 tokens .* exceed the 128 positions"):
        collect([long], target, TAPS, tmp_path, recipe())
    with pytest.raises(ConfigError, match="row far: token ids must be in 0…60, got 61"):
        collect([Prompt("far", "", (61,))], target, TAPS, tmp_path, recipe())
    given = Prompt("long", "", (5,) * 140, (False,) * 100 + (True,) * 40)
    (document,) = collect([given], target, TAPS, tmp_path, recipe(**GIVEN))
    assert (len(document.token_ids), document.num_supervised) == (128, 28)


def test_foreign_answers_are_refused_before_work_begins(target: CountingTarget, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="these answers were hardly written by tiny"):
        collect(ANSWERED, target, TAPS, tmp_path, recipe(answers="given"))
    assert not list(tmp_path.iterdir())


def test_a_target_that_cannot_be_sharded_is_refused(target: CountingTarget, tmp_path: Path) -> None:
    sharded = recipe(features="online", shard_target=True, **GIVEN)
    with pytest.raises(
        UnsupportedTargetError, match="expected a target of the hf runner, got CountingTarget"
    ):
        collect(ANSWERED, target, TAPS, tmp_path, sharded)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ({"answers": "mine"}, r"data.answers: expected one of \('regenerate', 'given'\), got 'mine'"),
        ({"features": "none"}, "data.features: expected one of"),
        ({"shard_target": True}, "data.shard_target: expected data.features = 'online'"),
        ({"allow_foreign": True}, "data.allow_foreign: expected data.answers = 'given'"),
        ({"max_cache_bytes": 0}, "data.max_cache_bytes: expected at least 1"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(data: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        DataConfig(**data)


@pytest.mark.parametrize("count", [-1, 21])
def test_as_many_likeliest_tokens_as_the_engine_gives(count: int) -> None:
    with pytest.raises(ConfigError, match=r"regenerate.top_log_probs: expected 0…20"):
        RegenerateConfig(top_log_probs=count)


def test_rows_are_read_as_the_recipe_says(tmp_path: Path) -> None:
    llm: LLM = tiny_llm(tmp_path, drafter=False)
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    data: dict[str, Any] = {"folder": str(tmp_path), "sources": (SourceConfig("a.jsonl"),)}
    (prompt,) = load_rows(recipe(**data), llm.codec)
    (given,) = load_rows(recipe(answers="given", **data), llm.codec)
    assert prompt.supervised == ()
    assert given.token_ids[: len(prompt.token_ids)] == prompt.token_ids
    assert sum(given.supervised) == len("yes") + 1
