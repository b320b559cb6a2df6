"""Public doubles: tiny targets and drafters, scripted drafters, and the proof that a drafter changes no text.

    target = tiny_target()
    assert_lossless(target, tiny_drafter(target), [Request("a", (1, 2, 3))])

Scripted drafters obey `drafter.base.Drafter`. Those that know a text take whole token sequences, prompt included, in
the order in which an engine admits the requests; `plain_texts` makes them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from paceline.core.errors import ConfigError
from paceline.core.sampling import Law
from paceline.core.types import EMPTY_PROPOSAL, Completion, Proposal, Request, TokenDelta
from paceline.drafter.base import Drafter
from paceline.drafter.config import FULL, DrafterConfig
from paceline.drafter.dflash import DFlash
from paceline.engine.engine import Engine
from paceline.target.base import Target, VerifyRows
from paceline.target.native import NativeTarget
from paceline.target.weights import Shape

TINY_HEAD_DIM = 8
END_TOKEN = 2
"""End-of-text id of tiny targets."""


# Tiny models ---------------------------------------------------------------------------------------------------------


def tiny_shape(
    *,
    vocab_size: int = 61,
    num_layers: int = 2,
    hidden_size: int = 32,
    max_positions: int = 128,
    architecture: str = "LlamaForCausalLM",
) -> Shape:
    """Returns the sizes of a tiny decoder: heads of 8, half as many key-value heads, an untied head. Pure."""
    num_heads = hidden_size // TINY_HEAD_DIM
    return Shape(
        architecture=architecture,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads // 2,
        head_dim=TINY_HEAD_DIM,
        intermediate_size=hidden_size * 3 // 2,
        vocab_size=vocab_size,
        rms_norm_eps=1e-6,
        rope_theta=10_000.0,
        max_positions=max_positions,
        tie_word_embeddings=False,
        eos_token_ids=(END_TOKEN,),
    )


def tiny_tensors(shape: Shape, seed: int = 0) -> dict[str, torch.Tensor]:
    """Returns random float64 weights by transformers names, large enough that every part shows in the logits.

    A Qwen2 shape gets biases on q, k and v, a Qwen3 shape norms on q and k. Pure.
    """
    rng = torch.Generator().manual_seed(seed)

    def matrix(num_out: int, num_in: int, gain: float = 1.0) -> torch.Tensor:
        scale: float = gain * num_in**-0.5
        return torch.randn(num_out, num_in, generator=rng, dtype=torch.float64) * scale

    def around(centre: float, size: int) -> torch.Tensor:
        return centre + 0.2 * torch.randn(size, generator=rng, dtype=torch.float64)

    width, mlp = shape.hidden_size, shape.intermediate_size
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    tensors = {
        "model.embed_tokens.weight": matrix(shape.vocab_size, width, width**0.5),
        "model.norm.weight": around(1.0, width),
        "lm_head.weight": matrix(shape.vocab_size, width, 3.0),
    }
    for i in range(shape.num_layers):
        layer = f"model.layers.{i}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{layer}.{norm}.weight"] = around(1.0, width)
        for name, size in (("q", queries), ("k", keys), ("v", keys)):
            tensors[f"{layer}.self_attn.{name}_proj.weight"] = matrix(size, width)
            if shape.architecture == "Qwen2ForCausalLM":
                tensors[f"{layer}.self_attn.{name}_proj.bias"] = around(0.0, size)
            if shape.architecture == "Qwen3ForCausalLM" and name != "v":
                tensors[f"{layer}.self_attn.{name}_norm.weight"] = around(1.0, shape.head_dim)
        tensors[f"{layer}.self_attn.o_proj.weight"] = matrix(width, queries)
        for name in ("gate", "up"):
            tensors[f"{layer}.mlp.{name}_proj.weight"] = matrix(mlp, width)
        tensors[f"{layer}.mlp.down_proj.weight"] = matrix(width, mlp)
    return tensors


def tiny_target(
    seed: int = 0,
    *,
    vocab_size: int = 61,
    num_layers: int = 2,
    hidden_size: int = 32,
    max_positions: int = 128,
    architecture: str = "LlamaForCausalLM",
    dtype: torch.dtype = torch.float64,
) -> NativeTarget:
    """Returns a random target; in float64 no two logits are near-ties, so laws can be tested by equality."""
    shape = tiny_shape(
        vocab_size=vocab_size,
        num_layers=num_layers,
        hidden_size=hidden_size,
        max_positions=max_positions,
        architecture=architecture,
    )
    return NativeTarget(shape, tiny_tensors(shape, seed), name="tiny", dtype=dtype)


def tiny_drafter(
    target: Target,
    block_size: int = 4,
    *,
    layer_types: tuple[str, ...] = (FULL, FULL),
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    target_layer_ids: tuple[int, ...] = (0, 1),
    seed: int = 0,
) -> DFlash:
    """Returns a random DFlash drafter of the target's width and dtype, bound to its heads."""
    spec = target.spec
    config = DrafterConfig(
        block_size=block_size,
        hidden_size=spec.hidden_size,
        num_layers=len(layer_types),
        num_heads=spec.hidden_size // TINY_HEAD_DIM,
        num_kv_heads=spec.hidden_size // TINY_HEAD_DIM // 2,
        head_dim=TINY_HEAD_DIM,
        intermediate_size=spec.hidden_size * 3 // 2,
        vocab_size=spec.vocab_size,
        target_layer_ids=target_layer_ids,
        num_target_layers=spec.num_layers,
        mask_token_id=spec.vocab_size - 1,
        layer_types=layer_types,
        sliding_window=sliding_window,
        is_causal=is_causal,
    )
    drafter = DFlash(config).to(target.device, target.dtype)
    rng = torch.Generator().manual_seed(seed)
    for parameter in drafter.parameters():
        noise = torch.randn(parameter.shape, generator=rng, dtype=torch.float64)
        random_value = 1.0 + 0.2 * noise if parameter.ndim == 1 else noise * parameter.shape[1] ** -0.5
        parameter.data.copy_(random_value)
    return drafter.bind(target.heads)


