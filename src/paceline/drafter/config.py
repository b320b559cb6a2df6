"""`DrafterConfig` and `Eagle3Config`: the frozen, validated shapes of drafters."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.core.block import LayerRule
from paceline.core.errors import ConfigError

FULL, SLIDING = "full_attention", "sliding_attention"
VARIANTS = ("dflash", "dflash2")
DFLASH2_FIELDS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
"""Fields of `DrafterConfig` that only DFlash 2 looks at."""


@dataclass(frozen=True, slots=True)
class DrafterConfig:
    """Sizes and conventions of a DFlash drafter; inconsistent values raise `ConfigError`.

    Args:
        block_size: slots of a block, anchor included.
        hidden_size: width of the drafter; equals the target's, whose embedding and head it borrows.
        num_layers, num_heads, num_kv_heads, head_dim, intermediate_size: Qwen3-shaped layers.
        vocab_size: rows of the target's embedding.
        target_layer_ids: tapped decoder layers of the target, 0-based, each meaning that layer's output.
        num_target_layers: decoder layers of the target.
        mask_token_id: a row of the target's embedding that stands for "to be filled".
        layer_types: "full_attention" or "sliding_attention" per layer.
        sliding_window: window of sliding layers in tokens.
        is_causal: overrides the per-layer rule of in-block causality (causal exactly where sliding).
        rope_theta, rms_norm_eps, max_positions: as usual.
        variant: "dflash" or "dflash2", which has what follows.
        conv_kernel_size, conv_group_size: taps of the convolutions; channels that share a dynamic coefficient.
        selector_rank, selector_top_k: width of the candidate selector's codebooks; candidates of a slot.
    """

    block_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    mask_token_id: int
    layer_types: tuple[str, ...] = ()
    sliding_window: int | None = None
    is_causal: bool | None = None
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-6
    max_positions: int = 8192
    variant: str = "dflash"
    conv_kernel_size: int = 2
    conv_group_size: int = 16
    selector_rank: int = 256
    selector_top_k: int = 16

    def __post_init__(self) -> None:
        if not self.layer_types:
            object.__setattr__(self, "layer_types", (FULL,) * self.num_layers)
        for problem in self._problems():
            raise ConfigError(f"drafter config: {problem}")

    def _problems(self) -> list[str]:
        at_least_one = (
            "hidden_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "intermediate_size",
        )
        found = [
            f"{n}: expected at least 1, got {getattr(self, n)}" for n in at_least_one if getattr(self, n) < 1
        ]
        taps, depth = self.target_layer_ids, self.num_target_layers
        checks = [
            (self.variant in VARIANTS, f"variant: expected one of {VARIANTS}, got {self.variant!r}"),
            (
                self.block_size >= 2,
                f"block_size: expected at least 2 (anchor and one draft), got {self.block_size}",
            ),
            (
                0 <= self.mask_token_id < self.vocab_size,
                f"mask_token_id: expected a row of the target's embedding, 0…{self.vocab_size - 1}, "
                f"got {self.mask_token_id}",
            ),
            (
                bool(taps) and all(0 <= i < depth for i in taps) and list(taps) == sorted(set(taps)),
                f"target_layer_ids: expected ascending layers in 0…{depth - 1}, got {list(taps)}",
            ),
            (
                len(self.layer_types) == self.num_layers and set(self.layer_types) <= {FULL, SLIDING},
                f"layer_types: expected {self.num_layers} of {FULL!r} or {SLIDING!r}, got {list(self.layer_types)}",
            ),
            (
                SLIDING not in self.layer_types or (self.sliding_window or 0) >= 1,
                f"sliding_window: sliding layers need a window of at least 1, got {self.sliding_window}",
            ),
            (
                self.num_kv_heads > 0 and self.num_heads % self.num_kv_heads == 0,
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}",
            ),
            (self.head_dim % 2 == 0, f"head_dim: expected an even number, got {self.head_dim}"),
        ]
        if self.variant == "dflash2":
            checks += self._dflash2_checks()
        return found + [message for holds, message in checks if not holds]

    def _dflash2_checks(self) -> list[tuple[bool, str]]:
        size, width = self.conv_group_size, self.hidden_size
        return [
            (
                self.conv_kernel_size >= 1,
                f"conv_kernel_size: expected at least 1, got {self.conv_kernel_size}",
            ),
            (
                size >= 1 and width % size == 0,
                f"conv_group_size: expected a divisor of hidden_size {width}, got {size}",
            ),
            (self.selector_rank >= 1, f"selector_rank: expected at least 1, got {self.selector_rank}"),
            (
                1 <= self.selector_top_k <= self.vocab_size,
                f"selector_top_k: expected 1…{self.vocab_size}, got {self.selector_top_k}",
            ),
        ]

    @property
    def num_draft_tokens(self) -> int:
        """Drafts of a block, K = S - 1; subtracted here and nowhere else."""
        return self.block_size - 1

    @property
    def layer_rules(self) -> tuple[LayerRule, ...]:
        """What each layer's slots may see."""
        return tuple(
            LayerRule(
                causal=self.is_causal if self.is_causal is not None else kind == SLIDING,
                window=self.sliding_window if kind == SLIDING else None,
            )
            for kind in self.layer_types
        )


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """Sizes of an EAGLE-3 drafter: one layer, an own head over a reduced vocabulary.

    Args:
        block_size: most draft steps plus one, as trained; the anchor is counted so that blocks compare with DFlash's.
        hidden_size, vocab_size, num_target_layers: the target's.
        num_heads, num_kv_heads, head_dim, intermediate_size, rope_theta, rms_norm_eps, max_positions: of the layer.
        target_layer_ids: tapped decoder layers of the target, 0-based outputs.
        draft_vocab_size: rows of the own head; of which tokens is a part of the weights.
    """

    block_size: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    draft_vocab_size: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-6
    max_positions: int = 8192

    def __post_init__(self) -> None:
        for problem in self._problems():
            raise ConfigError(f"drafter config: {problem}")

    def _problems(self) -> list[str]:
        at_least_one = ("hidden_size", "num_heads", "num_kv_heads", "head_dim", "intermediate_size")
        found = [
            f"{n}: expected at least 1, got {getattr(self, n)}" for n in at_least_one if getattr(self, n) < 1
        ]
        taps, depth = self.target_layer_ids, self.num_target_layers
        checks = [
            (
                self.block_size >= 2,
                f"block_size: expected at least 2 (anchor and one draft), got {self.block_size}",
            ),
            (
                1 <= self.draft_vocab_size <= self.vocab_size,
                f"draft_vocab_size: expected 1…{self.vocab_size} (the target's), got {self.draft_vocab_size}",
            ),
            (
                bool(taps) and all(0 <= i < depth for i in taps) and list(taps) == sorted(set(taps)),
                f"target_layer_ids: expected ascending layers in 0…{depth - 1}, got {list(taps)}",
            ),
            (
                self.num_kv_heads > 0 and self.num_heads % self.num_kv_heads == 0,
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}",
            ),
            (self.head_dim % 2 == 0, f"head_dim: expected an even number, got {self.head_dim}"),
        ]
        return found + [message for holds, message in checks if not holds]

    @property
    def num_draft_tokens(self) -> int:
        """Draft steps, K = S - 1."""
        return self.block_size - 1


NeuralConfig = DrafterConfig | Eagle3Config
"""The shape of a drafter with weights."""


def default_target_layer_ids(num_target_layers: int, num_taps: int) -> tuple[int, ...]:
    """Returns `num_taps` layers spread evenly from layer 1 to layer N - 3 (0-based outputs).

    Source: DFlash (arXiv 2602.06036) §3; the same rounding as z-lab's `dflash` 0.1.0. Pure.
    """
    if num_taps == 1:
        return (num_target_layers // 2,)
    span = num_target_layers - 4
    return tuple(sorted({round(1 + i * span / (num_taps - 1)) for i in range(num_taps)}))


def to_hidden_states_index(layer_id: int) -> int:
    """Returns the index of a layer's output in transformers' `hidden_states`, vLLM and speculators ids (one more)."""
    return layer_id + 1


def from_hidden_states_index(index: int) -> int:
    """Returns the 0-based layer whose output sits at `index` of transformers' `hidden_states` (one less)."""
    return index - 1
