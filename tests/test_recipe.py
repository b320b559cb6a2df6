"""Recipes: strict TOML, overrides, and the one that ships."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.core.errors import ConfigError
from paceline.train.config import SourceConfig, TrainConfig

RECIPES = Path(__file__).resolve().parent.parent / "recipes"
SMALLEST = "[drafter]\nmask_token_id = 3\n"
EAGLE3 = "[drafter]\nalgorithm = 'eagle3'\n"


def read(tmp_path: Path, text: str, *overrides: str) -> TrainConfig:
    path = tmp_path / "recipe.toml"
    path.write_text(text, encoding="utf-8")
    return TrainConfig.from_toml(path, overrides)


def test_the_smallest_recipe(tmp_path: Path) -> None:
    config = read(tmp_path, SMALLEST)
    assert config.drafter.mask_token_id == 3
    assert config.target == "smollm2-135m-instruct"
    assert config.train.slots == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[drafter]\nmask_token_id = 3\nwindow = 4\n",
            r"drafter: unknown keys \['window'\]; expected some of",
        ),
        (SMALLEST + "[training]\nlr = 1e-3\n", r"recipe: unknown keys \['training'\]"),
        (SMALLEST + "[[data.sources]]\nfiles = 'a'\n", r"data.sources\[0\]: unknown keys \['files'\]"),
        (
            "[drafter]\nblock_size = 8\n",
            "drafter.mask_token_id: expected an unused token id with algorithm 'dflash', got none",
        ),
        (
            "[drafter]\nalgorithm = 'medusa'\n",
            r"drafter.algorithm: expected one of .*'eagle3'.*, got 'medusa'",
        ),
        (
            SMALLEST + "selector_rank = 8\n",
            "drafter.selector_rank: expected none with algorithm 'dflash', got 8",
        ),
        (
            SMALLEST + "conv_group_size = 8\n",
            "drafter.conv_group_size: expected none with algorithm 'dflash'",
        ),
        (SMALLEST + "num_layers = 0\n", "drafter.num_layers: expected at least 1, got 0"),
        (SMALLEST + "block_size = 1\n", "drafter.block_size: expected at least 2, got 1"),
        (
            EAGLE3 + "mask_token_id = 0\n",
            "drafter.mask_token_id: expected none with algorithm 'eagle3', got 0",
        ),
        (EAGLE3 + "num_layers = 2\n", "drafter.num_layers: expected 1 with algorithm 'eagle3', got 2"),
        (EAGLE3 + "sliding_window = 9\n", "drafter.sliding_window: expected none with algorithm 'eagle3'"),
        (
            EAGLE3 + "layer_types = ['full_attention']\n",
            "drafter.layer_types: expected none with algorithm 'eagle3'",
        ),
        (
            SMALLEST + "[train]\nselector_weight = 0.5\n",
            "train.selector_weight: expected none with algorithm 'dflash', which has no selector, got 0.5",
        ),
        (
            SMALLEST + "[train]\nlabels = 'distribution'\n",
            "regenerate.top_log_probs: expected at least 1 with train.labels 'distribution', got 0",
        ),
        ("[train]\nlr = 1e-3\n", r"recipe: missing \['drafter'\]"),
        (SMALLEST + "[[data.sources]]\nlimit = 3\n", r"data.sources\[0\]: missing \['file'\]"),
        ("[drafter]\nmask_token_id = '3'\n", r"drafter.mask_token_id: expected int, got '3'"),
        ("[drafter]\nmask_token_id = true\n", r"drafter.mask_token_id: expected int, got True"),
        ("[drafter]\nmask_token_id = 3.0\n", r"drafter.mask_token_id: expected int, got 3.0"),
        ("drafter = 3\n", r"drafter: expected a table, got 3"),
        (SMALLEST + "[train]\nslots = 8\n", r"train.slots: expected a list, got 8"),
        (SMALLEST + "[train]\nslots = [4, 'six']\n", r"train.slots\[1\]: expected int, got 'six'"),
        (SMALLEST + "[train]\nlr = '1e-3'\n", r"train.lr: expected float"),
        (SMALLEST + "[train]\nlr = 0\n", r"train.lr: expected more than 0, got 0"),
        (SMALLEST + "[train]\nlr = nan\n", r"train.lr: expected more than 0, got nan"),
        (SMALLEST + "[train]\nmax_steps = 0\n", r"train.max_steps: expected at least 1, got 0"),
        (SMALLEST + "[train]\nwarmup_steps = -1\n", r"train.warmup_steps: expected at least 0, got -1"),
        (SMALLEST + "[train]\nweight_decay = nan\n", r"train.weight_decay: expected at least 0, got nan"),
        (SMALLEST + "[train]\nloss = 'mse'\n", r"train.loss: expected one of .*dpace.*, got 'mse'"),
        (SMALLEST + "[train]\ndpace_alpha = 1.5\n", r"train.dpace_alpha: expected 0…1, got 1.5"),
        (SMALLEST + "[train]\ndtype = 'bfloat16'\n", r"train.dtype: expected float32 or float64"),
        (SMALLEST + "[data]\nmax_prompts = 0\n", r"data.max_prompts: expected at least 1, got 0"),
        (SMALLEST + "[[data.sources]]\nfile = 'a'\nlimit = 0\n", r"data.sources.limit: expected at least 1"),
        (
            SMALLEST + "[regenerate]\nprompts_per_shard = 0\n",
            r"regenerate.prompts_per_shard: expected at least",
        ),
        (
            SMALLEST + "[regenerate]\ntemperatures = []\n",
            r"regenerate.temperatures: expected numbers in 0…100",
        ),
        ("[drafter\n", r"not TOML"),
    ],
)
def test_a_wrong_recipe_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, text)


def test_each_algorithm_has_keys_of_its_own(tmp_path: Path) -> None:
    assert read(tmp_path, EAGLE3 + "num_layers = 1\nblock_size = 4\n").drafter.mask_token_id is None
    second = read(
        tmp_path,
        "[drafter]\nalgorithm = 'dflash2'\ninitial_drafter = 'a'\nselector_rank = 8\n[train]\nselector_weight = 2\n",
    )
    assert (second.drafter.selector_rank, second.train.selector_weight) == (8, 2.0)


def test_a_missing_recipe_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent.toml: cannot be read \(No such file"):
        TrainConfig.from_toml(tmp_path / "absent.toml")


def test_overrides(tmp_path: Path) -> None:
    config = read(
        tmp_path,
        SMALLEST,
        "train.lr=3",
        "train.slots=[2, 4]",
        "out=runs/a=b",
        "drafter.layer_types=['sliding_attention']",
        "data.sources=[{file = 'a.jsonl', limit = 3}]",
    )
    assert config.train.lr == 3.0
    assert isinstance(config.train.lr, float)
    assert config.train.slots == (2, 4)
    assert config.out == "runs/a=b"
    assert config.drafter.layer_types == ("sliding_attention",)
    assert config.data.sources == (SourceConfig("a.jsonl", 3),)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.lr", "expected section.key=value"),
        ("train.speed=3", r"train: unknown keys \['speed'\]"),
        ("train.lr=fast", r"train.lr: expected float, got 'fast'"),
        ("train.lr.peak=3", "lr is not a section"),
    ],
)
def test_a_wrong_override_is_named(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, SMALLEST + "[train]\nlr = 1e-3\n", override)


def test_own_prompts_replace_the_sources_of_a_recipe(tmp_path: Path) -> None:
    config = TrainConfig.from_toml(RECIPES / "smollm2-135m.toml").with_data([tmp_path / "mine.jsonl"])
    (source,) = config.data.sources
    assert Path(config.data.folder) / source.file == tmp_path / "mine.jsonl"
    assert source.limit is None
    assert config.data.max_prompt_tokens == 512


def test_only_the_length_of_a_run_may_change(tmp_path: Path) -> None:
    config = read(tmp_path, SMALLEST)
    longer = replace(config.train, max_steps=7, decay_steps=3, eval_every=2, save_every=2, patience=3)
    more = replace(config.data, max_prompts=9)
    assert replace(config, train=longer, data=more, out="elsewhere").contract == config.contract
    for other in (
        replace(config, train=replace(config.train, lr=1.0)),
        replace(config, data=replace(config.data, seed=1)),
        replace(config, drafter=replace(config.drafter, mask_token_id=4)),
        replace(config, target="another"),
    ):
        assert other.contract != config.contract


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.toml")), ids=lambda path: path.stem)
def test_every_recipe_reads_and_is_json(path: Path) -> None:
    config = TrainConfig.from_toml(path)
    assert json.loads(json.dumps(config.to_dict()))["target"] == config.target
    assert config.train.decay_steps < config.train.max_steps


def test_a_recipe_says_nothing_of_this_machines_folders(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        f'out = "{tmp_path}/run"\n[drafter]\nmask_token_id = 1\ninitial_drafter = "{tmp_path}/first"\n'
    )
    said = TrainConfig.from_toml(recipe).portable()
    assert said["drafter"]["initial_drafter"] == "first" and str(tmp_path) not in str(said)