# Scripted drafters ---------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Memory:
    """The context of a scripted drafter: which sequence it is, and every row it was shown."""

    number: int
    rows: list[torch.Tensor] = field(default_factory=list)
    length: int = 0

    @property
    def hidden(self) -> torch.Tensor:
        """All injected rows (length, taps · D)."""
        return torch.cat(self.rows)


class ScriptedDrafter:
    """A drafter without weights; `guess` says what it drafts.

    Args:
        block_size: slots of a block, anchor included.
        target_layer_ids: layers to tap; their rows are remembered in `memories`, in admission order.
    """

    def __init__(self, block_size: int, target_layer_ids: tuple[int, ...] = ()) -> None:
        self.block_size, self.target_layer_ids = block_size, target_layer_ids
        self.memories: list[Memory] = []

    def open(self, capacity: int) -> Memory:
        """Returns an empty memory, numbered by admission."""
        self.memories.append(Memory(len(self.memories)))
        return self.memories[-1]

    def inject(
        self, contexts: Sequence[Memory], hidden: Sequence[torch.Tensor], tokens: Sequence[Sequence[int]]
    ) -> None:
        """Remembers rows."""
        for memory, rows in zip(contexts, hidden, strict=True):
            memory.rows.append(rows.clone())
            memory.length += rows.shape[0]

    def draft(
        self,
        anchors: Sequence[int],
        contexts: Sequence[Memory],
        num_draft_tokens: int,
        laws: Sequence[Law] | None = None,
    ) -> list[Proposal]:
        """Returns one guess for each sequence."""
        return [self.guess(memory, num_draft_tokens) for memory in contexts]

    def guess(self, memory: Memory, num_draft_tokens: int) -> Proposal:
        """Returns a proposal behind the anchor, which sits at position `memory.length`."""
        raise NotImplementedError


class RandomDrafter(ScriptedDrafter):
    """Drafts chains of random tokens and random length, none included."""

    def __init__(self, block_size: int, vocab_size: int, seed: int = 0) -> None:
        super().__init__(block_size)
        self._vocab_size, self._rng = vocab_size, random.Random(seed)

    def guess(self, memory: Memory, num_draft_tokens: int) -> Proposal:
        """Returns random tokens."""
        length = self._rng.randint(0, num_draft_tokens)
        return Proposal.chain([self._rng.randrange(self._vocab_size) for _ in range(length)])


