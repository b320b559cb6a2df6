"""Public doubles: tiny targets and drafters, scripted drafters, and the proof that a drafter changes no text.

    target = tiny_target()
    assert_lossless(target, tiny_drafter(target), [Request("a", (1, 2, 3))])

Scripted drafters obey `drafter.base.Drafter`. Those that know a text take whole token sequences, prompt included, in
the order in which an engine admits the requests; `plain_texts` makes them.

Owns: what tests of drafters and engines stand on, for users too. May import: engine and below. Never: pytest.
"""

from paceline.testing.proofs import assert_lossless, plain_texts, run_checked, whole
from paceline.testing.scripted import (
    AlwaysWrongDrafter,
    BigramDrafter,
    ConstantDrafter,
    Memory,
    OracleDrafter,
    RandomDrafter,
    ScriptedDrafter,
    TreeDrafter,
)
from paceline.testing.tiny import (
    END_TOKEN,
    TINY_HEAD_DIM,
    tiny_drafter,
    tiny_eagle3,
    tiny_shape,
    tiny_target,
    tiny_tensors,
)

__all__ = [
    "END_TOKEN",
    "TINY_HEAD_DIM",
    "AlwaysWrongDrafter",
    "BigramDrafter",
    "ConstantDrafter",
    "Memory",
    "OracleDrafter",
    "RandomDrafter",
    "ScriptedDrafter",
    "TreeDrafter",
    "assert_lossless",
    "plain_texts",
    "run_checked",
    "tiny_drafter",
    "tiny_eagle3",
    "tiny_shape",
    "tiny_target",
    "tiny_tensors",
    "whole",
]
