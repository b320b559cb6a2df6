"""What a drafter returned → what the target is asked: no more than there is room for, and nothing it cannot embed."""

from __future__ import annotations

from paceline.core.errors import IncompatiblePairError
from paceline.core.types import Proposal


def fitted(proposal: Proposal, num_nodes: int, vocab_size: int) -> Proposal:
    """Returns the first `num_nodes` nodes of a proposal; parents precede children, so any front part is a tree.

    Args:
        proposal: as the drafter made it.
        num_nodes: rows that the session has room for behind the anchor.
        vocab_size: rows of the target's embedding.

    Raises:
        IncompatiblePairError: a token that the embedding would read out of bounds, such as the -1 of an empty buffer,
            or a node whose parent does not come before it.

    Pure.
    """
    unknown = next((token for token in proposal.tokens if not 0 <= token < vocab_size), None)
    if unknown is not None:
        raise IncompatiblePairError(
            f"the drafter drafted token {unknown}, and the target knows 0…{vocab_size - 1}; hint: use a drafter that "
            "was trained for this target"
        )
    if len(proposal.parents) != len(proposal.tokens) or any(
        not 0 <= parent <= node for node, parent in enumerate(proposal.parents)
    ):
        raise IncompatiblePairError(
            f"the drafter drafted {len(proposal.tokens)} tokens with parents {proposal.parents}; expected one for "
            "each, 0 for the anchor or i + 1 for an earlier node i"
        )
    if len(proposal.chances) not in (0, len(proposal.tokens)):
        raise IncompatiblePairError(
            f"the drafter gave {len(proposal.chances)} chances for {len(proposal.tokens)} tokens; expected one for "
            "each, or none at all"
        )
    return proposal.front(num_nodes)
