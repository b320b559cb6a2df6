"""Drafters at rest: bit-equal round trips, refusals that name what is wrong, and saving that never spoils."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from paceline.checkpoint import store, zlab
from paceline.checkpoint.store import CONFIG, PROVENANCE, WEIGHTS, DrafterCheckpoint
from paceline.core.errors import CheckpointError, ConfigError, UnknownFormatError
from paceline.drafter.config import FULL, SLIDING, DrafterConfig
from paceline.drafter.dflash import DFlash
from paceline.testing import tiny_drafter, tiny_target

PROVENANCE_OF_IT = {"recipe": "tiny", "steps": 3, "curve": [[1, 0.5], [2, 0.25]], "name": "größer"}
CONFIGS: dict[str, dict[str, Any]] = {
    "full": {},
    "sliding": {"layer_types": (SLIDING, SLIDING), "sliding_window": 7},
    "mixed, not causal": {"layer_types": (SLIDING, FULL), "sliding_window": 5, "is_causal": False},
    "full, causal": {"is_causal": True, "target_layer_ids": (0, 1, 2)},
}


def checkpoint(dtype: torch.dtype = torch.float32, **kwargs: Any) -> DrafterCheckpoint:
    drafter = tiny_drafter(tiny_target(num_layers=3), 4, **kwargs)
    return DrafterCheckpoint.of(drafter, dtype, dict(PROVENANCE_OF_IT))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A saved drafter."""
    path = tmp_path / "drafter"
    checkpoint().save(path)
    return path


