"""Which drafted tokens stand, and the target's own next token: one rule for chains and trees.

The target has said one token per row, chosen from that row's logits by the request's sampling law. From the anchor,
follow the child that carries the token said; stop where there is none; that last token is the bonus token (others
call it "recovered" when a draft was refused). At temperature 0 and above, with any proposal that was made without
looking at the target's draws, this emits exactly what plain decoding would.

Source: design from algorithms for point-mass drafts: draw y from the target, keep the draft if it equals y.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.types import Proposal, Verdict


def judge(proposal: Proposal, said: Sequence[int]) -> Verdict:
    """Returns the verdict on a proposal.

    Args:
        proposal: K drafted nodes.
        said: K + 1 tokens; `said[0]` follows the anchor, `said[i + 1]` follows node i.

    Returns:
        The accepted path of rows and the committed tokens, at least one.

    Raises:
        ValueError: `said` does not have one token per row.

    Pure.
    """
    if len(said) != len(proposal.tokens) + 1:
        raise ValueError(f"expected {len(proposal.tokens) + 1} target tokens, got {len(said)}")
    children = {
        (parent, token): node + 1
        for node, (parent, token) in reversed(
            list(enumerate(zip(proposal.parents, proposal.tokens, strict=True)))
        )
    }
    path, tokens = [0], [said[0]]
    while (row := children.get((path[-1], tokens[-1]))) is not None:
        path.append(row)
        tokens.append(said[row])
    return Verdict(tuple(path), tuple(tokens))