class ConstantDrafter(ScriptedDrafter):
    """Drafts one token over and over: the end of text, or the mask."""

    def __init__(self, block_size: int, token: int) -> None:
        super().__init__(block_size)
        self._token = token

    def guess(self, memory: Memory, num_draft_tokens: int) -> Proposal:
        """Returns the token `num_draft_tokens` times."""
        return Proposal.chain([self._token] * num_draft_tokens)


class OracleDrafter(ScriptedDrafter):
    """Drafts the known text, as far as it is known.

    Args:
        texts: whole texts in admission order, prompts included.
    """

    def __init__(
        self, block_size: int, texts: Sequence[Sequence[int]], target_layer_ids: tuple[int, ...] = ()
    ) -> None:
        super().__init__(block_size, target_layer_ids)
        self._texts = texts

    def guess(self, memory: Memory, num_draft_tokens: int) -> Proposal:
        """Returns what follows the anchor."""
        return Proposal.chain(tuple(self._following(memory)[:num_draft_tokens]))

    def _following(self, memory: Memory) -> Sequence[int]:
        return self._texts[memory.number][memory.length + 1 :] if memory.number < len(self._texts) else ()


class AlwaysWrongDrafter(OracleDrafter):
    """Drafts full blocks in which no token is the known one."""

    def __init__(self, block_size: int, texts: Sequence[Sequence[int]], vocab_size: int) -> None:
        super().__init__(block_size, texts)
        self._vocab_size = vocab_size

    def guess(self, memory: Memory, num_draft_tokens: int) -> Proposal:
        """Returns the neighbours of the known tokens."""
        known = [*self._following(memory)[:num_draft_tokens], *[0] * num_draft_tokens][:num_draft_tokens]
        return Proposal.chain([(token + 1) % self._vocab_size for token in known])


class TreeDrafter(OracleDrafter):
    """Drafts random trees, twins included, in which the known text is hidden more often than not."""

    def __init__(
        self,
        block_size: int,
        texts: Sequence[Sequence[int]],
        vocab_size: int,
        *,
        target_layer_ids: tuple[int, ...] = (),
        seed: int = 0,
    ) -> None:
        super().__init__(block_size, texts, target_layer_ids)
        self._vocab_size, self._rng = vocab_size, random.Random(seed)

    def guess(self, memory: Memory, num_draft_tokens: int) -> Proposal:
        """Returns a tree of at most `num_draft_tokens` nodes."""
        known, rng = self._following(memory), self._rng
        tokens: list[int] = []
        parents: list[int] = []
        right = {0: 0}  # row → depth, where the path to the row is the known text
        for row in range(1, rng.randint(0, num_draft_tokens) + 1):
            parent = max(right) if rng.random() < 0.6 else rng.randrange(row)
            depth = right.get(parent)
            if depth is not None and depth < len(known) and rng.random() < 0.7:
                tokens.append(known[depth])
                right[row] = depth + 1
            else:
                tokens.append(rng.randrange(self._vocab_size))
            parents.append(parent)
        return Proposal(tuple(tokens), tuple(parents))


class BigramDrafter(ScriptedDrafter):
    """Drafts what the target says most often behind a token alone: right often enough to be accepted now and then.

    Args:
        target: who is asked for the table.
        block_size: slots, anchor included.
        is_tree: draft two children of the anchor, the second with a child of its own.
    """

    def __init__(self, target: Target, block_size: int = 4, *, is_tree: bool = False) -> None:
        super().__init__(block_size)
        self.table, self.is_tree = (
            [_likeliest(target, token) for token in range(target.spec.vocab_size)],
            is_tree,
        )

    def draft(
        self,
        anchors: Sequence[int],
        contexts: Sequence[Memory],
        num_draft_tokens: int,
        laws: Sequence[Law] | None = None,
    ) -> list[Proposal]:
        """Returns the table's path from each anchor."""
        return [self._path(anchor, num_draft_tokens) for anchor in anchors]

    def _path(self, anchor: int, length: int) -> Proposal:
        path = [self.table[anchor][0]]
        while len(path) < length:
            path.append(self.table[path[-1]][0])
        if not self.is_tree or length < 3:
            return Proposal.chain(path)
        second = self.table[anchor][1]
        return Proposal((path[0], second, self.table[second][0]), (0, 0, 2))


