"""`exact`: what a pair promises of its arithmetic, on the real default target."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cli_runs import one_target
from paceline import llm as composition
from paceline.core.errors import ConfigError, UnsupportedTargetError
from paceline.engine.runtime import RowProbe
from paceline.llm import LLM
from paceline.target.native import NativeTarget

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True, scope="module")
def _one_target() -> Iterator[None]:
    with one_target():
        yield


def walks_trees(llm: LLM) -> bool:
    assert isinstance(llm.target, NativeTarget)
    return llm.target.exact


def test_exact_is_probed_and_then_promised() -> None:
    llm = LLM(dtype="float32", exact=True)
    assert llm.exact and walks_trees(llm)
    assert llm.tree_nodes == 2


def test_nothing_is_spent_where_nobody_asks() -> None:
    llm = LLM(dtype="float32", exact=False)
    assert not llm.exact and not walks_trees(llm)
    assert walks_trees(LLM(dtype="float32"))


def test_what_cannot_be_had_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    inexact = RowProbe(widths=(2, 8), differing=(8,), trees=True, batches=False)
    monkeypatch.setattr(composition, "probe_rows", lambda target: inexact)
    with pytest.raises(UnsupportedTargetError, match=r"exact: chains and batches .* native in float32"):
        LLM(dtype="float32", exact=True)
    with pytest.raises(ConfigError, match="exact: expected True, False or 'auto', got 'maybe'"):
        LLM(dtype="float32", exact="maybe")  # type: ignore[arg-type]
