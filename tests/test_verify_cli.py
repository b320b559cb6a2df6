"""`paceline verify` as a command: what it prints, its JSON, its exit codes; and the prompt files it reads."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import verify_pairs
from cli_runs import one_target, run, save_drafter
from paceline.bench.workloads.prompts import Prompt, load_prompts
from paceline.core.errors import ConfigError

SHORT = ("--num-prompts", 2, "--max-new-tokens", 6, "--offline")


@pytest.fixture(autouse=True, scope="module")
def _one_target() -> Iterator[None]:
    with one_target():
        yield


@pytest.fixture(autouse=True)
def _plain_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_drafter(tmp_path_factory.mktemp("drafters") / "random")


def test_an_exact_pair_gives_a_table_and_exit_code_0(
    drafter: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = run(capsys, "verify", "--drafter", drafter, *SHORT, "--temperature", 0, "--batch-sizes", "2,1")
    assert done.code == 0, done.err
    assert "2 of 2 texts identical" in done.out
    assert "the same texts in 3 of 3" in done.out  # blocks of 2 and of 4, batches of 1
    assert done.out.count("not run") == 6
    assert "speculative" in done.err


def test_a_wrong_verifier_gives_a_document_and_exit_code_1(
    drafter: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    verify_pairs.accept_some_refused(monkeypatch, 0.7)
    options = ("--block-sizes", 3, "--params", '{"repetition_penalty": 1.2}', "--json")
    done = run(capsys, "verify", "--drafter", drafter, *SHORT, *options)
    assert done.code == 1
    assert done.err.splitlines()[-1].startswith("error: flagged: identical_texts, ties, ")
    report = json.loads(done.out)
    assert set(report) == {
        "schema_version",
        "command",
        "flagged",
        "checks",
        "pair",
        "settings",
        "environment",
    }
    assert report["schema_version"] == 1
    assert [check["name"] for check in report["checks"]] == [
        *("plain_control", "identical_texts", "ties", "invariance", "seeded_texts", "seeded_ties"),
        *("possible_tokens", "surprise", "uniformity", "directed"),
    ]
    fields = {"name", "status", "summary", "statistic", "p_value", "p_adjusted", "bound", "details"}
    assert all(set(check) == fields for check in report["checks"])
    checks = {check["name"]: check for check in report["checks"]}
    assert checks["plain_control"]["status"] == "ok"
    assert checks["directed"]["status"] == "flagged" and checks["directed"]["p_adjusted"] < 0.01
    assert report["pair"]["drafter"] == str(drafter)
    assert report["settings"]["block_sizes"] == [3] and report["settings"]["num_prompts"] == 2
    assert report["settings"]["params"]["repetition_penalty"] == 1.2


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--temperature", -1), "--temperature"),
        (("--max-new-tokens", 0), "--max-new-tokens"),
        (("--block-sizes", "2,x"), "--block-sizes"),
        (("--batch-sizes", "0"), "--batch-sizes"),
        (("--alpha", 2), "--alpha"),
        (("--rounding-steps", 0), "--rounding-steps"),
        (("--params", "{"), "not JSON"),
        (("--params", '{"seed": 3}'), "options of their own"),
        (("--params", '{"top_k": -3}'), "top_k"),
        (("--params", '{"grammar": {"kind": "regex", "source": "a"}}'), "grammar"),
        (("--drafter", "none"), "nothing to verify"),
        (("--plain-url", "http://localhost:1"), "--speculative-url"),
        (("--model", "m"), "needs --plain-url and --speculative-url"),
        (
            ("--plain-url", "http://a", "--speculative-url", "http://b", "--block-sizes", "2"),
            "a server chooses its own",
        ),
    ],
)
def test_wrong_usage_is_exit_code_2(
    options: tuple[object, ...], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    done = run(capsys, "verify", *options)
    assert done.code == 2
    assert expected in " ".join(done.err.replace("│", " ").split())


def test_what_is_missing_is_said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    servers = ("--plain-url", "http://127.0.0.1:9", "--speculative-url", "http://127.0.0.1:9", "--offline")
    refused = run(capsys, "verify", *servers)
    assert refused.code == 1 and "http://127.0.0.1:9/v1/models: cannot be reached" in refused.err
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    unset = run(capsys, "verify", *servers, "--api-key-env", "NO_SUCH_KEY")
    assert unset.code == 1 and "NO_SUCH_KEY is not set" in unset.err
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "scipy" else find_spec(name)
    )
    without = run(capsys, "verify")
    assert without.code == 1 and "pip install 'paceline[bench]'" in without.err


# Prompt files


def render(messages: list[dict[str, str]]) -> list[int]:
    return [len(message["content"]) for message in messages]


def test_every_shape_of_row_is_read(tmp_path: Path) -> None:
    rows = [
        {"id": "a", "prompt": "one"},
        {"turns": ["two!", "later"]},
        {"conversations": [{"from": "human", "value": "three"}, {"from": "gpt", "value": "no"}]},
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "four"}]},
        {"prompt_ids": [5, 6]},
    ]
    path = tmp_path / "mine.jsonl"
    path.write_text("\n\n".join(map(json.dumps, rows)), encoding="utf-8")
    assert load_prompts(path, render, None) == [
        Prompt("a", (3,), "one"),
        Prompt("mine-3", (4,), "two!"),
        Prompt("mine-5", (5,), "three"),
        Prompt("mine-7", (1, 4), "four"),
        Prompt("mine-9", (5, 6)),
    ]
    assert [prompt.id for prompt in load_prompts(path, render, 2)] == ["a", "mine-3"]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "at least one prompt"),
        (b"{", r"bad\.jsonl:1: not a JSON object"),
        (b'{"prompt": "a"}\n{"text": "b"}', r"bad\.jsonl:2: expected one of turns, messages"),
        (b"\xff", "expected UTF-8 text"),
        (b'{"messages": [{"role": "assistant", "content": "a"}]}', "at least one user"),
    ],
)
def test_a_bad_prompt_file_names_its_line(tmp_path: Path, content: bytes, expected: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=expected):
        load_prompts(path, render, None)
