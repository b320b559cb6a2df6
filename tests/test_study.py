"""The study of docs/training.md: its recipes are recipes, its budget is counted, its table is the stored result's."""

from __future__ import annotations

import pytest

import study
from paceline.train.config import TrainConfig


@pytest.mark.parametrize("arm", study.ARMS.values(), ids=list(study.ARMS))
def test_every_arm_is_a_recipe(arm: study.Arm) -> None:
    recipe = study.recipe_of(arm, ['data.folder="elsewhere"'])
    assert isinstance(recipe, TrainConfig)
    assert recipe.data.folder == "elsewhere" and recipe.regenerate.top_log_probs == 16
    assert (recipe.drafter.algorithm == "eagle3") == (arm.name == "eagle3")
    size = recipe.drafter.block_size or 16
    assert max(recipe.train.slots, default=size) == size


def test_arms_differ_in_what_they_are_named_for() -> None:
    recipes = {arm.name: study.recipe_of(arm, ()).portable() for arm in study.ARMS.values()}
    same = {name for name, recipe in recipes.items() if recipe == recipes["base"]}
    assert same == {"base", "half-data", "quarter-data", "half-compute", "double-compute"}
    assert recipes["distribution"]["train"] == {**recipes["base"]["train"], "labels": "distribution"}
    assert recipes["eagle3"]["data"] == recipes["base"]["data"]
    assert recipes["eagle3"]["regenerate"] == recipes["base"]["regenerate"]


def test_a_run_is_as_long_as_its_budget() -> None:
    settings = study.recipe_of(study.ARMS["base"], ()).train
    sized = study.sized(settings, 19_200)
    assert sized.max_steps * sized.blocks_per_step == 19_200 and sized.decay_steps == 33
    assert -(-sized.max_steps // sized.eval_every) == study.NUM_EVALUATIONS


def test_the_document_shows_the_stored_result() -> None:
    result = study.stored()
    assert set(result["arms"]) <= set(study.ARMS)
    assert study.table(result) in study.DOCUMENT.read_text(encoding="utf-8")
    operations = [arm["num_operations"] / study.ARMS[name].budget for name, arm in result["arms"].items()]
    assert max(operations, default=1) < 1.03 * min(operations, default=1), "all arms got the same arithmetic"
    assert all(arm["acceptance_length"] == arm["curve"][-1][1] for arm in result["arms"].values())
