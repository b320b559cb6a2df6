"""Every command on the real default target, with a drafter that guesses at random."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cli_runs import ENVIRONMENT, one_target, run, save_drafter
from paceline.checkpoint.store import DrafterCheckpoint
from paceline.cli import doctor
from paceline.cli.decoding import complete
from paceline.cli.demo import load_demo_prompts
from paceline.cli.output import Transcript, has_colour
from paceline.core.params import SamplingParams
from paceline.core.types import Completion, TokenDelta
from paceline.llm import LLM
from paceline.target.pull import DEFAULT_TARGET
from paceline.target.text import IncrementalDecoder

QUESTION = "What is the capital of France?"
COMMANDS = ("demo", "generate", "chat", "train", "verify", "inspect", "doctor")
RECIPE = """
[drafter]
mask_token_id = 17
num_layers = 1
block_size = 3
[regenerate]
max_new_tokens = 4
prompts_per_shard = 2
[train]
max_steps = 2
blocks_per_step = 2
anchors_per_document = 2
held_out_documents = 1
draft_vocab_size = 64
eval_every = 1
"""


@pytest.fixture(autouse=True, scope="module")
def _one_target() -> Iterator[None]:
    with one_target():
        yield


@pytest.fixture(autouse=True)
def _no_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_drafter(tmp_path_factory.mktemp("drafters") / "random")


@pytest.fixture(scope="module")
def llm(_one_target: None) -> LLM:
    return LLM(drafter=None)


@pytest.fixture(scope="module")
def answer(llm: LLM) -> Completion:
    return llm.chat(QUESTION, SamplingParams(max_new_tokens=6))


def write_stdin(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode()), encoding="utf-8"))


# What costs nothing


def test_help_and_version_load_no_torch() -> None:
    code = (
        "import sys\nfrom paceline.cli.main import main\n"
        f"codes = [main([c, '--help']) for c in {COMMANDS}] + [main(['--help']), main(['--version'])]\n"
        "assert not any(codes), codes\n"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert all(f"  {command} " in ended.stdout for command in COMMANDS)
    assert re.search(r"^paceline \S+$", ended.stdout, re.MULTILINE)


def test_every_command_speaks_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert all("--json" in run(capsys, command, "--help").out for command in COMMANDS)


def test_help_has_a_section_for_each_group(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, "generate", "--help").out
    titles = re.findall(r"^(\w+):$", out, re.MULTILINE)
    assert titles == ["Arguments", "Options", "Sampling", "Pair"]
    own, sampling, pair = re.split(r"^(?:Options|Sampling|Pair):$", out, flags=re.MULTILINE)[1:]
    assert all(flag in own for flag in (" --n N", " --max-new-tokens N", " --json ", " --help "))
    assert all(f" {flag} " in sampling for flag in ("--top-p", "--bad-word", "--json-schema"))
    assert " --drafter WHICH " in pair
    assert "[default: smollm2-135m-instruct]" in " ".join(pair.split())


def test_shipped_prompts_are_ten_different_kinds() -> None:
    prompts = load_demo_prompts(None)
    assert len({p.id for p in prompts}) == len({p.kind for p in prompts}) == len(prompts) == 10


# generate


@pytest.mark.parametrize("how", ["--stream", "--no-stream"])
def test_generate_prints_exactly_the_text(
    how: str, drafter: Path, answer: Completion, capsys: pytest.CaptureFixture[str]
) -> None:
    done = run(capsys, "generate", QUESTION, "--drafter", drafter, "--max-new-tokens", 6, how)
    assert (done.code, done.out) == (0, answer.text)
    assert "6 tokens (length) · τ " in done.err
    assert "tok/s" in done.err


def test_generate_json_is_one_document(
    drafter: Path, answer: Completion, capsys: pytest.CaptureFixture[str]
) -> None:
    done = run(capsys, "generate", QUESTION, "--drafter", drafter, "--max-new-tokens", 6, "--json")
    document = json.loads(done.out)
    assert document["token_ids"] == list(answer.token_ids)
    assert document["text"] == answer.text
    assert document["num_steps"] <= 5
    expected = {"target": DEFAULT_TARGET, "backend": "native", "drafter": str(drafter), "block_size": 4}
    assert expected.items() <= document["pair"].items()


def test_generate_reads_a_raw_prompt_from_stdin(
    llm: LLM, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_stdin(monkeypatch, "Once upon a time\n")
    done = run(capsys, "generate", "-", "--raw", "--drafter", "none", "--max-new-tokens", 5)
    assert done.out == llm.generate("Once upon a time", SamplingParams(max_new_tokens=5))[0].text


def test_same_seed_same_text_with_any_block_size(drafter: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--temperature", "1.5", "--seed", "3", "--max-new-tokens", "5", "--drafter", drafter)
    texts = [run(capsys, "generate", "Hi", *options, "--block-size", size).out for size in (1, 4)]
    assert len(set(texts)) == 1 and texts[0]


@pytest.mark.parametrize(
    "text", ["plain words only", "a 🦊 and naïve 日本語, then 🌊🌊", "\ttabs\nand lines\r\n"]
)
@pytest.mark.parametrize("num_drafted", [0, 1, 2, 3])
def test_colours_change_nothing_but_colour(
    text: str, num_drafted: int, llm: LLM, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    assert has_colour()
    ids, decoder, transcript = llm.codec.encode(text), IncrementalDecoder(llm.codec), Transcript(llm.codec)
    capsys.readouterr()
    for start in range(0, len(ids), 4):
        piece = tuple(ids[start : start + 4])
        transcript.show(TokenDelta("r", piece, decoder.push(piece), min(num_drafted, len(piece))))
    transcript.finish(text)
    out = capsys.readouterr().out
    assert re.sub(r"\x1b\[\d*m", "", out) == text
    assert ("\x1b[32m" in out) == (num_drafted > 0)
    if text == "plain words only" and num_drafted == 1:
        assert out == "\x1b[32mplain\x1b[0m words only"


# chat


def test_chat_keeps_history_until_reset(
    llm: LLM, drafter: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_stdin(
        monkeypatch, "My name is Ada.\n\nWhat is my name?\n/stats\n/reset\nMy name is Ada.\n/exit\nno\n"
    )
    done = run(capsys, "chat", "--drafter", drafter, "--max-new-tokens", 8, "--json", "--system", "Be brief.")
    first, second, again = [json.loads(line) for line in done.out.splitlines()]
    assert done.code == 0
    opening = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "My name is Ada."}]
    asked = [*opening, {"role": "assistant", "content": first["text"]}]
    asked += [{"role": "user", "content": "What is my name?"}]
    assert first["num_prompt_tokens"] == len(llm.render(opening))
    assert second["token_ids"] == list(llm.chat(asked, SamplingParams(max_new_tokens=8)).token_ids)
    assert again["token_ids"] == first["token_ids"]
    assert "answers 2 · tokens" in done.err


def test_chat_says_what_it_does_not_know(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_stdin(monkeypatch, "/rest\nHi")
    done = run(capsys, "chat", "--drafter", "none", "--max-new-tokens", 3)
    assert done.code == 1
    assert "error: unknown command /rest; /reset" in done.err
    assert done.out.endswith("\n") and len(done.out) > 1


# demo


@pytest.fixture
def two_prompts(tmp_path: Path) -> Path:
    rows = [{"id": i, "kind": f"kind [{i}]", "prompt": f"Count to {i}."} for i in "57"]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    return path


def test_demo_compares(drafter: Path, two_prompts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("demo", "--drafter", drafter, "--prompts", two_prompts, "--max-new-tokens", 4)
    done = run(capsys, *arguments, "--json")
    document = json.loads(done.out)
    assert done.code == 0 and document["identical"] is True
    assert document["acceptance_length"] >= 1
    assert document["speedup"] > 0
    assert [row["id"] for row in document["rows"]] == ["5", "7"]
    assert all(row["num_tokens"] == 4 and row["dflash_tokens_per_s"] > 0 for row in document["rows"])
    assert {"pair", "environment"} < set(document)
    assert "2/2 kind [7]: identical, 4 tokens" in done.err


def test_demo_prints_a_table_and_fails_where_a_text_differs(
    drafter: Path, two_prompts: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def one_short(*arguments: Any, plain: bool, **options: Any) -> Completion:
        done = complete(*arguments, plain=plain, **options)
        return replace(done, token_ids=done.token_ids[:-1]) if plain else done

    monkeypatch.setattr("paceline.cli.demo.complete", one_short)
    done = run(capsys, "demo", "--drafter", drafter, "--prompts", two_prompts, "--max-new-tokens", 3)
    assert done.code == 1
    assert all(word in done.out for word in ("kind [5]", "kind [7]", "all", "NO", "×"))
    assert "error: plain decoding and DFlash gave different texts for 5, 7" in done.err


# inspect


def test_inspect_drafter(drafter: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads(run(capsys, "inspect", drafter, "--json").out)
    tensors = DrafterCheckpoint.load(drafter).tensors
    assert document["num_parameters"] == sum(t.numel() for t in tensors.values())
    assert document["tensors"] == {name: list(t.shape) for name, t in tensors.items()}
    assert document["config"]["block_size"] == 4
    words = run(capsys, "inspect", drafter)
    assert re.search(r"^provenance.made_for +tests$", words.out, re.MULTILINE)


def test_inspect_pair_that_fits(drafter: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = run(capsys, "inspect", drafter, "--pair", DEFAULT_TARGET, "--json")
    assert (done.code, json.loads(done.out)["pair"]["fits"]) == (0, True)


def test_inspect_pair_that_does_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = save_drafter(tmp_path / "other", vocab_size=100, num_target_layers=28)
    done = run(capsys, "inspect", other, "--pair", DEFAULT_TARGET)
    assert done.code == 1
    assert "vocab_size: drafter 100, target 49152" in done.out
    assert "num_target_layers: drafter 28, target 30" in done.out


def test_inspect_target(capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads(run(capsys, "inspect", DEFAULT_TARGET, "--json").out)
    assert document["kind"] == "target"
    assert (document["spec"]["num_layers"], document["backend"]) == (30, "native")


# doctor


def test_doctor_reports(
    llm: LLM, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "4096")
    done = run(capsys, "doctor", "--no-probe", "--json")
    report = json.loads(done.out)
    assert done.code == 0
    assert set(report["versions"]) == set(doctor.PACKAGES)
    assert report["target"]["backend"] == "native"
    assert report["chosen"]["dtype"] == str(llm.dtype).removeprefix("torch.")
    assert "row_invariance" not in report
    assert "warning: OMP_NUM_THREADS=4096 is more than the" in done.err


def test_doctor_fetches_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    done = run(capsys, "doctor")
    assert done.code == 0
    assert re.search(r"^cached_targets +none$", done.out, re.MULTILINE)
    assert f"warning: target {DEFAULT_TARGET} was not looked at" in done.err
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_doctor_probes(capsys: pytest.CaptureFixture[str]) -> None:
    rows = json.loads(run(capsys, "doctor", "--json").out)["row_invariance"]
    assert set(rows) == set(doctor.PROBED)
    for probe in rows.values():
        assert probe["verdict"] == ("equal up to near-ties" if probe["differing"] else "bit-exact")


# train


def test_train_ends_with_a_drafter_and_resumes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe, prompts, out = tmp_path / "recipe.toml", tmp_path / "prompts.jsonl", tmp_path / "run"
    recipe.write_text(RECIPE, encoding="utf-8")
    prompts.write_text('{"prompt": "Hi"}\n{"prompt": "Count to five."}\n', encoding="utf-8")
    arguments = ("train", recipe, "--out", out, "--data", prompts, "--json")
    done = run(capsys, *arguments)
    document = json.loads(done.out)
    assert (done.code, document["finished"], document["step"]) == (0, True, 2), done.err
    assert "train 2/2 loss " in done.err
    assert DrafterCheckpoint.load(Path(document["folder"])).config.block_size == 3
    longer = run(capsys, *arguments, "--set", "train.max_steps=3")
    assert json.loads(longer.out)["step"] == 3
    assert longer.err.count("loss") == 1, "steps that were made before are not made again"
    refused = run(capsys, *arguments, "--no-resume")
    assert refused.code == 1 and "holds an earlier run" in refused.err
