"""Known faults of drafters, each tried as an experiment.

An experiment changes one thing, feeds the same blocks again and looks at the accepted drafts. It matches only where
the change is clearly better: by at least a stated share of τ, and with an interval over answers that excludes zero.
Where no change helps, `signs` say what the numbers look like. docs/diagnosing.md has every threshold in words.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from paceline.core.acceptance import accepted_prefix
from paceline.drafter.config import DrafterConfig
from paceline.drafter.dflash2 import DFlash2
from paceline.train.diagnosis.scores import Estimate, estimate
from paceline.train.diagnosis.signs import SIGNS, SYMPTOMS
from paceline.train.diagnosis.trial import (
    CONFIDENCE,
    Evidence,
    Experiment,
    Trial,
    judged,
    left_out,
    repetition,
    variant,
    verdict,
)

CLEAR_TEMPLATE_GAIN = 0.2
"""The same between two renderings of a prompt, whose answers differ."""
SAME_REPETITION = 0.1
"""Most that one rendering's answers may repeat themselves more, for the two to be compared."""
UNUSED_CONTEXT, UNUSED_CONTEXT_AT_MOST = 0.1, 0.2
"""Loss of accepted drafts without context, as a share: its mean, and the end of its interval."""
FEW_ACCEPTED = 0.1
"""Accepted drafts per block below which there is nothing to lose."""
SCREENED = 4
"""Every so many anchors are enough to choose among mask candidates."""


def examine(trial: Trial, tell: Callable[[int, int], None] = lambda done, total: None) -> list[Experiment]:
    """Returns every experiment, those that matched first, the greatest gain first.

    Args:
        tell: told how many of how many are done.
    """
    total, found = len(INTERVENTIONS) + len(SIGNS), list[Experiment]()
    for experiment in INTERVENTIONS:
        found.append(experiment(trial))
        tell(len(found), total)
    explained = [e.name for e in found if e.matched]
    for sign in SIGNS:
        seen = sign(trial)
        if seen.matched and explained and sign in SYMPTOMS:
            seen = Experiment(seen.name, False, {**seen.evidence, "explained_by": explained})
        found.append(seen)
        tell(len(found), total)
    return sorted(found, key=lambda e: (not e.matched, -(e.gain or 0.0)))


# Interventions: change one thing, look again ------------------------------------------------------------------------


def train_serve(trial: Trial) -> Experiment:
    """Whether serving sees the features and says the drafts of training."""
    p = trial.parity
    evidence = {
        "served_difference": p.served_difference,
        "prefill_difference": p.prefill_difference,
        "tolerance": p.tolerance,
        "num_different_drafts": p.num_different,
        "num_drafts": p.num_drafts,
    }
    if p.agrees:
        return Experiment("train_serve", False, evidence)
    wrong = []
    if p.served_difference > p.tolerance:
        wrong.append("serving injects other hidden states than training reads")
    if p.prefill_difference > p.tolerance:
        wrong.append("one pass over a text leaves other hidden states than decoding it")
    if p.num_different:
        wrong.append(f"serving drafts other tokens than training's forward pass ({p.num_different} slots)")
    return Experiment(
        "train_serve",
        True,
        evidence,
        " and ".join(wrong),
        "training's numbers do not hold in decoding: look at taps, positions and masks of the differing blocks",
    )


def layer_ids(trial: Trial) -> Experiment:
    """Whether the layers next to the named ones feed the drafter better."""
    named = trial.drafter.target_layer_ids
    shifts = {s: tuple(i + s for i in named) for s in (-1, 1)}
    possible = {s: ids for s, ids in shifts.items() if min(ids) >= 0 and max(ids) < trial.num_target_layers}
    gains = {s: trial.gain(layers=ids) for s, ids in possible.items()}
    if not gains:
        return left_out("layer_ids", "its taps reach from the target's first layer to its last")
    best = max(gains, key=lambda s: gains[s].value)
    evidence = {"target_layer_ids": list(named), **{f"shifted_by_{s:+d}": g for s, g in gains.items()}}
    return judged(
        trial,
        "layer_ids",
        evidence,
        gains[best],
        f"its target_layer_ids are off by one: it reads layers {list(possible[best])} better than {list(named)}",
        "write the ids it was trained with; conventions differ by one (an id may count the embedding as layer 0)",
    )


def mask_token(trial: Trial) -> Experiment:
    """Whether another token fills its blanks better."""
    config = trial.drafter.config
    if not isinstance(config, DrafterConfig):
        return left_out("mask_token", "it drafts step by step, without masks")
    others = [i for i in dict.fromkeys(trial.mask_candidates) if i != config.mask_token_id]
    if not others:
        return left_out("mask_token", "the target's tokenizer has no other special token to try")
    screened = {i: trial.gain(variant(trial.drafter, mask_token_id=i), every=SCREENED).value for i in others}
    best = max(screened, key=lambda i: screened[i])
    gain = trial.gain(variant(trial.drafter, mask_token_id=best))
    evidence = {
        "mask_token_id": config.mask_token_id,
        "num_tried": len(others),
        "best": best,
        "best_gain": gain,
    }
    return judged(
        trial,
        "mask_token",
        evidence,
        gain,
        f"its mask_token_id is wrong: token {best} in place of {config.mask_token_id} drafts better",
        f"set mask_token_id to {best}, or to the id of its training",
    )


