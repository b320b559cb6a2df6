"""Any transformers model as a target, on tiny random float64 models: taps, verify and keep, capacity, refusals."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MambaConfig,
    MiniMaxConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen3Config,
)

from paceline.core.errors import CapacityError, CheckpointError, RequestError, UnsupportedTargetError
from paceline.core.types import EMPTY_PROPOSAL, Proposal
from paceline.target.base import TargetOutput, TargetSession, VerifyRows
from paceline.target.hf import HFTarget, find_decoder_layers
from paceline.target.rollback import check, keep_rows, rollback

VOCAB_SIZE, HIDDEN_SIZE, NUM_LAYERS, MAX_POSITIONS = 61, 32, 3, 64
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 48,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": MAX_POSITIONS,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LAYER_TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: LlamaConfig(**SIZES, tie_word_embeddings=True),
    "qwen3": lambda: Qwen3Config(**SIZES),
    "gpt2": lambda: GPT2Config(
        vocab_size=VOCAB_SIZE,
        n_embd=HIDDEN_SIZE,
        n_layer=NUM_LAYERS,
        n_head=4,
        n_positions=MAX_POSITIONS,
        initializer_range=0.2,
        bos_token_id=0,
        eos_token_id=2,
    ),
    "gemma3, window 4": lambda: Gemma3TextConfig(**SIZES, sliding_window=4, layer_types=LAYER_TYPES),
    "mistral, window 4": lambda: MistralConfig(**SIZES, sliding_window=4),
}
PROMPT = [5, 17, 3, 44, 9, 60, 21, 8, 33, 12, 50, 7]
TREE = Proposal(
    (11, 22, 33, 44, 55), (0, 0, 1, 1, 2)
)  # two children of the anchor, two of the first, one of the second


def save(config: PretrainedConfig, folder: Path) -> Path:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    for parameter in model.parameters():  # norms start at one; give every tensor something to get wrong
        parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return folder


def load(folder: Path) -> HFTarget:
    return HFTarget.load(folder, name="tiny", dtype=torch.float64, device=torch.device("cpu"))


@pytest.fixture(scope="module", params=list(CONFIGS))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(CONFIGS[request.param](), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def target(folder: Path) -> HFTarget:
    return load(folder)


@pytest.fixture
def tapped(target: HFTarget) -> Iterator[HFTarget]:
    target.tap([0, 2])
    yield target
    target.tap([])


@pytest.fixture(scope="module")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(CONFIGS["llama"](), tmp_path_factory.mktemp("llama"))


def run(
    target: HFTarget,
    session: TargetSession,
    tokens: Sequence[int],
    proposal: Proposal = EMPTY_PROPOSAL,
    *,
    last_row_only: bool = False,
) -> TargetOutput:
    (output,) = target.verify([VerifyRows(session, tokens, proposal, last_row_only)])
    return output


def fresh(target: HFTarget, tokens: Sequence[int]) -> TargetOutput:
    """The oracle: all tokens in one pass of an empty session."""
    return run(target, target.open(MAX_POSITIONS), tokens)


def assert_same(one: torch.Tensor, other: torch.Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_one_pass_is_the_model(folder: Path, target: HFTarget) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([PROMPT]), use_cache=False).logits[0]
    output = fresh(target, PROMPT)
    assert_same(output.logits, expected)
    assert output.hidden.shape == (len(PROMPT), 0)
    assert expected.std() > 0.1, "a model that says the same everywhere would prove nothing"


def test_taps_are_the_outputs_of_the_layers(folder: Path, target: HFTarget) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    before_norm: list[torch.Tensor] = []
    norm = next(module for name, module in model.get_decoder().named_children() if name in ("norm", "ln_f"))
    norm.register_forward_pre_hook(lambda module, inputs: before_norm.append(inputs[0]))
    with torch.no_grad():
        states = model(input_ids=torch.tensor([PROMPT]), output_hidden_states=True).hidden_states
    target.tap([1, 2, 0])
    hidden = fresh(target, PROMPT).hidden
    target.tap([])
    first, second, third = hidden.split(HIDDEN_SIZE, dim=-1)
    assert_same(first, states[2][0])
    assert_same(second, before_norm[0][0])
    assert_same(third, states[1][0])


def test_tapping_again_replaces_the_hooks(target: HFTarget) -> None:
    for layer_ids in ([0, 1], [2], [0, 1], [1]):
        target.tap(layer_ids)
        counts = [len(layer._forward_hooks) for layer in target._layers]
        assert counts == [int(i in layer_ids) for i in range(NUM_LAYERS)]
    target.tap([])
    assert not any(layer._forward_hooks for layer in target._layers)


@pytest.mark.parametrize("layer_id", [-1, NUM_LAYERS])
def test_a_layer_that_is_not_there_cannot_be_tapped(target: HFTarget, layer_id: int) -> None:
    with pytest.raises(UnsupportedTargetError, match=rf"layer id {layer_id}: expected 0…2 for tiny"):
        target.tap([layer_id])


@pytest.mark.parametrize("num_kept", range(5))
def test_what_was_not_kept_leaves_no_trace(tapped: HFTarget, num_kept: int) -> None:
    session = tapped.open(MAX_POSITIONS)
    run(tapped, session, PROMPT[:-1])
    session.keep(range(len(PROMPT) - 1))
    drafts = (13, 14, 15, 16)
    run(tapped, session, PROMPT[-1:], Proposal.chain(drafts))
    session.keep(range(num_kept))
    committed = [*PROMPT, *drafts][: len(PROMPT) - 1 + num_kept]
    assert session.length == len(committed)
    output, expected = run(tapped, session, [40, 41, 42]), fresh(tapped, [*committed, 40, 41, 42])
    assert_same(output.logits, expected.logits[-3:])
    assert_same(output.hidden, expected.hidden[-3:])


def test_an_unkept_pass_is_overwritten(tapped: HFTarget) -> None:
    session = tapped.open(MAX_POSITIONS)
    run(tapped, session, PROMPT[:6])
    session.keep(range(6))
    for _ in range(3):
        output = run(tapped, session, PROMPT[6:])
    assert_same(output.logits, fresh(tapped, PROMPT).logits[6:])
    assert session.length == 6


@pytest.mark.parametrize("size", [1, 5, 7])
def test_prefill_in_pieces_is_prefill_at_once(tapped: HFTarget, size: int) -> None:
    session, outputs = tapped.open(len(PROMPT)), []
    for start in range(0, len(PROMPT), size):
        piece = PROMPT[start : start + size]
        outputs.append(run(tapped, session, piece))
        session.keep(range(len(piece)))
    expected = fresh(tapped, PROMPT)
    assert_same(torch.cat([output.logits for output in outputs]), expected.logits)
    assert_same(torch.cat([output.hidden for output in outputs]), expected.hidden)


def test_the_last_row_alone_is_the_last_row(tapped: HFTarget) -> None:
    output, expected = run(tapped, tapped.open(20), PROMPT, last_row_only=True), fresh(tapped, PROMPT)
    assert output.logits.shape == (1, VOCAB_SIZE)
    assert_same(output.logits, expected.logits[-1:])
    assert_same(output.hidden, expected.hidden)


def test_sessions_do_not_know_each_other(tapped: HFTarget) -> None:
    prompts = [PROMPT, [1, 2, 3], PROMPT[::-1]]
    sessions = [tapped.open(30) for _ in prompts]
    tapped.verify([VerifyRows(s, p, EMPTY_PROPOSAL) for s, p in zip(sessions, prompts, strict=True)])
    for session, prompt in zip(sessions, prompts, strict=True):
        session.keep(range(len(prompt)))
    sessions[1].close()
    parts = [VerifyRows(sessions[i], [4], Proposal.chain([i, 6])) for i in (2, 0)]
    for i, output in zip((2, 0), tapped.verify(parts), strict=True):
        expected = fresh(tapped, [*prompts[i], 4, i, 6])
        assert_same(output.logits, expected.logits[-3:])
        assert_same(output.hidden, expected.hidden[-3:])


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2"])
def test_each_node_of_a_tree_sees_its_own_path(name: str, tmp_path: Path) -> None:
    target = load(save(CONFIGS[name](), tmp_path))
    target.tap([1])
    session = target.open(MAX_POSITIONS)
    run(target, session, PROMPT[:-1])
    session.keep(range(len(PROMPT) - 1))
    output = run(target, session, PROMPT[-1:], TREE)
    for row, path in enumerate([[], [11], [22], [11, 33], [11, 44], [22, 55]]):
        expected = fresh(target, [*PROMPT, *path])
        assert_same(output.logits[row], expected.logits[-1])
        assert_same(output.hidden[row], expected.hidden[-1])
    session.keep([0, 1, 4])
    assert_same(run(target, session, [6, 7]).logits, fresh(target, [*PROMPT, 11, 44, 6, 7]).logits[-2:])


@pytest.mark.parametrize("rows", [[1], [0, 2], [0, 1, 4, 5], [0, 1, 3, 4], [1, 0], [0, 7], [-1]])
def test_only_a_path_from_row_0_can_be_kept(llama_folder: Path, rows: list[int]) -> None:
    target = load(llama_folder)
    session = target.open(20)
    run(target, session, [1, 2], TREE)
    with pytest.raises(ValueError, match="expected a path from row 0 through 7 rows"):
        session.keep(rows)
    assert session.length == 0
    session.keep([0, 1, 3, 6])
    assert session.length == 4


def test_capacity_is_a_promise_and_a_limit(llama_folder: Path) -> None:
    target = load(llama_folder)
    with pytest.raises(CapacityError, match="65 tokens asked for, tiny has 64 positions"):
        target.open(MAX_POSITIONS + 1)
    session = target.open(6)
    run(target, session, [1, 2, 3, 4])
    session.keep(range(4))
    with pytest.raises(CapacityError, match=r"4 \+ 3 rows do not fit the session's 6"):
        run(target, session, [5], Proposal.chain([6, 7]))
    assert_same(run(target, session, [5, 6]).logits, fresh(target, [1, 2, 3, 4, 5, 6]).logits[-2:])


def test_misuse_is_named(llama_folder: Path) -> None:
    target = load(llama_folder)
    session = target.open(10)
    with pytest.raises(RequestError, match="token ids: expected 0…60, got 61"):
        run(target, session, [1, 61])
    session.close()
    session.close()
    with pytest.raises(ValueError, match="the session is closed"):
        run(target, session, [1])


def test_spec_and_heads_are_the_models(llama_folder: Path) -> None:
    target = load(llama_folder)
    spec = target.spec
    assert (spec.architecture, spec.hidden_size, spec.num_layers) == (
        "LlamaForCausalLM",
        HIDDEN_SIZE,
        NUM_LAYERS,
    )
    assert (spec.vocab_size, spec.max_positions, spec.eos_token_ids) == (VOCAB_SIZE, MAX_POSITIONS, (2,))
    assert (target.dtype, target.device.type) == (torch.float64, "cpu")
    heads = target.heads
    assert torch.equal(heads.embed(torch.tensor([[3, 4]])), heads.embed_weight[[3, 4]][None])
    hidden = torch.randn(2, HIDDEN_SIZE, dtype=torch.float64)
    assert_same(heads.lm_head(hidden), hidden @ heads.head_weight.T)
    assert torch.equal(heads.head_weight, heads.embed_weight)
    assert not heads.head_weight.requires_grad


def test_logits_are_float32_for_smaller_dtypes(llama_folder: Path) -> None:
    target = HFTarget.load(llama_folder, name="tiny", dtype=torch.bfloat16, device=torch.device("cpu"))
    target.tap([0])
    output = fresh(target, PROMPT)
    assert (output.logits.dtype, output.hidden.dtype) == (torch.float32, torch.bfloat16)
    assert target.heads.lm_head(output.hidden).dtype is torch.float32


SMALL: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "hidden_size": HIDDEN_SIZE, "num_hidden_layers": 2}
RECURRENT: list[tuple[PretrainedConfig, str]] = [
    (MambaConfig(**SMALL, state_size=4), "MambaForCausalLM keeps a recurrent state"),
    (
        MiniMaxConfig(
            **{**SIZES, "num_hidden_layers": 2},
            layer_types=["linear_attention", "full_attention"],
            num_local_experts=2,
        ),
        r"cache layers (LinearAttentionLayer, )?linear_attention cannot return to a shorter length",
    ),
]


@pytest.mark.parametrize(("config", "said"), RECURRENT, ids=["mamba", "minimax"])
def test_a_recurrent_state_is_refused(config: PretrainedConfig, said: str, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedTargetError, match=said):
        load(tmp_path)


def test_a_ring_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedTargetError, match="DynamicSlidingWindowLayer cannot return"):
        check(DynamicCache(config=CONFIGS["gemma3, window 4"]()))
    check(DynamicCache(config=CONFIGS["llama"]()))


def test_rollback_and_keep_rows_pick_positions() -> None:
    cache = DynamicCache(config=LlamaConfig(**SIZES))
    positions = torch.arange(8.0).view(1, 1, 8, 1)
    for layer in range(NUM_LAYERS):
        cache.update(positions.clone(), 10 + positions, layer)
    keep_rows(cache, 3, [0, 2, 4])
    assert [layer.keys.flatten().tolist() for layer in cache.layers] == [[0, 1, 2, 3, 5, 7]] * NUM_LAYERS  # type: ignore[union-attr]
    rollback(cache, 4)
    assert [layer.values.flatten().tolist() for layer in cache.layers] == [[10, 11, 12, 13]] * NUM_LAYERS  # type: ignore[union-attr]
    rollback(cache, 9)
    assert cache.get_seq_length() == 4


def test_a_model_without_a_list_of_layers_is_described(llama_folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(llama_folder)
    model.model.layers = torch.nn.Sequential(*model.model.layers)
    with pytest.raises(
        UnsupportedTargetError,
        match=r"expected a list of 3 decoder layers in LlamaModel, found .*layers: Sequential",
    ):
        find_decoder_layers(model)


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_missing_tensor_is_not_made_up(tmp_path: Path) -> None:
    save(CONFIGS["qwen3"](), tmp_path)
    change_weights(tmp_path, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(CheckpointError, match=r"missing .*: model\.layers\.1\.mlp\.up_proj\.weight; hint"):
        load(tmp_path)


def test_a_tensor_without_a_place_is_mentioned(tmp_path: Path) -> None:
    save(CONFIGS["qwen3"](), tmp_path)
    change_weights(tmp_path, lambda tensors: tensors.update(stray=torch.ones(1)))
    with pytest.warns(UserWarning, match="tensors that the model does not use: stray"):
        load(tmp_path)


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    save(CONFIGS["qwen3"](), tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: expected \d+ bytes, got \d+; hint"):
        load(tmp_path)


def test_loading_draws_nothing(llama_folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    load(llama_folder)
    assert "Loading" not in "".join(capfd.readouterr())
