"""DFlash: one forward pass fills a whole block, looking at the target's hidden states through injected K/V.

    context  h = hidden_norm(fc(taps))            one fused vector per committed token, the same for all layers
    layer    K = [W_K h ; W_K x]   V = [W_V h ; W_V x]   Q = W_Q x   with q/k norms and RoPE at absolute positions
    output   target's frozen head on norm(x) at slots 1 … K; slot k predicts the token at its own position

`inject` and `draft` are two calls: context keys and values are computed once per committed token and only they are
stored, so nothing is ever cropped. `forward_blocks` is the same function for many anchors of many documents at once.

Source: DFlash (arXiv 2602.06036) §3. Deviation: the reference runs context and block through one forward call and
crops its cache; same numbers (tests/test_drafter_parity.py).

Shape suffixes: N sequences, A anchors, B blocks of either, S slots, K drafts, T context tokens, R rows, D hidden,
H heads, G kv heads, E head dim, V tokens that may be drafted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar, Self

import torch
from torch import nn

from paceline.core.attention import attend_grouped, grouped_mask
from paceline.core.block import slot_positions
from paceline.core.errors import IncompatiblePairError
from paceline.core.product import Product, linear
from paceline.core.recorder import Recorder, upload
from paceline.core.sampling import Law
from paceline.core.tree import grow
from paceline.core.types import Proposal
from paceline.drafter.attention import attend_blocks, attend_one
from paceline.drafter.base import Blocks, Heads, NeuralDrafter
from paceline.drafter.chances import chosen_log_probs, likely_chain
from paceline.drafter.config import DrafterConfig
from paceline.drafter.context import ContextKV
from paceline.drafter.layers import Attention, Layer, Projection, RMSNorm, Rope
from paceline.drafter.slots import ContextSlots, Frame


class DFlash(NeuralDrafter):
    """A DFlash v1 drafter."""

    config: DrafterConfig
    layer_class: ClassVar[type[Layer]] = Layer

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = Projection(config.hidden_size * len(config.target_layer_ids), config.hidden_size)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(self.layer_class(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self._heads: Heads | None = None
        self._head: Product | None = None
        self._token_ids: torch.Tensor | None = None
        self._slots: ContextSlots | None = None

    # What an engine needs --------------------------------------------------------------------------------------------

    @property
    def is_causal(self) -> bool:
        """Whether a slot sees only slots before it, so that a shorter block says the same about its slots."""
        return all(rule.causal for rule in self.config.layer_rules)

    def bind(self, heads: Heads, token_ids: torch.Tensor | None = None) -> Self:
        """Borrows the target's embedding and head, and prepacks the weights for inference. Mutates: self.

        Args:
            token_ids: (V',) the only tokens to draft, so that the head has V' rows; `None` drafts any token.

        Raises:
            IncompatiblePairError: the target's embedding is of another size.
        """
        sizes, expected = tuple(heads.embed_weight.shape), (self.config.vocab_size, self.config.hidden_size)
        if sizes != expected:
            raise IncompatiblePairError(
                f"the drafter was made for an embedding of {expected[0]} × {expected[1]}, the target's is {sizes[0]} × "
                f"{sizes[1]}, so its mask {self.config.mask_token_id} may mean nothing there; hint: use its own target"
            )
        self._heads, self._head, self._token_ids = heads, heads.lm_head, None
        if token_ids is not None:
            self._token_ids = token_ids.to(heads.head_weight.device, torch.long)
            self._head = linear(heads.head_weight[self._token_ids])
        for module in self.modules():
            if isinstance(module, Projection):
                module.freeze()
        return self.eval().requires_grad_(False)

    def open(self, capacity: int) -> ContextKV:
        """Returns an empty context with room for `capacity` tokens."""
        c = self.config
        if self._slots is not None:
            return self._slots.open(capacity)
        return ContextKV(c.num_layers, c.num_kv_heads, c.head_dim, capacity, self.fc.weight)

    def record(self, recorder: Recorder | None) -> None:
        """Lets `recorder` run the drafts of contexts that are opened from now on. Mutates: self."""
        c, like = self.config, self.fc.weight
        sizes = c.num_layers, c.num_kv_heads, c.head_dim
        self._slots = None if recorder is None else ContextSlots(sizes, c.block_size, like, self, recorder)

    def fork(self, context: ContextKV, length: int, capacity: int) -> ContextKV:
        """Returns a copy of a context's first rows (see `Forkable`); windows take them all, so none is ever gone."""
        return context.fork(length, capacity)

    @torch.inference_mode()
    def inject(
        self,
        contexts: Sequence[ContextKV],
        hidden: Sequence[torch.Tensor],
        tokens: Sequence[Sequence[int]] = (),
    ) -> None:
        """Extends each context by its rows of tapped hidden states (rows, taps · D). Mutates: the contexts.

        Args:
            tokens: what the rows' tokens are; not looked at, the hidden states say it all.
        """
        counts = [rows.shape[0] for rows in hidden]
        positions = torch.cat(
            [torch.arange(c.length, c.length + n) for c, n in zip(contexts, counts, strict=True)]
        ).to(self.fc.weight.device)
        keys, values = self._context_kv(torch.cat(list(hidden)), positions)
        pieces = zip(
            contexts, torch.stack(keys).split(counts, 1), torch.stack(values).split(counts, 1), strict=True
        )
        for context, key, value in pieces:
            context.append(key, value)

    @torch.inference_mode()
    def draft(
        self,
        anchors: Sequence[int],
        contexts: Sequence[ContextKV],
        num_draft_tokens: int,
        laws: Sequence[Law] | None = None,
    ) -> list[Proposal]:
        """Returns a chain of `num_draft_tokens` best guesses behind each anchor. Leaves contexts as they are.

        A block that sees itself whole is another function at another width, so it is drafted at the width it was
        trained for and cut: a sequence's drafts do not depend on who travels with it.
        """
        width = num_draft_tokens if self.is_causal else self.config.num_draft_tokens
        chains = self._chains(anchors, contexts, width, laws)
        return [chain.front(num_draft_tokens) for chain in chains]

    def _chains(
        self,
        anchors: Sequence[int],
        contexts: Sequence[ContextKV],
        width: int,
        laws: Sequence[Law] | None,
    ) -> list[Proposal]:
        """Returns the best guess at each of `width` slots."""
        guesses_NKV = self._guesses(self._draft_states(anchors, contexts, width), contexts, laws)
        best_NK = guesses_NKV.argmax(dim=-1)
        log_probs_NK = chosen_log_probs(guesses_NKV.log_softmax(dim=-1), best_NK)
        packed = torch.stack(
            [log_probs_NK, self._named(best_NK).double()], dim=1
        ).tolist()  # one copy to the host
        return [likely_chain(values, tokens) for values, tokens in packed]

    @torch.inference_mode()
    def draft_trees(
        self,
        anchors: Sequence[int],
        contexts: Sequence[ContextKV],
        num_nodes: int,
        laws: Sequence[Law] | None = None,
    ) -> list[Proposal]:
        """Returns the tree of the `num_nodes` likeliest paths behind each anchor. Leaves contexts as they are."""
        depth = self.config.num_draft_tokens
        if self.is_causal:
            depth = min(depth, num_nodes)  # no tree is deeper than it has nodes
        return self._trees(anchors, contexts, depth, num_nodes, laws)

    def _trees(
        self,
        anchors: Sequence[int],
        contexts: Sequence[ContextKV],
        depth: int,
        num_nodes: int,
        laws: Sequence[Law] | None,
    ) -> list[Proposal]:
        """Returns the likeliest paths under the slots' (independent) distributions."""
        log_probs, tokens = self.candidates(anchors, contexts, depth, min(16, num_nodes), laws)
        packed = torch.stack(
            [log_probs.double(), tokens.double()], dim=1
        ).tolist()  # one copy to the host for both
        return [grow(costs, [[int(t) for t in slot] for slot in ids], num_nodes) for costs, ids in packed]

    @torch.inference_mode()
    def candidates(
        self,
        anchors: Sequence[int],
        contexts: Sequence[ContextKV],
        num_draft_tokens: int,
        width: int,
        laws: Sequence[Law] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns log-probabilities and ids of each slot's `width` best guesses, both (N, K, width).

        There are fewer where fewer tokens can be drafted. Where laws are given, the probability is that of being drawn
        as far as the drafter can tell, their noise known.
        """
        states_NKD = self._draft_states(anchors, contexts, num_draft_tokens)
        log_probs_NKV = self._guesses(states_NKD, contexts, laws).log_softmax(dim=-1)
        best, ranks = log_probs_NKV.topk(min(width, log_probs_NKV.shape[-1]), dim=-1)
        return best, self._named(ranks)

    @torch.inference_mode()
    def draft_logits(
        self, anchors: Sequence[int], contexts: Sequence[ContextKV], num_draft_tokens: int
    ) -> torch.Tensor:
        """Returns logits (N, K, V) of the block behind each anchor, slot k for the token k places further.

        V counts the tokens that `bind` allowed.
        """
        return self._logits(self._draft_states(anchors, contexts, num_draft_tokens))

    def _guesses(
        self, states_NKD: torch.Tensor, contexts: Sequence[ContextKV], laws: Sequence[Law] | None
    ) -> torch.Tensor:
        """Returns logits (N, K, V), with the noise of the laws where there are any."""
        logits_NKV = self._logits(states_NKD)
        if laws is None:
            return logits_NKV
        rows = zip(logits_NKV, contexts, laws, strict=True)
        return torch.stack(
            [law.perturb(logits_KV, c.length + 1, self._token_ids) for logits_KV, c, law in rows]
        )

    def _logits(self, states_NKD: torch.Tensor) -> torch.Tensor:
        assert self._head is not None, "bind() the drafter to a target's heads first"
        return self._head(states_NKD.flatten(0, 1)).view(*states_NKD.shape[:2], -1)

    def _named(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns the token ids of rows of the head in use."""
        return rows if self._token_ids is None else self._token_ids[rows]

    def _draft_states(
        self, anchors: Sequence[int], contexts: Sequence[ContextKV], num_draft_tokens: int
    ) -> torch.Tensor:
        """Returns normed states (N, K, D) of the slots behind each anchor."""
        assert self._heads is not None, "bind() the drafter to a target's heads first"
        device, rules = self.fc.weight.device, self.config.layer_rules
        frame = None if self._slots is None else self._slots.frame(contexts, num_draft_tokens + 1)
        if frame is not None:
            return self._replayed(frame, anchors, contexts)
        ids_NS = self._block_ids(torch.tensor(anchors, device=device), num_draft_tokens + 1)
        starts_N = torch.tensor([c.length for c in contexts], device=device)
        positions_NS = slot_positions(starts_N, num_draft_tokens + 1)
        x_NSD = self._heads.embed(ids_NS).to(self.fc.weight.dtype)
        rope = self._rope(positions_NS.flatten(), x_NSD.dtype)

        def attend(index: int, normed_NSD: torch.Tensor) -> torch.Tensor:
            q, k, v = (rows.transpose(1, 2) for rows in self._block_qkv(index, normed_NSD, rope))
            rule = rules[index]
            attended = [
                attend_one(q[n], k[n], v[n], context.view(index, rule.window), positions_NS[n], rule)
                for n, context in enumerate(contexts)
            ]
            return torch.stack(attended).flatten(2)

        return self._drafted(x_NSD, attend)

    def _replayed(self, frame: Frame, anchors: Sequence[int], contexts: Sequence[ContextKV]) -> torch.Tensor:
        """Returns normed states (N, K, D), by a recorded pass over all slots of the frame."""
        assert self._slots is not None
        seats = self._slots.seats(contexts, frame)
        numbers = torch.zeros(2, frame.num_slots, dtype=torch.long)
        numbers[:, seats] = torch.tensor([anchors, [context.length for context in contexts]])
        picked = upload(torch.tensor(seats), self.fc.weight.device)
        run = self._slots.recorder.run
        (states_NKD,) = run(self, frame, (numbers,), lambda numbers: (self._frame_states(frame, numbers),))
        return states_NKD[picked]

    def _frame_states(self, frame: Frame, numbers_2N: torch.Tensor) -> torch.Tensor:
        """Returns normed states (N, K, D) of a block in each slot: a function of tensors on the device.

        Args:
            numbers_2N: the blocks' anchors and how many tokens are before them. Mutates: the slots' leading rows.
        """
        assert self._heads is not None and self._slots is not None
        slots, dtype = self._slots, self.fc.weight.dtype
        ids_NS = self._block_ids(numbers_2N[0], frame.width)
        positions_NS = slot_positions(numbers_2N[1], frame.width)
        rope = self._rope(positions_NS.flatten(), dtype)
        group, rules = self.config.num_heads // self.config.num_kv_heads, self.config.layer_rules
        masks = {rule: grouped_mask(frame.seen(positions_NS, rule), group, 1, dtype) for rule in set(rules)}

        def attend(index: int, normed_NSD: torch.Tensor) -> torch.Tensor:
            q_NSHE, *kv = self._block_qkv(index, normed_NSD, rope)
            kv_2NGTE = slots.lay(index, frame, kv)
            attended = attend_grouped(q_NSHE, *kv_2NGTE, masks[rules[index]])
            return attended.view(*ids_NS.shape, -1)

        return self._drafted(self._heads.embed(ids_NS).to(dtype), attend)

    # What both need --------------------------------------------------------------------------------------------------

    def _rope(self, positions: torch.Tensor, dtype: torch.dtype) -> Rope:
        return Rope(positions, self.config.rope_theta, self.config.head_dim, dtype)

    def _context_kv(
        self, hidden_RD: torch.Tensor, positions_R: torch.Tensor
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Returns every layer's context keys and values (R, G, E) from tapped rows."""
        fused = self.hidden_norm(self.fc(hidden_RD.to(self.fc.weight.dtype)))
        rope = self._rope(positions_R, fused.dtype)
        attentions = [layer.self_attn for layer in self.layers]
        return [a.keys(fused, rope) for a in attentions], [a.values(fused) for a in attentions]  # type: ignore

    def _block_ids(self, anchors_B: torch.Tensor, num_slots: int) -> torch.Tensor:
        """Returns what the slots of blocks hold, (B, S): the anchor, then masks."""
        ids_BS = torch.full((len(anchors_B), num_slots), self.config.mask_token_id, device=anchors_B.device)
        ids_BS[:, 0] = anchors_B
        return ids_BS

    def _block_qkv(
        self, index: int, normed_BSD: torch.Tensor, rope: Rope
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns a layer's queries (B, S, H, E), keys and values (B, S, G, E) of its normed slots."""
        attention: Attention = self.layers[index].self_attn  # type: ignore[assignment]
        sizes, rows_RD = normed_BSD.shape[:2], normed_BSD.flatten(0, 1)
        q, k, v = attention.queries(rows_RD, rope), attention.keys(rows_RD, rope), attention.values(rows_RD)
        return q.unflatten(0, sizes), k.unflatten(0, sizes), v.unflatten(0, sizes)

    def _drafted(
        self, x_BSD: torch.Tensor, attend: Callable[[int, torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Returns normed states (B, K, D) of the drafted slots.

        Args:
            x_BSD: what the slots hold, embedded.
            attend: layer's index and normed slots ↦ what its heads attended to, (B, S, H · E).
        """
        for index, layer in enumerate(self.layers):
            x_BSD = layer(x_BSD, partial(attend, index))
        drafted: torch.Tensor = self.norm(x_BSD)[:, 1:]
        return drafted

    # What a trainer needs --------------------------------------------------------------------------------------------

    def head(self, head_VD: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """Returns the target's own rows for `token_ids`; they stay as they are."""
        return head_VD[token_ids]

    def forward_blocks(
        self, documents: Sequence[Blocks], embed_VD: torch.Tensor, num_slots: int | None = None
    ) -> torch.Tensor:
        """Returns normed hidden states (A, K, D) at the drafted slots of all documents' blocks, in order.

        The same function as `inject` of everything before an anchor, then `draft` behind it.
        """
        slots = num_slots or self.config.block_size
        lengths = [d.hidden.shape[0] for d in documents]
        context_positions = torch.cat([torch.arange(n, device=embed_VD.device) for n in lengths])
        keys, values = self._context_kv(torch.cat([d.hidden for d in documents]), context_positions)
        positions_AS = slot_positions(torch.cat([d.anchors for d in documents]), slots)
        x_ASD = embed_VD[self._block_ids(torch.cat([d.block_ids[:, 0] for d in documents]), slots)]
        rope = self._rope(positions_AS.flatten(), x_ASD.dtype)
        counts, rules = [len(d.anchors) for d in documents], self.config.layer_rules

        def attend(index: int, normed_ASD: torch.Tensor) -> torch.Tensor:
            q, k, v = self._block_qkv(index, normed_ASD, rope)
            blocks = zip(
                q.split(counts),
                k.split(counts),
                v.split(counts),
                keys[index].split(lengths),
                values[index].split(lengths),
                positions_AS.split(counts),
                strict=True,
            )
            return torch.cat([attend_blocks(rules[index], *block) for block in blocks])

        return self._drafted(x_ASD, attend)
