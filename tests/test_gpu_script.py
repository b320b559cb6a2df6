"""scripts/train_on_gpu.py with a tiny target on the CPU: a kit, a run in time, a run cut short, the parts joined."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.checkpoint.store import DrafterCheckpoint
from paceline.core.errors import CheckpointError, ConfigError
from paceline.train.config import TrainConfig
from tiny_gguf import TOKENS, write_gguf

ROOT = Path(__file__).resolve().parent.parent
RECIPE = f"""
target = "tiny"
[drafter]
mask_token_id = {len(TOKENS) - 1}
num_layers = 1
block_size = 4
target_layer_ids = [0, 1]
[data]
max_prompt_tokens = 40
[[data.sources]]
file = "first.jsonl"
limit = 3
[[data.sources]]
file = "second.jsonl"
[regenerate]
max_new_tokens = 12
num_sequences = 2
prompts_per_shard = 2
[train]
max_steps = 50
decay_steps = 20
blocks_per_step = 8
anchors_per_document = 4
held_out_documents = 1
"""


SCRIPT = ROOT / "scripts" / "train_on_gpu.py"


def load_script() -> Any:
    """Returns the script as a module."""
    spec = importlib.util.spec_from_file_location("train_on_gpu", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


script = load_script()


def start(*arguments: object) -> subprocess.Popen[str]:
    """Starts `run` as on another machine: no installed paceline in sight, one thread."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.Popen(
        [sys.executable, SCRIPT, "run", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**environment, "OMP_NUM_THREADS": "1"},
    )


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recipe, its prompts, a target, and the kit made of them."""
    folder = tmp_path_factory.mktemp("gpu")
    for name, words in {"first.jsonl": "ink ring king wing", "second.jsonl": "sing 4 thing"}.items():
        rows = [json.dumps({"prompt": word}) + "\n" for word in words.split()]
        (folder / name).write_text("".join(rows))
    (folder / "recipe.toml").write_text(RECIPE.replace("[data]\n", f"[data]\nfolder = {str(folder)!r}\n"))
    gguf = write_gguf(folder / "tiny.gguf")
    script.prepare(folder / "kit", folder / "recipe.toml", gguf)
    return folder


def test_a_kit_holds_what_the_machine_lacks(base: Path) -> None:
    kit = base / "kit"
    assert sorted(path.name for path in kit.iterdir()) == ["data", "kit.json", "site", "target.gguf.part0"]
    assert (kit / "target.gguf.part0").read_bytes() == (base / "tiny.gguf").read_bytes()
    assert sorted(path.name for path in (kit / "data").iterdir()) == ["first.jsonl", "second.jsonl"]
    assert (kit / "site" / "gguf" / "gguf_reader.py").is_file()
    assert not [path for path in (kit / "site").rglob("*") if path.suffix in (".so", ".pyd", ".pyc")]
    with pytest.raises(ConfigError, match="expected an empty folder"):
        script.prepare(kit, base / "recipe.toml", base / "tiny.gguf")


def test_a_run_in_time(base: Path) -> None:
    out = base / "out"
    with start(base / "kit", out, "--recipe", base / "recipe.toml", "--minutes", 2) as process:
        said, _ = process.communicate(timeout=120)
    assert process.returncode == 0, said
    assert "answers: 3 of 3 shards" in said
    assert "step 30: tau" in said
    assert "50 steps" in said
    assert "step 50: tau" in said
    assert (out / "log.txt").read_text().splitlines() == said.splitlines()
    assert all(path.is_file() and path.stat().st_size <= 16_000_000 for path in out.iterdir())
    script.join(out, base / "drafter")
    checkpoint = DrafterCheckpoint.load(base / "drafter")
    assert checkpoint.provenance["num_steps"] == 50
    assert checkpoint.provenance["recipe"]["train"]["decay_steps"] == 20
    whole = DrafterCheckpoint.load(base / "kit" / "work" / "run" / "drafter")
    assert all(torch.equal(tensor, checkpoint.tensors[name]) for name, tensor in whole.tensors.items())

    last = sorted(out.glob("*.part*"))[-1]
    last.write_bytes(last.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="copy the parts again"):
        script.join(out, base / "broken")
    last.unlink()
    with pytest.raises(CheckpointError, match=f"parts missing: {last.name}"):
        script.join(out, base / "broken")
    assert not (base / "broken").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_run_cut_short_leaves_whole_weights(base: Path, tmp_path: Path, number: signal.Signals) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text((base / "recipe.toml").read_text().replace("max_steps = 50", "max_steps = 100000"))
    out = tmp_path / "out"
    with start(base / "kit", out, "--recipe", recipe, "--work", tmp_path / "work") as process:
        try:
            deadline = time.monotonic() + 60
            while not (out / "drafter.json").is_file():
                assert process.poll() is None, process.communicate()[0]
                assert time.monotonic() < deadline
                time.sleep(0.1)
        finally:
            process.send_signal(number)
        process.communicate(timeout=60)
    assert process.returncode == (1 if number is signal.SIGTERM else -number)
    script.join(out, tmp_path / "drafter")
    assert DrafterCheckpoint.load(tmp_path / "drafter").provenance["num_steps"] >= script.TIMED_STEPS


def test_time_for_a_part_of_the_answers_trains_on_that_part(base: Path, tmp_path: Path) -> None:
    config = replace(TrainConfig.from_toml(base / "recipe.toml"), out=str(tmp_path / "run"))
    target = script.unpack_target(base / "kit", tmp_path)
    run = script.TimedRun(config, target, tmp_path, time.monotonic(), 100.0)
    observe = run._observe

    def after_one_shard(event: Any) -> None:
        observe(event)
        if event.stage == "regenerate" and event.detail is None and event.total == 3 and event.done == 1:
            run._until = time.monotonic()

    run._observe = after_one_shard
    assert run.run()
    script.join(tmp_path, tmp_path / "drafter")
    said = DrafterCheckpoint.load(tmp_path / "drafter").provenance
    assert said["recipe"]["data"]["max_prompts"] == said["data"]["num_documents"] == 2
    assert said["num_steps"] == 50
