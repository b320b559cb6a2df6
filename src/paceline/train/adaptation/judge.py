"""Whether a drafter is better than the one before: what both decode, how they are compared, and the rule."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from paceline.drafter.base import Drafter, NeuralDrafter
from paceline.engine.engine import Engine
from paceline.engine.tree import TreeDrafter
from paceline.target.base import Target
from paceline.train.adaptation.evaluate import Comparison, Evaluation, NewEngine

WORST_GENERAL = 0.97
RULE = (
    "the new drafter is kept where τ on held-out prompts rises, the whole 95% interval of its ratio above 1, and τ on "
    f"general prompts does not fall below {WORST_GENERAL:g} of what it was; of greedy chains on the target's answers"
)


def arms_of(
    target: Target, tree_nodes: int | None, before: NeuralDrafter, after: NeuralDrafter | None = None
) -> dict[str, NewEngine]:
    """Returns how engines are made: plain, and each drafter as the pair uses it, with trees or with chains."""
    drafters: dict[str, Drafter | None] = {"plain": None}
    for when, drafter in (("before", before), ("after", after)):
        if drafter is not None and tree_nodes is not None:
            drafters[f"{when}: tree of {tree_nodes}"] = TreeDrafter(drafter, tree_nodes)
        elif drafter is not None:
            drafters[f"{when}: chain of {drafter.block_size - 1}"] = drafter
    return {
        name: lambda drafter=drafter: Engine(target, drafter, max_sequences=1)  # type: ignore[misc]
        for name, drafter in drafters.items()
    }


def compare(found: Mapping[str, Evaluation]) -> Iterator[dict[str, Any]]:
    """Yields a row for each kind of draft; texts are compared with plain decoding's."""
    plain = found["plain"]
    for name, before in found.items():
        when, _, drafts = name.partition(": ")
        if when == "before":
            after = found[f"after: {drafts}"]
            same = [
                p.token_ids == b.token_ids == a.token_ids
                for p, b, a in zip(plain.answers, before.answers, after.answers, strict=True)
            ]
            yield {
                "drafts": drafts,
                **Comparison.of(before, after).to_dict(),
                "num_identical": sum(same),
                "plain_tokens_per_s": plain.tokens_per_s,
            }


def verdict(foretold: Mapping[str, Mapping[str, Any]]) -> tuple[bool, str]:
    """Returns whether `RULE` keeps the new drafter, and why. Pure.

    Args:
        foretold: what `compare_foretold` found, by set.
    """
    held_out, general = (foretold[name]["acceptance_length_ratio"] for name in ("held_out", "general"))
    if held_out["low"] <= 1:
        return False, (
            f"held-out τ did not rise for certain: × {held_out['value']:.3f} [{held_out['low']:.3f}, "
            f"{held_out['high']:.3f}]"
        )
    if general["value"] < WORST_GENERAL:
        return False, f"general τ fell too far: × {general['value']:.3f}, expected {WORST_GENERAL:g} or more"
    return True, f"held-out τ × {held_out['value']:.3f}, general τ × {general['value']:.3f}"
