"""`paceline report` as a command, and how its numbers are written."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from cli_runs import run as run_command
from paceline.bench.numbers.summary import Interval
from paceline.bench.pages import amounts
from paceline.bench.runs import records
from paceline.bench.runs.rows import Run
from paceline.cli.report import read_verified
from paceline.core.errors import ConfigError
from synthetic_runs import Scenario, make_run


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (amounts.number(0.01234), "0.0123"),
        (amounts.number(12345.6), "12,346"),
        (amounts.number(math.inf), "—"),
        (amounts.ratio(1.3249), "1.32×"),
        (amounts.seconds(0.01234), "12.3 ms"),
        (amounts.seconds(90), "90.0 s"),
        (amounts.seconds(600), "10.0 min"),
        (amounts.size(1_500_000_000), "1.50 GB"),
        (amounts.size(12), "12 B"),
        (amounts.percent(0.955), "95.5 %"),
        (amounts.percent(0.9), "90 %"),
        (amounts.span(Interval(1.321, 1.25, math.inf), decimals=2), "1.32 [1.25, —]"),
        (amounts.span(Interval(0.01234, -math.inf, 0.02), 1000), "12.3 [—, 20.0]"),
        (amounts.span(Interval(math.nan, 0, 1)), "—"),
        (amounts.span(None), "—"),
    ],
)
def test_amounts_are_readable(text: str, expected: str) -> None:
    assert text == expected


def store(run: Run, folder: Path) -> Path:
    records.write(run, folder)
    for record in run.passes:
        records.append_pass(record, [row for row in run.rows if row.place == record.place], folder)
    return folder


def test_the_command_writes_the_report_of_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = store(make_run(Scenario(num_blocks=2, kinds=("code",))), tmp_path / "run")
    checks = tmp_path / "verify.json"
    checks.write_text(json.dumps({"flagged": ["ties"], "checks": [{"name": "ties", "status": "flagged"}]}))
    done = run_command(capsys, "report", folder, "--out", tmp_path / "out", "--verify", checks, "--json")
    assert done.code == 0, done.err
    printed = json.loads(done.out)
    assert printed == json.loads((tmp_path / "out" / "report.json").read_text())
    assert printed["verified"]["dflash"]["flagged"] == ["ties"]
    assert printed["summary"]["decisions"][0]["verdict"] == "off"  # its text is not the target's
    assert str(tmp_path / "out" / "report.html") in done.err.replace("\n", "")
    assert not (folder / "report.html").exists()


def test_the_command_says_the_verdict_and_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(Scenario(failures={"plain": 1.0, "dflash": 1.0, "plain again": 1.0}, num_blocks=1))
    folder = store(run, tmp_path / "run")
    done = run_command(capsys, "report", folder)
    assert done.code == 0 and (folder / "report.html").is_file()
    assert done.out.strip() == json.loads((folder / "report.json").read_text())["verdict"]
    done = run_command(capsys, "report", tmp_path)
    assert done.code == 1 and "expected the folder of a run" in done.err
    (tmp_path / "bad.json").write_text("[]")
    done = run_command(capsys, "report", folder, "--verify", tmp_path / "bad.json")
    assert done.code == 1 and "expected a report of `paceline verify --json`" in done.err


def test_an_arm_is_named_where_several_could_be_meant(tmp_path: Path) -> None:
    run = make_run(Scenario(ratios={"plain": 1.0, "a": 1.2, "b": 1.3}, num_blocks=1))
    checks = tmp_path / "v.json"
    checks.write_text('{"checks": []}')
    assert read_verified(run, [f"b={checks}"]) == {"b": {"checks": []}}
    with pytest.raises(ConfigError, match=r"expected ARM=FILE with an arm of \['a', 'b'\]"):
        read_verified(run, [str(checks)])
