"""DFlash 2: convolutions along the block, and a selector that walks each slot's likeliest tokens.

    conv      y[t, c] = Σ_τ (base[τ, c] + dynamic[t, τ, group of c]) · x[t - τ, c]      nothing before slot 0
              one before and one behind each attention and each MLP; the dynamic parts of both are one projection of
              the sub-layer's normed input
    selector  score(a, b) = logit(b) + ⟨A[a] ⊙ W h, B[b]⟩      for each candidate b of a slot, a the token before it

A block drafter guesses its slots independently; the selector makes their likeliest tokens a lattice, whose paths are
walked (a chain) or grown (a tree). Candidates are the likeliest tokens of a slot, the laws' noise included where there
are any: what the law will draw is then more often among them.

Source: DFlash 2 as in z-lab's `dflash` 0.1.0. Deviation: all scores of a lattice are computed at once, and with
temperature the law's own noise chooses instead of another one; same numbers without (tests/test_drafter_parity.py).

Shape suffixes: N sequences, A anchors, B blocks, S slots, K drafts, C candidates, P predecessors, D hidden, G groups of
channels, R rank of the selector, V tokens that may be drafted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from torch import nn

from paceline.core.errors import ConfigError
from paceline.core.sampling import Law
from paceline.core.tree import grow_lattice
from paceline.core.types import Proposal
from paceline.drafter.chances import chosen_log_probs, likely_chain
from paceline.drafter.config import DFLASH2_FIELDS, DrafterConfig
from paceline.drafter.context import ContextKV
from paceline.drafter.dflash import DFlash
from paceline.drafter.layers import Layer, Projection, random_weight


class BlockConv(nn.Module):
    """A dynamic causal convolution along a block's slots before a sub-layer, and one behind; new, they do nothing."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        taps, groups = config.conv_kernel_size, config.hidden_size // config.conv_group_size
        self.base_kernel = nn.Parameter(torch.zeros(2, taps, config.hidden_size))
        self.base_kernel.data[:, 0] = 1.0
        self.kernel_projection = Projection(config.hidden_size, 2 * taps * groups)
        nn.init.zeros_(self.kernel_projection.weight)
        self._sizes = (2, taps, groups)

    def forward(
        self, normed_BSD: torch.Tensor, sublayer: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Returns what the sub-layer makes of its normed input (B, S, D), between the two convolutions."""
        dynamic = self.kernel_projection(normed_BSD).unflatten(-1, (*self._sizes, 1))
        kernels = (self.base_kernel.unflatten(-1, (self._sizes[-1], -1)) + dynamic).flatten(-2)
        before_BSTD, behind_BSTD = kernels.unbind(dim=2)
        return _convolved(sublayer(_convolved(normed_BSD, before_BSTD)), behind_BSTD)


def _convolved(x_BSD: torch.Tensor, kernel_BSTD: torch.Tensor) -> torch.Tensor:
    """Returns the convolution (B, S, D) along slots; tap 0 is the slot itself, tap 1 the one before it. Pure."""
    out = x_BSD * kernel_BSTD[:, :, 0]
    for tap in range(1, kernel_BSTD.shape[2]):
        out[:, tap:].addcmul_(x_BSD[:, :-tap], kernel_BSTD[:, tap:, tap])
    return out


class Layer2(Layer):
    """A decoder layer whose sub-layers stand between convolutions."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config)
        self.attention_conv = BlockConv(config)
        self.mlp_conv = BlockConv(config)

    def forward(self, x_BSD: torch.Tensor, attend: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        def attention(normed_BSD: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.self_attn.o_proj(attend(normed_BSD))
            return out

        x = x_BSD + self.attention_conv(self.input_layernorm(x_BSD), attention)
        out: torch.Tensor = x + self.mlp_conv(self.post_attention_layernorm(x), self.mlp)
        return out


class CandidateSelector(nn.Module):
    """How well a token follows another where the drafter's state is h: ⟨A[a] ⊙ W h, B[b]⟩; new, 0 for all."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        rank = config.selector_rank
        self.predecessor_codebook = random_weight(config.vocab_size, rank)
        self.successor_codebook = nn.Parameter(torch.zeros(config.vocab_size, rank))
        self.hidden_projection = Projection(config.hidden_size, rank)

    def forward(
        self, states_AKD: torch.Tensor, predecessor_ids_AKP: torch.Tensor, candidate_ids_AKC: torch.Tensor
    ) -> torch.Tensor:
        """Returns scores (A, K, P, C) of each candidate behind each predecessor."""
        gates_AKR: torch.Tensor = self.hidden_projection(states_AKD)
        before_AKPR = F.embedding(predecessor_ids_AKP, self.predecessor_codebook) * gates_AKR[:, :, None]
        return before_AKPR @ F.embedding(candidate_ids_AKC, self.successor_codebook).mT


class DFlash2(DFlash):
    """A DFlash 2 drafter."""

    layer_class: ClassVar[type[Layer]] = Layer2

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config)
        self.candidate_selector = CandidateSelector(config)

    @classmethod
    def from_dflash(cls, drafter: DFlash, config: DrafterConfig) -> Self:
        """Returns a drafter of `config` that begins as `drafter` and drafts the very same tokens.

        Raises:
            ConfigError: the two differ in more than the variant.
        """
        own = {name: getattr(config, name) for name in DFLASH2_FIELDS}
        expected = replace(drafter.config, variant="dflash2", **own)
        pairs = [(f.name, getattr(expected, f.name), getattr(config, f.name)) for f in fields(config)]
        if wrong := [f"{name}: expected {want}, got {got}" for name, want, got in pairs if want != got]:
            raise ConfigError(
                f"a drafter begins with the weights of one of its own shape; {'; '.join(wrong)}"
            )
        new = cls(config).to(drafter.fc.weight)
        new.load_state_dict({**new.state_dict(), **drafter.state_dict()})
        new.recall(drafter.learned_ids)
        return new

    def rescore(
        self,
        states_AKD: torch.Tensor,
        candidate_ids_AKC: torch.Tensor,
        unary_AKC: torch.Tensor,
        predecessor_ids_AK: torch.Tensor,
    ) -> torch.Tensor:
        """Returns scores (A, K, C) of a slot's candidates behind one token each. Differentiable.

        Args:
            states_AKD: of `forward_blocks`.
            candidate_ids_AKC: token ids.
            unary_AKC: their logits.
            predecessor_ids_AK: the tokens before the slots, the anchors first.
        """
        before_AK1 = predecessor_ids_AK[..., None]
        scores_AK1C: torch.Tensor = self.candidate_selector(states_AKD, before_AK1, candidate_ids_AKC)
        return unary_AKC + scores_AK1C.squeeze(-2)

    def _chains(
        self,
        anchors: Sequence[int],
        contexts: Sequence[ContextKV],
        width: int,
        laws: Sequence[Law] | None,
    ) -> list[Proposal]:
        """Returns for each sequence the walk of `width` slots that takes the best candidate behind the last one."""
        states_NKD = self._draft_states(anchors, contexts, width)
        guesses_NKV = self._guesses(states_NKD, contexts, laws)
        unary_NKC, ids_NKC = self._candidates(guesses_NKV)
        lattice_NKPC = self._lattice(states_NKD, unary_NKC, ids_NKC, anchors, laws)
        best_NKP = lattice_NKPC.argmax(dim=-1)
        covered_NK = unary_NKC.logsumexp(dim=-1) - guesses_NKV.logsumexp(dim=-1)
        log_probs_NKP = chosen_log_probs(lattice_NKPC.log_softmax(dim=-1), best_NKP) + covered_NK[..., None]
        parts = (best_NKP.double(), log_probs_NKP, ids_NKC.double())
        packed = torch.stack(parts, dim=2).tolist()  # one copy to the host for all
        return [_walk(slots) for slots in packed]

    def _trees(
        self,
        anchors: Sequence[int],
        contexts: Sequence[ContextKV],
        depth: int,
        num_nodes: int,
        laws: Sequence[Law] | None,
    ) -> list[Proposal]:
        """Returns the likeliest paths of the lattice.

        How likely it is that a slot's token is a candidate at all is the slot's to say, which of them the selector's.
        So a tree is no deeper than the candidates are good, and a new selector grows the trees of DFlash.
        """
        states_NKD = self._draft_states(anchors, contexts, depth)
        unary_NKC, ids_NKC = self._candidates(self._guesses(states_NKD, contexts, laws).log_softmax(dim=-1))
        lattice_NKPC = self._lattice(states_NKD, unary_NKC, ids_NKC, anchors, laws)
        covered_NK = unary_NKC.logsumexp(dim=-1)
        log_probs_NKPC, order_NKPC = (lattice_NKPC.log_softmax(dim=-1) + covered_NK[..., None, None]).sort(
            dim=-1, descending=True
        )
        parts = (log_probs_NKPC, order_NKPC, ids_NKC[:, :, None])
        packed = torch.cat([part.double() for part in parts], dim=2).tolist()  # one copy to the host for all
        return [_grown(slots, num_nodes) for slots in packed]

    def _candidates(self, guesses_NKV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns scores and token ids of each slot's best guesses, both (N, K, C)."""
        unary_NKC, ranks = guesses_NKV.topk(min(self.config.selector_top_k, guesses_NKV.shape[-1]), dim=-1)
        return unary_NKC, self._named(ranks)

    def _lattice(
        self,
        states_NKD: torch.Tensor,
        unary_NKC: torch.Tensor,
        ids_NKC: torch.Tensor,
        anchors: Sequence[int],
        laws: Sequence[Law] | None,
    ) -> torch.Tensor:
        """Returns scores (N, K, P, C) of candidates behind those of the slot before; slot 1 is behind the anchor alone.

        That slot's P rows are all the same.
        """
        first_N1P = ids_NKC.new_tensor(anchors)[:, None, None].expand(-1, 1, ids_NKC.shape[-1])
        before_NKP = torch.cat([first_N1P, ids_NKC[:, :-1]], dim=1)
        scores_NKPC: torch.Tensor = self.candidate_selector(states_NKD, before_NKP, ids_NKC)
        if laws is not None:  # the guesses are logits over temperature, plus noise
            heat = [1.0 if law.params.is_greedy else law.params.temperature for law in laws]
            scores_NKPC = scores_NKPC / scores_NKPC.new_tensor(heat)[:, None, None, None]
        return unary_NKC[:, :, None] + scores_NKPC


def _walk(slots: list[list[list[float]]]) -> Proposal:
    """Returns the path through slots of (best candidate behind each predecessor, its log-probability; all tokens)."""
    log_probs, path, candidate = list[float](), list[float](), 0
    for best, values, tokens in slots:
        log_probs.append(values[candidate])
        candidate = int(best[candidate])
        path.append(tokens[candidate])
    return likely_chain(log_probs, path)


def _grown(slots: list[list[list[float]]], num_nodes: int) -> Proposal:
    """Returns the tree of slots of (log-probabilities behind each predecessor, whose they are…, the tokens)."""
    num_rows = len(slots[0]) // 2
    log_probs = [rows[:num_rows] for rows in slots]
    order = [[[int(c) for c in row] for row in rows[num_rows:-1]] for rows in slots]
    return grow_lattice(log_probs, order, [[int(t) for t in rows[-1]] for rows in slots], num_nodes)