def edit_config(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    raw = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    edit(raw)
    (folder / CONFIG).write_text(json.dumps(raw), encoding="utf-8")


def nested(**change: Any) -> Callable[[dict[str, Any]], object]:
    return lambda raw: raw["dflash_config"].update(change)


def top(**change: Any) -> Callable[[dict[str, Any]], object]:
    return lambda raw: raw.update(change)


def edit_tensors(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = dict(DrafterCheckpoint.load(folder).tensors)
    edit(tensors)
    save_file(tensors, folder / WEIGHTS)


# Round trips ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_round_trip_changes_no_bit(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    saved = checkpoint(dtype, **CONFIGS[name])
    saved.save(tmp_path / "drafter")
    loaded = DrafterCheckpoint.load(tmp_path / "drafter")
    assert loaded.config == saved.config
    assert loaded.provenance == PROVENANCE_OF_IT
    assert loaded.dtype is dtype
    assert loaded.tensors.keys() == saved.tensors.keys()
    for tensor_name, tensor in saved.tensors.items():
        assert loaded.tensors[tensor_name].dtype is dtype
        assert torch.equal(loaded.tensors[tensor_name], tensor), tensor_name


def test_the_bytes_are_a_function_of_the_drafter(tmp_path: Path) -> None:
    """Saved twice, or saved, loaded and saved: the same files."""
    checkpoint().save(tmp_path / "first")
    DrafterCheckpoint.load(tmp_path / "first").save(tmp_path / "second")
    names = sorted(path.name for path in (tmp_path / "first").iterdir())
    assert names == sorted([CONFIG, PROVENANCE, WEIGHTS])
    for name in names:
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes(), name


def test_a_built_drafter_drafts_what_the_saved_one_did(folder: Path) -> None:
    target = tiny_target(num_layers=3)
    original = tiny_drafter(target, 4)
    built = checkpoint(torch.float64).build(torch.float64).bind(target.heads)
    rows = torch.randn(6, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    drafts = []
    for drafter in (original, built):
        assert isinstance(drafter, DFlash)
        context = drafter.open(8)
        drafter.inject([context], [rows])
        drafts.append(drafter.draft_logits([5], [context], 3))
    assert torch.equal(*drafts)
    single = DrafterCheckpoint.load(folder).build(torch.float32)
    assert all(parameter.dtype is torch.float32 for parameter in single.parameters())


def test_a_copy_is_a_copy() -> None:
    drafter = tiny_drafter(tiny_target(), 4)
    copied = DrafterCheckpoint.of(drafter, torch.float64, {})
    before = copied.tensors["fc.weight"].clone()
    drafter.fc.weight.data.zero_()
    assert torch.equal(copied.tensors["fc.weight"], before)


def test_the_config_is_plain_json_that_engines_read(folder: Path) -> None:
    raw = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    assert raw["architectures"] == ["DFlashDraftModel"]
    assert raw["dflash_config"] == {"mask_token_id": 60, "target_layer_ids": [0, 1]}
    assert raw["rope_theta"] == raw["rope_parameters"]["rope_theta"] == 10_000.0
    assert (raw["dtype"], raw["block_size"], raw["use_sliding_window"]) == ("float32", 4, False)
    assert "is_causal" not in raw, "its absence means: causal exactly where sliding"


# Configs of others ---------------------------------------------------------------------------------------------------


def loaded_config(folder: Path, edit: Callable[[dict[str, Any]], object]) -> DrafterConfig:
    edit_config(folder, edit)
    config = DrafterCheckpoint.load(folder).config
    assert isinstance(config, DrafterConfig)
    return config


@pytest.mark.parametrize(
    "dialect",
    [
        {"rope_theta": 5e5},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
        {"rope_parameters": {"rope_theta": 5e5}, "rope_theta": None},
        {"rope_theta": 500000, "rope_scaling": None},
        {"rope_theta": 5e5, "rope_scaling": {"type": "default"}},
    ],
)
def test_both_rope_dialects_are_read(dialect: dict[str, Any], folder: Path) -> None:
    def edit(raw: dict[str, Any]) -> None:
        for key in ("rope_theta", "rope_parameters", "rope_scaling"):
            del raw[key]
        raw.update(dialect)

    assert loaded_config(folder, edit).rope_theta == 5e5


def test_keys_are_read_at_either_level(folder: Path) -> None:
    def edit(raw: dict[str, Any]) -> None:
        raw.update(raw.pop("dflash_config"))
        raw["dflash_config"] = {"block_size": 9}

    config = loaded_config(folder, edit)
    assert (config.block_size, config.mask_token_id, config.target_layer_ids) == (9, 60, (0, 1)), (
        "nested first"
    )


@pytest.mark.parametrize("causal", [False, True])
def test_causality_is_read(causal: bool, folder: Path) -> None:
    assert loaded_config(folder, top(is_causal=causal)).is_causal is causal
    edit_config(folder, lambda raw: raw.pop("is_causal"))
    assert loaded_config(folder, nested(causal=causal)).is_causal is causal


def test_absent_keys_have_zlabs_defaults(folder: Path) -> None:
    def edit(raw: dict[str, Any]) -> None:
        for key in ("block_size", "layer_types", "sliding_window", "head_dim"):
            del raw[key]
        del raw["dflash_config"]["target_layer_ids"]
        raw["num_target_layers"] = 6

    config = loaded_config(folder, edit)
    assert config.block_size == 16
    assert config.layer_types == (FULL, FULL)
    assert config.target_layer_ids == (1, 3)
    assert config.head_dim == 8


REFUSED: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (nested(mask_token_id=None), "mask_token_id: expected in dflash_config or at top level"),
    (lambda raw: raw["dflash_config"].pop("mask_token_id"), "mask_token_id: expected"),
    (nested(mask_token_id=61), "mask_token_id"),
    (lambda raw: raw.pop("hidden_size"), "hidden_size: expected"),
    (lambda raw: raw.pop("num_target_layers"), "num_target_layers: expected"),
    (lambda raw: (raw.pop("rope_theta"), raw.pop("rope_parameters")), "rope_theta: expected"),
    (top(input_embedding_scale=2), "input_embedding_scale: 2 is not implemented"),
    (nested(input_embedding_scale=0.5), "input_embedding_scale: 0.5 is not implemented"),
    (top(output_multiplier=0.25), "output_multiplier: 0.25"),
    (top(final_logit_softcapping=30.0), "final_logit_softcapping: 30.0"),
    (nested(sample_from_anchor=True), "sample_from_anchor: True"),
    (nested(projector_type="domino"), "projector_type: 'domino'"),
    (top(attention_bias=True), "attention_bias: True"),
    (top(hidden_act="gelu"), "hidden_act: 'gelu'"),
    (
        top(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4}),
        "rope: expected the default type, got 'yarn'",
    ),
    (top(rope_parameters=None, rope_scaling={"type": "linear", "factor": 2.0}), "rope: .* got 'linear'"),
    (nested(target_layer_ids=[0, 3]), "target_layer_ids: expected ascending layers in 0…2"),
    (nested(target_layer_ids=[1, 0]), "target_layer_ids"),
    (top(layer_types=["full_attention"]), "layer_types: expected 2"),
    (
        top(layer_types=["sliding_attention"] * 2, use_sliding_window=True),
        "sliding_window: sliding layers need a window",
    ),
    (
        nested(selector_rank=256, swa_window_size=9),
        r"dflash_config: \['selector_rank', 'swa_window_size'\] are not known",
    ),
    (top(layer_types=None, use_sliding_window=True), "layer_types: expected beside use_sliding_window"),
    (top(layer_types=["sliding_attention"] * 2, sliding_window=8), "use_sliding_window: expected true"),
    (top(num_key_value_heads=3), "num_heads 4 is not a multiple"),
    (top(hidden_size="wide"), "invalid literal"),
    (top(hidden_size=[32]), CONFIG),
]


@pytest.mark.parametrize(("edit", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_a_config_of_another_function_is_refused_by_name(
    edit: Callable[[dict[str, Any]], object], message: str, folder: Path
) -> None:
    edit_config(folder, edit)
    with pytest.raises(CheckpointError, match=message) as caught:
        DrafterCheckpoint.load(folder)
    assert str(folder / CONFIG) in str(caught.value)


@pytest.mark.parametrize(
    "neutral", [top(input_embedding_scale=1.0), nested(sample_from_anchor=False), top(attention_bias=False)]
)
def test_neutral_values_are_not_refused(neutral: Callable[[dict[str, Any]], object], folder: Path) -> None:
    assert loaded_config(folder, neutral).block_size == 4


@pytest.mark.parametrize("architectures", [None, [], ["Qwen3ForCausalLM"], ["DFlashDraftModel"] * 2])
def test_another_architecture_is_another_format(architectures: list[str] | None, folder: Path) -> None:
    edit_config(folder, top(architectures=architectures))
    with pytest.raises(UnknownFormatError, match="architectures: expected"):
        DrafterCheckpoint.load(folder)


# Damage --------------------------------------------------------------------------------------------------------------


def test_a_folder_without_a_drafter(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(UnknownFormatError, match=f"expected a drafter folder with {CONFIG}"):
            DrafterCheckpoint.load(path)


@pytest.mark.parametrize("text", ["", "{", "[]", "7", "null"])
def test_a_config_that_is_no_object(text: str, folder: Path) -> None:
    (folder / CONFIG).write_text(text, encoding="utf-8")
    with pytest.raises(CheckpointError, match=CONFIG):
        DrafterCheckpoint.load(folder)


def test_a_damaged_provenance(folder: Path) -> None:
    (folder / PROVENANCE).write_text("{", encoding="utf-8")
    with pytest.raises(CheckpointError, match=PROVENANCE):
        DrafterCheckpoint.load(folder)


def test_a_missing_provenance_is_none_at_all(folder: Path) -> None:
    (folder / PROVENANCE).unlink()
    assert DrafterCheckpoint.load(folder).provenance == {}


@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.999])
def test_truncated_weights(share: float, folder: Path) -> None:
    whole = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(CheckpointError, match=f"{WEIGHTS}: not a whole safetensors file.*hint"):
        DrafterCheckpoint.load(folder)


def test_absent_weights(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    with pytest.raises(CheckpointError, match=f"{WEIGHTS}: expected the drafter's weights"):
        DrafterCheckpoint.load(folder)


def test_tensors_that_do_not_match_are_all_named(folder: Path) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["layers.1.self_attn.q_norm.weight"]
        tensors["lm_head.weight"] = torch.zeros(61, 32)
        tensors["fc.weight"] = torch.zeros(32, 32)

    edit_tensors(folder, edit)
    with pytest.raises(CheckpointError) as caught:
        DrafterCheckpoint.load(folder)
    message = str(caught.value)
    assert "missing layers.1.self_attn.q_norm.weight (8,)" in message
    assert "unknown lm_head.weight (61, 32)" in message
    assert "fc.weight: expected (32, 64), got (32, 32)" in message


def test_many_faults_are_counted(folder: Path) -> None:
    edit_tensors(folder, lambda tensors: [tensors.pop(name) for name in sorted(tensors)[:12]])
    with pytest.raises(CheckpointError, match="and 4 more"):
        DrafterCheckpoint.load(folder)


def test_wrong_tensors_are_not_saved(folder: Path) -> None:
    loaded = DrafterCheckpoint.load(folder)
    before = (folder / WEIGHTS).read_bytes()
    wrong = replace(loaded, tensors={k: v for k, v in loaded.tensors.items() if k != "norm.weight"})
    with pytest.raises(CheckpointError, match=r"missing norm\.weight"):
        wrong.save(folder)
    assert (folder / WEIGHTS).read_bytes() == before


def test_the_manifest_counts() -> None:
    for num_layers in (1, 2, 5):
        config = tiny_drafter(tiny_target(), 4, layer_types=(FULL,) * num_layers).config
        assert len(zlab.manifest(config)) == 11 * num_layers + 3


def test_reading_names_and_shapes_fills_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """To fill meta tensors at random PyTorch loads its compiler, seconds at every start."""
    config = tiny_drafter(tiny_target(), 4).config
    monkeypatch.delattr(torch.nn.init, "normal_")
    assert zlab.manifest(config)["norm.weight"] == (32,)


def test_config_errors_are_value_errors() -> None:
    with pytest.raises(ConfigError):
        zlab.config_from_json({"architectures": ["DFlashDraftModel"]})


# Saving --------------------------------------------------------------------------------------------------------------


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def another() -> DrafterCheckpoint:
    return DrafterCheckpoint.of(
        tiny_drafter(tiny_target(num_layers=3), 4, seed=9), torch.float32, {"step": 9}
    )


def test_saving_again_replaces_the_folder(folder: Path) -> None:
    (folder / "left over").write_text("of an older version", encoding="utf-8")
    another().save(folder)
    assert sorted(contents(folder)) == sorted([CONFIG, PROVENANCE, WEIGHTS])
    assert DrafterCheckpoint.load(folder).provenance == {"step": 9}
    assert [path.name for path in folder.parent.iterdir()] == ["drafter"]


def full_disk_at_weights(patch: pytest.MonkeyPatch) -> None:
    def write_half(tensors: object, path: Path, metadata: object = None) -> None:
        Path(path).write_bytes(b"half a checkpoint")
        raise SafetensorError("No space left on device")  # the library's own word for it

    patch.setattr(store, "save_file", write_half)


def full_disk_at_config(patch: pytest.MonkeyPatch) -> None:
    def write_half(path: Path, value: object) -> None:
        path.write_text("{", encoding="utf-8")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    patch.setattr(store, "_write_json", write_half)


def failing_rename(which: int) -> Callable[[pytest.MonkeyPatch], None]:
    def fault(patch: pytest.MonkeyPatch) -> None:
        calls, rename = [0], os.replace

        def fails_once(source: Path, destination: Path) -> None:
            calls[0] += 1
            if calls[0] == which:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            rename(source, destination)

        patch.setattr(os, "replace", fails_once)

    return fault


@pytest.mark.parametrize(
    "fault",
    [full_disk_at_weights, full_disk_at_config, failing_rename(1), failing_rename(2)],
    ids=["full disk at the weights", "full disk at the config", "first rename", "second rename"],
)
def test_a_save_that_fails_leaves_the_old_folder_and_no_litter(
    fault: Callable[[pytest.MonkeyPatch], None], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = contents(folder)
    fault(monkeypatch)
    with pytest.raises(OSError, match=r"No space left|Input/output error"):
        another().save(folder)
    assert [path.name for path in folder.parent.iterdir()] == ["drafter"]
    assert contents(folder) == before


def test_a_first_save_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full_disk_at_weights(monkeypatch)
    with pytest.raises(OSError, match="No space left"):
        checkpoint().save(tmp_path / "drafter")
    assert list(tmp_path.iterdir()) == []


def test_parents_are_made(tmp_path: Path) -> None:
    checkpoint().save(tmp_path / "a" / "b" / "drafter")
    assert DrafterCheckpoint.load(tmp_path / "a" / "b" / "drafter").config.block_size == 4
