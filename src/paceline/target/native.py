"""A small, fast runner for decoders of the Llama shape (Llama, SmolLM, Mistral and Qwen2/3 without sliding layers).

It exists because a serving-sized step is mostly overhead in general code. Here each layer is six calls: fused
projections are prepacked once, K/V live in static slots shared by all sequences, only the layers asked for are tapped,
and the head runs on the rows asked for.

Row invariance: every row of a pass is the same bits whatever rows travel with it, so far as the kernels allow
(`engine/runtime.py` probes that). Three habits make it so: attention runs on a multiple of `ROW_PAD` query rows, since
products of fewer take other kernels; the K/V lengths that it sees are those of `padded_length`; and it walks a tree run
by run, each run where plain decoding would put it (see `plan.py`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from paceline.core.attention import attend_grouped
from paceline.core.errors import CapacityError, CheckpointError, UnsupportedTargetError
from paceline.core.product import PACK_ROWS, Product, linear
from paceline.core.recorder import Recorder, Tensors, upload
from paceline.target.base import TargetHeads, TargetOutput, TargetSpec, VerifyRows
from paceline.target.plan import (
    KV_PAD,
    Branches,
    Layout,
    Leg,
    Plan,
    Run,
    padded_length,
    placed_rows,
    plan_pass,
    split_pass,
    walk,
    whole,
)
from paceline.target.rope import rope_table, rotate
from paceline.target.weights import Shape, read_tensors


@dataclass(slots=True)
class Layer:
    """One decoder layer: two norms and four products over fused weights."""

    input_norm: torch.Tensor
    post_norm: torch.Tensor
    qkv: Product
    out: Product
    gate_up: Product
    down: Product
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None


class NativeSession:
    """A slot of the runner's static K/V."""

    def __init__(self, target: NativeTarget, slot: int, capacity: int) -> None:
        self._target = target
        self.slot = slot
        self.capacity = capacity
        self.length = 0
        self.branches: Branches | None = None

    def keep(self, rows: Sequence[int]) -> None:
        """Commits the K/V of `rows` of the last pass (see `TargetSession.keep`)."""
        if self.branches is not None:
            self._target.place_rows(self.slot, self.length, rows, self.branches)
            self.branches = None
        self.length += len(rows)

    def close(self) -> None:
        """Gives the slot back."""
        self._target.release(self.slot)
        self.slot, self.branches = -1, None


