"""From a plan's arm specs to arms: which sorts there are, and what each needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from paceline.bench.arms.base import Arm
from paceline.bench.arms.drafting import LOCAL_KINDS
from paceline.bench.arms.local import local_arm
from paceline.bench.arms.references import REFERENCE_KINDS, reference_arm
from paceline.bench.arms.server import SERVER_KINDS, server_arm
from paceline.bench.runs.plan import ArmSpec, Plan
from paceline.core.errors import ConfigError

if TYPE_CHECKING:
    from paceline.llm import LLM

ARM_KINDS = (*LOCAL_KINDS, *REFERENCE_KINDS, *SERVER_KINDS)
"""Every kind of arm that a plan may name."""


def needs_pair(plan: Plan) -> bool:
    """Whether any arm of the plan decodes in this process. Pure."""
    return any(spec.kind not in SERVER_KINDS for spec in plan.arms)


def assemble(plan: Plan, load_pair: Callable[[], LLM], *, measures_copies: bool = False) -> list[Arm]:
    """Returns the plan's arms, in its order, none of them open.

    Args:
        load_pair: loads the pair that the arms of this process share; called at most once, and not at all where every
            arm is a server.
        measures_copies: see `EngineArm`; of the arms that are such.

    Raises:
        ConfigError: an unknown kind, or options that its sort of arm does not have.
    """
    for spec in plan.arms:
        if spec.kind not in ARM_KINDS:
            raise ConfigError(f"arm {spec.name!r}: expected one of {', '.join(ARM_KINDS)}, got {spec.kind!r}")
    llm = load_pair() if needs_pair(plan) else None
    return [_arm(spec, llm, measures_copies) for spec in plan.arms]


def _arm(spec: ArmSpec, llm: LLM | None, measures_copies: bool) -> Arm:
    if spec.kind in SERVER_KINDS:
        return server_arm(spec.name, spec.kind, spec.options)
    assert llm is not None
    if spec.kind in REFERENCE_KINDS:
        return reference_arm(spec.name, spec.kind, spec.options, llm)
    return local_arm(spec.name, spec.kind, spec.options, llm, measures_copies=measures_copies)
