"""EAGLE-3 drafters at rest: the files that vLLM and SGLang read, bit-equal round trips, refusals by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from paceline.checkpoint.store import CONFIG, PROVENANCE, VOCABULARY, WEIGHTS, DrafterCheckpoint
from paceline.core.errors import CheckpointError
from paceline.drafter.eagle3 import Eagle3
from paceline.testing import tiny_eagle3, tiny_target

TAPS = (0, 2)


def checkpoint(dtype: torch.dtype = torch.float32, draft_vocab_size: int | None = 20) -> DrafterCheckpoint:
    drafter = tiny_eagle3(
        tiny_target(num_layers=3), 5, draft_vocab_size=draft_vocab_size, target_layer_ids=TAPS
    )
    return DrafterCheckpoint.of(drafter, dtype, {"recipe": "tiny"}, drafter.token_ids)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A saved drafter."""
    checkpoint().save(tmp_path / "drafter")
    return tmp_path / "drafter"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("draft_vocab_size", [20, None])
def test_a_round_trip_changes_no_bit(
    draft_vocab_size: int | None, dtype: torch.dtype, tmp_path: Path
) -> None:
    saved = checkpoint(dtype, draft_vocab_size)
    saved.save(tmp_path / "drafter")
    loaded = DrafterCheckpoint.load(tmp_path / "drafter")
    assert (loaded.config, loaded.provenance, loaded.dtype) == (saved.config, {"recipe": "tiny"}, dtype)
    assert loaded.token_ids is None is saved.token_ids, "the tensors say it"
    assert loaded.tensors.keys() == saved.tensors.keys()
    for name, tensor in saved.tensors.items():
        assert torch.equal(loaded.tensors[name], tensor), name
        assert loaded.tensors[name].dtype is {"d2t": torch.int64, "t2d": torch.bool}.get(name, dtype)


