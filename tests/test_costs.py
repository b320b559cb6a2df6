"""Costs: what is read between measured points, what is measured, and which files hold."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.errors import ConfigError, UnsupportedTargetError
from paceline.core.types import Proposal
from paceline.drafter.base import Drafter
from paceline.engine import costs as costs_file
from paceline.engine.costs import TREE, WIDTHS, PassCosts, load_costs, measure_costs, num_branches
from paceline.engine.tree import TreeDrafter
from paceline.target.base import VerifyRows
from paceline.target.native import NativeTarget
from paceline.target.plan import walk
from paceline.testing import tiny_drafter, tiny_eagle3, tiny_target

COSTS = PassCosts(
    rows=((1, 1.0), (2, 1.2), (4, 1.2), (8, 2.0)),
    drafts=((1, ((2, 0.3), (6, 0.5))), (8, ((2, 1.0), (6, 1.2)))),
    sequence_s=0.1,
    context_s=0.001,
    context_row_s=0.0005,
    run_s=0.05,
    padding=0.5,
)


# Between measured points ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((1, 1), 1.0),
        ((3, 1), 1.2),
        ((6, 1), 1.6),
        ((12, 1), 2.8),
        ((4, 4), 1.2 + 0.3),
        ((1, 1, 100), 1.0 + 0.1),
        ((4, 2, 100), 1.2 + 0.1 + 0.1 + 0.05),
        ((4, 1, 0, 2), 1.2 + 0.1),
        ((4, 2, 0, 0, 3), 1.2 + 0.2 + 0.1),  # two empty places at half a row each
    ],
)
def test_a_pass_is_read_between_the_points(arguments: tuple[int, ...], expected: float) -> None:
    assert COSTS.verify_s(*arguments) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [((0, 6), 0.0), ((1, 1), 0.3), ((1, 4), 0.4), ((8, 6), 1.2), ((1, 10), 0.7), ((15, 2), 1.7)],
)
def test_a_draft_is_read_between_the_points(arguments: tuple[int, int], expected: float) -> None:
    assert COSTS.draft_s(*arguments) == pytest.approx(expected)
    assert replace(COSTS, drafts=()).draft_s(*arguments) == 0.0


@settings(deadline=None, max_examples=100)
@given(
    seed=st.integers(0, 1 << 20),
    sequences=st.integers(1, 9),
    width=st.integers(1, 9),
    padding=st.floats(0, 1),
)
def test_no_row_makes_a_pass_cheaper(seed: int, sequences: int, width: int, padding: float) -> None:
    rng = random.Random(seed)
    leaps = itertools.accumulate(rng.choice((0.0, rng.random())) for _ in range(9))
    costs = replace(COSTS, rows=tuple((3.0 * i + 1, 1 + s) for i, s in enumerate(leaps)), padding=padding)
    passes = [costs.verify_s(n, sequences, 50, 0, width) for n in range(sequences, 4 * sequences + 40)]
    assert all(a <= b + 1e-12 for a, b in itertools.pairwise(passes))
    assert costs.verify_s(20, sequences, 50, 1, width) <= costs.verify_s(20, sequences, 60, 2, width + 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": ()}, "rows: expected rising"),
        ({"rows": ((2, 1.0), (1, 2.0))}, "rows: expected rising"),
        ({"rows": ((1, 2.0), (2, 1.0))}, "rows: expected rising"),
        ({"rows": ((1, 0.0), (2, 1.0))}, "rows: expected rising"),
        ({"rows": ((1, float("nan")),)}, "rows: expected rising"),
        ({"drafts": ((1, ()),)}, "drafts: expected rising"),
        ({"drafts": ((2, ((1, 1.0),)), (1, ((1, 1.0),)))}, "rising numbers of sequences"),
        ({"run_s": -1.0}, "run_s: expected at least 0"),
        ({"padding": float("inf")}, "padding: expected at least 0"),
    ],
)
def test_numbers_that_are_none_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(COSTS, **change)


# Measuring -----------------------------------------------------------------------------------------------------------


def planted_times(costs: PassCosts, added: int) -> dict[tuple[Any, ...], float]:
    """Returns the times that the cases would take if the costs were the truth."""
    times: dict[tuple[Any, ...], float] = {("rows", w): costs.verify_s(w, 1) for w in WIDTHS}
    times["sequences",] = costs.verify_s(8, 8, width=1)
    times["uneven",] = costs.verify_s(15, 8, width=8)
    times["even",] = costs.verify_s(64, 8, width=8)
    times["tree",] = costs.verify_s(8, 1, 0, num_branches(TREE))
    for width in (1, 16):
        times["short", width] = costs.verify_s(width, 1)
        times["long", width] = costs.verify_s(width, 1, added)
    times |= {("draft", n, k): costs.draft_s(n, k) for n in (1, 8) for k in (2, 6)}
    return times


def test_what_was_measured_is_what_the_costs_say() -> None:
    rows = tuple((float(w), 1.0 + 0.02 * w) for w in WIDTHS)
    truth = replace(COSTS, rows=rows)
    found = costs_file._costs_of(planted_times(truth, 300), 300)
    for name in ("rows", "drafts"):
        assert getattr(found, name) == getattr(truth, name)
    for name in ("sequence_s", "context_s", "context_row_s", "run_s", "padding"):
        assert getattr(found, name) == pytest.approx(getattr(truth, name), rel=1e-6), name


def test_noise_makes_nothing_cheaper() -> None:
    times = planted_times(COSTS, 300)
    times["rows", 16] = times["rows", 12] / 2
    for name in (("sequences",), ("uneven",), ("tree",), ("long", 1), ("long", 16)):
        times[name] = 1e-3
    found = costs_file._costs_of(times, 300)
    assert dict(found.rows)[16] == dict(found.rows)[12]
    assert found.sequence_s == found.run_s == found.context_s == found.padding == 0.0


@pytest.mark.parametrize("kind", ["none", "chains", "trees", "eagle3"])
def test_a_pair_is_measured_and_left_as_it_was(kind: str) -> None:
    target = tiny_target(max_positions=128)
    make: dict[str, Callable[[], Drafter | None]] = {
        "none": lambda: None,
        "chains": lambda: tiny_drafter(target, 8),
        "trees": lambda: TreeDrafter(tiny_drafter(target, 4), 5),
        "eagle3": lambda: tiny_eagle3(target, 3),
    }
    costs = measure_costs(target, make[kind]())
    assert [n for n, _ in costs.rows] == list(WIDTHS)
    slots = {"none": [], "chains": [2, 4, 7], "trees": [2, 4, 5], "eagle3": [2]}[kind]
    assert [[k for k, _ in points] for _, points in costs.drafts] == ([slots] * 2 if slots else [])
    assert [n for n, _ in costs.drafts] == ([1, 8] if slots else [])
    assert costs.origin == "measured just now"
    assert sorted(target._free) == list(range(target._cache[0][0].shape[0])), "all slots are free"


def test_a_target_that_takes_chains_only_is_measured_too(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target()
    verify = target.verify

    def chains_only(batch: list[VerifyRows]) -> Any:
        if not all(part.proposal.is_chain for part in batch):
            raise UnsupportedTargetError("chains only")
        return verify(batch)

    monkeypatch.setattr(target, "verify", chains_only)
    assert measure_costs(target).run_s == 0.0


@pytest.mark.parametrize(
    ("parents", "expected"),
    [((), 0), ((0, 1, 2), 0), ((0, 0), 1), ((0, 1, 0, 3, 0, 1), 3), (TREE.parents, 3)],
)
def test_branches_are_leaves_beyond_the_first(parents: tuple[int, ...], expected: int) -> None:
    tree = Proposal((1,) * len(parents), parents)
    session = tiny_target().open(8)
    assert num_branches(tree) == expected == len(walk(VerifyRows(session, [1], tree))) - 1


# Files ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What was measured, in order; every time it comes to `COSTS`."""
    pairs: list[object] = []

    def measure(target: object, drafter: object = None) -> PassCosts:
        pairs.append((target, drafter))
        return COSTS

    monkeypatch.setattr(costs_file, "measure_costs", measure)
    return pairs


