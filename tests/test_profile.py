"""Where a step's time goes: parts that add up, passes by rows, the floor, and what is not known."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.bench.arms import copying
from paceline.bench.arms.base import Fingerprint, Load, StepTime
from paceline.bench.arms.copying import copy_rates
from paceline.bench.numbers.profile import profile, whole_percents
from paceline.bench.numbers.summary import PassTime, Profile, StepParts
from paceline.bench.pages import page
from paceline.bench.pages import profile as pages
from paceline.bench.runs.rows import PassRecord, Place, Run
from paceline.cli.profile import show
from paceline.cli.report import judge
from synthetic_runs import Scenario, make_run

BY_ROWS = ((1, 1, 0.01, 0.002), (3, 1, 0.02, 0.003), (4, 2, 0.02, 0.005))
ONE = StepTime(1, 4, 0.10, 0.02, 0.05, 0.01, 0.004, 0.006, BY_ROWS)
TWO = StepTime(1, 6, 0.20, 0.03, 0.10, 0.02, 0.010, 0.010, ((1, 5, 0.06, 0.010), (17, 1, 0.04, 0.010)))
FOUR = StepTime(4, 2, 0.08, 0.0, 0.06, 0.004, 0.0, 0.002, ((4, 2, 0.06, 0.004),))
OLD = StepTime(1, 100, 9.0, 1.0, 2.0)


def make(
    passes: Mapping[str, list[tuple[StepTime, ...]]],
    rates: tuple[float, ...] = (),
    device: str = "cpu",
    temperature: float = 0.0,
) -> Run:
    """Returns a run of passes by arm, which read 10 MB a pass and 2 MB a draft."""
    return Run(
        plan={},
        workload={},
        environment={},
        command="",
        started="",
        arms={
            arm: Fingerprint({"device": device}, reads={"pass": 10_000_000, "draft": 2_000_000})
            for arm in passes
        },
        rows=(),
        passes=tuple(
            PassRecord(Place(i, 0, arm, Load(1), temperature), 1.0, times, copy_bytes_per_s=rates)
            for arm, found in passes.items()
            for i, times in enumerate(found)
        ),
    )


def of(run: Run) -> Profile:
    found = profile(run)
    assert found is not None
    return found


# Parts ---------------------------------------------------------------------------------------------------------------


def test_parts_are_means_over_passes_and_add_up() -> None:
    one, four = of(make({"a": [(ONE,), (TWO, FOUR)]})).steps
    assert (one.arm, one.num_sequences, one.num_steps) == ("a", 1, 10)
    assert one.total_ms == pytest.approx(30.0)
    assert one.parts_ms == pytest.approx(
        {"verify": 15.0, "draft": 5.0, "sample": 3.0, "inject": 1.4, "keep": 1.6, "host": 4.0}
    )
    assert (four.num_sequences, four.num_steps) == (4, 2) and four.host_ms == pytest.approx(7.0)
    for parts in (one, four):
        assert sum(parts.parts_ms.values()) == pytest.approx(parts.total_ms)


def test_temperatures_stay_apart() -> None:
    cold, warm = make({"a": [(ONE,)]}), make({"a": [(TWO,)]}, temperature=0.8)
    steps = of(replace(cold, passes=cold.passes + warm.passes)).steps
    assert [(s.temperature, s.num_steps) for s in steps] == [(0.0, 4), (0.8, 6)]


def test_what_was_not_kept_is_no_number() -> None:
    assert profile(make({"a": [(OLD,)], "server": [()]})) is None
    mixed = of(make({"a": [(OLD,), (ONE,)], "server": [()], "b": [(OLD,)]}))
    assert [(s.arm, s.num_steps) for s in mixed.steps] == [("a", 4)]
    assert mixed.missing == ("server", "b") and list(mixed.read_bytes) == ["a"]
    said = " ".join(pages.sentences(mixed))
    assert "No profile of server, b" in said and "no floor" in said


def test_the_control_is_left_out_but_its_copies_count() -> None:
    run = make({"plain": [(ONE,)], "plain again": [(TWO,)]}, rates=(1e9, 3e9))
    found = of(run)
    assert {s.arm for s in found.steps} == {p.arm for p in found.passes} == {"plain"} and found.missing == ()
    assert found.copy is not None and found.copy.num_copies == 4


# Passes and the floor ------------------------------------------------------------------------------------------------


def test_passes_are_taken_together_by_rows() -> None:
    found = of(make({"a": [(ONE,), (TWO, FOUR)]})).passes
    assert [(p.min_rows, p.max_rows, p.num_passes) for p in found] == [(1, 1, 6), (3, 4, 5), (17, 32, 1)]
    few = found[1]  # one of 3 rows in 20 ms, two of 4 in 20 ms, two of 4 in 60 ms
    assert few.mean_rows == pytest.approx(19 / 5)
    assert few.pass_ms == pytest.approx(100 / 5) and few.row_ms == pytest.approx(100 / 19)


@pytest.mark.parametrize(
    ("rows", "span"),
    [(1, (1, 1)), (2, (2, 2)), (3, (3, 4)), (4, (3, 4)), (5, (5, 8)), (9, (9, 16)), (32, (17, 32))],
)
def test_spans_double(rows: int, span: tuple[int, int]) -> None:
    (found,) = of(make({"a": [(replace(ONE, passes=((rows, 4, 0.05, 0.01),)),)]})).passes
    assert (found.min_rows, found.max_rows) == span


def test_the_floor_is_reading_at_the_best_copy_rate() -> None:
    found = of(make({"a": [(ONE,), (FOUR,)]}, rates=(1e9, 2e9, 1.5e9)))
    assert found.copy is not None
    assert (found.copy.best_bytes_per_s, found.copy.median_bytes_per_s, found.copy.num_copies) == (
        2e9,
        1.5e9,
        6,
    )
    one, four = found.steps  # 10 MB at 2 GB/s are 5 ms, 2 MB 1 ms
    assert one.pass_of_floor == pytest.approx(5 / 12.5) and one.draft_of_floor == pytest.approx(1 / 5)
    assert four.pass_of_floor == pytest.approx(5 / 30) and four.draft_of_floor is None  # nothing was drafted
    assert found.passes[0].of_floor == pytest.approx(5 / 10)


def test_there_is_no_floor_without_a_rate_or_bytes() -> None:
    without = of(make({"a": [(ONE,)]}))
    run = make({"a": [(ONE,)]}, rates=(1e9,))
    unread = of(replace(run, arms={"a": Fingerprint({"device": "cpu"})}))
    for found in (without, unread):
        shares = [x for s in found.steps for x in (s.pass_of_floor, s.draft_of_floor)]
        assert {*shares, *(p.of_floor for p in found.passes)} == {None}
    assert "not measured" in " ".join(pages.sentences(without))
    assert "a: no floor, as only the native runner" in " ".join(pages.sentences(unread))


def test_a_pass_ends_in_sampling_where_the_host_goes_on() -> None:
    """An accelerator is waited for there, so the time is the pass's; the parts stay what the clock said."""
    found = of(make({"a": [(ONE,)]}, rates=(2e9,), device="gpu:0"))
    (parts,) = found.steps
    assert parts.verify_ms == pytest.approx(12.5) and parts.sample_ms == pytest.approx(2.5)
    assert parts.pass_of_floor == pytest.approx(5 / 15)
    assert [p.pass_ms for p in found.passes] == pytest.approx([12.0, 48 / 3])


