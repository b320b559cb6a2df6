"""Signs: faults that show in the numbers alone, without changing anything."""

from __future__ import annotations

from collections import Counter

import torch

from paceline.train.diagnosis.scores import OUTSIDE, Estimate, estimate
from paceline.train.diagnosis.trial import CONFIDENCE, Experiment, Trial, left_out, repetition, verdict

CLEAR_SHIFT = 0.05
"""Least surplus of right tokens a slot further or nearer."""
CHANCE = 0.05
"""How far slot 1 may lie above the commonest token and still be at chance."""
FINE_FIRST_SLOT, COLLAPSE = 0.2, 1 / 3
"""Slot 1 is fine above the first; slot 2 collapsed below so much of slot 1."""
TOO_GOOD = 0.98
"""Share of right drafts in every slot that no honest drafter was seen to have."""
LOST_TO_VOCABULARY = 0.25
"""Share of blocks that end at a token outside the draft vocabulary."""
TARGET_AGREEMENT = 0.97
"""Share of its own answers that the target should say again in one pass."""


def target_agreement(trial: Trial) -> Experiment:
    """Whether the target says its own answers again."""
    share = trial.parity.target_agreement
    return verdict(
        "target_agreement",
        share < TARGET_AGREEMENT,
        {"agreement": share},
        "the target does not repeat its own answers in one pass over them",
        "its runner rounds one row and many rows differently: use float32, or --exact where it can be had",
    )


def shifted_labels(trial: Trial) -> Experiment:
    """Whether slots hold the token of the slot behind or before them."""
    gains = {shift: _surplus(trial, shift) for shift in (-1, 1)}
    evidence = {f"shifted_by_{s:+d}": g for s, g in gains.items()}
    best = max(gains, key=lambda s: -1.0 if gains[s] is None else gains[s].value)  # type: ignore[union-attr]
    gain = gains[best]
    matched = gain is not None and gain.low is not None and gain.low > 0 and gain.value >= CLEAR_SHIFT
    where = "behind" if best > 0 else "before"
    return verdict(
        "shifted_labels",
        matched,
        evidence,
        f"its labels are shifted by one: slots hold the token of the slot {where} them more often than their own",
        "slot k predicts the token k places behind the anchor; train with labels at the slots' own positions",
    )


def _surplus(trial: Trial, shift: int) -> Estimate | None:
    """Returns how many more of a block's drafts are the token `shift` places further than their own, as a share."""
    shares = []
    for answer, scores in zip(trial.answers, trial.full, strict=True):
        slots = torch.arange(1, scores.labels.shape[1] + 1)
        inside = scores.anchors + slots[-1] + shift < len(answer.token_ids)
        other = answer.token_ids[scores.anchors[inside][:, None] + slots + shift]
        chosen, labels = scores.chosen[inside], scores.labels[inside]
        shares.append(((chosen == other).double() - (chosen == labels).double()).mean(dim=-1))
    return estimate(shares, CONFIDENCE)


def vocabulary(trial: Trial) -> Experiment:
    """Whether blocks end at tokens that it cannot draft."""
    if len(trial.scorer.token_ids) >= trial.drafter.config.vocab_size:
        return left_out("vocabulary", "it drafts any token")
    num_failed = num_outside = 0
    for scores in trial.full:
        failed = scores.accepted < scores.labels.shape[1]
        ended = scores.rank[failed].gather(1, scores.accepted[failed][:, None])
        num_failed, num_outside = num_failed + len(ended), num_outside + int((ended == OUTSIDE).sum())
    share = num_outside / max(1, num_failed)
    return verdict(
        "vocabulary",
        share > LOST_TO_VOCABULARY,
        {"num_draftable": len(trial.scorer.token_ids), "share_of_ended_blocks": share},
        f"its draft vocabulary lacks what these answers say: {share:.0%} of all blocks end at a token outside it",
        "draft from a larger vocabulary, or from that of answers like these",
    )


def at_chance(trial: Trial) -> Experiment:
    """Whether it knows nothing of these answers."""
    first = [s.labels[:, 0] for s in trial.full]
    right = estimate([s.chosen[:, 0] == s.labels[:, 0] for s in trial.full], CONFIDENCE)
    assert right is not None
    commonest = Counter(torch.cat(first).tolist()).most_common(1)[0][1] / sum(map(len, first))
    return verdict(
        "at_chance",
        right.high is not None and right.high < commonest + CHANCE,
        {"slot_1": right, "commonest_token": commonest, "target_agreement": trial.parity.target_agreement},
        "it is at chance in its first slot already: it was made for another target's answers, or hardly trained, or "
        "its weights are not those that were trained",
        "check which target its provenance names, then train it on this target's own answers",
    )


def collapsed(trial: Trial) -> Experiment:
    """Whether everything behind the first slot is lost."""
    if trial.drafter.block_size < 3:
        return left_out("collapsed", "it drafts one token a block")
    right = [s.chosen == s.labels for s in trial.full]
    first = estimate([r[:, 0] for r in right], CONFIDENCE)
    second = estimate([r[r[:, 0], 1] for r in right], CONFIDENCE)
    assert first is not None
    matched = (
        second is not None
        and second.high is not None
        and first.value >= FINE_FIRST_SLOT
        and second.high < COLLAPSE * first.value
    )
    return verdict(
        "collapsed",
        matched,
        {"slot_1": first, "slot_2_after_slot_1": second},
        "its first slot is fine and the rest collapsed: later slots see a mask, positions or a width of block that "
        "they were not trained with, or were never trained",
        "compare mask_token_id, layer_types and block_size with those of its training",
    )


def too_good(trial: Trial) -> Experiment:
    """Whether it is right nearly always."""
    right = torch.cat([s.chosen == s.labels for s in trial.full]).double().mean(dim=0)
    return verdict(
        "too_good",
        bool(right.min() >= TOO_GOOD),
        {"worst_slot": float(right.min()), "repetition": repetition(trial.answers)},
        "it is right nearly always, in every slot: the labels leak into its input, these prompts are its training "
        "data, or the answers repeat themselves",
        "look at train_serve (a leak is not there when serving), and try prompts that it cannot have seen",
    )


SIGNS = (target_agreement, shifted_labels, vocabulary, at_chance, collapsed, too_good)
SYMPTOMS = (at_chance, collapsed)
"""Signs that an intervention explains."""
