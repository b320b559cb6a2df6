"""EAGLE-3: one decoder layer that drafts token by token, from the target's features first and then from its own.

    row t    token x_{t+1} and feature g_t = fc(taps of token t), at position t
    layer    q, k, v of [norm(embedding) ; norm(feature)]; the residual stream is the feature itself; SwiGLU
    output   an own head over a reduced vocabulary on norm(h_t): the token at t + 2
    step     the next row takes h_t as its feature and the drafted token's embedding

A row needs the token behind its feature, so the newest feature waits in the context until the anchor is known: it is
the first row of every draft, and joins the context at the next `inject`. What was drafted is never injected; rows of
accepted drafts are computed again, from the target's features.

`forward_blocks` is training-time test in blocks: the same steps behind many anchors at once, fed with the true tokens.
It equals the sequence-wide unroll of the paper (tests/test_eagle3.py).

Source: EAGLE-3 (arXiv 2503.01840) §3; the tree is EAGLE-2's (arXiv 2406.16858) §4.

Shape suffixes: N sequences, A anchors, S slots, K steps, W rows of a level, C children, R rows, D hidden, G kv heads,
E head dim, V draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch

from paceline.core.errors import ConfigError, IncompatiblePairError
from paceline.core.product import Product, linear
from paceline.core.sampling import Law
from paceline.core.types import Proposal
from paceline.drafter.base import Blocks, Heads, NeuralDrafter
from paceline.drafter.config import Eagle3Config
from paceline.drafter.context import ContextKV
from paceline.drafter.layers import Projection, RMSNorm, Rope
from paceline.drafter.midlayer import Midlayer, attend, attend_blocks

TREE_WIDTH = 10
"""Nodes of a level that are expanded, and children of each, as in EAGLE-2."""


@dataclass(slots=True)
class Eagle3Context:
    """What is known of one sequence.

    Args:
        rows: keys and values of the tokens whose next token was injected too.
        features: (capacity, D) of all tokens, since any may be the newest one of a fork.
        length: committed tokens that were injected.
    """

    rows: ContextKV
    features: torch.Tensor
    length: int = 0

    @property
    def waiting(self) -> torch.Tensor:
        """The feature (1, D) of the newest token, whose next token is the anchor; (0, D) before the first one."""
        return self.features[max(0, self.length - 1) : self.length]

    def append(self, features: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Adds tokens' features (tokens, D), and rows (rows, G, E) of all but the newest token. Mutates: self."""
        self.rows.append(keys[None], values[None])
        self.features[self.length : self.length + len(features)] = features
        self.length += len(features)

    def fork(self, length: int, capacity: int) -> Eagle3Context:
        """Returns a context with room for `capacity` tokens that knows the first `length`, at least 1. Pure."""
        features = self.features.new_empty(capacity, self.features.shape[1])
        features[:length] = self.features[:length]
        return Eagle3Context(self.rows.fork(length - 1, capacity), features, length)