def causality(trial: Trial) -> Experiment:
    """Whether slots should see their block the other way round."""
    config = trial.drafter.config
    if not isinstance(config, DrafterConfig):
        return left_out("causality", "it drafts step by step, so there is one way to look")
    rules = {rule.causal for rule in config.layer_rules}
    gains = {c: trial.gain(variant(trial.drafter, is_causal=c)) for c in (False, True) if rules != {c}}
    best = max(gains, key=lambda c: gains[c].value)
    words = {True: "only slots before it", False: "its whole block"}
    return judged(
        trial,
        "causality",
        {"is_causal": sorted(rules), **{f"is_causal_{str(c).lower()}": g for c, g in gains.items()}},
        gains[best],
        f"its attention inside the block is the other kind: it drafts better where a slot sees {words[best]}",
        f"set is_causal to {str(best).lower()}, or layer_types to those of its training",
    )


def rope_theta(trial: Trial) -> Experiment:
    """Whether another base of the rotary embedding fits better."""
    own = trial.drafter.config.rope_theta
    gains = {
        t: trial.gain(variant(trial.drafter, rope_theta=t))
        for t in dict.fromkeys(trial.rope_thetas)
        if t != own
    }
    if not gains:
        return left_out("rope_theta", "the target has the same base, and there is no other to try")
    best = max(gains, key=lambda t: gains[t].value)
    return judged(
        trial,
        "rope_theta",
        {"rope_theta": own, **{f"rope_theta_{t:g}": g for t, g in gains.items()}},
        gains[best],
        f"its rope_theta is wrong: {best:g} in place of {own:g} drafts better",
        f"set rope_theta to {best:g}; readers that know one spelling of the key fall back to 10,000 silently",
    )


def chat_template(trial: Trial) -> Experiment:
    """Whether it does clearly better on prompts that are rendered in another way."""
    if not trial.renderings:
        return left_out("chat_template", "the prompts are token ids, or the target has no chat template")
    drafts, gains, evidence = trial.drafter.block_size - 1, dict[str, Estimate](), Evidence()
    own = {a.id: (a, s) for a, s in zip(trial.answers, trial.full, strict=True)}
    for name, answers in trial.renderings.items():
        others = [a for a in answers if a.id in own and len(a.anchors(drafts))]
        pairs = []
        for other in others:
            accepted = trial.scorer.accepted(trial.drafter, other, other.anchors(drafts))
            _, scores = own[other.id]
            pairs.append((accepted.double().mean() - scores.accepted[: len(accepted)].double().mean())[None])
        gain = estimate(pairs, CONFIDENCE)
        if gain is not None:
            gains[name] = gain
            surplus = repetition(others) - repetition([own[a.id][0] for a in others])
            evidence |= {name: gain, f"{name}_repetition": surplus}
    if not gains:
        return left_out("chat_template", "the other renderings' answers were too short")
    best = max(gains, key=lambda n: gains[n].value)
    gain = gains[best]
    matched = (
        gain.low is not None
        and gain.low > 0
        and gain.value >= CLEAR_TEMPLATE_GAIN * trial.acceptance_length
        and evidence[f"{best}_repetition"] < SAME_REPETITION
    )
    says = {
        "raw": "it drafts clearly better on raw prompts than in the target's chat template",
        "system": "it drafts clearly better behind a system prompt",
    }[best]
    hint = "serve the rendering that it was trained on, or train on answers in the one that is served"
    return verdict("chat_template", matched, evidence, says, hint, gain.value)


def context(trial: Trial) -> Experiment:
    """Whether it looks at the target's hidden states at all."""
    accepted = trial.acceptance_length - 1
    if accepted < FEW_ACCEPTED:
        return left_out("context", "too few drafts are accepted for any to be lost")
    losses = {
        "zeroed": trial.gain(change=torch.zeros_like),
        "moved": trial.gain(change=lambda hidden: hidden.roll(len(hidden) // 2, 0)),
    }
    unused = all(
        g.low is not None
        and -g.value < UNUSED_CONTEXT * accepted
        and -g.low < UNUSED_CONTEXT_AT_MOST * accepted
        for g in losses.values()
    )
    return verdict(
        "context",
        unused,
        {"accepted": accepted, **losses},
        "it does not use the target's hidden states: τ is the same when they are zeroed or another place's",
        "check that training injected them (their scale, their positions, a mask that lets blocks see them)",
    )


def selector(trial: Trial) -> Experiment:
    """Whether the selector earns its place."""
    if not isinstance(trial.drafter, DFlash2):
        return left_out("selector", "it has none")
    pairs = [(s.accepted, accepted_prefix(s.unary == s.labels)) for s in trial.full]
    lift = estimate([chosen - unary for chosen, unary in pairs], CONFIDENCE)
    assert lift is not None
    num_changed = sum(int((s.chosen != s.unary).sum()) for s in trial.full)
    harms = lift.high is not None and lift.high < 0
    return verdict(
        "selector",
        harms or num_changed == 0,
        {"lift": lift, "num_changed": num_changed},
        "its selector makes drafts worse" if harms else "its selector changes no draft: new, or not loaded",
        "train the selector longer, or draft without it; codebooks lost in a conversion look the same",
    )


INTERVENTIONS = (
    train_serve,
    layer_ids,
    mask_token,
    causality,
    rope_theta,
    chat_template,
    context,
    selector,
)
