"""Teacher forcing: a finished text through the plain target, a hundred rows at a time, and what each row says of it.

Two readings of the same rows. `measure_gaps` asks at each position how far the emitted token is from the one that the
target says there, and calls what rounding explains a tie. `measure_draws` asks how likely the emitted token was.

Shapes: R rows of a pass, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from paceline.bench.exactness.statistics import Floats, Moments
from paceline.core.noise import gumbel_row
from paceline.core.sampling import Law
from paceline.core.types import EMPTY_PROPOSAL, Proposal, Request
from paceline.target.base import Target, TargetSpec, VerifyRows

PASS_ROWS, PREFILL_ROWS = 128, 512

ROUNDING_STEPS = {torch.bfloat16: 1.0, torch.float32: 64.0, torch.float64: 64.0}
"""Steps of the arithmetic by which two logits of one row may trade places when a pass is rounded otherwise.

In bfloat16 the logits' own rounding dominates, and one step decides: 0.125 for logits in [16, 32), 0.25 in [32, 64).
In float32 a step is tiny and the roundings of all layers accumulate; two implementations of one 30-layer model were
seen to differ by 35 steps. A wrong verifier shows gaps around 1, five hundred times the float32 tolerance.
"""


@dataclass(frozen=True, slots=True)
class Piece:
    """Some tokens of a text and the rows that predict them.

    Args:
        tokens: everything before, prompt included.
        emitted: the tokens, one for each row.
        logits: the target's raw logits (R, V).
    """

    tokens: list[int]
    emitted: tuple[int, ...]
    logits: torch.Tensor

    @property
    def proposal(self) -> Proposal:
        """The rows as a chain behind the last token before them; the last token emitted needs no row."""
        return Proposal.chain(self.emitted[:-1])


def force(target: Target, prompt_ids: Sequence[int], text: Sequence[int]) -> Iterator[Piece]:
    """Yields a text in pieces with the target's logits for each of its tokens.

    Raises:
        CapacityError: the text exceeds the target's positions.
    """
    session = target.open(len(prompt_ids) + len(text))
    target.tap(())
    tokens = list(prompt_ids)
    try:
        for start in range(0, len(tokens) - 1, PREFILL_ROWS):
            rows = tokens[start : min(start + PREFILL_ROWS, len(tokens) - 1)]
            target.verify([VerifyRows(session, rows, EMPTY_PROPOSAL, last_row_only=True)])
            session.keep(range(len(rows)))
        for start in range(0, len(text), PASS_ROWS):
            emitted = tuple(text[start : start + PASS_ROWS])
            chain = Proposal.chain(emitted[:-1])
            (output,) = target.verify([VerifyRows(session, [tokens[-1]], chain)])
            session.keep(range(len(emitted)))
            yield Piece(tokens, emitted, output.logits)
            tokens = [*tokens, *emitted]
    finally:
        session.close()


def law_of(request: Request, spec: TargetSpec) -> Law:
    """Returns the law of a request of one text, as an engine draws it.

    Raises:
        ValueError: a sampled request without a seed.
    """
    if request.params.seed is None and not request.params.is_greedy:
        raise ValueError("expected a seed with a temperature above 0, got none")
    return Law(
        request.params,
        spec.vocab_size,
        seed=request.params.seed or 0,
        sample_index=request.sample_index,
        num_prompt_tokens=len(request.prompt_ids),
        eos_token_ids=spec.eos_token_ids,
    )


# Ties ----------------------------------------------------------------------------------------------------------------


def step_at(magnitude: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns the distance between neighbouring numbers of `dtype` at a magnitude. Pure."""
    exponent = magnitude.abs().clamp_min(torch.finfo(dtype).tiny).double().log2().floor()
    return torch.finfo(dtype).eps * torch.exp2(exponent)


@dataclass(frozen=True, slots=True)
class Gaps:
    """How far each emitted token is from the one that the target says.

    Args:
        gap: by position: the best score minus the emitted token's, infinite for a token that the request forbids.
        tolerance: what rounding explains there.
        best: the token that the target says.
    """

    gap: list[float] = field(default_factory=list)
    tolerance: list[float] = field(default_factory=list)
    best: list[int] = field(default_factory=list)

    @property
    def flagged(self) -> list[int]:
        """Positions whose gap is beyond the tolerance."""
        return [i for i, gap in enumerate(self.gap) if not gap <= self.tolerance[i]]

    @property
    def num_ties(self) -> int:
        """Positions where another token scores higher, within the tolerance."""
        return sum(0.0 < gap <= tolerance for gap, tolerance in zip(self.gap, self.tolerance, strict=True))