def _likeliest(target: Target, token: int) -> list[int]:
    session = target.open(1)
    (output,) = target.verify([VerifyRows(session, [token], EMPTY_PROPOSAL)])
    session.close()
    best: list[int] = output.logits[0].topk(2).indices.tolist()
    return best


# Proofs --------------------------------------------------------------------------------------------------------------


def run_checked(
    engine: Engine, requests: Sequence[Request], before_step: Callable[[int], None] = lambda _: None
) -> dict[str, Completion]:
    """Decodes requests to their end and returns the completions by id; the invariant is checked after every step.

    Args:
        before_step: told the number of the step to come, from 0; may cancel.

    Raises:
        AssertionError: an invariant does not hold, or deltas and completion disagree.
    """
    delivered: dict[str, list[TokenDelta]] = {request.id: [] for request in requests}
    try:
        for request in requests:
            engine.add(request)
        for number in range(sum(request.params.max_new_tokens for request in requests) + 1):
            before_step(number)
            if not engine.has_work:
                break
            for delta in engine.step():
                delivered[delta.request_id].append(delta)
            for sequence in engine.scheduler.running:
                sequence.check()
        assert not engine.has_work, "expected a token of every running request in each step"
    finally:
        engine.close()
    completions = {request.id: engine.take_completion(request.id) for request in requests}
    for name, completion in completions.items():
        _check_account(completion, delivered[name])
    return completions


def _check_account(completion: Completion, deltas: Sequence[TokenDelta]) -> None:
    """Checks that deltas, step records and the completion tell one story."""
    name, count = completion.request_id, len(completion.token_ids)
    assert tuple(t for delta in deltas for t in delta.token_ids) == completion.token_ids, f"{name}: deltas"
    assert sum(step.num_emitted for step in completion.steps) == max(0, count - 1), f"{name}: num_emitted"
    for step in completion.steps:
        assert 0 <= step.num_accepted <= step.num_drafted, f"{name}: {step}"
        assert 1 <= step.num_emitted <= step.num_accepted + 1, f"{name}: {step}"


def plain_texts(target: Target, requests: Sequence[Request]) -> list[Completion]:
    """Returns what the target says to each request, decoded plainly and alone.

    Raises:
        ConfigError: a sampled request without a seed, whose text nobody can repeat.
    """
    for request in requests:
        if request.params.temperature > 0 and request.params.seed is None:
            raise ConfigError(f"request {request.id!r}: expected a seed with temperature above 0, got none")
    alone = [replace(request, block_size=None) for request in requests]
    return [run_checked(Engine(target, max_sequences=1), [r])[r.id] for r in alone]


def whole(completion: Completion) -> tuple[int, ...]:
    """Returns prompt and response in one, as the scripted drafters want it. Pure."""
    return completion.prompt_ids + completion.token_ids


def assert_lossless(
    target: Target,
    drafter: Drafter,
    requests: Sequence[Request],
    *,
    max_sequences: int = 4,
    block_size: int | None = None,
) -> list[Completion]:
    """Returns the speculative completions after comparing them with plain decoding, request by request.

    Args:
        drafter: who guesses.
        requests: with ids of their own; sampled ones need a seed.
        max_sequences: how many step together; fewer than requests means continuous admission.

    Raises:
        AssertionError: a text or finish reason differs, or the invariant breaks after some step.
    """
    plain = plain_texts(target, requests)
    engine = Engine(target, drafter, max_sequences=max_sequences, block_size=block_size)
    completions = run_checked(engine, requests)
    for expected in plain:
        got = completions[expected.request_id]
        name = expected.request_id
        assert got.token_ids == expected.token_ids, (
            f"{name}: plain {expected.token_ids}, speculative {got.token_ids}"
        )
        assert got.finish_reason == expected.finish_reason, f"{name}: {got.finish_reason}"
    return [completions[request.id] for request in requests]