def test_a_built_drafter_drafts_what_the_saved_one_did() -> None:
    target = tiny_target(num_layers=3)
    original = tiny_eagle3(target, 5, draft_vocab_size=20, target_layer_ids=TAPS)
    built = checkpoint(torch.float64).build(torch.float64).bind(target.heads)
    rows = torch.randn(6, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    drafts = []
    for drafter in (original, built):
        assert isinstance(drafter, Eagle3)
        context = drafter.open(8)
        drafter.inject([context], [rows], [[1, 2, 3, 4, 5, 6]])
        drafts.append(drafter.draft_trees([5], [context], 12))
    assert drafts[0] == drafts[1]
    single = checkpoint().build(torch.float32)
    assert isinstance(single, Eagle3)
    assert single.token_ids.tolist() == original.token_ids.tolist()
    assert all(p.dtype is torch.float32 for p in single.parameters())


def test_the_files_are_those_that_engines_read(folder: Path) -> None:
    """Names, shapes and ids as vLLM's and SGLang's loaders of this architecture expect them."""
    assert sorted(p.name for p in folder.iterdir()) == sorted([CONFIG, PROVENANCE, WEIGHTS])
    raw = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    assert (raw["architectures"], raw["model_type"]) == (["LlamaForCausalLMEagle3"], "llama")
    assert (raw["vocab_size"], raw["draft_vocab_size"], raw["num_hidden_layers"]) == (61, 20, 1)
    assert raw["rope_theta"] == raw["rope_parameters"]["rope_theta"] == 10_000.0
    assert raw["eagle_aux_hidden_state_layer_ids"] == [1, 3], "vLLM: the layer before which it taps"
    assert raw["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 2], "SGLang: it adds the one"
    assert raw["num_aux_hidden_states"] == 2
    with safe_open(folder / WEIGHTS, "pt") as handle:
        tensors = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        "d2t": (20,),
        "t2d": (61,),
        "fc.weight": (32, 64),
        "midlayer.hidden_norm.weight": (32,),
        "midlayer.input_layernorm.weight": (32,),
        "midlayer.self_attn.q_proj.weight": (32, 64),
        "midlayer.self_attn.k_proj.weight": (16, 64),
        "midlayer.self_attn.v_proj.weight": (16, 64),
        "midlayer.self_attn.o_proj.weight": (32, 32),
        "midlayer.post_attention_layernorm.weight": (32,),
        "midlayer.mlp.gate_proj.weight": (48, 32),
        "midlayer.mlp.up_proj.weight": (48, 32),
        "midlayer.mlp.down_proj.weight": (32, 48),
        "norm.weight": (32,),
        "lm_head.weight": (20, 32),
    }
    ids = torch.arange(20) + tensors["d2t"]
    assert ids.tolist() == tensors["t2d"].nonzero()[:, 0].tolist() == [i * 61 // 20 for i in range(20)]


def test_a_whole_vocabulary_has_no_map(tmp_path: Path) -> None:
    """Engines make no place for one where the head has as many rows as the target's."""
    checkpoint(draft_vocab_size=None).save(tmp_path / "drafter")
    assert not {"d2t", "t2d"} & set(DrafterCheckpoint.load(tmp_path / "drafter").tensors)


# Configs of others ---------------------------------------------------------------------------------------------------

Edit = Callable[[dict[str, Any]], object]


def edit_config(folder: Path, edit: Edit) -> None:
    raw = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    edit(raw)
    (folder / CONFIG).write_text(json.dumps(raw), encoding="utf-8")


def top(**change: Any) -> Edit:
    return lambda raw: raw.update(change)


def nested(**change: Any) -> Edit:
    return lambda raw: raw["eagle_config"].update(change)


def without(*keys: str) -> Edit:
    return lambda raw: [raw.pop(key) for key in keys]


def test_absent_keys_have_defaults(folder: Path) -> None:
    edit_config(
        folder, without("block_size", "eagle_config", "head_dim", "num_aux_hidden_states", "rope_parameters")
    )
    config = DrafterCheckpoint.load(folder).config
    assert (config.block_size, config.head_dim, config.target_layer_ids) == (8, 8, TAPS)


REFUSED: list[tuple[Edit, str]] = [
    (without("hidden_size"), "hidden_size: expected"),
    (without("vocab_size"), "vocab_size: expected"),
    (without("num_target_layers"), "num_target_layers: expected"),
    (without("eagle_aux_hidden_state_layer_ids"), "eagle_aux_hidden_state_layer_ids: expected at top level"),
    (
        nested(eagle_aux_hidden_state_layer_ids=[1, 3]),
        r"eagle_config.eagle_aux_.*: expected \[0, 2\], one less than at top level, got \[1, 3\]",
    ),
    (top(eagle_aux_hidden_state_layer_ids=[1, 4], eagle_config=None), "ascending layers in 0…2"),
    (top(eagle_aux_hidden_state_layer_ids=[0, 1], eagle_config=None), "ascending layers in 0…2"),
    (top(num_aux_hidden_states=3), "num_aux_hidden_states: expected 2, got 3"),
    (top(norm_before_residual=True), "norm_before_residual: True is not implemented"),
    (top(norm_before_fc=True), "norm_before_fc: True"),
    (nested(norm_before_fc=True), "norm_before_fc: True"),
    (top(fc_norm=True), "fc_norm: True"),
    (top(norm_output=True), "norm_output: True"),
    (nested(use_aux_hidden_state=False), "use_aux_hidden_state: False"),
    (nested(temperature=2), r"eagle_config: \['temperature'\] are not known"),
    (top(attention_bias=True), "attention_bias: True"),
    (top(hidden_act="gelu"), "hidden_act: 'gelu'"),
    (top(num_hidden_layers=2), "num_hidden_layers: 2"),
    (top(logit_scale=0.5), "logit_scale: 0.5"),
    (top(parallel_drafting=True), "parallel_drafting: True"),
    (top(target_hidden_size=64), "target_hidden_size: expected 32, got 64"),
    (top(draft_vocab_size=62), "draft_vocab_size: expected 1…61"),
    (top(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4}), "rope: expected the default type"),
    (top(hidden_size="wide"), "invalid literal"),
]


@pytest.mark.parametrize(("edit", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_a_config_of_another_function_is_refused_by_name(edit: Edit, message: str, folder: Path) -> None:
    edit_config(folder, edit)
    with pytest.raises(CheckpointError, match=message) as caught:
        DrafterCheckpoint.load(folder)
    assert str(folder / CONFIG) in str(caught.value)


# Tensors of others ---------------------------------------------------------------------------------------------------


def edited(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        tensors = dict(DrafterCheckpoint.load(folder).tensors)
        change(tensors)
        save_file(tensors, folder / WEIGHTS)

    return edit


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (edited(lambda t: t.pop("t2d")), r"missing t2d \(61,\)"),
        (
            edited(lambda t: t.update({"embed_tokens.weight": torch.zeros(61, 32)})),
            "unknown embed_tokens.weight",
        ),
        (edited(lambda t: t.update(d2t=t["d2t"][:5].clone())), r"d2t: expected \(20,\), got \(5,\)"),
        (edited(lambda t: t.update(d2t=t["d2t"].int())), "d2t in int64 and t2d in bool, got torch.int32"),
        (edited(lambda t: t.update(t2d=~t["t2d"])), "d2t and t2d disagree"),
        (edited(lambda t: t.update(d2t=t["d2t"] + torch.arange(20))), "token = row"),
        (edited(lambda t: t.update(d2t=t["d2t"].flip(0))), "in ascending order"),
        (
            lambda folder: (folder / VOCABULARY).write_text('{"token_ids": [1]}', encoding="utf-8"),
            f"{VOCABULARY}: an EAGLE-3 drafter's tokens are those of its d2t",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    edit: Callable[[Path], object], message: str, folder: Path
) -> None:
    edit(folder)
    with pytest.raises(CheckpointError, match=message):
        DrafterCheckpoint.load(folder)


def test_reading_names_and_shapes_fills_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To fill meta tensors at random PyTorch loads its compiler, seconds at every start."""
    for fill in ("normal_", "zeros_"):
        monkeypatch.delattr(torch.nn.init, fill)
    assert DrafterCheckpoint.load(folder).build(torch.float32).block_size == 5
