"""Who drafts in an arm of this process: options to drafters, and what a fingerprint says of them."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.bench.arms.base import Load
from paceline.bench.arms.local import EngineArm, local_arm
from paceline.checkpoint.store import DrafterCheckpoint
from paceline.core.errors import CheckpointError, ConfigError
from paceline.drafter.base import NeuralDrafter
from paceline.drafter.combined import Combined
from paceline.drafter.lookup import PromptLookup
from paceline.engine.tree import TreeDrafter
from paceline.llm import LLM
from paceline.target.folder import sha256_of
from paceline.target.native import NativeTarget
from paceline.testing import tiny_drafter, tiny_eagle3
from test_local_arms import by_id, direct, ignore, jobs
from tiny_llm import tiny_llm


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return tiny_llm(tmp_path_factory.mktemp("pair"))


# Who drafts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tree_nodes", "expected"), [(0, {4, 7}), (6, {6, 7})])
def test_combined_arms_draft_with_both(llm: LLM, tree_nodes: int, expected: set[int]) -> None:
    """Copies of 7 tokens behind ends of 1 to 3, the pair's chains of 4 or trees of 6 nodes elsewhere."""
    assert llm.neural is not None
    options, asked = {"tree_nodes": tree_nodes, "max_ngram": 3, "min_ngram": 1}, jobs()
    other = TreeDrafter(llm.neural, tree_nodes) if tree_nodes else llm.neural
    found = by_id(local_arm("arm", "combined", options, llm).run(asked, Load(3), ignore))
    alone = direct(llm, asked, drafter=Combined(PromptLookup(8, 3, 1), other))
    for name, completion in alone.items():
        steps = Counter((step.num_drafted, step.num_accepted) for step in completion.steps)
        assert found[name].acceptance == tuple((*step, n) for step, n in sorted(steps.items()))
    assert expected <= {step.num_drafted for completion in alone.values() for step in completion.steps}


def test_an_arm_of_a_folder_drafts_as_the_pair_with_that_drafter_does(llm: LLM, tmp_path: Path) -> None:
    """Another drafter of the same target: the same texts, other drafts, and the fingerprint that `dflash` has there."""
    folder = save_other_drafter(llm, tmp_path / "other")
    arm, asked = local_arm("arm", "drafter", {"path": str(folder), "tree_nodes": 6}, llm), jobs()
    paired = LLM(llm.folder, folder, device="cpu", dtype="float64", offline=True)
    theirs = by_id(local_arm("arm", "dflash", {"tree_nodes": 6}, paired).run(asked, Load(2), ignore))
    ours = by_id(arm.run(asked, Load(2), ignore))
    assert {name: (o.text, o.acceptance) for name, o in ours.items()} == {
        name: (o.text, o.acceptance) for name, o in theirs.items()
    }
    assert arm.open() == replace(
        local_arm("b", "dflash", {"tree_nodes": 6}, paired).open(), basis=arm.open().basis
    )
    of_pair = local_arm("b", "dflash", {"tree_nodes": 6}, llm)
    assert {n: o.text for n, o in by_id(of_pair.run(asked, Load(2), ignore)).items()} == {
        name: outcome.text for name, outcome in ours.items()
    }
    known, own = arm.open(), of_pair.open()
    assert known.basis == own.basis and known.memory["drafter_weights"] > own.memory["drafter_weights"]
    assert known.speculation["drafter_digest"] != own.speculation["drafter_digest"]
    assert str(tmp_path) not in repr(known)


def save_other_drafter(llm: LLM, folder: Path) -> Path:
    """Writes a DFlash 2 drafter for the pair's target."""
    made = tiny_drafter(llm.target, 4, seed=5, variant="dflash2")
    DrafterCheckpoint.of(made, torch.float64, {}).save(folder)
    return folder


# What is known of an arm ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def arms(llm: LLM) -> dict[str, EngineArm]:
    return {
        "plain": local_arm("a", "plain", {}, llm),
        "dflash": local_arm("b", "dflash", {"block_size": 4}, llm),
        "tree": local_arm("c", "dflash", {"tree_nodes": 7}, llm),
        "lookup": local_arm("d", "lookup", {"max_ngram": 2}, llm),
        "combined": local_arm("e", "combined", {"min_ngram": 4}, llm),
        "both": local_arm("f", "combined", {"tree_nodes": 7, "max_ngram": 6}, llm),
    }


