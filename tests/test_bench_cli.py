"""`paceline bench` as a command: what it measures, keeps and prints, how it goes on, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli_runs import one_target, run, save_drafter
from paceline.bench.arms.copying import NUM_COPIES
from paceline.bench.arms.local import EngineArm
from paceline.bench.runs.records import read_run

SMALL = ("--kinds", "math", "--max-new-tokens", 4, "--items-per-kind", 2, "--concurrency", "1,2", "--offline")


@pytest.fixture(autouse=True, scope="module")
def _one_target() -> Iterator[None]:
    with one_target():
        yield


@pytest.fixture(autouse=True)
def _plain_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "160")


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_drafter(tmp_path_factory.mktemp("drafters") / "random")


def test_a_run_is_measured_kept_and_judged(
    drafter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    asked = ("bench", *SMALL, "--blocks", 1, "--drafter", drafter, "--out", folder)
    done = run(capsys, *asked, "--arm", "plain", "--arm", "dflash", "--arm", "lookup,name=copy", "--json")
    assert done.code == 0, done.err
    document = json.loads(done.out)
    assert document == json.loads((folder / "report.json").read_text())
    stored = read_run(folder)
    assert stored.is_complete and stored.command.startswith("paceline bench --kinds math --max-new-tokens 4 ")
    assert list(stored.arms) == ["plain", "dflash", "copy", "plain again"]
    assert len(stored.passes) == 4 * 2 * 2 and len(stored.rows) == 4 * 2 * 2 * 2
    assert all(row.outcome.failure is None and row.outcome.num_new_tokens for row in stored.rows)
    assert not any(record.copy_bytes_per_s for record in stored.passes)  # nobody asked for a profile
    cells = [cell for cell in document["summary"]["cells"] if cell["kind"] is None]
    assert all(cell["num_identical"] == cell["num_compared"] for cell in cells)
    assert {decision["verdict"] for decision in document["summary"]["decisions"]} <= {"cannot tell", "off"}
    done = run(capsys, *asked)
    assert done.code == 1 and "expected a folder without a run" in done.err
    done = run(capsys, "report", folder)
    assert done.code == 0 and done.out.strip() == document["verdict"]


def test_ctrl_c_keeps_what_was_measured_and_resume_goes_on(
    drafter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, real = tmp_path / "run", EngineArm.run
    asked = ("bench", *SMALL, "--no-control", "--blocks", 1, "--drafter", drafter, "--out", folder)
    passes = iter(range(100))

    def interrupted(arm: EngineArm, *arguments: object) -> object:
        if next(passes) == 5:
            raise KeyboardInterrupt
        return real(arm, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(EngineArm, "run", interrupted)
    done = run(capsys, *asked)
    assert done.code == 130
    assert f"--out {folder} --resume goes on" in done.err.replace("\n", "")
    kept = read_run(folder)
    assert kept.passes and not kept.is_complete
    monkeypatch.setattr(EngineArm, "run", real)
    done = run(capsys, *asked, "--resume", "--temperature", 0.5)
    assert done.code == 1 and "temperatures was" in done.err
    done = run(capsys, *asked, "--resume")
    assert done.code == 0, done.err
    whole = read_run(folder)
    assert whole.is_complete and whole.passes[: len(kept.passes)] == kept.passes
    assert len(whole.passes) == 2 * 2 * 2
    assert "ratio" in done.out and "dflash" in done.out


def test_a_log_is_replayed_and_what_cannot_be_is_said(
    drafter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log.jsonl"
    lines = [
        json.dumps({"timestamp": 100 + i / 10, "messages": [{"role": "user", "content": f"Add {i} and 1."}]})
        for i in range(4)
    ]
    log.write_text("\n".join([*lines, "{broken"]) + "\n")
    folder = tmp_path / "run"
    done = run(
        capsys, "bench", "--log", log, "--kind-rule", "sums=^Add", "--replay", 2, "--items-per-kind", 4,
        *("--max-new-tokens", 3, "--blocks", 1, "--drafter", drafter, "--out", folder, "--offline"),
    )  # fmt: skip
    assert done.code == 0, done.err
    assert "line 5" in done.err
    stored = read_run(folder)
    assert stored.workload["kinds"] == {"sums": 4}
    assert {row.place.load.label for row in stored.rows} == {"replay ×2"}


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        (("--arm", "vllm"), 1, "expected one of plain, dflash"),
        (("--arm", "plain,block_size=4"), 1, "block_size"),
        (("--kinds", "poetry"), 1, "kinds: expected some of code"),
        (("--resume",), 2, "needs --out"),
        (("--mask",), 2, "needs --log"),
        (("--limit", "3"), 2, "needs --prompts or --log"),
        (("--kind-rule", "x"), 2, "needs --log"),
        (("--concurrency", "1.5"), 2, "whole numbers"),
        (("--concurrency", "many"), 2, "expected numbers such as 1,4"),
        (("--replay", "1"), 1, "a replay needs the arrival"),
        (("--quick", "--plan", "p.toml"), 2, "leave --plan out"),
        (("--plan", "missing.toml"), 1, "cannot be read"),
        (("--arm", "url,url=http://127.0.0.1:1,api_key_env=PACELINE_NO_SUCH_KEY"), 1, "is not set"),
        (("--arm", "url,url=http://127.0.0.1:1,api_key=secret"), 1, "api_key_env=NAME"),
        (("--arm", "url,url=http://127.0.0.1:1"), 1, "127.0.0.1:1"),
    ],
)
def test_what_cannot_be_done_is_refused_before_any_work(
    arguments: tuple[str, ...], code: int, expected: str, tmp_path: Path, drafter: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    out = () if "--resume" in arguments else ("--out", tmp_path / "run")
    done = run(capsys, "bench", *arguments, *out, "--drafter", drafter, "--offline")
    assert done.code == code, done.err
    assert expected in " ".join(done.err.split())
    assert not (tmp_path / "run").exists()


def test_quick_asks_for_little(drafter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    done = run(
        capsys, "bench", "--quick", "--blocks", 1, "--max-new-tokens", 6, "--concurrency", 1, "--kinds", "code,chat",
        *("--drafter", drafter, "--out", folder, "--offline", "--profile"),
    )  # fmt: skip
    assert done.code == 0, done.err
    stored = read_run(folder)
    assert stored.plan["max_s"] == 270 and list(stored.arms) == ["plain", "dflash"]
    assert set(stored.workload["kinds"]) == {"code", "chat"}  # type: ignore[call-overload]
    assert all(len(record.copy_bytes_per_s) == NUM_COPIES for record in stored.passes)
    assert f"of {NUM_COPIES * len(stored.passes)}." in done.out and "· host" in done.out
    summary = json.loads((folder / "report.json").read_text())["summary"]
    assert {s["arm"] for s in summary["profile"]["steps"]} == {"plain", "dflash"}
    assert all(0 < s["pass_of_floor"] < 2 for s in summary["profile"]["steps"])