@pytest.fixture(scope="module")
def target() -> NativeTarget:
    return tiny_target()


def test_a_file_is_written_once_and_read_back(
    tmp_path: Path, measured: list[object], target: NativeTarget
) -> None:
    drafter = TreeDrafter(tiny_drafter(target, 4), 5)
    first = load_costs(tmp_path / "costs", target, drafter)
    assert first.origin == "measured just now, since there was no file yet"
    second = load_costs(tmp_path / "costs", target, TreeDrafter(tiny_drafter(target, 4), 5))
    (path,) = (tmp_path / "costs").iterdir()
    assert second.origin == f"read from {path}" and len(measured) == 1
    assert replace(second, origin="") == replace(first, origin="") == replace(COSTS, origin="")


def test_each_pair_has_a_file(tmp_path: Path, measured: list[object], target: NativeTarget) -> None:
    drafter = tiny_drafter(target, 4)
    drafters = (None, drafter, TreeDrafter(drafter, 5), TreeDrafter(drafter, 6), tiny_drafter(target, 6))
    for pair in [(target, d) for d in drafters] + [(tiny_target(num_layers=3), None)]:
        load_costs(tmp_path, *pair)
    target.exact = False
    load_costs(tmp_path, target, None)
    target.exact = True
    assert len(list(tmp_path.iterdir())) == len(measured) == 7