def test_arms_over_a_pair_differ_in_speculation_only(llm: LLM, arms: dict[str, EngineArm]) -> None:
    known = {name: arm.open() for name, arm in arms.items()}
    assert known == {name: arm.open() for name, arm in arms.items()}
    basis = known["plain"].basis
    assert all(fingerprint.basis == basis for fingerprint in known.values())
    assert basis["target_digest"] == sha256_of(llm.folder / "model.safetensors")
    assert basis["tokenizer_digest"] == llm.codec.digest and basis["dtype"] == "float64"
    assert all(isinstance(value, str) and value for value in basis.values())
    assert llm.neural is not None
    who = {
        "drafter_digest": known["dflash"].speculation["drafter_digest"],
        "num_parameters": str(sum(parameter.numel() for parameter in llm.neural.parameters())),
    }
    chain, tree = {"block_size": "5", "tree_nodes": "0"}, {"block_size": "5", "tree_nodes": "7"}
    both = {"kind": "combined", "variant": "dflash", "lookup_block_size": "8", **who}
    assert {name: dict(fingerprint.speculation) for name, fingerprint in known.items()} == {
        "plain": {},
        "dflash": {"kind": "dflash", **who, "block_size": "4", "tree_nodes": "0"},
        "tree": {"kind": "dflash", **who, **tree},
        "lookup": {"kind": "lookup", "block_size": "8", "max_ngram": "2", "min_ngram": "1"},
        "combined": {**both, **(tree | {"tree_nodes": "2"}), "max_ngram": "5", "min_ngram": "4"},
        "both": {**both, **tree, "max_ngram": "6", "min_ngram": "3"},
    }
    short = local_arm("g", "combined", {"block_size": 3}, llm).open().speculation
    assert short == {
        **both,
        **chain,
        "block_size": "3",
        "lookup_block_size": "3",
        "max_ngram": "5",
        "min_ngram": "3",
    }


def test_memory_is_that_of_the_parameters_and_caches(llm: LLM, arms: dict[str, EngineArm]) -> None:
    assert isinstance(llm.target, NativeTarget) and llm.neural is not None
    keys, values = llm.target._cache[0]
    context = llm.neural.open(10)
    expected = {
        "target_weights": (llm.folder / "model.safetensors").stat().st_size,
        "target_kv_per_token": 2 * (keys[0, 0].nbytes + values[0, 0].nbytes),
        "drafter_weights": sum(parameter.nbytes for parameter in llm.neural.parameters()),
        "drafter_kv_per_token": context._kv.nbytes // 10,
    }
    memory = dict(arms["dflash"].open().memory)
    assert 0 < expected["target_weights"] - memory["target_weights"] < 4096  # the file's header
    assert memory == expected | {"target_weights": memory["target_weights"]}
    assert memory == arms["both"].open().memory
    assert (
        dict(arms["lookup"].open().memory)
        == dict(arms["plain"].open().memory)
        == {name: size for name, size in memory.items() if name.startswith("target")}
    )


def test_passes_and_drafts_read_what_they_multiply_by(
    llm: LLM, arms: dict[str, EngineArm], tmp_path: Path
) -> None:
    """Embedding rows are looked up, so they do not count; a head does, be it the embedding."""
    assert isinstance(llm.target, NativeTarget) and llm.neural is not None
    s = llm.target.shape
    heads, groups = s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim
    layer = s.hidden_size * (2 * heads + 2 * groups + 3 * s.intermediate_size + 2)
    head = s.vocab_size * s.hidden_size
    whole = 8 * (s.num_layers * layer + s.hidden_size + head)
    parts = [*llm.neural.get_submodule("layers").parameters(), *llm.neural.get_submodule("norm").parameters()]
    draft = 8 * (sum(part.numel() for part in parts) + head)
    reads = {name: dict(arm.open().reads) for name, arm in arms.items()}
    assert reads == {
        "plain": {"pass": whole},
        "dflash": {"pass": whole, "draft": draft},
        "tree": {"pass": whole, "draft": draft},
        "lookup": {"pass": whole},
        "combined": {"pass": whole},  # where it copies, nobody drafts
        "both": {"pass": whole},
    }
    assert arms["plain"].open().memory["target_weights"] == whole + 8 * head  # the embedding
    assert "draft" not in local_arm("g", "dflash", {"block_size": 1}, llm).open().reads
    tied = local_arm("a", "plain", {}, tie(llm, tmp_path / "tied")).open()
    assert (tied.reads["pass"], tied.memory["target_weights"]) == (whole, whole)


