"""Logits → token: the only place that knows temperature, filters and penalties.

The token at a position is a function of the target's logits there, the request's parameters, its key (seed and sample
index), the tokens before it and the absolute position, and of nothing else. So it does not matter how the logits were
reached: by plain decoding, by any drafter, in any batch. Row i of a verify pass is processed as if the drafts before it
had been emitted.

Order of operations; where transformers' logits processors do the same, in their order and with equal results:

    adjust   1 logit bias   2 repetition penalty (prompt and text)   3 presence and frequency penalty (text)
             4 bad words   5 no end of text before min_new_tokens   6 allowed tokens   7 grammar
    shape    8 temperature   9 top-k   10 top-p   11 min-p
    draw     12 the maximum; above temperature 0 after adding keyed Gumbel noise (`core.noise`)

Deviation: where several tokens tie at the limit of top-k or top-p all of them stay, since which of equals goes must not
depend on a sort; transformers keeps all for top-k, and some for top-p. Top-p compares probabilities in float32. A bad
word that is an end of text is forbidden like any other; transformers leaves it out. (tests/test_sampling_parity.py)
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import torch

from paceline.core.noise import gumbel_row
from paceline.core.params import SamplingParams
from paceline.core.types import EMPTY_PROPOSAL, Proposal


class Law:
    """How one text is drawn.

    Args:
        params: the request's parameters.
        vocab_size: V, columns of the target's logits.
        seed: key of its randomness.
        sample_index: which of the texts of this seed it is.
        num_prompt_tokens: tokens that were given; what follows them is the text.
        eos_token_ids: the target's own ends of text.
    """

    def __init__(
        self,
        params: SamplingParams,
        vocab_size: int,
        *,
        seed: int = 0,
        sample_index: int = 0,
        num_prompt_tokens: int = 1,
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        self.params, self.vocab_size = params, vocab_size
        self.seed, self.sample_index = seed, sample_index
        self.num_prompt_tokens = num_prompt_tokens
        self.ends = params.ends(eos_token_ids)
        self._noise: dict[int, torch.Tensor] = {}

    def choose(
        self,
        logits_RV: torch.Tensor,
        tokens: Sequence[int],
        proposal: Proposal = EMPTY_PROPOSAL,
        legal_RV: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns the token that this law says at each row, (R,) int64 on the logits' device.

        Args:
            logits_RV: raw target logits, row 0 of the anchor, row i + 1 of node i.
            tokens: committed tokens, prompt included; the last is the anchor.
            proposal: the drafted nodes.
            legal_RV: which tokens the grammar allows at each row.
        """
        scores_RV = self.adjust(logits_RV, tokens, proposal, legal_RV)
        if self.params.is_greedy:
            return scores_RV.argmax(dim=-1)
        positions = [len(tokens) + depth for depth in proposal.depths]
        return self.shape(scores_RV).add_(self._noise_rows(positions, scores_RV.device)).argmax(dim=-1)

    def log_probs(
        self,
        logits_RV: torch.Tensor,
        tokens: Sequence[int],
        proposal: Proposal = EMPTY_PROPOSAL,
        legal_RV: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns the logarithm of the distribution that `choose` draws from, (R, V) float64.

        At temperature 0 it is that of the adjusted logits, before the maximum is taken. Arguments as for `choose`.
        Pure.
        """
        scores_RV = self.adjust(logits_RV, tokens, proposal, legal_RV)
        shaped_RV = scores_RV if self.params.is_greedy else self.shape(scores_RV)
        return shaped_RV.double().log_softmax(dim=-1)

    def adjust(
        self,
        logits_RV: torch.Tensor,
        tokens: Sequence[int],
        proposal: Proposal = EMPTY_PROPOSAL,
        legal_RV: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns the logits after operations 1 to 7, the very tensor where none applies. Pure.

        Arguments as for `choose`.
        """
        params, device = self.params, logits_RV.device
        rows, forbidden = self._forbidden(tokens, proposal)
        is_filtered = params.bias or rows or params.allowed_token_ids is not None or legal_RV is not None
        if not is_filtered and not self._has_penalties:
            return logits_RV
        scores_RV = logits_RV.clone()  # once; all that follows is done in place
        if params.bias:
            ids, values = zip(*params.bias, strict=True)
            scores_RV.index_add_(
                1, _ids(ids, device), scores_RV.new_tensor(values).expand(len(scores_RV), -1)
            )
        self._penalise(scores_RV, tokens, proposal)
        if rows:
            scores_RV[_ids(rows, device), _ids(forbidden, device)] = -math.inf
        if params.allowed_token_ids is not None:
            others_V = torch.ones(scores_RV.shape[-1], dtype=torch.bool, device=device)
            others_V[_ids(params.allowed_token_ids, device)] = False
            scores_RV.masked_fill_(others_V, -math.inf)
        if legal_RV is not None:
            scores_RV.masked_fill_(~legal_RV.to(device), -math.inf)
        return scores_RV

    def shape(self, scores_RV: torch.Tensor) -> torch.Tensor:
        """Returns log-weights (R, V), the largest 0, after operations 8 to 11: what noise is added to. Pure."""
        params = self.params
        # The largest is subtracted first: at a tiny temperature only 0 stays finite.
        weights_RV = (scores_RV - scores_RV.amax(dim=-1, keepdim=True)).div_(params.temperature)
        if 0 < params.top_k < weights_RV.shape[-1]:
            least_R1 = weights_RV.topk(params.top_k, dim=-1).values[:, -1:]
            weights_RV.masked_fill_(weights_RV < least_R1, -math.inf)
        if params.top_p < 1.0:
            is_outside_RV = _outside_top_p(weights_RV, params.top_p, are_few=params.top_k > 0)
            weights_RV.masked_fill_(is_outside_RV, -math.inf)
        if params.min_p > 0.0:
            weights_RV.masked_fill_(weights_RV < math.log(params.min_p), -math.inf)
        return weights_RV

    def perturb(
        self, logits_KV: torch.Tensor, position: int, token_ids_V: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Returns a drafter's logits (K, V) with this law's temperature and noise: their maximum is the best guess.

        Args:
            logits_KV: slot k predicts the token at `position` + k.
            position: absolute position of the first slot's token.
            token_ids_V: the tokens that the columns stand for; `None` where they are the whole vocabulary.
        """
        if self.params.is_greedy:
            return logits_KV
        noise_KV = self._noise_rows(range(position, position + len(logits_KV)), logits_KV.device)
        if token_ids_V is not None:
            noise_KV = noise_KV[:, token_ids_V]
        return logits_KV / self.params.temperature + noise_KV

    def forget_before(self, position: int) -> None:
        """Drops remembered noise of positions that are decided. Mutates: the memo alone."""
        for decided in [p for p in self._noise if p < position]:
            del self._noise[decided]

    def _noise_rows(self, positions: Sequence[int], device: torch.device) -> torch.Tensor:
        """Returns noise (R, V), a row for each position; remembers rows, since a refused block is judged again."""
        for position in positions:
            if position not in self._noise:
                self._noise[position] = gumbel_row(
                    self.seed, self.sample_index, position, self.vocab_size, device
                )
        return torch.stack([self._noise[position] for position in positions])

    @property
    def _has_penalties(self) -> bool:
        params = self.params
        return params.repetition_penalty != 1.0 or bool(params.presence_penalty or params.frequency_penalty)

    def _penalise(self, scores_RV: torch.Tensor, tokens: Sequence[int], proposal: Proposal) -> None:
        """Applies operations 2 and 3. Mutates: scores_RV."""
        params = self.params
        if params.repetition_penalty != 1.0:
            ids_U, counts_RU = _counts(tokens, proposal, scores_RV.device)
            scores_RU, factor = scores_RV[:, ids_U], params.repetition_penalty
            penalised_RU = torch.where(scores_RU < 0, scores_RU * factor, scores_RU / factor)
            scores_RV[:, ids_U] = torch.where(counts_RU > 0, penalised_RU, scores_RU)
        if params.presence_penalty or params.frequency_penalty:
            ids_U, counts_RU = _counts(tokens[self.num_prompt_tokens :], proposal, scores_RV.device)
            # clamp, since a number times a mask would be float32
            penalty_RU = params.frequency_penalty * counts_RU + params.presence_penalty * counts_RU.clamp(
                max=1
            )
            scores_RV[:, ids_U] -= penalty_RU.to(scores_RV.dtype)

    def _forbidden(self, tokens: Sequence[int], proposal: Proposal) -> tuple[list[int], list[int]]:
        """Returns rows and tokens of what operations 4 and 5 forbid, in pairs."""
        params = self.params
        if not params.bad_words and not params.min_new_tokens:
            return [], []
        longest = max(map(len, params.bad_words), default=1)
        before = tuple(tokens[max(0, len(tokens) - longest) :])
        pairs: list[tuple[int, int]] = []
        for row, drafted in enumerate(_paths(proposal)):
            history = before + drafted
            pairs += [
                (row, word[-1])
                for word in params.bad_words
                if len(word) == 1 or history[1 - len(word) :] == word[:-1]
            ]
            if len(tokens) - self.num_prompt_tokens + len(drafted) < params.min_new_tokens:
                pairs += [(row, end) for end in self.ends]
        return [row for row, _ in pairs], [token for _, token in pairs]


def _paths(proposal: Proposal) -> list[tuple[int, ...]]:
    """Returns the drafted tokens before each row, its own node's included."""
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(proposal.tokens, proposal.parents, strict=True):
        paths.append((*paths[parent], token))
    return paths


def _counts(
    tokens: Sequence[int], proposal: Proposal, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the U tokens that occur, and how often each stands before each row: committed, and drafted on its path.

    Returns:
        (U,) int64 ids and (R, U) float64 counts.
    """
    ids = sorted({*tokens, *proposal.tokens})
    column = {token: i for i, token in enumerate(ids)}
    committed = Counter(tokens)
    counts = [[committed[token] for token in ids]]
    for token, parent in zip(proposal.tokens, proposal.parents, strict=True):
        counts.append(counts[parent].copy())
        counts[-1][column[token]] += 1
    return _ids(ids, device), torch.tensor(counts, dtype=torch.float64, device=device)


_COARSE = 18
"""Low bits of a float32 that the first look at a probability leaves out: what is left tells sixteenths apart."""


def _outside_top_p(weights_RV: torch.Tensor, top_p: float, *, are_few: bool = False) -> torch.Tensor:
    """Returns which tokens top-p leaves out, (R, V): all below the least likely one that is needed.

    A sort of the vocabulary would cost as much as a layer. Here a histogram over the leading bits of the probabilities
    (as float32, whose bits are in the order of the numbers) finds the bucket of the limit, and only that is sorted.
    Masses are whole numbers of 2**-40: sums of those are exact in any order, so that a row's limit does not depend on
    its neighbours, on threads or on the device.

    Args:
        are_few: most weights are −inf, as behind top-k; then only the columns of the others are looked at.
    """
    probs_RV = weights_RV.float().softmax(dim=-1)
    probs_RC = probs_RV[:, (probs_RV > 0).any(dim=0)] if are_few else probs_RV
    bits_RC, mass_RC = probs_RC.view(torch.int32), probs_RC.mul(2.0**40).long()
    bucket_RC = bits_RC >> _COARSE
    histogram_RB = mass_RC.new_zeros(len(mass_RC), 1 << 30 - _COARSE)
    histogram_RB.scatter_add_(1, bucket_RC.long(), mass_RC)
    from_top_RB = histogram_RB.flip(1).cumsum_(1)
    needed_R1 = (from_top_RB[:, -1:].double() * top_p).ceil().long()
    above_R1 = (from_top_RB < needed_R1).sum(dim=1, keepdim=True)  # buckets above the limit's
    missing_R = (needed_R1 - from_top_RB.gather(1, (above_R1 - 1).clamp(min=0)) * (above_R1 > 0))[:, 0]

    at_limit_RC = bucket_RC == (histogram_RB.shape[1] - 1 - above_R1).int()
    rows, columns = at_limit_RC.nonzero(as_tuple=True)
    ranked, order = (bits_RC[rows, columns].long() - (rows << 32)).sort(
        descending=True
    )  # by row, likeliest first
    sums = torch.nn.functional.pad(mass_RC[rows, columns][order].cumsum(0), (1, 0))
    starts_R = torch.searchsorted(rows, torch.arange(len(mass_RC), device=rows.device))
    limit_R = ranked[torch.searchsorted(sums, sums[starts_R] + missing_R) - 1] & 0xFFFFFFFF
    return probs_RV.view(torch.int32) < limit_R[:, None].int()


def _ids(values: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.long, device=device)
