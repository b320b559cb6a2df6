"""The pairs that `check_on_gpu.py` looks at: a stored one, and a random one of any size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from paceline.checkpoint.store import DrafterCheckpoint
from paceline.checkpoint.zlab import new_drafter
from paceline.core.params import SamplingParams
from paceline.core.types import Completion, Request
from paceline.drafter.base import NeuralDrafter
from paceline.drafter.config import DrafterConfig
from paceline.drafter.dflash import DFlash
from paceline.engine.engine import Engine
from paceline.engine.graphs import Eager, Graphs
from paceline.engine.runtime import record_passes
from paceline.target.native import NativeTarget
from paceline.target.weights import Shape


@dataclass(frozen=True)
class Sizes:
    """How large everything is.

    Args:
        big: the random target.
        block_size, drafter_layers: of its drafter.
        context: tokens before every timed pass.
        batches, rows: what passes are timed for.
        new_tokens: of every text of the pair.
        step_tokens: of every text of the random pair.
        repeats: of every timed call.
    """

    big: Shape
    block_size: int = 16
    drafter_layers: int = 5
    context: int = 1024
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    new_tokens: int = 128
    step_tokens: int = 24
    repeats: int = 8


def llama(layers: int, hidden: int, heads: int, kv_heads: int, mlp: int, vocab: int, positions: int) -> Shape:
    """Returns the sizes of a decoder of the Llama shape with an untied head and no end of text."""
    return Shape(
        architecture="LlamaForCausalLM",
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=hidden // heads,
        intermediate_size=mlp,
        vocab_size=vocab,
        rms_norm_eps=1e-5,
        rope_theta=500_000.0,
        max_positions=positions,
        tie_word_embeddings=False,
        eos_token_ids=(),
    )


WHOLE = Sizes(llama(32, 4096, 32, 8, 14336, 128_256, 8192))
TINY = Sizes(
    llama(4, 32, 4, 2, 48, 61, 256),
    block_size=6,
    drafter_layers=2,
    context=20,
    batches=(1, 4),
    rows=(1, 4),
    new_tokens=12,
    step_tokens=6,
    repeats=2,
)


# Pairs ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pair:
    """A target and its drafter on one device."""

    target: NativeTarget
    drafter: NeuralDrafter

    def record(self, recorded: bool) -> Graphs | None:
        """Has passes recorded from now on, or no more; on a CPU only their padding is tried. Mutates: both parts."""
        parts = [part for part in (self.target, self.drafter) if isinstance(part, (NativeTarget, DFlash))]
        graphs = record_passes(self.target.device, *parts) if recorded else None
        if recorded and graphs is None:
            graphs = Graphs(Eager(self.target.device))
        for part in parts:
            part.record(graphs)
        return graphs

    def decode(
        self, prompts: Sequence[Sequence[int]], num_tokens: int, *, plain: bool, batch: int
    ) -> list[Completion]:
        """Returns the greedy continuations."""
        engine = Engine(self.target, None if plain else self.drafter, max_sequences=batch)
        params = SamplingParams(max_new_tokens=num_tokens)
        requests = [Request(str(n), tuple(ids), params) for n, ids in enumerate(prompts)]
        try:
            for request in requests:
                engine.add(request)
            while engine.has_work:
                engine.step()
        finally:
            engine.close()
        return [engine.take_completion(request.id) for request in requests]


def stored_pair(folder: Path, drafter: Path, device: torch.device, dtype: torch.dtype) -> Pair:
    """Returns a pair of local folders."""
    target = NativeTarget.load(
        folder, name=folder.name, dtype=dtype, device=device, exact=device.type == "cpu"
    )
    checkpoint = DrafterCheckpoint.load(drafter)
    return Pair(target, checkpoint.build(dtype, device).bind(target.heads, checkpoint.token_ids))


def random_pair(sizes: Sizes, device: torch.device, dtype: torch.dtype, seed: int = 0) -> Pair:
    """Returns a pair of random weights, drawn on the device."""
    shape, rng = sizes.big, torch.Generator(device).manual_seed(seed)

    def matrix(
        num_out: int, num_in: int
    ) -> torch.Tensor:  # drawn in float32, so that all dtypes have the same
        drawn = torch.empty(num_out, num_in, device=device).normal_(0, num_in**-0.5, generator=rng)
        return drawn.to(dtype)

    width, queries, keys = (
        shape.hidden_size,
        shape.num_heads * shape.head_dim,
        shape.num_kv_heads * shape.head_dim,
    )
    norm = torch.ones(width, device=device, dtype=dtype)
    tensors = {
        "model.embed_tokens.weight": matrix(shape.vocab_size, width),
        "lm_head.weight": matrix(shape.vocab_size, width),
        "model.norm.weight": norm,
    }
    for i in range(shape.num_layers):
        layer = f"model.layers.{i}"
        tensors |= {f"{layer}.{name}_layernorm.weight": norm for name in ("input", "post_attention")}
        for name, (out, num_in) in {
            "self_attn.q_proj": (queries, width),
            "self_attn.k_proj": (keys, width),
            "self_attn.v_proj": (keys, width),
            "self_attn.o_proj": (width, queries),
            "mlp.gate_proj": (shape.intermediate_size, width),
            "mlp.up_proj": (shape.intermediate_size, width),
            "mlp.down_proj": (width, shape.intermediate_size),
        }.items():
            tensors[f"{layer}.{name}.weight"] = matrix(out, num_in)
    target = NativeTarget(
        shape, tensors, name="random", dtype=dtype, device=device, exact=device.type == "cpu"
    )
    with device:
        drafter = new_drafter(drafter_config(sizes))
    return Pair(target, drafter.to(device, dtype).bind(target.heads))


def drafter_config(sizes: Sizes) -> DrafterConfig:
    """Returns a drafter of the random target's width, tapped evenly."""
    shape, layers = sizes.big, sizes.drafter_layers
    last = shape.num_layers - 1
    return DrafterConfig(
        block_size=sizes.block_size,
        hidden_size=shape.hidden_size,
        num_layers=layers,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.intermediate_size,
        vocab_size=shape.vocab_size,
        target_layer_ids=tuple(sorted({i * last // (layers - 1) for i in range(layers)})),
        num_target_layers=shape.num_layers,
        mask_token_id=shape.vocab_size - 1,
    )
