"""A GGUF file becomes the same model with the same tokenizer, or is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from paceline.core.errors import CheckpointError, UnknownFormatError
from paceline.target.pull import pull
from paceline.target.text import TextCodec
from tiny_gguf import CONFIGS, TOKENS, leftovers, logits, logits_of, tiny_model, write_gguf


@pytest.mark.parametrize("architecture", list(CONFIGS))
def test_a_gguf_becomes_the_same_model(architecture: str, tmp_path: Path) -> None:
    model = tiny_model(architecture)
    folder = pull(
        str(write_gguf(tmp_path / "m.gguf", architecture, model=model)), cache_dir=tmp_path / "cache"
    )
    torch.testing.assert_close(logits_of(folder), logits(model), rtol=1e-9, atol=1e-9)
    tensors = load_file(folder / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert ("lm_head.weight" in tensors) is (architecture == "qwen2")
    config = json.loads((folder / "config.json").read_text())
    assert (config["rms_norm_eps"], config["rope_theta"]) == (1e-5, 50000.0)


def test_quantised_weights_are_dequantised(tmp_path: Path) -> None:
    model = tiny_model("llama")
    folder = pull(str(write_gguf(tmp_path / "m.gguf", model=model, quantize=True)), cache_dir=tmp_path)
    got, expected = logits_of(folder), logits(model)
    assert not torch.equal(got, expected)
    assert (got - expected).norm() < 0.05 * expected.norm()


def test_a_gguf_keeps_its_tokenizer(tmp_path: Path) -> None:
    folder = pull(str(write_gguf(tmp_path / "m.gguf")), cache_dir=tmp_path)
    codec = TextCodec.load(folder)
    pieces = [TOKENS[i] for i in codec.encode("sing in  4<think>")]
    assert pieces == ["s", "ing", "Ġin", "ĠĠ", "4", "<think>"]
    assert codec.render_chat([{"role": "user", "content": "in"}]) == [1, TOKENS.index("in"), 0]
    assert codec.decode([1, 2, 0]) == "<think>", "user-defined tokens are text, control tokens are not"
    assert codec.eos_token_ids == (0,)
    assert "<unused>" not in (folder / "tokenizer.json").read_text()


@pytest.mark.parametrize(
    ("pre", "expected"),
    [("gpt-2", ["Ġ", "Ġ4", "4"]), ("smollm", ["ĠĠ", "4", "4"]), ("qwen2", ["Ġ", "Ġ", "4", "4"])],
)
def test_text_is_split_as_the_file_says(pre: str, expected: list[str], tmp_path: Path) -> None:
    codec = TextCodec.load(pull(str(write_gguf(tmp_path / "m.gguf", pre=pre)), cache_dir=tmp_path))
    assert [TOKENS[i] for i in codec.encode("  44")] == expected


def test_a_file_may_ask_for_bos(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", change=lambda writer, tensors: writer.add_add_bos_token(True))
    codec = TextCodec.load(pull(str(file), cache_dir=tmp_path))
    assert codec.encode("in") == [1, TOKENS.index("in")]


def spoil(name: str) -> Callable[[gguf.GGUFWriter, dict[str, np.ndarray]], object]:
    def change(writer: gguf.GGUFWriter, tensors: dict[str, np.ndarray]) -> None:
        match name:
            case "setting":
                writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            case "extra tensor":
                tensors["rope_freqs.weight"] = np.ones(8, np.float32)
            case "missing tensor":
                del tensors["blk.1.ffn_up.weight"]
            case "shape":
                tensors["blk.1.ffn_up.weight"] = tensors["blk.1.ffn_up.weight"][:32]
            case "not finite":
                tensors["blk.0.attn_v.weight"][3, 4] = np.nan
            case "head size":
                writer.add_rope_dimension_count(8)

    return change


@pytest.mark.parametrize(
    ("fault", "error", "said"),
    [
        ("setting", UnknownFormatError, r"settings without a counterpart: llama\.rope\.scaling\.type; hint"),
        (
            "extra tensor",
            UnknownFormatError,
            r"without a counterpart in LlamaForCausalLM: rope_freqs\.weight; hint",
        ),
        ("missing tensor", CheckpointError, r"tensors missing: blk\.1\.ffn_up\.weight; hint"),
        ("shape", CheckpointError, r"blk\.1\.ffn_up\.weight has the shape \(32, 64\), expected \(96, 64\)"),
        ("not finite", CheckpointError, r"blk\.0\.attn_v\.weight holds values that are not finite; hint"),
        ("head size", UnknownFormatError, r"llama\.rope\.dimension_count is 8, expected the head size 16"),
    ],
)
def test_what_cannot_be_carried_over_is_named(
    fault: str, error: type[Exception], said: str, tmp_path: Path
) -> None:
    file = write_gguf(tmp_path / "m.gguf", change=spoil(fault))
    with pytest.raises(error, match=said):
        pull(str(file), cache_dir=tmp_path / "cache")
    assert leftovers(tmp_path / "cache") == []


def test_other_kinds_of_file_are_named(tmp_path: Path) -> None:
    with pytest.raises(UnknownFormatError, match=r"tokenizer\.ggml\.pre: expected one of .*, got 'tekken'"):
        pull(str(write_gguf(tmp_path / "a.gguf", pre="tekken")), cache_dir=tmp_path / "cache")
    writer = gguf.GGUFWriter(tmp_path / "b.gguf", "dflash")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(UnknownFormatError, match=r"general\.architecture: expected one of .*, got 'dflash'"):
        pull(str(tmp_path / "b.gguf"), cache_dir=tmp_path / "cache")
    (tmp_path / "c.gguf").write_bytes(b"GGUF")
    with pytest.raises(UnknownFormatError, match="expected a complete GGUF file"):
        pull(str(tmp_path / "c.gguf"), cache_dir=tmp_path / "cache")


def test_a_truncated_gguf_is_refused(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf")
    file.write_bytes(file.read_bytes()[:-500])
    with pytest.raises(UnknownFormatError, match="expected a complete GGUF file"):
        pull(str(file), cache_dir=tmp_path / "cache")
    assert leftovers(tmp_path / "cache") == []
