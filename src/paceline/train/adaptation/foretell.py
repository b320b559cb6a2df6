"""τ that decoding would have, from answers that are there already: many prompts in the time of decoding a few.

The target answers each prompt once, whatever is compared; a drafter then says at all positions of an answer what it
would have drafted there, in one pass, and the blocks that a decoding would have met follow from that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from paceline.drafter.base import NeuralDrafter
from paceline.train.adaptation.evaluate import Steps, acceptance, acceptance_length_ratio
from paceline.train.data.features import Document
from paceline.train.data.prompts import Prompt
from paceline.train.diagnosis.scores import Answer, Scorer, walk


@dataclass(frozen=True, slots=True)
class Chains:
    """Greedy chains of a drafter.

    Args:
        scorer: with the tokens that the drafter drafts.
    """

    scorer: Scorer
    drafter: NeuralDrafter

    def foretell(self, prompt: Prompt, document: Document) -> Steps:
        """Returns the steps in which they would decode an answer, as far as its last whole block. Pure.

        Args:
            document: the prompt and the target's answer to it, with the rows that the drafter taps.
        """
        answer = Answer(
            prompt.id,
            prompt.category,
            document.token_ids,
            len(prompt.token_ids),
            self.drafter.target_layer_ids,
            document.hidden[:-1],
        )
        anchors = answer.anchors(self.drafter.block_size - 1)
        if not len(anchors):
            return Steps(prompt.category, 0, 0)
        accepted = self.scorer.accepted(self.drafter, answer, anchors)
        visited = accepted[walk(accepted)]
        return Steps(prompt.category, len(visited), int((visited + 1).sum()))


def compare_foretold(
    before: Chains,
    after: Chains,
    prompts: Sequence[Prompt],
    documents: Sequence[Document],
    tell: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Returns two drafters' steps on the same answers as JSON data.

    Args:
        documents: of the prompts, in order; each holds the rows that both drafters tap.
        tell: called behind each prompt.
    """
    old, new = list[Steps](), list[Steps]()
    for prompt, document in zip(prompts, documents, strict=True):
        old.append(before.foretell(prompt, document))
        new.append(after.foretell(prompt, document))
        tell()
    return {
        "num_prompts": len(prompts),
        "before": acceptance(old),
        "after": acceptance(new),
        "acceptance_length_ratio": asdict(acceptance_length_ratio(old, new)),
    }
