"""From traffic to an adapted drafter: what is learnt, when it is kept, and that an interruption changes nothing."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cli_runs import run
from paceline.checkpoint.store import WEIGHTS, DrafterCheckpoint
from paceline.core.errors import ConfigError, IncompatiblePairError
from paceline.core.params import SamplingParams
from paceline.core.types import Request
from paceline.llm import LLM
from paceline.target.folder import sha256_of
from paceline.target.native import NativeTarget
from paceline.target.pull import pull
from paceline.testing import tiny_drafter, tiny_target
from paceline.train.adaptation.adapt import adapt
from paceline.train.adaptation.foretell import Chains
from paceline.train.adaptation.judge import verdict
from paceline.train.adaptation.records import Adaptation, AdaptConfig, AdaptEvent
from paceline.train.data.features import read_shard
from paceline.train.data.prompts import Prompt
from paceline.train.data.regenerate import RegenerateSettings, regenerate
from paceline.train.diagnosis.scores import Scorer
from tiny_gguf import write_gguf

WORDS = ["ink", "ring", "sing 4", "a king", "4 things", "string", "wing", "bring it in"]
QUESTIONS = [f"{first} {second}" for first in WORDS for second in WORDS[:5]]
ROWS = [{"id": str(i), "category": text[0], "prompt": text} for i, text in enumerate(QUESTIONS)]
GENERAL = [{"id": f"g{i}", "category": "g", "prompt": f"{text} or not"} for i, text in enumerate(WORDS)]


@pytest.fixture(autouse=True, scope="module")
def pictures() -> Iterator[None]:
    """Draws no curves, which take longer than all the rest."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib", None)
        yield


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny target with a tokenizer of its own."""
    base = tmp_path_factory.mktemp("target")
    return pull(str(write_gguf(base / "tiny.gguf")), cache_dir=base / "cache")


@pytest.fixture(scope="module")
def drafter(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a drafter that is hardly ever right."""
    model = NativeTarget.load(target, name="tiny", dtype=torch.float32, device=torch.device("cpu"))
    made = tiny_drafter(model, 4, layer_types=("sliding_attention",) * 2, sliding_window=128)
    folder = tmp_path_factory.mktemp("old") / "drafter"
    DrafterCheckpoint.of(made, torch.float32, {}).save(folder)
    return folder


@pytest.fixture(scope="module")
def config(target: Path, drafter: Path) -> AdaptConfig:
    return AdaptConfig(
        out="",
        target=str(target),
        drafter=str(drafter),
        max_new_tokens=16,
        lr=1e-2,
    )


@pytest.fixture(scope="module")
def whole(config: AdaptConfig, tmp_path_factory: pytest.TempPathFactory) -> Adaptation:
    """What came of a run that nothing interrupted."""
    return adapt(replace(config, out=str(tmp_path_factory.mktemp("whole"))), ROWS, GENERAL)


def test_a_better_drafter_is_kept_and_changes_no_text(
    config: AdaptConfig, target: Path, drafter: Path, whole: Adaptation
) -> None:
    assert whole.adopted
    assert whole.folder is not None
    before, after = (LLM(target, folder, lookup=False, tree_nodes=None) for folder in (drafter, whole.folder))
    params = SamplingParams(max_new_tokens=16)
    old = before.generate([before.render(text) for text in QUESTIONS], params)
    new = after.generate([after.render(text) for text in QUESTIONS], params)
    assert [text.token_ids for text in old] == [text.token_ids for text in new]
    assert sum(len(text.steps) for text in new) < 0.8 * sum(len(text.steps) for text in old)


