"""The folder of a run: what a reader finds in it after a kill, damage, or a write that fails."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.bench.arms.base import Fingerprint, StepTime
from paceline.bench.numbers.metrics import summarise
from paceline.bench.numbers.profile import profile
from paceline.bench.pages.page import document
from paceline.bench.runs import records, runner
from paceline.bench.runs.plan import ArmSpec, Plan
from paceline.bench.runs.rows import Run
from paceline.core.errors import ConfigError
from scripted_arms import ScriptedArm, make_workload, plan_of, three_arms

WORKLOAD = make_workload({"code": 6, "chat": 6})


def test_the_header_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted = three_arms()
    run = runner.run(plan_of(scripted), WORKLOAD, scripted, tmp_path)

    def full(*paths: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="disk full"):
        records.write(replace(run, lost=("x",)), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.jsonl", "run.json"]
    assert records.read_run(tmp_path) == run


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run]:
    folder = tmp_path_factory.mktemp("run")
    scripted = three_arms()[:2]
    return folder, runner.run(plan_of(scripted), WORKLOAD, scripted, folder)


def copy_with(stored: tuple[Path, Run], folder: Path, rows: bytes) -> Path:
    (folder / "run.json").write_bytes((stored[0] / "run.json").read_bytes())
    (folder / "rows.jsonl").write_bytes(rows)
    return folder


def test_a_torn_tail_costs_its_pass_only(stored: tuple[Path, Run], tmp_path: Path) -> None:
    data, run = (stored[0] / "rows.jsonl").read_bytes(), stored[1]
    line_ends = [i for i, byte in enumerate(data) if byte == ord("\n")]
    for end in sorted({*range(0, len(data), 37), *line_ends, *(i + 1 for i in line_ends)}):
        whole = [line for line in data[:end].split(b"\n")[:-1] if b'"record": "pass"' in line]
        read = records.read_run(copy_with(stored, tmp_path, data[:end]))
        assert read.passes == run.passes[: len(whole)]
        assert read.rows == run.rows[: 2 * len(whole)]
        records.cut_tail(tmp_path)
        cut = (tmp_path / "rows.jsonl").read_bytes()
        assert data.startswith(cut) and cut.count(b'"record": "pass"') == len(whole)
        assert not cut or cut.endswith(b"}\n")


@pytest.mark.parametrize(
    ("old", "new", "number"),
    [
        (b'{"record": "row"', b'{"record": "ro', 1),
        (b'"kind": ', b'"sort": ', 1),
        (b'"load": {"concurrency": 1}', b'"load": {}', 1),
        (b'"wall_s": ', b'"while_s": ', 3),
        (b'"num_rows": 2', b'"num_rows": 3', 3),
    ],
)
def test_a_broken_line_is_named(
    stored: tuple[Path, Run], tmp_path: Path, old: bytes, new: bytes, number: int
) -> None:
    data = (stored[0] / "rows.jsonl").read_bytes()
    assert old in data
    with pytest.raises(ConfigError, match=f"rows.jsonl:{number}: "):
        records.read_run(copy_with(stored, tmp_path, data.replace(old, new, 1)))


def test_what_is_no_run_is_refused(stored: tuple[Path, Run], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"expected the folder of a run, with run\.json"):
        records.read_run(tmp_path)
    (tmp_path / "run.json").write_text("[]")
    with pytest.raises(ConfigError, match="expected a JSON object with a schema_version"):
        records.read_run(tmp_path)
    header = json.loads((stored[0] / "run.json").read_text())
    (tmp_path / "run.json").write_text(json.dumps({**header, "schema_version": 99}))
    with pytest.raises(ConfigError, match="expected schema_version 1 or 2, got 99"):
        records.read_run(tmp_path)
    (tmp_path / "run.json").write_text(json.dumps({**header, "colour": "red"}))
    with pytest.raises(ConfigError, match=r"not what schema_version 2 says .*colour"):
        records.read_run(tmp_path)


def test_step_times_and_copies_come_back_as_they_were(stored: tuple[Path, Run], tmp_path: Path) -> None:
    times = (StepTime(2, 3, 0.9, 0.1, 0.5, 0.02, 0.03, 0.04, ((2, 1, 0.2, 0.01), (9, 2, 0.3, 0.01))),)
    record = replace(stored[1].passes[0], step_times=times, copy_bytes_per_s=(1e9, 2e9))
    records.write(replace(stored[1], arms={"plain": Fingerprint({}, reads={"pass": 10})}), tmp_path)
    records.append_pass(record, stored[1].rows[:2], tmp_path)
    read = records.read_run(tmp_path)
    assert read.passes == (record,) and read.arms["plain"].reads == {"pass": 10}


RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results" / "bench"


@pytest.mark.parametrize("name", sorted(folder.name for folder in RESULTS.iterdir()))
def test_runs_of_the_first_version_are_read_and_reported(name: str) -> None:
    """Their steps have draft and verify only: what is not known is no number."""
    run = records.read_run(RESULTS / name)
    times = [time for record in run.passes for time in record.step_times]
    if json.loads((RESULTS / name / "run.json").read_text())["schema_version"] == 1:
        assert all((t.sample_s, t.inject_s, t.keep_s, t.passes) == (None, None, None, ()) for t in times)
        assert not any(record.copy_bytes_per_s for record in run.passes)
        assert profile(run) is None
    rules = Plan.from_dict(run.plan).rules
    assert times or name == "vllm_server"
    assert document(run, summarise(run, rules))["schema_version"] == 1


def test_secrets_are_not_stored(tmp_path: Path) -> None:
    specs = tuple(ArmSpec(name, "server", {"api_key": "sk-123", "url": "u"}) for name in ("plain", "dflash"))
    scripted = [ScriptedArm("plain"), ScriptedArm("dflash")]
    runner.run(replace(plan_of(scripted), arms=specs), WORKLOAD, scripted, tmp_path)
    stored = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert b"sk-123" not in stored and b'"url": "u"' in stored
    resumed = runner.run(replace(plan_of(scripted), arms=specs), WORKLOAD, scripted, tmp_path, resume=True)
    assert resumed.is_complete