def edited(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        ("machine", r"measured elsewhere \(processor: 'abacus', here "),
        ("threads", r"measured elsewhere \(num_threads: '77', here "),
        ("old", "was 31 days old"),
        ("of tomorrow", "was -1 days old"),
        ("cut", "was damaged"),
        ("no key", r"was damaged \(KeyError"),
        ("other fields", "was damaged"),
        ("falling", "was damaged .*expected rising"),
        ("not numbers", "was damaged"),
        ("a list", "was damaged"),
    ],
)
def test_what_does_not_hold_is_measured_anew(
    spoil: str, reason: str, tmp_path: Path, measured: list[object], target: NativeTarget
) -> None:
    load_costs(tmp_path, target)
    (path,) = tmp_path.iterdir()
    stored = json.loads(path.read_text())
    key, values, day = stored["key"], stored["costs"], 86400
    changes: dict[str, dict[str, Any]] = {
        "machine": {"key": key | {"processor": "abacus"}},
        "threads": {"key": key | {"num_threads": "77"}},
        "old": {"measured_at": stored["measured_at"] - 31 * day},
        "of tomorrow": {"measured_at": stored["measured_at"] + day},
        "other fields": {"costs": values | {"rows_per_s": 1}},
        "falling": {"costs": values | {"rows": [[1, 2.0], [2, 1.0]]}},
        "not numbers": {"costs": values | {"run_s": "much"}},
    }
    if spoil == "cut":
        path.write_text(path.read_text()[:50])
    elif spoil == "no key":
        path.write_text("{}")
    elif spoil == "a list":
        path.write_text("[1]")
    else:
        edited(path, **changes[spoil])
    again = load_costs(tmp_path, target)
    assert again.origin.startswith("measured just now, since") and len(measured) == 2
    assert again.rows == COSTS.rows
    assert re.search(reason, again.origin), again.origin
    assert load_costs(tmp_path, target).origin == f"read from {path}"


def test_a_folder_that_cannot_be_written_is_said_and_no_error(
    tmp_path: Path, measured: list[object], target: NativeTarget
) -> None:
    (tmp_path / "file").write_text("")
    costs = load_costs(tmp_path / "file" / "costs", target)
    assert costs.rows == COSTS.rows and "could not be kept" in costs.origin