def test_the_report_says_what_was_measured(config: AdaptConfig, whole: Adaptation, drafter: Path) -> None:
    assert whole.folder is not None
    assert json.loads((whole.folder.parent / "report.json").read_text()) == whole.report
    foretold, rows = whole.report["foretold"], whole.report["measured"]
    assert [(row["set"], row["temperature"], row["drafts"]) for row in rows] == [
        (name, 0.0, "tree of 2") for name in ("held_out", "general")
    ]
    assert {name: row["num_prompts"] for name, row in foretold.items()} == {
        "held_out": whole.report["data"]["num_held_out"],
        "general": whole.report["data"]["num_general"],
    }
    for row in [*rows, *foretold.values()]:
        ratio, after, before = row["acceptance_length_ratio"], row["after"], row["before"]
        assert ratio["value"] == pytest.approx(after["acceptance_length"] / before["acceptance_length"])
        assert ratio["low"] <= ratio["value"] <= ratio["high"]
        assert 1 <= after["acceptance_length"] <= 4
        assert after["num_steps"] > 0
    for row in rows:
        assert row["num_identical"] == row["num_prompts"] >= 4
        assert min(row["plain_tokens_per_s"], row["before"]["tokens_per_s"], row["after"]["tokens_per_s"]) > 0
    said = DrafterCheckpoint.load(whole.folder).provenance["adapted"]
    assert said["drafter"]["sha256"] == sha256_of(drafter / WEIGHTS)
    assert said["data"]["num_learnt"] + said["data"]["num_held_out"] == len(ROWS)
    assert (said["foretold"], said["measured"]) == (foretold, rows)


def test_what_judges_is_never_learnt(config: AdaptConfig, target: Path, whole: Adaptation) -> None:
    assert whole.folder is not None
    facts = whole.report["data"]
    written = (whole.folder.parent / "prompts.jsonl").read_text().splitlines()
    learnt = {json.loads(line)["id"] for line in written}
    assert len({name for name in learnt if not name.startswith("general/")}) == facts["num_learnt"]
    assert len({name for name in learnt if name.startswith("general/")}) == facts["num_rehearsed"] > 0
    assert facts["num_rehearsed"] == pytest.approx(len(written) * config.rehearsal, abs=1)
    rehearsed = {name.split("/")[2] for name in learnt if name.startswith("general/")}
    assert len(rehearsed) == facts["num_different_rehearsed"] == len(GENERAL) // 2 == facts["num_general"]


def test_a_drafter_that_is_no_better_is_not_kept(config: AdaptConfig, tmp_path: Path) -> None:
    hasty = replace(config, out=str(tmp_path), lr=1e-9, max_prompts=9, minutes=1e-6)
    result = adapt(hasty, ROWS, GENERAL)
    assert not result.adopted
    assert result.folder is None
    assert not (tmp_path / "drafter").exists()
    assert "held-out τ did not rise" in result.report["reason"]
    assert json.loads((tmp_path / "report.json").read_text())["adopted"] is False
    assert result.report["data"]["num_learnt"] == 9


def test_what_is_foretold_is_what_decoding_does(config: AdaptConfig, target: Path, whole: Adaptation) -> None:
    assert whole.folder is not None
    made, llm = DrafterCheckpoint.load(whole.folder), LLM(target, whole.folder, lookup=False)
    assert llm.neural is not None
    heads = llm.target.heads
    chains = Chains(Scorer(heads.embed_weight, heads.head_weight, made.token_ids), llm.neural)
    prompts = [Prompt(text, "k", tuple(llm.render(text))) for text in WORDS]
    settings = RegenerateSettings(max_new_tokens=16)
    made_now = regenerate(
        prompts, llm.target, llm.neural.target_layer_ids, whole.folder.parent / "again", settings
    )
    documents, _ = read_shard(next(made_now))
    engine = llm.new_engine(tree_nodes=None)
    for i, prompt in enumerate(prompts):
        engine.add(Request(str(i), prompt.token_ids, SamplingParams(max_new_tokens=16)))
    while engine.has_work:
        engine.step()
    accepted: list[int] = []
    for i, (prompt, document) in enumerate(zip(prompts, documents, strict=True)):
        foretold = chains.foretell(prompt, document)
        decoded = engine.take_completion(str(i))
        assert document.token_ids[len(prompt.token_ids) :].tolist() == list(decoded.token_ids)
        steps = [step.num_accepted + 1 for step in decoded.steps][: foretold.num_steps]
        assert foretold.num_committed == sum(steps)
        accepted += steps
    assert max(accepted) > 1