def measure_gaps(
    target: Target, request: Request, text: Sequence[int], rounding_steps: float | None = None
) -> Gaps:
    """Returns the gaps of a text that `request` should have given.

    At temperature 0 scores are the adjusted logits. Above it they are the log-weights with the request's own noise, so
    that every single token can be checked; the tolerance is then divided by the temperature as the logits are.

    Args:
        rounding_steps: see `ROUNDING_STEPS`; `None` takes those of the target's dtype.
    """
    law, gaps = law_of(request, target.spec), Gaps()
    steps = ROUNDING_STEPS[target.dtype] if rounding_steps is None else rounding_steps
    for piece in force(target, request.prompt_ids, text):
        adjusted_RV = law.adjust(piece.logits, piece.tokens, piece.proposal)
        scores_RV = adjusted_RV if law.params.is_greedy else _perturbed(law, adjusted_RV, len(piece.tokens))
        own_R1 = torch.tensor(piece.emitted, device=scores_RV.device)[:, None]
        best_R1 = scores_RV.argmax(dim=-1, keepdim=True)
        pair_R2 = torch.cat([best_R1, own_R1], dim=1)
        scores_R2 = scores_RV.gather(1, pair_R2).double()
        sizes_R4 = torch.cat([piece.logits.gather(1, pair_R2), adjusted_RV.gather(1, pair_R2)], dim=1).abs()
        largest_R = sizes_R4.masked_fill(sizes_R4.isinf(), 0.0).amax(dim=1)
        tolerance_R = steps * step_at(largest_R, target.dtype)
        gap_R = scores_R2[:, 0] - scores_R2[:, 1]
        if not law.params.is_greedy:
            excused_R = at_limit(law, adjusted_RV, tolerance_R).gather(1, pair_R2).any(dim=1)
            gap_R = torch.where(excused_R, 0.0, gap_R)
            tolerance_R = tolerance_R / law.params.temperature + step_at(scores_R2[:, 0], scores_RV.dtype)
        gaps.gap.extend(gap_R.tolist())
        gaps.tolerance.extend(tolerance_R.tolist())
        gaps.best.extend(best_R1[:, 0].tolist())
    return gaps


def _perturbed(law: Law, adjusted_RV: torch.Tensor, position: int) -> torch.Tensor:
    """Returns log-weights with the noise of the law's key, the row for `position` first."""
    rows = [
        gumbel_row(law.seed, law.sample_index, position + i, law.vocab_size, adjusted_RV.device)
        for i in range(len(adjusted_RV))
    ]
    return law.shape(adjusted_RV) + torch.stack(rows)


def at_limit(law: Law, adjusted_RV: torch.Tensor, tolerance_R: torch.Tensor) -> torch.Tensor:
    """Returns the tokens of which rounding decides whether top-k, top-p and min-p keep them, (R, V) bool.

    They are as close as the tolerance to the least likely token that is kept or to the likeliest that is not.
    """
    kept_RV = law.shape(adjusted_RV).isfinite()
    cut_RV = adjusted_RV.isfinite() & ~kept_RV
    last_in_R1 = adjusted_RV.masked_fill(~kept_RV, torch.inf).amin(dim=1, keepdim=True)
    first_out_R1 = adjusted_RV.masked_fill(~cut_RV, -torch.inf).amax(dim=1, keepdim=True)
    near_RV = ((adjusted_RV - last_in_R1).abs() <= tolerance_R[:, None]) | (
        (adjusted_RV - first_out_R1).abs() <= tolerance_R[:, None]
    )
    return near_RV & cut_RV.any(dim=1, keepdim=True)


