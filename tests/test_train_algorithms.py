"""`paceline train` from a recipe to a drafter that decodes: each algorithm, processes, other data, estimates."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from cli_runs import ENVIRONMENT, Run, run
from paceline.checkpoint.store import DrafterCheckpoint
from paceline.core.params import SamplingParams
from paceline.core.types import Request
from paceline.llm import check_pair
from paceline.target.native import NativeTarget
from paceline.target.pull import pull
from paceline.target.text import TextCodec
from paceline.testing import assert_lossless
from paceline.train import estimate
from tiny_gguf import TOKENS, write_gguf

COMMON = """
[regenerate]
max_new_tokens = 12
prompts_per_shard = 2
[train]
max_steps = 4
blocks_per_step = 8
anchors_per_document = 4
lr = 1e-2
warmup_steps = 1
decay_steps = 2
held_out_documents = 2
draft_vocab_size = 40
eval_every = 2
dtype = "float64"
"""
BLOCK = f"""
mask_token_id = {len(TOKENS) - 1}
num_layers = 2
block_size = 4
target_layer_ids = [0, 1]
layer_types = ["sliding_attention"]
sliding_window = 64
"""
DRAFTERS = {
    "dflash": BLOCK,
    "dflash2": BLOCK + "conv_group_size = 8\nselector_rank = 4\nselector_top_k = 3\n",
    "eagle3": "block_size = 4\ntarget_layer_ids = [0, 1]\n",
}


@dataclass(frozen=True)
class Place:
    """A tiny target, prompts, and where recipes go."""

    base: Path
    target: Path

    def recipe(self, algorithm: str, more: str = "") -> Path:
        path = self.base / f"{algorithm}.toml"
        drafter = f'[drafter]\nalgorithm = "{algorithm}"\n{DRAFTERS[algorithm]}{more}'
        path.write_text(f"target = {str(self.target)!r}\n{drafter}{COMMON}", encoding="utf-8")
        return path


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    base = tmp_path_factory.mktemp("place")
    words = ["ink", "a king", "sing 4", "ring", "44", "thing"]
    (base / "prompts.jsonl").write_text("".join(json.dumps({"prompt": w}) + "\n" for w in words))
    return Place(base, pull(str(write_gguf(base / "tiny.gguf")), cache_dir=base / "cache"))


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setitem(
        sys.modules, "matplotlib", None
    )  # pictures have tests of their own, and take a second each


def trained(
    capsys: pytest.CaptureFixture[str], place: Place, recipe: Path, name: str, *more: object
) -> tuple[Run, dict[str, Any]]:
    done = run(
        capsys,
        *("train", recipe, "--out", place.base / name, "--data", place.base / "prompts.jsonl"),
        *("--json", "--offline", *more),
    )
    return done, json.loads(done.out) if done.out else {}


def curve(out: Path) -> list[dict[str, float]]:
    """Returns the rows of a curve without what the clock said."""
    with (out / "curve.csv").open(encoding="utf-8") as file:
        return [{k: float(v) for k, v in row.items() if k != "seconds"} for row in csv.DictReader(file)]


def decode(place: Place, checkpoint: DrafterCheckpoint) -> None:
    """Decodes with a drafter and compares with plain decoding."""
    codec = TextCodec.load(place.target)
    target = NativeTarget.load(
        place.target,
        name="tiny",
        dtype=torch.float64,
        device=torch.device("cpu"),
        tokenizer_digest=codec.digest,
    )
    check_pair(checkpoint, target.spec)
    drafter = checkpoint.build(torch.float64).bind(target.heads, checkpoint.token_ids)
    prompt = tuple(codec.render_chat([{"role": "user", "content": "a king"}]))
    requests = [Request("a", prompt, SamplingParams(max_new_tokens=12))]
    (completion,) = assert_lossless(target, drafter, requests)
    assert all(step.num_drafted for step in completion.steps[:-1])


@pytest.mark.parametrize("algorithm", DRAFTERS)
def test_each_algorithm_becomes_a_drafter(
    capsys: pytest.CaptureFixture[str], place: Place, algorithm: str
) -> None:
    done, said = trained(capsys, place, place.recipe(algorithm), algorithm)
    assert (done.code, said.get("finished"), said.get("step")) == (0, True, 4), done.err
    assert said["recipe"]["drafter"]["algorithm"] == algorithm
    checkpoint = DrafterCheckpoint.load(Path(said["folder"]))
    assert checkpoint.provenance["algorithm"] == algorithm
    assert checkpoint.provenance["held_out"]["step"] == said["best"]["step"]
    assert checkpoint.config.block_size == 4
    decode(place, checkpoint)
    again, more = trained(capsys, place, place.recipe(algorithm), algorithm, "--set", "train.max_steps=5")
    assert (again.code, more["step"]) == (0, 5), again.err


def test_dflash2_begins_as_the_dflash_drafter_that_it_is_given(
    capsys: pytest.CaptureFixture[str], place: Place
) -> None:
    _, first = trained(capsys, place, place.recipe("dflash"), "first")
    given = place.recipe("dflash2", f"initial_drafter = {first['folder']!r}\n")
    done, said = trained(capsys, place, given, "second")
    assert done.code == 0, done.err
    old, new = curve(place.base / "first"), curve(place.base / "second")
    kept = next(row for row in old if row["step"] == first["best"]["step"])
    assert new[0]["acceptance_length"] == pytest.approx(
        kept["acceptance_length"], abs=0.2
    )  # stored in bfloat16
    config: Any = DrafterCheckpoint.load(Path(said["folder"])).config
    assert (config.variant, config.selector_rank, config.conv_kernel_size) == ("dflash2", 4, 2)
    wrong, _ = trained(capsys, place, given, "third", "--set", "drafter.block_size=3")
    assert wrong.code == 1 and "block_size: expected 3, got 4" in wrong.err


def test_two_processes_draw_the_curve_of_one(capsys: pytest.CaptureFixture[str], place: Place) -> None:
    recipe = place.recipe("dflash", "")
    trained(capsys, place, recipe, "one")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    arguments = [
        "train",
        recipe,
        "--out",
        place.base / "two",
        "--data",
        place.base / "prompts.jsonl",
        "--json",
    ]
    done = subprocess.run(
        [*command, "-m", "paceline", *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**ENVIRONMENT, "OMP_NUM_THREADS": "1"},
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["finished"], "one process speaks"
    one, two = curve(place.base / "one"), curve(place.base / "two")
    assert len(one) == len(two) == 3
    for a, b in zip(one, two, strict=True):
        assert b == pytest.approx(a, abs=1e-9)
    checkpoint = DrafterCheckpoint.load(place.base / "two" / "drafter")
    assert checkpoint.provenance["num_processes"] == 2
    alone = DrafterCheckpoint.load(place.base / "one" / "drafter")
    assert checkpoint.provenance["data"] == alone.provenance["data"]


def test_hidden_states_need_no_disk(capsys: pytest.CaptureFixture[str], place: Place) -> None:
    recipe = place.recipe("dflash")
    trained(capsys, place, recipe, "cached")
    done, _ = trained(capsys, place, recipe, "online", "--set", "data.features=online")
    assert done.code == 0, done.err
    cached, online = (
        sum(path.stat().st_size for path in (place.base / name / "features").iterdir())
        for name in ("cached", "online")
    )
    assert online < 0.3 * cached
    for a, b in zip(curve(place.base / "cached"), curve(place.base / "online"), strict=True):
        assert b == pytest.approx(
            a, rel=1e-3
        )  # hidden states are rounded to bfloat16, behind passes of other widths


def test_a_run_ends_early_where_nothing_gets_better(capsys: pytest.CaptureFixture[str], place: Place) -> None:
    arguments = ("--set", "train.patience=1", "--set", "train.lr=1e-9", "--set", "train.max_steps=9")
    done, said = trained(capsys, place, place.recipe("dflash"), "patient", *arguments)
    assert done.code == 0, done.err
    assert said["finished"] and said["stopped_early"]
    assert (said["step"], said["best"]["step"]) == (2, 0)
    shown = run(
        capsys,
        *("train", place.recipe("dflash"), "--out", place.base / "patient", "--offline", *arguments),
        *("--data", place.base / "prompts.jsonl"),
    )
    assert shown.code == 0
    assert "stopped early: no better τ in 1 evaluations (train.patience) since step 0" in shown.err
    assert "step 0, τ" in shown.out


# What it would take --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", DRAFTERS)
def test_an_estimate_leaves_nothing_behind(
    capsys: pytest.CaptureFixture[str], place: Place, algorithm: str
) -> None:
    done, said = trained(capsys, place, place.recipe(algorithm), f"dry-{algorithm}", "--dry-run")
    assert done.code == 0, done.err
    assert not (place.base / f"dry-{algorithm}").exists()
    assert said["num_prompts"] == 6 and said["shortages"] == []
    assert 6 * 2 <= said["num_answer_tokens"] <= 6 * 12
    assert said["steps"]["num_steps"] == 2
    expected = 4 * said["steps"]["step_s"] + 3 * said["steps"]["evaluation_s"]
    assert said["training_s"] == pytest.approx(expected)
    _, real = trained(capsys, place, place.recipe(algorithm), f"real-{algorithm}")
    state = (place.base / f"real-{algorithm}" / "state.pt").stat().st_size
    assert said["steps"]["state_bytes"] == pytest.approx(state, rel=0.05)
    weights = Path(real["folder"]) / "model.safetensors"
    assert said["steps"]["drafter_bytes"] == pytest.approx(weights.stat().st_size, rel=0.2)
    features = sum(p.stat().st_size for p in (place.base / f"real-{algorithm}" / "features").iterdir())
    assert said["features_bytes"] > 0.8 * features


def test_an_estimate_in_words(capsys: pytest.CaptureFixture[str], place: Place) -> None:
    out, prompts = place.base / "words", place.base / "prompts.jsonl"
    done = run(
        capsys, "train", place.recipe("dflash"), "--out", out, "--data", prompts, "--dry-run", "--offline"
    )
    assert done.code == 0, done.err
    assert [line.split()[0] for line in done.out.splitlines()] == [
        "prompts",
        "answers",
        "training",
        "memory",
        "disk",
    ]
    assert "an estimate, multiplied up from 6 texts" in done.err and "nothing was written" in done.err


def test_an_estimate_of_answers_that_are_given(capsys: pytest.CaptureFixture[str], place: Place) -> None:
    rows = [{"prompt_ids": [5, 6, 7, 8], "response_ids": [9, 10, 11, 12, 13, 0]}] * 4
    (place.base / "given.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = run(
        capsys,
        *(
            "train",
            place.recipe("dflash"),
            "--out",
            place.base / "given",
            "--data",
            place.base / "given.jsonl",
        ),
        *("--dry-run", "--json", "--set", "data.answers=given", "--set", "data.features=online"),
        *("--set", "data.allow_foreign=true"),
    )
    assert done.code == 0, done.err
    said = json.loads(done.out)
    assert (said["num_prompt_tokens"], said["num_answer_tokens"]) == (16, 24)
    assert said["answers"]["write_tokens_per_s"] is None
    assert said["features_bytes"] == 40 * 5
    steps = 4 * said["steps"]["step_s"] + 3 * said["steps"]["evaluation_s"]
    num_read = (4 * 2 + 3 * 2) * 10  # two documents in each step, two held out, ten tokens each
    assert said["training_s"] == pytest.approx(steps + num_read / said["answers"]["read_tokens_per_s"])


def test_what_would_not_fit_is_said(
    capsys: pytest.CaptureFixture[str], place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(estimate, "memory_limit_bytes", lambda device: 1000)
    done, said = trained(capsys, place, place.recipe("dflash"), "short", "--dry-run")
    assert done.code == 1
    assert len(said["shortages"]) == 1 and said["shortages"][0].startswith("memory: ")
    assert "error: memory: " in done.err and "0.0 GB free" in done.err


@pytest.mark.parametrize(("ending", "longest", "mean"), [(0.0, 9, 9.0), (1.0, 9, 1.0), (0.5, 2, 1.5)])
def test_the_mean_length_of_answers(ending: float, longest: int, mean: float) -> None:
    assert estimate._mean_length(ending, longest) == pytest.approx(mean)