def ratios(held_out: tuple[float, float], general: float) -> dict[str, dict[str, Any]]:
    value, low = held_out
    return {
        "held_out": {"acceptance_length_ratio": {"value": value, "low": low, "high": 9.0}},
        "general": {"acceptance_length_ratio": {"value": general, "low": 0.1, "high": 9.0}},
    }


@pytest.mark.parametrize(
    ("held_out", "general", "adopted"),
    [
        ((1.2, 1.01), 0.97, True),
        ((1.2, 1.0), 1.2, False),
        ((1.2, 0.99), 1.2, False),
        ((1.2, 1.1), 0.969, False),
    ],
)
def test_the_rule(held_out: tuple[float, float], general: float, adopted: bool) -> None:
    assert verdict(ratios(held_out, general))[0] is adopted


def stop_at(stage: str, done: int) -> tuple[Callable[[AdaptEvent], None], Callable[[], bool]]:
    """Returns an observer and a question that end a run when a stage has come so far."""
    seen: list[int] = []

    def observe(event: AdaptEvent) -> None:
        if event.stage == stage and event.done >= done:
            seen.append(event.done)

    return observe, lambda: bool(seen)


def test_an_interrupted_run_ends_with_the_same_drafter(
    config: AdaptConfig, whole: Adaptation, tmp_path: Path
) -> None:
    changed = replace(config, out=str(tmp_path))
    for stage, done in [
        ("judging", 1),
        ("answers", 1),
        ("steps", 7),
        ("steps", 30),
        ("foretelling", 2),
        ("measuring", 2),
    ]:
        observe, should_stop = stop_at(stage, done)
        with pytest.raises(KeyboardInterrupt):
            adapt(changed, ROWS, GENERAL, observe=observe, should_stop=should_stop)
        assert not (tmp_path / "drafter").exists()
    result = adapt(changed, ROWS, GENERAL)
    assert result.adopted
    assert whole.folder is not None
    assert result.folder is not None
    ours, theirs = DrafterCheckpoint.load(result.folder), DrafterCheckpoint.load(whole.folder)
    assert all(torch.equal(tensor, theirs.tensors[name]) for name, tensor in ours.tensors.items())
    for each in ("foretold", "measured"):
        assert _numbers(result.report[each]) == _numbers(whole.report[each])


def _numbers(found: Any) -> list[int]:
    rows = found.values() if isinstance(found, dict) else found
    return [row["after"]["num_steps"] for row in rows]


def test_a_finished_run_is_not_made_again(config: AdaptConfig, whole: Adaptation) -> None:
    assert whole.folder is not None
    events: list[AdaptEvent] = []
    out = replace(config, out=str(whole.folder.parent))
    again = adapt(out, ROWS, GENERAL, observe=events.append)
    assert (again.report, again.folder, events) == (whole.report, whole.folder, [])
    with pytest.raises(ConfigError, match="holds an earlier run"):
        adapt(out, ROWS, GENERAL, resume=False)
    for changed, rows in [(replace(out, lr=1.0), ROWS), (out, ROWS[:-1])]:
        with pytest.raises(ConfigError, match="belongs to other settings, data or another drafter"):
            adapt(changed, rows, GENERAL)