# Draws ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Draws:
    """What the target's law says of texts that were drawn.

    Args:
        moments: of the surprise, over all positions.
        transforms: the randomised rank of each emitted token.
        favourite_probs, favourite_hits: of the positions that had a favourite, its probability and whether it came.
        num_impossible: tokens of probability 0, beyond what rounding at a filter's limit explains; no other field
            counts a token of probability 0.
    """

    moments: Moments
    transforms: Floats
    favourite_probs: Floats
    favourite_hits: np.typing.NDArray[np.bool_]
    num_impossible: int

    @classmethod
    def join(cls, parts: Sequence[Draws]) -> Draws:
        """Returns all of them as one."""
        sums = [(d.moments.observed, d.moments.expected, d.moments.variance, d.moments.third) for d in parts]
        totals = np.array(sums).reshape(-1, 4).sum(axis=0).tolist()
        return cls(
            Moments(sum(d.moments.num_positions for d in parts), *totals),
            _concatenated([d.transforms for d in parts]),
            _concatenated([d.favourite_probs for d in parts]),
            _concatenated([d.favourite_hits for d in parts]).astype(bool),
            sum(d.num_impossible for d in parts),
        )


def _concatenated(arrays: Sequence[Floats | np.typing.NDArray[np.bool_]]) -> Floats:
    return np.concatenate([np.empty(0), *arrays])


def measure_draws(
    target: Target,
    request: Request,
    text: Sequence[int],
    favourites: Sequence[int | None],
    rng: np.random.Generator,
) -> Draws:
    """Returns what the law of `request` says of a text, which need not be the one of its seed.

    Args:
        favourites: the draft's favourite at each position, `None` where there is none; see `recorder.favourites`.
        rng: for the randomised ranks. Mutated.
    """
    law, parts, start = law_of(request, target.spec), [], 0
    for piece in force(target, request.prompt_ids, text):
        wanted = favourites[start : start + len(piece.emitted)]
        start += len(piece.emitted)
        parts.append(_draws(law, piece, wanted, rng, target.dtype))
    return Draws.join(parts)


def _draws(
    law: Law, piece: Piece, favourites: Sequence[int | None], rng: np.random.Generator, dtype: torch.dtype
) -> Draws:
    log_probs_RV = law.log_probs(piece.logits, piece.tokens, piece.proposal)
    probs_RV, device = log_probs_RV.exp(), log_probs_RV.device
    own_R = torch.tensor(piece.emitted, device=device)
    liked_R = torch.tensor([-1 if token is None else token for token in favourites], device=device)
    own_log_prob_R1 = log_probs_RV.gather(1, own_R[:, None])
    possible_R = own_log_prob_R1[:, 0].isfinite()
    drafted_R = possible_R & (liked_R >= 0)
    above_R = (probs_RV * (log_probs_RV > own_log_prob_R1)).sum(dim=1)
    equal_R = (probs_RV * (log_probs_RV == own_log_prob_R1)).sum(dim=1)
    share_R = torch.from_numpy(rng.random(len(piece.emitted))).to(device)
    liked_prob_R = probs_RV.gather(1, liked_R.clamp_min(0)[:, None])[:, 0].clamp(0.0, 1.0)
    return Draws(
        _moments(log_probs_RV[possible_R], own_R[possible_R]),
        (above_R + share_R * equal_R)[possible_R].cpu().numpy(),
        liked_prob_R[drafted_R].cpu().numpy(),
        (liked_R == own_R)[drafted_R].cpu().numpy(),
        0 if bool(possible_R.all()) else _count_impossible(law, piece, own_R, ~possible_R, dtype),
    )


def _moments(log_probs_RV: torch.Tensor, own_R: torch.Tensor) -> Moments:
    """Returns the sums of the surprise over rows."""
    probs_RV = log_probs_RV.exp()
    surprise_RV = torch.where(probs_RV > 0, -log_probs_RV, 0.0)
    entropy_R1 = (probs_RV * surprise_RV).sum(dim=1, keepdim=True)
    centred_RV = surprise_RV - entropy_R1
    sums = [
        surprise_RV.gather(1, own_R[:, None]).sum(),
        entropy_R1.sum(),
        (probs_RV * centred_RV**2).sum(),
        (probs_RV * centred_RV**3).sum(),
    ]
    return Moments(len(own_R), *torch.stack(sums).tolist())


def _count_impossible(
    law: Law, piece: Piece, own_R: torch.Tensor, zero_R: torch.Tensor, dtype: torch.dtype
) -> int:
    """Returns how many tokens of probability 0 rounding does not excuse."""
    adjusted_RV = law.adjust(piece.logits, piece.tokens, piece.proposal)
    tolerance_R = ROUNDING_STEPS[dtype] * step_at(adjusted_RV.amax(dim=1), dtype)
    excused_R = at_limit(law, adjusted_RV, tolerance_R).gather(1, own_R[:, None])[:, 0]
    return int((zero_R & ~excused_R).sum())
