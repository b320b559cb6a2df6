"""A whole diagnosis: of a drafter that was trained, of one whose mask was changed, and from the command line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from scipy import stats

from cli_runs import run
from paceline.core.acceptance import acceptance_length
from paceline.core.errors import ConfigError
from paceline.core.params import SamplingParams
from paceline.core.types import Request
from paceline.drafter.base import Blocks
from paceline.drafter.config import DrafterConfig
from paceline.drafter.dflash import DFlash
from paceline.engine.engine import Engine
from paceline.target.text import TextCodec
from paceline.testing import run_checked, tiny_target
from paceline.train.diagnosis.diagnose import Diagnosis, diagnose
from paceline.train.diagnosis.questions import (
    DiagnoseSettings,
    Question,
    choose,
    read_questions,
    write_answers,
)
from paceline.train.diagnosis.scores import Answer, calibration_error, estimate, student_t, walk
from paceline.train.diagnosis.trial import variant
from tiny_llm import tiny_llm

VOCAB, SLOTS, TAPS = 48, 4, (1, 3)
TARGET = tiny_target(3, num_layers=6, vocab_size=VOCAB, max_positions=96, dtype=torch.float32)
SETTINGS = DiagnoseSettings(num_prompts=14, max_new_tokens=40, anchors_per_answer=12, num_replayed=2)


def made_questions(count: int, seed: int) -> list[Question]:
    rng = torch.Generator().manual_seed(seed)
    prompts = torch.randint(3, VOCAB, (count, 6), generator=rng).tolist()
    return [Question(f"q{i}", "even" if i % 2 == 0 else "odd", None, tuple(p)) for i, p in enumerate(prompts)]


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    return tiny_llm(tmp_path_factory.mktemp("codec"), drafter=False).codec


@pytest.fixture(scope="module")
def trained() -> DFlash:
    """A drafter that was trained for a few seconds: it accepts about one draft a block."""
    answers = [
        a for a in write_answers(TARGET, made_questions(160, 0), TAPS, 40) if len(a.anchors(SLOTS - 1))
    ]
    torch.manual_seed(0)
    drafter = DFlash(
        DrafterConfig(
            block_size=SLOTS,
            hidden_size=32,
            num_layers=1,
            num_heads=4,
            num_kv_heads=2,
            head_dim=8,
            intermediate_size=48,
            vocab_size=VOCAB,
            target_layer_ids=TAPS,
            num_target_layers=6,
            mask_token_id=VOCAB - 1,
        )
    )
    for parameter in drafter.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    optimizer = torch.optim.AdamW(drafter.parameters(), 4e-3, weight_decay=0.0)
    rng = torch.Generator().manual_seed(0)
    for _ in range(150):
        chosen = torch.randint(len(answers), (8,), generator=rng).tolist()
        blocks = [drawn_blocks(answers[i], rng) for i in chosen]
        states = drafter.forward_blocks(blocks, TARGET.heads.embed_weight)
        labels = torch.cat([b.block_ids for b in blocks])[:, 1:]
        loss = F.cross_entropy((states @ TARGET.heads.head_weight.T).flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return drafter.bind(TARGET.heads)


def drawn_blocks(answer: Answer, rng: torch.Generator) -> Blocks:
    possible = answer.anchors(SLOTS - 1)
    anchors = possible[torch.randperm(len(possible), generator=rng)[:8]].sort().values
    last = int(anchors.max())
    ids = answer.token_ids[anchors[:, None] + torch.arange(SLOTS)]
    return Blocks(answer.taps(TAPS)[:last], answer.token_ids[:last], anchors, ids)


def diagnosed(drafter: DFlash, codec: TextCodec) -> Diagnosis:
    return diagnose(TARGET, drafter, codec, made_questions(14, 1), rope_theta=10_000.0, settings=SETTINGS)


@pytest.fixture(scope="module")
def healthy(trained: DFlash, codec: TextCodec) -> Diagnosis:
    return diagnosed(trained, codec)


# The whole -----------------------------------------------------------------------------------------------------------


def test_a_trained_drafter_matches_nothing(healthy: Diagnosis) -> None:
    assert [e.name for e in healthy.causes] == []
    assert healthy.parity.agrees and healthy.parity.num_rejections > 0
    assert healthy.acceptance.decoding.value > 1.3


def test_its_mask_changed_is_its_mask_named(trained: DFlash, codec: TextCodec) -> None:
    changed = variant(trained, mask_token_id=9)
    assert isinstance(changed, DFlash)
    found = diagnosed(changed, codec)
    assert [e.name for e in found.causes][:1] == ["mask_token"]
    assert f"token {VOCAB - 1} in place of 9" in found.causes[0].says
    assert found.parity.agrees  # serving and training are wrong alike


def test_slots_add_up_to_acceptance(healthy: Diagnosis) -> None:
    reached, total = 1.0, 1.0
    for slot in healthy.slots:
        reached *= slot.recall["1"] or 0.0
        total += reached
    assert total == pytest.approx(healthy.acceptance.every_anchor.value)
    assert [s.slot for s in healthy.slots] == [1, 2, 3]
    oracle = healthy.acceptance.oracle
    assert healthy.acceptance.decoding.value < oracle["4"].value < oracle["16"].value <= SLOTS
    assert all(0 <= s.calibration_error <= 1 and 0 < s.probability < 1 for s in healthy.slots)
    for parts in (healthy.kinds, healthy.positions):
        assert sum(p.acceptance_length.num_blocks for p in parts) == healthy.acceptance.decoding.num_blocks
    assert [p.name for p in healthy.positions] == ["0–31", "32–63"]
    assert {p.name for p in healthy.kinds} == {"even", "odd"}


def test_the_walk_is_what_decoding_does(trained: DFlash, codec: TextCodec) -> None:
    """Ten answers served for real have the acceptance length that the blocks foretell."""
    questions = made_questions(10, 1)
    requests = [
        Request(q.id, q.token_ids, SamplingParams(max_new_tokens=40, temperature=0.0)) for q in questions
    ]
    completions = run_checked(Engine(TARGET, trained, max_sequences=3), requests)
    whole = [
        s
        for c in completions.values()
        for s in c.steps
        if s.position + SLOTS - 2 < len(c.prompt_ids + c.token_ids)
    ]
    found = diagnose(TARGET, trained, codec, questions, settings=replace(SETTINGS, num_replayed=1))
    assert found.acceptance.decoding.num_blocks == len(whole)
    assert found.acceptance.decoding.value == pytest.approx(acceptance_length(whole))


# Its parts -----------------------------------------------------------------------------------------------------------


def test_intervals() -> None:
    for degrees in (1, 2, 7, 40):
        assert student_t(0.995, degrees) == pytest.approx(stats.t.ppf(0.995, degrees), rel=1e-3)
    values = [torch.tensor([1.0, 2.0]), torch.tensor([2.0, 3.0]), torch.tensor([]), torch.tensor([3.0, 4.0])]
    found = estimate(values)
    assert found is not None and (found.num_blocks, found.num_answers) == (6, 3)
    low, high = stats.t.interval(0.95, 2, 2.5, stats.sem([1.5, 2.5, 3.5]))  # equal sizes: that of the means
    assert (found.value, found.low, found.high) == pytest.approx((2.5, low, high), abs=1e-3)
    alone = estimate(values[:1])
    assert alone is not None and (alone.low, alone.high) == (None, None)
    assert estimate([torch.tensor([])]) is None


def test_walk_and_calibration() -> None:
    assert walk(torch.tensor([2, 0, 3, 0, 1, 0])).tolist() == [True, False, False, True, True, False]
    sure = torch.tensor([0.95, 0.95, 0.95, 0.95])
    right = torch.tensor([True, True, True, False])
    assert calibration_error(sure, right) == pytest.approx(0.2)
    assert calibration_error(torch.tensor([0.15, 0.95]), torch.tensor([False, True])) == pytest.approx(0.1)


def test_questions_take_kinds_in_turn_and_say_what_they_leave_out(codec: TextCodec, tmp_path: Path) -> None:
    settings = DiagnoseSettings(num_prompts=3, max_new_tokens=4, max_prompt_tokens=10)
    given = [
        Question(n, k, None, (1,) * size)
        for n, k, size in (("a", "x", 3), ("b", "x", 4), ("c", "y", 5), ("d", "y", 11))
    ]
    chosen, left_out = choose(given, settings, 96)
    assert [q.id for q in chosen] == ["a", "c", "b"]
    assert left_out == {"prompt longer than 10 tokens": 1}
    with pytest.raises(ConfigError, match="at least two prompts of at most 3 tokens"):
        choose(given, settings, 7)
    shipped = read_questions(None, codec)
    assert len({q.kind for q in shipped}) == 8
    file = tmp_path / "mine.jsonl"
    file.write_text('{"prompt": "ab", "category": "mine"}\n{"prompt_ids": [3, 4]}\n', encoding="utf-8")
    first, second = read_questions(file, codec)
    assert (first.kind, first.messages is not None) == ("mine", True)
    assert (second.token_ids, second.messages) == ((3, 4), None)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_questions(tmp_path / "missing.jsonl", codec)


# The command ---------------------------------------------------------------------------------------------------------


KEYS = {
    "kind",
    "pair",
    "target",
    "drafter",
    "block_size",
    "settings",
    "num_answers",
    "num_answer_tokens",
    "left_out",
    "teacher_forced",
    "acceptance",
    "slots",
    "kinds",
    "positions",
    "parity",
    "experiments",
    "causes",
}
EXPERIMENT_KEYS = {"name", "matched", "evidence", "says", "hint", "gain", "left_out"}
SLOT_KEYS = {"slot", "num_blocks", "recall", "accuracy", "probability", "calibration_error"}
ESTIMATE_KEYS = {"value", "low", "high", "num_blocks", "num_answers"}


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_llm(tmp_path)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(
        "".join(f'{{"prompt": "{word}", "kind": "word"}}\n' for word in ("abc", "no", "yes", "x"))
    )
    pair = ("--pair", tmp_path / "target", "--offline")
    amounts = ("--diagnose", "--data", prompts, "--num-prompts", 4, "--max-new-tokens", 12)
    done = run(capsys, "inspect", tmp_path / "drafter", *pair, *amounts, "--json")
    assert done.code == 0, done.err
    document = json.loads(done.out)
    assert document.keys() == KEYS
    assert all(e.keys() == EXPERIMENT_KEYS for e in document["experiments"])
    assert all(s.keys() == SLOT_KEYS for s in document["slots"]) and len(document["slots"]) == 4
    assert document["acceptance"]["decoding"].keys() == ESTIMATE_KEYS
    assert document["settings"]["num_prompts"] == 4
    assert document["causes"] == ["at_chance"]  # its weights are random
    words = run(capsys, "inspect", tmp_path / "drafter", *pair, *amounts)
    assert "at chance in its first slot already" in words.out
    assert "training and serving\n  they agree" in words.out
    assert "not tried: selector (it has none)" in words.out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["auto", "--num-prompts", "3"], "--num-prompts: expected beside --diagnose"),
        (["somewhere", "--diagnose"], "expected --pair TARGET"),
    ],
)
def test_command_that_cannot(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    done = run(capsys, "inspect", *arguments)
    assert (done.code, done.out) == (1, "")
    assert said in done.err


def test_a_drafter_without_weights_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_llm(tmp_path, drafter=False)
    done = run(capsys, "inspect", "lookup", "--diagnose", "--pair", tmp_path / "target", "--offline")
    assert (done.code, done.out) == (1, "")
    assert "expected a drafter with weights, got 'lookup'" in done.err


def test_the_stored_example_is_of_this_schema() -> None:
    root = Path(__file__).resolve().parent.parent
    stored = json.loads((root / "benchmarks/results/diagnose/default_pair.json").read_text(encoding="utf-8"))
    assert stored.keys() == KEYS
    assert stored["pair"]["drafter"] == "shipped"