def tie(llm: LLM, folder: Path) -> LLM:
    """Returns the pair's target with its embedding for a head."""
    shutil.copytree(llm.folder, folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    return LLM(folder, None, device="cpu", dtype="float64", offline=True)


def test_each_sort_of_drafter_reads_its_own_parts(llm: LLM, tmp_path: Path) -> None:
    """Codebooks are looked up; a vocabulary cuts the head; who drafts token by token reads all of it for each."""
    size, vocabulary = llm.target.spec.hidden_size, llm.target.spec.vocab_size
    two = tiny_drafter(llm.target, 4, variant="dflash2")
    three = tiny_eagle3(llm.target, 5, draft_vocab_size=40)
    made = {"two": (two, None), "cut": (two, torch.arange(10)), "three": (three, None)}
    for name, (drafter, token_ids) in made.items():
        checkpoint = DrafterCheckpoint.of(drafter, torch.float64, {})
        replace(checkpoint, token_ids=token_ids).save(tmp_path / name)

    def count(drafter: NeuralDrafter, *modules: str) -> int:
        return sum(part.numel() for name in modules for part in drafter.get_submodule(name).parameters())

    def read(name: str, **options: int) -> int:
        return local_arm("a", "drafter", {"path": str(tmp_path / name), **options}, llm).open().reads["draft"]

    block = count(two, "layers", "norm", "candidate_selector.hidden_projection")
    assert read("two", tree_nodes=0) == read("two", tree_nodes=9) == 8 * (block + vocabulary * size)
    assert read("cut", tree_nodes=0) == 8 * (block + 10 * size)
    once = 8 * (count(three, "midlayer", "norm") + 40 * size)
    assert [read("three", tree_nodes=n) for n in (0, 2, 9)] == [4 * once, 2 * once, 4 * once]
    assert read("three", block_size=3) == 2 * once


def test_other_weights_have_another_digest(llm: LLM, arms: dict[str, EngineArm], tmp_path: Path) -> None:
    other = tiny_llm(tmp_path, block_size=4, seed=1)
    one, two = arms["dflash"].open(), local_arm("b", "dflash", {"tree_nodes": 0}, other).open()
    assert one.basis["target_digest"] != two.basis["target_digest"]
    assert one.basis["tokenizer_digest"] == two.basis["tokenizer_digest"]
    assert one.speculation["drafter_digest"] != two.speculation["drafter_digest"]


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("plain", {"block_size": 4}, "'x': plain has the options none; got 'block_size'"),
        ("dflash", {"width": 4}, "dflash has the options block_size, tree_nodes; got 'width'"),
        ("dflash", {"block_size": 6}, r"'x': block_size: expected 1…5"),
        ("dflash", {"block_size": 4, "tree_nodes": 5}, "give one of the two"),
        ("dflash", {"tree_nodes": True}, "tree_nodes: expected a whole number, got True"),
        ("dflash", {"tree_nodes": 2.5}, "expected a whole number, got 2.5"),
        ("dflash", {"tree_nodes": 2000}, "num_nodes: expected 1…1024, got 2000"),
        ("lookup", {"block_size": 1}, "'x': block_size: expected at least 2"),
        ("lookup", {"max_ngram": 0}, "got 1 and 0"),
        ("lookup", {"block_size": "8"}, "expected a whole number, got '8'"),
        ("eagle", {}, "'x': expected one of plain, dflash, drafter, lookup, combined; got 'eagle'"),
        ("drafter", {}, "'x': path: expected the folder of a drafter, got None"),
        ("drafter", {"path": 3}, "path: expected the folder of a drafter, got 3"),
        ("dflash", {"path": "here"}, "dflash has the options block_size, tree_nodes; got 'path'"),
        ("combined", {"max_ngram": 2}, "got 3 and 2"),
        ("combined", {"block_size": 9}, "'x': block_size: expected 1…8"),
    ],
)
def test_what_makes_no_arm_is_refused(kind: str, options: dict[str, Any], message: str, llm: LLM) -> None:
    with pytest.raises(ConfigError, match=message):
        local_arm("x", kind, options, llm)


def test_a_pair_without_a_drafter_has_no_dflash_arm(tmp_path: Path) -> None:
    alone = tiny_llm(tmp_path, drafter=False)
    with pytest.raises(ConfigError, match="'x': dflash: the pair has no drafter"):
        local_arm("x", "dflash", {}, alone)
    with pytest.raises(ConfigError, match="'x': combined: the pair has no drafter"):
        local_arm("x", "combined", {}, alone)
    with pytest.raises(CheckpointError, match=r"'x': .*expected a drafter folder"):
        local_arm("x", "drafter", {"path": str(tmp_path)}, alone)
    assert local_arm("y", "lookup", {}, alone).open().speculation["kind"] == "lookup"
    made = local_arm("z", "drafter", {"path": str(save_other_drafter(alone, tmp_path / "made"))}, alone)
    assert made.open().speculation["kind"] == "dflash2" and made.open().speculation["tree_nodes"] == "0"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"plain": True, "block_size": 2}, "plain: plain decoding takes no drafter"),
        ({"plain": True, "drafter": PromptLookup()}, "plain: "),
        ({"drafter": PromptLookup(), "tree_nodes": 3}, "tree_nodes: 3 is for the pair's own drafter"),
        ({"drafter": PromptLookup(4), "block_size": 5}, "block_size: expected 1…4"),
    ],
)
def test_an_engine_of_contradictions_is_refused(options: dict[str, Any], message: str, llm: LLM) -> None:
    with pytest.raises(ConfigError, match=message):
        llm.new_engine(**options)