# In words ------------------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(0.0, 1e3), min_size=2, max_size=6).filter(lambda parts: sum(parts) > 1e-6))
def test_percents_add_up_and_are_near(parts: list[float]) -> None:
    named = {str(i): part for i, part in enumerate(parts)}
    found = whole_percents(named)
    assert list(found) == list(named) and sum(found.values()) == 100
    assert all(abs(found[name] - 100 * part / sum(parts)) < 1 + 1e-9 for name, part in named.items())


def test_words_are_as_wide_whatever_they_say() -> None:
    parts = StepParts("a", 0.0, 1, 1, 100.0, 14.0, 71.0, 4.0, 3.0, 2.0, 6.0)
    words = pages.in_words(parts)
    assert words == "verify  71 % · draft  14 % · sample   4 % · inject   3 % · keep   2 % · host   6 %"
    bare = replace(
        parts, draft_ms=0.0, verify_ms=100.0, sample_ms=0.0, inject_ms=0.0, keep_ms=0.0, host_ms=0.0
    )
    assert len(pages.in_words(bare)) == len(words) and "verify 100 %" in pages.in_words(bare)
    run = make({"plain": [(FOUR,)], "dflash, short": [(ONE,)]})
    assert len({line.index("verify") for line in pages.shares(of(run))}) == 1