class NativeTarget:
    """A Llama-shaped target over fused, prepacked weights and static K/V slots.

    Args:
        shape: sizes.
        tensors: weights by their transformers names, any floating dtype; not kept.
        name: how the user called it.
        dtype: arithmetic of products and activations; norms and softmax run in float32 (float64 when dtype is).
        eos_token_ids: ends of text; the config's own where empty.
        tokenizer_digest: see `TargetSpec`.
        exact: give a tree's rows the bits of plain decoding, one attention call for each of its paths. Without it a
            tree takes one call, and its branches sum their keys in another order.
    """

    def __init__(
        self,
        shape: Shape,
        tensors: dict[str, torch.Tensor],
        *,
        name: str,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        eos_token_ids: Sequence[int] = (),
        tokenizer_digest: str = "",
        exact: bool = True,
    ) -> None:
        self.exact = exact
        self.shape, self.dtype, self.device = shape, dtype, torch.device(device)
        self.spec = TargetSpec(
            name=name,
            architecture=shape.architecture,
            hidden_size=shape.hidden_size,
            num_layers=shape.num_layers,
            vocab_size=shape.vocab_size,
            max_positions=shape.max_positions,
            eos_token_ids=tuple(eos_token_ids) or shape.eos_token_ids,
            tokenizer_digest=tokenizer_digest,
        )
        self._math = torch.float64 if dtype is torch.float64 else torch.float32
        self._load(tensors)
        self._taps: tuple[int, ...] = ()
        self._recorder: Recorder | None = None
        self._slots = torch.zeros(0)
        self._capacity = 0
        self._cache: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._free: list[int] = []
        self._rope = rope_table(shape, KV_PAD, self._math, self.device)

    @classmethod
    def load(
        cls,
        folder: Path,
        *,
        name: str,
        dtype: torch.dtype,
        device: torch.device,
        eos_token_ids: Sequence[int] = (),
        tokenizer_digest: str = "",
        exact: bool = True,
    ) -> NativeTarget:
        """Returns the target stored in a transformers folder of safetensors.

        Raises:
            UnsupportedTargetError: not of this runner's shape; `hf.py` may do.
            CheckpointError: files missing or truncated.
        """
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        shape = Shape.from_config(config)
        return cls(
            shape,
            read_tensors(folder),
            name=name,
            dtype=dtype,
            device=device,
            eos_token_ids=eos_token_ids,
            tokenizer_digest=tokenizer_digest,
            exact=exact,
        )

    def _load(self, tensors: dict[str, torch.Tensor]) -> None:
        shape, taken = self.shape, set[str]()

        def take(key: str) -> torch.Tensor:
            if key not in tensors:
                raise CheckpointError(f"{self.spec.name}: tensor {key!r} expected, not in the files")
            taken.add(key)
            return tensors[key].to(self.device, self.dtype)

        def optional(key: str) -> torch.Tensor | None:
            return take(key) if key in tensors else None

        def fused(prefix: str, names: tuple[str, ...]) -> Product:
            weight = torch.cat([take(f"{prefix}.{n}.weight") for n in names])
            biases = [optional(f"{prefix}.{n}.bias") for n in names]
            present = [b for b in biases if b is not None]
            if present and len(present) != len(names):
                raise CheckpointError(f"{prefix}: biases on some of {names} only")
            return linear(weight, torch.cat(present) if present else None)

        self.layers: list[Layer] = []
        for i in range(shape.num_layers):
            layer = f"model.layers.{i}"
            self.layers.append(
                Layer(
                    input_norm=take(f"{layer}.input_layernorm.weight"),
                    post_norm=take(f"{layer}.post_attention_layernorm.weight"),
                    qkv=fused(f"{layer}.self_attn", ("q_proj", "k_proj", "v_proj")),
                    out=fused(f"{layer}.self_attn", ("o_proj",)),
                    gate_up=fused(f"{layer}.mlp", ("gate_proj", "up_proj")),
                    down=fused(f"{layer}.mlp", ("down_proj",)),
                    q_norm=optional(f"{layer}.self_attn.q_norm.weight"),
                    k_norm=optional(f"{layer}.self_attn.k_norm.weight"),
                )
            )
        self.norm = take("model.norm.weight")
        self.embed_weight = take("model.embed_tokens.weight")
        tied = shape.tie_word_embeddings and "lm_head.weight" not in tensors
        self.head_weight = self.embed_weight if tied else take("lm_head.weight")
        self._head = linear(self.head_weight)
        on_cpu = self.device.type == "cpu"
        self._max_rows = PACK_ROWS if on_cpu and self.dtype is torch.bfloat16 else None
        self._min_rows = 1 if _keeps_lone_rows(self._head, self.embed_weight) else 2
        unknown = sorted(k for k in set(tensors) - taken if not k.endswith("rotary_emb.inv_freq"))
        if unknown:
            raise UnsupportedTargetError(
                f"the native runner knows no tensors {unknown[:4]}; hint: backend='hf'"
            )

    @property
    def heads(self) -> TargetHeads:
        """Embedding and head for a drafter."""
        return TargetHeads(
            embed=lambda ids: F.embedding(ids, self.embed_weight),
            lm_head=lambda x: self._head(x.to(self.dtype)).to(self._math),
            embed_weight=self.embed_weight,
            head_weight=self.head_weight,
        )

    @property
    def max_part_rows(self) -> int | None:
        """See `Target`."""
        return self._max_rows

    def tap(self, layer_ids: Sequence[int]) -> None:
        """Asks for the outputs of these decoder layers (0-based), in this order."""
        for i in layer_ids:
            if not 0 <= i < self.shape.num_layers:
                raise UnsupportedTargetError(
                    f"target layer id {i}: expected 0…{self.shape.num_layers - 1} for {self.spec.name}"
                )
        self._taps = tuple(layer_ids)

    def record(self, recorder: Recorder | None) -> None:
        """Lets `recorder` run the passes that fit a frame; `None` runs them as they are. Mutates: self."""
        self._recorder = recorder

    # K/V slots ---------------------------------------------------------------------------------------------------

    def open(self, capacity: int) -> NativeSession:
        """Returns an empty session with room for `capacity` tokens; grows the slots when needed."""
        if capacity > self.shape.max_positions:
            raise CapacityError(
                f"{capacity} tokens asked for, {self.spec.name} has {self.shape.max_positions} positions; "
                "hint: shorten the prompt or max_new_tokens"
            )
        if not self._free or capacity > self._capacity:
            self._grow(capacity)
        self._free.sort(reverse=True)
        return NativeSession(self, self._free.pop(), capacity)

    def fork(self, session: NativeSession, length: int, capacity: int) -> NativeSession:
        """Returns a new session with copies of another's first `length` tokens, bit for bit (see `Target.fork`)."""
        forked = self.open(capacity)
        for pair in self._cache:
            for cached in pair:
                cached[forked.slot, :length] = cached[session.slot, :length]
        forked.length = length
        return forked

    def release(self, slot: int) -> None:
        """Frees a slot; -1 is already free."""
        if slot >= 0:
            self._free.append(slot)

    def _grow(self, capacity: int) -> None:
        num_slots = self._cache[0][0].shape[0] if self._cache else 0
        wanted = num_slots if self._free else max(1, num_slots * 2)
        longest = self._capacity
        if capacity > longest:  # by at least half again, so that growing many times costs little
            longest = min(max(capacity, longest * 3 // 2), self.shape.max_positions)
        room = padded_length(longest + PACK_ROWS)
        shape = (wanted, room, self.shape.num_kv_heads, self.shape.head_dim)
        if self._recorder is not None:
            self._recorder.forget(self)
        cache = []
        for i in range(self.shape.num_layers):
            pair = (self._blank(shape), self._blank(shape))
            if self._cache:
                for new, old in zip(pair, self._cache[i], strict=True):
                    new[:num_slots, : old.shape[1]] = old
            cache.append(pair)
        if room > self._rope[0].shape[0]:
            self._rope = rope_table(self.shape, room, self._math, self.device)
        self._cache, self._capacity = (
            cache,
            longest,
        )  # only now: whatever failed before, a later call begins anew
        self._free.extend(range(num_slots, wanted))

    def _blank(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def place_rows(self, slot: int, length: int, rows: Sequence[int], branches: Branches) -> None:
        """Writes the K/V of the kept `rows` (a tree's accepted path) behind `length`, where others lie there."""
        agree = [row == placed for row, placed in zip(rows, branches.placed, strict=False)]
        first = agree.index(False) if False in agree else len(agree)
        if first == len(rows):
            return
        source = torch.tensor([branches.rows[row] for row in rows[first:]], device=self.device)
        for pair, fresh in zip(self._cache, branches.kv[:, :, source], strict=True):
            for cached, new in zip(pair, fresh, strict=True):
                cached[slot, length + first : length + len(rows)] = new

    # The pass ----------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def verify(self, batch: Sequence[VerifyRows]) -> list[TargetOutput]:
        """Runs one pass over all parts (see `Target.verify`).

        Where only passes of up to `PACK_ROWS` rows keep their bits, a wider one is cut at part boundaries.
        """
        self._check_room(batch)
        walks = [walk(part) if self.exact else whole(part) for part in batch]
        order = sorted(range(len(batch)), key=lambda n: _slot(batch[n]))  # so attention reads slots in place
        outputs: dict[int, TargetOutput] = {}
        for chunk in split_pass(order, walks, self._max_rows):
            done = self._run([batch[n] for n in chunk], [walks[n] for n in chunk])
            outputs.update(zip(chunk, done, strict=True))
        return [outputs[n] for n in range(len(batch))]

    def _check_room(self, batch: Sequence[VerifyRows]) -> None:
        for part in batch:
            session = part.session
            if session.length + part.num_rows > session.capacity:
                raise CapacityError(
                    f"{session.length} + {part.num_rows} rows do not fit the session's {session.capacity}"
                )

    def _run(self, batch: Sequence[VerifyRows], walks: Sequence[Sequence[Run]]) -> list[TargetOutput]:
        plan = plan_pass(batch, walks, [_slot(part) for part in batch], self._layout())
        wanted = [
            rows[-1:] if part.last_row_only else rows for part, rows in zip(batch, plan.rows, strict=True)
        ]
        # what is uploaded is uploaded before the pass, so that nothing waits for it
        picked, kept = self._pick(wanted, plan), self._pick(plan.rows, plan)
        has_trees = not all(part.proposal.is_chain for part in batch)
        x, hidden, fresh = self._pass(plan, has_trees=has_trees)
        if plan.frame is not None and has_trees:
            fresh = fresh.clone()  # the next pass writes where it lies
        for part, runs, rows in zip(batch, walks, plan.rows, strict=True):
            is_chain = part.proposal.is_chain  # its rows lie where they may stay
            _session(part).branches = None if is_chain else Branches(fresh, rows, placed_rows(runs))
        logits = self._head(self._norm(x[picked], self.norm)).to(self._math)
        pieces = logits.split([len(rows) for rows in wanted])
        hidden_rows = hidden[kept].split([len(rows) for rows in plan.rows])
        return [TargetOutput(*both) for both in zip(pieces, hidden_rows, strict=True)]

    def _layout(self) -> Layout:
        shape, room = self.shape, self._cache[0][0].shape[1]
        return Layout(shape.num_heads // shape.num_kv_heads, room, self._min_rows, self._recorder is not None)

    def _pick(self, parts: Sequence[list[int]], plan: Plan) -> slice | torch.Tensor:
        """Returns an index of these rows of a pass, one that copies where the pass may be recorded."""
        rows = [row for part in parts for row in part]
        if plan.frame is None and rows == list(range(rows[0], rows[0] + len(rows))):
            return slice(rows[0], rows[0] + len(rows))
        return upload(torch.tensor(rows), self.device)

    def _pass(self, plan: Plan, *, has_trees: bool) -> Tensors:
        """Returns what `forward` does, replayed where the pass fits a frame and there is a recorder."""
        if plan.frame is None or self._recorder is None:
            return self.forward(
                [leg.over(*(upload(t, self.device) for t in leg.tensors)) for leg in plan.legs], has_trees
            )
        (leg,) = plan.legs
        return self._recorder.run(
            self,
            ("verify", plan.frame, has_trees, self._taps),
            leg.tensors,
            lambda *tensors: self.forward([leg.over(*tensors)], has_trees),
        )

    def forward(self, legs: Sequence[Leg], has_trees: bool) -> Tensors:
        """Runs the layers over the rows of all legs: a function of tensors on the device, whatever they hold.

        Returns:
            (R, D) the last layer's output, (R, taps · D) that of the tapped layers, and where there are trees all
            layers' keys and values (layers, 2, R, G, E). Mutates: the cache.
        """
        layout = self._layout()
        numbers = torch.cat([leg.numbers.flatten(1) for leg in legs], dim=1)
        x = F.embedding(numbers[0], self.embed_weight)
        cos, sin = (table[numbers[1]][:, None] for table in self._rope)
        masks = [leg.mask(layout, self.dtype) for leg in legs]
        tapped: dict[int, torch.Tensor] = {}
        fresh: list[torch.Tensor] = []
        for i, layer in enumerate(self.layers):
            q, k, v = self._project(layer, x, cos, sin)
            x = x + layer.out(self._attend(self._cache[i], legs, masks, (q, k, v)))
            gate, up = layer.gate_up(self._norm(x, layer.post_norm)).chunk(2, dim=-1)
            x = x + layer.down(F.silu(gate) * up)
            if has_trees:
                fresh.append(torch.stack([k, v]))
            if i in self._taps:
                tapped[i] = x
        hidden = torch.cat([tapped[i] for i in self._taps], dim=-1) if self._taps else x[:, :0]
        return x, hidden, torch.stack(fresh) if has_trees else x[:0]

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self.shape.rms_norm_eps)

    def _project(
        self, layer: Layer, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns queries (R, H, E), keys and values (R, G, E) of all rows."""
        heads, groups, dim = self.shape.num_heads, self.shape.num_kv_heads, self.shape.head_dim
        qkv = layer.qkv(self._norm(x, layer.input_norm)).view(-1, heads + 2 * groups, dim)
        if layer.q_norm is None or layer.k_norm is None:
            q, k = rotate(qkv[:, : heads + groups], cos, sin).split((heads, groups), dim=1)
        else:
            q, k = qkv[:, :heads], qkv[:, heads : heads + groups]
            q, k = (rotate(self._norm(y, w), cos, sin) for y, w in ((q, layer.q_norm), (k, layer.k_norm)))
        return q, k, qkv[:, heads + groups :]

    def _attend(
        self,
        cache: tuple[torch.Tensor, torch.Tensor],
        legs: Sequence[Leg],
        masks: Sequence[torch.Tensor],
        qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """Returns what each row's heads saw (R, H · E). Mutates: the cache."""
        (keys, values), (q, k, v) = cache, qkv
        all_keys, all_values = keys.flatten(0, 1), values.flatten(0, 1)
        seen = []
        for leg, mask in zip(legs, masks, strict=True):
            places, rows = leg.numbers[2].flatten(), leg.rows
            all_keys.index_copy_(0, places, k[rows])
            all_values.index_copy_(0, places, v[rows])
            k_leg, v_leg = (cached[leg.slots, : leg.kv_length].transpose(1, 2) for cached in cache)
            seen.append(attend_grouped(q[rows].unflatten(0, leg.size), k_leg, v_leg, mask))
        return torch.cat(seen) if len(seen) > 1 else seen[0]


def _slot(part: VerifyRows) -> int:
    return _session(part).slot


def _session(part: VerifyRows) -> NativeSession:
    if not isinstance(part.session, NativeSession) or part.session.slot < 0:
        raise UnsupportedTargetError(f"expected an open session of the native runner, got {part.session!r}")
    return part.session


def _keeps_lone_rows(product: Product, rows: torch.Tensor) -> bool:
    """Whether a one-row product gives the bits of the same row in a two-row product. Where not, rows go in pairs."""
    return torch.equal(product(rows[:1]), product(rows[:2])[:1])