def test_answers_end_where_their_time_does(
    config: AdaptConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("adapt", "recipe"):
        monkeypatch.setattr(f"paceline.train.adaptation.{module}.PROMPTS_PER_SHARD", 32)
    events: list[AdaptEvent] = []
    observe, should_stop = stop_at("steps", 1)
    hasty = replace(config, out=str(tmp_path), minutes=1e-6)

    def see(event: AdaptEvent) -> None:
        events.append(event)
        observe(event)

    with pytest.raises(KeyboardInterrupt):
        adapt(hasty, ROWS, GENERAL, observe=see, should_stop=should_stop)
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["num_prompts"] == 32  # one shard of the two that there are
    assert [(e.done, e.total) for e in events if e.stage == "answers"][-1] == (1, 1)
    assert (plan["num_held_out"], plan["num_general"], plan["max_steps"]) == (4, 4, None)


def test_a_drafter_of_another_target_is_refused(config: AdaptConfig, tmp_path: Path) -> None:
    other = tiny_drafter(tiny_target())
    DrafterCheckpoint.of(other, torch.float32, {}).save(tmp_path / "other")
    with pytest.raises(IncompatiblePairError, match="was not made for"):
        adapt(replace(config, out=str(tmp_path / "out"), drafter=str(tmp_path / "other")), ROWS, GENERAL)
    with pytest.raises(ConfigError, match="drafter: none ships for"):
        adapt(replace(config, out=str(tmp_path / "out"), drafter="auto"), ROWS, GENERAL)
    assert not (tmp_path / "out").exists()


def test_too_little_traffic_is_refused(config: AdaptConfig, tmp_path: Path) -> None:
    changed = replace(config, out=str(tmp_path / "out"))
    same = [{"id": str(i), "prompt": "what is ink"} for i in range(50)]
    for rows in (ROWS[:6], same, [{"id": "1", "prompt": "in " * 500}]):
        with pytest.raises(ConfigError, match="8 different prompts or more to learn from"):
            adapt(changed, rows, GENERAL)
    with pytest.raises(ConfigError, match="general: expected at least two prompts that the data"):
        adapt(changed, ROWS, ROWS[:9])
    with pytest.raises(ConfigError, match="max_new_tokens: expected less than the 128 positions"):
        adapt(replace(changed, max_new_tokens=128), ROWS, GENERAL)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "change",
    [{"minutes": 0}, {"held_out": 1.0}, {"rehearsal": 1.0}, {"temperatures": ()}, {"max_prompts": 0}],
)
def test_a_value_out_of_range_is_named(config: AdaptConfig, change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"^{next(iter(change))}: expected"):
        replace(config, **change)


def test_the_command_reads_prompts_and_logs(
    config: AdaptConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, log, general = (tmp_path / f"{name}.jsonl" for name in ("prompts", "log", "general"))
    prompts.write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in QUESTIONS[:20]))
    said = [{"role": "user", "content": text} for text in QUESTIONS[20:]]
    lines = [{"timestamp": i, "request": {"messages": [turn], "model": "m"}} for i, turn in enumerate(said)]
    lines.append({"timestamp": 99, "request": {"messages": said[:1], "tools": [{}]}})
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    general.write_text("".join(json.dumps(row) + "\n" for row in GENERAL))
    files = ["--data", prompts, "--data", log, "--general", general, "--out", tmp_path / "out"]
    pair = ["--target", config.target, "--drafter", config.drafter]
    settings = ["--lr", "0.01", "--max-new-tokens", "16", "--temperatures", "0,0.8"]
    settings += ["--minutes", "0.001"]
    given = ["adapt", *files, *pair, *settings]
    shown = run(capsys, *given)
    assert shown.code == 0, shown.err
    assert "1 lines left out: tools" in shown.err
    document = json.loads(run(capsys, *given, "--json").out)
    assert document["data"]["num_rows"] == len(QUESTIONS)
    adopted, use = document["adopted"], f"use it with --drafter {tmp_path / 'out' / 'drafter'}"
    assert (f"kept the {'new' if adopted else 'old'} drafter: " in shown.out, use in shown.out) == (
        True,
        adopted,
    )
    measured = [
        (row["temperature"], row["num_identical"] == row["num_prompts"]) for row in document["measured"]
    ]
    assert measured == [(0.0, True), (0.8, True)] * 2
    refused = run(capsys, *given, "--no-resume")
    assert (refused.code, "holds an earlier run" in refused.err) == (1, True)