def test_a_terminal_shows_a_line_for_each_arm_and_batch_size(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    show(of(make({"plain": [(FOUR,)], "dflash": [(ONE, FOUR)]}, rates=(2e9,))))
    lines = capsys.readouterr().out.splitlines()
    table = [line.split() for line in lines if "%" in line and "·" not in line and "at its floor" not in line]
    heads = [row[:3] for row in table]
    assert heads[:3] == [["plain", "0", "4"], ["dflash", "0", "1"], ["dflash", "0", "4"]]
    assert ["dflash", "0", "3–4"] in heads
    assert table[1][3:] == ["4", "25.0", "12.5", "5.00", "2.50", "1.00", "1.50", "2.50", "40", "%", "20", "%"]
    assert sum("verify" in line and "·" in line for line in lines) == 3
    show(None)
    assert "no profile" in capsys.readouterr().out


def test_reports_show_the_profile_where_there_is_one(tmp_path: Path) -> None:
    run = make_run(Scenario(num_blocks=2, kinds=("code",), loads=(Load(1), Load(4)), has_parts=True))
    summary = judge(run, {})
    assert summary.profile is not None
    parts = {(s.arm, s.num_sequences): s for s in summary.profile.steps}
    assert set(parts) == {("plain", 1), ("plain", 4), ("dflash", 1), ("dflash", 4)}
    assert parts["dflash", 4].host_ms == pytest.approx(0.04 * parts["dflash", 4].total_ms)
    spans = {(p.arm, p.min_rows, p.max_rows) for p in summary.profile.passes}
    assert spans == {("plain", 1, 1), ("plain", 3, 4), ("dflash", 5, 8), ("dflash", 17, 32)}
    page.write_report(run, summary, tmp_path)
    stored = json.loads((tmp_path / "report.json").read_text())["summary"]["profile"]
    assert stored["copy"] == {
        "best_bytes_per_s": 50e9,
        "median_bytes_per_s": 45e9,
        "num_copies": 2 * 2 * 3 * 2 * 2,
    }
    assert [PassTime(**p) for p in stored["passes"]] == list(summary.profile.passes)
    html = (tmp_path / "report.html").read_text()
    assert "Where a step" in html and next(pages.shares(summary.profile)) in html
    old = make_run(Scenario(num_blocks=2, kinds=("code",)))
    page.write_report(old, judge(old, {}), tmp_path / "old")
    assert 'id="profile"' not in (tmp_path / "old" / "report.html").read_text()


# Copies --------------------------------------------------------------------------------------------------------------


def test_rates_count_what_is_read_and_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock is read before and after each copy; the first copy is not counted."""
    reads = iter([0.0, 100.0, 200.0, 200.5, 300.0, 302.0])
    monkeypatch.setattr(copying, "perf_counter", lambda: next(reads))
    assert copy_rates(torch.device("cpu"), 4_000_000, 2) == (16e6, 4e6)