class Eagle3(NeuralDrafter):
    """An EAGLE-3 drafter. Its head is zero until `start` says which tokens it shall learn."""

    config: Eagle3Config
    d2t: torch.Tensor
    t2d: torch.Tensor

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.config = config
        self.fc = Projection(config.hidden_size * len(config.target_layer_ids), config.hidden_size)
        self.midlayer = Midlayer(config)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = Projection(config.hidden_size, config.draft_vocab_size)
        self.lm_head.weight.data.zero_()
        if config.draft_vocab_size < config.vocab_size:
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
            self.register_buffer("t2d", torch.arange(config.vocab_size) < config.draft_vocab_size)
        self._heads: Heads | None = None
        self._head: Product | None = None
        self._token_ids = torch.empty(0, dtype=torch.long)

    # What it can say -------------------------------------------------------------------------------------------------

    @property
    def token_ids(self) -> torch.Tensor:
        """The tokens that the head's rows stand for, (V,) ascending."""
        rows = torch.arange(self.config.draft_vocab_size, device=self.lm_head.weight.device)
        return rows + self.d2t if self.config.draft_vocab_size < self.config.vocab_size else rows

    @property
    def learned_ids(self) -> torch.Tensor | None:
        """These tokens, once the head has learned them."""
        return self.token_ids if self.lm_head.weight.any() else None

    @torch.no_grad()
    def start(self, head_VD: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Makes `token_ids` the vocabulary and the target's rows the head, where it has none yet. Mutates: self.

        Raises:
            ConfigError: another number of tokens than the config says, or others than it has learned.
        """
        config = self.config
        if len(token_ids) != config.draft_vocab_size:
            raise ConfigError(
                f"draft vocabulary: expected {config.draft_vocab_size} tokens, as the drafter's head has rows, got "
                f"{len(token_ids)}"
            )
        ids = token_ids.to(self.lm_head.weight.device, torch.long)
        if self.learned_ids is not None:
            if not torch.equal(ids, self.learned_ids):
                raise ConfigError(
                    "draft vocabulary: expected the tokens that this drafter's head has learned, got others; hint: "
                    "train on with the same draft vocabulary, or begin a new drafter"
                )
            return
        if config.draft_vocab_size < config.vocab_size:
            self.d2t.copy_(ids - torch.arange(len(ids), device=ids.device))
            self.t2d.zero_()[ids] = True
        self.lm_head.weight.copy_(head_VD[ids])

    def head(self, head_VD: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """Returns the own head, which learns; `start` has made sure that `token_ids` are its tokens."""
        return self.lm_head.weight

    # What an engine needs --------------------------------------------------------------------------------------------

    @property
    def is_causal(self) -> bool:
        """Always: a step sees only those before it."""
        return True

    def bind(self, heads: Heads, token_ids: torch.Tensor | None = None) -> Self:
        """Borrows the target's embedding and prepacks the weights for inference. Mutates: self.

        Args:
            token_ids: (V',) the only tokens to draft, of those that the head knows; `None` drafts any of them.

        Raises:
            IncompatiblePairError: the target's embedding is of another size, or none of the tokens is known.
        """
        sizes, expected = tuple(heads.embed_weight.shape), (self.config.vocab_size, self.config.hidden_size)
        if sizes != expected:
            raise IncompatiblePairError(
                f"the drafter was made for an embedding of {expected[0]} × {expected[1]}, the target's is {sizes[0]} × "
                f"{sizes[1]}; hint: use its own target"
            )
        for module in self.modules():
            if isinstance(module, Projection):
                module.freeze()
        self._heads, self._head, self._token_ids = heads, self.lm_head.forward, self.token_ids
        if token_ids is not None:
            kept_V = torch.isin(self._token_ids, token_ids.to(self._token_ids.device))
            if not kept_V.any():
                raise IncompatiblePairError(
                    f"token_ids: the drafter knows none of the {len(token_ids)} tokens; hint: leave them out"
                )
            self._head, self._token_ids = linear(self.lm_head.weight[kept_V]), self._token_ids[kept_V]
        return self.eval()

    def open(self, capacity: int) -> Eagle3Context:
        """Returns an empty context with room for `capacity` tokens."""
        c, like = self.config, self.fc.weight
        rows = ContextKV(1, c.num_kv_heads, c.head_dim, capacity, like)
        return Eagle3Context(rows, like.new_empty(capacity, c.hidden_size))

    def fork(self, context: Eagle3Context, length: int, capacity: int) -> Eagle3Context:
        """Returns a copy of what a context knows of its first tokens (see `Forkable`)."""
        return context.fork(length, capacity)

    @torch.inference_mode()
    def inject(
        self,
        contexts: Sequence[Eagle3Context],
        hidden: Sequence[torch.Tensor],
        tokens: Sequence[Sequence[int]],
    ) -> None:
        """Extends each context by committed rows; the first token is what its waiting feature waited for.

        Mutates: the contexts. Arguments as for `Drafter.inject`, at least one row each.
        """
        device = self.fc.weight.device
        fused = self._fused(torch.cat(list(hidden))).split([rows.shape[0] for rows in hidden])
        features = [torch.cat([c.waiting, rows]) for c, rows in zip(contexts, fused, strict=True)]
        counts = [rows.shape[0] - 1 for rows in features]
        following = [t for ids, n in zip(tokens, counts, strict=True) for t in ids[len(ids) - n :]]
        positions = [c.rows.length + i for c, n in zip(contexts, counts, strict=True) for i in range(n)]
        keys, values = self._context_kv(
            self._embed(torch.tensor(following, dtype=torch.long, device=device)),
            torch.cat([rows[:-1] for rows in features]),
            torch.tensor(positions, device=device),
        )
        for context, *added in zip(contexts, fused, keys.split(counts), values.split(counts), strict=True):
            context.append(*added)

    @torch.inference_mode()
    def draft(
        self,
        anchors: Sequence[int],
        contexts: Sequence[Eagle3Context],
        num_draft_tokens: int,
        laws: Sequence[Law] | None = None,
    ) -> list[Proposal]:
        """Returns a chain of the best guess behind each guess: the tree of width one. Leaves contexts as they are."""
        return self._trees(anchors, contexts, num_draft_tokens, num_draft_tokens, 1, laws)

    @torch.inference_mode()
    def draft_trees(
        self,
        anchors: Sequence[int],
        contexts: Sequence[Eagle3Context],
        num_nodes: int,
        laws: Sequence[Law] | None = None,
    ) -> list[Proposal]:
        """Returns the `num_nodes` likeliest paths of EAGLE-2's dynamic tree. Leaves contexts as they are.

        Nodes come in order of their path's probability, so any front part is the best smaller tree: a tree of fewer
        nodes is never deeper or wider than it has nodes, and so expands what this one expands.
        """
        depth = min(self.config.num_draft_tokens, num_nodes)
        return self._trees(anchors, contexts, num_nodes, depth, min(TREE_WIDTH, num_nodes), laws)

    def _trees(
        self,
        anchors: Sequence[int],
        contexts: Sequence[Eagle3Context],
        num_nodes: int,
        depth: int,
        width: int,
        laws: Sequence[Law] | None,
    ) -> list[Proposal]:
        """Returns trees, level by level: of all children of a level the best `width` are expanded.

        Scores are log-probabilities of paths. All that was scored stands for election, expanded or not.
        """
        unroll = Unroll(self, contexts, 1 + (depth - 1) * width)
        tokens_NW = torch.tensor(anchors, device=self.fc.weight.device)[:, None]
        parents_NW = rows_NW = torch.zeros_like(tokens_NW)  # rows: 0 the anchor, then i + 1 of candidate i
        scores_NW = torch.zeros_like(tokens_NW, dtype=torch.float64)
        levels: list[torch.Tensor] = []
        num_rows = 1
        for level in range(depth):
            logits_NWV = unroll.step(tokens_NW, parents_NW)
            log_probs_NWV = self._perturbed(logits_NWV, contexts, level, laws).log_softmax(dim=-1)
            best_NWC, ranks_NWC = log_probs_NWV.topk(min(width, log_probs_NWV.shape[-1]), dim=-1)
            scores_NR = (scores_NW[..., None] + best_NWC.double()).flatten(1)
            tokens_NR = self._token_ids[ranks_NWC].flatten(1)
            owners_NR = rows_NW[..., None].expand_as(best_NWC).flatten(1)
            levels.append(torch.stack([scores_NR, tokens_NR, owners_NR]))
            scores_NW, chosen_NW = scores_NR.topk(min(width, scores_NR.shape[1]), dim=-1)
            tokens_NW, rows_NW = tokens_NR.gather(1, chosen_NW), num_rows + chosen_NW
            parents_NW = chosen_NW // best_NWC.shape[-1]
            num_rows += scores_NR.shape[1]
        return _elected(torch.cat(levels, dim=-1), num_nodes)

    def _perturbed(
        self,
        logits_NWV: torch.Tensor,
        contexts: Sequence[Eagle3Context],
        level: int,
        laws: Sequence[Law] | None,
    ) -> torch.Tensor:
        """Returns logits with the noise of the laws where there are any; all rows of a level draft one position."""
        if laws is None:
            return logits_NWV
        return torch.stack(
            [
                torch.cat([law.perturb(row[None], c.length + 1 + level, self._token_ids) for row in rows_WV])
                for rows_WV, c, law in zip(logits_NWV, contexts, laws, strict=True)
            ]
        )

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Returns logits (R, V) of the layer's outputs (R, D) over the tokens that `bind` allowed."""
        assert self._head is not None, "bind() the drafter to a target's heads first"
        return self._head(self.norm(states))

    # What both need --------------------------------------------------------------------------------------------------

    def _embed(self, ids: torch.Tensor) -> torch.Tensor:
        assert self._heads is not None, "bind() the drafter to a target's heads first"
        return self._heads.embed(ids).to(self.fc.weight.dtype)

    def _fused(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        fused: torch.Tensor = self.fc(hidden_RD.to(self.fc.weight.dtype))
        return fused

    def rope(self, positions_R: torch.Tensor) -> Rope:
        """Returns the rotation of rows at these positions."""
        return Rope(positions_R, self.config.rope_theta, self.config.head_dim, self.fc.weight.dtype)

    def _context_kv(
        self, embeddings_RD: torch.Tensor, features_RD: torch.Tensor, positions_R: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns keys and values (R, G, E) of context rows."""
        if not len(features_RD):  # a lone token has no next one yet, and packed products want rows
            empty = features_RD.new_empty(0, self.config.num_kv_heads, self.config.head_dim)
            return empty, empty
        rows = self.midlayer.rows(embeddings_RD, features_RD)
        return self.midlayer.keys(rows, self.rope(positions_R)), self.midlayer.values(rows)

    # What a trainer needs --------------------------------------------------------------------------------------------

    def forward_blocks(
        self, documents: Sequence[Blocks], embed_VD: torch.Tensor, num_slots: int | None = None
    ) -> torch.Tensor:
        """Returns normed states (A, K, D) of the steps behind all anchors, in order; anchors must be at 1 or later.

        The same function as `inject` of everything before an anchor, then steps that take the true tokens.
        """
        lengths = [d.hidden.shape[0] - 1 for d in documents]  # the last row's next token is no context's
        counts = [len(d.anchors) for d in documents]
        fused = self._fused(torch.cat([d.hidden for d in documents])).split([n + 1 for n in lengths])
        positions = torch.cat([torch.arange(n, device=embed_VD.device) for n in lengths])
        following = embed_VD[torch.cat([d.token_ids[1:] for d in documents])]
        keys, values = self._context_kv(following, torch.cat([rows[:-1] for rows in fused]), positions)
        context = list(zip(keys.split(lengths), values.split(lengths), strict=True))

        anchors_A = torch.cat([d.anchors for d in documents])
        block_ids_AS = torch.cat([d.block_ids for d in documents])
        features = torch.cat([rows[d.anchors - 1] for rows, d in zip(fused, documents, strict=True)])
        block_keys, block_values, states = list[torch.Tensor](), list[torch.Tensor](), list[torch.Tensor]()
        for step in range((num_slots or self.config.block_size) - 1):
            rope = self.rope(anchors_A - 1 + step)
            rows = self.midlayer.rows(embed_VD[block_ids_AS[:, step]], features)
            block_keys.append(self.midlayer.keys(rows, rope))
            block_values.append(self.midlayer.values(rows))
            blocks = zip(
                self.midlayer.queries(rows, rope).split(counts),
                torch.stack(block_keys, dim=1).split(counts),
                torch.stack(block_values, dim=1).split(counts),
                context,
                (anchors_A - 1).split(counts),
                strict=True,
            )
            features = self.midlayer.finish(features, torch.cat([attend_blocks(*block) for block in blocks]))
            states.append(features)
        out: torch.Tensor = self.norm(torch.stack(states, dim=1))
        return out


class Unroll:
    """Draft steps of several sequences at once: what was drafted behind each context, which stays as it is.

    Args:
        drafter: whose steps, bound.
        contexts: of the sequences, at least one token each.
        num_rows: most rows that all steps will have, of each sequence.
    """

    def __init__(self, drafter: Eagle3, contexts: Sequence[Eagle3Context], num_rows: int) -> None:
        self._drafter = drafter
        self._scratch = [_with_room(context.rows, num_rows) for context in contexts]
        self._features_NWD = torch.stack([context.waiting for context in contexts])
        starts = [context.rows.length for context in contexts]
        self._positions_N1 = torch.tensor(starts, device=self._features_NWD.device)[:, None]
        self._lineage_NWR = self._features_NWD.new_empty(len(contexts), 1, 0, dtype=torch.bool)

    def step(self, tokens_NW: torch.Tensor, parents_NW: torch.Tensor) -> torch.Tensor:
        """Returns logits (N, W, V) behind the rows of one more level. Mutates: the unroll.

        Args:
            tokens_NW: the level's tokens; first the anchors, W = 1.
            parents_NW: of each the row in the level before that drafted it.
        """
        drafter, layer = self._drafter, self._drafter.midlayer
        num_sequences, width = tokens_NW.shape
        features_RD = _rows(self._features_NWD, parents_NW).flatten(0, 1)
        itself = torch.eye(width, dtype=torch.bool, device=tokens_NW.device)
        lineage_NWR = torch.cat(
            [_rows(self._lineage_NWR, parents_NW), itself.expand(num_sequences, -1, -1)], dim=-1
        )
        rows = layer.rows(drafter._embed(tokens_NW.flatten()), features_RD)
        rope = drafter.rope(self._positions_N1.expand_as(tokens_NW).flatten())
        q, k, v = layer.queries(rows, rope), layer.keys(rows, rope), layer.values(rows)
        parts = zip(q.split(width), k.split(width), v.split(width), self._scratch, lineage_NWR, strict=True)
        out = layer.finish(features_RD, torch.cat([attend(*part) for part in parts]))
        self._features_NWD = out.view(num_sequences, width, -1)
        self._lineage_NWR, self._positions_N1 = lineage_NWR, self._positions_N1 + 1
        return drafter.logits(out).view(num_sequences, width, -1)


def _with_room(context: ContextKV, num_rows: int) -> ContextKV:
    """Returns a copy of a context with room for `num_rows` more. Pure."""
    keys, values, _ = context.view(0, None)
    groups, length, dim = keys.shape
    copy = ContextKV(1, groups, dim, length + num_rows, keys)
    copy.append(keys.transpose(0, 1)[None], values.transpose(0, 1)[None])
    return copy


def _rows(x_NWD: torch.Tensor, chosen_NW: torch.Tensor) -> torch.Tensor:
    """Returns the chosen rows of each sequence. Pure."""
    return x_NWD.gather(1, chosen_NW[..., None].expand(-1, -1, x_NWD.shape[-1]))


def _elected(candidates_3NR: torch.Tensor, num_nodes: int) -> list[Proposal]:
    """Returns the trees of the best `num_nodes` candidates, best first.

    Args:
        candidates_3NR: scores, tokens and parents' rows (0 the anchor, i + 1 candidate i), parents before children.

    A child scores at most what its parent does and stands behind it where they tie, so the elected are a tree.
    """
    order_NR = candidates_3NR[0].argsort(dim=-1, descending=True, stable=True)[:, :num_nodes]
    scores_NR, tokens_NR, owners_NR = (values.gather(1, order_NR) for values in candidates_3NR)
    packed = torch.stack([order_NR.double(), tokens_NR, owners_NR, scores_NR.exp()])
    proposals = []
    for order, tokens, owners, chances in zip(*packed.tolist(), strict=True):  # one copy to the host for all
        nodes = {0: 0} | {int(candidate) + 1: node + 1 for node, candidate in enumerate(order)}
        parents = tuple(nodes[int(owner)] for owner in owners)
        proposals.append(Proposal(tuple(map(int, tokens)), parents, tuple(chances)))
    return proposals
